"""Decode an image file to 8-bit RGB."""

import functools
import logging
import multiprocessing
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

log = logging.getLogger(__name__)
# Pillow's names; no other format is ever decoded.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
MAX_PIXELS = 100_000_000  # of an image
TWELVE_BITS = 4096  # one more than the largest value of 12 bits


class BrokenImage(ValueError):
    """An image that cannot be decoded, or is too large; the message says why."""


def decode_image(file: str | Path | BinaryIO, name: str = "") -> Image.Image:
    """Decode a file to 8-bit RGB. The size is checked before pixels are decoded. Alpha is dropped and EXIF orientation
    ignored, as in timm and torchvision, whose published accuracies are without them.

    name: of the image in messages; default: the path.

    Raises:
        BrokenImage: it has more than MAX_PIXELS, cannot be decoded, or has none of IMAGE_FORMATS.
    """
    limit = f"must have at most {MAX_PIXELS / 1e6:g} megapixels"
    try:
        with Image.open(file, formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BrokenImage(f"{limit}, got {image.width}x{image.height}")
            return to_rgb(image, name or image.filename)
    except BrokenImage:
        raise
    except Image.DecompressionBombError as error:
        raise BrokenImage(f"{limit}: {error}") from error
    except UnidentifiedImageError as error:  # whose own text may name an object in memory
        raise BrokenImage(
            "UnidentifiedImageError: cannot identify image file, which must be one of "
            f"{', '.join(IMAGE_FORMATS)}"
        ) from error
    except Exception as error:  # Pillow's readers raise many kinds on damaged bytes
        raise BrokenImage(f"{type(error).__name__}: {error}") from error


def to_rgb(image: Image.Image, name: str = "") -> Image.Image:
    """Decode and convert to 8-bit RGB, without alpha. 16-bit grey keeps its upper 8 bits (Pillow would clip it at 255);
    the log names, once, a file that seems to use fewer bits.

    Raises:
        BrokenImage: 32-bit integers or floating-point numbers, since no file says which value is white.
    """
    if image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise BrokenImage(
            f"must have 8 or 16 bits per channel, got pixels of Pillow's mode {image.mode}"
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        if 0 < values.max() < TWELVE_BITS and multiprocessing.parent_process() is None:
            _say_dark(name or "without a name")
        image = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


@functools.cache
def _say_dark(name: str) -> None:
    log.warning(
        "image %s has 16 bits per channel and no value of %d or more, so it will look much too dark: if its "
        "values have 12 bits, multiply them by 16; if 8, by 256",
        name,
        TWELVE_BITS,
    )
