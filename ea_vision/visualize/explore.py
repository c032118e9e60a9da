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

from tqdm import tqdm

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.recorder.inputs import ImageSource, find_images, names_of, read_image
from ea_vision.recorder.loading import LoadedModel, class_names_of, parse_layers, positive
from ea_vision.visualize.figure_options import (
    Layers,
    Models,
    by_epoch,
    checkpoints_of,
    chosen_layers,
    load_models,
    make_parser,
    only,
    parse_heads,
    targets_of,
)
from ea_vision.visualize.image_maps import as_models
from ea_vision.visualize.page import MEGABYTE, STORED_PARTS, Explorer, build_page, fit, size_mb
from ea_vision.visualize.writing import check_output

EXAMPLES = """\
  ea-vision explore --model ea_conv_transformer_cifar -o page.html photo.jpg
  ea-vision explore --model runs/ea --model runs/aa -o page.html cat.png dog.png
  ea-vision explore --model ea_aa_resnet34 --layers 16-18 --parts all -o page.html photo.jpg
  ea-vision explore --model runs/ea --through checkpoints -o training.html photo.jpg
"""
MAX_MODELS = 3
SUFFIXES = (".html", ".htm")


def parse_parts(text: str) -> list[str]:
    """Return the parts of `auto`, `all`, or names separated by commas."""
    if text in ("auto", "all"):
        return list(STORED_PARTS)
    unknown = [part for part in text.split(",") if part not in STORED_PARTS]
    if unknown:
        raise UsageError(f"--parts must be auto, all or some of {', '.join(STORED_PARTS)}; got {text!r}")
    return text.split(",")


def make_explorers(options: argparse.Namespace) -> list[Explorer]:
    """Return the models of --model, with --layers, --heads and --parts; through checkpoints one an epoch."""
    targets = targets_of(options)
    if options.through == "checkpoints":
        only(find_images(options.images), "image")
        epochs = by_epoch(load_models(options, checkpoints_of(targets)))
        name = epochs[0].label.rpartition(", epoch ")[0]
        return [_explorer([replace(model, label=name)], targets[:1], options, f"epoch {model.epoch}")
                for model in epochs]
    if len(targets) > MAX_MODELS:
        raise UsageError(f"--model must be at most {MAX_MODELS} models, got {len(targets)}")
    return [_explorer(load_models(options, targets), targets, options)]


def _explorer(models: Sequence[LoadedModel], targets: Sequence[str], options: argparse.Namespace,
              title: str = "") -> Explorer:
    layers = [parse_layers(options.layers or "all", model) for model in models]
    if "mean" in options.heads.split(","):
        raise UsageError(f"--heads must be numbers or all (the page adds the mean), got {options.heads!r}")
    heads = None
    if options.heads != "all":
        heads = parse_heads(options.heads, [layer for chosen in layers for layer in chosen])
    names = [class_names_of(target, model) for target, model in zip(targets, models, strict=True)]
    return Explorer(models, layers, heads, parse_parts(options.parts), names, title)


def read_entries(explorers: Sequence[Explorer],
                 options: argparse.Namespace) -> tuple[list[Explorer], list[dict[str, Any]]]:
    """Return the entries of the images, with a progress bar, and the explorers that made them: of fewer layers where
    none are asked for, and all parts of all layers are more than --max-mb. A broken image ends the command."""
    paths = find_images(options.images)
    pictures = [(path, read_image(path, path, exif_rotation=options.exif_rotation)) for path in paths]

    def entries_of(explorers: Sequence[Explorer]) -> list[dict[str, Any]]:
        jobs = [(explorer, path, picture) for explorer in explorers for path, picture in pictures]
        return [explorer.view(explorer.title or Path(path).name, picture)
                for explorer, path, picture in tqdm(jobs, unit="image", disable=len(jobs) < 2 or None)]

    entries = entries_of(explorers)
    automatic = options.parts == "auto"
    if automatic and options.layers is None and size_mb(entries) > options.max_mb:
        deepest = max(map(len, explorers[0].layers))
        for most in range(min(deepest - 1, max(2, int(deepest * options.max_mb / size_mb(entries)))), 1, -1):
            fewer = [explorer.thinned(most) for explorer in explorers]
            thinner = entries_of(fewer)
            if size_mb(thinner) > options.max_mb:
                continue
            explorers, entries = fewer, thinner
            shown = "; ".join(f"{model.label}: {', '.join(str(layer.number) for layer in layers)}"
                              for model, layers in zip(fewer[0].models, fewer[0].layers, strict=True))
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
    return list(explorers), entries


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="attention.html", layers=None, heads="all", queries=False,
                         style=False, suffixes=SUFFIXES)
    parser.add_argument("--parts", default="auto", metavar="attn,logits|all|auto",
                        help=f"some of {', '.join(STORED_PARTS)}; auto: of these in order, as many as fit into "
                             "--max-mb (default: %(default)s)")
    parser.add_argument("--max-mb", type=positive, default=10,
                        help="size of the page in millions of bytes from which on to warn (default: %(default)s)")
    parser.add_argument("--through", default="models", choices=("models", "checkpoints"),
                        help="checkpoints: the *.ckpt and snapshots of one run, by a slider over its epochs (default: "
                             "%(default)s)")
    options = parser.parse_args(argv)
    output = check_output(Path(options.output), options.suffixes)
    explorers, entries = read_entries(make_explorers(options), options)
    page = build_page(explorers[0], entries, epochs=options.through == "checkpoints").encode()
    atomic_write(output, page)
    print(f"written: {output} ({len(page) / MEGABYTE:.1f} MB)")
    return 0
