"""One HTML page in which a click on a pixel shows where every head of every layer looks.

The page needs no server and no network: images, maps and program are inside it.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.recorder.inputs import ImageSource, find_images, names_of, read_image
from ea_vision.recorder.loading import LoadedModel, positive
from ea_vision.visualize.figure_options import (
    DEMO,
    Layers,
    Models,
    chosen_layers,
    epochs_of,
    loader,
    make_parser,
    only,
    parse_heads,
    run_label,
    spread,
)
from ea_vision.visualize.image_maps import as_images, as_models
from ea_vision.visualize.page import MEGABYTE, STORED_PARTS, Explorer, build_page, size_mb
from ea_vision.visualize.writing import check_output

EXAMPLES = """\
  ea-vision explore --model ea_conv_transformer_cifar -o page.html photo.jpg
  ea-vision explore --model runs/ea --model runs/aa -o page.html cat.png dog.png
  ea-vision explore --model ea_aa_resnet34 --layers 16-18 --parts attn,logits -o page.html photo.jpg
  ea-vision explore --model runs/ea --through checkpoints -o training.html photo.jpg
"""
MAX_MODELS, MAX_MB = 3, 10
SUFFIXES = (".html", ".htm")


def make_explorer(options: argparse.Namespace, models: Sequence[LoadedModel]) -> Explorer:
    """Return models with --layers, --heads and --parts."""
    layers = [chosen_layers(options.layers, model) for model in models]
    if "mean" in options.heads.split(","):
        raise UsageError(f"--heads must be numbers or all (the page adds the mean), got {options.heads!r}")
    every = [layer for chosen in layers for layer in chosen]
    parts = STORED_PARTS if options.parts == "all" else options.parts.split(",")
    if not set(parts) <= set(STORED_PARTS):
        raise UsageError(f"--parts must be all or some of {', '.join(STORED_PARTS)}; got {options.parts!r}")
    return Explorer(models, layers, None if options.heads == "all" else parse_heads(options.heads, every), parts)


def make_entries(explorer: Explorer, jobs: Sequence[tuple[str, Image.Image, Sequence[LoadedModel]]], max_mb: float,
                 all_layers: bool) -> tuple[Explorer, list[dict[str, Any]]]:
    """Return the entries of names, images and models, with a progress bar, and the explorer that made them: unless all
    layers are wanted, of so many over the depth as fit into max_mb, by the size of the first entry."""
    first, most = explorer.view(*jobs[0]), max(map(len, explorer.layers))
    while not all_layers and most > 2 and (size := len(jobs) * size_mb([first])) > max_mb:
        most = max(2, min(most - 1, int(most * max_mb / size)))
        explorer = replace(explorer, layers=[spread(layers, most) for layers in explorer.layers])
        first = explorer.view(*jobs[0])
    rest = tqdm(jobs[1:], unit="image", disable=len(jobs) == 1 or None)
    return explorer, [first, *(explorer.view(*job) for job in rest)]


def show_page(models: Models, images: ImageSource | Sequence[ImageSource], layers: Layers = None, *,
              height: int = 720) -> PageInNotebook:
    """Return the page of models and images, which a notebook displays inline.

    Args:
        models, layers: see `ea_vision.visualize.figure_options`; layers None: all, or as many over the depth as a page
            of 10 MB holds.
        images: one or several: paths, PIL images or arrays.
        height: of the page in the notebook, in pixels.

    Raises:
        UsageError: more than three models, or no image.
    """
    loaded = as_models(models)
    if len(loaded) > MAX_MODELS:
        raise UsageError(f"a page takes at most {MAX_MODELS} models, got {len(loaded)}")
    several = as_images(images)
    jobs = [(name, read_image(image), loaded) for name, image in zip(names_of(several), several, strict=True)]
    explorer = Explorer(loaded, [chosen_layers(layers, model) for model in loaded])
    return PageInNotebook(build_page(*make_entries(explorer, jobs, MAX_MB, layers is not None)), height)


@dataclass
class PageInNotebook:
    """A page that notebooks display. text: of the HTML file; height: in pixels."""

    text: str = field(repr=False)
    height: int

    def _repr_html_(self) -> str:
        return (f'<iframe srcdoc="{html.escape(self.text)}" title="attention" style="width: 100%; border: 0; height: '
                f'{self.height}px"></iframe>')


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.html", layers=None, heads="all", queries=False,
                         style=False, suffixes=SUFFIXES)
    parser.add_argument("--parts", default="all", metavar="attn,logits|all",
                        help=f"some of {', '.join(STORED_PARTS)} (default: %(default)s)")
    parser.add_argument("--max-mb", type=positive, default=MAX_MB,
                        help="size of the page in millions of bytes; where all layers are more, and none are named, it "
                             "takes fewer (default: %(default)s)")
    parser.add_argument("--through", default="models", choices=("models", "checkpoints"),
                        help="checkpoints: the *.ckpt and snapshots of one run, by a slider over its epochs (default: "
                             "%(default)s)")
    options = parser.parse_args(argv)
    output, epochs = check_output(Path(options.output), options.suffixes), options.through == "checkpoints"
    load, targets, paths = loader(options), options.model or DEMO, find_images(options.images)
    if not epochs and len(targets) > MAX_MODELS:
        raise UsageError(f"--model must be at most {MAX_MODELS} models, got {len(targets)}")
    models = epochs_of(targets, load) if epochs else as_models(map(load, targets))
    pictures = [read_image(path) for path in paths]
    if epochs:
        image = only(pictures, "image")
        jobs = [(f"epoch {model.epoch}", image, [model]) for model in models]
        models = [replace(models[0], label=run_label(models[0]))]
    else:
        jobs = [(name, image, models) for name, image in zip(names_of(paths), pictures, strict=True)]
    whole = make_explorer(options, models)
    explorer, entries = make_entries(whole, jobs, options.max_mb, options.layers is not None)
    if explorer is not whole:
        layers = "; ".join(f"{model.label}: {', '.join(str(layer.number) for layer in chosen)}"
                           for model, chosen in zip(models, explorer.layers, strict=True))
        print(f"layers on the page, to stay below {options.max_mb} MB: {layers}; --layers chooses others, --max-mb "
              "allows more", file=sys.stderr)
    if size_mb(entries) > options.max_mb:
        print(f"warning: the page has {size_mb(entries):.1f} MB, more than --max-mb {options.max_mb}; fewer --layers, "
              "--heads, --parts or images make it smaller", file=sys.stderr)
    page = build_page(explorer, entries, epochs).encode()
    atomic_write(output, page)
    print(f"written: {output} ({len(page) / MEGABYTE:.1f} MB)")
    return 0
