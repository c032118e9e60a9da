"""An image as a network saw it, with the maps of its layers: what every figure is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import ea_vision
from ea_vision.analysis.loading import LoadedModel
from ea_vision.analysis.recording import AttentionLayer, AttentionMaps, LayerMaps
from ea_vision.base.errors import UsageError

MEAN = "mean"
Point = tuple[int, int]  # y, x in pixels of the input
Head = int | str  # a number, or MEAN


@dataclass
class Recording:
    """An image as a network saw it, (3, H, W) in 0..1, and the maps of its layers."""

    model: LoadedModel
    image: Tensor
    maps: AttentionMaps


def record(model: LoadedModel, image, layers: Sequence[AttentionLayer], parts: Sequence[str] = ("attn",)) -> Recording:
    """Run a network on a PIL image.

    Raises:
        UsageError: an input size that the network refuses.
    """
    prepared = model.prepare(image)
    batch = model.normalize(prepared[None].to(next(model.model.parameters()).device))
    try:
        with torch.inference_mode(), ea_vision.record_attention(
                model.model, [layer.number for layer in layers], parts=parts) as maps:
            model.model(batch)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"{model.label} on a {prepared.shape[1]}x{prepared.shape[2]} input: {error}") from error
    return Recording(model, prepared, maps)


def cell_of(point: Point, img_size: tuple[int, int], feat_size: tuple[int, int]) -> Point:
    """(row, column) of the map's cell that a pixel (y, x) of the input lies in."""
    return point[0] * feat_size[0] // img_size[0], point[1] * feat_size[1] // img_size[1]


def query_map(layer: LayerMaps, point: Point, img_size: tuple[int, int], head: Head, part: str = "attn") -> np.ndarray:
    """(H, W): what the query at a pixel of the input attends to, by one head or on average."""
    row, col = cell_of(point, img_size, layer.feat_size)
    maps = layer.spatial(part)[0, :, row, col]  # (K, H, W)
    return (maps.mean(0) if head == MEAN else maps[head]).float().cpu().numpy()
