"""The whole N x N matrix of a layer's heads: one row per query, one column per key, of an image both row by row.

The tokens before a vision transformer's patches (class token, registers) come first; a line separates them."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.models.modes import unwrap
from ea_vision.ops import Size
from ea_vision.recorder.recording import PARTS, LayerMaps
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import (
    AnyImage,
    FigureRequest,
    Heads,
    Layers,
    Models,
    only,
    parse_heads,
    record,
    text_of,
    title_of,
)
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet, style_of
from ea_vision.visualize.sheet import Block, Row, Tile
from ea_vision.visualize.text_matrix import (
    Text,
    Tokens,
    is_text,
    record_text,
    token_block,
    tokens_of,
)
from ea_vision.visualize.tiles import ALL, MEAN, Head, head_name, map_name, of_head
from ea_vision.zoo.loaded import LoadedModel

EXAMPLES = """\
  ea-vision matrix --model ea_conv_transformer_cifar --layers 1-3 -o matrix.png photo.jpg
  ea-vision matrix --model pa_aa_resnet34 --layers 16 --part conv_logits -o matrix.pdf photo.jpg
"""
TICKS = 7  # at most, along a side
STYLE_FIELDS = ("scale", "cmap")


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
    if isinstance(model, LayerMaps):
        numbers = parse_heads(text_of(ALL if heads is None else heads), [model])
        if tokens is None:
            tokens = list(map(str, range(model[part].shape[-1])))
        width = how.pop("width", None)
        return draw_matrix(
            {model.number: model},
            [model.number],
            numbers,
            part,
            style_of(how, STYLE_FIELDS),
            title=f"layer {model}",
            tokens=tokens_of(tokens),
            width=width,
        )
    is_of_text = isinstance(model, nn.Module) and is_text(unwrap(model), image)
    if tokens is not None and not is_of_text:
        raise UsageError(f"tokens belong to a text or a recorded layer, got {type(image).__name__}")
    tokenizer = None
    if is_of_text:
        model = LoadedModel(unwrap(model), type(unwrap(model)).__name__, preparation=None)
        heads = MEAN if heads is None else heads
        tokenizer = how.pop("processor", None)
    request = FigureRequest(model, layers, heads, some=True, style_fields=STYLE_FIELDS, **how)
    loaded = only(request.models, "model")
    [its_layers] = request.layers
    without = [str(layer.number) for layer in its_layers if part not in layer.parts]
    if without:
        raise UsageError(
            f"{loaded.label} has no {part} in layer {', '.join(without)}: choose --layers"
        )
    if is_of_text:
        recording, tokens = record_text(loaded, image, its_layers, part, tokens, tokenizer)
    else:
        recording = record(loaded, image, its_layers, (part,))
    draw = partial(
        draw_matrix,
        recording.maps,
        heads=request.heads([recording]),
        part=part,
        title=title_of(loaded),
        tokens=tokens,
    )
    return request.fit_page(draw)


def draw_matrix(
    maps: Mapping[int, LayerMaps],
    layers: Sequence[int],
    heads: Sequence[Head],
    part: str = "attn",
    style: MapStyle = STYLE,
    *,
    title: str = "",
    tokens: Tokens | None = None,
    **page,
) -> Figure:
    """Draw one row per layer, one tile per head.

    Args:
        maps: by number, with `part` of `layers`.
        heads: counted from 0, or "mean".
        part: one of `ea_vision.recorder.recording.PARTS`.
        style: scale and cmap of the maps.
        title: of the figure, before the part.
        tokens: those at rows and columns; None: ticks stand where a row of the image begins.
        **page: width and left_out, see `ea_vision.visualize.sheet.sheet`.

    Raises:
        UsageError: layers with other numbers of tokens.
    """
    bare = MapStyle(scale=style.scale, cmap=style.cmap)
    note = "one row per query, one column per key"
    if tokens is None:
        note += ", both row by row over the image; ticks: where a row of the image begins"
    else:
        note += "; blank: masked"
    blocks = []
    for number in layers:
        layer = maps[number]
        if tokens is None:
            tiles = [_tile(layer, head, part, bare) for head in heads]
            blocks.append(Block([Row(tiles)], map_name(layer, len(layers) > 1)))
        else:
            blocks.append(token_block(layer, tokens, heads, part, bare, page.get("width")))
    return map_sheet(f"{title}: {part}", blocks, bare, note=note, **page)


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
        __doc__, EXAMPLES, output="matrix.png", queries=False, style=STYLE_FIELDS, some=True
    )
    parser.add_argument(
        "--part", default="attn", choices=PARTS, help="what to draw (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    return run_figure(options, partial(plot_matrix, part=options.part))
