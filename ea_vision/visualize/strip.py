"""One query through the layers of a chain: previous, convolved, self and mixed logits, and the attention they give
(PA paper, figure 8; EA paper, figure 11)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from ea_vision.analysis.loading import parse_layers
from ea_vision.analysis.recording import PARTS
from ea_vision.visualize.figure_options import (
    add_style,
    add_through,
    make_parser,
    models_through,
    only,
    parse_heads,
    parse_queries,
    style_of,
)
from ea_vision.visualize.image_maps import Head, Query, Recording, query_map, query_name, record
from ea_vision.visualize.map_style import (
    PART_NAMES,
    STYLE,
    MapStyle,
    add_scale,
    blank,
    draw_map,
    draw_photo,
    head_name,
    layers_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision strip --model ea_conv_transformer_cifar --queries 16,16 -o strip.png photo.jpg
  ea-vision strip --model runs/ea --through checkpoints --layers 1-3 -o training.png photo.jpg
  ea-vision strip --model pa_aa_resnet50 --layers 5-10 --heads 3 -o strip.svg photo.jpg
"""


def chains_of(recording: Recording, layers: Sequence[int]) -> list[list[int]]:
    """The layers by chain; without evolution by the size of their maps, layers in a row together."""
    evolving = any(recording.maps[layer].prev_logits is not None for layer in layers)
    chains: list[list[int]] = []
    for layer in layers:
        maps = recording.maps[layer]
        begins = evolving and maps.prev_logits is None
        if not chains or begins or maps.feat_size != recording.maps[chains[-1][-1]].feat_size:
            chains.append([])
        chains[-1].append(layer)
    return chains


def rows_of(recording: Recording, layers: Sequence[int]) -> dict[str, str]:
    """The parts to draw, with their names, in the order in which a layer computes them; no two rows alike.

    EA convolves the mixture of the previous and the layer's own logits, PA the previous ones alone. Logits that are the
    convolved ones (EA's beta = 1) have no row of their own, nor have own logits where nothing evolves.
    """
    maps = [recording.maps[layer] for layer in layers]
    evolved = [layer for layer in maps if layer.prev_logits is not None]
    if not evolved:
        return {"logits": "logits", "attn": "attention"} if all(m.logits is not None for m in maps) else {
            "attn": "attention"}
    convolved = [layer for layer in evolved if layer.conv_logits is not None]
    own_too = any("self_logits" in _shares(recording, layer.name) for layer in convolved)
    order = ("prev_logits", *(("self_logits", "conv_logits") if own_too else ("conv_logits", "self_logits")), "logits")
    drawn = [part for part in order if any(getattr(layer, part) is not None for layer in maps)]
    if len(convolved) == len(evolved) and all(torch.equal(layer.conv_logits, layer.logits) for layer in convolved):
        drawn.remove("logits")
    names = {part: PART_NAMES[part].replace(" ", "\n") for part in drawn}
    if "conv_logits" in names:
        names["conv_logits"] = "both,\nconvolved" if own_too else "previous,\nconvolved"
    return {**names, "attn": "attention"}


def _shares(recording: Recording, name: str) -> dict[str, float]:
    evolution = getattr(recording.model.model.get_submodule(name), "evolution", None)
    return evolution.before_shares() if evolution else {}


