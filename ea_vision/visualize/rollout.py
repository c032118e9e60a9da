"""Attention rollout (Abnar and Zuidema 2020): where a pixel of the last map comes from, through all layers before it.

Heads are averaged, the residual counts as identity. Where a network has convolutions, which move information too, this
is an approximation and the figure says so. Layers whose queries are the class token alone are left out."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import nn

from ea_vision.recorder.quantities import attention_rollout
from ea_vision.recorder.recording import LayerMaps
from ea_vision.visualize.figure_options import (
    Asked,
    Layers,
    Models,
    Queries,
    each_figure,
    make_parser,
)
from ea_vision.visualize.image_maps import AnyImage, Query, Recording, cell_of, title_of
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    layers_name,
    map_of,
    map_sheet,
    photo_of,
    queries_name,
)
from ea_vision.visualize.sheet import Row

EXAMPLES = """\
  python visualize/rollout.py --model aa_resnet50,ea_aa_resnet50 --queries 60,60 -o rollout.png photo.jpg
  python visualize/rollout.py --model runs/ea --layers 1-3 -o rollout.svg images/
"""


def plot_rollout(
    models: Models,
    image: AnyImage,
    layers: Layers = None,
    queries: Queries = None,
    *,
    width: float | None = None,
    **style,
) -> Figure:
    """Draw where pixels of the last map come from, through all `layers`: a row a model, a column a query. See
    `ea_vision.visualize.figure_options` for the arguments."""
    return _draw(Asked(models, layers, queries=queries, width=width, **style), image)


def _draw(asked: Asked, image: AnyImage) -> Figure:
    recordings = asked.record(image)
    return draw_rollout(recordings, asked.points(seen=recordings), **asked.how)


def draw_rollout(
    recordings: Sequence[Recording],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
) -> Figure:
    """Draw a row a model under its name: a column a query, and the mean of all queries.

    Args:
        recordings: of the same image, one a model, with the "attn" of the layers to go through.
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn; a row's maps share a scale.
        width: inches.
    """
    first = recordings[0]
    groups = [_group(recording, first.img_size, points, style) for recording in recordings]
    return map_sheet(
        "attention rollout",
        groups,
        style,
        width=width,
        photo=photo_of(first, points, _asking(first)[-1].feat_size),
        label="share of the last map's pixel \N{MULTIPLICATION SIGN} N (1: uniform)",
        note="where the last map's pixels come from, through all layers; "
        f"{queries_name(points)}; all pixels: their mean",
    )


def _asking(recording: Recording) -> list[LayerMaps]:
    """Return the layers whose queries are pixels.

    Raises:
        UsageError: there are none, or a layer whose rows and columns are channels.
    """
    for layer in recording.maps.values():
        layer.check_places()
    layers = [layer for layer in recording.maps.values() if layer.pixels_ask]
    if not layers:
        next(iter(recording.maps.values())).check_pixels_ask()
    return layers


def _group(
    recording: Recording, img_size: tuple[int, int], points: Sequence[Query], style: MapStyle
) -> tuple[str, list[Row]]:
    """Return a model's name and row: of queries, in an input of `img_size`, and of all pixels, in units of uniform
    attention."""
    layers = _asking(recording)
    first, last = layers[0], layers[-1]
    rollout = attention_rollout({layer.number: layer for layer in layers})[0]  # (T', T)
    rollout = (
        rollout[:, first.num_prefix_tokens :].unflatten(-1, first.feat_size).cpu().numpy()
        * rollout.shape[-1]
    )
    tiles = []
    for number, point in enumerate(points, start=1):
        place = cell_of(point, img_size, recording.img_size)
        values = rollout[last.token(recording.cell(last.number, place))]
        tiles.append(
            map_of(
                values,
                recording,
                style,
                f"query {number}",
                point=place,
                number=number,
                cells=last.feat_size,
            )
        )
    tiles.append(map_of(rollout[last.num_prefix_tokens :].mean(0), recording, style, "all pixels"))
    approximate = any(
        isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1
        for name, module in recording.model.model.named_modules()
        if "patch_embed" not in name and ".evolution." not in name
    )
    name = (
        f"{title_of(recording.model)}, {layers_name([layer.number for layer in layers])}"
        + "; approximation: convolutions left out" * approximate
        + "; its class attention is left out" * (len(layers) < len(recording.maps))
    )
    return name, [Row(tiles)]


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser(__doc__, EXAMPLES, output="rollout.png").parse_args(argv)
    return each_figure(options, Asked.by_options(options), _draw)
