"""The options that the figures' commands have in common, what their values mean, and how figures become files.

What the functions `plot_*` take alike:

    model    a timm network (an nn.Module, which runs in evaluation mode), or the name of one, a run folder or a
             checkpoint. Several: a list of these, or a mapping from labels to them.
    image    the path of a file, a PIL image or an array (H, W, 3), resized and cut as the model wants it, or a tensor
             (3, H, W) as the network is to see it: uint8, or floating point in 0..1 before normalisation.
    layers   numbers from 1 in forward order, module names, or a text such as "1,3-5"; None: all, or in plot_heatmap and
             plot_matrix at most 6 over the depth of the network.
    heads    numbers from 0, "mean", or a text such as "0,2,mean"; None: all and their mean.
    queries  points (y, x) in pixels of the input as the network sees it, or of a vision transformer tokens before its
             patches by name, such as "cls"; None: three points on the diagonal.
    width    of the figure in inches, 3.3 for a paper's column, 6.75 for its page; None: as wide as it needs to be, at
             most 6.75.
    **style  how maps are drawn, the fields of `MapStyle`: overlay, scale, cmap, opacity.

What cannot be is a UsageError (a ValueError) that names what was required and what was received.
"""

import argparse
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import nn
from tqdm import tqdm

from ea_vision.base import files
from ea_vision.base.devices import choose_device
from ea_vision.base.errors import UsageError
from ea_vision.base.figures import FORMATS as PICTURES
from ea_vision.base.figures import check_width, figure_bytes
from ea_vision.engine import run_folder
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    add_options,
    load_model,
    parse_layers,
    parse_queries,
    parse_targets,
    positive,
)
from ea_vision.recorder.recording import AttentionLayer
from ea_vision.visualize.image_maps import MEAN, AnyImage, Head, Query, Recording, as_models, record
from ea_vision.visualize.map_style import SCALES, STYLE, MapStyle

Model = nn.Module | LoadedModel | str
Models = Model | Sequence[Model] | Mapping[str, Model]
Layers = str | int | Sequence[int | str] | None
Heads = str | int | Sequence[int | str] | None
Queries = Sequence[Query] | None
DEMO = ["ea_conv_transformer_cifar"]  # the model unless one is named
SOME_LAYERS = 6  # that are drawn unless others are asked for
CHECKPOINTS = ("*.ckpt", f"{run_folder.SNAPSHOTS}/*.safetensors")  # in a run folder
KEYWORDS = (
    "layers",
    "heads",
    "queries",
    "width",
    *(field.name for field in fields(MapStyle)),
)  # of `Asked`
FILM = ".gif"
DIAGONAL, MIDDLE = ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75)), ((0.5, 0.5),)


