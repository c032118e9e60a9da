"""Write a split of an image data set as one FFCV file (.beton), which trains several times faster than image files.

Every image is decoded and converted to 8-bit RGB. Training images are stored whole. Validation images are stored as the
trainer evaluates them; their pixels are bit-identical to those read from the folder. The classes, and how images were
stored, are written beside the file as FILE.json. The file appears under its name when it is complete.
"""

import math
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from psutil import pid_exists

from ea_vision.base.errors import CommandParser, RunError, UsageError
from ea_vision.base.files import check_output
from ea_vision.data.beton import Evaluated, read_tables, require_ffcv, sidecar, write_about
from ea_vision.data.decoding import BrokenImage
from ea_vision.data.image_files import ImageFiles
from ea_vision.data.scaling import Scaling
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
        jpeg_share: share of the images that are stored as JPEG; the others are stored as pixels, which are larger and
            faster to read.
        workers: threads.
        evaluated: store each image as it is evaluated, as pixels; None: store the whole image.

    Raises:
        UsageError: FFCV is not installed, or images cannot be decoded.
        RunError: the file cannot be written.
    """
    out = Path(os.path.realpath(check_output(out)))
    temporary = _temporary(out)
    fields = require_ffcv("ffcv.fields")
    columns = {"image": fields.RGBImageField(), "label": fields.IntField()}
    writer = require_ffcv("ffcv.writer").DatasetWriter(str(temporary), columns)
    rows = np.zeros(len(source), writer.metadata_type)
    scaling = Scaling.cropped(*evaluated) if evaluated else None
    encoder = _Encoder(source, rows, max_size, 0.0 if evaluated else jpeg_share, scaling)
    try:
        _write(writer, encoder, workers)
        if encoder.broken:
            raise UsageError(
                f"{len(encoder.broken)} of {len(source)} images cannot be decoded, repair or remove them: "
                + "; ".join(sorted(encoder.broken))
            )
        tables = read_tables(temporary)
        sidecar(out).unlink(missing_ok=True)  # the old one must never be beside the new file
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    write_about(out, tables, source.name, source.classes, evaluated)


def _temporary(out: Path) -> Path:
    """Return the name under which this process writes `out`; another process may write the same file.

    Files that killed writers left on this machine are removed.
    """
    prefix = f".{out.name}.{socket.gethostname()[:24]}-"
    for path in out.parent.iterdir():
        pid = path.name.removeprefix(prefix).removesuffix(".tmp")
        if path.name == f"{prefix}{pid}.tmp" and pid.isdigit() and not pid_exists(int(pid)):
            path.unlink(missing_ok=True)
    return out.with_name(f"{prefix}{os.getpid()}.tmp")


@dataclass(eq=False, repr=False)
class _Encoder:
    """Encodes the images. Which ones are stored as JPEG depends on their number alone, so that the same images and
    options make the same file.

    Attributes:
        rows: FFCV's table: an image's mode, width, height and place; its label.
        max_size, jpeg_share: see `write_beton`.
        scaling: how each image is stored; None: whole.
        broken: the images that cannot be decoded, and why.
    """

    source: ImageFiles
    rows: np.ndarray
    max_size: int
    jpeg_share: float
    scaling: Scaling | None

    def __post_init__(self):
        fields = require_ffcv("ffcv.fields")
        self.as_jpeg = np.random.default_rng(0).random(len(self.source)) < self.jpeg_share
        self.jpeg_field = fields.RGBImageField("jpg")
        self.raw_field = fields.RGBImageField("raw")
        self.broken: list[str] = []

    def encode(self, index: int) -> np.ndarray | bytes:
        """Return the bytes to store for an image (none for a broken one), and fill its row except the place."""
        row = self.rows[index : index + 1]
        stored: list[np.ndarray] = []

        def reserve(size: int) -> tuple[int, np.ndarray]:
            stored.append(np.empty(size, np.uint8))
            return 0, stored[0]

        try:
            image, row["f1"][0] = self.source.read(index)
            if self.scaling:
                image = self.scaling.pixels(image).numpy()
            else:
                image.thumbnail((self.max_size, self.max_size))
        except BrokenImage as error:
            self.broken.append(f"{self.source.describe(index)} ({error})")
            return b""
        field = self.jpeg_field if self.as_jpeg[index] else self.raw_field
        field.encode(row["f0"], image, reserve)
        return stored[0]


def _write(writer, encoder: _Encoder, workers: int) -> None:
    """Write the images, encoded by threads, in order, with FFCV's header and tables. No image crosses the border of a
    page. (The processes of FFCV's own writer would wait for ever if one of them fails.)"""
    rows = encoder.rows
    writer.num_samples = len(rows)
    writer.prepare()
    writer.metadata_sm.unlink()  # threads need no shared memory
    places = []
    page = writer.page_size
    end = writer.data_region_start
    parts = math.ceil(len(rows) / (AHEAD * workers))
    with open(writer.fname, "r+b") as file, ThreadPoolExecutor(workers) as pool:
        for numbers in np.array_split(np.arange(len(rows)), parts):
            encoded = pool.map(encoder.encode, numbers.tolist())
            for index, stored in zip(numbers.tolist(), encoded, strict=True):
                if index and not index % 10_000:
                    print(f"{index:,} of {len(rows):,} images", file=sys.stderr)
                if not places or end % page + len(stored) > page:
                    end += -end % page
                rows["f0"]["data_ptr"][index] = file.seek(end)
                places.append((index, end, len(stored)))
                end += file.write(stored)
        file.truncate(end + -end % page)
    writer.metadata_sm = SimpleNamespace(buf=rows.tobytes())
    writer.finalize(places)


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, epilog=EXAMPLES, allow_abbrev=False)
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
        help="validation: side in pixels of the center crop; "
        "the trainer needs the same three options (default: %(default)s)",
    )
    add(
        "--eval-resize",
        type=int,
        default=256,
        help="validation: short side in pixels before the crop (default: %(default)s)",
    )
    add(
        "--interpolation",
        choices=("bilinear", "bicubic"),
        default="bilinear",
        help="validation (default: %(default)s)",
    )
    add("--workers", type=int, default=os.cpu_count(), help="threads (default: one per core)")
    args = parser.parse_args(argv)
    _check_range("--eval-resize", args.eval_resize, 8, LARGEST)
    _check_range("--eval-img-size", args.eval_img_size, 8, args.eval_resize)
    _check_range("--max-size", args.max_size, 1, LARGEST)
    _check_range("--jpeg-share", args.jpeg_share, 0, 1)
    _check_range("--workers", args.workers, 1, 1024)
    require_ffcv("ffcv")
    source = ImageFiles(find_split(args.data_dir, args.split, or_root=True))
    evaluated = Evaluated(args.eval_img_size, args.eval_resize, args.interpolation)
    write_beton(
        source,
        args.out,
        max_size=args.max_size,
        jpeg_share=args.jpeg_share,
        workers=args.workers,
        evaluated=evaluated if args.split == "validation" else None,
    )
    mib = args.out.stat().st_size / 2**20
    print(f"{args.out}: {len(source)} images of {len(source.classes)} classes, {mib:.1f} MiB")
    return 0


def _check_range(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"{option} must lie in {low}..{high}, got {value}")
