"""Run one of timm's own scripts with our models registered.

timm's scripts (train.py, validate.py, benchmark.py, onnx_export.py, ...) are not in its package but in its repository.
They know the models that are registered when they start:

    ea-vision timm pytorch-image-models/train.py DATA --model ea_aa_resnet50 --num-classes 10
    ea-vision timm pytorch-image-models/validate.py DATA --model ea_aa_resnet50 --checkpoint model.safetensors
    torchrun --nproc-per-node 8 -m ea_vision timm pytorch-image-models/train.py DATA --model ea_aa_resnet50
"""

import runpy
import sys
from pathlib import Path

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError


def main(argv: list[str] | None = None) -> int:
    """Run the script that the first argument names with the other arguments, as Python would."""
    script, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if script in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if not Path(script).is_file():
        raise UsageError(
            f"there is no script {script}; timm's are in the repository pytorch-image-models"
        )
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)  # as when Python runs the script itself
    runpy.run_path(script, run_name="__main__")
    return 0
