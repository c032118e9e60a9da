"""Results of the benchmark: rows, and tables and CSV of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ea_vision.base.files import csv_text
from ea_vision.base.tables import markdown


@dataclass
class Row:
    """A line of the CSV: a network, or the mean attention branch of one of its stages."""

    model: str
    mode: str  # eager or compiled
    part: str  # "network", or what size the branch's output and map have
    layers: int | None = None  # attention layers in the part
    train_ms: float | None = None  # a step of a network; forward and backward of one branch
    infer_ms: float | None = None
    train_images_per_s: float | None = None
    infer_images_per_s: float | None = None
    train_ratio: float | None = None  # of images per second to the resnet's
    infer_ratio: float | None = None
    memory_mib: float | None = None  # peak of a training step
    memory_ratio: float | None = None
    train_attention_ms: float | None = None  # of a branch, without its pooling and projections
    infer_attention_ms: float | None = None
    train_floor_ms: float | None = None  # bytes that the attention must move / bandwidth
    infer_floor_ms: float | None = None


def baseline_of(name: str) -> str | None:
    """timm's resnet of the same depth: ea_aa_resnet50, halonet50ts -> resnet50.

    Of a vision transformer, evolving or not, timm's plain one: ea_vit_tiny_patch16_224 -> vit_tiny_patch16_224.
    """
    transformer = re.fullmatch(r"(?:[ep]a_)?((?:vit|deit)_.*)", name)
    if transformer:
        return transformer[1]
    depth = re.search(r"net(\d+)", name)
    return f"resnet{depth[1]}" if depth else None


def add_ratios(rows: dict[tuple[str, str], Row]) -> None:
    """Fill in the ratios of the networks, by (name, mode), whose baseline is among them."""
    for (name, mode), row in rows.items():
        if (base := rows.get((baseline_of(name), mode))) is not None:
            for ratio, of in (("train_ratio", "train_images_per_s"), ("infer_ratio", "infer_images_per_s"),
                              ("memory_ratio", "memory_mib")):
                if getattr(row, of) and getattr(base, of):
                    setattr(row, ratio, getattr(row, of) / getattr(base, of))


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def to_tables(rows: Sequence[Row]) -> str:
    """Markdown tables of the networks and, where there are any, of their attention branches."""
    networks = [["network", "mode", "train img/s", "ratio", "infer img/s", "ratio", "memory MiB", "ratio"]]
    branches = [["attention branch", "mode", "layers", "infer ms", "attention", "floor", "train ms", "attention",
                 "floor"]]
    for row in rows:
        if row.part == "network":
            networks.append([row.model, row.mode, _cell(row.train_images_per_s, 2), _cell(row.train_ratio, 3),
                             _cell(row.infer_images_per_s, 2), _cell(row.infer_ratio, 3), _cell(row.memory_mib, 0),
                             _cell(row.memory_ratio, 3)])
        else:
            times = (row.infer_ms, row.infer_attention_ms, row.infer_floor_ms, row.train_ms, row.train_attention_ms,
                     row.train_floor_ms)
            branches.append([f"{row.model}, {row.part}", row.mode, str(row.layers), *(_cell(t, 3) for t in times)])
    text = markdown(networks)
    if len(branches) > 1:
        text += "\n\n" + markdown(branches) + (
            "\n\nmean of a stage's layers; attention: the branch without its pooling and projections; floor:\n"
            "queries, keys, values, result, previous and own logits (where needed), each once over main\n"
            "memory; training: forward and backward")
    return text


def to_csv(rows: Sequence[Row], setting: dict[str, object]) -> str:
    """Comma-separated values: the fields of `Row`, and the setting, the same on every line."""
    return csv_text([{key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(row).items()}
                     | setting for row in rows])


