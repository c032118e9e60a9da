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
from ea_vision.base.lazy import import_later

__version__ = "1.0.0"

# The list of commands and --version do without torch and timm, which take seconds to import.
_COMMAND = (
    Path(sys.argv[0]).stem == "ea-vision" or sys.argv[0] == "-m" and "ea_vision" in sys.orig_argv
)
_LISTING = _COMMAND and sys.argv[1:] in ([], ["-h"], ["--help"], ["--version"])

try:
    if not _LISTING:
        from ea_vision import models  # registers the networks
        from ea_vision.models import evolve, unevolve

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


# training needs neither these nor matplotlib
__getattr__, __dir__ = import_later(
    __name__,
    {
        "deploy": "ea_vision.deployment:deploy",
        "from_pretrained": "ea_vision.models.huggingface:from_pretrained",
        "load": "ea_vision.zoo.loaded:load",
        "preprocess": "ea_vision.zoo.loaded:preprocess",
        "record_attention": "ea_vision.recorder.recording:record_attention",
        "visualize": "ea_vision.visualize",
    },
)
