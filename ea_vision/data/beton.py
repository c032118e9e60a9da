"""A .beton file (FFCV's format, https://ffcv.io) with its tables checked, and FILE.json beside it.

write-ffcv writes both. FILE.json has the classes, how images were stored, and a fingerprint of everything in the .beton
except the images' bytes, which is compared when the file is opened. FFCV's format has no checksum of the images' bytes,
so damage to an image that is stored as pixels is not noticed.
"""

import importlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.base.files import write_json
from ea_vision.data.image_files import fingerprint

HELP = """Debian, Ubuntu: apt-get install libturbojpeg0-dev libopencv-dev pkg-config && pip install ffcv; \
conda: conda install -c conda-forge opencv libjpeg-turbo pkg-config compilers && pip install ffcv; or \
leave .beton files out and give --data-dir"""
RAW = 1  # FFCV's mode of an image that is stored as pixels; 0: as JPEG
FIELDS = ["RGBImageField", "IntField"]


class Evaluated(NamedTuple):
    """How images are scaled and cropped before evaluation: the trainer's options of these names."""

    eval_img_size: int
    eval_resize: int
    interpolation: str


def require_ffcv(module: str):
    """Import a module of FFCV. If that fails, raise UsageError with the lines that install it."""
    try:
        config = importlib.import_module("numba").config
        if config.THREADING_LAYER == "default":
            # FFCV starts numba's threads when it is imported. If they are TBB's and there is one core, a process that
            # forks afterwards waits for ever at its end. Nothing here computes in those threads.
            config.THREADING_LAYER = "workqueue"
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"FFCV cannot be imported ({error}). {HELP}") from error


class Tables(NamedTuple):
    """What a .beton file says about its images."""

    rows: np.ndarray  # int64 (N, 5): place in the file, bytes, height, width, whether it is JPEG
    labels: np.ndarray  # int (N,)
    stored: list[np.ndarray]  # header and tables as they are stored

    def fingerprint(self, about: dict) -> str:
        """Return SHA-256 over the header, the tables and FILE.json's content."""
        text = json.dumps([about["source"], about["classes"], about["evaluated"]])
        arrays = [np.frombuffer(part.tobytes(), np.uint8) for part in self.stored]
        return fingerprint([text], *arrays)


def read_tables(path: Path) -> Tables:
    """Read the header and tables of a .beton file of RGB images and integer labels.

    Raises:
        UsageError: FFCV is not installed, or the file is missing, of another kind or incomplete.
    """
    reader_module = require_ffcv("ffcv.reader")
    # it raises many kinds on other bytes
    with as_usage_error(f"{path} is not a whole .beton file", Exception):
        reader = reader_module.Reader(str(path))
        kinds = [type(field).__name__ for field in reader.handlers.values()]
    sizes = np.sort(reader.alloc_table, order="sample_id")["size"]
    # The sizes come last in the file.
    if kinds != FIELDS or len(sizes) != reader.num_samples:
        raise UsageError(
            f"{path} is not a whole .beton file of {reader.num_samples} RGB images and integer labels: "
            f"got {', '.join(kinds)}, {len(sizes)} sizes"
        )
    images, labels = (reader.metadata[name] for name in reader.metadata.dtype.names)
    is_jpeg = images["mode"] != RAW
    columns = [images["data_ptr"], sizes, images["height"], images["width"], is_jpeg]
    rows = np.stack(columns, axis=1, dtype=np.int64, casting="unsafe")
    stored = [reader.header, reader.field_descriptors, reader.metadata, reader.alloc_table]
    return Tables(rows, labels, stored)


def sidecar(path: Path) -> Path:
    """Return the file beside a .beton that names its classes and says how it was written."""
    return path.with_name(path.name + ".json")


def write_about(
    path: Path, tables: Tables, source: str, classes: list[str], evaluated: Evaluated | None
) -> None:
    """Write FILE.json beside a .beton file with these tables."""
    about = {"source": source, "classes": classes, "evaluated": evaluated}
    write_json(sidecar(path), {**about, "fingerprint": tables.fingerprint(about)})


def read_about(path: Path, tables: Tables) -> tuple[list[str], Evaluated | None]:
    """Return what FILE.json beside a .beton file says: classes, and how images were scaled and cropped (None: not).

    Raises:
        UsageError: write-ffcv did not write it, it belongs to other tables than these, or one of the files is damaged.
    """
    file = sidecar(path)
    with as_usage_error(f"{file} is required as write-ffcv writes it ({_ADVICE})"):
        about = json.loads(file.read_text(encoding="utf-8"))
        fits = about["fingerprint"] == tables.fingerprint(about)
    if not fits:
        raise UsageError(
            f"{path} and {file.name} do not belong together, or one of them is damaged (the fingerprint "
            f"of the tables differs): {_ADVICE}"
        )
    evaluated = about["evaluated"]
    return about["classes"], evaluated and Evaluated(*evaluated)


_ADVICE = "write both anew by ea-vision write-ffcv"


class Beton:
    """The images and classes of a .beton file: fields `image` (RGB) and `label` (int), in this order.

    classes: from FILE.json. table: int64 (N, 5), for each image its place in the file,
    bytes, height, width and whether it is JPEG. evaluated: how images were scaled and cropped before they were stored;
    None: not at all.

    Args:
        evaluated: how its images must have been scaled and cropped; None (for training): not at all.

    Raises:
        UsageError: FFCV is not installed, or the file is missing, cut off, or stores images differently.
    """

    def __init__(self, path: Path, evaluated: Evaluated | None = None):
        self.name = str(path)
        tables = read_tables(path)
        self.classes, self.evaluated = read_about(path, tables)
        self.table = tables.rows
        self.labels = tables.labels
        self.data = _mapped(self.name)
        if self.evaluated != evaluated:
            raise UsageError(
                f"{path} must have {_how(evaluated)}, got {_how(self.evaluated)}: write it anew by "
                "ea-vision write-ffcv"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict:
        """Return the state for another process, which maps the file again."""
        return {**self.__dict__, "data": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.data = _mapped(self.name)

    def describe(self, index: int) -> str:
        """Return a name for an image."""
        return f"{self.name} {index}"

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image that is stored as pixels, uint8 (H, W, 3), and its target."""
        start, size, height, width, _ = self.table[index]
        pixels = self.data[start : start + size].reshape(height, width, 3)
        return torch.tensor(pixels), int(self.labels[index])

    def fingerprint(self) -> str:
        """Return SHA-256 over classes, labels and the size of every image in pixels and bytes."""
        return fingerprint(self.classes, self.labels, self.table[:, 1:])


def _mapped(path: str) -> np.ndarray:
    """Map a file into memory: uint8 (bytes,)."""
    # Linux refuses mode "c" for files larger than its memory.
    mapped = np.memmap(path, np.uint8, mode="r")
    return mapped.view(np.ndarray)


def _how(evaluated: Evaluated | None) -> str:
    return f"validation images for {evaluated}" if evaluated else "whole images, for training"
