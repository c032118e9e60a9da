"""Parameters, arithmetic and attention maps of the networks, beside the published figures.

    python -m ea_vision.summary                       # all of ours
    python -m ea_vision.summary ea_aa_resnet50 resnet50 --csv summary.csv

Published figures stand beside the networks' registration, with their sources. The EA paper's GFLOPs count 2 for a
multiply-add of a convolution or linear layer and 1 for one of the attention products; `gflops_paper` counts likewise,
`gmacs` counts every multiply-add once.
"""
import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.base.files import atomic_write, create, csv_text
from ea_vision.base.networks import check_model_name
from ea_vision.layers import AugmentedConv2d
from ea_vision.models import Published, list_networks, published_figures
from ea_vision.ops import use_implementation


@dataclass(frozen=True)
class Summary:
    """A row of the table; published figures are empty where no paper gives them."""

    model: str
    img_size: str
    params_m: float  # millions
    published_params_m: float | None
    gmacs: float  # 1e9 multiply-adds, an image
    gflops_paper: float  # 1e9, the EA paper's counting
    published_gflops: float | None
    attention_layers: int
    maps: str  # layers x heads x (height x width) of each shape of map, in order
    published_top1: str  # %; CIFAR-10 / CIFAR-100 for the CIFAR networks


def summarise(name: str) -> Summary:
    """Build a model and count.

    Args:
        name: a model registered with timm.

    Raises:
        UsageError: no model of that name.
    """
    check_model_name(name)
    model = timm.create_model(name).eval()
    size = model.default_cfg["input_size"]

    shapes = [(m.num_heads, *m.feat_size) for m in model.modules() if isinstance(m, AugmentedConv2d)]
    with use_implementation("reference"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *size))
    by_op = counter.get_flop_counts()["Global"]
    total = counter.get_total_flops()
    products = by_op.get(torch.ops.aten.bmm, 0)  # the attention's; its projections are baddbmm, linear layers mm
    published = published_figures(name) or Published()
    return Summary(
        model=name,
        img_size=f"{size[1]}x{size[2]}",
        params_m=sum(p.numel() for p in model.parameters()) / 1e6,
        published_params_m=published.params_m,
        gmacs=total / 2e9,
        gflops_paper=(total - products / 2) / 1e9,
        published_gflops=published.gflops,
        attention_layers=len(shapes),
        maps=" + ".join(f"{n} x {K} x ({H}x{W})" for (K, H, W), n in Counter(shapes).items()),
        published_top1=" / ".join(f"{top1:.2f}" for top1 in published.top1.values()),
    )


_HEADINGS = ("model", "input", "params M", "(published)", "GMACs", "GFLOPs", "(published)", "layers", "maps",
             "published top-1 %")


def _cells(row: Summary) -> list[str]:
    digits = 2 if row.params_m < 10 else 1
    return [
        row.model, row.img_size,
        f"{row.params_m:.{digits}f}", "" if row.published_params_m is None else f"{row.published_params_m:.{digits}f}",
        f"{row.gmacs:.2f}", f"{row.gflops_paper:.1f}",
        "" if row.published_gflops is None else f"{row.published_gflops:.1f}",
        str(row.attention_layers), row.maps, row.published_top1,
    ]


def to_table(rows: Sequence[Summary]) -> str:
    """A Markdown table, its columns aligned."""
    lines = [list(_HEADINGS), *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADINGS))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME", help="registered timm models (default: all of ours)")
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to FILE as CSV ('-': to standard output "
                        "instead of the table)")
    args = parser.parse_args(argv)
    names = args.models or list_networks()
    rows = [summarise(name) for name in names]
    csv = csv_text([asdict(row) for row in rows])
    if args.csv == "-":
        print(csv, end="")
        return 0
    if args.csv:
        create(Path(args.csv).parent)
        atomic_write(Path(args.csv), csv.encode())
    print(to_table(rows))
    return 0
