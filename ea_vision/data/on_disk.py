"""Decoded images in an FFCV file instead of memory: `on_device` draws the same batches from them."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

import torch
from PIL import Image

from ea_vision.base.errors import RunError
from ea_vision.data.ffcv import Beton, open_beton, sidecar
from ea_vision.data.image_files import BrokenImage
from ea_vision.data.small_images import Images
from ea_vision.data.write_ffcv import write_beton


class _Pixels:
    """Stands for `Images.images`, read from a file that holds pixels of one size."""

    def __init__(self, beton: Beton, device: torch.device | None = None):
        self.beton, self.device = beton, device
        self.shape = (len(beton), 3, int(beton.heights[0]), int(beton.widths[0]))

    def to(self, device: torch.device) -> _Pixels:
        return _Pixels(self.beton, device)

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        """uint8 (B, 3, H, W), on the device; index: (B,), in main memory."""
        on_gpu = self.device is not None and self.device.type == "cuda"
        pixels = torch.empty((len(index), *self.shape[2:], 3), dtype=torch.uint8, pin_memory=on_gpu)
        out = pixels.numpy()
        for place, number in enumerate(index.tolist()):
            try:
                out[place] = self.beton.decode(number)
            except BrokenImage as error:
                raise RunError(f"image {number} of {self.beton.path} is damaged ({error}): delete this file, it will "
                               "be written anew") from error
        return pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).contiguous()


class _Source:
    """Decoded images, as `write_beton` reads them."""

    def __init__(self, split: Images):
        self.split, self.name, self.exif_rotation = split, "decoded images", False
        self.classes = [str(number) for number in range(int(split.targets.max()) + 1)]

    def __len__(self) -> int:
        return len(self.split)

    def describe(self, index: int) -> str:
        return self.split.names[index]

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.split.images[index].permute(1, 2, 0).numpy()), int(self.split.targets[index])


def on_disk(split: Images, cache: Path, workers: int = 2) -> Images:
    """Return the split with its images in an FFCV file in `cache`; write the file unless it exists.

    Raises:
        UsageError: FFCV is not installed.
        RunError: the file cannot be written; later, where an image in it turns out to be damaged.
    """
    digest = hashlib.sha256(f"1 {tuple(split.images.shape)}".encode())
    digest.update(split.images.numpy())
    digest.update(split.targets.numpy())
    path = cache / f"{digest.hexdigest()[:32]}.beton"
    if not path.exists():
        temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")  # runs that begin together write their own
        write_beton(_Source(split), temporary, jpeg_share=0.0, workers=workers)
        os.replace(sidecar(temporary), sidecar(path))
        os.replace(temporary, path)
    beton = open_beton(path, verify=sidecar(path).exists())  # files of before have none
    return Images(_Pixels(beton), split.targets, split.names)
