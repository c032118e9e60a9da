"""The names of our networks, their weights and what they are.

    ea-vision models                    # all
    ea-vision models --sizes NAME       # parameters, GFLOPs, maps (`--sizes --help`)
    ea-vision models 'ea_*' --weights   # by pattern; a row for each file of weights, and where it is from

`published` is top-1 in percent as papers print it, not ours. Weights from a hub are timm's: the network begins with the
outputs of timm's own and has not been fine-tuned.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch

import timm

from ea_vision.base.errors import UsageError, near_matches
from ea_vision.base.tables import markdown
from ea_vision.measure import summary
from ea_vision.measure.summary import add_csv, show
from ea_vision.models import get_network, list_networks, published_figures


@dataclass(frozen=True)
class ListedModel:
    """A row: a name for `timm.create_model`, the size of its images in pixels, which weights it has (in a row for one
    file of weights: where they are from), published top-1 in percent, and what it is."""

    model: str
    img_size: str
    weights: str
    published_top1: str
    about: str


def list_models(pattern: str = "*", weights: bool = False) -> list[ListedModel]:
    """Rows of the networks whose names fit.

    Args:
        pattern: with *, ? and [...], as `timm.list_models` takes; a plain word fits wherever it stands in a name.
        weights: a row for each file of weights, instead of one for each network.

    Raises:
        UsageError: no name fits, or none of those that do has weights.
    """
    wanted = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    names = [name for name in list_networks() if fnmatch(name, wanted)]
    if not names:
        raise UsageError(f"no network of ours fits {pattern!r}; {near_matches(pattern, list_networks(), 'networks')}")
    tags: dict[str, list[str]] = {}
    for name in timm.list_pretrained():
        base, _, tag = name.partition(".")
        tags.setdefault(base, []).append(tag)
    rows = []
    for name in names:
        published = published_figures(name)
        top1 = " / ".join(f"{top1:.2f}" for top1 in published.top1.values()) if published else ""
        for tag in tags.get(name, []) if weights else [""]:
            full = f"{name}.{tag}" if tag else name
            cfg = timm.get_pretrained_cfg(full)
            H, W = cfg.input_size[1:]
            if tag:
                having = "comes with ea_vision" if cfg.file else f"hub: {cfg.hf_hub_id or cfg.url}"
            else:
                first, *more = tags.get(name, [""])
                having = f"{first} and {len(more)} more" if more else first
            rows.append(ListedModel(full, f"{H}x{W}", having, top1, get_network(name).about))
    if not rows:
        raise UsageError(f"none of the {len(names)} networks that fit {pattern!r} has weights")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--sizes"]:
        return summary.main(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="a part of a name, or a pattern with * (default: all)")
    parser.add_argument("--weights", action="store_true", help="a row for each file of weights")
    add_csv(parser)
    args = parser.parse_args(argv)
    rows = [asdict(row) for row in list_models(args.pattern, args.weights)]
    table = markdown([("model", "input", "weights", "published", "what it is"), *(tuple(row.values()) for row in rows)])
    show(table, rows, args.csv, args.wide)
    return 0
