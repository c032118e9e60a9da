"""Write a split of an image data set as one FFCV file (.beton), which trains several times faster than image files.

Every image is decoded and converted to 8-bit RGB, and stored whole, or, with --eval-img-size, as the trainer shows it
to evaluate on: the folder's pixels, bit for bit. The classes, their counts, what was left out, whether images were
turned as their EXIF data says, and a checksum of every image are written beside it as FILE.json; --verify FILE compares
them. The file appears under its name when it is whole; an interrupted one leaves nothing that could be taken for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from ea_vision.base.errors import RunError, UsageError, exit_code
from ea_vision.base.files import atomic_write, check_output
from ea_vision.data.batches import numbered_seed
from ea_vision.data.ffcv import Beton, Evaluated, open_beton, require_ffcv, seal, sidecar
from ea_vision.data.image_files import BrokenImage
from ea_vision.data.imagenet import ImageSource, die_with_parent, eval_transform
from ea_vision.data.splits import find_split

EXAMPLES = """\
examples:
  python -m ea_vision.data.write_ffcv --data-dir /data/imagenet --split train --out train.beton
  python -m ea_vision.data.write_ffcv --data-dir /data/imagenet --split validation --out val.beton --eval-img-size 224
  python -m ea_vision.data.write_ffcv --data-dir DIR --split train --out small.beton --max-size 256 --jpeg-share 0
  python -m ea_vision.data.write_ffcv --verify train.beton
  python train_imagenet.py --train-beton train.beton --val-beton val.beton
