"""Numbers that describe attention maps: entropy, distance, likeness to the previous layer's map, rollout.

Shape letters: B batch, K heads, H x W the attention map, N = H*W its pixels (row-major).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.analysis.recording import AttentionMaps, record_attention


def attention_entropy(attn: Tensor) -> Tensor:
    """Mean entropy of the rows, in nats: 0 where a query looks at one pixel, log(N) where at all alike.

    Args:
        attn: (B, K, ..., N), rows sum to 1.

    Returns:
        (B, K)
    """
    return torch.special.entr(attn.float()).sum(-1).flatten(2).mean(-1)


def attention_distance(attn: Tensor, cell: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Mean distance between a query and what it attends to (Dosovitskiy et al. 2021, figure 7).

    Args:
        attn: (B, K, H, W, H, W), from query to key, each query's sum 1.
        cell: (height, width) of a cell of the map; pixels of the input give a distance in pixels.

    Returns:
        (B, K)
    """
    H, W = attn.shape[-2:]
    rows = torch.arange(H, device=attn.device) * cell[0]
    cols = torch.arange(W, device=attn.device) * cell[1]
    down = (rows[:, None] - rows[None, :]).view(H, 1, H, 1)
    right = (cols[:, None] - cols[None, :]).view(1, W, 1, W)
    distance = (down ** 2 + right ** 2).sqrt()  # (H, W, H, W)
    return (attn.float() * distance).sum((-2, -1)).mean((-2, -1))


def map_correlation(attn: Tensor, previous: Tensor) -> Tensor:
    """Pearson's correlation of two layers' maps, head by head.

    Args:
        attn, previous: (B, K, N, N).

    Returns:
        (B, K); not a number where a map is constant.
    """
    a, b = (maps.float().flatten(2) for maps in (attn, previous))
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


@dataclass
class LayerQuantities:
    """Means over images and queries, by head: (K,) each.

    tokens: that a query sees, those before a vision transformer's patches among them. distance: of what the patches
    attend to among the patches. prefix: share of attention, of all queries, that goes to the tokens before the
    patches. correlation: None where the previous layer's map has another shape.
    """

    number: int
    name: str
    feat_size: tuple[int, int]
    tokens: int
    images: int
    entropy: Tensor
    distance: Tensor
    prefix: Tensor
    correlation: Tensor | None


def measure(model: nn.Module, batches: Iterable[Tensor], layers: Sequence[int] | None = None) -> list[LayerQuantities]:
    """Entropy (nats), distance (pixels of the input) and correlation with the previous layer's map, over a data set.

    Args:
        batches: (B, 3, H, W), normalised, all of one size, on the model's device.
        layers: numbers; the previous layer is the one before in this list. None is all.

    Raises:
        ValueError: no batch; a layer that there is not.
    """
    sums: dict[int, LayerQuantities] = {}
    for images in batches:
        with torch.inference_mode(), record_attention(model, layers) as maps:
            model(images)
        previous = None
        for layer in maps.values():
            H, W = layer.feat_size
            spatial = layer.spatial().float()
            entropy = attention_entropy(layer.attn).sum(0)
            prefix = layer.attn[..., :layer.num_prefix_tokens].float().sum(-1).mean(-1).sum(0)
            if layer.num_prefix_tokens:
                spatial = spatial / spatial.sum((-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            distance = attention_distance(spatial, (images.shape[-2] / H, images.shape[-1] / W)).sum(0)
            correlation = None
            if previous is not None and previous.shape == layer.attn.shape:
                correlation = map_correlation(layer.attn, previous).sum(0)
            previous = layer.attn
            new = LayerQuantities(
                layer.number, layer.name, layer.feat_size, layer.attn.shape[-1], len(images), entropy, distance, prefix,
                correlation)
            old = sums.get(layer.number)
            if old is not None:
                new.images += old.images
                new.entropy, new.distance = entropy + old.entropy, distance + old.distance
                new.prefix = prefix + old.prefix
                new.correlation = None if correlation is None else correlation + old.correlation
            sums[layer.number] = new
    if not sums:
        raise ValueError("measure needs at least one batch of images, got none")
    for total in sums.values():
        total.entropy, total.distance, total.prefix = (
            (value / total.images).cpu() for value in (total.entropy, total.distance, total.prefix))
        if total.correlation is not None:
            total.correlation = (total.correlation / total.images).cpu()
    return list(sums.values())


def quantities_csv(measured: dict[str, list[LayerQuantities]]) -> str:
    """A row a model, layer and head."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("model", "layer", "name", "map", "head", "images", "entropy_nats", "distance_pixels",
                   "correlation_with_previous", "share_of_prefix_tokens"))
    for model, layers in measured.items():
        for layer in layers:
            for head in range(len(layer.entropy)):
                correlation = "" if layer.correlation is None else f"{layer.correlation[head]:.6f}"
                rows.writerow((model, layer.number, layer.name, "x".join(map(str, layer.feat_size)), head, layer.images,
                               f"{layer.entropy[head]:.6f}", f"{layer.distance[head]:.6f}", correlation,
                               f"{layer.prefix[head]:.6f}"))
    return text.getvalue()


def attention_rollout(maps: AttentionMaps, residual: float = 0.5) -> Tensor:
    """Where each pixel of the last map comes from, through all recorded layers (Abnar and Zuidema 2020).

    Heads are averaged and the residual added as a share of identity. Where the map's size changes, cells are averaged
    into the new ones. Convolutions beside or between the attention are left out: for our networks an approximation.

    Args:
        maps: with "attn", at least one layer, no heads left out.
        residual: share of identity in each layer.

    Returns:
        (B, T', T), T' the last layer's tokens, T the first's; rows sum to 1.
    """
    rollout, size = None, (0, 0)
    for layer in maps.values():
        attn = layer.attn.float().mean(1)
        step = (1 - residual) * attn + residual * torch.eye(attn.shape[-1], device=attn.device)
        if rollout is None:
            rollout = step
        else:
            if layer.feat_size != size:
                rollout = _resize_rows(rollout, size, layer.feat_size)
            rollout = step @ rollout
        size = layer.feat_size
    return rollout


def _resize_rows(rollout: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(B, old N, T) -> (B, new N, T): a new cell is the mean of the old ones it covers."""
    B, N, T = rollout.shape
    cells = rollout.transpose(1, 2).reshape(B, T, *old)
    return F.adaptive_avg_pool2d(cells, new).flatten(2).transpose(1, 2)