def make_parser(
    description: str,
    examples: str,
    *,
    output: str,
    layers: str | None = "all",
    heads: str | None = None,
    queries: bool = True,
    style: bool = True,
    suffixes: Sequence[str] = PICTURES,
) -> argparse.ArgumentParser:
    """Return a parser of the options that the figures and the page share.

    Args:
        description, examples: the beginning and the end of --help.
        output, layers, heads: default values; layers None means some of many, heads "" those of `Asked`, and heads None
            leaves --heads out.
        queries, style: whether the figure has query points, and maps over photos.
        suffixes: of the files that can be written; a page has no width and no dots per inch.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        action="extend",
        type=parse_targets,
        metavar="NAME|RUN[,..]",
        help=f"{WEIGHTS_HELP}; several separated by commas or each with its own --model (default: "
        f"{DEMO[0]})",
    )
    add_options(parser, "--random", "--img-size", "--device")
    parser.add_argument(
        "--layers",
        default=layers,
        metavar="1,2|3-5|all",
        help="attention layers, counted from 1 in forward order, or their module names (default: "
        f"{layers or 'all, or of many some over the depth of the network'})",
    )
    if heads is not None:
        parser.add_argument(
            "--heads",
            default=heads or None,
            metavar="0,1|all|mean",
            help="heads, counted from 0; mean: their average (default: "
            f"{heads or 'all,mean; of several models mean'})",
        )
    if queries:
        parser.add_argument(
            "--queries",
            nargs="+",
            default=[],
            metavar="Y,X|cls",
            help="query points in pixels of the input as the network sees it, from its top left corner "
            "or, of a vision transformer, tokens before its patches: cls, dist, reg1, ... "
            "(default: points on a diagonal, or the middle for one)",
        )
    parser.add_argument(
        "-o",
        "--output",
        default=output,
        metavar="FILE",
        help=f"{', '.join(s[1:].upper() for s in suffixes)} by its suffix; of several images, "
        "each figure gets its own file, its name added (default: %(default)s)",
    )
    if PICTURES[0] in suffixes:
        parser.add_argument(
            "--width",
            type=float,
            metavar="3.3|6.75|N",
            help="of the figure in inches; text keeps its 7 to 9 points, tiles shrink (default: as "
            "wide as it needs to be, at most 6.75)",
        )
        parser.add_argument(
            "--dpi",
            type=positive,
            default=150,
            help="of pictures made of pixels (default: %(default)s)",
        )
    if style:
        parser.add_argument(
            "--bare",
            dest="overlay",
            action="store_false",
            help="draw the maps alone, not over the photo",
        )
        parser.add_argument(
            "--scale",
            default=STYLE.scale,
            choices=SCALES,
            help="of the colours. layer: one for the maps that are compared, which are a layer's (of a "
            "film all); tile: each map its own, its maximum written on it; all: one for the "
            "figure; uniform: from 1/8 to 8 times uniform attention in every figure (default: "
            "%(default)s)",
        )
        parser.add_argument(
            "--cmap",
            metavar="NAME",
            help="a colour map of matplotlib's (default: viridis for attention, coolwarm for logits)",
        )
        parser.add_argument(
            "--opacity",
            type=float,
            default=STYLE.opacity,
            metavar="0..1",
            help="of maps over the photo (default: %(default)s)",
        )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="image files, folders of them, or digits#N, the Nth test image of the digits, from 0",
    )
    parser.set_defaults(suffixes=suffixes)
    return parser


def only(values: Sequence, kind: str):
    """Return the one value of an option that allows one.

    Raises:
        UsageError: several.
    """
    if len(values) != 1:
        raise UsageError(
            f"this figure shows one {kind}; got {len(values)}: --help shows how to choose"
        )
    return values[0]


def parse_heads(text: str, layers: Sequence[AttentionLayer]) -> list[Head]:
    """Return the heads of `all`, numbers and `mean`, separated by commas.

    Raises:
        UsageError: a head that a layer does not have.
    """
    num_heads = min(layer.num_heads for layer in layers)
    known = {
        "all": list(range(num_heads)),
        MEAN: [MEAN],
        **{str(head): [head] for head in range(num_heads)},
    }
    try:
        return [head for item in text.split(",") for head in known[item]]
    except KeyError as error:
        raise UsageError(
            f"heads must be 0 to {num_heads - 1}, all or {MEAN}, got {error}"
        ) from error


def spread(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Return all of up to SOME_LAYERS, or so many at even distances, the first and the last among them."""
    return [
        layers[round(place)]
        for place in np.linspace(0, len(layers) - 1, min(SOME_LAYERS, len(layers)))
    ]


def loader(options: argparse.Namespace) -> Callable[[str], LoadedModel]:
    """Return a function that loads a model as the options say; see first that the images exist."""
    find_images(options.images)
    return partial(
        load_model,
        random=options.random,
        img_size=options.img_size,
        device=choose_device(options.device),
    )


def epochs_of(
    targets: Sequence[str], load: Callable[[str], LoadedModel] = load_model
) -> list[LoadedModel]:
    """Return the models of run folders' *.ckpt files and snapshots, or of such files, in the order of epochs; of
    several files of the same epoch the last one.

    Raises:
        UsageError: a run folder without such files, or a model without an epoch.
    """
    paths: list[str] = []
    for target in targets:
        held = sorted(str(path) for name in CHECKPOINTS for path in Path(target).glob(name))
        if Path(target).is_dir() and not held:
            raise UsageError(f"run {target} has no {' nor '.join(CHECKPOINTS)}")
        paths += held or [target]
    models = {model.epoch: model for model in map(load, paths)}
    if None in models:
        raise UsageError(
            "what goes through checkpoints needs run folders or their *.ckpt or snapshots, got "
            + models[None].label
        )
    return [models[epoch] for epoch in sorted(models)]


def run_label(model: LoadedModel) -> str:
    """Return a checkpoint's label without its epoch."""
    return model.label.removesuffix(f", epoch {model.epoch}")


# ---- what a figure is drawn of --------------------------------------------------------------------------------------


def chosen_layers(layers: Layers, model: LoadedModel, some: bool = False) -> list[AttentionLayer]:
    """Return the layers asked for; by default all, or with `some` those of `spread`."""
    chosen = parse_layers(_text(layers, "all"), model)
    return spread(chosen) if some and layers is None else chosen


