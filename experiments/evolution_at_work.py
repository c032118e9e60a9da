"""Draw evolution at work: the query and head of a photo whose attention the previous map changes most.

    python -m experiments.evolution_at_work docs/cat.jpg -o visualize/evolution.png
    python -m experiments.evolution_at_work docs/cat.jpg --typical cifar10/test/

A change is the total variation between a layer's attention and the attention of its own logits alone, at the same scale
(`ea_vision.recorder.quantities.own_alone`): 0 for equal maps, 1 for maps without overlap. The script chooses the query
and head for which the smallest change over the evolving layers is largest, and prints the caption. Typical changes are
means over heads, queries and the images of --typical (at most 200, evenly spaced); of several images it also prints how
centred their maps are.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.recorder.quantities import map_correlation, total_variation
from ea_vision.recorder.recording import PARTS, record_attention
from ea_vision.recorder.selection import parse_layers
from ea_vision.visualize.figure_options import check_output, save
from ea_vision.visualize.figure_request import record
from ea_vision.visualize.map_style import MapStyle
from ea_vision.visualize.strip import add_own_alone, draw_change
from ea_vision.visualize.tiles import OWN_ALONE, Recording, cell_of
from ea_vision.zoo.inputs import find_images, read_image
from ea_vision.zoo.loaded import LoadedModel, load_model

PHOTOS = 200  # of --typical, at most


def changes(recording: Recording) -> dict[int, Tensor]:
    """Return the change in each evolving layer: layer number -> (K, H, W), heads and queries.

    Raises:
        UsageError: no recorded layer evolves from a previous map.
    """
    add_own_alone(recording)
    changed = {}
    for layer in recording.maps.values():
        if OWN_ALONE in layer.recorded():
            attn = layer.spatial().flatten(4)
            alone = layer.spatial(OWN_ALONE).flatten(4)
            changed[layer.number] = total_variation(attn, alone)[0]
    if not changed:
        raise UsageError(
            f"a network whose layers evolve is required; {recording.model.label} has none of these"
        )
    return changed


def choose(changed: Mapping[int, Tensor], img_size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Return the head and query whose smallest change over the layers is largest; query: (y, x), the cell's middle."""
    least = torch.stack(list(changed.values())).amin(0)  # (K, H, W)
    head, row, col = (int(place) for place in torch.unravel_index(least.argmax(), least.shape))
    height = img_size[0] / least.shape[1]
    width = img_size[1] / least.shape[2]
    return head, (int((row + 0.5) * height), int((col + 0.5) * width))


def caption(
    recording: Recording,
    changed: Mapping[int, Tensor],
    head: int,
    query: tuple[int, int],
    typical: Mapping[int, float],
    what: str,
) -> str:
    """Return the picture's caption; every number in it is computed from the maps.

    Args:
        changed: the photo's `changes`.
        typical: mean change by layer.
        what: the images of `typical`, in words.
    """
    differences = []
    for number, change in changed.items():
        cell = cell_of(query, recording.img_size, recording.maps[number].feat_size)
        differences.append(f"{change[head][cell]:.2f} in layer {number}")
    means = " and ".join(f"{mean:.2f} in layer {number}" for number, mean in typical.items())
    return (
        f"Head {head}, query y {query[0]}, x {query[1]}, of {recording.model.label}. Without the previous map "
        f"attention differs by {' and by '.join(differences)} (at most 1). Over heads and queries of {what} the "
        f"mean is {means}."
    )


def centring(model: LoadedModel, images: Sequence[str], layer: int = 3) -> tuple[float, float]:
    """Return how alike maps of a layer's head 0 are, means over all queries: two mean correlations over the images.

    The first is of the mirrored image's map and the mirrored map, the second of a map and the mean map of all images.
    """
    inputs = torch.stack([model.input_of(read_image(image)) for image in images])
    both = []
    for batch in (inputs, inputs.flip(-1)):
        with torch.inference_mode(), record_attention(model.model, [layer]) as maps:
            model.model(batch)
        both.append(maps[layer].spatial()[:, :1].mean((2, 3)))
    own, mirrored = both
    mean = own.mean(0, keepdim=True).expand_as(own)
    others = (mirrored.flip(-1), mean)
    to_mirrored, to_mean = (float(map_correlation(own, other).mean()) for other in others)
    return to_mirrored, to_mean


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photo", help="image file that is drawn")
    parser.add_argument(
        "--typical",
        nargs="+",
        metavar="IMAGE",
        default=[],
        help="image files or folders for the typical changes (default: the photo)",
    )
    parser.add_argument(
        "--model", default="ea_conv_transformer_cifar", help="name or run folder (%(default)s)"
    )
    parser.add_argument(
        "--layers", default="1-3", help="layers of one chain (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", help="draw what the previous maps changed for the chosen query and head"
    )
    args = parser.parse_args(argv)
    output = check_output(Path(args.output)) if args.output else None
    model = load_model(args.model)
    layers = parse_layers(args.layers, model)
    recording = record(model, read_image(args.photo), layers, PARTS)
    changed = changes(recording)
    head, query = choose(changed, model.img_size)
    images = find_images(args.typical or [args.photo])
    photos = images[:: -(-len(images) // PHOTOS)]
    others = [changes(record(model, read_image(image), layers, PARTS)) for image in photos]
    typical = {}
    for number in changed:
        typical[number] = float(torch.stack([other[number] for other in others]).mean())
    what = f"{len(others)} images" if args.typical else "this photo"
    print(caption(recording, changed, head, query, typical, what))
    if len(photos) > 1:
        mirrored, mean = centring(model, photos, layers[-1].number)
        print(
            f"Correlation with the mirrored image's map {mirrored:.2f}, with the mean map {mean:.2f}"
        )
    if output:
        numbers = [layer.number for layer in layers]
        style = MapStyle(style="fog")
        save(draw_change(recording, numbers, head, query, style, width=6.75), output, 150)
        print("written:", output)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
