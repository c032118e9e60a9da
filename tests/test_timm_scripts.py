"""`python -m ea_vision.timm` runs a script that knows our models."""
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, helper, timm
print(timm.is_model("ea_aa_resnet50"), __name__, sys.argv[1:], helper.VALUE)
"""


def run(*argv: str, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "TIMM_SCRIPTS": str(folder)}
    return subprocess.run([sys.executable, "-m", "ea_vision.timm", *argv], capture_output=True, text=True, env=env)


def test_a_script_sees_our_models_its_arguments_and_its_neighbours(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VALUE = 7")
    done = run("train", "DATA", "--model", "ea_aa_resnet50", folder=tmp_path)
    assert done.stdout == "True __main__ ['DATA', '--model', 'ea_aa_resnet50'] 7\n", done.stderr


def test_a_missing_script_is_one_line(tmp_path):
    done = run("validate", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "validate.py" in done.stderr
