"""Attention rollout (Abnar and Zuidema 2020): where a pixel of the last map comes from, through all layers before it.

Heads are averaged, the residual counts as identity. Where a network has convolutions, which move information too, this
is an approximation and the figure says so."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import nn

from ea_vision.analysis.loading import parse_layers
from ea_vision.analysis.quantities import attention_rollout
from ea_vision.visualize.drawing import add_scale, draw_image, draw_map, new_figure, scale_of
from ea_vision.visualize.options import load_models, make_parser, parse_queries
from ea_vision.visualize.recordings import Point, Recording, cell_of, record
from ea_vision.visualize.writing import each_image, save, save_maps

EXAMPLES = """\
  ea-vision rollout --model aa_resnet50,ea_aa_resnet50 --queries 60,60 -o rollout.png photo.jpg
  ea-vision rollout --model runs/ea --layers 1-3 -o rollout.svg images/
"""


def rollout_figure(recordings: Sequence[Recording], points: Sequence[Point], overlay: bool = True) -> Figure:
    """A row a model: the input, a column a query, and the mean of all queries; one scale.

    Args:
        recordings: of the same image, one a model, with the "attn" of the layers to go through.
        points: (y, x) in pixels of the first model's input; scaled to the others' input sizes.
        overlay: on the image, or bare.
    """
    H, W = recordings[0].image.shape[1:]
    cell, columns = 1.7, len(points) + 2
    figure = new_figure(cell * columns + 1.9, len(recordings) * (cell * H / W + 0.1) + 0.7)
    cells = figure.subplots(len(recordings), columns, squeeze=False)
    rows = []
    for recording in recordings:
        layers = list(recording.maps.values())
        first, last = layers[0], layers[-1]
        rollout = attention_rollout(recording.maps)[0, last.num_prefix_tokens:, first.num_prefix_tokens:]
        rollout = rollout.reshape(*last.feat_size, *first.feat_size).cpu().numpy()
        size = tuple(recording.image.shape[1:])
        places = [(y * size[0] // H, x * size[1] // W) for y, x in points]
        maps = [rollout[cell_of(place, size, last.feat_size)] for place in places] + [rollout.mean((0, 1))]
        rows.append((recording, f"layers {first.number} to {last.number}", places, maps))
    scale = scale_of("attn", [m for *_, maps in rows for m in maps])
    for row, (recording, through, places, maps) in enumerate(rows):
        draw_image(cells[row, 0], recording.image, places)
        approximate = any(isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
                          for name, module in recording.model.model.named_modules() if "patch_embed" not in name)
        note = "\napproximation:\nconvolutions left out" if approximate else ""
        cells[row, 0].set_ylabel(f"{recording.model.label}\n{through}{note}".replace(", ", "\n"), fontsize=7)
        for col, values in enumerate(maps, start=1):
            query = col <= len(points)
            artist = draw_map(cells[row, col], values, recording.image, scale, point=places[col - 1] if query else None,
                              number=col, overlay=overlay)
            if row == 0:
                cells[row, col].set_title(f"query {col}\ny {points[col - 1][0]}, x {points[col - 1][1]}" if query
                                          else "mean of\nall queries", fontsize=8)
    figure.suptitle("attention rollout", fontsize=10, fontweight="bold")
    add_scale(figure, artist, cells, "share of the last map's pixel", overlay=overlay)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="rollout.png", heads=None)
    parser.add_argument("--bare", action="store_true", help="draw the maps alone, not over the image")
    options = parser.parse_args(argv)
    models = load_models(options)
    layers = [parse_layers(options.layers, model) for model in models]
    points = parse_queries(options.queries, models[0].img_size)
    for _, image, output in each_image(options):
        recordings = [record(model, image, chosen) for model, chosen in zip(models, layers, strict=True)]
        save(rollout_figure(recordings, points, not options.bare), output, options.dpi)
        if options.npz:
            save_maps(recordings, output)
    return 0
