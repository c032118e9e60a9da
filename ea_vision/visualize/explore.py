"""One HTML page in which a click on a pixel shows where every head of every layer looks.

The page needs no server and no network: images, maps and program are inside it. With --serve it comes from a server on
this machine, which takes further images.
"""

from __future__ import annotations

import argparse
import html
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.recorder.inputs import ImageSource, find_images, names_of, read_image
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    add_options,
    class_names_of,
    parse_layers,
    parse_targets,
    positive,
)
from ea_vision.visualize.figure_options import Layers, Models, chosen_layers, load_models, parse_heads
from ea_vision.visualize.image_maps import as_models, record
from ea_vision.visualize.page import (
    MEGABYTE,
    STORED_PARTS,
    Explorer,
    build_page,
    fit,
    size_mb,
)
from ea_vision.visualize.page_server import PageServer, serve
from ea_vision.visualize.writing import check_output, name_outputs, save_maps

EXAMPLES = """\
examples:
  ea-vision explore --model ea_conv_transformer_cifar -o page.html photo.jpg
  ea-vision explore --model runs/ea --model runs/aa -o page.html cat.png dog.png
  ea-vision explore --model ea_aa_resnet34 --layers 16-18 --parts all -o page.html photo.jpg
  ea-vision explore --model runs/ea --serve
"""
MAX_MODELS = 3


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", metavar="NAME|RUN[,..]",
                        help=f"{WEIGHTS_HELP}; up to {MAX_MODELS}, separated by commas or each with its own --model "
                             "(default: ea_conv_transformer_cifar)")
    add_options(parser, "--random", "--img-size", "--device", "--exif-rotation")
    parser.add_argument("--layers", metavar="1,2|3-5|all",
                        help="attention layers, counted from 1 in forward order, or their module names (default: all, "
                             "or as many over the depth of the network as fit into --max-mb with all parts)")
    parser.add_argument("--heads", default="all", metavar="0,1|all",
                        help="heads, counted from 0; the page always adds their mean (default: %(default)s)")
    parser.add_argument("--parts", default="auto", metavar="attn,logits|all|auto",
                        help=f"some of {', '.join(STORED_PARTS)}; auto: of these in order, as many as fit into "
                             "--max-mb (default: %(default)s)")
    parser.add_argument("--max-mb", type=positive, default=10,
                        help="size of the page in millions of bytes from which on to warn (default: %(default)s)")
    parser.add_argument("--max-megapixels", type=positive, default=50,
                        help="images with more are refused (default: %(default)s)")
    parser.add_argument("-o", "--output", default="attention.html", metavar="FILE",
                        help="the page (default: %(default)s)")
    parser.add_argument("--npz", action="store_true",
                        help="write the maps of the page, unrounded, beside it, too, as FILE.npz (of several "
                             "images, FILE-IMAGE.npz each); not with --serve")
    parser.add_argument("--serve", action="store_true",
                        help="instead of writing a file, serve the page on 127.0.0.1 and take images there")
    parser.add_argument("--port", type=int, default=8642, help="of --serve; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--max-upload-mb", type=positive, default=20,
                        help="largest image file that --serve takes, in millions of bytes (default: %(default)s)")
    parser.add_argument("images", nargs="*", metavar="IMAGE",
                        help="image files, folders of them, or digits:N, the Nth test image of the digits; "
                             "--serve needs none")
    return parser


def parse_parts(text: str) -> list[str]:
    """`auto`, `all`, or names separated by commas."""
    if text in ("auto", "all"):
        return list(STORED_PARTS)
    unknown = [part for part in text.split(",") if part not in STORED_PARTS]
    if unknown:
        raise UsageError(f"--parts must be auto, all or some of {', '.join(STORED_PARTS)}; got {text!r}")
    return text.split(",")


def make_explorer(options: argparse.Namespace) -> Explorer:
    """Return the models of --model, with --layers, --heads and --parts."""
    targets = [target for text in options.model or ["ea_conv_transformer_cifar"] for target in parse_targets(text)]
    if len(targets) > MAX_MODELS:
        raise UsageError(f"--model must be at most {MAX_MODELS} models, got {len(targets)}")
    models = load_models(options, targets)
    layers = [parse_layers(options.layers or "all", model) for model in models]
    if "mean" in options.heads.split(","):
        raise UsageError(f"--heads must be numbers or all (the page adds the mean), got {options.heads!r}")
    heads = None
    if options.heads != "all":
        heads = parse_heads(options.heads, [layer for chosen in layers for layer in chosen])
    names = [class_names_of(target, model) for target, model in zip(targets, models, strict=True)]
    return Explorer(models, layers, heads, parse_parts(options.parts), names)


