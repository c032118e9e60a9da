"""Write a split of an image data set as one FFCV file (.beton), which trains several times faster than image files.

Every image is decoded and converted to 8-bit RGB, and stored whole, or, with --eval-img-size, as the trainer shows it
to evaluate on: the folder's pixels, bit for bit. FFCV's own writer writes it. The classes, what was left out and how
images were stored are written beside it as FILE.json. The file appears under its name when it is whole.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np

from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.base.files import check_output, write_json
from ea_vision.data.ffcv import Evaluated, require_ffcv, sidecar
from ea_vision.data.image_files import BrokenImage
from ea_vision.data.imagenet import ImageSource, eval_transform
from ea_vision.data.splits import find_split

EXAMPLES = """\
examples:
  ea-vision write-ffcv --data-dir /data/imagenet --split train --out train.beton
  ea-vision write-ffcv --data-dir /data/imagenet --split validation --out val.beton --eval-img-size 224
  ea-vision write-ffcv --data-dir DIR --split train --out small.beton --max-size 256 --jpeg-share 0
  python train_imagenet.py --train-beton train.beton --val-beton val.beton
"""
PAGE = 2**23  # bytes, as FFCV's writer has them; an image must fit into one
MOST_SIDE = 65_500  # pixels, of a JPEG


class _Samples:
    """What FFCV's writer reads: (uint8 (H, W, 3), class) by index. A broken image is a black pixel, and noted."""

    def __init__(self, source: ImageSource, max_size: int, raw: bool, evaluated: Evaluated | None):
        self.source, self.max_size, self.raw = source, max_size, raw
        self.transform = None if evaluated is None else eval_transform(*evaluated)
        self.broken = multiprocessing.RawArray("b", len(source))

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        try:
            return self.read(int(index))
        except BrokenImage:
            self.broken[index] = 1
            return np.zeros((1, 1, 3), np.uint8), 0

    def read(self, index: int) -> tuple[np.ndarray, int]:
        """Return an image as it will be stored. Raises BrokenImage."""
        image, target = self.source.read(index)
        if self.transform is not None:
            return self.transform(image).numpy(), target
        scale = min(1.0, self.max_size / max(image.size)) if self.max_size else 1.0
        width, height = (int(side * scale) for side in image.size)  # as FFCV will scale it
        fault = ("nothing is left of it, scaled to --max-size" if min(width, height) < 1
                 else f"FFCV has sides of at most {MOST_SIDE}" if max(width, height) > MOST_SIDE
                 else f"a page of FFCV has {PAGE} bytes, lower --max-size" if 3 * width * height > PAGE and self.raw
                 else "")
        if fault:
            raise BrokenImage(f"{image.width}x{image.height} pixels: {fault}")
        return np.asarray(image), target

    def left_out(self) -> list[dict[str, str]]:
        """Return path and error of the broken images; it reads them once more."""
        found = []
        for index in np.flatnonzero(self.broken).tolist():
            try:
                self.read(index)
            except BrokenImage as error:
                found.append({"path": self.source.describe(index), "error": str(error)})
        return found


def _work(work, parent: int, failures, *given) -> None:
    """Do the work of one of FFCV's writing processes; tell the parent of an error: FFCV itself would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work(*given)
    except Exception as error:
        failures.put(str(error))
        os.kill(parent, signal.SIGUSR1)


def _write(path: Path, samples: _Samples, fields: dict, workers: int, indices: list[int]) -> None:
    """Write samples by FFCV's writer. Raises RunError where it cannot."""
    failures = multiprocessing.SimpleQueue()

    class Writer(require_ffcv("ffcv.writer").DatasetWriter):
        def _write_common(self, count, chunks, work, more):
            super()._write_common(count, chunks, partial(_work, work, os.getpid(), failures), more)

    def fail(*_) -> None:
        raise RunError(f"cannot write {path}: {failures.get()}")

    writer, before = Writer(str(path), fields, page_size=PAGE, num_workers=workers), signal.signal(signal.SIGUSR1, fail)
    try:
        writer.from_indexed_dataset(samples, indices)
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        if hasattr(writer, "metadata_sm"):
            writer.metadata_sm.unlink()
        raise
    finally:
        signal.signal(signal.SIGUSR1, before)


