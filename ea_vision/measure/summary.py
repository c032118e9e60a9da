"""Parameters, arithmetic and attention maps of the networks, beside the published figures.

    ea-vision models --sizes                                 # all of ours
    ea-vision models --sizes ea_aa_resnet50 resnet50 --csv summary.csv
    ea-vision models --sizes aa_resnet50 --layers            # the AA paper's table 9: every attention branch

Published figures are those of published.yaml, which has their sources. `GMACs` counts every multiply-add once.
`GFLOPs` counts as the EA paper: 2 for a multiply-add of a convolution or linear layer and 1 for one of the attention
products. `profiler` counts as TensorFlow's profiler did in the AA paper: 2 for a multiply-add of a convolution, linear
layer or relative position, 6 for an element of the maps, nothing for the other attention products.

`--layers` gives the attention branches, equal neighbours in one row: the maps of an image in bfloat16 as dense
attention keeps them (this project's kernels keep fewer, see `ea-vision memory`), parameters with the biases of the
projections, and FLOPs in the profiler's counting.
"""
import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write, check_output, csv_text
from ea_vision.base.networks import check_model_name
from ea_vision.base.tables import add_wide, markdown, shown
from ea_vision.measure.counts import BranchCount, Counts, count, inference_map_bytes, training_map_bytes
from ea_vision.models import Published, list_networks, published_figures


@dataclass(frozen=True)
class Summary:
    """A row of the table; published figures are empty where no paper gives them."""

    model: str
    img_size: str
    params_m: float  # millions
    published_params_m: float | None
    gmacs: float  # 1e9 multiply-adds, an image
    gflops_paper: float  # 1e9, the EA paper's counting
    gflops_profiler: float  # 1e9, the AA paper's counting
    published_gflops: float | None
    attention_layers: int
    maps: str  # layers x heads x (height x width) of each shape of map, in order
    published_top1: str  # %; CIFAR-10 / CIFAR-100 for the CIFAR networks


@cache
def count_network(name: str) -> tuple[tuple[int, int, int], Counts]:
    """Build a network registered with timm and count it: its input (C, H, W), and what was counted.

    Raises:
        UsageError: no model of that name.
    """
    check_model_name(name)
    with torch.device("meta"):
        model = timm.create_model(name)
    size = model.default_cfg["input_size"]
    return size, count(model, size)


def summarise(name: str) -> Summary:
    """A row of the table.

    Raises:
        UsageError: no model of that name.
    """
    size, counts = count_network(name)
    shapes = Counter((branch.num_heads, *branch.feat_size) for branch in counts.branches)
    published = published_figures(name) or Published()
    return Summary(
        model=name,
        img_size=f"{size[1]}x{size[2]}",
        params_m=counts.params / 1e6,
        published_params_m=published.params_m,
        gmacs=counts.macs / 1e9,
        gflops_paper=counts.flops_paper / 1e9,
        gflops_profiler=counts.flops_profiler / 1e9,
        published_gflops=published.gflops,
        attention_layers=len(counts.branches),
        maps=" + ".join(f"{n} x {K} x ({H}x{W})" for (K, H, W), n in shapes.items()),
        published_top1=" / ".join(f"{top1:.2f}" for top1 in published.top1.values()),
    )


def _cells(row: Summary) -> list[str]:
    digits = 2 if row.params_m < 10 else 1
    gflops_digits = 2 if row.gflops_paper < 2 else 1
    return [
        row.model, row.img_size,
        f"{row.params_m:.{digits}f}", "" if row.published_params_m is None else f"{row.published_params_m:.{digits}f}",
        f"{row.gmacs:.2f}", f"{row.gflops_paper:.{gflops_digits}f}", f"{row.gflops_profiler:.2f}",
        "" if row.published_gflops is None else f"{row.published_gflops:.{gflops_digits}f}",
        str(row.attention_layers), row.maps, row.published_top1,
    ]


def to_table(rows: Sequence[Summary]) -> str:
    """A Markdown table of networks."""
    headings = ("model", "input", "params M", "(published)", "GMACs", "GFLOPs", "profiler", "(published)", "layers",
                "maps", "published top-1 %")
    return markdown([headings, *map(_cells, rows)])


def to_layer_table(branches: Sequence[BranchCount]) -> str:
    """A Markdown table of attention branches, equal neighbours in one row, and what they need together."""
    lines: list[Sequence[str]] = [("layers", "first", "maps", "maps KiB", "params", "MFLOPs", "evolve")]
    total = sum(branch.flops_profiler for branch in branches)
    for look, group in groupby(branches, lambda branch: (branch.num_heads, branch.feat_size, branch.map_bytes,
                                                         branch.params, branch.flops_profiler, branch.evolves)):
        K, (H, W), size, params, flops, evolves = look
        same = list(group)
        lines.append((str(len(same)), same[0].layer, f"{K} x ({H}x{W})", f"{size / 1024:.2f}", f"{params:,}",
                      f"{flops / 1e6:.1f}", "yes" if evolves else ""))
    return (f"{markdown(lines)}\nmaps: {training_map_bytes(branches) / 2**20:.2f} MiB in training, "
            f"{inference_map_bytes(branches) / 1024:.2f} KiB in inference; "
            f"{sum(branch.params for branch in branches):,} parameters; {total / 1e6:.1f} MFLOPs")


def _layers_of(name: str) -> tuple[str, list[dict[str, object]]]:
    """The table of a network's branches under its name, and their rows of the CSV."""
    branches = count_network(name)[1].branches
    rows = [{"model": name, **asdict(branch), "feat_size": "x".join(map(str, branch.feat_size)),
             "map_bytes": branch.map_bytes} for branch in branches]
    return f"{name}\n{to_layer_table(branches) if branches else 'no attention of this package'}", rows


def add_csv(parser: argparse.ArgumentParser) -> None:
    """The option --csv of commands that print a table; `show` does what it says."""
    add_wide(parser)
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to FILE as CSV ('-': to standard output "
                        "instead of the table)")


def show(text: str, rows: Sequence[Mapping[str, object]], file: str | None, wide: bool = False) -> None:
    """Print a table; with --csv write its rows to the file, too, or print them instead.

    Raises:
        UsageError: the file's folder cannot be made.
    """
    if file == "-":
        print(csv_text(rows), end="")
        return
    if file:
        check_output(Path(file))
        atomic_write(Path(file), csv_text(rows).encode())
    print(shown(text, wide))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME", help="registered timm models (default: all of ours)")
    parser.add_argument("--layers", action="store_true", help="a table of each network's attention branches")
    add_csv(parser)
    args = parser.parse_args(argv)
    names = args.models or list_networks()
    if args.layers:
        tables, layers = zip(*map(_layers_of, names), strict=True)
        text, rows = "\n\n".join(tables), [row for of_network in layers for row in of_network]
        if not rows:
            raise UsageError(f"--layers needs a network with this package's attention, got {', '.join(names)}")
    else:
        summaries = [summarise(name) for name in names]
        text, rows = to_table(summaries), [asdict(row) for row in summaries]
    show(text, rows, args.csv, args.wide)
    return 0
