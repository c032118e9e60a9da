"""Compare the options of timm's train.py with those of train-imagenet, for timm_options.md.

    python experiments/timm_options.py pytorch-image-models/train.py

prints the page's tables: options with the same name, options with another name or meaning here, and options that
train-imagenet does not have. It reads timm's own parser, so an option that timm adds is listed as missing until it is
named here.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from ea_vision.base.errors import exit_code
from ea_vision.engine.config import make_parser
from ea_vision.engine.train_imagenet import ImageNetConfig

# Options with the same name but another meaning or default.
UNLIKE = {
    "lr": "rate for `--lr-base-size` images (timm's `--lr-base`); not scaled if that is 0",
    "output": "the run folder itself",
    "amp": "bfloat16; in timm float16",
    "dist-bn": "`broadcast`; in timm `reduce`",
    "resume": "`auto` continues, a path names a checkpoint",
    "sched": "linear, cosine, multistep, step, constant; by update",
    "tta": "`mirror` or `six`",
    "decay-epochs": "30; in timm 90",
    "interpolation": "also used in training",
}
OTHERWISE = {
    "data": "--data-dir",
    "initial-checkpoint": "--pretrained-path",
    "input-size": "--img-size",
    "crop-pct": "--eval-resize PIXELS",
    "validation-batch-size": "--eval-batch-size",
    "torchcompile": "--compile",
    "torchcompile-mode": "--compile-mode",
    "amp-dtype": "--amp DTYPE",
    "opt-eps": "--opt-kwargs eps=X",
    "opt-betas": "--opt-kwargs betas=[X,Y]",
    "lr-base": "--lr",
    "scale": "--crop-scale LEAST",
    "no-aug": "--crop-scale 1 --hflip 0",
    "train-interpolation": "--interpolation",
    "drop": "--model-kwargs drop_rate=X",
    "drop-path": "--model-kwargs drop_path_rate=X",
    "drop-block": "--model-kwargs drop_block_rate=X",
    "gp": "--model-kwargs global_pool=X",
    "epoch-repeats": "--epochs",
    "model-ema": "--model-ema-decay X",
    "log-interval": "--log-steps",
    "val-interval": "--eval-epochs",
    "recovery-interval": "--checkpoint-steps",
    "checkpoint-hist": "--snapshot-epochs",
    "experiment": "--output",
    "log-wandb": "--wandb PROJECT",
    "wandb-project": "--wandb PROJECT",
    "train-img-sizes": "--first-img-size, --grow-epochs",
    "config": "--recipe FILE",
    "sched-on-updates": "always",
    "wandb-resume-id": "kept in the run folder",
    "warmup-prefix": "always, for `cosine` and `linear`",
    "pin-mem": "always on CUDA",
}


def names_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the longest name of each option of a parser, without dashes and without --help."""
    names = []
    for action in parser._actions:
        if action.dest != "help":
            longest = max(action.option_strings or [action.dest], key=len)
            names.append(longest.lstrip("-"))
    return names


def section(timms: argparse.ArgumentParser) -> str:
    """Return the tables of timm_options.md for timm's parser."""
    parser = make_parser(ImageNetConfig, "", "")
    ours = {flag.lstrip("-") for flag in parser._option_string_actions}
    names = names_of(timms)
    same = [name for name in names if name in ours and name not in UNLIKE]
    missing = [name for name in names if name not in ours and name not in OTHERWISE]
    lines = [
        f"Same name, same meaning ({len(same)}): {listed(same)}.",
        "",
        "| timm | here |",
        "| --- | --- |",
    ]
    for name, said in {**UNLIKE, **OTHERWISE}.items():
        if name in names:
            here = f"`{said}`" if said.startswith("-") else said
            lines.append(f"| `--{name}` | {here} |")
    lines += ["", f"Not here, and refused ({len(missing)}): {listed(missing)}.", ""]
    return "\n".join(lines)


def listed(names: list[str]) -> str:
    return ", ".join(f"`--{name}`" for name in names)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "script", type=Path, metavar="TRAIN.PY", help="train.py in a checkout of timm"
    )
    spec = importlib.util.spec_from_file_location("timms_train", parser.parse_args(argv).script)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    print(section(script.parser), end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
