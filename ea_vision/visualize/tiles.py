"""Tiles of a figure: the maps of a recording, and the photo with its query points; and the names beside them.

In the style "fog" the photo is blended with light grey: none of the photo is left where attention is at most half of
uniform attention, all of it where attention is at least twice, and between its share is linear in the logarithm of
attention. Shares are interpolated bilinearly between cells. The line runs where half of the photo is left, so it passes
between cells where attention crosses uniform attention. The text below gives the share of attention on the eighth of
the cells that has most.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.functional import interpolate

from ea_vision.base.figures import COLORS
from ea_vision.base.print import points
from ea_vision.ops import Size
from ea_vision.recorder.maps import PARTS, AttentionMaps, LayerMaps
from ea_vision.recorder.quantities import total_variation
from ea_vision.visualize.map_style import TIMES, MapStyle, is_attention, short
from ea_vision.visualize.sheet import Tile
from ea_vision.zoo.loaded import LoadedModel

MEAN = "mean"  # of heads
ALL = "all"  # the mean of all queries
OWN_ALONE = "attn_own_alone"  # the part of `add_own_alone`
# (y, x) in pixels of the input, a token before a transformer's patches (cls, reg1, ...), or ALL
Query = tuple[int, int] | str
Head = int | str  # a number, or MEAN
LINE_COLOR, *QUERY_COLORS = COLORS
FOG = 0.83  # grey
FOG_SIDE = 192  # minimum number of pixels along the longer side of a photo in fog
WHITE_RIM = patheffects.withStroke(linewidth=1.8, foreground="white")


def cell_of(query: Query, img_size: Size, feat_size: Size) -> Query:
    """Return the cell (row, column) of a map of `feat_size` that contains a pixel (y, x) of an input of `img_size`.
    With another input's size as `feat_size`, this is the pixel of that input. A token's name is returned unchanged."""
    if isinstance(query, str):
        return query
    y, x = query
    H, W = img_size
    rows, columns = feat_size
    return y * rows // H, x * columns // W


def of_head(maps: Tensor, head: Head) -> Tensor:
    """Return one head of (K, ...), or the mean of all."""
    return maps.mean(0) if head == MEAN else maps[head]


@dataclass
class Recording:
    """An image as a network saw it, and the maps of its layers.

    Attributes:
        model: the network.
        image: (3, H, W) in 0..1, the area that the network's patches cover; pixels outside are cut off, padding is 0.
        maps: of its layers.
        photo: (height, width, 3) uint8, the same area at a higher resolution; None if there is only `image`.
        output: of the network.
        batch: its input, (1, C, H, W).
        img_size: (H, W).
        aspect: H / W.
        extent: of the area, for `Axes.imshow`.
    """

    model: LoadedModel
    image: Tensor
    maps: AttentionMaps
    photo: np.ndarray | None = None
    output: Any = None
    batch: Tensor | None = None

    img_size = property(lambda self: tuple(self.image.shape[1:]))
    aspect = property(lambda self: self.img_size[0] / self.img_size[1])
    extent = property(lambda self: (0, self.img_size[1], self.img_size[0], 0))

    def pixels(self) -> np.ndarray:
        """Return the photo, or the image if there is no photo of higher resolution: (height, width, 3) in 0..1."""
        if self.photo is not None:
            return self.photo / 255
        return self.image.permute(1, 2, 0).cpu().numpy()

    def cell(self, layer: int, query: Query) -> Query:
        """Return `cell_of` a query in a layer's map."""
        return cell_of(query, self.img_size, self.maps[layer].feat_size)

    def query_map(self, layer: int, query: Query, head: Head, part: str = "attn") -> np.ndarray:
        """Return a query's row of a part over the map's pixels, (H', W'), for one head or the mean of heads. ALL gives
        the mean over all pixels' queries. Attention (OWN_ALONE too) is in units of uniform attention."""
        maps = self.maps[layer]
        if query == ALL:
            rows = maps.spatial(part)  # (B, K, H, W, H', W')
        else:
            cell = self.cell(layer, query)
            _, rows = maps.of_cell(cell, part)  # (B, K, H', W')
        values = of_head(rows[0], head).float().cpu().numpy()
        if is_attention(part):
            keys = maps.num_keys()
            if query == ALL:
                keys = keys[:, :, None, None]
            elif isinstance(query, str):
                keys = keys.max()
            else:
                keys = keys[cell]
            values = values * keys
        return values.mean((0, 1)) if query == ALL else values

    def change(self, layer: int, query: Query, head: Head) -> float:
        """Return how far a query's attention is from OWN_ALONE, 0 to 1; of the mean of heads, or of all queries, the
        mean of their differences."""
        maps = self.maps[layer]
        differences = of_head(total_variation(maps.attn[0], maps[OWN_ALONE][0]), head)  # (T,)
        if query == ALL:
            return differences[maps.num_prefix_tokens :].mean().item()
        return differences[maps.token(self.cell(layer, query))].item()

    def beside_patches(self, layer: int, query: Query, head: Head) -> str:
        """Say how much of a query's attention goes to the tokens before the patches: "cls 12%, reg 30%" (all registers
        together); "" if there are none or their shares round to 0%."""
        maps = self.maps[layer]
        shares = Counter()
        row = maps.of_cell(self.cell(layer, query))[0][0]  # (K, P)
        values = of_head(row, head).tolist()
        for name, share in zip(maps.prefix_names, values, strict=True):
            shares[name.rstrip("0123456789")] += share
        texts = [f"{kind} {share:.0%}" for kind, share in shares.items()]
        return ", ".join(text for text in texts if not text.endswith(" 0%"))


