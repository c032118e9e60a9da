"""Hold recorded attention maps: those of a layer, and of all layers of a network.

Shape letters: B batch, K heads, H x W the attention map, N = H*W its pixels, T tokens (N and a class token, ...).
"""

import functools
import io
import logging
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.ops.reference import within_windows
from ea_vision.recorder.layouts import Layout

log = logging.getLogger(__name__)
PARTS = ("attn", "logits", "self_logits", "conv_logits", "prev_logits")
Cell = tuple[int, int] | str  # (row, column) of the map, or a prefix token by name
Query = tuple[int, int] | str  # (y, x) in pixels of the input, or a prefix token by name


def _two_whole_numbers(place: tuple[int, int], name: str) -> tuple[int, int]:
    """Return a place; raise UsageError unless it is two whole numbers."""
    try:
        first, second = map(operator.index, place)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} must be two whole numbers, or a token's name, such as 'cls', got {place!r}"
        ) from error
    return first, second


def _part(name: str) -> property:
    def get(layer: "LayerMaps") -> Tensor | None:
        return layer[name] if name in layer.recorded() else None

    return property(get)


class LayerMaps:
    """The maps of one layer in the last forward. A part that was not requested, or that the layer lacks, is None.

    Rows are queries, columns keys, both row by row over the image, prefix tokens (a ViT's class token) first. T below
    is N plus the prefix tokens; there are fewer keys if a network reduces them, and class attention has one query,
    "cls".

    number, name: the layer's, as in `AttentionLayer`.
    heads: the heads in the tensors, counted from 0; the K below.
    feat_size: (H, W) of the queries. key_size: (H, W) of the keys.
    num_prefix_tokens: number of tokens before the map's pixels; our ResNets have none.
    prefix_names: names of these tokens, see the function `prefix_names`.
    query_names: names of the queries before the pixels: these tokens, or "pool" in a layer that pools by learned
        queries (SigLIP's).
    channels: whether rows and columns are channels of a head (XCiT), which have no places in the image.
    attn: (B, K, T, T), the probabilities by which values are averaged, before dropout. Rows sum to 1, except where an
        evolution mixes the probabilities (talking heads), where all keys of a query are masked (0), with a window over
        heads (the sum over the heads in it), and if windows are padded (Swin: without the padding's share).
    logits: (B, K, T, T), the input of the softmax, including entries that a window of pixels then hides. A layer with a
        window over heads has none.
    self_logits: (B, K, T, T), this layer's dot products and position terms.
    conv_logits: (B, K, T, T), the evolution's convolution (EA: of the mixed maps, PA: of prev_logits), after its ReLU.
    prev_logits: (B, K, T, T), the previous layer's logits, as mixed in.

    Get further parts by name, such as `layer["mixed_attn"]`, (B, K, T, T) each: those that an evolution adds;
    "mixed_attn", the probabilities after talking heads (CaiT) have mixed them; "first_attn" and "second_attn", the two
    maps of differential attention. Its attn is their difference, by which the values are averaged.
    """

    def __init__(
        self,
        number: int,
        name: str,
        heads: tuple[int, ...],
        layout: Layout = Layout(),  # noqa: B008
        **parts: Tensor,
    ):
        self.number = number
        self.name = name
        self.heads = heads
        self.layout = layout
        self.feat_size = layout.feat_size
        self.prefix_names = layout.prefix_names
        self.channels = layout.channels
        self.key_size = layout.key_size or layout.feat_size
        self.query_names = layout.query_names or layout.prefix_names
        self.num_prefix_tokens = len(layout.prefix_names)
        self._parts = parts  # in windows (B, W, K, n, n)

    attn, logits, self_logits, conv_logits, prev_logits = map(_part, PARTS)

    @property
    def pixels_ask(self) -> bool:
        """Whether there are queries of pixels, and not only of prefix tokens (class attention)."""
        if self.channels or self.layout.placeless or self.layout.query_names:
            return False
        [maps, *_] = self._parts.values()
        queries = maps.shape[-2]
        return queries > self.num_prefix_tokens

    def recorded(self) -> tuple[str, ...]:
        """Return the names of the recorded parts."""
        return tuple(self._parts)

    def save(self, part: str, maps: Tensor) -> None:
        """Set a part; in windows it is (B, W, K, n, n)."""
        self._parts[part] = maps

    def formed(self, part: str) -> Tensor:
        """Return a recorded part as the layer formed it: (B, K, T, T), in windows (B, W, K, n, n)."""
        return self._parts[part]

    def __getitem__(self, part: str) -> Tensor:
        """Return the tensor of a part, which must have been recorded."""
        if part not in self._parts:
            raise KeyError(f"layer {self} has recorded {', '.join(self.recorded())}; got {part!r}")
        maps = self._parts[part]
        windows = self.layout.windows
        if windows is None:
            return maps
        return windows.dense(maps, math.prod(self.feat_size))

    def __str__(self) -> str:
        return f"{self.number} ({self.name})"

    def __repr__(self) -> str:
        parts = ", ".join(f"{part} {list(maps.shape)}" for part, maps in self._parts.items())
        return f"layer {self}, map {self.feat_size}, heads {self.heads}: {parts or 'nothing'}"

    def check_places(self) -> None:
        """Raise UsageError if the layer's rows and columns have no places in the image."""
        if not self.channels and not self.layout.placeless:
            return
        how = "attends from channel to channel of a head"
        if self.layout.placeless:
            tokens = self.feat_size[1]
            how = (
                f"has {tokens} tokens that are no grid of patches (some were dropped, pruned or added, or tokens "
                "before the patches are not parameters called cls_token, dist_token or reg_token)"
            )
        raise UsageError(
            f"layer {self} {how}: draw its matrix (plot_matrix), or choose other layers"
        )

    def check_pixels_ask(self) -> None:
        """Raise UsageError if the layer has no queries of pixels."""
        self.check_places()
        if not self.pixels_ask:
            kind = "pooling" if self.layout.query_names else "class"
            raise UsageError(
                f"layer {self} is {kind} attention: its queries are {', '.join(self.query_names)} alone: "
                "choose other layers, or ask by name"
            )

    def sees(self) -> Tensor:
        """Return (H, W, H', W'), True where the query at a pixel of the map sees the key at another."""
        self.check_places()
        N = math.prod(self.feat_size)
        if self.layout.windows is not None:
            seen = self.layout.windows.sees(N)
        elif self.layout.window is not None:
            zeros = torch.zeros(1, 1, N, N)
            seen = within_windows(zeros, self.feat_size, self.layout.window, 1, False) == 0
        else:
            seen = torch.ones(N, math.prod(self.key_size), dtype=torch.bool)
        return seen.view(*self.feat_size, *self.key_size)

    def num_keys(self) -> np.ndarray:
        """Return (H, W): how many keys the query at a pixel of the map sees. Uniform attention is 1 over this."""
        counts = self.sees().sum((-2, -1))
        return counts.numpy() + self.num_prefix_tokens

    def relative(self) -> Tensor:
        """Return (B, K, T, T): attention times the number of keys that the query sees, so that uniform is 1."""
        maps = self["attn"]
        if self.channels or self.layout.placeless:
            return maps * maps.shape[-1]
        keys = self.num_keys()
        key_counts = [keys.max()] * len(self.query_names)
        if self.pixels_ask:
            key_counts += keys.flat
        return maps * torch.tensor(key_counts, device=maps.device)[:, None]

    def spatial(self, part: str = "attn") -> Tensor:
        """Return a part from pixel to pixel, without prefix tokens: (B, K, H, W, H, W), query row and column first."""
        self.check_pixels_ask()
        first = self.num_prefix_tokens
        pixels = self[part][:, :, first:, first:]
        on_keys_grid = pixels.unflatten(-1, self.key_size)
        return on_keys_grid.unflatten(2, self.feat_size)

    def on_queries_grid(self, part: str = "attn") -> Tensor:
        """Return a part with keys on the queries' grid: attention to a reduced key is divided equally among its cells.

        Raises:
            UsageError: keys are not reduced by whole numbers, or the layer has no queries of pixels.
        """
        self.check_pixels_ask()
        P = self.num_prefix_tokens
        H, W = self.feat_size
        h, w = self.key_size
        if H % h or W % w:
            raise UsageError(
                f"keys reduced by whole numbers are required, and those of layer {self} are {h}x{w} of "
                f"{H}x{W}: choose other layers"
            )
        rows = H // h
        cols = W // w
        maps = self[part]
        prefix = maps[..., :P]
        keys = maps[..., P:].unflatten(-1, (h, w))
        keys = keys.repeat_interleave(rows, -2).repeat_interleave(cols, -1)
        cells = keys.flatten(-2) / (rows * cols)
        return torch.cat([prefix, cells], -1)

    def own_name(self, query: str) -> str:
        """Return the layer's name of a query: "token5" is "query5" where queries are no pixels."""
        return query.replace("token", "query") if "query1" in self.query_names else query

    def token(self, cell: Cell) -> int:
        """Return the row of a query: (row, column) of the map, or a token by name, such as "cls", or "token5" of a
        sequence and of a layer whose queries are no pixels ("query5" there, too).

        Raises:
            UsageError: this layer has no such query.
        """
        if not isinstance(cell, str):
            self.check_pixels_ask()
            row, column = _two_whole_numbers(cell, "a cell (row, column)")
            height, width = self.feat_size
            if not (0 <= row < height and 0 <= column < width):
                raise UsageError(
                    f"a cell (row, column) of layer {self} must lie within its map of {height}x{width}, got {cell}"
                )
            return self.num_prefix_tokens + row * width + column
        self.check_places()
        names = self.query_names
        if not names and self.layout.image is None:  # a sequence
            names = tuple(f"token{number + 1}" for number in range(self.feat_size[1]))
        name = self.own_name(cell)
        if name not in names:
            shown = names if len(names) < 8 else (*names[:3], "...", names[-1])
            raise UsageError(
                f"query {cell} must be a token before the patches of layer {self}, which has "
                f"{', '.join(shown) or 'none'}"
            )
        return names.index(name)

    def cell_of(self, query: Query) -> Cell:
        """Return the cell of the map that contains a pixel (y, x) of the input; a token's name unchanged.

        If there is no image, as in a sequence, the map itself is the input.

        Raises:
            UsageError: the pixel is outside of the input, or of its patches.
        """
        if isinstance(query, str):
            return query
        y, x = _two_whole_numbers(query, "a query (y, x)")
        height, width = self.layout.image or self.feat_size
        if not (0 <= y < height and 0 <= x < width):
            raise UsageError(
                f"a query (y, x) must lie within the input of {height}x{width} pixels, got {query}"
            )
        rows, columns = self.feat_size
        high, wide = self.layout.area or (height, width)
        if y >= high or x >= wide:
            raise UsageError(
                f"a query (y, x) must lie within the patches of layer {self}, which cover {high}x{wide} of "
                f"{height}x{width} pixels, got {query}"
            )
        return y * rows // high, x * columns // wide

    def of_query(self, query: Query, part: str = "attn") -> tuple[Tensor, Tensor]:
        """Return a part's row of one query.

        Args:
            query: a pixel (y, x) of the input, from (0, 0) at the top left, or a prefix token by name, such as "cls".

        Returns:
            towards the prefix tokens (B, K, P), and towards the map's pixels (B, K, H, W).

        Raises:
            UsageError: the pixel is outside of the input, or the layer lacks the query.
        """
        return self.of_cell(self.cell_of(query), part)

    def of_cell(self, cell: Cell, part: str = "attn") -> tuple[Tensor, Tensor]:
        """Return the same as `of_query`, for a cell (row, column) of the map or a prefix token by name."""
        token = self.token(cell)
        windows = self.layout.windows
        if windows is not None and part in self._parts:
            row = windows.row(self._parts[part], math.prod(self.feat_size), token)
        else:
            row = self[part][:, :, token]
        first = self.num_prefix_tokens
        pixels = row[..., first:].unflatten(-1, self.key_size)
        return row[..., :first], pixels


