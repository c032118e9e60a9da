"""Images as people have them, for figures, the page, predict and detect: files, folders, PIL images, arrays, tensors.

Whatever has transparent pixels is put on white. Files of 16 bits a channel and uint16 arrays keep the upper 8 bits.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.data.image_files import (
    IMAGE_FORMATS,
    IMAGE_SUFFIXES,
    MAX_PIXELS,
    BrokenImage,
    TooLarge,
    decode_image,
    to_rgb,
)
from ea_vision.recorder.loading import LoadedModel

ImageSource = str | Path | bytes | io.BytesIO | Image.Image | np.ndarray
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def find_images(paths: Iterable[str]) -> list[str]:
    """List image files, those of folders (and their folders) in order, and `digits#N`, the Nth test image of digits.

    Raises:
        UsageError: a path that does not exist, an address, or a folder without images.
    """
    images: list[str] = []
    for text in paths:
        path = Path(text)
        if os.path.isdir(text):
            files = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
            if not files:
                raise UsageError(f"folder {path} has no image ({', '.join(IMAGE_SUFFIXES)})")
            images += files
        elif os.path.exists(text) or text.startswith("digits#"):
            images.append(text)
        else:
            raise _missing(text)
    if not images:
        raise UsageError("image files or folders of them required, got none")
    return images


def read_image(source: ImageSource, name: str = "", max_pixels: int = MAX_PIXELS,
               exif_rotation: bool = False) -> Image.Image:
    """Return an 8-bit RGB image. The size is looked at before pixels are decoded.

    Args:
        source: a path, `digits#N` (the Nth test image of the digits), the bytes of an image file, a PIL image, or an
            array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4): uint8, uint16, or floating point in 0..1.
        name: for messages (default: the path).
        max_pixels: width x height at most.
        exif_rotation: turn it as its EXIF data says; off by default, as when networks are trained and evaluated.

    Raises:
        UsageError: not an image of one of IMAGE_FORMATS, broken, too large, an address, a folder, or another array.
    """
    if isinstance(source, (Image.Image, np.ndarray)):
        image = _from_array(source) if isinstance(source, np.ndarray) else source
        if image.width * image.height > max_pixels:
            raise UsageError(f"image {name} must have at most {max_pixels / 1e6:g} megapixels, "
                             f"got {image.width}x{image.height}")
        return to_rgb(ImageOps.exif_transpose(image) if exif_rotation else image, over_white=True)
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    if isinstance(source, (str, Path)):
        name = name or str(source)
        if isinstance(source, str) and source.startswith("digits#") and not os.path.exists(source):
            return _digit(source)
        if os.path.isdir(source):
            raise UsageError(f"one image file is required, and {source} is a folder")
        if not os.path.exists(source):
            raise _missing(str(source))
    elif not hasattr(source, "read"):
        raise UsageError("an image must be a path, the bytes of a file, a PIL image, an array (H, W, 3) or a tensor "
                         f"(3, H, W), got {type(source).__name__}")
    name = name or "of these bytes"
    try:
        return decode_image(source, exif_rotation, max_pixels, over_white=True)
    except TooLarge as error:
        raise UsageError(f"image {name} {error}") from error
    except BrokenImage as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            raise UsageError(f"{name} is not an image that can be read ({', '.join(IMAGE_FORMATS)})") from error
        raise UsageError(f"image {name} is broken: {error}") from error


def names_of(images: Sequence[ImageSource | Tensor]) -> list[str]:
    """Return the file names of paths; of others "image 1", "image 2", ..."""
    return [Path(image).name if isinstance(image, (str, Path)) else f"image {number}"
            for number, image in enumerate(images, start=1)]


def as_image(image: ImageSource | Tensor) -> Image.Image | Tensor:
    """Return a tensor as it is, all else by `read_image`."""
    return image if isinstance(image, Tensor) else read_image(image)


def as_input(model: LoadedModel, image: ImageSource | Tensor) -> Tensor:
    """Return (3, H, W) in 0..1, as the network is to see it: a tensor as it is, all else resized and cut by the model.

    Args:
        image: a tensor has (3, H, W) or (1, 3, H, W), uint8 or floating point in 0..1, not normalised; else see
            `read_image`.

    Raises:
        UsageError: a tensor of another shape or range, an image that cannot be read, or one that is too narrow.
    """
    if not isinstance(image, Tensor):
        return model.prepare(read_image(image))
    if image.ndim == 4 and image.shape[0] == 1:
        image = image[0]
    if image.ndim != 3 or image.shape[0] != 3:
        raise UsageError("an image must be a path, a PIL image, an array (H, W, 3) or a tensor (3, H, W), got "
                         f"{tuple(image.shape)}")
    if image.dtype == torch.uint8:
        return image / 255
    if not (image.is_floating_point() and 0 <= image.min() and image.max() <= 1):
        raise UsageError("an image's values must lie in 0..1 (before normalisation) or be uint8, got "
                         f"{image.dtype} from {image.min().item():g} to {image.max().item():g}")
    return image.float()


def _missing(text: str) -> UsageError:
    """Return the error for a path where there is nothing: perhaps it is an address."""
    if ADDRESS.match(text):
        return UsageError(f"an image file is required, and {text} is an address: download it first, nothing is fetched")
    return UsageError(f"image {text} does not exist")


def _from_array(array: np.ndarray) -> Image.Image:
    """Return the image of an array (H, W) or (H, W, C); see `read_image`."""
    required = "an image array must have (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)"
    if array.ndim not in (2, 3) or array.ndim == 3 and array.shape[2] not in (1, 3, 4) or not array.size:
        hint = ": turn channels last, or take a tensor" if array.ndim == 3 and array.shape[0] in (1, 3, 4) else ""
        raise UsageError(f"{required}, got {array.shape}{hint}")
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating) and 0 <= array.min() and array.max() <= 1:
        array = (array * 255).round().astype(np.uint8)
    elif array.dtype != np.uint8:
        raise UsageError("an image array must be uint8, uint16 or floating point in 0..1, got "
                         f"{array.dtype} from {array.min()} to {array.max()}")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _digit(text: str) -> Image.Image:
    from ea_vision.data.small_images import load_dataset

    test = load_dataset("digits").test
    number = text.removeprefix("digits#")
    if not number.isdecimal() or int(number) >= len(test):
        raise UsageError(f"digits#N must have N in 0..{len(test) - 1}, got {text}")
    return Image.fromarray(test.images[int(number)].permute(1, 2, 0).numpy())
