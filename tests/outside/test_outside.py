"""A family in one outside file and an evolution in another get all features. The tests run in a separate process,
because both stay registered."""

from pathlib import Path

import pytest

from tests.process import python

HERE = Path(__file__).parent


@pytest.mark.slow
def test_an_outside_family_and_evolution_get_everything():
    words = (
        "-m pytest -q -p no:cacheprovider tests/outside/checks.py tests/models/test_conformance.py"
    )
    modules = "tests.outside.tiny_attn,tests.outside.residual_maps"
    done = python(*words.split(), "-k", "checks or tiny", EA_VISION_IMPORT=modules)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tiny_attn.py", "residual_maps.py"])
def test_they_need_public_names_alone(name):
    lines = (HERE / name).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("from ea_", "import ea_"))]
    assert imports
    assert not any("._" in line for line in imports)
