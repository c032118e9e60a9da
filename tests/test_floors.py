"""The package's floors: every import points downwards, and docs/architecture.md lists them."""

import ast
import re
from pathlib import Path

import pytest

import ea_vision
from tests.process import ROOT as CHECKOUT
from tests.process import python

ROOT = Path(ea_vision.__file__).parent
# by room, those that it imports, as the page says
PAGE = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]*)\|$", PAGE, re.MULTILINE))
FLOORS = list(TABLE)


def floor_of(parts):
    """Return the floor of a module; commands are above all rooms."""
    return FLOORS.index(parts[1]) if parts[1] in FLOORS else len(FLOORS)


def imports_of(path, inside=True):
    """Return our modules that a file imports (`from a import b` gives a and a.b). inside: also imports in functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = []
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    ours = [name for name in modules if name.startswith("ea_vision.")]
    return [name.split(".") for name in ours if name != "ea_vision.__version__"]


def test_every_import_points_downwards():
    imports = 0
    for path in ROOT.rglob("*.py"):
        own_floor = floor_of(path.relative_to(ROOT.parent).with_suffix("").parts)
        for module in imports_of(path):
            imports += 1
            assert floor_of(module) <= own_floor, f"{path} imports {'.'.join(module)}"
    assert imports > 100


def test_every_room_is_on_a_floor():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"recipes"} <= set(FLOORS), "a new folder needs its place in FLOORS"


def test_the_page_says_what_each_room_imports():
    rooms = {room: set() for room in FLOORS}
    for room, others in rooms.items():
        for path in (ROOT / room).rglob("*.py"):
            others.update(module[1] for module in imports_of(path))
        others.discard(room)
    assert rooms == {room: set(re.findall(r"\w+", text)) for room, text in TABLE.items()}
    for path in re.findall(r"`(\w+/\w+\.py)`", PAGE):
        assert (ROOT / path).is_file() or (CHECKOUT / path).is_file(), path


@pytest.mark.parametrize(
    "imports, most",
    [("import ea_vision.visualize", 50), ("from ea_vision.visualize import plot_heatmap", 85)],
)
def test_a_figure_loads_only_what_it_needs(imports, most):
    code = (
        f"{imports}; import sys; print(*(name for name in sys.modules if name[:9] == 'ea_vision'))"
    )
    modules = python("-c", code).stdout.split()
    assert 0 < len(modules) <= most
    others = (
        "ea_vision.detection",
        "ea_vision.deployment",
        "ea_vision.engine",
        "ea_vision.data.tars",
    )
    assert not [name for name in modules if name.startswith(others)]


def test_predict_does_not_wait_for_what_trains():
    loaded = set()
    left = [["ea_vision"], ["ea_vision", "predict"]]
    while left:
        path = ROOT.joinpath(*left.pop()[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file() and path not in loaded:
            loaded.add(path)
            left += imports_of(path, inside=False)
    names = {path.relative_to(ROOT).as_posix() for path in loaded}
    assert {"zoo/loaded.py", "zoo/source.py", "zoo/create.py"} <= names
    assert not [name for name in names if name.startswith(("engine/", "detection/"))]
