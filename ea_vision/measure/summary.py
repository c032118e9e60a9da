"""Parameters, arithmetic and attention maps of the networks, beside the published figures.

    python -m ea_vision.summary                       # all of ours
    python -m ea_vision.summary ea_aa_resnet50 resnet50 --csv summary.csv

Published: EA paper, tables 1 and 2; PA paper, table 3. The EA paper's GFLOPs count 2 for a multiply-add of a
convolution or linear layer and 1 for one of the attention products; `gflops_paper` counts likewise, `gmacs` counts
every multiply-add once.
"""
import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from ea_vision.layers import AugmentedConv2d
from ea_vision.models import FAMILIES
from ea_vision.ops import use_implementation

PUBLISHED: dict[str, tuple[float, float | None, str]] = {  # millions of parameters, GFLOPs, top-1 (%)
    "resnet34": (21.8, 7.4, "73.79"), "resnet50": (25.6, 8.2, "76.44"),
    "resnet101": (44.5, 15.6, "77.87"), "resnet152": (60.2, 23.0, "78.40"),
    "aa_resnet34": (20.7, 7.1, "74.33"), "aa_resnet50": (25.8, 8.3, "77.70"),
    "aa_resnet101": (45.4, 16.1, "78.50"), "aa_resnet152": (61.6, 23.8, "79.10"),
    "pa_aa_resnet34": (20.7, None, "74.90"), "pa_aa_resnet50": (25.8, None, "77.55"),
    "pa_aa_resnet101": (45.4, None, "78.49"),
    "ea_aa_resnet34": (20.7, 7.9, "75.23"), "ea_aa_resnet50": (25.8, 8.7, "78.22"),
    "ea_aa_resnet101": (45.4, 17.2, "79.29"), "ea_aa_resnet152": (61.6, 25.7, "79.63"),
    "cnn_cifar": (5.36, None, "95.90 / 78.17"), "conv_transformer_cifar": (4.92, None, "95.82 / 79.86"),
    "pa_conv_transformer_cifar": (4.92, None, "96.22 / 80.21"),
}


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
        ValueError: no model of that name.
    """
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        raise ValueError(f"unknown model {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    model = timm.create_model(name).eval()
    size = model.default_cfg["input_size"]

    shapes = [(m.num_heads, *m.feat_size) for m in model.modules() if isinstance(m, AugmentedConv2d)]
    with use_implementation("reference"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *size))
    by_op = counter.get_flop_counts()["Global"]
    total = counter.get_total_flops()
    products = by_op.get(torch.ops.aten.bmm, 0)  # the attention's; its projections are baddbmm, linear layers mm
    count, published_gflops, top1 = PUBLISHED.get(name, (None, None, ""))
    return Summary(
        model=name,
        img_size=f"{size[1]}x{size[2]}",
        params_m=sum(p.numel() for p in model.parameters()) / 1e6,
        published_params_m=count,
        gmacs=total / 2e9,
        gflops_paper=(total - products / 2) / 1e9,
        published_gflops=published_gflops,
        attention_layers=len(shapes),
        maps=" + ".join(f"{n} x {K} x ({H}x{W})" for (K, H, W), n in Counter(shapes).items()),
        published_top1=top1,
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


def to_csv(rows: Sequence[Summary]) -> str:
    """Comma-separated values with a header line; the columns are `Summary`'s fields."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Summary)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ea_vision.summary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME", help="registered timm models (default: all of ours)")
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to FILE as CSV ('-': to standard output "
                        "instead of the table)")
    args = parser.parse_args(argv)
    names = args.models or [name for family in FAMILIES for name in timm.list_models(module=family)]
    try:
        rows = [summarise(name) for name in names]
        if args.csv == "-":
            print(to_csv(rows), end="")
            return 0
        if args.csv:
            with open(args.csv, "w", encoding="utf-8") as file:
                file.write(to_csv(rows))
    except (ValueError, OSError) as error:
        print(f"summary: {error}", file=sys.stderr)
        return 2
    print(to_table(rows))
    return 0
