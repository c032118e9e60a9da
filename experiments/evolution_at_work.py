"""A picture of evolution at work: of a photo the query and the head whose attention changes the most without the map of
the layer before, and how typical that is.

    python -m experiments.evolution_at_work docs/cat.jpg -o visualize/evolution.png
    python -m experiments.evolution_at_work docs/cat.jpg --typical cifar10/test/

A change is the total variation between a layer's attention and its attention where the previous logits are 0, from 0
(the same) to 1 (nothing in common). Chosen is what changes the most in the evolving layer that changes the least, among
queries of the photo; the means are over all heads, queries and photos, at most 200 from all over the images
of --typical where there are some.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.recorder.loading import load_model, parse_layers
from ea_vision.recorder.recording import PARTS
from ea_vision.visualize.figure_options import check_output, save
from ea_vision.visualize.image_maps import WITHOUT, Recording, add_contributions, cell_of, record
from ea_vision.visualize.strip import draw_strip

PHOTOS = 200  # for the means, at most


def changes(recording: Recording) -> dict[int, Tensor]:
    """Return the change of each evolving layer by number, (K, H, W) of heads and queries.

    Raises:
        UsageError: no layer whose previous map can be taken away.
    """
    add_contributions(recording)
    layers = [layer for layer in recording.maps.values() if WITHOUT[0] in layer.recorded()]
    if not layers:
        raise UsageError(
            f"a network whose layers evolve is required, and {recording.model.label} has none of these"
        )
    return {
        layer.number: (layer.spatial() - layer.spatial(WITHOUT[0])).abs().sum((-2, -1))[0] / 2
        for layer in layers
    }


def choose(changed: Mapping[int, Tensor], img_size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Return the head and the query (y, x in pixels, the middle of its cell) of the largest change in all layers."""
    least = torch.stack(list(changed.values())).amin(0)  # (K, H, W)
    head, row, col = (int(place) for place in torch.unravel_index(least.argmax(), least.shape))
    H, W = least.shape[1:]
    return head, ((2 * row + 1) * img_size[0] // (2 * H), (2 * col + 1) * img_size[1] // (2 * W))


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
        help="image files or folders, for the means",
    )
    parser.add_argument(
        "--model", default="ea_conv_transformer_cifar", help="name or run folder (%(default)s)"
    )
    parser.add_argument("--layers", default="1-3", help="of one chain (default: %(default)s)")
    parser.add_argument("-o", "--output", help="draw the strip of the chosen query and head")
    args = parser.parse_args(argv)
    output = check_output(Path(args.output)) if args.output else None
    model = load_model(args.model)
    layers = parse_layers(args.layers, model)
    recording = record(model, read_image(args.photo), layers, PARTS)
    changed = changes(recording)
    head, query = choose(changed, model.img_size)
    images = find_images(args.typical) if args.typical else []
    others = [
        changes(record(model, read_image(image), layers, PARTS))
        for image in images[:: -(-len(images) // PHOTOS) or 1]
    ] or [changed]
    for number, change in changed.items():
        row, col = cell_of(query, model.img_size, change.shape[1:])
        typical = torch.stack([other[number] for other in others])
        print(
            f"layer {number}: change {change[head, row, col]:.2f} of head {head} and query {query[0]},{query[1]}; "
            f"{len(others)} images: mean {typical.mean():.2f}, above 0.5 in "
            f"{100 * (typical > 0.5).float().mean():.0f}% of all heads and queries"
        )
    if output:
        save(
            draw_strip(recording, [layer.number for layer in layers], head, query, width=6.75),
            output,
            150,
        )
        print("written:", output)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
