"""How the Triton kernels go over the maps: a default tile for each shape, which triton.autotune compares with others.

The first launch of a kernel at a shape that fills the GPU is timed with a few tiles, and Triton keeps the fastest in
its cache (~/.triton/cache, or $TRITON_CACHE_DIR). What Triton does not do is here: a default by shape, whose block of
pixels that a program keeps is not tried otherwise, since partial sums are laid out by it; and which launches are too
small to be timed. EA_VISION_TILES=default takes the defaults alone, so that sums are rounded alike on every machine of
a kind. While a CUDA graph is captured nothing is timed.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ea_vision.base.errors import UsageError

SMALL_MEMORY = (
    (8, 6),
    (8, 9),
    (12, 0),
    (12, 1),
)  # 100 KiB of shared memory a multiprocessor, 99 a block
BY_KEYS = ("logits_backward", "keys_backward")  # the others' programs keep queries
MODE = os.environ.get("EA_VISION_TILES") or "tune"
if MODE not in ("tune", "default"):
    raise UsageError(f"EA_VISION_TILES must be one of tune, default, got {MODE!r}")


class Tile(NamedTuple):
    """How a kernel goes over the maps: a program keeps a block of one side's pixels and steps over the other's.

    warps: of a program; stages: blocks that are on their way at a time; registers: at most so many a thread, 0: any.
    """

    queries: int = 16
    keys: int = 16
    warps: int = 8
    stages: int = 2
    registers: int = 0


def default_tile(name: str, S: Any, conv: bool, attends: bool = True) -> Tile:
    """Return the tile of a shape that nobody has timed. conv, attends: what the kernel does, where it does not always;
    of `weight_backward` conv is whether it mixes."""
    half = S.DTYPE != "torch.float32"
    K, width = S.KP, S.KP * max(S.DP, S.EP)
    many, wide = K > 8, width > 512
    warps = 16 if many else 8
    roomy = (
        half and not many and not wide
    )  # a tile leaves room for larger ones, or for two at a time
    stages = 2 if roomy and not S.SMALL else 1
    limit = (
        128 if half and width <= 256 else 0
    )  # two blocks of 256 threads share a multiprocessor's registers
    if S.KS == 5 and (name == "weight_backward" or conv and name in ("evolve", "queries_backward")):
        stages, limit = (
            1,
            0,
        )  # five rows of taps: two stages take more shared memory than there is, a limit spills
    few = (
        half and conv and K <= 4 and width >= 256
    )  # by eight warps four heads are done in part twice, and spill
    if few and name in ("evolve", "queries_backward"):
        return Tile(16, 16, 4, stages)
    if name == "evolve":
        if many or wide:
            mixes = many and half and not conv and not attends  # 76 registers by itself, one block
            return Tile(8 if many and conv else 16, 16, warps, 1, 64 if mixes else 0)
        # Twice the queries halve the reads of k; a convolution and float32 need the room themselves
        return Tile(16 if conv or not half else 32, 16, 8, stages, limit)
    if name == "logits_backward":
        return Tile(16, 8 if many else 16, 4 if few else 8, 2 if roomy else 1)
    if name == "weight_backward":
        two = roomy and conv and S.KS != 5 and S.N > 64  # of 7x7 they spill
        return Tile(8 if many else 16, 16, 8, 2 if two else 1, limit)
    if name == "queries_backward":
        return Tile(8 if many and conv else 16, 16, 8, stages, limit)
    return Tile(16, 32 if roomy else 16, warps, 2 if half else 1)  # keys_backward


def candidates(kernel: str, tile: Tile) -> list[Tile]:
    """Return the tiles that a launch is timed with: its default and at most five that step and compile differently."""
    side = "queries" if kernel in BY_KEYS else "keys"
    twice = {side: 2 * getattr(tile, side)} if getattr(tile, side) < 32 else {}
    limited = {"registers": 0 if tile.registers else 128} if tile.warps == 8 else {}
    others = (
        {"stages": 3 - tile.stages},
        twice,
        twice | {"stages": 1},
        {"warps": tile.warps // 2, "registers": 0},
        limited,
    )
    return list(dict.fromkeys([tile, *(tile._replace(**changed) for changed in others)]))


def milliseconds(call: Callable[[], Any], quantiles: tuple[float, ...]) -> list[float]:
    """Time a launch for triton.autotune."""
    from triton.testing import do_bench

    return do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@functools.lru_cache(maxsize=4096)
def tuned(kernel: Any, tile: Tile, S: Any) -> Any:
    """Return triton.autotune's form of a kernel for a `Shape`; it is called without the stepped side."""
    import triton

    side, stepped = ("queries", "I") if kernel.__name__ in BY_KEYS else ("keys", "J")
    configs = [
        triton.Config(
            {stepped: getattr(other, side)},
            other.warps,
            other.stages,
            maxnreg=other.registers or None,
        )
        for other in candidates(kernel.__name__, tile)
    ]
    known = [name for name in kernel.arg_names if name.isupper() and name != stepped]
    in_place = ["maps"] if "stored" in S.GIVEN else None  # multiplied as they are read
    return triton.autotune(
        configs, known, restore_value=in_place, do_bench=milliseconds, cache_results=True
    )(kernel)


def tunes(device: torch.device, programs: int, constants: dict) -> bool:
    """Return whether triton.autotune is asked about a launch."""
    return (
        MODE == "tune"
        and "J" in constants
        and device.type == "cuda"
        and programs >= torch.cuda.get_device_properties(device).multi_processor_count
    )
