"""Times of every mechanism beside timm's plain network, forward and training step, interleaved.

    python experiments/across/benchmark.py experiments/results/across/benchmark.csv      # 10 minutes on a free core
    python experiments/across/benchmark.py experiments/results/across/verdict-times.csv --verdict

Medians of processor time over the repeats, one thread, float32, each network in turn; AdamW. vit_small_patch16_224 is
timm's network and `ea_vision.evolve` of it at the identity start; the small ViT is the verdict's. --verdict measures
the verdict's own networks in bfloat16, each by its fastest code. For timm's own attention that is the one that is not
fused (torch's fused one takes twice as long in bfloat16 on a CPU).
"""
import argparse
import csv
import statistics
import time
from pathlib import Path

import timm
import torch
from timm.layers import set_fused_attn
from torch import nn

import ea_vision
from ea_vision.base.provenance import hardware

KINDS = ("residual", "ea", "pa", "talking_heads", "reattention", "refiner", "mta", "conv2d")
SETTINGS = {"vit_small_patch16_224": (224, 2), "vit_mini_patch4_32": (32, 128)}  # pixels, images


def networks(name: str) -> dict[str, nn.Module]:
    """Return the networks by kind, "plain" first."""
    plain = timm.create_model(name)
    if name == "vit_small_patch16_224":
        return {"plain": plain, **{kind: ea_vision.evolve(plain, kind) for kind in KINDS}}
    kinds = {kind: dict(evolution=kind) for kind in KINDS}
    extra = {"token_conv": dict(token_conv=True), "value_residual": dict(value_residual=True)}
    return {"plain": plain, **{kind: timm.create_model(name, **options) for kind, options in (kinds | extra).items()}}


VERDICT = {  # by name in the table: network, its keywords, kinds
    "small ViT, token_conv": ("vit_mini_patch4_32", dict(token_conv=True),
                              ("residual", "ea", "talking_heads", "reattention", "refiner", "mta", "conv2d")),
    "small ViT": ("vit_mini_patch4_32", {}, ("residual", "conv2d", "uniform")),
    "narrow Conv-Transformer": ("conv_transformer_cifar", dict(widths=[16, 32, 64, 64], num_classes=100),
                                ("residual", "ea", "talking_heads", "conv2d", "uniform")),
}


def verdict_networks(name: str) -> dict[str, nn.Module]:
    """Return the verdict's networks by kind, "plain" first, each with its fastest code."""
    model, keywords, kinds = VERDICT[name]
    start = dict(start="identity") if model == "conv_transformer_cifar" else {}
    set_fused_attn(False)
    made = {"plain": timm.create_model(model, **keywords)}
    set_fused_attn(True)
    for kind in kinds:
        made[kind] = timm.create_model(model, **keywords, evolution=kind, **(start if kind != "uniform" else {}))
    return {kind: network.to(memory_format=torch.channels_last) for kind, network in made.items()}


def forward(model: nn.Module, x: torch.Tensor, _) -> None:
    with torch.no_grad():
        model(x)


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss = nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 10)
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verdict", action="store_true", help="the verdict's setting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    under = {"hardware": hardware(torch.device("cpu"), 1), "torch": str(torch.__version__), "timm": timm.__version__,
             "ea_vision": ea_vision.__version__, "repeats": args.repeats}
    rows = []
    for name, (side, batch) in ({name: (32, 128) for name in VERDICT} if args.verdict else SETTINGS).items():
        torch.manual_seed(0)
        x, models = torch.randn(batch, 3, side, side), (verdict_networks if args.verdict else networks)(name)
        optimizers = {kind: torch.optim.AdamW(model.parameters(), lr=1e-5) for kind, model in models.items()}
        times = {kind: {"forward": [], "train": []} for kind in models}
        for repeat in range(args.repeats + 1):
            for phase, step in (("forward", forward), ("train", train)):
                for kind, model in models.items():
                    model.train(phase == "train")
                    began = time.process_time()
                    with torch.autocast("cpu", torch.bfloat16, enabled=args.verdict):
                        step(model, x, optimizers[kind])
                    if repeat:  # the first warms up
                        times[kind][phase].append(time.process_time() - began)
        for kind in models:
            row = {"network": name, "batch": batch, "kind": kind}
            for phase in ("forward", "train"):
                median = statistics.median(times[kind][phase])
                row |= {f"{phase}_ms": round(1e3 * median, 1),
                        f"{phase}_ratio": round(median / statistics.median(times["plain"][phase]), 2)}
            rows.append(row | under)
            print(*list(row.values()), flush=True)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