def evolution_strip(recording: Recording, layers: Sequence[int], head: Head, point: Query,
                    style: MapStyle = STYLE) -> Figure:
    """For each chain among `layers` a strip: a column a layer, and down a column what the layer computes, from the
    previous logits to the attention.

    A chain's first layer has no previous map; its logits are its own.

    Args:
        recording: with all parts of `layers` (numbers).
        head: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input or a token by name.
        style: how maps are drawn; the logits of a strip share one scale, its attention another. Logits are bare.
    """
    rows, chains = rows_of(recording, layers), chains_of(recording, layers)
    img_size = tuple(recording.image.shape[1:])
    columns, text = max(map(len, chains)), text_scale()
    cell, aspect = max(1.15, 0.75 * text), img_size[0] / img_size[1]
    width = max(cell * (columns + 1) + 1.7 * text, 4.2 * text)
    title = wrapped(recording.model.label, width - 0.2, 12)
    strip_height = len(rows) * (cell * aspect + 0.08) + 0.75 * text
    top = (0.45 + 0.2 * (1 + title.count("\n"))) * text
    figure = new_figure(width, top + strip_height * len(chains))
    figure.suptitle(f"{title}\n{wrapped(f'query ({query_name(point)}), {head_name(head)}', width - 0.2, 12)}")
    maps = {(layer, part): recording.relative_map(layer, point, head) if part == "attn" else
            query_map(recording.maps[layer], point, img_size, head, part)
            for layer in layers for part in rows if _drawn(recording, layer, part, rows)}
    norms = {}
    for attention in (False, True):
        groups = [[key for key in maps if key[0] in chain and (key[1] == "attn") == attention] for chain in chains]
        groups = [group for group in groups if group]
        found = norms_of([[maps[key] for key in group] for group in groups], style, "attn" if attention else "logits",
                         overlay=style.overlay and attention) if groups else []
        norms.update({key: norm for group, own in zip(groups, found, strict=True)
                      for key, norm in zip(group, own, strict=True)})
    strips = figure.subfigures(len(chains), 1, squeeze=False).ravel()
    for strip, chain in zip(strips, chains, strict=True):
        cells = strip.subplots(len(rows), columns + 1, squeeze=False)
        feat_size = recording.maps[chain[0]].feat_size
        draw_photo(cells[0, 0], recording, style, [point], feat_size)
        for axes in (*cells[1:, 0], *cells[:, len(chain) + 1:].ravel()):
            blank(axes, img_size)
        for row, (part, name) in enumerate(rows.items()):
            for axes, layer in zip(cells[row, 1:], chain, strict=False):
                if (layer, part) in maps:
                    draw_map(axes, maps[layer, part], recording, norms[layer, part], style, point=point,
                             overlay=style.overlay and part == "attn", part=part)
                else:
                    blank(axes, img_size, "= own" if part == "logits" else "none")
                if row == 0:
                    axes.set_title(f"layer {layer}", fontsize="small")
            cells[row, 1].set_ylabel(name, fontsize="small")
        add_scale(strip, cells[-1], norms[chain[0], "attn"], style, short=True)
        if len(rows) > 1:
            logits = [key for key in maps if key[0] in chain and key[1] != "attn"]
            add_scale(strip, cells[:-1], norms[logits[0]], style, "logits", overlay=False)
        strip.suptitle(f"{layers_name(chain)}, {feat_size[0]}x{feat_size[1]}", fontsize="medium")
    return figure


def training_strip(recordings: Sequence[Recording], layers: Sequence[int], head: Head, query: Query,
                   style: MapStyle = STYLE) -> Figure:
    """Attention through training: a row a layer, a column an epoch.

    Args:
        recordings: of one image, one a checkpoint of a run in the order of epochs, with the "attn" of `layers`.
        head: counted from 0, or "mean".
        query: (y, x) in pixels of the input or a token by name.
        style: how maps are drawn; the maps of a layer share a scale.
    """
    first, text = recordings[0], text_scale()
    H, W = first.image.shape[1:]
    cell = max(1.3, 0.75 * text)
    width = max(cell * (len(recordings) + 1) + 1.4 * text, 4.2 * text)
    title = wrapped(f"{first.model.label.rpartition(', epoch ')[0] or first.model.label}, query ({query_name(query)}), "
                    f"{head_name(head)}", width - 0.2, 12)
    row_height = cell * H / W + 0.35 * text
    figure = new_figure(width, len(layers) * row_height + (0.2 + 0.2 * (1 + title.count("\n"))) * text)
    figure.suptitle(title)
    rows = figure.subfigures(len(layers), 1, squeeze=False).ravel()
    groups = [[recording.relative_map(layer, query, head) for recording in recordings] for layer in layers]
    for row, layer, maps, norms in zip(rows, layers, groups, norms_of(groups, style), strict=True):
        cells = row.subplots(1, len(recordings) + 1)
        size = first.maps[layer].feat_size
        draw_photo(cells[0], first, style, [query], size)
        cells[0].set_ylabel(f"layer {layer}\n{size[0]}x{size[1]}", fontsize="small")
        for axes, recording, values, norm in zip(cells[1:], recordings, maps, norms, strict=True):
            draw_map(axes, values, recording, norm, style, point=query)
            axes.set_title(f"epoch {recording.model.epoch}", fontsize="small")
        add_scale(row, cells, norms[0], style, short=True)
    return figure


def _drawn(recording: Recording, layer: int, part: str, rows: dict[str, str]) -> bool:
    """Whether a layer's column has a map in the row: it has the part, and it is not shown as its own logits already."""
    maps = recording.maps[layer]
    again = part == "logits" and "self_logits" in rows and maps.prev_logits is None
    return getattr(maps, part) is not None and not again


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="evolution.png", heads="mean")
    add_through(parser, "layers: of one model, part by part; checkpoints: attention")
    add_style(parser)
    options = parser.parse_args(argv)
    style = style_of(options)
    models = models_through(options)
    layers = parse_layers(options.layers, models[0])
    head = only(parse_heads(options.heads, layers), "head")
    point = only(parse_queries(options.queries, models[0].img_size, [(0.5, 0.5)]), "query")
    numbers = [layer.number for layer in layers]
    training = options.through == "checkpoints"
    parts = ["attn"] if training else [part for part in PARTS if any(part in layer.parts for layer in layers)]
    for _, image, output in each_image(options):
        recordings = [record(model, image, layers, parts) for model in models]
        figure = (training_strip(recordings, numbers, head, point, style) if training else
                  evolution_strip(recordings[0], numbers, head, point, style))
        save(figure, output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0
