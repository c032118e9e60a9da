"""The options that the figures' commands share, their values, and how figures are written to files.

Arguments of the functions `plot_*` (each takes those that its figure needs):

    model      a timm network (an nn.Module, which runs in evaluation mode), or the name of one, a run folder or a
               checkpoint. Several: a list of these, or a mapping from labels to them.
    image      a file's path, a PIL image or an array (H, W, 3), which is resized and cropped for the model; or a tensor
               (3, H, W) that is not resized: uint8, or floating point in 0..1 before normalisation.
    layers     numbers from 1 in forward order, module names, or a text such as "1,3-5"; None: all that have the
               queries; in plot_heatmap and plot_matrix at most 6 of these, evenly spaced.
    heads      numbers from 0, "mean", or a text such as "0,2,mean"; None: all and their mean.
    queries    points (y, x) in pixels of the network's input; names of tokens before a vision transformer's patches,
               such as "cls"; or "all": the mean of all pixels' queries. None: three points on the diagonal.
    width      of the figure in inches, 3.3 for a paper's column, 6.75 for its page; None: as wide as it needs to be, at
               most 6.75.
    mean, std  three numbers each, for images in 0..1; None: the model's.
    processor  an image processor of transformers, its path or name, for mean, std, size and resampling.
    **style    how maps are drawn, the fields of `MapStyle`: style ("cells" or "light"), overlay, scale, cmap, opacity.

Invalid arguments raise UsageError (a ValueError), which names what was required and what was received.
"""

import argparse
import io
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import nn
from tqdm import tqdm

from ea_vision.base import files
from ea_vision.base.devices import choose_device
from ea_vision.base.errors import CommandParser, UsageError
from ea_vision.base.figures import FORMATS as PICTURES
from ea_vision.base.figures import check_width, figure_bytes
from ea_vision.base.files import check_keeps_images
from ea_vision.engine import run_folder
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    add_options,
    load_model,
    numbered,
    parse_layers,
    parse_queries,
    parse_targets,
    positive,
)
from ea_vision.recorder.recording import AttentionLayer, AttentionMaps, LayerMaps
from ea_vision.visualize.image_maps import AnyImage, as_models, record
from ea_vision.visualize.map_style import SCALES, STYLE, STYLE_FIELDS, STYLES, style_of
from ea_vision.visualize.tiles import ALL, MEAN, Head, Query, Recording

log = logging.getLogger(__name__)

Model = nn.Module | LoadedModel | str | Path
Models = Model | Sequence[Model] | Mapping[str, Model]
Layers = str | int | Sequence[int | str] | None
Heads = str | int | Sequence[int | str] | None
Queries = Sequence[Query] | str | None
DEMO = ["ea_conv_transformer_cifar"]  # the default model
SOME_LAYERS = 6  # how many are drawn at most by default
CHECKPOINTS = ("*.ckpt", f"{run_folder.SNAPSHOTS}/*.safetensors")  # in a run folder
NEED_RUNS = "checkpoints need a run folder, its *.ckpt files or its snapshots"
SHARED = ("layers", "heads", "queries", "width", *STYLE_FIELDS)
FILM = ".gif"
DIAGONAL = ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75))  # queries, as fractions of height and width
MIDDLE = ((0.5, 0.5),)


