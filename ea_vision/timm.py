"""Run one of timm's own scripts with our models registered.

timm's scripts (train.py, validate.py, benchmark.py, onnx_export.py, ...) do not come with its package, but with its
repository. They know the models that are registered when they start, so this imports ea_vision first and then runs the
script as if it had been called itself:

    ea-vision timm pytorch-image-models/train.py DATA --model ea_aa_resnet50 --num-classes 10
    ea-vision timm pytorch-image-models/validate.py DATA --model ea_aa_resnet50 --checkpoint model.safetensors
    torchrun --nproc-per-node 8 -m ea_vision timm pytorch-image-models/train.py DATA --model ea_aa_resnet50

A name without a path (`ea-vision timm train ...`) is looked for in the folder that the environment variable
TIMM_SCRIPTS names, else in the current one.
"""
import os
import runpy
import sys
from pathlib import Path

import ea_vision  # noqa: F401  (registers the models)


def find_script(name: str) -> Path:
    """The script's file.

    Raises:
        FileNotFoundError: none of the places has it.
    """
    folder = Path(os.environ.get("TIMM_SCRIPTS", "."))
    file = name if name.endswith(".py") else f"{name}.py"
    places = [Path(name), folder / name, folder / file]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"no script {name!r}: looked for {', '.join(map(str, dict.fromkeys(places)))}")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    try:
        script = find_script(argv[0])
    except FileNotFoundError as error:
        print(f"error: {error}; timm's scripts are in the repository pytorch-image-models", file=sys.stderr)
        return 2
    sys.argv = [str(script), *argv[1:]]
    sys.path[0] = str(script.parent.resolve())  # as when Python runs the script itself
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
