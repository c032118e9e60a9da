"""The options that the figures' commands have in common, and what their values mean.

Heads are counted from 0, layers from 1, query points are y,x in pixels of the prepared (resized and cut) input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ea_vision.analysis.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    find_images,
    load_model,
    parse_size,
    positive,
)
from ea_vision.analysis.recording import AttentionLayer
from ea_vision.base.errors import UsageError
from ea_vision.base.processes import choose_device
from ea_vision.visualize.recordings import MEAN, Head, Point, distinct
from ea_vision.visualize.writing import PICTURES

DIAGONAL = ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75))


def make_parser(description: str, examples: str, *, output: str, layers: str = "all", heads: str | None = "all,mean",
                queries: bool = True, maps: bool = True,
                suffixes: Sequence[str] = PICTURES) -> argparse.ArgumentParser:
    """The options that the figures' commands share; `heads=None`, `queries=False`, `maps=False` leave theirs out."""
    parser = argparse.ArgumentParser(description=description, epilog="examples:\n" + examples,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ea_conv_transformer_cifar", metavar="NAME|RUN[,..]",
                        help=f"{WEIGHTS_HELP}; several separated by commas (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="random weights, whatever there is")
    parser.add_argument("--img-size", metavar="N|H,W", help="size of the input in pixels (default: the model's)")
    parser.add_argument("--layers", default=layers, metavar="1,2|3-5|all",
                        help="attention layers, counted from 1 in forward order, or their module names "
                             "(default: %(default)s)")
    if heads is not None:
        parser.add_argument("--heads", default=heads, metavar="0,1|all|mean",
                            help="heads, counted from 0; mean: their average (default: %(default)s)")
    if queries:
        parser.add_argument("--queries", nargs="+", default=[], metavar="Y,X",
                            help="query points in pixels of the input as the network sees it, from its top left corner "
                                 "(default: points on a diagonal, or the middle for one)")
    parser.add_argument("-o", "--output", default=output, metavar="FILE",
                        help=f"{', '.join(s[1:].upper() for s in suffixes)} by its suffix; of several images, "
                             "each gets its own file, its name added (default: %(default)s)")
    if maps:
        parser.add_argument("--npz", action="store_true",
                            help="write the maps that are drawn from beside each figure, too, as FILE.npz for np.load")
    parser.add_argument("--dpi", type=positive, default=150, help="of pictures made of pixels (default: %(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="where the network runs; auto: cuda if there is one (default: %(default)s)")
    add_exif_rotation(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE",
                        help="image files, folders of them, or digits:N, the Nth test image of the digits")
    parser.set_defaults(suffixes=tuple(suffixes))
    return parser


def add_exif_rotation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--exif-rotation", action="store_true",
                        help="turn images as their EXIF data says (default: do not, as networks are trained)")


def only(values: Sequence, kind: str):
    """The one value of an option that allows one.

    Raises:
        UsageError: several.
    """
    if len(values) != 1:
        raise UsageError(f"this figure shows one {kind}; got {len(values)}: --help shows how to choose")
    return values[0]


def parse_queries(texts: Sequence[str], img_size: tuple[int, int],
                  default: Sequence[tuple[float, float]] = DIAGONAL) -> list[Point]:
    """`y,x` texts -> points; none gives the default, in shares of the sides.

    Raises:
        UsageError: not y,x, or outside the image.
    """
    H, W = img_size
    if not texts:
        return [(int(H * y), int(W * x)) for y, x in default]
    points = []
    for text in texts:
        sides = text.split(",")
        if len(sides) != 2 or not all(side.strip().isdigit() for side in sides):
            raise UsageError(f"a query must be y,x in pixels, got {text!r}")
        y, x = int(sides[0]), int(sides[1])
        if y >= H or x >= W:
            raise UsageError(f"query y,x must lie within the {H}x{W} input, got {text!r}")
        points.append((y, x))
    return points


def parse_heads(text: str, layers: Sequence[AttentionLayer]) -> list[Head]:
    """`all`, numbers and `mean`, separated by commas.

    Raises:
        UsageError: a head that a layer does not have.
    """
    num_heads = min(layer.num_heads for layer in layers)
    heads: list[Head] = []
    for item in text.split(","):
        if item == "all":
            heads += range(num_heads)
        elif item == MEAN:
            heads.append(MEAN)
        elif item.isdigit() and int(item) < num_heads:
            heads.append(int(item))
        else:
            raise UsageError(f"heads must be 0 to {num_heads - 1}, all or {MEAN}, got {item!r}")
    return heads


def load_models(options: argparse.Namespace) -> list[LoadedModel]:
    """The models of --model; an image that does not exist is found out first."""
    find_images(options.images)
    size, device = parse_size(options.img_size), choose_device(options.device)
    return distinct([load_model(target, random=options.random, img_size=size, device=device)
                     for target in options.model.split(",")])
