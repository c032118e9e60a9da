"""A family in one outside file and an evolution in another get everything; in a process of their own, for they stay
registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_an_outside_family_and_evolution_get_everything():
    root = str(HERE.parents[1])
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = [str(HERE / "checks.py"), "tests/models/test_conformance.py"]
    command = [*pytest_here, *files, "-k", "checks or tiny"]
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "EA_VISION_IMPORT": "tests.outside.tiny_attn,tests.outside.residual_maps",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tiny_attn.py", "residual_maps.py"])
def test_they_need_public_names_alone(name):
    lines = (HERE / name).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("from ea_", "import ea_"))]
    assert imports
    assert not any("._" in line for line in imports)
