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

__version__ = "0.2.0"

# `ea-vision`, `ea-vision --help` and the same by `python -m ea_vision` only list the commands: without torch and timm.
_LISTING = sys.argv[1:] in ([], ["-h"], ["--help"]) and (
    Path(sys.argv[0]).stem == "ea-vision" or sys.argv[0] == "-m" and "ea_vision" in sys.orig_argv[-2:])

try:
    if not _LISTING:
        from ea_vision import models as models  # registers the networks
        from ea_vision.analysis.recording import record_attention as record_attention
        from ea_vision.deployment import deploy as deploy
        from ea_vision.models import evolve as evolve
        from ea_vision.models import unevolve as unevolve

        for _module in filter(None, os.environ.get("EA_VISION_IMPORT", "").split(",")):
            importlib.import_module(_module)
except KeyboardInterrupt:
    if Path(sys.argv[0]).name not in ("-m", "ea-vision", "train_cifar.py", "train_imagenet.py"):
        raise
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)
