"""Describe attention maps by numbers: entropy, distance, correlation with the previous layer's map, rollout.

Shape letters: B batch, K heads, H x W the attention map, N = H*W its pixels (row-major).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.base.files import csv_text
from ea_vision.ops import Size
from ea_vision.recorder.class_evidence import EVIDENCE
from ea_vision.recorder.maps import AttentionMaps, LayerMaps
from ea_vision.recorder.recording import record_attention

TINY = torch.finfo(torch.float32).tiny


def as_distributions(attn: Tensor) -> Tensor:
    """Return maps (B, K, queries, keys) in float32 with each row divided by its sum; rows of zeros stay zero.

    A head's map with negative entries (a difference of maps, or a mixture with negative weights) becomes NaN.
    """
    attn = attn.float()
    sums = attn.sum(-1, keepdim=True)
    smallest = attn.amin((-2, -1), keepdim=True)
    rows = attn / sums.clamp_min(TINY)
    return rows.masked_fill(smallest < 0, torch.nan)


def attention_entropy(attn: Tensor) -> Tensor:
    """Return the mean entropy of the rows, in nats: 0 if queries attend to one pixel, log(N) if to all equally.

    Args:
        attn: (B, K, queries, keys); see `as_distributions`.

    Returns:
        (B, K)
    """
    return _entropy(as_distributions(attn))


def _entropy(rows: Tensor) -> Tensor:
    values = torch.special.entr(rows).sum(-1)
    return values.mean(-1)


def attention_distance(attn: Tensor, cell: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the mean distance between a query and the keys it attends to (Dosovitskiy et al. 2021, figure 7).

    Args:
        attn: (B, K, H, W, H', W'), from query to key; see `as_distributions`. Both grids cover the same area.
        cell: (height, width) of a query's cell; pixels of the input give a distance in pixels.

    Returns:
        (B, K)
    """

    H, W, height, width = attn.shape[2:]
    queries = _middles((H, W), cell, attn.device)
    key_cell = (H / height * cell[0], W / width * cell[1])
    keys = _middles((height, width), key_cell, attn.device)
    distance = torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")
    rows = as_distributions(attn.flatten(4).flatten(2, 3))
    values = (rows * distance).sum(-1)
    return values.mean(-1)


def _middles(grid: Size, cell: tuple[float, float], device: torch.device) -> Tensor:
    """Return the centres of a grid's cells, row by row, (cells, 2); cell: (height, width) of each."""
    along = []
    for count, side in zip(grid, cell, strict=True):
        numbers = torch.arange(count, device=device) + 0.5
        along.append(numbers * side)
    return torch.cartesian_prod(*along)


def map_correlation(attn: Tensor, previous: Tensor) -> Tensor:
    """Return Pearson's correlation of two layers' maps, head by head.

    Args:
        attn, previous: (B, K, N, N).

    Returns:
        (B, K); NaN where a map is constant.
    """
    a = attn.float().flatten(2)
    b = previous.float().flatten(2)
    a = a - a.mean(-1, keepdim=True)
    b = b - b.mean(-1, keepdim=True)
    return F.cosine_similarity(a, b, -1, eps=0.0)


def total_variation(attn: Tensor, other: Tensor) -> Tensor:
    """Return half the sum of |attn - other| over the keys, for each query: 0 for equal rows, 1 for disjoint ones.

    Args:
        attn, other: (..., queries, keys), each row a distribution.

    Returns:
        (..., queries)
    """
    difference = attn.float() - other.float()
    return difference.abs().sum(-1) / 2


def own_alone(layer: LayerMaps, module: nn.Module) -> Tensor | None:
    """Return the attention of an evolving layer if its mixture were its own logits alone.

    The gate alpha is 0 while this is computed, so the layer's own logits keep their scale; they are convolved and
    normalised as trained. (Previous logits of 0 would not be a fair comparison: they reduce the convolution's input.)

    Args:
        layer: with all parts and all heads.
        module: the attention layer, in evaluation mode.

    Returns:
        (B, K, T, T), or None if the layer has no previous map or no gate alpha, or if its attention is not just the
        softmax of its evolution's result.
    """
    own = layer.self_logits
    previous = layer.prev_logits
    if own is None or previous is None or layer.attn is None:
        return None
    evolution = module.evolution
    if "alpha" not in evolution.gates():
        return None

    def attention() -> Tensor:
        logits = module.evolved(own, previous, layer.feat_size)
        return module.attention_of(logits, layer.feat_size)

    with torch.no_grad():
        again = attention()
        with _alpha_of_zero(evolution):
            alone = attention()
    if again.shape != layer.attn.shape or not torch.allclose(again, layer.attn, atol=1e-3):
        return None
    return alone


