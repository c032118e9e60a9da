"""What the tests of experiments share: scripts that handle SIGTERM leave the handler to the process that runs them."""
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_handler() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)
