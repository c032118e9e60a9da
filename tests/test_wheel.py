"""The built wheel is enough: what it holds, and its commands, run outside the checkout on nothing but the wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs the build backend: pip install hatchling")

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = """
import ea_vision
from ea_vision.__main__ import main

print("imported", ea_vision.__file__)
for command in (
    "train-cifar --dataset digits --epochs 1 --img-size 8 --batch-size 500 --output run "
    "--model ea_conv_transformer_cifar --model-kwargs widths=[8,8,16,16]",
    "heatmap --model run --layers 1 --heads mean --dpi 50 -o heads.png digits#0",
    "heatmap --layers 1 --heads mean --dpi 50 -o shipped.png digits#0",  # by the weights in the wheel
    "explore --model run -o page.html digits#0",
    "predict ea_conv_transformer_cifar digits#0 --json classes.json",
    "models --sizes ea_conv_transformer_cifar --csv summary.csv",
):
    assert main(command.split()) == 0, command
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            folder,
            wheel,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(command: list, folder: Path, installed: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_the_package_and_the_weights_and_nothing_else(wheel):
    held = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if not name.split("/")[0].endswith(".dist-info")
    }
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "ea_vision", "weights"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    package = {name for name in listed if name.startswith("ea_vision/") and (ROOT / name).is_file()}
    weights = {f"ea_vision/{name}" for name in listed if Path(name).match("weights/*.safetensors")}
    cards = {name.replace(".safetensors", ".md") for name in weights}
    assert held == package | weights | cards and len(weights) >= 3
    assert wheel.stat().st_size < 60e6
    for suffix in (".c", ".yaml", ".html", ".css", ".js"):
        assert any(name.endswith(suffix) for name in held)


@pytest.mark.slow
def test_its_commands_run_outside_the_checkout(installed, tmp_path):
    out = run([sys.executable, "-c", COMMANDS], tmp_path, installed)
    assert f"imported {installed / 'ea_vision' / '__init__.py'}" in out
    made = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(made) == {
        "run",
        "heads.png",
        "shipped.png",
        "page.html",
        "classes.json",
        "summary.csv",
    }
    assert made["page.html"] > 50_000 and (tmp_path / "run" / "results.json").is_file()
    assert (tmp_path / "summary.csv").read_text().count("ea_conv_transformer_cifar") == 1
    assert "heatmap" in run([installed / "bin" / "ea-vision", "--help"], tmp_path, installed)
