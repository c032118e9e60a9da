"""Pretrain a plain ResNet on small photos; fine-tune it on scenes as it is, with AA and with EA added. See README.md.

    python -m experiments.added_attention.run TINY-IMAGENET SCENES RUNS

TINY-IMAGENET has one folder per class in train/ and val/; experiments/scenes/split.py writes SCENES. The same command
continues an incomplete run and skips complete ones.
"""

import argparse
import sys
from pathlib import Path

from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.engine import run_folder, train_imagenet
from experiments.finetune_scenes.run import pick, test, tested_runs

SEEDS = range(5)
PHOTOS = 500  # training photos per class
PRETRAINING = "--img-size 64 --eval-resize 64 --epochs 10 --batch-size 64 --seed 0"
TUNING = "--recipe finetune_resnet --img-size 112 --eval-resize 128 --epochs 6 --batch-size 50"
COMMON = "--device cpu --amp bfloat16 --channels-last --workers 1"
WAYS = {
    "plain": "--model resnet34_050 --attention-lr 1",
    "aa": "--model aa_resnet34_050 --model-kwargs fusion=add",
    "ea": "--model ea_aa_resnet34_050 --model-kwargs fusion=add",
    # the plain network, trained as long as AA takes
    "plain-18": "--model resnet34_050 --attention-lr 1 --epochs 18",
}


def train(options: str, data: Path, output: Path, more: list[str]) -> None:
    """Train a run, or continue it.

    Raises:
        SystemExit: the run was interrupted.
    """
    folders = ["--data-dir", str(data), "--output", str(output)]
    code = train_imagenet.main([*options.split(), *COMMON.split(), *folders, *more])
    if code:
        sys.exit(code)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tiny_imagenet", type=Path)
    parser.add_argument("scenes", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="(default: 0 to 4)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)"
    )
    args, more = parser.parse_known_args(argv)
    data = args.runs / "data"
    pick(args.scenes, data, PHOTOS)  # before hours of pretraining: SCENES may be wrong
    pretrained = args.runs / "pretrained"
    train(f"--model resnet34_050 {PRETRAINING}", args.tiny_imagenet, pretrained, more)
    for seed in args.seeds:
        for way in args.ways:
            output = args.runs / f"{way}-{seed}"
            start = f"--seed {seed} --pretrained-path {pretrained / run_folder.WEIGHTS}"
            train(f"{TUNING} {WAYS[way]} {start}", data, output, more)
            test(output, data)
            rows = tested_runs(args.runs, WAYS, data)
            atomic_write(args.runs / "evidence-runs.csv", csv_text(rows).encode())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
