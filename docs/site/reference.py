"""What the API reference documents: pages, and on each page the names that a user writes, with the place of each."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The functions that README and the guides begin with, by the name under which they are imported.
START = {
    "ea_vision.load": "ea_vision.zoo.loaded.load",
    "ea_vision.preprocess": "ea_vision.zoo.loaded.preprocess",
    "ea_vision.evolve": "ea_vision.models.evolve.evolve",
    "ea_vision.unevolve": "ea_vision.models.evolve.unevolve",
    "ea_vision.from_pretrained": "ea_vision.models.huggingface.from_pretrained",
    "ea_vision.record_attention": "ea_vision.recorder.recording.record_attention",
    "ea_vision.deploy": "ea_vision.deployment.deploy.deploy",
    "ea_vision.visualize.plot_heatmap": "ea_vision.visualize.heatmap.plot_heatmap",
    "ea_vision.visualize.plot_strip": "ea_vision.visualize.strip.plot_strip",
    "ea_vision.visualize.show_page": "ea_vision.visualize.explore.show_page",
}
OWN_FAMILY = (
    "AttnStage ChainBuilder ChainedNetwork HeadedNetwork Network build_network get_network list_networks "
    "register_networks to_size"
).split()
# Page: its title, and modules; a module gives its introduction and the public names that no page before has.
PAGES = {
    "start": ("Start here", []),
    "models": ("Networks", ["ea_vision.models", "ea_vision.models.evolve_resnet"]),
    "own": (
        "A family or training of your own",
        [
            "ea_vision.engine.run",
            "ea_vision.engine.classification",
            "ea_vision.engine.train_cifar",
            "ea_vision.engine.train_imagenet",
            "ea_vision.engine.train",
        ],
    ),
    "layers": ("Layers and evolutions", ["ea_vision.layers"]),
    "ops": ("Operators", ["ea_vision.ops", "ea_vision.ops.reference"]),
    "recorder": (
        "Record",
        [
            "ea_vision.recorder.recording",
            "ea_vision.recorder.maps",
            "ea_vision.recorder.quantities",
        ],
    ),
    "visualize": ("Figures", ["ea_vision.visualize", "ea_vision.visualize.figure_request"]),
    "deployment": ("Deploy and export", ["ea_vision.deployment", "ea_vision.deployment.files"]),
    "detection": ("Detection", ["ea_vision.detection.model", "ea_vision.detection.predict"]),
    "base": ("Errors", ["ea_vision.base.errors"]),
}
# Modules of which only these names are for users.
ONLY = {
    "ea_vision.engine.run": ["main"],
    "ea_vision.engine.classification": ["ClassificationTrainer"],
    "ea_vision.engine.train_cifar": ["SmallImages"],
    "ea_vision.engine.train_imagenet": ["ClassFolders"],
    "ea_vision.engine.train": ["Trainer"],
    "ea_vision.models.evolve_resnet": ["evolve_resnet"],
    "ea_vision.visualize.figure_request": [],
    "ea_vision.deployment.files": ["sealed"],
    "ea_vision.ops": ["Implementation", "Problem", "evolving_attention", "use_implementation"],
    "ea_vision.ops.reference": ["attention_of", "mask_logits"],
    "ea_vision.base.errors": ["UsageError", "RunError", "exit_code"],
}


def public_names(module: str) -> dict[str, str]:
    """Return the public names that a package imports from its own files, or that a file defines, with their places."""
    path = ROOT / module.replace(".", "/")
    is_package = path.is_dir()
    text = (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text("utf-8")
    places = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and is_package:
            if re.match(r"ea_vision\.(?!base)", str(node.module)):
                for alias in node.names:
                    places[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            places[node.name] = f"{module}.{node.name}"
        elif is_package and ast.unparse(node).startswith("__getattr__, __dir__ = import_later"):
            _, later = node.value.args  # of import_later
            for name, place in ast.literal_eval(later).items():
                places[name] = place.replace(":", ".")
    only = ONLY.get(module)
    return {
        name: places[name]
        for name in sorted(places)
        if not name.startswith("_") and not name.isupper() and (only is None or name in only)
    }


def entries() -> dict[str, dict[str, str]]:
    """Return by page the names that it documents, as users import them, and where each is defined; none twice."""
    by_page = {"start": START}
    documented = set(START.values())
    for page, (_, modules) in PAGES.items():
        names = {}
        for module in modules:
            for name, place in public_names(module).items():
                if place not in documented:
                    documented.add(place)
                    names[f"{module}.{name}"] = place
        by_page.setdefault(page, names)
    own = {
        name: by_page["models"].pop(name) for name in [f"ea_vision.models.{n}" for n in OWN_FAMILY]
    }
    by_page["own"] = own | by_page["own"]
    return by_page
