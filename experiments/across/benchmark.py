"""Time every mechanism beside timm's plain network: forward pass and training step, interleaved.

    python -m experiments.across.benchmark experiments/results/across/benchmark.csv      # 10 minutes on a free core
    python -m experiments.across.benchmark experiments/results/across/verdict-times.csv --verdict

Medians of processor time over the repeats, one thread, float32, AdamW; the networks of a block run in turns.
For vit_small_patch16_224 the networks are timm's and `ea_vision.evolve` of it at the identity start; the small ViT is
the verdict's. --verdict times the verdict's own networks in bfloat16, all in one block, each by its fastest code;
--verdict --alone those without a mechanism (fourth-times.csv). For
timm's own attention this is the unfused code: torch's fused attention takes twice as long in bfloat16 on a CPU.
"""

import argparse
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pandas as pd
import timm
import torch
from timm.layers import set_fused_attn
from torch import nn

import ea_vision
from ea_vision.base.provenance import hardware
from ea_vision.models.modes import lay_out
from experiments.across.plan import NETWORKS, UNFUSED, kinds_of, mechanism
from experiments.benchmark import Steps, interleaved

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


def verdict_networks(name: str, alone: bool = False) -> dict[str, nn.Module]:
    """Return the verdict's networks by kind, "plain" first, each with its fastest code; alone: no other kind."""
    network = NETWORKS[name]
    import_module(network.module)
    keywords = {**network.keywords, "num_classes": network.classes}
    models = {}
    for kind in ("plain",) if alone else ("plain", *kinds_of(name)):
        set_fused_attn(kind not in UNFUSED)
        models[kind] = timm.create_model(
            network.model, **keywords, **({} if kind == "plain" else mechanism(name, kind))
        )
    return models


def rows_of(
    made: dict[tuple[str, str], nn.Module], images: torch.Tensor, amp: str, repeats: int
) -> list[dict]:
    """Time a training step and a forward pass of all networks in turns.

    Args:
        made: networks by (name, kind); each name has the kind "plain".
        images: the batch, (B, 3, H, W).

    Returns:
        One row per network, with ratios to the plain network of its name.
    """
    calls = {}
    for key, network in made.items():
        steps = Steps(network, images, amp, "adamw")
        calls[key, "forward"] = steps.infer
        calls[key, "train"] = steps.train
    seconds = interleaved(calls, repeats, clock=time.process_time)
    rows = []
    for key in made:
        name, kind = key
        row = {"network": name, "batch": len(images), "kind": kind}
        for phase in ("forward", "train"):
            ratio = seconds[key, phase] / seconds[(name, "plain"), phase]
            row[f"{phase}_ms"] = round(1e3 * seconds[key, phase], 1)
            row[f"{phase}_ratio"] = round(ratio, 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verdict", action="store_true", help="time the verdict's networks")
    parser.add_argument("--alone", action="store_true", help="of these, those without a mechanism")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.verdict:
        amp = "bfloat16"
        layout = torch.channels_last
        # One block: the small ViT with and without token_conv are compared with each other, too.
        make_networks = partial(verdict_networks, alone=args.alone)
        blocks = [(list(NETWORKS), make_networks, 32, 128)]
    else:
        amp = "none"
        layout = torch.contiguous_format
        blocks = [([name], networks, side, batch) for name, (side, batch) in SETTINGS.items()]
    rows = []
    for names, make, side, batch in blocks:
        torch.manual_seed(0)
        images = torch.randn(batch, 3, side, side).contiguous(memory_format=layout)
        models = {}
        for name in names:
            for kind, network in make(name).items():
                models[name, kind] = lay_out(network, layout)
        rows += rows_of(models, images, amp, args.repeats)
        table = pd.DataFrame(rows).assign(
            hardware=hardware(torch.device("cpu"), 1),
            torch=str(torch.__version__),
            timm=timm.__version__,
            ea_vision=ea_vision.__version__,
            repeats=args.repeats,
        )
        table.to_csv(args.csv, index=False)
        print(args.csv.read_text(encoding="utf-8"), end="", flush=True)


if __name__ == "__main__":
    main()