def read_entries(explorer: Explorer, options: argparse.Namespace) -> tuple[Explorer, list[dict[str, Any]]]:
    """Return the entries of the images, with a progress bar, and the explorer that made them: one of fewer layers where
    none are asked for, and all parts of all layers are more than --max-mb. A broken image ends the command."""
    max_pixels = options.max_megapixels * MEGABYTE
    paths = find_images(options.images) if options.images else []
    pictures = [(path, read_image(path, path, max_pixels, options.exif_rotation)) for path in paths]

    def entries_of(explorer: Explorer) -> list[dict[str, Any]]:
        return [explorer.view(Path(path).name, picture)
                for path, picture in tqdm(pictures, unit="image", disable=len(pictures) < 2 or None)]

    entries = entries_of(explorer)
    automatic = options.parts == "auto"
    if automatic and options.layers is None and size_mb(entries) > options.max_mb:
        deepest = max(map(len, explorer.layers))
        for most in range(min(deepest - 1, max(2, int(deepest * options.max_mb / size_mb(entries)))), 1, -1):
            fewer = explorer.thinned(most)
            thinner = entries_of(fewer)
            if size_mb(thinner) > options.max_mb:
                continue
            explorer, entries = fewer, thinner
            shown = "; ".join(f"{model.label}: {', '.join(str(layer.number) for layer in layers)}"
                              for model, layers in zip(explorer.models, explorer.layers, strict=True))
            print(f"layers on the page, to stay below {options.max_mb} MB with all parts: {shown}; --layers chooses "
                  "others, --max-mb allows more", file=sys.stderr)
            break
    dropped = fit(entries, options.max_mb) if automatic else []
    if dropped:
        print(f"left out to stay below {options.max_mb} MB: {', '.join(dropped)}; "
              "choose fewer --layers or --heads, name --parts, or raise --max-mb to have them", file=sys.stderr)
    if size_mb(entries) > options.max_mb:
        print(f"warning: the page has {size_mb(entries):.1f} MB, more than --max-mb {options.max_mb}; "
              "fewer --layers, --heads, --parts or images make it smaller", file=sys.stderr)
    return explorer, entries


def show_page(models: Models, images: ImageSource | Sequence[ImageSource], layers: Layers = None, *,
              height: int = 720) -> PageInNotebook:
    """Return the page of models and images, which a notebook displays inline.

    Args:
        models, layers: see `ea_vision.visualize.figure_options`; layers None: all.
        images: one or several: paths, PIL images or arrays.
        height: of the page in the notebook, in pixels.

    Raises:
        UsageError: more than three models.
    """
    loaded = as_models(models)
    if len(loaded) > MAX_MODELS:
        raise UsageError(f"a page takes at most {MAX_MODELS} models, got {len(loaded)}")
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    explorer = Explorer(loaded, [chosen_layers(layers, model) for model in loaded], None, STORED_PARTS,
                        [class_names_of(model.label, model) for model in loaded])
    entries = [explorer.view(name, read_image(image)) for name, image in zip(names_of(several), several, strict=True)]
    fit(entries, 10)
    return PageInNotebook(build_page(explorer, entries), height)


@dataclass
class PageInNotebook:
    """A page that notebooks display. text: of the HTML file; height: in pixels."""

    text: str = field(repr=False)
    height: int

    def _repr_html_(self) -> str:
        return (f'<iframe srcdoc="{html.escape(self.text)}" title="attention" style="width: 100%; border: 0; height: '
                f'{self.height}px"></iframe>')


def write_maps(explorer: Explorer, options: argparse.Namespace, output: Path) -> list[Path]:
    """The maps of every image by `save_maps`: all heads of the layers on the page; return the files."""
    files = []
    paths = find_images(options.images)
    for path, file in zip(paths, name_outputs(output, paths), strict=True):
        picture = read_image(path, path, options.max_megapixels * MEGABYTE, options.exif_rotation)
        files.append(save_maps([record(model, picture, layers, recorded) for model, layers, recorded in zip(
            explorer.models, explorer.layers, explorer.recorded, strict=True)], file))
    return files


def make_server(explorer: Explorer, options: argparse.Namespace) -> PageServer:
    """The server of --serve, which has its port but does not run yet."""
    max_pixels, max_bytes = options.max_megapixels * MEGABYTE, options.max_upload_mb * MEGABYTE
    explorer, entries = read_entries(explorer, options)
    page = build_page(explorer, entries, upload={"maxBytes": max_bytes, "maxPixels": max_pixels})

    def view(name: str, data: bytes) -> dict[str, Any]:
        return explorer.view(name, read_image(io.BytesIO(data), name, max_pixels, options.exif_rotation))

    return PageServer(page.encode(), view, options.port, max_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    if options.serve:
        if options.npz:
            raise UsageError("--npz goes with a page that is written, not with --serve")
        serve(make_server(make_explorer(options), options))
        return 0
    if not options.images:
        raise UsageError("image files or folders of them required (or --serve), got none")
    output = check_output(Path(options.output), (".html", ".htm"))
    explorer = make_explorer(options)
    explorer, entries = read_entries(explorer, options)
    page = build_page(explorer, entries).encode()
    atomic_write(output, page)
    written = write_maps(explorer, options, output) if options.npz else []
    print(f"written: {output} ({len(page) / MEGABYTE:.1f} MB)", *written)
    return 0
