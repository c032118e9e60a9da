"""Read users' images for figures, the page and predict: files, folders, PIL images, arrays, tensors.

They become RGB as the trainers read them: see `ea_vision.data.decoding.decode_image`.
"""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.data.decoding import BrokenImage, decode_image, to_rgb
from ea_vision.data.folders import list_images
from ea_vision.data.image_names import IMAGE_SUFFIXES, displayable
from ea_vision.data.scaling import Scaling
from ea_vision.zoo.preparation import in_unit_range

ImageSource = str | Path | Image.Image | np.ndarray
DIGIT_SIZE = (8, 8)
DIGITS = "digits#"  # followed by a number: a test image of the digits


def find_images(paths: Iterable[str]) -> list[str]:
    """List image files, the images of folders (recursively, in order), and `digits#N`, the Nth test image of digits.

    A pattern with * or ? is replaced by the paths that match it, since the shells of Windows do not do this.

    Raises:
        UsageError: a path does not exist, or a folder has no images.
    """
    images = []
    for text in chain.from_iterable(map(_fitting, paths)):
        paths_found = [text]
        if os.path.isdir(text):
            paths_found = list_images(text)
            if not paths_found:
                raise UsageError(f"folder {text} has no image ({', '.join(IMAGE_SUFFIXES)})")
        elif not text.startswith(DIGITS):
            _check_exists(text)
        images += paths_found
    if not images:
        raise UsageError("image files or folders of them required, got none")
    return images


def _fitting(pattern: str) -> list[str]:
    """Return the sorted paths that match a pattern; the text itself if it is not a pattern, or no path matches."""
    if os.path.exists(pattern) or not set(pattern) & set("*?"):
        return [pattern]
    return sorted(glob.glob(pattern.replace("[", "[[]"))) or [pattern]


def read_image(source: ImageSource) -> Image.Image:
    """Return an 8-bit RGB image. The size of a file is checked before its pixels are decoded. Its EXIF rotation is
    ignored, as when networks are trained and evaluated.

    Args:
        source: a path, `digits#N` (the Nth test image of the digits), a PIL image, or an array (H, W), (H, W, 1),
            (H, W, 3) or (H, W, 4): uint8, or floating point in 0..1.

    Raises:
        UsageError: the source cannot be decoded, is too large, or is a folder or another array.
    """
    decode = to_rgb
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    elif isinstance(source, (str, Path)):
        decode = decode_image
        if str(source).startswith(DIGITS) and not os.path.exists(source):
            return _digit(str(source))
        _check_exists(source)
        if not os.path.isfile(source):  # reading a named pipe would wait forever
            kind = "a folder" if os.path.isdir(source) else "not a regular file"
            raise UsageError(f"one image file is required, and {source} is {kind}")
    elif not isinstance(source, Image.Image):
        raise UsageError(
            "an image must be a path, a PIL image or an array (H, W, 3) (figures also take tensors), "
            f"got {type(source).__name__}"
        )
    elif not source.width or not source.height:
        raise UsageError(f"an image must have pixels, got {source.width}x{source.height}")
    with as_usage_error(f"image {source} cannot be read", BrokenImage):
        return decode(source)


def names_of(images: Sequence[ImageSource | Tensor]) -> list[str]:
    """Return file names for paths, and "image 1", "image 2", ... for other images."""
    names = []
    for number, image in enumerate(images, start=1):
        is_path = isinstance(image, (str, Path))
        names.append(displayable(Path(image).name) if is_path else f"image {number}")
    return names


def as_image(image: ImageSource | Tensor | Mapping) -> Image.Image | Tensor | Mapping:
    """Return a tensor or the mapping of an image processor unchanged; read anything else by `read_image`."""
    return image if isinstance(image, (Tensor, Mapping)) else read_image(image)


def _check_exists(path: str | Path) -> None:
    """Raise UsageError if a path does not exist."""
    if not os.path.exists(path):
        raise UsageError(f"image {path} does not exist (addresses are not fetched: download first)")


def _from_array(array: np.ndarray) -> Image.Image:
    """Return the image of an array (H, W) or (H, W, C); see `read_image`."""
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4) or not array.size:
        raise UsageError(
            f"an image array must have (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), got {array.shape}"
        )
    if array.dtype.kind not in "biuf":
        raise UsageError(f"an image array must be of numbers, got {array.dtype}")
    native = array.astype(array.dtype.newbyteorder("="))  # FITS files are big-endian
    values = in_unit_range(torch.from_numpy(native))
    levels = (values * 255).round().byte()
    return to_pil_image(levels.numpy())


def _digit(text: str) -> Image.Image:
    from ea_vision.data.small_images import load_dataset  # and scikit-learn

    images = load_dataset("digits", scaling=Scaling(DIGIT_SIZE)).test.images  # as they are
    number = text.removeprefix(DIGITS)
    if not number.isdecimal() or int(number) >= len(images):
        raise UsageError(f"digits#N must have N in 0..{len(images) - 1}, got {text}")
    return to_pil_image(images[int(number)])