def make_parser(
    description: str,
    examples: str,
    *,
    output: str,
    some: bool = False,
    heads: str | None = "",
    queries: bool = True,
    style: Collection[str] = STYLE_FIELDS,
    suffixes: Sequence[str] = PICTURES,
) -> argparse.ArgumentParser:
    """Return a parser of the options that the figures and the page share.

    Args:
        description, examples: the beginning and the end of --help.
        output, heads: default values; heads "" means the default of `Asked`, and None leaves --heads out.
        some: whether only some layers are drawn by default.
        queries: whether the figure has query points.
        style: the fields of `MapStyle` that the figure has.
        suffixes: allowed suffixes of the file; without PNG (a page) --width and --dpi are left out.
    """
    parser = CommandParser(description=description, epilog="examples:\n" + examples)
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
        metavar="1,2|3-5|all",
        help="attention layers, counted from 1 in forward order, or their module names (default: all "
        f"that have the queries{', or some of many' if some else ''})",
    )
    if heads is not None:
        parser.add_argument(
            "--heads",
            default=heads or None,
            metavar="0,1|all|mean",
            help="heads, counted from 0; mean: their average (default: "
            f"{heads or 'all,mean; with several models mean'})",
        )
    if queries:
        parser.add_argument(
            "--queries",
            nargs="+",
            type=_query_text,
            metavar="Y,X|cls|all",
            help="query points in pixels of the network's input, from its top left corner; all: the mean of "
            "all pixels' queries; cls, dist, reg1, ...: tokens before a vision transformer's patches "
            "(default: points on a diagonal, or the middle for one)",
        )
    parser.add_argument(
        "-o",
        "--output",
        default=output,
        metavar="FILE",
        help=f"file to write; its suffix chooses {', '.join(s[1:].upper() for s in suffixes)}; with several "
        "images each gets its own file, with its name added (default: %(default)s)",
    )
    if PICTURES[0] in suffixes:
        parser.add_argument(
            "--width",
            type=float,
            metavar="3.3|6.75|N",
            help="width of the figure in inches; text keeps its 7 to 9 points, tiles shrink (default: as "
            "wide as needed, at most 6.75)",
        )
        parser.add_argument(
            "--dpi",
            type=positive,
            default=150,
            help="dots per inch of PNG pictures (default: %(default)s)",
        )
    if "style" in style:
        parser.add_argument(
            "--style",
            default=STYLE.style,
            choices=STYLES,
            help="cells: attention in colours over the grey photo; light: the photo lit by attention, "
            "dark at half of uniform attention and full at twice (default: %(default)s)",
        )
    if "overlay" in style:
        parser.add_argument(
            "--bare", dest="overlay", action="store_false", help="draw the maps without the photo"
        )
    if "scale" in style:
        parser.add_argument(
            "--scale",
            default=STYLE.scale,
            choices=SCALES,
            help="scale of the colours. layer: the maps of a layer (or of a film) share one; tile: each "
            "map has its own, with its maximum written on it; all: the figure has one; uniform: 1/8 "
            "to 8 times uniform attention in every figure (default: %(default)s)",
        )
    if "cmap" in style:
        parser.add_argument(
            "--cmap",
            metavar="NAME",
            help="a colour map of matplotlib's (default: viridis for attention, coolwarm for logits)",
        )
    if "opacity" in style:
        parser.add_argument(
            "--opacity",
            type=float,
            default=STYLE.opacity,
            metavar="0..1",
            help="opacity of the maps over the photo (default: %(default)s)",
        )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="image files, folders of them, or digits#N, the Nth test image of the digits, from 0",
    )
    parser.set_defaults(suffixes=suffixes, some=some)
    return parser


def _query_text(text: str) -> str:
    """Return a query's text. Image files are refused, because argparse takes all words after --queries."""
    if any(letter in text for letter in "./#"):
        raise argparse.ArgumentTypeError(f"images stand before --queries, got {text!r} as a query")
    return text


def only(values: Sequence, kind: str):
    """Return the one value of an option that allows one.

    Raises:
        UsageError: there is not exactly one.
    """
    if len(values) != 1:
        raise UsageError(
            f"this figure shows one {kind}; got {len(values)}: --help shows how to choose"
        )
    return values[0]


def parse_heads(text: str, layers: Sequence[AttentionLayer]) -> list[Head]:
    """Parse heads: `all`, numbers and `mean`, separated by commas.

    Raises:
        UsageError: a head that a layer does not have.
    """
    num_heads = min(layer.num_heads for layer in layers)
    heads = []
    for item in text.split(","):
        if item == "all":
            heads += range(num_heads)
        elif item == MEAN:
            heads.append(MEAN)
        elif item in map(str, range(num_heads)):
            heads.append(int(item))
        else:
            raise UsageError(f"heads must be 0 to {num_heads - 1}, all or {MEAN}, got {item!r}")
    return heads


