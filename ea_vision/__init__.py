"""ea_vision: vision networks whose attention maps evolve from layer to layer.

Importing the package registers the models with timm; nothing else is loaded:

    import ea_vision, timm
    model = timm.create_model("ea_aa_resnet50")

Modules named in the environment variable EA_VISION_IMPORT, separated by commas, are imported with it, so that commands
and their processes know the families and evolutions of your own files.
"""

import importlib
import os
import sys
from pathlib import Path

from ea_vision.base.errors import UsageError

__version__ = "1.0.0"

# The list of commands and --version do without torch and timm, which take seconds to import.
_COMMAND = (
    Path(sys.argv[0]).stem == "ea-vision" or sys.argv[0] == "-m" and "ea_vision" in sys.orig_argv
)
_LISTING = _COMMAND and sys.argv[1:] in ([], ["-h"], ["--help"], ["--version"])

try:
    if not _LISTING:
        from ea_vision import models  # registers the networks
        from ea_vision.deployment import deploy
        from ea_vision.models import evolve, unevolve
        from ea_vision.recorder.recording import record_attention

        for _module in filter(None, os.environ.get("EA_VISION_IMPORT", "").split(",")):
            try:
                importlib.import_module(_module)
            except (ModuleNotFoundError, TypeError) as _error:  # of `..name`
                _named = getattr(_error, "name", None) in (_module, _module.partition(".")[0])
                if not _named and not _module.startswith("."):
                    raise
                raise UsageError(
                    f"EA_VISION_IMPORT must name modules that can be imported, got {_module!r}: "
                    f"{_error}"
                ) from _error
except (KeyboardInterrupt, UsageError) as _error:
    if not _COMMAND:
        raise
    print(f"error: {str(_error) or 'interrupted'}", file=sys.stderr)
    sys.exit(2 if isinstance(_error, UsageError) else 130)


def load(target: str, **kwargs):
    """Load a network; see `ea_vision.zoo.loaded.load`."""
    from ea_vision.zoo.loaded import load

    return load(target, **kwargs)


def preprocess(model, image, processor=None, mean=None, std=None):
    """Return a network's input (1, 3, H, W) for an image: that of its evaluation, predict, the probe and the figures.

    Args:
        model: a network of timm's, torchvision's or transformers'; or a target as `load` takes it.
        image: a file, a PIL image or an array (H, W, 3).
        processor: an image processor of transformers, its path or name; default: the one saved with the weights.
        mean, std: three numbers each, for images in 0..1; default: the network's.

    Raises:
        UsageError: no such model, no image, or a processor that does not make one image of three channels.
    """
    from ea_vision.recorder.inputs import as_image
    from ea_vision.zoo.loaded import as_model

    loaded = as_model(model, processor=processor, mean=mean, std=std)
    return loaded.input_of(as_image(image))[None]


def from_pretrained(folder: str, **kwargs):
    """Load a model of transformers that `save_pretrained` wrote, with its evolution.

    Args:
        folder: a folder, or a name on the hub.
        **kwargs: those of transformers' `from_pretrained`.

    Raises:
        UsageError: the configuration names no evolution.
    """
    from ea_vision.models import huggingface

    return huggingface.from_pretrained(folder, **kwargs)


def __getattr__(name: str):
    """Import ea_vision.visualize when it is first named: training needs no matplotlib."""
    if name != "visualize":
        raise AttributeError(f"module 'ea_vision' has no attribute {name!r}")
    return importlib.import_module("ea_vision.visualize")
