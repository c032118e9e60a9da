"""A core installation works; what needs an extra says which one, in one line."""

import subprocess
import sys

import pytest

from ea_vision.data.small_images import load_dataset
from ea_vision.engine.step_log import StepLog
from ea_vision.engine.train_cifar import CifarConfig
from tests.refused import refused

CORE = """
import importlib, pkgutil, sys

for name in ("sklearn", "scipy", "pycocotools", "onnx", "tensorboard", "wandb"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
import ea_vision
for module in pkgutil.walk_packages(ea_vision.__path__, "ea_vision."):
    if module.name != "ea_vision.__main__":
        importlib.import_module(module.name)

import torch
from ea_vision.engine.evaluate import Evaluation
from ea_vision.engine.pictures import confusion_png
for classes in (3, 50):
    result = Evaluation(9, 90.0, 100.0, 0.1, torch.eye(classes).double(), torch.empty(0))
    assert confusion_png(result, [f"class {number}" for number in range(classes)], "net")
"""


def test_the_core_needs_no_extra():
    subprocess.run([sys.executable, "-c", CORE], check=True)


@pytest.mark.parametrize(
    "use, package, extra",
    [
        (lambda folder: load_dataset("digits", "", 8, False), "sklearn", "data"),
        (lambda folder: StepLog(folder, CifarConfig(wandb="trial"), 0), "wandb", "logging"),
        (
            lambda folder: StepLog(folder, CifarConfig(tensorboard=True), 0),
            "tensorboard",
            "logging",
        ),
    ],
    ids=["digits", "wandb", "tensorboard"],
)
def test_a_missing_package_is_an_error_that_names_its_extra(
    use, package, extra, tmp_path, monkeypatch
):
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with refused(rf"{package}.*pip install .*the extra {extra}"):
        use(tmp_path)
