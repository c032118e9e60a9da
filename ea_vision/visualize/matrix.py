"""The whole N x N matrix of a layer's heads: a row a query, a column a key, both row by row over the image.

Of a vision transformer the tokens before the patches (class token, registers) come first, before a line."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from ea_vision.base.errors import UsageError
from ea_vision.recorder.recording import PARTS, LayerMaps
from ea_vision.visualize.figure_options import (
    Asked,
    Heads,
    Layers,
    Model,
    each_figure,
    make_parser,
    only,
)
from ea_vision.visualize.image_maps import AnyImage, Head, Recording, of_head, title_of
from ea_vision.visualize.map_style import STYLE, MapStyle, head_name, map_name, map_sheet
from ea_vision.visualize.sheet import Row, Tile

EXAMPLES = """\
  python visualize/matrix.py --model ea_conv_transformer_cifar --layers 1-3 -o matrix.png photo.jpg
  python visualize/matrix.py --model pa_aa_resnet34 --layers 16 --part conv_logits -o matrix.pdf photo.jpg
"""


def plot_matrix(
    model: Model,
    image: AnyImage,
    layers: Layers = None,
    heads: Heads = None,
    part: str = "attn",
    *,
    width: float | None = None,
    **style,
) -> Figure:
    """Draw whole maps, queries by keys: a row a layer, a tile a head. `part`: one of PARTS. See
    `ea_vision.visualize.figure_options` for the other arguments."""
    return _draw(Asked(model, layers, heads, some=True, width=width, **style), image, part)


def _draw(asked: Asked, image: AnyImage, part: str) -> Figure:
    lacking = [str(layer.number) for layer in asked.layers[0] if part not in layer.parts]
    if lacking:
        raise UsageError(
            f"{asked.models[0].label} has no {part} in layer {', '.join(lacking)}: choose --layers"
        )
    [recording] = asked.record(image, (part,))
    return draw_matrix(recording, asked.numbers[0], asked.heads, part, **asked.how)


def draw_matrix(
    recording: Recording,
    layers: Sequence[int],
    heads: Sequence[Head],
    part: str = "attn",
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
) -> Figure:
    """Draw a row a layer, a tile a head. Ticks stand where a row of the image begins.

    Args:
        recording: with `part` of `layers` (numbers).
        heads: counted from 0, or "mean".
        part: one of `ea_vision.recorder.recording.PARTS`.
        style: scale and cmap of the maps; the maps of a layer share a scale.
        width: inches.
    """
    groups = [
        (
            map_name(recording.maps[layer], len(layers) > 1),
            [Row([_tile(recording.maps[layer], head, part, style) for head in heads])],
        )
        for layer in layers
    ]
    return map_sheet(
        f"{title_of(recording.model)}: {part}",
        groups,
        style,
        width=width,
        note="a row a query, a column a key, both row by row over the image; ticks: where a row of it "
        "begins",
    )


def _tile(layer: LayerMaps, head: Head, part: str, style: MapStyle) -> Tile:
    """Return a head's (T, T) map; attention in units of uniform attention."""
    maps = (layer.relative() if part == "attn" else layer[part])[0].float()  # (K, T, T)
    values, prefix = of_head(maps, head).cpu().numpy(), layer.num_prefix_tokens

    def paint(axes: Axes, norm: Normalize) -> None:
        axes.imshow(
            values, cmap=style.colormap(part), norm=norm, interpolation="nearest", aspect="auto"
        )
        for set_ticks, (rows, cols) in (
            (axes.set_xticks, layer.key_size),
            (axes.set_yticks, layer.feat_size if layer.pixels_ask else (0, 1)),
        ):
            set_ticks(prefix + np.arange(0, rows, max(1, -(-rows // 7))) * cols - 0.5, [])
        axes.tick_params(length=1.5, width=0.5, pad=0)
        axes.set_frame_on(True)
        axes.spines[:].set_linewidth(0.5)
        for line in (axes.axhline, axes.axvline)[not layer.pixels_ask :] if prefix else ():
            line(prefix - 0.5, color="white", linewidth=0.5)

    return Tile(paint, head_name(head), values=values, part=part)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__, EXAMPLES, output="matrix.png", layers=None, heads="", queries=False
    )
    parser.add_argument(
        "--part", default="attn", choices=PARTS, help="what to draw (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    asked = Asked.by_options(options, some=True)
    only(asked.models, "model")
    return each_figure(options, asked, lambda asked, image: _draw(asked, image, options.part))
