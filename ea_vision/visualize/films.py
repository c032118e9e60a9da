"""The attention of query points as an animation, through the layers of a network or the checkpoints of a run."""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image

from ea_vision.analysis.loading import LoadedModel, parse_layers
from ea_vision.analysis.recording import AttentionLayer
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write
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
from ea_vision.visualize.image_maps import Head, Query, Recording, record
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    add_scale,
    draw_map,
    draw_photo,
    head_name,
    map_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.writing import each_image, save_maps

EXAMPLES = """\
  ea-vision animation --model ea_aa_resnet34 --layers 1-20 --heads mean -o layers.gif photo.jpg
  ea-vision animation --model runs/ea --through checkpoints --layers 3 -o training.mp4 photo.jpg
  ea-vision animation --through checkpoints --model a/1.ckpt,a/2.ckpt --layers 3 -o t.gif photo.jpg
"""
Frame = tuple[Recording, int]


def animation_frame(frame: Frame, heads: Sequence[Head], points: Sequence[Query], norms: Sequence[Normalize],
                    style: MapStyle = STYLE) -> Figure:
    """One picture: the photo, and a row a head, a column a query.

    Args:
        frame: a recording and the number of the layer to show.
        heads: counted from 0, or "mean".
        points: (y, x) in pixels of the input.
        norms: the scales of its maps, row by row.
        style: how maps are drawn.
    """
    recording, number = frame
    layer = recording.maps[number]
    img_size = tuple(recording.image.shape[1:])
    text, aspect = text_scale(), img_size[0] / img_size[1]
    cell = max(1.7, 0.9 * text)
    width = max(cell * (len(points) + 1) + 1.3 * text, 4.5 * text)
    title = wrapped(recording.model.label, width - 0.2, 12)
    title = f"{title}\n{wrapped(map_name(layer), width - 0.2, 12)}"
    figure = new_figure(width, len(heads) * (cell * aspect + 0.02) + (0.55 + 0.2 * title.count("\n")) * text)
    cells = figure.subplots(len(heads), len(points) + 1, squeeze=False)
    draw_photo(cells[0, 0], recording, style, points, layer.feat_size)
    for axes in cells[1:, 0]:
        axes.axis("off")
    for row, head in enumerate(heads):
        for col, point in enumerate(points, start=1):
            draw_map(cells[row, col], recording.relative_map(number, point, head), recording,
                     norms[row * len(points) + col - 1], style, point=point, number=col)
            if row == 0:
                cells[row, col].set_title(f"query {col}", fontsize="small")
        cells[row, 1].set_ylabel(head_name(head), fontsize="small")
    figure.suptitle(title)
    add_scale(figure, cells, norms[0], style)
    return figure


def animation_frames(frames: Sequence[Frame], heads: Sequence[Head], points: Sequence[Query],
                     style: MapStyle = STYLE) -> Iterator[Figure]:
    """The pictures of an animation in turn. What is compared are all of them: they share a scale."""
    maps = [recording.relative_map(number, point, head)
            for recording, number in frames for head in heads for point in points]
    [norms] = norms_of([maps], style)
    each = len(heads) * len(points)
    for index, frame in enumerate(frames):
        yield animation_frame(frame, heads, points, norms[index * each:(index + 1) * each], style)


def pixels_of(figure: Figure, dpi: int) -> np.ndarray:
    """(height, width, 3) uint8."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return np.asarray(Image.open(data).convert("RGB"))


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.gif", heads="mean",
                         suffixes=(".gif", ".mp4"))
    add_through(parser, "layers: of one model; checkpoints: of one layer")
    parser.add_argument("--seconds", type=float, default=0.6, help="a picture is shown (default: %(default)s)")
    add_style(parser)
    options = parser.parse_args(argv)
    style = style_of(options)
    if not 0.02 <= options.seconds <= 60:
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
        figures = animation_frames(frames, heads, points, style)
        pictures = [pixels_of(figure, options.dpi) for figure in figures]
        atomic_write(output, encode(pictures, options.seconds))
        if options.npz:
            save_maps([recording for recording, number in frames if number == layers[0].number], output)
    return 0
