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

from ea_vision.analysis.inputs import ImageSource, as_image, as_input, find_images, read_image
from ea_vision.analysis.loading import LoadedModel
from ea_vision.analysis.recording import AttentionLayer, record_attention
from ea_vision.base.errors import UsageError
from ea_vision.base.files import write_npz
from ea_vision.layers import AugmentedConv2d, TokenAttention
from ea_vision.visualize.figure_options import (
    add_style,
    load_models,
    make_parser,
    only,
    parse_heads,
    parse_queries,
    shown_layers,
    style_of,
)
from ea_vision.visualize.image_maps import MEAN, Head, Point, Recording, as_model, cell_of, evaluating
from ea_vision.visualize.map_style import (
    STYLE,
    MapStyle,
    add_scale,
    draw_map,
    draw_photo,
    head_name,
    map_name,
    new_figure,
    norms_of,
    text_scale,
    wrapped,
)
from ea_vision.visualize.writing import check_output, save

EXAMPLES = """\
  ea-vision match --model ea_conv_transformer_cifar --layers 1-3 --queries 16,16 -o match.png one.jpg other.jpg
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
        row, col = cell_of(point, tuple(self.one.image.shape[1:]), self.one.maps[layer].feat_size)
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


def match_figure(matched: Match, layers: Sequence[int], heads: Sequence[Head], point: Point,
                 style: MapStyle = STYLE) -> Figure:
    """A row a layer: the one image with the query, and a column a head, what it finds in the other.

    Args:
        matched: of `match`.
        heads: counted from 0, or "mean".
        point: the query, (y, x) in pixels of the input.
        style: how maps are drawn; the maps of a layer share a scale.
    """
    H, W = matched.one.image.shape[1:]
    text = text_scale()
    cell = max(1.6, 0.9 * text)
    width = cell * (len(heads) + 1) + 1.3 * text
    title = wrapped(f"{matched.one.model.label}: query (y {point[0]}, x {point[1]}) of one image, keys of another",
                    width - 0.2, 12)
    names = [wrapped(map_name(matched.one.maps[layer]), width - 0.2, 10) for layer in layers]
    lines = 1 + max(name.count("\n") for name in names)
    row_height = cell * H / W + (0.4 + 0.18 * lines) * text
    figure = new_figure(width, len(layers) * row_height + (0.2 + 0.2 * (1 + title.count("\n"))) * text)
    figure.suptitle(title)
    rows = figure.subfigures(len(layers), 1, squeeze=False).ravel()
    groups = [[matched.relative_map(layer, point, head) for head in heads] for layer in layers]
    for row, layer, name, maps, norms in zip(rows, layers, names, groups, norms_of(groups, style), strict=True):
        cells = row.subplots(1, len(heads) + 1)
        draw_photo(cells[0], matched.one, style, [point], matched.one.maps[layer].feat_size)
        for axes, head, values, norm in zip(cells[1:], heads, maps, norms, strict=True):
            draw_map(axes, values, matched.other, norm, style)
            axes.set_title(head_name(head), fontsize="small")
        row.suptitle(name, fontsize="medium")
        add_scale(row, cells, norms[0], style)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLES, output="match.png", layers=None, heads="mean")
    add_style(parser)
    options = parser.parse_args(argv)
    style, output = style_of(options), check_output(Path(options.output), options.suffixes)
    paths = find_images(options.images)
    if len(paths) != 2:
        raise UsageError(f"match takes two images, got {len(paths)}")
    model = only(load_models(options), "model")
    [layers] = shown_layers(options, [model])
    heads = parse_heads(options.heads, layers)
    point = only(parse_queries(options.queries, model.img_size, [(0.5, 0.5)]), "query")
    if isinstance(point, str):
        raise UsageError(f"match takes a query y,x in pixels, got {point!r}")
    matched = match(model, *(read_image(path, exif_rotation=options.exif_rotation) for path in paths), layers)
    save(match_figure(matched, [layer.number for layer in layers], heads, point, style), output, options.dpi)
    written = [output]
    if options.npz:
        written.append(output.with_suffix(".npz"))
        write_npz(written[-1], {"image": matched.one.image.numpy(), "other": matched.other.image.numpy(),
                                **{f"layer{number}.found": maps.numpy() for number, maps in matched.found.items()}})
    print("written:", *written)
    return 0
