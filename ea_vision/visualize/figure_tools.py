"""What the scripts of this folder share: their options, the recording, the drawing, the writing.

Every script has a function that returns a matplotlib Figure, so that a notebook can do what the command does.
Heads are counted from 0, layers from 1, query points are y,x in pixels of the prepared (resized and cut) input.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import ea_vision
from ea_vision.analysis.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    find_images,
    load_model,
    parse_size,
    positive,
    read_image,
)
from ea_vision.analysis.loading import parse_layers as parse_layers
from ea_vision.analysis.recording import PARTS, AttentionLayer, AttentionMaps, LayerMaps
from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.base.processes import choose_device

PICTURES = (".png", ".svg", ".pdf")
MEAN = "mean"
DIAGONAL = ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75))
OVERLAY_ALPHA = 0.65
COLOR_MAP = "viridis"  # even steps of lightness, readable by the colour-blind
QUERY_COLORS = ("#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#F0E442")  # Okabe and Ito
PART_NAMES = {"attn": "attention", "logits": "mixed logits", "self_logits": "self logits",
              "conv_logits": "convolved logits", "prev_logits": "previous logits"}
Point = tuple[int, int]
Head = int | str  # a number, or MEAN


# ---- options --------------------------------------------------------------------------------------------------------

def make_parser(script: str, description: str, examples: str, *, output: str, layers: str = "all",
                heads: str | None = "all,mean", queries: bool = True, images: str = "+",
                suffixes: Sequence[str] = PICTURES) -> argparse.ArgumentParser:
    """The options that the scripts have in common; `heads=None` and `queries=False` leave theirs out."""
    parser = argparse.ArgumentParser(
        prog=f"visualize/{script}", description=description, epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ea_conv_transformer_cifar", metavar="NAME|RUN[,..]",
                        help=f"{WEIGHTS_HELP}; several separated by commas (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="random weights, whatever there is")
    parser.add_argument("--img-size", metavar="N|H,W", help="size of the input in pixels (default: the model's)")
    parser.add_argument("--layers", default=layers, metavar="1,2|3-5|all",
                        help="attention layers, counted from 1 in forward order, or their module names "
                             "(default: %(default)s)")
    if heads is not None:
        parser.add_argument("--heads", default=heads, metavar="0,1|all|mean",
                            help="heads, counted from 0; mean: their average (default: %(default)s)")
    if queries:
        parser.add_argument("--queries", nargs="+", default=[], metavar="Y,X",
                            help="query points in pixels of the input as the network sees it, from its top left corner "
                                 "(default: points on a diagonal, or the middle for one)")
    parser.add_argument("-o", "--output", default=output, metavar="FILE",
                        help=f"{', '.join(s[1:].upper() for s in suffixes)} by its suffix; of several images, "
                             "each gets its own file, its name added (default: %(default)s)")
    parser.add_argument("--dpi", type=positive, default=150, help="of pictures made of pixels (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="where the network runs; auto: cuda if there is one (default: %(default)s)")
    if images:
        parser.add_argument("images", nargs=images, metavar="IMAGE",
                            help="image files, folders of them, or digits:N, the Nth test image of the digits")
    parser.set_defaults(suffixes=tuple(suffixes))
    return parser


def only(values: Sequence, kind: str):
    """The one value of an option that allows one.

    Raises:
        UsageError: several.
    """
    if len(values) != 1:
        raise UsageError(f"this figure shows one {kind}; got {len(values)}: --help shows how to choose")
    return values[0]


def parse_queries(texts: Sequence[str], img_size: tuple[int, int],
                  default: Sequence[tuple[float, float]] = DIAGONAL) -> list[Point]:
    """`y,x` texts -> points; none gives the default, in shares of the sides.

    Raises:
        UsageError: not y,x, or outside the image.
    """
    H, W = img_size
    if not texts:
        return [(int(H * y), int(W * x)) for y, x in default]
    points = []
    for text in texts:
        sides = text.split(",")
        if len(sides) != 2 or not all(side.strip().isdigit() for side in sides):
            raise UsageError(f"a query must be y,x in pixels, got {text!r}")
        y, x = int(sides[0]), int(sides[1])
        if y >= H or x >= W:
            raise UsageError(f"query y,x must lie within the {H}x{W} input, got {text!r}")
        points.append((y, x))
    return points


def parse_heads(text: str, layers: Sequence[AttentionLayer]) -> list[Head]:
    """`all`, numbers and `mean`, separated by commas.

    Raises:
        UsageError: a head that a layer does not have.
    """
    num_heads = min(layer.num_heads for layer in layers)
    heads: list[Head] = []
    for item in text.split(","):
        if item == "all":
            heads += range(num_heads)
        elif item == MEAN:
            heads.append(MEAN)
        elif item.isdigit() and int(item) < num_heads:
            heads.append(int(item))
        else:
            raise UsageError(f"heads must be 0 to {num_heads - 1}, all or {MEAN}, got {item!r}")
    return heads


def load_models(options: argparse.Namespace) -> list[LoadedModel]:
    """The models of --model; an image that does not exist is found out first."""
    find_images(options.images)
    size, device = parse_size(options.img_size), choose_device(options.device)
    return [load_model(target, random=options.random, img_size=size, device=device)
            for target in options.model.split(",")]


# ---- recording ------------------------------------------------------------------------------------------------------

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


# ---- drawing --------------------------------------------------------------------------------------------------------

def new_figure(width: float, height: float) -> Figure:
    """A figure of width x height inches that belongs to no window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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


# ---- writing --------------------------------------------------------------------------------------------------------

def outputs_of(options: argparse.Namespace, images: Sequence[str]) -> list[Path]:
    """The file of each image: --output itself for one, NAME-IMAGE.SUFFIX for several. Made sure of before any work.

    Raises:
        UsageError: a suffix that cannot be written, or a folder that cannot be made.
    """
    output = check_output(Path(options.output), options.suffixes)
    if len(images) == 1:
        return [output]
    names, taken = [], set()
    for number, image in enumerate(images):
        name = Path(image).stem.replace(":", "-")
        name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        names.append(output.with_name(f"{output.stem}-{name}{output.suffix}"))
    return names


def check_output(output: Path, suffixes: Sequence[str] = PICTURES) -> Path:
    """See `outputs_of`."""
    if output.suffix.lower() not in suffixes:
        raise UsageError(f"--output must end in {' or '.join(suffixes)}, got {output}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        probe = output.parent / f".{output.name}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write into {output.parent}: {error.strerror}") from error
    if output.is_dir():
        raise UsageError(f"--output must be a file, and {output} is a folder")
    return output


def save(figure: Figure, output: Path, dpi: int) -> None:
    """Write a figure, all or nothing, in the format of the file's suffix."""
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):  # text as text, which can be found
        figure.savefig(data, format=output.suffix[1:].lower(), dpi=dpi)
    save_bytes(output, data.getvalue())


def save_bytes(output: Path, data: bytes) -> None:
    """Write a file, all or nothing."""
    atomic_write(output, data)


def each_image(options: argparse.Namespace) -> Iterator[tuple[str, object, Path]]:
    """(path, PIL image, output) for every image, with a progress bar; prints what was written."""
    images = find_images(options.images)
    outputs = outputs_of(options, images)
    for path in images:  # a broken one ends the command before the first picture
        read_image(path)
    for path, output in zip(tqdm(images, unit="image", disable=len(images) == 1), outputs, strict=True):
        yield path, read_image(path), output
    print("written:", *outputs)
