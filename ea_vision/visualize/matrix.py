"""The whole N x N matrix of a layer's heads: one row per query, one column per key, of an image both row by row.

The tokens before a vision transformer's patches (class token, registers) come first; a line separates them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.figures import PAGE
from ea_vision.base.print import points, text_width
from ea_vision.layers.inspect_attention import CROSS_ATTENTION
from ea_vision.models.modes import evaluating, unwrap
from ea_vision.ops import Size
from ea_vision.recorder.recording import PARTS, AttentionLayer, LayerMaps, record_attention
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
from ea_vision.visualize.sheet import LARGEST_TILE, MARGIN, Block, Row, Tile
from ea_vision.visualize.tiles import ALL, MEAN, Head, Recording, head_name, map_name, of_head
from ea_vision.zoo.loaded import LoadedModel

EXAMPLES = """\
  ea-vision matrix --model ea_conv_transformer_cifar --layers 1-3 -o matrix.png photo.jpg
  ea-vision matrix --model pa_aa_resnet34 --layers 16 --part conv_logits -o matrix.pdf photo.jpg
"""
TICKS = 7  # at most, along a side
STYLE_FIELDS = ("scale", "cmap")
Text = str | Sequence[int] | Tensor | Mapping[str, Tensor]
LONGEST_TOKEN = 12  # letters; longer tokens are cut
CELL = 1.2  # heights of a letter: a cell whose token is written
HIDDEN_LOGIT = -1e30  # masks add at least this to logits


@dataclass
class Side:
    """The tokens along a side of a layer's maps.

    Attributes:
        tokens: as they are written: long ones are cut.
        padding: True where a position is padding.
    """

    tokens: Sequence[str]
    padding: np.ndarray

    @property
    def room(self) -> float:
        """How wide the longest token is, in points, with a margin."""
        return points() + max(text_width(token, points()) for token in self.tokens)

    @property
    def length(self) -> float:
        """How long the side is, in points, if every token is written."""
        return CELL * points() * len(self.tokens)


@dataclass
class Tokens:
    """The tokens along the sides of a network's maps.

    Attributes:
        source: of an encoder, or of the only text.
        target: of a decoder; empty: there is none beside the source.
        padding: for source and target, True where a position is padding; None: unknown.
    """

    source: Sequence[str]
    target: Sequence[str] = ()
    padding: Sequence[np.ndarray | None] = (None, None)

    def kind(self, layer: LayerMaps) -> str:
        """Return "encoder", "decoder" or "cross" in a network with a target, by the module's name; else ""."""
        if not self.target:
            return ""
        if CROSS_ATTENTION.search(layer.name):
            return "cross"
        return "decoder" if "decoder" in layer.name else "encoder"

    def sides(self, layer: LayerMaps) -> list[Side]:
        """Return the sides of a layer's queries and of its keys. A decoder has the target on both sides; cross
        attention asks from the target to the source.

        Raises:
            UsageError: the layer has other numbers of queries or keys.
        """
        [part, *_] = layer.recorded()
        kind = self.kind(layer)
        targets = {"queries": kind in ("decoder", "cross"), "keys": kind == "decoder"}
        sides = []
        for (what, index), count in zip(targets.items(), layer[part].shape[-2:], strict=True):
            tokens = (self.source, self.target)[index]
            if len(tokens) != count:
                raise UsageError(
                    f"layer {layer} has {count} {what}: as many tokens are required, got {len(tokens)}"
                )
            padding = self.padding[index]
            written = [
                token if len(token) <= LONGEST_TOKEN else f"{token[: LONGEST_TOKEN - 1]}…"
                for token in tokens
            ]
            sides.append(Side(written, np.zeros(count, bool) if padding is None else padding))
        return sides


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

    Of a text the tokens stand along both sides. Attention is in units of uniform attention over the keys that a query
    sees. What no head sees is blank: later tokens in causal attention, and padding.

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
            blocks.append(_token_block(layer, tokens, heads, part, bare, page.get("width")))
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


# ---- texts -----------------------------------------------------------------------------------------------------------


def is_text(model: nn.Module, value: Any) -> bool:
    """Return whether a value is a network's text: ids, a mapping with input_ids, or a string for a network that takes
    ids (transformers' main_input_name)."""
    if isinstance(value, Mapping):
        return "input_ids" in value
    if isinstance(value, Tensor):
        return value.ndim <= 2 and not value.is_floating_point()
    if isinstance(value, str):
        return getattr(model, "main_input_name", "") == "input_ids"
    return isinstance(value, Sequence) and all(isinstance(item, Integral) for item in value)


def tokens_of(tokens: Sequence[str] | tuple[Sequence[str], Sequence[str]]) -> Tokens:
    """Return the tokens of a list, or of a pair of lists: source and target."""
    if isinstance(tokens, tuple) and len(tokens) == 2 and not isinstance(tokens[0], str):
        return Tokens(*tokens)
    return Tokens(tokens)


