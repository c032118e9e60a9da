"""Figures become files: checked before any work, one an image, written whole or not at all."""

import argparse
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image, ImageOps
from tqdm import tqdm

from ea_vision.base import files
from ea_vision.base.errors import UsageError
from ea_vision.base.figures import FORMATS as PICTURES
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, write_npz
from ea_vision.recorder.inputs import find_images, names_of, read_image
from ea_vision.visualize.figure_options import Asked
from ea_vision.visualize.image_maps import Recording, numbered

FILM, FRAME = ".gif", 600  # milliseconds a picture


def check_output(output: Path, suffixes: Sequence[str] = PICTURES) -> Path:
    """See that a file can be written, before any work; return it.

    Raises:
        UsageError: a suffix that cannot be written, or a folder that cannot be made.
    """
    if output.suffix.lower() not in suffixes:
        raise UsageError(f"--output must end in {' or '.join(suffixes)}, got {output}")
    return files.check_output(output)


def save(figure: Figure, output: Path, dpi: int) -> None:
    """Write a figure, all or nothing, in the format of the file's suffix."""
    atomic_write(output, figure_bytes(figure, output.suffix.lower(), dpi))


def save_film(figures: Iterable[Figure], output: Path, dpi: int) -> None:
    """Write figures into a GIF that runs for ever."""
    drawn = [Image.open(io.BytesIO(figure_bytes(figure, ".png", dpi))).convert("RGB") for figure in figures]
    W, H = (max(sides) for sides in zip(*(picture.size for picture in drawn), strict=True))
    first, *others = [  # titles may differ in lines
        ImageOps.expand(picture, (0, 0, W - picture.width, H - picture.height), "white").quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE) for picture in drawn]
    data = io.BytesIO()
    first.save(data, "GIF", save_all=True, append_images=others, duration=FRAME, loop=0)
    atomic_write(output, data.getvalue())


def each_figure(options: argparse.Namespace, asked: Asked, draw: Callable[[Asked, Any], Any],
                write: Callable[[Any, Path, int], None] = save, together: bool = False) -> int:
    """Draw and write a figure an image, with a progress bar, and with --npz what it is drawn from; say so at the end.

    Args:
        draw: what is asked for, of an image's path, or with `together` of all in a list.
        write: the figure, into a file, at --dpi.
    """
    images = find_images(options.images)
    jobs = [images] if together else images
    outputs = [check_output(Path(options.output), options.suffixes)]
    if len(jobs) > 1:
        stem, suffix = outputs[0].stem, outputs[0].suffix
        names = [Path(image).stem.replace("#", "-") for image in images]
        outputs = [outputs[0].with_name(f"{stem}-{name}{f'-{number}' * (name in names[:number])}{suffix}")
                   for number, name in enumerate(names)]
    for path in images:  # a broken one ends the command before the first picture
        read_image(path)
    for job, output in zip(tqdm(jobs, unit="image", disable=len(jobs) == 1 or None), outputs, strict=True):
        write(draw(asked, job), output, options.dpi)
        if options.npz:
            save_maps(asked.recordings, output, names_of(images) if together else ())
    print("written:", *outputs, *(output.with_suffix(".npz") for output in outputs if options.npz))
    return 0


def save_maps(recordings: Sequence[Recording], output: Path, names: Sequence[str] = ()) -> None:
    """Write the maps of recordings, and the images that the networks saw, into FILE.npz beside a figure.

    The arrays' names are those of `AttentionMaps.arrays` and "image", (3, H, W) in 0..1; of several recordings with the
    name of each, by default the model's label, and a slash before.
    """
    arrays = {}
    for recording, name in zip(recordings, numbered(names or [r.model.label for r in recordings]), strict=True):
        prefix = f"{name}/" * (len(recordings) > 1)
        own = {"image": recording.image.numpy(), **recording.maps.arrays()}
        arrays |= {prefix + key: array for key, array in own.items()}
    write_npz(output.with_suffix(".npz"), arrays)
