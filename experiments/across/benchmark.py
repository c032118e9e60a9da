"""Times of every mechanism beside timm's plain network, forward and training step, interleaved.

    python -m experiments.across.benchmark experiments/results/across/benchmark.csv      # 10 minutes on a free core
    python -m experiments.across.benchmark experiments/results/across/verdict-times.csv --verdict

Medians of processor time over the repeats, one thread, float32; AdamW. vit_small_patch16_224 is timm's network and
`ea_vision.evolve` of it at the identity start; the small ViT is the verdict's. --verdict measures the verdict's own
networks in bfloat16, each by its fastest code. For timm's own attention that is the one that is not fused (torch's
fused one takes twice as long in bfloat16 on a CPU).
"""

import argparse
import time
from pathlib import Path

import pandas as pd
import timm
import torch
from timm.layers import set_fused_attn
from torch import nn

import ea_vision
from ea_vision.base.networks import lay_out
from ea_vision.base.provenance import hardware
from ea_vision.benchmark import Steps, interleaved
from experiments.across.plan import NETWORKS, UNFUSED, kinds_of, mechanism

KINDS = ("residual", "ea", "pa", "talking_heads", "reattention", "refiner", "mta", "conv2d")
SETTINGS = {"vit_small_patch16_224": (224, 2), "vit_mini_patch4_32": (32, 128)}  # pixels, images


def networks(name: str) -> dict[str, nn.Module]:
    """Return the networks by kind, "plain" first."""
    plain = timm.create_model(name)
    if name == "vit_small_patch16_224":
        return {"plain": plain, **{kind: ea_vision.evolve(plain, kind) for kind in KINDS}}
    kinds = {kind: dict(evolution=kind) for kind in KINDS}
    extra = {"token_conv": dict(token_conv="paper"), "value_residual": dict(value_residual=True)}
    return {
        "plain": plain,
        **{kind: timm.create_model(name, **options) for kind, options in (kinds | extra).items()},
    }


def verdict_networks(name: str) -> dict[str, nn.Module]:
    """Return the verdict's networks by kind, "plain" first, each with its fastest code."""
    network = NETWORKS[name]
    keywords = {**network.keywords, "num_classes": network.classes}
    made = {}
    for kind in ("plain", *kinds_of(name)):
        set_fused_attn(kind not in UNFUSED)
        made[kind] = timm.create_model(
            network.model, **keywords, **({} if kind == "plain" else mechanism(name, kind))
        )
    return made


def rows_of(
    name: str, made: dict[str, nn.Module], images: torch.Tensor, amp: str, repeats: int
) -> list[dict]:
    """Return a row of the table for each network: times of both steps, and their ratios to the plain one's."""
    steps = {kind: Steps(network, images, amp, "adamw") for kind, network in made.items()}
    seconds = interleaved(
        {
            (kind, phase): call
            for kind, of in steps.items()
            for phase, call in (("forward", of.infer), ("train", of.train))
        },
        repeats,
        clock=time.process_time,
    )
    return [
        {
            "network": name,
            "batch": len(images),
            "kind": kind,
            **{
                key: value
                for phase in ("forward", "train")
                for key, value in (
                    (f"{phase}_ms", round(1e3 * seconds[kind, phase], 1)),
                    (f"{phase}_ratio", round(seconds[kind, phase] / seconds["plain", phase], 2)),
                )
            },
        }
        for kind in made
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verdict", action="store_true", help="the verdict's setting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    under = {
        "hardware": hardware(torch.device("cpu"), 1),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "ea_vision": ea_vision.__version__,
        "repeats": args.repeats,
    }
    rows = []
    amp, layout = (
        ("bfloat16", torch.channels_last) if args.verdict else ("none", torch.contiguous_format)
    )
    for name, (side, batch) in (
        {name: (32, 128) for name in NETWORKS} if args.verdict else SETTINGS
    ).items():
        torch.manual_seed(0)
        images = torch.randn(batch, 3, side, side).contiguous(memory_format=layout)
        made = (verdict_networks if args.verdict else networks)(name)
        made = {kind: lay_out(network, layout) for kind, network in made.items()}
        rows += rows_of(name, made, images, amp, args.repeats)
        pd.DataFrame(rows).assign(**under).to_csv(args.csv, index=False)
        print(args.csv.read_text(), end="", flush=True)


if __name__ == "__main__":
    main()
