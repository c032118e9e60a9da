"""The built wheel is self-contained: its files, and its commands, which run outside the checkout with it alone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.process import ROOT

pytest.importorskip("hatchling", reason="needs the build backend: pip install hatchling")

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
    "models --sizes ea_conv_transformer_cifar",
):
    assert main(command.split()) == 0, command
"""


def run(command, **options):
    """Run a command; return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(words):
    return run([sys.executable, *words.split()])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python(f"-m build --wheel --no-isolation --outdir {folder} {ROOT}")
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    python(f"-m pip install --quiet --no-deps --no-index --target {folder} {wheel}")
    return folder


def test_it_holds_the_package_and_the_weights_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    files = "git ls-files --cached --others --exclude-standard ea_vision weights"
    listed = run(files.split(), cwd=ROOT).splitlines()
    package = {name for name in listed if name.startswith("ea_vision/") and (ROOT / name).is_file()}
    weights = {f"ea_vision/{name}" for name in listed if Path(name).match("weights/*.safetensors")}
    cards = {name.replace(".safetensors", ".md") for name in weights}
    assert held == package | weights | cards
    assert len(weights) >= 3
    assert wheel.stat().st_size < 60e6
    for suffix in (".c", ".yaml", ".html", ".css", ".js"):
        assert any(name.endswith(suffix) for name in held)


@pytest.mark.slow
def test_its_commands_run_outside_the_checkout(installed, tmp_path):
    process_options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(installed)}}
    out = run([sys.executable, "-c", COMMANDS], **process_options)
    assert f"imported {installed / 'ea_vision' / '__init__.py'}" in out
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    names = "run heads.png shipped.png page.html classes.json"
    assert set(sizes) == set(names.split())
    assert sizes["page.html"] > 50_000
    assert (tmp_path / "run" / "results.json").is_file()
    assert "heatmap" in run([installed / "bin" / "ea-vision", "--help"], **process_options)
