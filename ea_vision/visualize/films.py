"""Films of attention, through the layers of a network or the checkpoints of a run: `ea-vision strip -o FILE.gif`."""

from __future__ import annotations

import argparse
import io
import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ea_vision.analysis.inputs import ImageSource
from ea_vision.analysis.loading import LoadedModel, parse_layers
from ea_vision.analysis.recording import AttentionLayer
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write
from ea_vision.visualize.figure_options import (
    Heads,
    Layers,
    Models,
    Queries,
    chosen_heads,
    chosen_points,
    models_through,
    only,
    parse_heads,
    parse_queries,
    recorded,
    style_of,
)
from ea_vision.visualize.image_maps import MEAN, Head, Query, Recording, as_models, record, title_of
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    aspect_of,
    head_name,
    map_name,
    map_tile,
    norms_of,
    photo_tile,
    queries_name,
    scale_bar,
)
from ea_vision.visualize.sheet import Block, Row, sheet
from ea_vision.visualize.writing import each_image, save_maps

FILMS = (".gif", ".mp4")
Frame = tuple[Recording, int]


def plot_frames(models: Models, image: ImageSource | Tensor, layers: Layers = None, heads: Heads = MEAN,
                queries: Queries = None, *, width: float | None = None, **style) -> Iterator[Figure]:
    """Draw the pictures of a film, of one scale: for each model (such as the snapshots of a run) each layer in turn.
    See `ea_vision.visualize.figure_options` for the arguments."""
    some = [recorded(model, image, layers) for model in as_models(models)]
    frames = [(recording, layer.number) for recording, chosen in some for layer in chosen]
    return draw_frames(frames, chosen_heads(heads, [layer for _, chosen in some for layer in chosen]),
                       chosen_points(queries, tuple(some[0][0].image.shape[1:])), MapStyle(**style), width=width)


def draw_frame(frame: Frame, heads: Sequence[Head], points: Sequence[Query], norms: Sequence[Normalize],
               style: MapStyle = STYLE, *, width: float | None = None) -> Figure:
    """Draw one picture: the photo, and a row a head, a column a query.

    Args:
        frame: a recording and the number of the layer to show.
        heads: counted from 0, or "mean".
        points: (y, x) in pixels of the input.
        norms: the scales of its maps, row by row.
        style: how maps are drawn.
        width: inches.
    """
    recording, number = frame
    layer = recording.maps[number]
    rows = []
    for row, head in enumerate(heads):
        tiles = [map_tile(recording.relative_map(number, point, head), recording, norms[row * len(points) + col], style,
                          point=point, number=col + 1,
                          title=f"query {col + 1}" if row == 0 and len(points) > 1 else "")
                 for col, point in enumerate(points)]
        rows.append(Row(tiles, head_name(head), aspect=aspect_of(recording)))
    return sheet(title_of(recording.model), [Block(rows, map_name(layer), [scale_bar(norms[0], style)])],
                 width=width, photo=photo_tile(recording, style, points, layer.feat_size), aspect=aspect_of(recording),
                 note=f"attention; {queries_name(points)}")


def draw_frames(frames: Sequence[Frame], heads: Sequence[Head], points: Sequence[Query], style: MapStyle = STYLE, *,
                width: float | None = None) -> Iterator[Figure]:
    """Draw the pictures of a film in turn. What is compared are all of them: they share a scale."""
    maps = [recording.relative_map(number, point, head)
            for recording, number in frames for head in heads for point in points]
    [norms] = norms_of([maps], style)
    each = len(heads) * len(points)
    for index, frame in enumerate(frames):
        yield draw_frame(frame, heads, points, norms[index * each:(index + 1) * each], style, width=width)


def pixels_of(figure: Figure, dpi: int) -> np.ndarray:
    """(height, width, 3) uint8."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return np.asarray(Image.open(data).convert("RGB"))


def same_size(pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Fill pictures up with white, right and below, to the size of the largest: their titles may differ in lines."""
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    return [np.pad(picture, ((0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0)),
                   constant_values=255) for picture in pictures]


def encode_gif(pictures: Sequence[np.ndarray], seconds: float) -> bytes:
    """A GIF that runs for ever, `seconds` a picture."""
    images = [Image.fromarray(picture).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
              for picture in pictures]
    data = io.BytesIO()
    images[0].save(data, "GIF", save_all=True, append_images=images[1:], duration=round(1000 * seconds), loop=0)
    return data.getvalue()


def encode_mp4(pictures: Sequence[np.ndarray], seconds: float) -> bytes:
    """An H.264 film, `seconds` a picture, by ffmpeg.

    Raises:
        RunError: ffmpeg failed.
    """
    height, width = pictures[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.mp4"
        command = ["ffmpeg", "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24",
                   "-s", f"{width}x{height}", "-framerate", f"{1 / seconds}", "-i", "-",
                   "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2:color=white", "-pix_fmt", "yuv420p", str(film)]
        done = subprocess.run(command, input=b"".join(p.tobytes() for p in pictures), capture_output=True)
        if done.returncode:
            raise RunError(f"ffmpeg failed: {done.stderr.decode(errors='replace').strip()}")
        return film.read_bytes()


def frames_of(models: Sequence[LoadedModel], layers: Sequence[AttentionLayer], image) -> list[Frame]:
    """A frame a model and layer, in the order of epochs and layers."""
    recordings = [record(model, image, layers) for model in models]
    return [(recording, layer.number) for recording in recordings for layer in layers]


def film_command(options: argparse.Namespace) -> int:
    """Write the films of `ea-vision strip`."""
    style = style_of(options)
    if not (math.isfinite(options.seconds) and 0.02 <= options.seconds <= 60):
        raise UsageError(f"--seconds must lie between 0.02 and 60, got {options.seconds}")
    film = Path(options.output).suffix.lower() == ".mp4"
    if film and shutil.which("ffmpeg") is None:
        raise UsageError("MP4 needs the program ffmpeg, which is not installed: write a .gif")
    models = models_through(options)
    layers = parse_layers(options.layers, models[0])
    if options.through == "checkpoints":
        layers = [only(layers, "layer")]
    heads = parse_heads(options.heads, layers)
    points = parse_queries(options.queries, models[0].img_size)
    encode = encode_mp4 if film else encode_gif
    for _, image, output in each_image(options):
        frames = frames_of(models, layers, image)
        figures = draw_frames(frames, heads, points, style, width=options.width)
        pictures = same_size([pixels_of(figure, options.dpi) for figure in figures])
        atomic_write(output, encode(pictures, options.seconds))
        if options.npz:
            save_maps([recording for recording, number in frames if number == layers[0].number], output)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ea-vision animation`, the former name of `ea-vision strip -o FILE.gif`."""
    from ea_vision.visualize.strip import main as strip_main

    return strip_main(argv, output="attention.gif")