class Asked:
    """What a figure is drawn of: models, and of each its layers; heads and query points, which are those of all; `how`:
    style and width for what draws it.

    Args:
        models, layers, heads, queries, width, **style: see above; heads None: all and their mean, of several models the
            mean alone.
        some: without `layers` those of `spread`, not all.

    Raises:
        UsageError: layers or heads that a model lacks, or a style that there is not.
    """

    def __init__(
        self,
        models: Models,
        layers: Layers = None,
        heads: Heads = None,
        queries: Queries = None,
        *,
        some: bool = False,
        width: float | None = None,
        **style,
    ):
        self.how, self.queries = dict(style=MapStyle(**style), width=check_width(width)), queries
        self.models = as_models(models)
        self.layers = [chosen_layers(layers, model, some) for model in self.models]
        self.numbers = [[layer.number for layer in chosen] for chosen in self.layers]
        text = _text(heads, MEAN if len(self.models) > 1 else f"all,{MEAN}")
        self.heads = parse_heads(text, [layer for chosen in self.layers for layer in chosen])

    @classmethod
    def by_options(
        cls, options: argparse.Namespace, models: Iterable[LoadedModel] = (), some: bool = False
    ) -> "Asked":
        """Return what a command's options ask for. If only some layers are shown unasked, a line says so."""
        given = {name: getattr(options, name) for name in KEYWORDS if name in options}
        asked = cls(models or map(loader(options), options.model or DEMO), some=some, **given)
        for model, numbers in zip(asked.models, asked.numbers, strict=True):
            if options.layers is None and len(numbers) < len(found := parse_layers("all", model)):
                print(
                    f"{model.label}: layers {', '.join(map(str, numbers))} of {len(found)}; "
                    "--layers chooses others, --layers all draws all",
                    file=sys.stderr,
                )
        asked.points()
        return asked

    def record(self, image: AnyImage, parts: Sequence[str] = ("attn",)) -> list[Recording]:
        """Run each model on an image; see `ea_vision.visualize.image_maps.record`."""
        return [
            record(model, image, chosen, parts)
            for model, chosen in zip(self.models, self.layers, strict=True)
        ]

    def points(
        self, default: Sequence[tuple[float, float]] = DIAGONAL, seen: Sequence[Recording] = ()
    ) -> list[Query]:
        """Return the query points in the first model's input, or in what is `seen`; by default those in shares of its
        sides."""
        texts = [_text(query, "") for query in self.queries or []]
        return parse_queries(texts, (seen or self.models)[0].img_size, default)


def _text(value: str | int | Sequence[int | str] | None, default: str) -> str:
    """Return what the commands take: items separated by commas."""
    if value is None:
        return default
    return ",".join(map(str, [value] if isinstance(value, (str, int)) else value))


# ---- files: checked before any work, one an image, written whole or not at all --------------------------------------


def check_output(output: Path, suffixes: Sequence[str] = PICTURES) -> Path:
    """See that a file can be written, before any work; return it.

    Raises:
        UsageError: a suffix that cannot be written, or a folder that cannot be made.
    """
    if output.suffix.lower() not in suffixes:
        raise UsageError(f"--output must end in {' or '.join(suffixes)}, got {output}")
    return files.check_output(output)


def save(figure: Figure, output: Path, dpi: int) -> None:
    """Write a figure, all or nothing, in the format of the file's suffix."""
    files.atomic_write(output, figure_bytes(figure, output.suffix.lower(), dpi))


def save_film(figures: Iterable[Figure], output: Path, dpi: int) -> None:
    """Write figures into a GIF that runs for ever."""
    drawn = [
        Image.open(io.BytesIO(figure_bytes(figure, ".png", dpi))).convert("RGB")
        for figure in figures
    ]
    W, H = (max(sides) for sides in zip(*(picture.size for picture in drawn), strict=True))
    first, *others = [  # titles may differ in lines
        ImageOps.expand(picture, (0, 0, W - picture.width, H - picture.height), "white").quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        for picture in drawn
    ]
    data = io.BytesIO()
    first.save(
        data, "GIF", save_all=True, append_images=others, duration=600, loop=0
    )  # milliseconds a picture
    files.atomic_write(output, data.getvalue())


def each_figure(
    options: argparse.Namespace,
    asked: Asked,
    draw: Callable[[Asked, Any], Any],
    write: Callable[[Any, Path, int], None] = save,
    together: bool = False,
) -> int:
    """Draw and write a figure an image, with a progress bar; say so at the end.

    Args:
        draw: what is asked for, of an image's path, or with `together` of several in a list.
        write: the figure, into a file, at --dpi.
    """
    images = find_images(options.images)
    together = together and len(images) > 1
    jobs = [images] if together else images
    outputs = [check_output(Path(options.output), options.suffixes)]
    if len(jobs) > 1:
        stem, suffix = outputs[0].stem, outputs[0].suffix
        names = [Path(image).stem.replace("#", "-") for image in images]
        outputs = [
            outputs[0].with_name(f"{stem}-{name}{f'-{number}' * (name in names[:number])}{suffix}")
            for number, name in enumerate(names)
        ]
    for path in images:  # a broken one ends the command before the first picture
        read_image(path)
    for job, output in zip(
        tqdm(jobs, unit="image", disable=len(jobs) == 1 or None), outputs, strict=True
    ):
        write(draw(asked, job), output, options.dpi)
    print("written:", *outputs)
    return 0
