"""Tiles of the Triton kernels, one for each kernel and shape.

Tiles are chosen by the code they compile to (experiments/kernel_figures.py): no spilled registers, and as many blocks
per multiprocessor as fit. Timing other tiles at first use gained nothing on an H200 (experiments/kernels.md).
"""

from typing import Any, NamedTuple

# compute capabilities with 100 KiB of shared memory per multiprocessor, 99 KiB per block
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
BY_KEYS = ("logits_backward", "keys_backward")  # a program keeps keys, in other kernels queries
BY_QUERIES = ("evolve", "queries_backward", "weight_backward")
LONG_SIDES = 32  # H + W above this: position tables need many registers


class Tile(NamedTuple):
    """Block sizes of a kernel: a program keeps a block of queries (or keys) and loops over blocks of the other side.

    warps: per program; stages: blocks that are loaded at a time; registers: limit per thread, 0 for none.
    """

    queries: int = 16
    keys: int = 16
    warps: int = 8
    stages: int = 2
    registers: int = 0


def default_tile(name: str, S: Any, conv: bool, attends: bool = True) -> Tile:
    """Return the tile of a shape.

    Args:
        name: of the kernel.
        S: a `triton_attention.Shape`.
        conv: whether the kernel convolves; for `weight_backward`, whether it mixes.
        attends: whether `evolve` also computes the softmax and the output.
    """
    many_heads = S.KP > 8
    if S.RELATIVE and S.H + S.W > LONG_SIDES and not many_heads and name in BY_QUERIES:
        return Tile(16, 16, 8, 1)  # the tables need the registers
    if name == "evolve":
        return _evolve_tile(S, conv, attends)
    if name == "logits_backward":
        return _logits_backward_tile(S, conv)
    if name == "weight_backward":
        return _weight_backward_tile(S, conv)
    if name == "queries_backward":
        return _queries_backward_tile(S, conv)
    return _keys_backward_tile(S)


def _is_half(S: Any) -> bool:
    return S.DTYPE != "torch.float32"


def _width(S: Any) -> int:
    """Return the width of all heads together, padded."""
    return S.KP * max(S.DP, S.EP)


def _is_roomy(S: Any) -> bool:
    """Return whether there is room for larger tiles, or for two stages."""
    return _is_half(S) and S.KP <= 8 and _width(S) <= 512


def _stages(S: Any) -> int:
    return 2 if _is_roomy(S) and not S.SMALL else 1


def _register_limit(S: Any) -> int:
    """Return 128 if two blocks of 256 threads should share a multiprocessor's registers, else 0."""
    return 128 if _is_half(S) and _width(S) <= 256 else 0


def _has_few_wide_heads(S: Any, conv: bool) -> bool:
    """Return whether eight warps would compute parts of four heads twice, and spill registers."""
    return _is_half(S) and conv and S.KP <= 4 and _width(S) >= 256


def _evolve_tile(S: Any, conv: bool, attends: bool) -> Tile:
    many_heads = S.KP > 8
    if _has_few_wide_heads(S, conv):
        # five rows of taps: two stages take more shared memory than there is
        return Tile(16, 16, 4, 1 if S.KS == 5 else _stages(S))
    if many_heads:
        mixes = _is_half(S) and not conv and not attends  # needs 76 registers by itself
        return Tile(8 if conv else 16, 16, 16, 1, 64 if mixes else 0)
    if _width(S) > 512:
        return Tile(16, 16, 8, 1)
    if conv and S.KS == 5:
        return Tile(16, 16, 8, 1)  # with a register limit it spills
    # twice the queries halve the reads of k; a convolution or float32 leaves no room for them
    queries = 16 if conv or not _is_half(S) else 32
    return Tile(queries, 16, 8, _stages(S), _register_limit(S))


def _logits_backward_tile(S: Any, conv: bool) -> Tile:
    keys = 8 if S.KP > 8 else 16
    warps = 4 if _has_few_wide_heads(S, conv) else 8
    return Tile(16, keys, warps, 2 if _is_roomy(S) else 1)


def _weight_backward_tile(S: Any, mixes: bool) -> Tile:
    queries = 8 if S.KP > 8 else 16
    if S.KS == 5:
        return Tile(queries, 16, 8, 1)
    two_stages = _is_roomy(S) and mixes and S.N > 64  # on 7x7 maps they spill
    return Tile(queries, 16, 8, 2 if two_stages else 1, _register_limit(S))


def _queries_backward_tile(S: Any, conv: bool) -> Tile:
    if _has_few_wide_heads(S, conv):
        return Tile(16, 16, 4, 1 if S.KS == 5 else _stages(S))
    queries = 8 if S.KP > 8 and conv else 16
    if conv and S.KS == 5:
        return Tile(queries, 16, 8, 1)
    return Tile(queries, 16, 8, _stages(S), _register_limit(S))


def _keys_backward_tile(S: Any) -> Tile:
    warps = 16 if S.KP > 8 else 8
    return Tile(16, 32 if _is_roomy(S) else 16, warps, 2 if _is_half(S) else 1)