def record_text(
    loaded: LoadedModel,
    text: Text,
    layers: Sequence[AttentionLayer],
    part: str,
    tokens: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> tuple[Recording, Tokens]:
    """Run a network on a text, in evaluation mode; return the maps of its layers, and its tokens.

    Args:
        text: ids (T,) or (1, T); a mapping of the network's inputs, such as a tokenizer returns; or a string, which
            the tokenizer splits. An encoder-decoder without decoder_input_ids begins with its start token.
        tokens: texts of the tokens; for an encoder-decoder a pair of lists. Default: by the tokenizer, or the ids.
        tokenizer: of transformers, its path or name.

    Raises:
        UsageError: a string without a tokenizer, or several texts.
    """
    model = loaded.model
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if isinstance(text, str):
        if tokenizer is None:
            raise UsageError(
                "a text needs its tokenizer (processor=), or ids and tokens; got a string alone"
            )
        text = tokenizer(text, return_tensors="pt")
    inputs = text if isinstance(text, Mapping) else {"input_ids": text}
    inputs = {
        name: torch.atleast_2d(torch.as_tensor(value)).to(loaded.device)
        for name, value in inputs.items()
    }
    if len(inputs["input_ids"]) != 1:
        raise UsageError(f"one text is required, got {len(inputs['input_ids'])}")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
        start = config.decoder_start_token_id or 0
        inputs["decoder_input_ids"] = torch.tensor([[start]], device=loaded.device)
    numbers = [layer.number for layer in layers]
    recorded = record_attention(model, numbers, parts=(part,))
    with evaluating(model), torch.no_grad(), recorded as maps:
        if isinstance(text, Mapping) or len(inputs) > 1:
            model(**inputs)
        else:
            model(inputs["input_ids"])
    sides = []
    padding = []
    for name in ("", "decoder_"):
        ids = inputs.get(f"{name}input_ids", torch.empty(1, 0))[0].tolist()
        side = list(map(str, ids)) if tokenizer is None else tokenizer.convert_ids_to_tokens(ids)
        sides.append(side)
        mask = inputs.get(f"{name}attention_mask")
        padding.append(None if mask is None else (mask[0] == 0).cpu().numpy())
    written = Tokens(*sides) if tokens is None else tokens_of(tokens)
    written.padding = padding
    return Recording(loaded, None, maps), written


def _token_block(
    layer: LayerMaps,
    tokens: Tokens,
    heads: Sequence[Head],
    part: str,
    style: MapStyle,
    width: float | None,
) -> Block:
    """Return a block of a layer of one text: one tile per head, with tokens at rows (queries) and columns (keys).

    Args:
        width: of the figure in inches.

    Raises:
        UsageError: the layer has another number of tokens.
    """
    room = 72 * (width or PAGE) - 2 * MARGIN
    queries, keys = tokens.sides(layer)
    side = min(room, queries.room + keys.length)
    each = max(1, int(room // side))
    tiles = [_token_tile(layer, queries, keys, head, part, style) for head in heads]
    rows = [Row(tiles[first : first + each]) for first in range(0, len(tiles), each)]
    name = f"layer {layer.number} {tokens.kind(layer)}".rstrip()
    return Block(rows, name, enlarged=side / LARGEST_TILE)


def _token_tile(
    layer: LayerMaps, queries: Side, keys: Side, head: Head, part: str, style: MapStyle
) -> Tile:
    maps = layer[part][0].float().cpu()
    blank = maps == 0 if part == "attn" else maps <= HIDDEN_LOGIT
    hidden = blank.all(0).numpy() | queries.padding[:, None] | keys.padding
    place = head if head == MEAN else layer.heads.index(head)
    values = of_head(maps, place).numpy()
    if part == "attn":
        values = values * (~hidden).sum(-1, keepdims=True)

    def paint(axes: Axes, norm: Normalize) -> None:
        wide, high = (72 / axes.figure.dpi * length for length in axes.bbox.size)
        left = queries.room / wide
        below = 1 - keys.room / high
        inside = axes.inset_axes((left, 0, 1 - left, below))
        shown = np.ma.masked_where(hidden, values)
        inside.imshow(shown, style.colormap(part), norm, aspect="auto", interpolation="nearest")
        inside.xaxis.tick_top()
        for axis, side, length in (
            (inside.yaxis, queries, high * below),
            (inside.xaxis, keys, wide * (1 - left)),
        ):
            step = math.ceil(side.length / length - 0.01)
            axis.set_ticks(range(0, len(side.tokens), step), side.tokens[::step])
            axis.set_tick_params(length=0, pad=points() / 2, labelsize=points())
        inside.tick_params("x", rotation=90)
        inside.spines[:].set_linewidth(0.5)

    aspect = (keys.room + queries.length) / (queries.room + keys.length)
    return Tile(paint, head_name(head), aspect=aspect, values=values[~hidden], part=part)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__, EXAMPLES, output="matrix.png", queries=False, style=STYLE_FIELDS, some=True
    )
    parser.add_argument(
        "--part", default="attn", choices=PARTS, help="what to draw (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    return run_figure(options, partial(plot_matrix, part=options.part))
