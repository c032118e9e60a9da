"""Write a split of an image data set as one FFCV file (.beton), which trains several times faster than image files.

Every image is decoded and converted to 8-bit RGB. Training images are stored whole, validation images as the trainer
shows them to evaluate on: the folder's pixels, bit for bit. FFCV stores and describes them; the classes and how images
were stored are written beside the file as FILE.json. The file appears under its name when it is whole.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import check_output, write_json
from ea_vision.data.ffcv import Evaluated, require_ffcv, sidecar
from ea_vision.data.image_files import BrokenImage, ImageFiles
from ea_vision.data.imagenet import eval_transform
from ea_vision.data.splits import find_split

EXAMPLES = """\
examples:
  ea-vision write-ffcv --data-dir /data/imagenet --split train --out train.beton
  ea-vision write-ffcv --data-dir /data/imagenet --split validation --out val.beton --eval-img-size 224
  ea-vision write-ffcv --data-dir DIR --split train --out small.beton --max-size 256 --jpeg-share 0
  python train_imagenet.py --train-beton train.beton --val-beton val.beton
"""
LARGEST = 1672  # pixels: the side of a square whose pixels fit into a page of FFCV's writer
AHEAD = 16  # images of each thread that may wait to be written


def write_beton(
    source: ImageFiles,
    out: Path,
    *,
    max_size: int = 500,
    jpeg_share: float = 0.5,
    workers: int = 2,
    evaluated: Evaluated | None = None,
) -> None:
    """Write `source` as a .beton file and FILE.json.

    Args:
        max_size: longest side in pixels that is kept; larger images are scaled down.
        jpeg_share: share of the images that is stored as JPEG; the others as pixels: larger, and faster to read.
        workers: threads.
        evaluated: store what `eval_transform` makes of each image, as pixels; None: the image.

    Raises:
        UsageError: FFCV is not installed, or images cannot be decoded.
        RunError: the file cannot be written.
    """
    fields = require_ffcv("ffcv.fields")
    field = fields.RGBImageField("proportion", compress_probability=0 if evaluated else jpeg_share)
    out = Path(os.path.realpath(check_output(out)))
    temporary, broken = out.with_name(f".{out.name}.tmp"), []
    writer = require_ffcv("ffcv.writer").DatasetWriter(
        str(temporary), {"image": field, "label": fields.IntField()}
    )
    table = np.zeros(
        len(source), writer.metadata_type
    )  # FFCV's: an image's mode, width, height and place; its label

    def encode(index: int) -> np.ndarray | bytes:
        """Return the bytes to store of an image, none of a broken one, and fill its row but for the place."""

        def reserve(size: int) -> tuple[int, np.ndarray]:
            stored.append(np.empty(size, np.uint8))
            return 0, stored[0]

        stored: list[np.ndarray] = []
        try:
            image, table["f1"][index] = source.read(index)
        except BrokenImage as error:
            broken.append(f"{source.describe(index)} ({error})")
            return b""
        if evaluated:
            image = eval_transform(*evaluated)(image).numpy()
        else:
            image.thumbnail((max_size, max_size))
        field.encode(table["f0"][index : index + 1], image, reserve)
        return stored[0]

    try:
        _write(writer, table, encode, workers)
        if broken:
            raise UsageError(
                f"{len(broken)} of {len(source)} images cannot be decoded, mend or remove them: "
                + "; ".join(sorted(broken))
            )
        sidecar(out).unlink(missing_ok=True)  # never the old one beside the new file
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    write_json(
        sidecar(out), {"source": source.name, "classes": source.classes, "evaluated": evaluated}
    )


def _write(writer, table: np.ndarray, encode: Callable[[int], np.ndarray], workers: int) -> None:
    """Write what threads `encode`, in order, no image across the border of a page, with FFCV's header and tables. (The
    processes of FFCV's writer would wait for ever when one of them fails.)"""
    writer.num_samples = len(table)
    writer.prepare()
    writer.metadata_sm.unlink()  # threads need no shared memory
    places, page, end = [], writer.page_size, writer.data_region_start
    with open(writer.fname, "r+b") as file, ThreadPoolExecutor(workers) as pool:
        for numbers in np.array_split(
            np.arange(len(table)), math.ceil(len(table) / (AHEAD * workers))
        ):
            for index, stored in zip(
                numbers.tolist(), pool.map(encode, numbers.tolist()), strict=True
            ):
                if index and not index % 10_000:
                    print(f"{index:,} of {len(table):,} images", file=sys.stderr)
                if not places or end % page + len(stored) > page:
                    end += -end % page
                table["f0"]["data_ptr"][index] = file.seek(end)
                places.append((index, end, len(stored)))
                end += file.write(stored)
        file.truncate(end + -end % page)
    writer.metadata_sm = SimpleNamespace(buf=table.tobytes())
    writer.finalize(places)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data-dir",
        required=True,
        type=Path,
        help="folder with train and val, each a folder or .tar of "
        "class/name.jpg, or such a folder itself",
    )
    add("--split", choices=("train", "validation"), default="train", help="(default: %(default)s)")
    add("--out", required=True, type=Path, metavar="FILE.beton", help="the file to write")
    add(
        "--max-size",
        type=int,
        default=500,
        help="train: longest side in pixels; larger images are scaled down (default: %(default)s)",
    )
    add(
        "--jpeg-share",
        type=float,
        default=0.5,
        help="train: share of the images stored as JPEG, 0..1; the others are "
        "stored as pixels (default: %(default)s)",
    )
    add(
        "--eval-img-size",
        type=int,
        default=224,
        metavar="SIDE",
        help="validation: side in pixels of the middle that "
        "is cut out; the trainer needs the same three options (default: %(default)s)",
    )
    add(
        "--eval-resize",
        type=int,
        default=256,
        help="validation: what the short side is scaled to before (default: %(default)s)",
    )
    add(
        "--interpolation",
        choices=("bilinear", "bicubic"),
        default="bilinear",
        help="validation (default: %(default)s)",
    )
    add("--workers", type=int, default=os.cpu_count(), help="threads (default: one per core)")
    given = parser.parse_args(argv)
    for name, low, high in (
        ("eval_resize", 8, LARGEST),
        ("eval_img_size", 8, given.eval_resize),
        ("max_size", 1, LARGEST),
        ("jpeg_share", 0, 1),
        ("workers", 1, 1024),
    ):
        if not low <= getattr(given, name) <= high:
            raise UsageError(
                f"--{name.replace('_', '-')} must lie in {low}..{high}, got {getattr(given, name)}"
            )
    require_ffcv("ffcv")
    source = ImageFiles(find_split(given.data_dir, given.split, or_root=True))
    evaluated = Evaluated(given.eval_img_size, given.eval_resize, given.interpolation)
    write_beton(
        source,
        given.out,
        max_size=given.max_size,
        jpeg_share=given.jpeg_share,
        workers=given.workers,
        evaluated=evaluated if given.split == "validation" else None,
    )
    print(
        f"{given.out}: {len(source)} images of {len(source.classes)} classes, "
        f"{given.out.stat().st_size / 2**20:.1f} MiB"
    )
    return 0
