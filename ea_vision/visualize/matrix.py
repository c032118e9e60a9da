"""The whole N x N matrix of a layer's heads: a row a query, a column a key, both row by row over the image.

Of a vision transformer the tokens before the patches (class token, registers) come first, before a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ea_vision.analysis.recording import PARTS, AttentionLayer, LayerMaps
from ea_vision.base.errors import UsageError
from ea_vision.visualize.figure_options import add_colors, load_models, make_parser, only, parse_heads, shown_layers
from ea_vision.visualize.image_maps import MEAN, Head, Recording, record
from ea_vision.visualize.map_style import (
    BARE,
    PART_NAMES,
    MapStyle,
    add_scale,
    head_name,
    map_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision matrix --model ea_conv_transformer_cifar --layers 1-3 -o matrix.png photo.jpg
  ea-vision matrix --model pa_aa_resnet34 --layers 16 --part conv_logits -o matrix.pdf photo.jpg
"""


def attention_matrices(recording: Recording, layers: Sequence[int], heads: Sequence[Head],
                       part: str = "attn", style: MapStyle = BARE) -> Figure:
    """A row a layer, a column a head. Ticks stand where a row of the image begins.

    Args:
        recording: with `part` of `layers` (numbers).
        heads: counted from 0, or "mean".
        part: one of `ea_vision.analysis.recording.PARTS`.
        style: scale and cmap of the maps; the maps of a layer share a scale.
    """
    text = text_scale()
    cell = 2.1 * max(1.0, 0.6 * text)
    width = max(4.0 * text, len(heads) * cell + 1.4 * text)
    title = wrapped(f"{recording.model.label}: {PART_NAMES[part]}", width - 0.1, 12)
    names = [wrapped(map_name(recording.maps[number]), width - 0.1, 10) for number in layers]
    lines = 1 + max(name.count("\n") for name in names)
    figure = new_figure(width, len(layers) * (cell + (0.55 + 0.18 * lines) * text)
                        + (0.2 + 0.2 * (1 + title.count("\n"))) * text)
    figure.suptitle(title)
    rows = figure.subfigures(len(layers), 1, squeeze=False).ravel()
    groups = [_matrices(recording.maps[number], heads, part) for number in layers]
    for row, number, name, maps, norms in zip(
            rows, layers, names, groups, norms_of(groups, style, part, overlay=False), strict=True):
        layer = recording.maps[number]
        cells = row.subplots(1, len(heads), squeeze=False)[0]
        prefix, of = layer.num_prefix_tokens, "channel" if layer.channels else "row"
        for axes, values, norm, head in zip(cells, maps, norms, heads, strict=True):
            axes.imshow(values, cmap=style.colormap(False), norm=norm, interpolation="nearest")
            axes.set_title(head_name(head), fontsize="small")
            axes.set_xticks(*_ticks(prefix, layer.key_size), fontsize="x-small")
            axes.set_yticks(*_ticks(prefix, layer.feat_size if layer.pixels_ask else (0, 1)), fontsize="x-small")
            for line in (axes.axhline, axes.axvline)[not layer.pixels_ask:] if prefix else ():
                line(prefix - 0.5, color="white", linewidth=0.5)
            axes.set_xlabel(f"{of} of the key", fontsize="x-small")
        cells[0].set_ylabel(f"{of} of the query", fontsize="x-small")
        row.suptitle(name, fontsize="medium")
        add_scale(row, cells, norms[0], style, part, overlay=False)
    return figure


def _ticks(prefix: int, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return where rows of a grid begin, after the prefix tokens, and their numbers; none for channels."""
    rows = np.arange(0, size[0], max(1, -(-size[0] // 7)))
    return prefix + rows * size[1] - 0.5, rows


def _matrices(layer: LayerMaps, heads: Sequence[Head], part: str) -> list[np.ndarray]:
    """(N, N) by head; attention in units of uniform attention."""
    maps = (layer.relative() if part == "attn" else layer[part])[0].float().cpu().numpy()  # (K, N, N)
    return [maps.mean(0) if head == MEAN else maps[head] for head in heads]


def check_part(part: str, layers: Sequence[AttentionLayer], label: str) -> None:
    """Raise UsageError where a layer lacks the part."""
    lacking = [str(layer.number) for layer in layers if part not in layer.parts]
    if lacking:
        raise UsageError(f"{label} has no {part} in layer {', '.join(lacking)}: choose --layers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="matrix.png", layers=None, queries=False)
    add_colors(parser)
    parser.add_argument("--part", default="attn", choices=PARTS, help="what to draw (default: %(default)s)")
    options = parser.parse_args(argv)
    style = MapStyle(overlay=False, scale=options.scale, cmap=options.cmap)
    model = only(load_models(options), "model")
    [layers] = shown_layers(options, [model])
    heads = parse_heads(options.heads, layers)
    check_part(options.part, layers, model.label)
    for _, image, output in each_image(options):
        recording = record(model, image, layers, (options.part,), places=False)
        figure = attention_matrices(recording, [layer.number for layer in layers], heads, options.part, style)
        save(figure, output, options.dpi)
        if options.npz:
            save_maps([recording], output)
    return 0
