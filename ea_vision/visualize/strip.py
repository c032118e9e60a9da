"""One query through the layers of a chain: previous, convolved, self and mixed logits, and the attention they give
(PA paper, figure 8; EA paper, figure 11)."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ea_vision.analysis.loading import parse_layers
from ea_vision.analysis.recording import PARTS
from ea_vision.visualize.drawing import (
    PART_NAMES,
    add_scale,
    blank,
    draw_image,
    draw_map,
    head_name,
    mark_point,
    new_figure,
    scale_of,
)
from ea_vision.visualize.options import load_models, make_parser, only, parse_heads, parse_queries
from ea_vision.visualize.recordings import Head, Point, Recording, query_map, record
from ea_vision.visualize.writing import each_image, save, save_maps

ROWS = ("prev_logits", "conv_logits", "self_logits", "logits", "attn")
EXAMPLES = """\
  ea-vision strip --model ea_conv_transformer_cifar --queries 16,16 -o strip.png photo.jpg
  ea-vision strip --model pa_aa_resnet50 --layers 5-10 --heads 3 -o strip.svg photo.jpg
"""


def evolution_strip(recording: Recording, layers: Sequence[int], head: Head, point: Point) -> Figure:
    """For each chain among `layers` a strip: a column a layer, rows previous / convolved / self / mixed / attention.

    The logits of a strip share one scale, the attention another. A chain's first layer has no previous map. With EA's
    beta = 1 the mixed logits are the convolved ones.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: (y, x) in pixels of the input.
    """
    evolving = any(recording.maps[layer].prev_logits is not None for layer in layers)
    rows = [part for part in (ROWS if evolving else ROWS[3:])
            if any(getattr(recording.maps[layer], part) is not None for layer in layers)]
    chains: list[list[int]] = []
    for layer in layers:
        if not chains or recording.maps[layer].prev_logits is None:
            chains.append([])
        chains[-1].append(layer)
    if not evolving:
        chains = [list(layers)]
    img_size = tuple(recording.image.shape[1:])
    cell, aspect = 1.15, img_size[0] / img_size[1]
    strip_height = len(rows) * (cell * aspect + 0.08) + 0.7
    width = cell * (max(map(len, chains)) + 1) + 1.7
    columns = max(map(len, chains))
    figure = new_figure(max(5.5, width), 0.4 + strip_height * len(chains))
    title = f"{recording.model.label}\nquery (y {point[0]}, x {point[1]}), {head_name(head)}"
    figure.suptitle(title, fontsize=10, fontweight="bold")
    strips = figure.subfigures(len(chains), 1, squeeze=False).ravel()
    for strip, chain in zip(strips, chains, strict=True):
        cells = strip.subplots(len(rows), columns + 1, squeeze=False)
        maps = {(part, layer): query_map(recording.maps[layer], point, img_size, head, part)
                for part in rows for layer in chain
                if getattr(recording.maps[layer], part) is not None}
        scales = {"attn": scale_of("attn", [m for (part, _), m in maps.items() if part == "attn"]),
                  "logits": scale_of("logits", [m for (part, _), m in maps.items() if part != "attn"])}
        for row, part in enumerate(rows):
            kind = "attn" if part == "attn" else "logits"
            if row == 0:
                draw_image(cells[row, 0], recording.image)
                mark_point(cells[row, 0], point, 1)
            else:
                blank(cells[row, 0], img_size)
            for axes in cells[row, len(chain) + 1:]:
                blank(axes, img_size)
            for col, layer in enumerate(chain, start=1):
                if (part, layer) in maps:
                    artist = draw_map(cells[row, col], maps[part, layer], recording.image, scales[kind], point=point,
                                      overlay=False)
                else:
                    blank(cells[row, col], img_size, "none")
                if row == 0:
                    cells[row, col].set_title(f"layer {layer}", fontsize=8)
            cells[row, 1].set_ylabel(PART_NAMES[part].replace(" ", "\n"), fontsize=8)
            if kind == "attn":
                add_scale(strip, artist, cells[row], "attn", overlay=False)
        add_scale(strip, cells[len(rows) - 2, len(chain)].images[-1], cells[:-1], "logits", overlay=False)
        H, W = recording.maps[chain[0]].feat_size
        strip.suptitle(f"layers {chain[0]} to {chain[-1]}, {H}x{W}", fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="evolution.png", heads="mean")
    options = parser.parse_args(argv)
    model = only(load_models(options), "model")
    layers = parse_layers(options.layers, model)
    head = only(parse_heads(options.heads, layers), "head")
    point = only(parse_queries(options.queries, model.img_size, [(0.5, 0.5)]), "query")
    parts = [part for part in PARTS if any(part in layer.parts for layer in layers)]
    for _, image, output in each_image(options):
        recording = record(model, image, layers, parts)
        save(evolution_strip(recording, [layer.number for layer in layers], head, point), output, options.dpi)
        if options.npz:
            save_maps([recording], output)
    return 0