def spread(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """Return at most SOME_LAYERS of the layers, evenly spaced, including the first and the last."""
    count = min(SOME_LAYERS, len(layers))
    places = np.linspace(0, len(layers) - 1, count)
    return [layers[round(place)] for place in places]


def loader(options: argparse.Namespace) -> Callable[[str], LoadedModel]:
    """Check that the images exist; return a function that loads a model with these options."""
    find_images(options.images)
    return partial(
        load_model,
        random=options.random,
        img_size=options.img_size,
        device=choose_device(options.device),
    )


def epochs_of(
    targets: Models, load: Callable[[str], LoadedModel] = load_model
) -> list[LoadedModel]:
    """Load the *.ckpt files and snapshots of run folders, or such files, ordered by run and epoch. If several files
    have the same epoch, the last one is returned. Models that are loaded already are returned unchanged.

    Runs whose folders have the same name are numbered.

    Raises:
        UsageError: a run folder without such files, or a model without an epoch.
    """
    several = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    if all(isinstance(target, LoadedModel) for target in several):
        return several
    runs = {}
    for target in several:
        if not isinstance(target, (str, Path)):
            raise UsageError(f"{NEED_RUNS}, got {type(target).__name__}")
        for path in _checkpoints(str(target)):
            model = load(path)
            if model.epoch is None:
                raise UsageError(f"{NEED_RUNS}, got {model.label}")
            run = run_folder.folder_of_file(Path(path).resolve())
            runs.setdefault(run, {})[model.epoch] = model
    labels = numbered([run_label(next(iter(epochs.values()))) for epochs in runs.values()])
    models = []
    for label, epochs in zip(labels, runs.values(), strict=True):
        for epoch in sorted(epochs):
            epochs[epoch].label = f"{label}, epoch {epoch}"
            models.append(epochs[epoch])
    return models


def _checkpoints(target: str) -> list[str]:
    """Return the checkpoints and snapshots of a run folder, or [target] if it is a file."""
    if not Path(target).is_dir():
        return [target]
    paths = []
    for pattern in CHECKPOINTS:
        paths += sorted(str(path) for path in Path(target).glob(pattern))
    if not paths:
        raise UsageError(f"run {target} has no {' nor '.join(CHECKPOINTS)}")
    return paths


def run_label(model: LoadedModel) -> str:
    """Return a checkpoint's label without its epoch."""
    return model.label.removesuffix(f", epoch {model.epoch}")


# ---- models, layers, heads and queries of a figure ------------------------------------------------------------------


def refuse_arguments(figure: str, how: Mapping[str, Any], **reasons: str) -> None:
    """Raise UsageError if `how` has an argument that a figure lacks.

    Args:
        figure: name of its function.
        reasons: by argument, why the figure lacks it.
    """
    for name, reason in reasons.items():
        if name in how:
            raise UsageError(f"{figure} has no {name}: {reason}")


def chosen_layers(layers: Layers, model: LoadedModel, some: bool = False) -> list[AttentionLayer]:
    """Return the layers asked for; by default all of them, or with `some` at most SOME_LAYERS."""
    if layers is not None:
        return parse_layers(_text(layers), model)
    every = parse_layers("all", model)
    return spread(every) if some else every


class Asked:
    """The models, their layers, and the heads and queries shared by all models; style and width of the figure.

    Args:
        models, layers, heads, queries, width, mean, std, processor, **style: see above; heads None: all and their mean,
            or with several models the mean alone.
        some: by default take the layers that `spread` chooses, not all.

    Raises:
        UsageError: layers or heads that a model lacks, or an unknown style.
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
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        processor: Any = None,
        **style,
    ):
        self.style = style_of(style)
        self.width = check_width(width)
        several = () if queries is None else queries
        self.queries = [queries] if isinstance(queries, (str, Number)) else list(several)
        self.some = some
        self.by_default = layers is None
        self.models = as_models(models, processor=processor, mean=mean, std=std)
        self.layers = [chosen_layers(layers, model, some) for model in self.models]
        if heads is None:
            heads = MEAN if len(self.models) > 1 else f"all,{MEAN}"
        text = _text(heads)
        self.asks_all_heads = ALL in text.split(",")
        self.heads = parse_heads(text, list(chain.from_iterable(self.layers)))

    @property
    def numbers(self) -> list[list[int]]:
        """The numbers of each model's layers."""
        numbers = []
        for chosen in self.layers:
            numbers.append([layer.number for layer in chosen])
        return numbers

    def record(self, image: AnyImage, parts: Sequence[str] = ("attn",)) -> list[Recording]:
        """Run each model on an image; see `ea_vision.visualize.image_maps.record`. If no layers were named, those that
        lack the queries are skipped (class attention has no queries of pixels)."""
        recordings = []
        for index, model in enumerate(self.models):
            recording = record(model, image, self.layers[index], parts)
            able = all(map(self._has_queries, recording.maps.values()))
            if self.by_default and not able:
                every = record(model, image, chosen_layers(None, model)).maps
                self.layers[index] = self._layers_with_queries(model, every)
                recording = record(model, image, self.layers[index], parts)
            recordings.append(recording)
        return recordings

    def _has_queries(self, layer: LayerMaps) -> bool:
        texts = [_text(query) for query in self.queries or ["0,0"]]
        tokens = [text for text in texts if text.isalnum() and text != ALL]
        asks_pixels = len(tokens) < len(texts)
        if asks_pixels and not layer.pixels_ask:
            return False
        return set(tokens) <= set(layer.query_names)

    def _layers_with_queries(self, model: LoadedModel, maps: AttentionMaps) -> list[AttentionLayer]:
        """Return the layers whose `maps` have the queries. If none has, return all: drawing them raises the error."""
        every = chosen_layers(None, model)
        able = [layer for layer in every if self._has_queries(maps[layer.number])]
        return spread(able or every) if self.some else able or every

    def warn_of_heads_left_out(self) -> None:
        """If layers have different numbers of heads, warn that `all` means the heads that every layer has."""
        counts = {layer.num_heads for layer in chain.from_iterable(self.layers)}
        if self.asks_all_heads and len(counts) > 1:
            log.warning(
                "layers have %d to %d heads, so only heads 0 to %d of each are drawn: --layers (layers=) "
                "chooses layers with equally many heads",
                min(counts),
                max(counts),
                min(counts) - 1,
            )

    def points(
        self, default: Sequence[tuple[float, float]] = DIAGONAL, seen: Sequence[Recording] = ()
    ) -> list[Query]:
        """Return the query points in pixels of the first recording in `seen`, or without one of the first model's
        input. default: points as fractions of height and width."""
        size = (seen or self.models)[0].img_size
        if not self.queries:
            return parse_queries([], size, default)
        points = []
        for query in map(_text, self.queries):
            points += [ALL] if query == ALL else parse_queries([query], size)
        return points


def _text(value: str | int | Sequence[int | str]) -> str:
    """Write items as the commands take them, separated by commas."""
    items = [value] if isinstance(value, (str, Number)) else value
    return ",".join(map(str, items))


# ---- files: checked before any work, one per image, written atomically ----------------------------------------------


def check_output(
    output: Path, suffixes: Sequence[str] = PICTURES, option: str = "--output"
) -> Path:
    """Check that a file can be written, before any work; return it.

    Raises:
        UsageError: a suffix that cannot be written, or a folder that cannot be made.
    """
    if output.suffix.lower() not in suffixes:
        raise UsageError(f"{option} must end in {' or '.join(suffixes)}, got {output}")
    return files.check_output(output)


def save(figure: Figure, output: Path, dpi: int) -> None:
    """Write a figure atomically, in the format of the file's suffix."""
    files.atomic_write(output, figure_bytes(figure, output.suffix.lower(), dpi))


def save_film(figures: Iterable[Figure], output: Path, dpi: int) -> None:
    """Write figures into a GIF that loops forever."""
    drawn = []
    for figure in figures:
        with Image.open(io.BytesIO(figure_bytes(figure, ".png", dpi))) as picture:
            drawn.append(picture.convert("RGB"))
    width = max(picture.width for picture in drawn)
    height = max(picture.height for picture in drawn)
    frames = []
    for picture in drawn:  # heights differ where titles have more lines
        right = width - picture.width
        below = height - picture.height
        whole = ImageOps.expand(picture, (0, 0, right, below), "white")
        colours = Image.Quantize.MAXCOVERAGE
        frames.append(whole.quantize(256, colours, dither=Image.Dither.NONE))
    first, *others = frames
    data = io.BytesIO()
    milliseconds = 600
    first.save(data, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
    files.atomic_write(output, data.getvalue())


def run_figure(
    options: argparse.Namespace,
    plot: Callable[..., Any],
    write: Callable[[Any, Path, int], None] = save,
    together: bool = False,
) -> int:
    """Draw and write a command's figures, one per image, with a progress bar; print their names at the end.

    Args:
        options: from `make_parser`. Those named in SHARED are passed to `plot`.
        plot: a function `plot_*`, called with the models and one image.
        write: writes the result of `plot` to a file, at --dpi.
        together: with one model, call `plot` once with the list of all images.
    """
    images = find_images(options.images)
    output = check_output(Path(options.output), options.suffixes)
    models = _models_of(options)
    together = together and len(models) == 1 and len(images) > 1
    jobs = [images] if together else images
    outputs = _outputs(output, jobs)
    check_keeps_images(outputs, images)
    keywords = {name: getattr(options, name) for name in SHARED if name in options}
    Asked(models, **keywords).points()  # refuses invalid options before any work
    for path in images:  # a broken image ends the command before the first picture
        read_image(path)
    progress = tqdm(jobs, unit="image", disable=len(jobs) == 1 or None)
    for job, path in zip(progress, outputs, strict=True):
        write(plot(models, job, **keywords), path, options.dpi)
    print("written:", *outputs)
    return 0


def _models_of(options: argparse.Namespace) -> list[LoadedModel]:
    """Load the models of a command. Print a line if only some layers are drawn by default."""
    targets = options.model or DEMO
    load = loader(options)
    if getattr(options, "through", "") == "checkpoints":
        return epochs_of(targets, load)
    models = [load(target) for target in targets]
    for model in models:
        count = len(parse_layers("all", model))
        if options.some and options.layers is None and count > SOME_LAYERS:
            print(
                f"{model.label}: {SOME_LAYERS} of {count} attention layers at most are drawn; "
                "--layers chooses others, --layers all draws all",
                file=sys.stderr,
            )
    return models


def _outputs(output: Path, jobs: Sequence) -> list[Path]:
    """Return one file per job. Several files are named after their images; names differ in more than upper and lower
    case."""
    if len(jobs) == 1:
        return [output]
    paths = {}
    for number, job in enumerate(jobs):
        name = f"{output.stem}-{Path(job).stem.replace('#', '-')}"
        while name.lower() in paths:
            name += f"-{number}"
        paths[name.lower()] = output.with_name(name + output.suffix)
    return list(paths.values())