# ---- names ----------------------------------------------------------------------------------------------------------


def head_name(head: Head) -> str:
    return "mean of heads" if head == MEAN else f"head {head}"


def query_name(query: Query) -> str:
    """Name a query: `y 3, x 4`, `class token`, `distillation token`, `register 1`, `mean of all queries`; one that a
    detector has learned `no. 3`."""
    if not isinstance(query, str):
        return f"y {query[0]}, x {query[1]}"
    names = {"cls": "class token", "dist": "distillation token", ALL: "mean of all queries"}
    return names.get(query, query.replace("reg", "register ").replace("query", "no. "))


def queries_name(queries: Sequence[Query]) -> str:
    """Name queries: `query y 3, x 4`, `mean of all queries`; several: `queries 1: y 3, x 4; 2: class token`."""
    if list(queries) == [ALL]:
        return query_name(ALL)
    if len(queries) == 1:
        return f"query {query_name(queries[0])}"
    names = [f"{number}: {query_name(query)}" for number, query in enumerate(queries, start=1)]
    return "queries " + "; ".join(names)


def map_name(layer: LayerMaps, short: bool = False) -> str:
    """Name a layer and the size of its map; `short`: in two lines, for a row of a grid."""
    size = "channels" if layer.channels else "x".join(map(str, layer.feat_size))
    if short:
        return f"layer {layer.number}\n{size}"
    what = "from channel to channel of a head" if layer.channels else f"map {size}"
    name = f"layer {layer.number}, {what}"
    if layer.prefix_names:
        name += f" after {', '.join(layer.prefix_names)}"
    return name


def layers_name(numbers: Sequence[int]) -> str:
    """Name layers: `layers 1 to 3` without a gap, `layers 1, 3` otherwise, `layer 4` alone."""
    without_gap = range(numbers[0], numbers[-1] + 1)
    if len(numbers) > 2 and list(numbers) == list(without_gap):
        return f"layers {numbers[0]} to {numbers[-1]}"
    plural = "s" if len(numbers) > 1 else ""
    return f"layer{plural} " + ", ".join(map(str, numbers))


# ---- photos and query points ----------------------------------------------------------------------------------------


def photo_of(
    recording: Recording,
    queries: Sequence[Query] = (),
    feat_size: Size | None = None,
    title: str = "",
) -> Tile:
    """Return the photo with numbered query points, each framed as a cell of a map of `feat_size` (default: the size of
    the largest map)."""
    sizes = [layer.feat_size for layer in recording.maps.values()]
    cells = feat_size or max(sizes, key=math.prod, default=(1, 1))

    def paint(axes: Axes, _) -> None:
        axes.set_label("photo")
        axes.imshow(recording.pixels(), extent=recording.extent)
        for number, query in enumerate(queries, start=1):
            mark_query(axes, recording, query, cells, number, numbered=True)

    return Tile(paint, title, aspect=recording.aspect)


def mark_query(
    axes: Axes,
    recording: Recording,
    query: Query,
    feat_size: Size,
    number: int,
    numbered: bool = False,
) -> None:
    """Frame the map's cell that contains a query; if `numbered`, draw its number in a disc. A white rim makes both
    visible on any background. A token has no cell: the figure's head names it."""
    if isinstance(query, str):
        return
    color = QUERY_COLORS[(number - 1) % len(QUERY_COLORS)]
    H, W = recording.img_size
    row, col = cell_of(query, (H, W), feat_size)
    height = H / feat_size[0]
    width = W / feat_size[1]
    y = (row + 0.5) * height
    x = (col + 0.5) * width
    frame = Rectangle((col * width, row * height), width, height, fill=False, clip_on=False)
    frame.set(edgecolor=color, linewidth=0.9, path_effects=[WHITE_RIM])
    axes.add_patch(frame)
    if numbered:
        disc = dict(boxstyle="circle,pad=0.15", facecolor=color, edgecolor="white", linewidth=0.7)
        text = axes.text(x, y, str(number), color="white", bbox=disc)
        text.set(fontsize=points(), ha="center", va="center_baseline")


# ---- maps -----------------------------------------------------------------------------------------------------------


