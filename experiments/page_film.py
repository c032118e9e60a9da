"""Record a film of the attention page in a browser: the pointer moves over a photo, and the maps follow.

    python -m experiments.page_film docs/photos/macaw.jpg docs/cat.jpg

writes visualize/page.webp: about 8 seconds in which the pointer moves over the first photo. Needs playwright and
Debian's chromium (EA_VISION_CHROMIUM names another one).
"""

import argparse
import io
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write
from ea_vision.visualize import show_page
from ea_vision.visualize.figure_options import check_output

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
SIZE = {"width": 1120, "height": 640}
FRAMES = 60
FRAME_MS = 130
STILL = 8  # frames of all pixels at the beginning and the end
MOST_BYTES = 1_500_000


def path_of_pointer() -> Iterator[tuple[float, float]]:
    """Yield the pointer's places on the photo, as fractions of its sides: once around the middle."""
    moving = FRAMES - 2 * STILL
    for step in range(moving):
        angle = 2 * math.pi * step / moving
        yield 0.5 + 0.3 * math.sin(angle), 0.5 - 0.34 * math.cos(angle)


def take(page) -> Image.Image:
    """Return a screenshot once everything is drawn."""
    page.evaluate("explorer.ready()")
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        return picture.convert("RGB")


def record_film(page) -> list[Image.Image]:
    """Return the film's frames."""
    box = page.locator(".photo").bounding_box()
    frames = [take(page)] * STILL
    for x, y in path_of_pointer():
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        frames.append(take(page))
    page.mouse.move(box["x"] + 2 * box["width"], 5)
    return frames + [take(page)] * STILL


def webp_bytes(frames: Sequence[Image.Image]) -> bytes:
    """Return the frames as an endless WebP, in the best quality that stays within MOST_BYTES."""
    for quality in (70, 55, 40):
        data = io.BytesIO()
        first, *others = frames
        first.save(
            data,
            "WEBP",
            save_all=True,
            append_images=others,
            duration=FRAME_MS,
            loop=0,
            quality=quality,
            method=4,
        )
        if data.tell() <= MOST_BYTES:
            return data.getvalue()
    raise UsageError(f"the film must have at most {MOST_BYTES} bytes, got {data.tell()}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", nargs="+", help="image files of the page")
    parser.add_argument(
        "--model", default="ea_conv_transformer_cifar", help="name or run folder (%(default)s)"
    )
    parser.add_argument(
        "-o", "--output", default="visualize/page.webp", help="file (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    chromium = os.environ.get("EA_VISION_CHROMIUM") or shutil.which("chromium")
    if not chromium:
        raise UsageError("a browser is required: apt-get install chromium fonts-dejavu-core")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise UsageError("playwright is required: pip install playwright") from error
    output = check_output(Path(args.output), (".webp",))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        source = Path(folder) / "page.html"
        source.write_text(show_page(args.model, args.photos).text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport=SIZE)
        page.goto(source.as_uri() + "#head=0&layer=3")
        film = webp_bytes(record_film(page))
        browser.close()
    atomic_write(output, film)
    print(f"written: {output} ({len(film) / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
