"""The package's floors: every import points downwards."""

import ast
from pathlib import Path

import ea_vision

ROOT = Path(ea_vision.__file__).parent
FLOORS = (
    "base",
    "ops",
    "layers",
    "models",
    "deployment",
    "data",
    "engine",
    "detection",
    "recorder",
    "visualize",
)


def floor_of(parts: list[str]) -> int:
    """How high a module lives; the commands are above all rooms."""
    return FLOORS.index(parts[1]) if parts[1] in FLOORS else len(FLOORS)


def imports_of(path: Path, inside: bool = True) -> list[list[str]]:
    """The modules of ours that a file imports, at its top or also inside functions; of `from a import b` a.b, too."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [
        name.split(".")
        for name in found
        if name.startswith("ea_vision.") and name != "ea_vision.__version__"
    ]


def test_every_import_points_downwards():
    pairs = [
        (path.relative_to(ROOT.parent), module)
        for path in ROOT.rglob("*.py")
        for module in imports_of(path)
    ]
    upwards = [
        f"{path} imports {'.'.join(module)}"
        for path, module in pairs
        if floor_of(module) > floor_of([*path.with_suffix("").parts])
    ]
    assert len(pairs) > 100 and not upwards, upwards


def test_every_room_is_on_a_floor():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"recipes"} <= set(FLOORS), "a new folder needs its place in FLOORS"


def test_predict_does_not_wait_for_what_trains():
    loaded, left = set(), [["ea_vision"], ["ea_vision", "predict"]]
    while left:
        path = ROOT.joinpath(*left.pop()[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file() and path not in loaded:
            loaded.add(path)
            left += imports_of(path, inside=False)
    names = {path.relative_to(ROOT).as_posix() for path in loaded}
    assert {
        "recorder/loading.py",
        "deployment/fold.py",
        "engine/run_folder.py",
        "detection/predict.py",
    } <= names
    assert not names & {
        "engine/train.py",
        "engine/command.py",
        "engine/config.py",
        "detection/train.py",
    }
