"""Pictures become a film: GIF, or MP4 by ffmpeg. `ea-vision strip -o FILE.gif` draws and writes them."""

from __future__ import annotations

import argparse
import io
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import atomic_write

FILMS = (".gif", ".mp4")


def film_writer(options: argparse.Namespace) -> Callable[[Iterable[Figure], Path, int], None]:
    """Return what writes figures into a film, --seconds a picture.

    Raises:
        UsageError: --seconds that cannot be, or an MP4 without ffmpeg.
    """
    if not (math.isfinite(options.seconds) and 0.02 <= options.seconds <= 60):
        raise UsageError(f"--seconds must lie between 0.02 and 60, got {options.seconds}")
    film = Path(options.output).suffix.lower() == ".mp4"
    if film and shutil.which("ffmpeg") is None:
        raise UsageError("MP4 needs the program ffmpeg, which is not installed: write a .gif")

    def write(figures: Iterable[Figure], output: Path, dpi: int) -> None:
        pictures = []
        for figure in figures:
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=dpi)
            pictures.append(np.asarray(Image.open(data).convert("RGB")))
        height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
        pictures = [np.pad(picture, ((0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0)),
                           constant_values=255) for picture in pictures]  # titles may differ in lines
        atomic_write(output, (encode_mp4 if film else encode_gif)(pictures, options.seconds))

    return write


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ea-vision animation`, the former name of `ea-vision strip -o FILE.gif`."""
    from ea_vision.visualize.strip import main as strip_main

    return strip_main(argv, output="attention.gif")
