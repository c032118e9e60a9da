"""Draw the area of each photo that a network's first spatial transformer samples, and its output.

python -m experiments.sampling runs/digits-stn_digits sampling.png digits#0 digits#1
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.layers import SpatialTransformer, sample_affine
from ea_vision.models.modes import evaluating
from ea_vision.ops import Size
from ea_vision.visualize.figure_request import AnyImage, Model, as_images, title_of
from ea_vision.visualize.sheet import Block, Row, Tile, sheet
from ea_vision.visualize.tiles import QUERY_COLORS, WHITE_RIM
from ea_vision.zoo.inputs import as_image
from ea_vision.zoo.loaded import as_model


def quadrilateral(theta: Tensor, in_size: Size) -> Tensor:
    """Return the corners of the sampled area: theta (B, 2, 3) -> (B, 4, 2).

    The corners are those of the output: left upper, right upper, right lower, left lower. Each is (x, y) in pixels of
    an input of (H, W) whose left upper corner is (0, 0).
    """
    H, W = in_size
    corners = theta.new_tensor([[-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]])
    sampled = corners @ theta.transpose(1, 2)
    in_parts = (sampled + 1) / 2  # from 0 to 1 over the input
    return in_parts * theta.new_tensor([W, H])


def plot_sampling(
    model: Model, images: AnyImage | Sequence[AnyImage], *, width: float | None = None
) -> Figure:
    """Draw one column per image: above, the input with the quadrilateral that the model's first spatial transformer
    samples (upper left corner marked); below, the sampled image. That transformer must read the model's input.

    Args:
        model, images, width: see `ea_vision.visualize.figure_request`.

    Raises:
        UsageError: no image, or a model without a `SpatialTransformer` that reads it.
    """
    loaded = as_model(model)
    images = as_images(images)
    transformers = [m for m in loaded.model.modules() if isinstance(m, SpatialTransformer)]
    if not transformers:
        raise UsageError(
            f"plot_sampling needs a model with a SpatialTransformer, got {loaded.label} with 0 of them"
        )
    transformer = transformers[0]
    channels = transformer.localise[0].in_channels
    if channels != 3:
        raise UsageError(
            "plot_sampling needs a first SpatialTransformer that reads the image (3 channels), got one that "
            f"reads {channels}"
        )
    above = []
    below = []
    for number, image in enumerate(images, start=1):
        x = loaded.input_of(as_image(image))
        shown = loaded.shown(x)
        size = tuple(x.shape[1:])
        with evaluating(loaded.model), torch.no_grad():
            theta = transformer.theta(loaded.batch_of([x]))
            image_there = shown[None].to(theta.device)
            [seen] = sample_affine(image_there, theta, transformer.out_size or size)
        [corners] = quadrilateral(theta.float(), size)
        above.append(_tile(shown, f"input {number}", corners.cpu().numpy()))
        below.append(_tile(seen.clamp(0, 1), f"sampled {number}"))
    return sheet(
        title_of(loaded),
        [Block([Row(above), Row(below)])],
        width=width,
        note="the area that the first spatial transformer samples of each input, upper left corner marked",
    )


def _tile(image: Tensor, title: str, corners: np.ndarray | None = None) -> Tile:
    """Return a tile of an image (3, H, W), with the quadrilateral of `corners` (4, 2), x and y, if given."""
    H, W = image.shape[1:]
    pixels = image.permute(1, 2, 0).cpu().numpy()

    def paint(axes: Axes, _) -> None:
        axes.imshow(pixels, extent=(0, W, H, 0))
        if corners is None:
            return
        look = {"color": QUERY_COLORS[0], "clip_on": False, "path_effects": [WHITE_RIM]}
        x, y = corners[[0, 1, 2, 3, 0]].T
        axes.plot(x, y, linewidth=1.2, **look)
        axes.plot(x[0], y[0], "o", markersize=4, **look)
        axes.set_xlim(min(*x, 0), max(*x, W))
        axes.set_ylim(max(*y, H), min(*y, 0))

    return Tile(paint, title, aspect=H / W)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("picture")
    parser.add_argument("images", nargs="+")
    args = parser.parse_args(argv)
    plot_sampling(args.model, args.images).savefig(args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