@contextmanager
def _alpha_of_zero(evolution: nn.Module) -> Iterator[None]:
    """Keep the gate of the previous logits at 0 inside the block."""
    alpha = evolution.alpha
    if isinstance(alpha, nn.Parameter):
        evolution.alpha = nn.Parameter(torch.zeros_like(alpha), alpha.requires_grad)
    else:
        evolution.alpha = 0.0
    try:
        yield
    finally:
        evolution.alpha = alpha


def position_share(total: Tensor, energies: Tensor) -> Tensor:
    """Return the share of a layer's energy (the sum of squares of its maps) that is the same on every image, and so
    depends only on positions: 1 if maps do not depend on the image, about 0 if maps of different images have nothing in
    common. It is the mean inner product of two images' maps, divided by the mean energy; this has no bias.

    Args:
        total: (K, N, N), the sum of the images' maps.
        energies: (images, K).

    Returns:
        (1, K); NaN for a single image.
    """
    energy = energies.sum(0)
    others = len(energies) - 1 or torch.nan
    products = total.square().sum((-2, -1)) - energy  # of different images
    share = products / energy / others
    return share[None]


@dataclass
class LayerQuantities:
    """Quantities of a layer's maps per image and head: (images, K) each, except positions.

    entropies: in nats, over all tokens. distances: in pixels of the input, from patches to the patches they attend to.
    prefixes: the share of all queries' attention that goes to the tokens before a transformer's patches. These three
    are NaN where a map has negative entries: see `as_distributions`.
    correlations: with the previous layer's map; None if that has another shape. uniform_entropy, uniform_distance:
    those of uniform attention over the keys that queries see. positions: (1, K), over all images; see `position_share`.
    """

    number: int
    name: str
    feat_size: Size
    uniform_entropy: float
    uniform_distance: float
    entropies: Tensor
    distances: Tensor
    prefixes: Tensor
    correlations: Tensor | None = None
    positions: Tensor | None = None

    images = property(lambda self: len(self.entropies))


def measure(
    model: nn.Module, batches: Iterable[Tensor], layers: Sequence[int] | None = None
) -> list[LayerQuantities]:
    """Measure entropy, distance and correlation with the previous layer's map over a data set.

    Args:
        batches: (B, 3, H, W), normalised, all of one size, on the model's device.
        layers: one or several numbers; the previous layer is the one before in this list. None: all that do not pool.

    Raises:
        ValueError: there is no batch, or a layer does not exist.
    """
    batches_of_layer = defaultdict(list)  # the values of each batch, by layer
    totals = defaultdict(float)
    for images in batches:
        with torch.no_grad(), record_attention(model, layers) as maps:
            model(images)
        previous = None
        for number, layer in maps.items():
            if layers is None and layer.layout.query_names:
                continue
            attn = layer.attn.float()
            cell = _cell_in_pixels(layer, images)
            rows = as_distributions(attn)
            to_prefix = rows[..., : layer.num_prefix_tokens].sum(-1)
            values = {
                "entropies": _entropy(rows),
                "distances": attention_distance(layer.spatial(), cell),
                "prefixes": to_prefix.mean(-1),
                "energies": attn.square().sum((-2, -1)),
            }
            if previous is not None and previous.shape == attn.shape:
                values["correlations"] = map_correlation(attn, previous)
            batches_of_layer[number].append(values)
            totals[number] += attn.sum(0)
            previous = attn
    if not batches_of_layer:
        raise ValueError("measure needs at least one batch of images, got none")
    measured = []
    for number, parts in batches_of_layer.items():
        layer = maps[number]
        values = {}
        for name in parts[0]:
            values[name] = torch.cat([part[name] for part in parts]).cpu()
        energies = values.pop("energies")
        cell = _cell_in_pixels(layer, images)
        uniform = layer.sees().float()[None, None]
        quantities = LayerQuantities(
            number,
            layer.name,
            layer.feat_size,
            uniform_entropy=float(np.log(layer.num_keys()).mean()),
            uniform_distance=attention_distance(uniform, cell).item(),
            positions=position_share(totals[number].cpu(), energies),
            **values,
        )
        measured.append(quantities)
    return measured


