"""Select attention layers and query points by text, and read the options that the commands share."""

import argparse
import re
from collections.abc import Sequence

from ea_vision.base import devices
from ea_vision.base.errors import UsageError
from ea_vision.data.decoding import MAX_PIXELS
from ea_vision.ops import Size
from ea_vision.recorder.maps import Query
from ea_vision.recorder.recording import AttentionLayer, recordable_layers
from ea_vision.zoo.loaded import LoadedModel

# names as in `recorder.maps.LayerMaps.query_names`; all: the mean of all pixels' queries
TOKEN = r"all|cls|dist|mean|pool|(?:reg|pool|query|token)[1-9]\d*"
NUMBER = "[0-9]{1,9}"


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names; equal ones get numbers."""
    labels = []
    for place, name in enumerate(names):
        number = names[:place].count(name) + 1
        labels.append(f"{name} [{number}]" if names.count(name) > 1 else name)
    return labels


def parse_layers(text: str, model: LoadedModel) -> list[AttentionLayer]:
    """Return the layers that a text names: `all` (except pooling), numbers, ranges and module names, with commas.

    Raises:
        UsageError: a layer does not exist, or the model has no attention.
    """
    available = recordable_layers(model.model)
    if not available:
        raise UsageError(f"{model.label} has no attention layer that can be recorded")
    if text == "all":
        return [layer for layer in available if not layer.pools]
    layer_of_key = {str(layer.number): layer for layer in available}
    layer_of_key |= {layer.name: layer for layer in available}
    selected = []
    for item in text.split(","):
        ends = re.fullmatch(f"({NUMBER})-({NUMBER})", item)
        numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
        for key in map(str, numbers or [item]):  # up to the first that does not exist
            if key not in layer_of_key:
                names = ", ".join(map(str, available))
                raise UsageError(f"{model.label} has no attention layer {key!r}; it has {names}")
            selected.append(layer_of_key[key])
    return selected


def parse_queries(
    texts: Sequence[str], img_size: Size, default: Sequence[tuple[float, float]] = ()
) -> list[Query]:
    """Return points from `y,x` texts, and names of tokens unchanged; without texts the default, in shares of the sides.

    Raises:
        UsageError: a text is neither y,x nor such a name, or a point lies outside the image.
    """
    H, W = img_size
    if not texts:
        return [(int(H * y), int(W * x)) for y, x in default]
    points = []
    for text in texts:
        match = re.fullmatch(f"({NUMBER}), ?({NUMBER})|{TOKEN}", text)
        if not match:
            raise UsageError(
                "a query must be y,x in pixels, all, a token before a transformer's patches (cls, dist, "
                f"reg1, ...) or an object's query (query1, ...), got {text!r}"
            )
        if not match[1]:
            points.append(text)
            continue
        y = int(match[1])
        x = int(match[2])
        if y >= H or x >= W:
            raise UsageError(f"query y,x must lie within {H}x{W} pixels, got {text!r}")
        points.append((y, x))
    return points


def image_size(text: str) -> Size:
    """Parse N or H,W for argparse; return (H, W): both positive, their product at most MAX_PIXELS."""
    sides = re.fullmatch(f"({NUMBER})(?:,({NUMBER}))?", text)
    H = int(sides[1]) if sides else 0
    W = int(sides[2] or sides[1]) if sides else 0
    if not 0 < H * W <= MAX_PIXELS:
        raise argparse.ArgumentTypeError(
            "must be N or H,W in pixels, at most "
            f"{MAX_PIXELS / 1e6:g} million together, got {text[:40]!r}"
        )
    return H, W


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options that several commands have."""
    options = {
        "--random": dict(
            action="store_true", help="use random weights even where trained ones exist"
        ),
        "--img-size": dict(
            type=image_size,
            metavar="N|H,W",
            help="size of the input in pixels (default: the model's)",
        ),
        "--device": dict(default="auto", help=f"{devices.HELP} (default: %(default)s)"),
    }
    for name in names:
        parser.add_argument(name, **options[name])


def positive(text: str) -> int:
    """Return a positive whole number below a billion, for argparse."""
    if not re.fullmatch(NUMBER, text) or not int(text):
        raise argparse.ArgumentTypeError(
            f"a positive whole number below a billion required, got {text[:40]!r}"
        )
    return int(text)
