"""A pixel of one image, and the pixels of another one that match it in a layer's eyes.

The query of the one image meets the keys of the other: softmax(q · k) over the other's pixels. Positions and what
evolves from earlier layers belong to one image and are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import write_npz
from ea_vision.layers import AugmentedConv2d, TokenAttention
from ea_vision.recorder.inputs import ImageSource, as_image, as_input, find_images, read_image
from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.recording import AttentionLayer, record_attention
from ea_vision.visualize.figure_options import (
    MIDDLE,
    Asked,
    Heads,
    Layers,
    Model,
    add_style,
    make_parser,
    only,
    style_of,
)
from ea_vision.visualize.image_maps import (
    MEAN,
    Head,
    Point,
    Recording,
    as_model,
    cell_of,
    evaluating,
    query_name,
    title_of,
)
from ea_vision.visualize.map_style import STYLE, MapStyle, aspect_of, map_name, map_of, map_sheet, short_head_name
from ea_vision.visualize.sheet import Row
from ea_vision.visualize.writing import check_output, save

EXAMPLES = """\
  python visualize/match.py --model ea_conv_transformer_cifar --layers 1-3 --queries 16,16 one.jpg two.jpg
"""


@dataclass
class Match:
    """Two images of one size, as a network saw them, and what the queries of the one find in the other.

    one, other: recordings. found: by layer number, (K, H, W, H, W), query row and column in `one` first, then row and
    column of the key in `other`; each query's sum is 1.
    """

    one: Recording
    other: Recording
    found: dict[int, Tensor]

    def relative_map(self, layer: int, point: Point, head: Head) -> np.ndarray:
        """(H, W): what the query at a pixel of the one finds in the other, in units of uniform attention."""
        row, col = cell_of(point, self.one.img_size, self.one.maps[layer].feat_size)
        maps = self.found[layer][:, row, col]
        return ((maps.mean(0) if head == MEAN else maps[head]) * maps[0].numel()).numpy()


def match(model: nn.Module | LoadedModel | str, image: ImageSource | Tensor, other: ImageSource | Tensor,
          layers: Sequence[AttentionLayer]) -> Match:
    """Run a network on two images; see `ea_vision.visualize.image_maps` for what they may be.

    Raises:
        UsageError: images of different sizes, or layers that are not ours.
    """
    loaded = as_model(model)
    image, other = as_image(image), as_image(other)
    images = [as_input(loaded, one) for one in (image, other)]
    if images[0].shape != images[1].shape:
        raise UsageError(f"two images of one size required, got {' and '.join(str(tuple(i.shape)) for i in images)}")
    modules = {layer.number: loaded.model.get_submodule(layer.name) for layer in layers}
    foreign = [layer.name for layer in layers
               if not isinstance(modules[layer.number], (AugmentedConv2d, TokenAttention))]
    if foreign:
        raise UsageError(f"matches need layers of ea_vision (AugmentedConv2d, TokenAttention); {loaded.label} has "
                         f"others: {', '.join(foreign)}")
    projected: dict[int, Tensor] = {}
    handles = [module.qkv.register_forward_hook(lambda _, args, output, n=number: projected.update({n: output}))
               for number, module in modules.items()]
    try:
        with evaluating(loaded.model), torch.inference_mode(), record_attention(loaded.model, list(modules)) as maps:
            loaded.model(loaded.normalize(torch.stack(images).to(next(loaded.model.parameters()).device)))
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for number, module in modules.items():
        with torch.inference_mode():
            q, k, _, _ = module.heads_of(projected[number])  # (2, K, T, D)
        first, size = maps[number].num_prefix_tokens, maps[number].feat_size
        logits = module.scale * q[0, :, first:].float() @ k[1, :, first:].float().transpose(-2, -1)
        found[number] = logits.softmax(-1).unflatten(-1, size).unflatten(1, size).cpu()
    photos = [None if isinstance(one, Tensor) else loaded.photo(one) for one in (image, other)]
    return Match(*(Recording(loaded, seen, maps, photo) for seen, photo in zip(images, photos, strict=True)), found)


def plot_match(model: Model, image: ImageSource | Tensor, other: ImageSource | Tensor, query: Point | None = None,
               layers: Layers = None, heads: Heads = MEAN, *, width: float | None = None, **style) -> Figure:
    """Draw what a query of `image` (None: its middle) matches in `other`: a block a layer, a tile a head. See
    `ea_vision.visualize.figure_options` for the other arguments."""
    asked = Asked([as_model(model)], layers, heads, None if query is None else [query], some=True)
    return _draw(asked, image, other, MapStyle(**style), width)[0]


def _draw(asked: Asked, image: ImageSource | Tensor, other: ImageSource | Tensor, style: MapStyle,
          width: float | None) -> tuple[Figure, Match]:
    [model], [layers], [numbers] = asked.models, asked.layers, asked.numbers
    matched = match(model, image, other, layers)
    point = only(asked.points(matched.one.img_size, MIDDLE), "query")
    if isinstance(point, str):
        raise UsageError(f"match takes a query y,x in pixels, got {point!r}")
    return draw_match(matched, numbers, asked.heads, point, style, width=width), matched


def draw_match(matched: Match, layers: Sequence[int], heads: Sequence[Head], point: Point, style: MapStyle = STYLE, *,
               width: float | None = None) -> Figure:
    """Draw the one image with the query, and for each layer a tile a head, what it matches in the other.

    Args:
        matched: of `match`.
        heads: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input.
        style: how maps are drawn; the maps of a layer share a scale.
        width: inches.
    """
    groups = [(map_name(matched.one.maps[layer]),
               [Row([map_of(matched.relative_map(layer, point, head), matched.other, style, short_head_name(head))
                     for head in heads], aspect=aspect_of(matched.other))]) for layer in layers]
    return map_sheet(title_of(matched.one.model), groups, style, width=width, photo=matched.one, points=[point],
                     feat_size=matched.one.finest(layers),
                     note=f"the query {query_name(point)} of this image, matched with the pixels of another: "
                          "softmax(q \N{MIDDLE DOT} k), without positions")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="match.png", layers=None, heads="mean")
    add_style(parser)
    options = parser.parse_args(argv)
    style, output = style_of(options), check_output(Path(options.output), options.suffixes)
    paths = find_images(options.images)
    if len(paths) != 2:
        raise UsageError(f"match takes two images, got {len(paths)}")
    asked = Asked.by_options(options, some=True)
    only(asked.models, "model")
    figure, matched = _draw(asked, *(read_image(path, exif_rotation=options.exif_rotation) for path in paths), style,
                            options.width)
    save(figure, output, options.dpi)
    written = [output]
    if options.npz:
        written.append(output.with_suffix(".npz"))
        write_npz(written[-1], {"image": matched.one.image.numpy(), "other": matched.other.image.numpy(),
                                **{f"layer{number}.found": maps.numpy() for number, maps in matched.found.items()}})
    print("written:", *written)
    return 0