def write_beton(source: ImageSource, out: Path, *, max_size: int = 0, jpeg_share: float = 0.5, quality: int = 90,
                workers: int = 2, max_bad_images: int = 0, evaluated: Evaluated | None = None) -> dict:
    """Write `source` as a .beton file and FILE.json.

    Args:
        max_size: longest side in pixels that is kept, larger images are scaled down; 0: any.
        jpeg_share: share of the images that is stored as JPEG; the others as pixels: larger, and faster to read.
        quality: of the JPEGs, 1..100. workers: processes.
        max_bad_images: so many that cannot be decoded or written are left out; then the file is written twice.
        evaluated: store what `eval_transform` makes of each image (with max_size 0, jpeg_share 0); None: the image.

    Returns:
        What FILE.json holds.

    Raises:
        UsageError: FFCV is not installed, or more images cannot be decoded.
        RunError: the file cannot be written.
    """
    field_types = require_ffcv("ffcv.fields")
    fields = {"image": field_types.RGBImageField(
        write_mode={0: "raw", 1: "jpg"}.get(jpeg_share, "proportion"), max_resolution=max_size or None,
        jpeg_quality=quality, compress_probability=jpeg_share), "label": field_types.IntField()}
    out = Path(os.path.realpath(check_output(out)))
    temporary = out.with_name(f".{out.name}.tmp")
    samples = _Samples(source, max_size, jpeg_share < 1, evaluated)
    try:
        kept = list(range(len(source)))
        _write(temporary, samples, fields, workers, kept)
        left_out = samples.left_out()
        if len(left_out) > min(max_bad_images, len(source) - 1):
            raise UsageError(f"{len(left_out)} of {len(source)} images cannot be written, the first: "
                             f"{left_out[0]['path']} ({left_out[0]['error']}); --max-bad-images says how many may be "
                             "left out")
        if left_out:
            kept = np.flatnonzero(np.equal(samples.broken, 0)).tolist()
            _write(temporary, samples, fields, workers, kept)
        sidecar(out).unlink(missing_ok=True)  # never the old one beside the new file
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    about = {"images": len(kept), "classes": source.classes, "source": source.name,
             "max_size": max_size, "jpeg_share": jpeg_share, "quality": quality, "evaluated": evaluated,
             "exif_rotation": source.exif_rotation, "left_out": left_out}
    write_json(sidecar(out), about)
    return about


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", required=True, help="folder with train and val, each a folder or .tar of class/name.jpg, or such "
        "a folder itself")
    add("--split", choices=("train", "validation"), default="train", help="(default: %(default)s)")
    add("--out", required=True, type=Path, metavar="FILE.beton", help="the file to write")
    add("--dataset", default="", help="timm's name of another data set (torch/*, hfds/*)")
    add("--num-classes", type=int, default=0, help="classes the data must have; 0: those it has (default: 0)")
    add("--eval-img-size", type=int, default=0, metavar="SIDE", help="store images as they are evaluated, as pixels: "
        "the short side scaled to --eval-resize, then the middle of so many pixels; the trainer needs the same three "
        "options. 0: whole images (default: 0)")
    add("--eval-resize", type=int, default=256, help="with --eval-img-size (default: %(default)s)")
    add("--interpolation", choices=("bilinear", "bicubic"), default="bilinear", help="with --eval-img-size (default: "
        "%(default)s)")
    add("--max-size", type=int, help="longest side in pixels; larger images are scaled down, 0: none is (default: 500)")
    add("--jpeg-share", type=float, help="share of the images stored as JPEG, 0..1; the others are stored as pixels "
        "(default: 0.5)")
    add("--quality", type=int, default=90, help="quality of the JPEGs, 1..100 (default: %(default)s)")
    add("--exif-rotation", action="store_true", help="turn images as their EXIF data says; the trainer needs the same "
        "option (default: do not, as timm and torchvision)")
    add("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    add("--max-bad-images", type=int, default=0, help="so many images that cannot be decoded are left out, and listed "
        "in FILE.beton.json; with more, nothing is written (default: 0)")
    given = parser.parse_args(argv)
    evaluated = None
    if given.eval_img_size:
        evaluated = Evaluated(given.eval_img_size, given.eval_resize, given.interpolation)
        if given.max_size or given.jpeg_share:
            raise UsageError("--eval-img-size stores pixels of one size: --max-size and --jpeg-share must be 0")
        if not 8 <= given.eval_img_size <= given.eval_resize:
            raise UsageError(f"--eval-img-size must lie in 8..{given.eval_resize} (--eval-resize), got "
                             f"{given.eval_img_size}")
    for name, default in (("max_size", 500), ("jpeg_share", 0.5)):
        if getattr(given, name) is None:
            setattr(given, name, 0 if evaluated else default)
    for name, low, high in (("max_size", 0, MOST_SIDE), ("jpeg_share", 0, 1), ("quality", 1, 100), ("workers", 1, 1024),
                            ("max_bad_images", 0, 10**9)):
        if not low <= getattr(given, name) <= high:
            raise UsageError(f"--{name.replace('_', '-')} must lie in {low}..{high}, got {getattr(given, name)}")
    require_ffcv("ffcv")
    root = Path(given.data_dir)
    place = root if given.dataset else find_split(root, given.split, or_root=True)
    source = ImageSource(given.dataset, place, given.split, given.num_classes, given.exif_rotation)
    about = write_beton(source, given.out, max_size=given.max_size, jpeg_share=given.jpeg_share, quality=given.quality,
                        workers=given.workers, max_bad_images=given.max_bad_images, evaluated=evaluated)
    for entry in about["left_out"]:
        print(f"left out {entry['path']}: {entry['error']}")
    print(f"{given.out}: {about['images']} images of {len(about['classes'])} classes, "
          f"{given.out.stat().st_size / 2**20:.1f} MiB, {len(about['left_out'])} left out, EXIF rotation "
          f"{'applied' if about['exif_rotation'] else 'not applied'}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