def _cell_in_pixels(layer: LayerMaps, images: Tensor) -> np.ndarray:
    """Return (height, width) of a cell of a layer's map: its patches may leave a rest of the images, or go beyond."""
    return np.divide(layer.layout.area or images.shape[-2:], layer.feat_size)


WRITTEN = {  # fields of LayerQuantities: their names in files
    "entropies": "entropy_nats",
    "distances": "distance_pixels",
    "correlations": "correlation_with_previous",
    "prefixes": "share_of_prefix_tokens",
    "positions": "share_of_position_alone",
    "uniform_entropy": "uniform_entropy_nats",
    "uniform_distance": "uniform_distance_pixels",
}


def quantities_csv(measured: dict[str, list[LayerQuantities]]) -> str:
    """Return a table as text: one row per model, layer and head, with means and standard deviations over images."""
    rows = []
    for model, layers in measured.items():
        for layer in layers:
            for head, entropy in enumerate(layer.entropies.mean(0)):
                row = {
                    "model": model,
                    "layer": layer.number,
                    "name": layer.name,
                    "map": "x".join(map(str, layer.feat_size)),
                    "head": head,
                    "images": layer.images,
                    "entropy_share": f"{entropy / layer.uniform_entropy:.6f}",
                }
                for field, name in WRITTEN.items():
                    value = getattr(layer, field)
                    if isinstance(value, Tensor):
                        image_values = value[:, head].tolist()
                    else:
                        image_values = [] if value is None else [value]
                    row[name] = f"{np.mean(image_values):.6f}" if image_values else ""
                    if not field.startswith(("uniform", "positions")):
                        row[f"{name}_std"] = ""
                        if len(image_values) > 1:
                            row[f"{name}_std"] = f"{np.std(image_values, ddof=1):.6f}"
                rows.append(row)
    return csv_text(rows)


def class_rollout(maps: AttentionMaps) -> Tensor:
    """Return the evidence of a class for each pixel of the last map in the first map's (Chefer, Gur, Wolf 2021).

    With E_l the mean over heads of a layer's evidence, R = (1 + E_l) R from the first layer to the last; the identity,
    which is the residual's, is taken off again. If the map's size changes, as in `attention_rollout`.

    Args:
        maps: with the part that `class_evidence.add_class_evidence` adds, at least one layer, and all heads.

    Returns:
        (B, T', T), T' the last layer's tokens, T the first's; at least 0.
    """

    def step(layer: LayerMaps, share: float = 1.0) -> Tensor:
        evidence = layer.on_queries_grid(EVIDENCE).float().mean(1)
        return share * evidence + torch.eye(evidence.shape[-1], device=evidence.device)

    return _through_layers(maps, step) - _through_layers(maps, partial(step, share=0.0))


def attention_rollout(maps: AttentionMaps) -> Tensor:
    """Return where each pixel of the last map comes from, through all recorded layers (Abnar and Zuidema 2020).

    Heads are averaged, and half of each layer is the identity, for the residual. If the map's size changes, cells are
    averaged into the new ones, and tokens before them stay; reduced keys are spread over the cells that they cover.
    Convolutions beside or between the attention are left out, so for our networks it is an approximation.

    Args:
        maps: with "attn", at least one layer, and all heads.

    Returns:
        (B, T', T), T' the last layer's tokens, T the first's; rows sum to 1.
    """

    def step(layer: LayerMaps) -> Tensor:
        attn = layer.on_queries_grid().float().mean(1)
        return (attn + torch.eye(attn.shape[-1], device=attn.device)) / 2

    return _through_layers(maps, step)


def _through_layers(maps: AttentionMaps, step_of: Callable[[LayerMaps], Tensor]) -> Tensor:
    """Multiply the steps (B, T, T) of all layers, the last one first; average cells where the map's size changes."""
    rollout = None
    size = (0, 0)
    for layer in maps.values():
        step = step_of(layer)
        if rollout is None:
            rollout = step
        else:
            if layer.feat_size != size:
                first = layer.num_prefix_tokens
                cells = rollout[:, first:].transpose(1, 2).unflatten(2, size)  # (B, T, old H, W)
                cells = F.adaptive_avg_pool2d(cells, layer.feat_size)
                rollout = torch.cat([rollout[:, :first], cells.flatten(2).transpose(1, 2)], 1)
            rollout = step @ rollout
        size = layer.feat_size
    return rollout
