"""The whole N x N matrix of a layer's heads: one row per query, one column per key, of an image both row by row.

The tokens before a vision transformer's patches (class token, registers) come first; a line separates them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import check_width
from ea_vision.models.modes import unwrap
from ea_vision.ops import Size
from ea_vision.recorder.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import (
    FigureRequest,
    Heads,
    Layers,
    Models,
    fit_page,
    only,
    parse_heads,
    refuse_arguments,
    select_layers,
    text_of,
)
from ea_vision.visualize.image_maps import AnyImage, record, title_of
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet, style_of
from ea_vision.visualize.sheet import Block, Row, Tile
from ea_vision.visualize.text_matrix import Text, draw_text_matrix, is_text, record_text, tokens_of
from ea_vision.visualize.tiles import MEAN, Head, Recording, head_name, map_name, of_head
from ea_vision.zoo.loaded import LoadedModel

EXAMPLES = """\
  ea-vision matrix --model ea_conv_transformer_cifar --layers 1-3 -o matrix.png photo.jpg
  ea-vision matrix --model pa_aa_resnet34 --layers 16 --part conv_logits -o matrix.pdf photo.jpg
"""
TICKS = 7  # at most, along a side


def plot_matrix(
    model: Models | LayerMaps,
    image: AnyImage | Text | None = None,
    layers: Layers = None,
    heads: Heads = None,
    part: str = "attn",
    *,
    tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    **how,
) -> Figure:
    """Draw whole maps, queries by keys: one row per layer, one tile per head.

    Args:
        model: a network; or a recorded layer, `maps[n]` of `record_attention`, which needs no image and no layers.
        image: an image; for a network of text its ids (T,) or (1, T), a mapping of its inputs, or a string, whose
            tokenizer is `processor`.
        heads: default: all and their mean; of text the mean alone; of a recorded layer all of its heads.
        part: one of PARTS.
        tokens: texts of the tokens, which are written along both sides; for an encoder-decoder a pair of lists, of the
            source and the target. Default: by the tokenizer, else the ids.
        layers, **how: see `ea_vision.visualize.figure_request`.

    Raises:
        UsageError: a layer that lacks the part, another number of tokens, or a text without its tokenizer.
    """
    no_photo = "it draws no photo"
    refuse_arguments(
        "plot_matrix",
        how,
        queries="it draws all",
        style=no_photo,
        overlay=no_photo,
        opacity=no_photo,
    )
    if (
        isinstance(model, LayerMaps)
        or isinstance(model, nn.Module)
        and is_text(unwrap(model), image)
    ):
        return _plot_text(model, image, layers, heads, part, tokens, **how)
    if tokens is not None:
        raise UsageError(f"tokens belong to a text or a recorded layer, got {type(image).__name__}")
    request = FigureRequest(model, layers, heads, some=True, **how)
    loaded = only(request.models, "model")
    [layers] = request.layers
    without = [str(layer.number) for layer in layers if part not in layer.parts]
    if without:
        raise UsageError(
            f"{loaded.label} has no {part} in layer {', '.join(without)}: choose --layers"
        )
    request.warn_of_heads_left_out()
    recording = record(loaded, image, layers, (part,))
    return request.fit_page(partial(draw_matrix, recording), heads=request.heads, part=part)


def _plot_text(
    model: nn.Module | LayerMaps,
    text: Text,
    layers: Layers,
    heads: Heads,
    part: str,
    tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None,
    *,
    width: float | None = None,
    processor: Any = None,
    **style,
) -> Figure:
    look = style_of(style)
    check_width(width)
    if isinstance(model, LayerMaps):
        if tokens is None:
            count = model[part].shape[-1]
            tokens = list(map(str, range(count)))
        numbers = _recorded_heads(model, heads)
        return draw_text_matrix(
            [model], tokens_of(tokens), numbers, part, look, title=f"layer {model}", width=width
        )
    model = unwrap(model)
    loaded = LoadedModel(model, type(model).__name__, preparation=None)
    layers_drawn = select_layers(layers, loaded, some=True)
    numbers = [layer.number for layer in layers_drawn]
    maps, names = record_text(model, text, numbers, part, tokens, processor)
    draw = partial(
        draw_text_matrix,
        tokens=names,
        heads=parse_heads(text_of(MEAN if heads is None else heads), layers_drawn),
        part=part,
        style=look,
        title=loaded.label,
        width=width,
    )
    if layers is not None:
        return draw(maps)
    total = len(select_layers(None, loaded))
    return fit_page(lambda drawn, **how: draw(drawn[0], **how), [maps], [total])


def _recorded_heads(layer: LayerMaps, heads: Any) -> list[Head]:
    """Return the heads of a recorded layer to draw, by their numbers in the network; None: all that were recorded.

    Raises:
        UsageError: a head that was not recorded.
    """
    if heads is None:
        return list(layer.heads)
    of_network = AttentionLayer(layer.number, layer.name, max(layer.heads) + 1, layer.recorded())
    numbers = parse_heads(text_of(heads), [of_network])
    for head in numbers:
        if head != MEAN and head not in layer.heads:
            recorded = ", ".join(map(str, layer.heads))
            raise UsageError(f"layer {layer} was recorded with heads {recorded}, got head {head}")
    return numbers


def draw_matrix(
    recording: Recording,
    layers: Sequence[int],
    heads: Sequence[Head],
    part: str = "attn",
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
    left_out: str | None = None,
) -> Figure:
    """Draw one row per layer, one tile per head. Ticks stand where a row of the image begins.

    Args:
        recording: with `part` of `layers` (numbers).
        heads: counted from 0, or "mean".
        part: one of `ea_vision.recorder.recording.PARTS`.
        style: scale and cmap of the maps.
        width: inches.
        left_out: see `ea_vision.visualize.sheet.sheet`.
    """
    bare = MapStyle(scale=style.scale, cmap=style.cmap)
    blocks = []
    for layer in layers:
        maps = recording.maps[layer]
        tiles = [_tile(maps, head, part, bare) for head in heads]
        name = map_name(maps, len(layers) > 1)
        blocks.append(Block([Row(tiles)], name))
    return map_sheet(
        f"{title_of(recording.model)}: {part}",
        blocks,
        bare,
        width=width,
        note="one row per query, one column per key, both row by row over the image; ticks: where a row "
        "of the image begins",
        left_out=left_out,
    )


def _tile(layer: LayerMaps, head: Head, part: str, style: MapStyle) -> Tile:
    """Return a head's (T, T) map; attention in units of uniform attention."""
    maps = layer.relative() if part == "attn" else layer[part]  # (B, K, T, T)
    values = of_head(maps[0].float(), head).cpu().numpy()
    prefix = layer.num_prefix_tokens
    pixels_ask = layer.pixels_ask

    def paint(axes: Axes, norm: Normalize) -> None:
        drawn = axes.imshow(values, cmap=style.colormap(part), norm=norm, aspect="auto")
        drawn.set_interpolation("nearest")
        axes.set_xticks(_row_starts(layer.key_size, prefix), [])
        size = layer.feat_size if pixels_ask else (0, 1)
        axes.set_yticks(_row_starts(size, prefix), [])
        axes.tick_params(length=1.5, width=0.5, pad=0)
        axes.set_frame_on(True)
        axes.spines[:].set_linewidth(0.5)
        if prefix:
            axes.axvline(prefix - 0.5, color="white", linewidth=0.5)
        if prefix and pixels_ask:
            axes.axhline(prefix - 0.5, color="white", linewidth=0.5)

    return Tile(paint, head_name(head), values=values, part=part)


def _row_starts(size: Size, prefix: int) -> np.ndarray:
    """Return where rows of the image begin among the tokens, at most TICKS of them."""
    rows, columns = size
    step = max(1, -(-rows // TICKS))
    return prefix + np.arange(0, rows, step) * columns - 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__, EXAMPLES, output="matrix.png", queries=False, style=("scale", "cmap"), some=True
    )
    parser.add_argument(
        "--part", default="attn", choices=PARTS, help="what to draw (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    return run_figure(options, partial(plot_matrix, part=options.part))