@functools.cache
def _say_last_run(layer: str) -> None:
    """Log, once per layer, that it runs again in one forward."""
    log.warning(
        "attention layer %s runs several times in one forward (blocks share it, or the network calls it again): "
        "only the maps of the last run are kept",
        layer,
    )


class AttentionMaps(Mapping[int, LayerMaps]):
    """The recorded layers by number; `maps["layer3.0.conv2"]` finds one by its module's name."""

    def __init__(self):
        self._layers: dict[int, LayerMaps] = {}
        # whether a call of the network is running; whether none of its layers has run yet; whether one has run again
        self._in_call = self._is_first = self._repeats = False

    def __getitem__(self, key: int | str) -> LayerMaps:
        for layer in self._layers.values():
            if key in (layer.number, layer.name):
                return layer
        recorded = ", ".join(map(str, self.values())) or "none yet"
        raise KeyError(f"recorded layers are {recorded}; got {key!r}")

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._layers))

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        lines = [f"attention maps of {len(self)} layers"]
        lines += [f"  {layer!r}" for layer in self.values()]
        return "\n".join(lines)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the maps by layer and part, such as "layer2.attn", float32 (B, K, N, N), and "layer2.name",
        "layer2.heads", "layer2.feat_size" and "layer2.key_size" (H, W), "layer2.prefix_names" and
        "layer2.query_names"."""
        arrays = {}
        for layer in self.values():
            for name in ("name", "heads", "feat_size", "key_size", "prefix_names", "query_names"):
                arrays[f"layer{layer.number}.{name}"] = np.array(getattr(layer, name))
            for part in layer.recorded():
                maps = layer[part].float().cpu()
                arrays[f"layer{layer.number}.{part}"] = maps.numpy()
        return arrays

    def to_npz(self, path: str | Path) -> None:
        """Write `arrays` into a file that np.load reads.

        Raises:
            RunError: it cannot be written.
        """
        data = io.BytesIO()
        np.savez_compressed(data, **self.arrays())
        atomic_write(Path(path), data.getvalue())

    def _begin(self, layer: LayerMaps) -> None:
        """Add a layer whose forward begins; the first layer of a new forward drops the layers of the last forward.

        Within a call of the network a layer may run again (shared blocks). The begin of its methods, such as
        `forward_intermediates`, cannot be seen: there a layer's second run belongs to the next call.
        """
        begins = self._is_first if self._in_call else layer.number in self._layers
        if begins:
            self._layers.clear()
        elif layer.number in self._layers and not self._repeats:
            self._repeats = True
            _say_last_run(str(layer))
        self._is_first = False
        self._layers[layer.number] = layer

    def _call_begins(self, *_) -> None:
        self._in_call = self._is_first = True

    def _call_ends(self, *_) -> None:
        self._in_call = False
