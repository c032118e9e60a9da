"""A refusal: an error of one line that names the option and what was received."""

from contextlib import contextmanager

import pytest

from ea_vision.base.errors import UsageError


@contextmanager
def refused(pattern, error=UsageError):
    """Require that the code raises this error, in one line that fits the pattern."""
    with pytest.raises(error, match=pattern) as info:
        yield info
    assert "\n" not in str(info.value)