"""
PAGE = 2**23  # bytes; FFCV reads a file in these
MAX_SIDE = 65535  # pixels; what its tables hold
_worker: tuple = ()


def _begin(read: Callable[[int], tuple[Image.Image, int]], field, seed: int) -> None:
    global _worker
    _worker = (read, field, seed)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a trainer's handler would outlive the pool's end
    die_with_parent()


def _encode(index: int) -> tuple[np.ndarray | None, bytes, int, str]:
    """Decode and encode an image: its row of the table, without the place, its bytes, its class; or what is wrong."""
    read, field, seed = _worker
    try:
        image, target = read(index)
    except BrokenImage as error:
        return None, b"", 0, str(error)
    longest, shortest = max(image.size), min(image.size)
    if field.max_resolution and shortest * min(1, field.max_resolution / longest) < 1:
        return None, b"", 0, f"{image.width}x{image.height} pixels: nothing is left of it, scaled to --max-size"
    if min(longest, field.max_resolution or longest) > MAX_SIDE:
        return None, b"", 0, f"{image.width}x{image.height} pixels: FFCV has sides of at most {MAX_SIDE}"
    np.random.seed(numbered_seed(seed, index) % 2**32)  # FFCV draws from it which images become JPEG
    row = np.zeros(1, field.metadata_type)
    stored = []

    def malloc(size: int):
        stored.append(np.empty(size, np.uint8))
        return 0, stored[0]

    try:
        field.encode(row, image, malloc)
    except (require_ffcv("cv2").error, ValueError) as error:  # such as sides that OpenCV has no JPEG for
        return None, b"", 0, f"{image.width}x{image.height} pixels, OpenCV cannot write it: {error}"
    return row, stored[0].tobytes(), target, ""


def encoded_images(source: ImageSource, field, workers: int, seed: int,
                   evaluated: Evaluated | None = None) -> Iterator[tuple]:
    """Yield what `_encode` makes of every image, in order, from `workers` processes; 0: from this one."""
    read = source.read
    if evaluated is not None:
        transform = eval_transform(*evaluated)

        def read(index: int) -> tuple[Image.Image, int]:
            image, target = source.read(index)
            return Image.fromarray(transform(image).numpy()), target

    if not workers:
        global _worker
        _worker = (read, field, seed)
        state = np.random.get_state()
        yield from map(_encode, range(len(source)))
        np.random.set_state(state)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, _begin, (read, field, seed)) as pool:
        yield from pool.imap(_encode, range(len(source)), chunksize=8)


def write_beton(source: ImageSource, out: Path, *, max_size: int = 0, jpeg_share: float = 0.5, quality: int = 90,
                workers: int = 2, broken: str = "stop", max_bad_images: int = 0, seed: int = 0,
                evaluated: Evaluated | None = None) -> dict:
    """Write `source` as a .beton file and FILE.json.

    Args:
        max_size: longest side in pixels that is kept, larger images are scaled down; 0: any.
        jpeg_share: share of the images that is stored as JPEG; the others as pixels: larger, and faster to read.
        quality: of the JPEGs, 1..100.
        workers: processes; 0: this one alone.
        broken: "stop" at the first image that cannot be decoded or written, or "skip": leave it out and list it.
        max_bad_images: with "skip", stop when more cannot be decoded; 0: any number.
        evaluated: store what `eval_transform` makes of each image (with max_size 0, jpeg_share 0); None: the image.

    Returns:
        What FILE.json holds.

    Raises:
        UsageError: FFCV is not installed, or images cannot be decoded.
        RunError: the file cannot be written.
    """
    types, fields = require_ffcv("ffcv.types"), require_ffcv("ffcv.fields")
    modes = {0.0: "raw", 1.0: "jpg"}
    image_field = fields.RGBImageField(write_mode=modes.get(jpeg_share, "proportion"), max_resolution=max_size or None,
                                       jpeg_quality=quality, compress_probability=jpeg_share)
    label_field = fields.IntField()
    out = Path(os.path.realpath(check_output(out)))
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            about = _write(file, source, types, [image_field, label_field], workers, broken, max_bad_images, seed,
                           evaluated)
            file.flush()
            os.fsync(file.fileno())
        about.update({"source": source.name, "max_size": max_size, "jpeg_share": jpeg_share, "quality": quality,
                      "seed": seed, "exif_rotation": source.exif_rotation, "bytes": temporary.stat().st_size,
                      "ffcv_format": int(types.CURRENT_VERSION), "tables": Beton(temporary).tables_digest()})
        if evaluated is not None:
            about["evaluated"] = evaluated._asdict()
        sidecar(out).unlink(missing_ok=True)  # never the old one beside the new file
        os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    atomic_write(sidecar(out), (json.dumps(seal(about), indent=1) + "\n").encode())
    return about


def _write(file, source: ImageSource, types, fields: list, workers: int, broken: str, max_bad_images: int,
           seed: int, evaluated: Evaluated | None) -> dict:
    """Write header, tables and pages into an empty file, in the order of FFCV's own writer; return what is in it."""
    descriptors = np.zeros(len(fields), types.FieldDescType)
    type_ids = {kind: number for number, kind in types.TYPE_ID_HANDLER.items()}
    for row, name, field in zip(descriptors, ("image", "label"), fields, strict=True):
        row["type_id"] = type_ids[type(field)]
        row["name"][:len(name)] = np.frombuffer(name.encode(), np.uint8)
        row["arguments"][:] = field.to_binary()[0]
    table = np.zeros(len(source), types.get_metadata_type(fields))
    image_column, label_column = table.dtype.names
    tables_end = types.HeaderType.itemsize + descriptors.nbytes + table.nbytes
    page_start = -(-tables_end // PAGE) * PAGE
    page_used = 0
    allocations = np.zeros(len(source), types.ALLOC_TABLE_TYPE)
    left_out: list[dict[str, str]] = []
    checksums = np.zeros(len(source), ">u4")
    count = 0
    file.seek(page_start)
    encoded = encoded_images(source, fields[0], workers, seed, evaluated)
    for index, (row, data, target, error) in enumerate(tqdm(encoded, total=len(source), unit="image", disable=None)):
        if not error and len(data) > PAGE:
            error = f"it takes {len(data)} bytes, a page has {PAGE}: lower --max-size"
        if error:
            left_out.append({"path": source.describe(index), "error": error})
            if broken == "stop" or max_bad_images and len(left_out) > max_bad_images:
                raise UsageError(f"{len(left_out)} image(s) cannot be written, the last: {source.describe(index)} "
                                 f"({error}); --broken skip leaves them out, up to --max-bad-images")
            continue
        if page_used + len(data) > PAGE:
            page_start, page_used = page_start + PAGE, 0
            file.seek(page_start)
        row["data_ptr"] = page_start + page_used
        file.write(data)
        table[image_column][count], table[label_column][count] = row[0], target
        checksums[count] = zlib.crc32(data)
        allocations[count] = (count, page_start + page_used, len(data))
        page_used += len(data)
        count += 1
    if not count:
        raise UsageError(f"{source.name} has no image that can be decoded")
    header = np.zeros(1, types.HeaderType)
    header["version"], header["num_fields"], header["page_size"] = types.CURRENT_VERSION, len(fields), PAGE
    header["num_samples"], header["alloc_table_ptr"] = count, page_start + PAGE
    file.seek(page_start + PAGE)  # the last page is whole, too
    file.write(allocations[:count].tobytes())
    file.seek(0)
    for part in (header, descriptors, table[:count]):
        file.write(part.tobytes())
    counts = Counter(table[label_column][:count].tolist())
    return {"images": count, "classes": source.classes,
            "counts": [counts[number] for number in range(len(source.classes))], "left_out": left_out,
            "checksums": checksums[:count].tobytes().hex()}


def verify(path: Path) -> int:
    """Decode every image of a .beton file, compare checksums where there are any, print what is damaged; 0 if nothing.

    Raises:
        UsageError: the file cannot be opened.
        RunError: images are damaged.
    """
    beton = open_beton(path)
    beton.unverified[:] = beton.checksums is not None
    bad = 0
    for index in tqdm(range(len(beton)), unit="image", disable=None):
        try:
            beton.decode(index)
        except BrokenImage as error:
            print(f"{beton.describe(index)}: {error}")
            bad += 1
    if bad:
        raise RunError(f"{bad} of {len(beton)} images of {path} are damaged: write it anew")
    print(f"{path}: {len(beton)} images, none is damaged"
          + ("" if beton.checksums is not None else "; it has no checksums, so they were decoded only"))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--verify", metavar="FILE.beton", help="in place of writing: decode every image of a file and "
                        "compare it with its checksum; list the damaged ones, exit with 1 if there are any")
    parser.add_argument("--data-dir", help="folder with train and val, each a folder or .tar of "
                        "class/name.jpg, or such a folder itself")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="(default: %(default)s)")
    parser.add_argument("--out", metavar="FILE.beton", help="the file to write")
    parser.add_argument("--dataset", default="", help="timm's name of another data set (torch/*, hfds/*)")
    parser.add_argument("--num-classes", type=int, default=0, help="classes the data must have; 0: those it has "
                        "(default: 0)")
    parser.add_argument("--eval-img-size", type=int, default=0, metavar="SIDE", help="store images as they are "
                        "evaluated, as pixels: the short side scaled to --eval-resize, then the middle of so many "
                        "pixels; the trainer needs the same three options. 0: whole images (default: 0)")
    parser.add_argument("--eval-resize", type=int, default=256, help="with --eval-img-size (default: %(default)s)")
    parser.add_argument("--interpolation", choices=("bilinear", "bicubic"), default="bilinear",
                        help="with --eval-img-size (default: %(default)s)")
    parser.add_argument("--max-size", type=int, help="longest side in pixels; larger images are scaled down, 0: none "
                        "is (default: 500)")
    parser.add_argument("--jpeg-share", type=float, help="share of the images stored as JPEG, 0..1; the others are "
                        "stored as pixels (default: 0.5)")
    parser.add_argument("--quality", type=int, default=90, help="quality of the JPEGs, 1..100 (default: %(default)s)")
    parser.add_argument("--exif-rotation", action="store_true", help="turn images as their EXIF data says; the trainer "
                        "needs the same option (default: do not, as timm and torchvision)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, 0: this one alone (default: "
                        "one per core)")
    parser.add_argument("--broken", choices=("stop", "skip"), default="stop", help="images that cannot be decoded: "
                        "stop at the first, or leave them out and list them in FILE.beton.json (default: %(default)s)")
    parser.add_argument("--max-bad-images", type=int, default=0, help="with --broken skip: stop when there are more; "
                        "0: any number (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of which images become JPEG (default: 0)")
    given = parser.parse_args(argv)
    evaluated = None
    if given.eval_img_size:
        evaluated = Evaluated(given.eval_img_size, given.eval_resize, given.interpolation)
        if given.max_size or given.jpeg_share:
            raise UsageError("--eval-img-size stores pixels of one size: --max-size and --jpeg-share must be 0")
        if not 8 <= given.eval_img_size <= given.eval_resize:
            raise UsageError(f"--eval-img-size must lie in 8..{given.eval_resize} (--eval-resize), got "
                             f"{given.eval_img_size}")
    if given.max_size is None:
        given.max_size = 0 if evaluated else 500
    if given.jpeg_share is None:
        given.jpeg_share = 0.0 if evaluated else 0.5
    for name, value, low, high in (("jpeg-share", given.jpeg_share, 0, 1), ("quality", given.quality, 1, 100),
                                   ("max-size", given.max_size, 0, MAX_SIDE), ("workers", given.workers, 0, 1024)):
        if not low <= value <= high:
            raise UsageError(f"--{name} must lie in {low}..{high}, got {value}")
    require_ffcv("ffcv")
    if given.verify:
        return verify(Path(given.verify))
    if not given.data_dir or not given.out:
        raise UsageError("--data-dir and --out are required, or --verify FILE.beton")
    root = Path(given.data_dir)
    place = root if given.dataset else find_split(root, given.split, or_root=True)
    source = ImageSource(given.dataset, place, given.split, given.num_classes, given.exif_rotation)
    about = write_beton(source, Path(given.out), max_size=given.max_size, jpeg_share=given.jpeg_share,
                        quality=given.quality, workers=given.workers, broken=given.broken,
                        max_bad_images=given.max_bad_images, seed=given.seed, evaluated=evaluated)
    for entry in about["left_out"]:
        print(f"left out {entry['path']}: {entry['error']}")
    print(f"{given.out}: {about['images']} images of {len(about['classes'])} classes, "
          f"{about['bytes'] / 2**20:.1f} MiB, {len(about['left_out'])} left out, EXIF rotation "
          f"{'applied' if about['exif_rotation'] else 'not applied'}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