def tile_of(
    recording: Recording,
    layer: int,
    style: MapStyle,
    head: Head = MEAN,
    query: Query = ALL,
    part: str = "attn",
    title: str = "",
    number: int = 1,
) -> Tile:
    """Return a tile of one query's attention in one head of a layer, or of another part. Below a transformer's
    attention it gives the shares of the tokens before the patches.

    Args:
        layer: number. head: counted from 0, or "mean".
        query: (y, x) in pixels of the input, a token by name, or "all".
        title: above the tile.
        number: of the query in the figure, from 1; it chooses the colour of its frame.
    """
    values = recording.query_map(layer, query, head, part)
    note = ""
    if part == "attn" and query != ALL:
        note = recording.beside_patches(layer, query, head)
    return map_of(values, recording, style, title, note, point=query, number=number, part=part)


def map_of(
    values: np.ndarray,
    recording: Recording,
    style: MapStyle,
    title: str = "",
    note: str = "",
    *,
    point: Query = ALL,
    number: int = 1,
    cells: Size | None = None,
    part: str = "attn",
) -> Tile:
    """Return a tile of a map (H', W') over the input's area, with its query's cell framed.

    Args:
        values: of a part, as `Recording.query_map` returns them; logits are never drawn over the photo.
        title, note: above and below it.
        point: the query, in pixels of the input, a token by name or "all"; number: of the query in the figure.
        cells: (height, width) of the map whose cell frames the query; default: this map.
    """

    fog = style.has_fog(part)
    if fog:
        note = "; ".join(filter(None, (concentration(values), note)))

    def paint(axes: Axes, norm: Normalize) -> None:
        if fog:
            _paint_fog(axes, values, recording, norm)
        else:
            _paint_cells(axes, values, recording, style, norm, part)
        mark_query(axes, recording, point, cells or values.shape, number)
        if style.scale == "tile" and is_attention(part) and not fog:
            _write_maximum(axes, values)

    return Tile(paint, title, note, recording.aspect, values, part)


def concentration(values: np.ndarray) -> str:
    """Say how concentrated a map (H, W) is: "8 of 64 cells hold 83%", the eighth of the cells that has most."""
    cells = np.sort(values.ravel())[::-1]
    count = math.ceil(len(cells) / 8)
    share = cells[:count].sum() / max(cells.sum(), 1e-30)
    return f"{count} of {len(cells)} cells hold {share:.0%}"


def in_fog(
    pixels: np.ndarray, values: np.ndarray, norm: Normalize
) -> tuple[np.ndarray, np.ndarray]:
    """Blend a photo (H, W, 3) in 0..1 with FOG by a map (H', W') of attention in units of uniform attention.

    Returns:
        the photo in fog; the share of the photo that is left, which is what the norm gives, interpolated bilinearly.
    """
    repeats = math.ceil(FOG_SIDE / max(pixels.shape[:2]))
    photo = pixels.repeat(repeats, 0).repeat(repeats, 1)
    cells = torch.from_numpy(np.asarray(norm(values), dtype=np.float32))
    clear = interpolate(cells[None, None], photo.shape[:2], mode="bilinear")[0, 0].numpy()
    return FOG + (photo - FOG) * clear[..., None], clear


def _paint_fog(axes: Axes, values: np.ndarray, recording: Recording, norm: Normalize) -> None:
    photo, clear = in_fog(recording.pixels(), values, norm)
    axes.imshow(photo, extent=recording.extent)
    if clear.min() < 0.5 < clear.max():
        rows, columns = clear.shape
        H, W = recording.img_size
        x = (np.arange(columns) + 0.5) * W / columns
        y = (np.arange(rows) + 0.5) * H / rows
        line = axes.contour(x, y, clear, [0.5], colors=[LINE_COLOR], linewidths=[1.1])
        line.set_path_effects([patheffects.withStroke(linewidth=1.9, foreground="white")])


def _paint_cells(
    axes: Axes,
    values: np.ndarray,
    recording: Recording,
    style: MapStyle,
    norm: Normalize,
    part: str,
) -> None:
    over_photo = style.overlay and part not in PARTS[1:]
    if over_photo:
        grey = recording.pixels() @ (0.299, 0.587, 0.114)
        # half the contrast: a bright part of the photo must not read as attention
        axes.imshow(grey, "gray", vmin=-0.5, vmax=1.5, extent=recording.extent)
    drawn = axes.imshow(values, style.colormap(part), norm, extent=recording.extent)
    drawn.set_interpolation("nearest")
    drawn.set_alpha(style.opacity if over_photo else None)


def _write_maximum(axes: Axes, values: np.ndarray) -> None:
    text = axes.text(0.97, 0.03, f"{TIMES}{short(values.max())}", transform=axes.transAxes)
    text.set(ha="right", va="bottom", fontsize=points(), color="black", path_effects=[WHITE_RIM])
