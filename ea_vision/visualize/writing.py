"""Figures become files: checked before any work, one an image, written whole or not at all."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

from ea_vision.base import files
from ea_vision.base.errors import UsageError
from ea_vision.base.figures import FORMATS as PICTURES
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, write_npz
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.visualize.figure_options import Asked
from ea_vision.visualize.image_maps import Recording, numbered

FILM = ".gif"


def name_outputs(output: Path, images: Sequence[str]) -> list[Path]:
    """Return the file of each image: `output` itself for one, NAME-IMAGE.SUFFIX for several."""
    if len(images) == 1:
        return [output]
    names, taken = [], set()
    for number, image in enumerate(images):
        name = Path(image).stem.replace("#", "-")
        name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        names.append(output.with_name(f"{output.stem}-{name}{output.suffix}"))
    return names


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


def film_writer(seconds: float) -> Callable[[Iterable[Figure], Path, int], None]:
    """Return what writes figures into a GIF that runs for ever, `seconds` a picture."""
    def write(figures: Iterable[Figure], output: Path, dpi: int) -> None:
        drawn = [Image.open(io.BytesIO(figure_bytes(figure, ".png", dpi))).convert("RGB") for figure in figures]
        size = tuple(max(picture.size[axis] for picture in drawn) for axis in (0, 1))  # titles may differ in lines
        pictures = []
        for picture in drawn:
            whole = Image.new("RGB", size, "white")
            whole.paste(picture)
            pictures.append(whole.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE))
        data = io.BytesIO()
        pictures[0].save(data, "GIF", save_all=True, append_images=pictures[1:], duration=round(1000 * seconds), loop=0)
        atomic_write(output, data.getvalue())

    return write


def save_maps(recordings: Sequence[Recording], output: Path, names: Sequence[str] = ()) -> Path:
    """Write the maps of recordings, and the images that the networks saw, into FILE.npz beside a figure; return that.

    The arrays' names are those of `AttentionMaps.arrays` and "image", (3, H, W) in 0..1; of several recordings with the
    name of each, by default the model's label, and a slash before.
    """
    arrays = {}
    for recording, name in zip(recordings, numbered(names or [r.model.label for r in recordings]), strict=True):
        prefix = f"{name}/" if len(recordings) > 1 else ""
        own = {"image": recording.image.numpy(), **recording.maps.arrays()}
        arrays.update({prefix + name: array for name, array in own.items()})
    path = output.with_suffix(".npz")
    write_npz(path, arrays)
    return path


def each_figure(options: argparse.Namespace, asked: Asked, draw: Callable[[Asked, Image.Image], Any],
                write: Callable[[Any, Path, int], None] = save) -> int:
    """Draw and write a figure an image, with a progress bar, and with --npz what it is drawn from; say so at the end.

    Args:
        draw: what is asked for, of an image.
        write: the figure, into a file, at --dpi.
    """
    images = find_images(options.images)
    outputs = name_outputs(check_output(Path(options.output), options.suffixes), images)
    for path in images:  # a broken one ends the command before the first picture
        read_image(path)
    for path, output in zip(tqdm(images, unit="image", disable=len(images) == 1 or None), outputs, strict=True):
        write(draw(asked, read_image(path)), output, options.dpi)
        if options.npz:
            save_maps(asked.recordings, output)
    print("written:", *outputs, *([output.with_suffix(".npz") for output in outputs] if options.npz else []))
    return 0
