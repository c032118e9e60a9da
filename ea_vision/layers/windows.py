"""Windows of pixels and of neighbouring heads: which entries of a map a query sees.

Paper: `Convolutional Self-Attention Networks` - https://arxiv.org/abs/1904.03107 (windows there are of text)

Shape letters: K heads, N pixels of a map.
"""

from torch import nn

from ea_vision.ops import Size, check_windows
from ea_vision.ops.rel_pos import reaches


class SeesWindows:
    """A mixin for an attention layer with `num_heads`.

    Attributes:
        window: odd (height, width) in pixels, or None for the whole map.
        head_window: odd number of neighbouring heads under one softmax.
        head_border: "clip" or "wrap".
        local: whether a query sees only a part of the map, or other heads.
    """

    def set_windows(
        self,
        window: int | Size | None,
        head_window: int,
        head_border: str,
        evolution: nn.Module | None,
    ) -> None:
        """Set the windows of the layer.

        Raises:
            ValueError: a window is even, a ring has fewer heads than head_window, or the evolution does not support it.
        """
        self.window = check_windows(window, head_window, head_border, self.num_heads)
        self.head_window = head_window
        self.head_border = head_border
        self.local = self.window is not None or head_window > 1
        if evolution is not None and head_window > 1:
            raise ValueError(f"head_window must be 1 where maps evolve, got {head_window}")
        if evolution is not None and window is not None and evolution.mixes_attn:
            raise ValueError(
                f"window must be None with {type(evolution).__name__}, which mixes maps after the "
                f"softmax and would reach beyond the window; got {window}"
            )

    def map_elements(self, feat_size: Size) -> int:
        """Return the number of query-key pairs that attention reads on a map of (height, width), in all heads."""
        K = self.num_heads
        heads = K * self.head_window
        if self.head_border == "clip":
            heads = _count_pairs(K, min(K, self.head_window // 2 + 1))
        high, wide = reaches(feat_size, self.window)
        rows = _count_pairs(feat_size[0], high)
        columns = _count_pairs(feat_size[1], wide)
        return heads * rows * columns


def _count_pairs(size: int, most: int) -> int:
    """Count the ordered pairs among `size` positions that are less than `most` apart."""
    return sum(size - abs(offset) for offset in range(1 - most, most))
