"""Every module of experiments/ can be imported: the names that it takes from the package exist."""

import importlib

import pytest

from tests.process import ROOT

FOLDER = ROOT / "experiments"
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(FOLDER.rglob("*.py"))
]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported(name):
    importlib.import_module(name)
