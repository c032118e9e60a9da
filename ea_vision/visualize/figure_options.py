"""The options that the figures' commands share, and how figures are written to files."""

import argparse
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from ea_vision.base import files
from ea_vision.base.devices import choose_device
from ea_vision.base.errors import CommandParser, UsageError
from ea_vision.base.figures import FORMATS as PICTURES
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import check_keeps_images
from ea_vision.recorder.selection import add_options, positive
from ea_vision.visualize.figure_request import MOST_LAYERS, FigureRequest, epochs_of
from ea_vision.visualize.map_style import SCALES, STYLE, STYLE_FIELDS, STYLES
from ea_vision.zoo.inputs import find_images, read_image
from ea_vision.zoo.loaded import LoadedModel, load_model
from ea_vision.zoo.source import TARGET_HELP, parse_targets

DEMO = ["ea_conv_transformer_cifar"]  # the default model
SHARED = ("layers", "heads", "queries", "width", *STYLE_FIELDS)


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
        output, heads: default values; heads "" means the default of `FigureRequest`, and None leaves --heads out.
        some: whether at most MOST_LAYERS layers are drawn by default.
        queries: whether the figure has query points.
        style: the fields of `MapStyle` that the figure has.
        suffixes: allowed suffixes of the file; without PNG (a page) --width and --dpi are left out.
    """
    parser = _FigureParser(description=description, epilog="examples:\n" + examples)
    add = parser.add_argument
    add(
        "--model",
        action="extend",
        type=parse_targets,
        metavar="NAME|RUN[,..]",
        help=f"{TARGET_HELP}; several separated by commas or each with its own --model (default: "
        f"{DEMO[0]})",
    )
    add_options(parser, "--random", "--img-size", "--device")
    add(
        "--layers",
        metavar="1,2|3-5|all",
        help="attention layers, counted from 1 in forward order, or their module names (default: all "
        f"that have the queries{f', at most {MOST_LAYERS} that fit a page' if some else ''})",
    )
    if heads is not None:
        add(
            "--heads",
            default=heads or None,
            metavar="0,1|all|mean",
            help="heads, counted from 0; mean: their average (default: "
            f"{heads or 'all,mean; with several models mean'})",
        )
    if queries:
        add(
            "--queries",
            nargs="+",
            metavar="Y,X|cls|all",
            help="query points in pixels of the network's input, from its top left corner; all: the mean of "
            "all pixels' queries; cls, dist, reg1, ...: tokens before a vision transformer's patches; "
            "query1, ...: those of a detector's objects "
            "(default: points on a diagonal, or the middle for one)",
        )
    add(
        "-o",
        "--output",
        default=output,
        metavar="FILE",
        help=f"file to write; its suffix chooses {', '.join(s[1:].upper() for s in suffixes)}; with several "
        "images each gets its own file, with its name added (default: %(default)s)",
    )
    if PICTURES[0] in suffixes:
        add(
            "--width",
            type=float,
            metavar="3.3|6.75|N",
            help="width of the figure in inches; text keeps its 7 to 9 points, tiles shrink (default: as "
            "wide as needed, at most 6.75)",
        )
        add(
            "--dpi",
            type=positive,
            default=150,
            help="dots per inch of PNG pictures (default: %(default)s)",
        )
    if "style" in style:
        add(
            "--style",
            default=STYLE.style,
            choices=STYLES,
            help="cells: attention in colours over the grey photo; fog: the photo, in fog where attention is "
            "below uniform, with a line at uniform attention (default: %(default)s)",
        )
    if "overlay" in style:
        add("--bare", dest="overlay", action="store_false", help="draw the maps without the photo")
    if "scale" in style:
        add(
            "--scale",
            default=STYLE.scale,
            choices=SCALES,
            help="scale of the colours. uniform: 1/8 to 8 times uniform attention in every figure; layer: the "
            "maps of a layer share one; tile: each map has its own, with its maximum written on it; all: the "
            "figure has one (default: %(default)s)",
        )
    if "cmap" in style:
        add(
            "--cmap",
            metavar="NAME",
            help="a colour map of matplotlib's (default: viridis for attention, cividis for logits)",
        )
    if "opacity" in style:
        add(
            "--opacity",
            type=float,
            default=STYLE.opacity,
            metavar="0..1",
            help="opacity of the maps over the photo (default: %(default)s)",
        )
    add(
        "images",
        nargs="*",
        default=[],
        metavar="IMAGE",
        help="image files, folders of them, or digits#N, the Nth test image of the digits, from 0",
    )
    parser.set_defaults(suffixes=suffixes)
    return parser


class _FigureParser(CommandParser):
    def parse_known_args(self, args=None, namespace=None):
        """Parse; images may follow --queries, which takes all words up to the next option."""
        options, unknown = super().parse_known_args(args, namespace)
        queries = getattr(options, "queries", None) or []
        images = [word for word in queries if _is_image(word)]
        options.images = options.images + images
        if images:
            options.queries = [word for word in queries if word not in images] or None
        if not options.images:
            self.error("the following arguments are required: IMAGE")
        return options, unknown


def _is_image(word: str) -> bool:
    return any(letter in word for letter in "./#") or Path(word).exists()


def models_of(options: argparse.Namespace) -> list[LoadedModel]:
    """Load the models of --model; with `--through checkpoints` the epochs of these runs."""
    load = partial(
        load_model,
        random=options.random,
        img_size=options.img_size,
        device=choose_device(options.device),
    )
    targets = options.model or DEMO
    if getattr(options, "through", "") == "checkpoints":
        return epochs_of(targets, load)
    return list(map(load, targets))


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


def run_figure(
    options: argparse.Namespace,
    plot: Callable[..., Figure],
    *,
    together: bool | str = False,
    others: Sequence[Path] = (),
) -> int:
    """Draw and write a command's figures, one per image, with a progress bar; print their names at the end.

    Args:
        options: from `make_parser`. Those named in SHARED are passed to `plot`.
        plot: a function `plot_*`, called with the models and one image.
        together: call `plot` once with the list of all images: with one model, or "always".
        others: further files that `plot` writes.
    """
    images = find_images(options.images)
    output = check_output(Path(options.output), options.suffixes)
    models = models_of(options)
    in_one = together == "always" or (together and len(models) == 1 and len(images) > 1)
    jobs = [images] if in_one else images
    outputs = [*_outputs(output, jobs), *others]
    check_keeps_images(outputs, images)
    keywords = {name: getattr(options, name) for name in SHARED if name in options}
    # refuses layers and queries before any work
    FigureRequest(models, options.layers, None, keywords.get("queries")).points()
    for path in images:  # a broken image ends the command before the first picture
        read_image(path)
    progress = tqdm(jobs, unit="image", disable=len(jobs) == 1 or None)
    for job, path in zip(progress, outputs, strict=False):
        save(plot(models, job, **keywords), path, options.dpi)
    print("written:", *outputs)
    return 0


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
