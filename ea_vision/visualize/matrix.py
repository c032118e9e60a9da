"""The whole N x N matrix of a layer's heads: a row a query, a column a key, both row by row over the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ea_vision.analysis.loading import parse_layers
from ea_vision.analysis.recording import PARTS, AttentionLayer
from ea_vision.base.errors import UsageError
from ea_vision.visualize.drawing import COLOR_MAP, PART_NAMES, add_scale, head_name, layer_name, new_figure, scale_of
from ea_vision.visualize.options import load_models, make_parser, only, parse_heads
from ea_vision.visualize.recordings import MEAN, Head, Recording, record
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision matrix --model ea_conv_transformer_cifar --layers 1-3 -o matrix.png photo.jpg
  ea-vision matrix --model pa_aa_resnet34 --layers 16 --part conv_logits -o matrix.pdf photo.jpg
"""


def attention_matrices(recording: Recording, layers: Sequence[int], heads: Sequence[Head],
                       part: str = "attn") -> Figure:
    """A row a layer, a column a head; one scale a layer. Ticks stand where a row of the image begins.

    Args:
        recording: with `part` of `layers` (numbers).
        heads: counted from 0, or "mean".
        part: one of `ea_vision.attention.PARTS`.
    """
    cell = 2.1
    figure = new_figure(max(5.0, len(heads) * cell + 1.4), len(layers) * (cell + 0.65) + 0.4)
    figure.suptitle(f"{recording.model.label}: {PART_NAMES[part]}", fontsize=10, fontweight="bold")
    rows = figure.subfigures(len(layers), 1, squeeze=False).ravel()
    for row, number in zip(rows, layers, strict=True):
        layer = recording.maps[number]
        H, W = layer.feat_size
        maps = layer.spatial(part)[0].flatten(-2).flatten(-3, -2).float().cpu()  # (K, N, N)
        shown = [np.asarray(maps.mean(0) if head == MEAN else maps[head]) for head in heads]
        scale = scale_of(part, shown)
        cells = row.subplots(1, len(heads), squeeze=False)[0]
        step = max(1, H // 7) * W
        ticks = np.arange(0, H * W, step)
        for axes, values, head in zip(cells, shown, heads, strict=True):
            artist = axes.imshow(values, cmap=COLOR_MAP, vmin=scale[0], vmax=scale[1], interpolation="nearest")
            axes.set_title(head_name(head), fontsize=8)
            axes.set_xticks(ticks - 0.5, ticks // W, fontsize=6)
            axes.set_yticks(ticks - 0.5, ticks // W, fontsize=6)
            axes.set_xlabel("row of the key", fontsize=7)
        cells[0].set_ylabel("row of the query", fontsize=7)
        row.suptitle(f"{layer_name(layer)}, map {H}x{W}", fontsize=9)
        add_scale(row, artist, cells, part, overlay=False)
    return figure


def check_part(part: str, layers: Sequence[AttentionLayer], label: str) -> None:
    """Raise UsageError where a layer lacks the part."""
    lacking = [str(layer.number) for layer in layers if part not in layer.parts]
    if lacking:
        raise UsageError(f"{label} has no {part} in layer {', '.join(lacking)}: choose --layers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="matrix.png", queries=False)
    parser.add_argument("--part", default="attn", choices=PARTS, help="what to draw (default: %(default)s)")
    options = parser.parse_args(argv)
    model = only(load_models(options), "model")
    layers = parse_layers(options.layers, model)
    heads = parse_heads(options.heads, layers)
    check_part(options.part, layers, model.label)
    for _, image, output in each_image(options):
        recording = record(model, image, layers, (options.part,))
        figure = attention_matrices(recording, [layer.number for layer in layers], heads, options.part)
        save(figure, output, options.dpi)
        if options.npz:
            save_maps([recording], output)
    return 0
