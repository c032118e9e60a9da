"""The table of docs/record.md is what the recorder and `evolve` do with the architectures of the installed timm."""

import pytest

from experiments.architectures import evolves, known, lacking, on_page, verdict


@pytest.mark.slow
def test_the_table_of_architectures_is_what_the_recorder_does():
    table = on_page()
    assert len(table) > 50
    expected = {name: table[name] for name in known(table)}
    assert {name: (verdict(name), evolves(name)) for name in expected} == expected
    new = {name: verdict(name) for name in lacking()}
    assert not any(new.values()), new
