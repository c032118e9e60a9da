"""What the figures are made of: images, maps, query points, colour bars, and the names beside them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.analysis.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.visualize.recordings import MEAN, Head, Point

OVERLAY_ALPHA = 0.65
COLOR_MAP = "viridis"  # even steps of lightness, readable by the colour-blind
QUERY_COLORS = ("#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#F0E442")  # Okabe and Ito
PART_NAMES = {"attn": "attention", "logits": "mixed logits", "self_logits": "self logits",
              "conv_logits": "convolved logits", "prev_logits": "previous logits"}


class Picture(Figure):
    """A figure that belongs to no window; notebooks show it whether or not pyplot is loaded."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """A figure of width x height inches."""
    return Picture(figsize=(width, height), layout="constrained")


def head_name(head: Head) -> str:
    return "mean of heads" if head == MEAN else f"head {head}"


def layer_name(layer: AttentionLayer | LayerMaps) -> str:
    return f"layer {layer.number} ({layer.name})"


def bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def blank(axes: Axes, img_size: tuple[int, int], text: str = "") -> None:
    """An empty place as large as a picture's, with a word where one belongs."""
    axes.set(xlim=(0, img_size[1]), ylim=(img_size[0], 0), aspect="equal")
    axes.text(img_size[1] / 2, img_size[0] / 2, text, ha="center", va="center", fontsize=8, color="0.4")
    bare(axes)


def draw_image(axes: Axes, image: Tensor, points: Sequence[Point] = ()) -> None:
    """The input, with numbered query points."""
    H, W = image.shape[1:]
    axes.imshow(image.permute(1, 2, 0).cpu().numpy(), extent=(0, W, H, 0), interpolation="nearest")
    for number, point in enumerate(points, start=1):
        mark_point(axes, point, number)
    bare(axes)


def mark_point(axes: Axes, point: Point, number: int, numbered: bool = True) -> None:
    """A disc on a pixel, with its number or small; its white rim shows on any ground."""
    y, x = point[0] + 0.5, point[1] + 0.5
    axes.plot(x, y, "o", color=QUERY_COLORS[(number - 1) % len(QUERY_COLORS)], markersize=10 if numbered else 4.5,
              markeredgecolor="white", markeredgewidth=1, clip_on=False)
    if numbered:
        axes.text(x, y, str(number), color="white", fontsize=6.5, fontweight="bold", ha="center", va="center_baseline",
                  clip_on=False)


def draw_map(axes: Axes, values: np.ndarray, image: Tensor, scale: tuple[float, float], *, point: Point | None = None,
             number: int = 1, overlay: bool = True, cmap: str = COLOR_MAP):
    """A map (H', W') over the input's area, on the grey image where `overlay`, its query marked; return the artist."""
    H, W = image.shape[1:]
    if overlay:
        grey = image.mean(0).cpu().numpy()
        axes.imshow(grey, extent=(0, W, H, 0), cmap="gray", vmin=-0.2, vmax=1.2, interpolation="nearest")
    artist = axes.imshow(values, extent=(0, W, H, 0), cmap=cmap, vmin=scale[0], vmax=scale[1], interpolation="nearest",
                         alpha=OVERLAY_ALPHA if overlay else None)
    if point is not None:
        mark_point(axes, point, number, numbered=False)
    bare(axes)
    return artist


def scale_of(part: str, maps: Sequence[np.ndarray]) -> tuple[float, float]:
    """One scale for maps that are compared: all of the probabilities, the middle 99% of logits."""
    values = np.concatenate([m.ravel() for m in maps])
    low, high = np.quantile(values, (0, 1) if part == "attn" else (0.005, 0.995))
    return float(low), max(float(high), float(low) + 1e-12)


def add_scale(figure, artist, axes, part: str = "attn", overlay: bool = True) -> None:
    """The colour bar of one comparison, of a part or another quantity; on grey where the maps are over a grey image."""
    bar = figure.colorbar(artist, ax=axes, shrink=0.8, pad=0.015, aspect=30, panchor=False)
    if overlay:
        bar.ax.set_facecolor("0.5")
    name = {"attn": "attention probability", **dict.fromkeys(PARTS[1:], "logit")}.get(part, part)
    bar.set_label(name, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
