"""Write a split of an image data set as one FFCV file (.beton), which trains several times faster than image files.

Every image is decoded and converted to 8-bit RGB. Training images are stored whole, validation images as the trainer
shows them to evaluate on: the folder's pixels, bit for bit. FFCV's own writer writes them; the classes and how images
were stored are written beside the file as FILE.json. The file appears under its name when it is whole.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing import Value
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np

from ea_vision.base.errors import RunError, UsageError, exit_code
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


class _Samples:
    """What FFCV's writer reads: (uint8 (H, W, 3), class) by index. A broken image is a black pixel, and noted."""

    def __init__(self, source: ImageFiles, max_size: int, evaluated: Evaluated | None):
        self.source, self.max_size, self.broken = source, max_size, []
        self.transform = eval_transform(*evaluated) if evaluated else None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index and not index % 10_000:
            print(f"{index:,} of {len(self):,} images", file=sys.stderr)
        try:
            image, target = self.source.read(int(index))
            if self.transform is not None:
                return self.transform(image).numpy(), target
        except BrokenImage as error:
            self.broken.append(f"{self.source.describe(index)} ({error})")
            return np.zeros((1, 1, 3), np.uint8), 0
        image.thumbnail((self.max_size, self.max_size))
        return np.asarray(image), target


def _writer():
    """Return FFCV's writer with threads in place of its processes, which wait for ever when one of them fails."""
    memory = require_ffcv("ffcv.memory_allocator")

    class Pages(memory.MemoryAllocator):
        """The pages of one thread, which does not wait for the others' to be written."""

        def __enter__(self):
            self.fp = open(self.fname, "r+b")  # noqa: SIM115  __exit__ closes it

        def flush_page(self):
            if self.my_page >= 0:
                self.fp.seek(self.offset + self.my_page * self.page_size)
                self.fp.write(self.page_data)

    class Writer(require_ffcv("ffcv.writer").DatasetWriter):
        def _write_common(self, num_samples: int, queue_content: Iterable, work_fn, extra_worker_args: tuple) -> None:
            self.num_samples = num_samples
            self.prepare()
            self.metadata_sm.unlink()  # threads need no shared memory
            self.metadata_sm = SimpleNamespace(buf=bytearray(num_samples * self.metadata_type.itemsize))
            todo, found = SimpleNamespace(get=partial(next, iter(list(queue_content)), None)), SimpleQueue()
            pages = [Pages(self.fname, self.data_region_start, self.page_size) for _ in range(self.num_workers)]
            with ThreadPoolExecutor(self.num_workers) as pool:
                try:
                    running = []
                    for own in pages:
                        own.next_page_allocated = pages[0].next_page_allocated
                        running.append(pool.submit(work_fn, todo, self.metadata_sm, self.metadata_type, self.fields,
                                                   own, Value("Q"), found, *extra_worker_args))
                    for done in wait(running, return_when=FIRST_EXCEPTION).done:
                        done.result()
                finally:
                    todo.get = lambda: None  # an error or Ctrl-C: the other threads end, too
            self.finalize([row for _ in pages for row in found.get()])

    return Writer


def write_beton(source: ImageFiles, out: Path, *, max_size: int = 500, jpeg_share: float = 0.5, workers: int = 2,
                evaluated: Evaluated | None = None) -> None:
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
    jpeg_share = 0 if evaluated else jpeg_share
    image = fields.RGBImageField(write_mode={0: "raw", 1: "jpg"}.get(jpeg_share, "proportion"),
                                 compress_probability=jpeg_share)
    out = Path(os.path.realpath(check_output(out)))
    temporary, samples = out.with_name(f".{out.name}.tmp"), _Samples(source, max_size, evaluated)
    try:
        _writer()(str(temporary), {"image": image, "label": fields.IntField()}, num_workers=workers
                  ).from_indexed_dataset(samples, chunksize=10)
        if samples.broken:
            raise UsageError(f"{len(samples.broken)} of {len(source)} images cannot be decoded, mend or remove them: "
                             + "; ".join(sorted(samples.broken)))
        sidecar(out).unlink(missing_ok=True)  # never the old one beside the new file
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    write_json(sidecar(out), {"source": source.name, "classes": source.classes, "evaluated": evaluated})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", required=True, type=Path, help="folder with train and val, each a folder or .tar of "
        "class/name.jpg, or such a folder itself")
    add("--split", choices=("train", "validation"), default="train", help="(default: %(default)s)")
    add("--out", required=True, type=Path, metavar="FILE.beton", help="the file to write")
    add("--max-size", type=int, default=500, help="train: longest side in pixels; larger images are scaled down "
        "(default: %(default)s)")
    add("--jpeg-share", type=float, default=0.5, help="train: share of the images stored as JPEG, 0..1; the others are "
        "stored as pixels (default: %(default)s)")
    add("--eval-img-size", type=int, default=224, metavar="SIDE", help="validation: side in pixels of the middle that "
        "is cut out; the trainer needs the same three options (default: %(default)s)")
    add("--eval-resize", type=int, default=256, help="validation: what the short side is scaled to before (default: "
        "%(default)s)")
    add("--interpolation", choices=("bilinear", "bicubic"), default="bilinear", help="validation (default: "
        "%(default)s)")
    add("--workers", type=int, default=os.cpu_count(), help="threads (default: one per core)")
    given = parser.parse_args(argv)
    for name, low, high in (("eval_resize", 8, LARGEST), ("eval_img_size", 8, given.eval_resize),
                            ("max_size", 1, LARGEST), ("jpeg_share", 0, 1), ("workers", 1, 1024)):
        if not low <= getattr(given, name) <= high:
            raise UsageError(f"--{name.replace('_', '-')} must lie in {low}..{high}, got {getattr(given, name)}")
    require_ffcv("ffcv")
    source = ImageFiles(find_split(given.data_dir, given.split, or_root=True))
    evaluated = Evaluated(given.eval_img_size, given.eval_resize, given.interpolation)
    write_beton(source, given.out, max_size=given.max_size, jpeg_share=given.jpeg_share, workers=given.workers,
                evaluated=evaluated if given.split == "validation" else None)
    print(f"{given.out}: {len(source)} images of {len(source.classes)} classes, "
          f"{given.out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
