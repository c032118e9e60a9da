"""Attention rollout (Abnar and Zuidema 2020): where a pixel of the last map comes from, through all layers before it.

Heads are averaged, and the residual counts as identity. Convolutions also move information, so rollout is an
approximation in networks that have them, and the figure says so. Layers whose only query is the class token are left
out."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import nn

from ea_vision.ops import Size
from ea_vision.recorder.quantities import attention_rollout
from ea_vision.recorder.recording import LayerMaps
from ea_vision.visualize.figure_options import make_parser, run_figure
from ea_vision.visualize.figure_request import (
    FigureRequest,
    Layers,
    Models,
    Queries,
    refuse_arguments,
)
from ea_vision.visualize.image_maps import AnyImage, record, title_of
from ea_vision.visualize.map_style import STYLE, MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row
from ea_vision.visualize.tiles import (
    ALL,
    Query,
    Recording,
    cell_of,
    layers_name,
    map_of,
    photo_of,
    queries_name,
)

EXAMPLES = """\
  ea-vision rollout --model aa_resnet50,ea_aa_resnet50 --queries 60,60 -o rollout.png photo.jpg
  ea-vision rollout --model runs/ea --layers 1-3 -o rollout.svg images/
"""


def plot_rollout(
    models: Models, image: AnyImage, layers: Layers = None, queries: Queries = None, **how
) -> Figure:
    """Draw where pixels of the last map come from, through all `layers`: one row per model, one column per query. See
    `ea_vision.visualize.figure_request` for the arguments."""
    refuse_arguments("plot_rollout", how, heads="it averages them")
    request = FigureRequest(models, layers, queries=queries, **how)
    recordings = []
    for model, its_layers in zip(request.models, request.layers, strict=True):
        recordings.append(record(model, image, its_layers))
    points = request.points(seen=recordings)
    return draw_rollout(recordings, points, request.style, width=request.width)


def draw_rollout(
    recordings: Sequence[Recording],
    points: Sequence[Query],
    style: MapStyle = STYLE,
    *,
    width: float | None = None,
) -> Figure:
    """Draw one row per model under its name: one column per query, and the mean of all queries.

    Args:
        recordings: of the same image, one per model, with the "attn" of the layers to go through.
        points: queries, (y, x) in pixels of the first model's input, scaled to the others', or tokens by name.
        style: how maps are drawn.
        width: inches.
    """
    first = recordings[0]
    points = [point for point in points if point != ALL]  # their mean is always drawn
    blocks = [_block(recording, first.img_size, points, style) for recording in recordings]
    queries = f"{queries_name(points)}; " if points else ""
    last = _asking(first)[-1]
    return map_sheet(
        "attention rollout",
        blocks,
        style,
        width=width,
        photo=photo_of(first, points, last.feat_size),
        label="share of the last map's pixel \N{MULTIPLICATION SIGN} N (1: uniform)",
        note=f"where the last map's pixels come from, through all layers; {queries}all pixels: their mean",
    )


def _asking(recording: Recording) -> list[LayerMaps]:
    """Return the layers whose queries are pixels.

    Raises:
        UsageError: no layer has pixels as queries, or the rows and columns of a layer's maps are channels.
    """
    layers = list(recording.maps.values())
    for layer in layers:
        layer.check_places()
    with_pixels = [layer for layer in layers if layer.pixels_ask]
    if not with_pixels:
        layers[0].check_pixels_ask()
    return with_pixels


def _block(recording: Recording, img_size: Size, points: Sequence[Query], style: MapStyle) -> Block:
    """Return a block with the model's name and one row in units of uniform attention: one tile per query, in pixels of
    an input of `img_size`, and one tile of the mean over all pixels."""
    layers = _asking(recording)
    by_number = {layer.number: layer for layer in layers}
    first = layers[0]
    last = layers[-1]
    [shares] = attention_rollout(by_number)  # (T', T)
    on_pixels = shares[:, first.num_prefix_tokens :] * shares.shape[-1]
    rollout = on_pixels.unflatten(-1, first.feat_size).cpu().numpy()
    tiles = []
    for number, point in enumerate(points, start=1):
        place = cell_of(point, img_size, recording.img_size)
        row = last.token(recording.cell(last.number, place))
        tile = map_of(
            rollout[row],
            recording,
            style,
            f"query {number}",
            point=place,
            number=number,
            cells=last.feat_size,
        )
        tiles.append(tile)
    mean = rollout[last.num_prefix_tokens :].mean(0)
    tiles.append(map_of(mean, recording, style, "all pixels"))
    name = f"{title_of(recording.model)}, {layers_name(list(by_number))}"
    if _has_convolutions(recording.model.model):
        name += "; approximation: convolutions left out"
    if len(layers) < len(recording.maps):
        name += "; its class attention is left out"
    return Block([Row(tiles)], name)


def _has_convolutions(model: nn.Module) -> bool:
    """Return whether a network has spatial convolutions, other than those of its patch embedding and its maps."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size == module.stride:
            continue  # each pixel of the input goes to one patch
        if "patch_embed" not in name and ".evolution." not in name and max(module.kernel_size) > 1:
            return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="rollout.png", heads=None)
    return run_figure(parser.parse_args(argv), plot_rollout)
