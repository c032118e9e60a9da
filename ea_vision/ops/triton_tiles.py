"""How the Triton kernels go over the maps: the tile of each launch, the compiler's figures' choice or the GPU's own.

A shape is launched with the tile that docs/kernels.md gives reasons for, until the GPU has timed it: the first launch
of a kernel at a shape that is large enough to fill the GPU is run with a few other tiles, and the fastest is taken from
then on. It is kept in a file of the cache folder, which the next process reads. The block that a program keeps never
changes, since partial sums are laid out by it.

EA_VISION_TILES says what is allowed:

* `tune`, the default: as above;
* `kept`: what the file has, but nothing is timed;
* `default`: neither, so that sums are rounded alike on every machine of a kind.

Nothing is timed while a CUDA graph is captured. Each process tunes for itself: ranks on GPUs of one kind may take
different tiles until they start again, which changes the rounding of their gradients and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ea_vision
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import cache_root, create, write_json

MODES = ("tune", "kept", "default")
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # 100 KiB of shared memory a multiprocessor, 99 a block
BY_KEYS = ("logits_backward", "keys_backward")  # the others' programs keep queries

_logger = logging.getLogger(__name__)


def mode_of(value: str | None) -> str:
    """The mode that EA_VISION_TILES asks for.

    Raises:
        ValueError: another value than one of MODES.
    """
    if not value:
        return MODES[0]
    if value not in MODES:
        raise ValueError(f"EA_VISION_TILES must be one of {', '.join(MODES)}, got {value!r}")
    return value


MODE = mode_of(os.environ.get("EA_VISION_TILES"))


class Tile(NamedTuple):
    """How a kernel goes over the maps: a program keeps a block of one side's pixels and steps over the other's.

    warps: of a program; stages: blocks that are on their way at a time; registers: at most so many a thread, 0: any.
    """

    queries: int = 16
    keys: int = 16
    warps: int = 8
    stages: int = 2
    registers: int = 0


def default_tile(name: str, dtype: torch.dtype, sizes: dict, conv: bool, attends: bool = True) -> Tile:
    """The tile of a shape that nobody has timed. conv, attends: what the kernel does, where it does not always;
    of `weight_backward` conv is whether it mixes."""
    half = dtype != torch.float32
    K, width = sizes["KP"], sizes["KP"] * max(sizes["DP"], sizes["EP"])
    wide = width > 512
    many = K > 8
    warps = 16 if many else 8
    roomy = half and not many and not wide  # a tile leaves room for larger ones, or for two at a time
    stages = 2 if roomy and not sizes["SMALL"] else 1
    limit = 128 if half and width <= 256 else 0  # two blocks of 256 threads share a multiprocessor's registers
    if sizes["KS"] == 5 and (name == "weight_backward" or conv and name in ("evolve", "queries_backward")):
        stages, limit = 1, 0  # five rows of taps: two stages take more shared memory than there is, a limit spills
    few = half and conv and K <= 4 and width >= 256  # by eight warps four heads are done in part twice, and spill
    if name == "evolve":
        if many or wide:
            mixes = many and half and not conv and not attends  # 76 registers by itself, one block
            return Tile(8 if many and conv else 16, 16, warps, 1, 64 if mixes else 0)
        if few:
            return Tile(16, 16, 4, stages)
        # Twice the queries halve the reads of k; a convolution and float32 need the room themselves
        return Tile(16 if conv or not half else 32, 16, 8, stages, limit)
    if name == "logits_backward":
        return Tile(16, 8 if many else 16, 4 if few else 8, 2 if roomy else 1)
    if name == "weight_backward":
        two = roomy and conv and sizes["KS"] != 5 and sizes["N"] > 64  # of 7x7 they spill
        return Tile(8 if many else 16, 16, 8, 2 if two else 1, limit)
    if name == "queries_backward":
        if few:
            return Tile(16, 16, 4, stages)
        return Tile(8 if many and conv else 16, 16, 8, stages, limit)
    if name == "keys_backward":
        return Tile(16, 32 if roomy else 16, warps, 2 if half else 1)
    return Tile()


def candidates(kernel: str, tile: Tile, half: bool) -> list[Tile]:
    """The tiles that a launch is timed with: its own and at most five others, which step and compile differently."""
    side = "queries" if kernel in BY_KEYS else "keys"
    twice = {side: 2 * getattr(tile, side)} if getattr(tile, side) < 32 else {}
    limited = {"registers": 0 if tile.registers else 128} if half and tile.warps == 8 else {}
    others = ({"stages": 3 - tile.stages}, twice, twice | {"stages": 1}, {"warps": tile.warps // 2, "registers": 0},
              limited)
    return list(dict.fromkeys([tile, *(tile._replace(**changed) for changed in others)]))


@functools.lru_cache(maxsize=4096)
def shape_of(kernel: str, constants: tuple[tuple[str, Any], ...]) -> str:
    """What a tile is chosen for, as text: the precision, sizes and flags that a kernel is compiled with."""
    values = dict(constants)
    words = [kernel, str(values["OP"])] if "OP" in values else [kernel]
    for name in ("K", "D", "E", "N", "H", "W", "KS", "PREFIX", "UNIT", "UNIT_V", "UNIT_OUT"):
        if values.get(name):
            words.append(f"{name}{values[name]}")
    words += [name for name, value in constants if value is True and name not in ("SPLIT", "SMALL")]
    words += [name for name, value in constants if name.endswith("_ROW") and value >= 0]
    return " ".join(words)


class Measured(NamedTuple):
    """Of a launch: milliseconds, and words a thread that spill to memory."""

    milliseconds: float
    spilled: int = 0


class Refused(Exception):
    """A launch that this GPU does not take: too much shared memory, too many registers or threads."""


class Tuner:
    """Chooses the tiles of one GPU.

    Args:
        file: where they are kept; None: for as long as the process lives.
        facts: what they hold for; the file's must be the same.
        compiled: compiles a launch, runs it once, and gives the words a thread that spill, or raises Refused.
        timed: milliseconds of a launch that has been run before.
        fills: how many programs a launch must have to be timed.
        capturing: whether a CUDA graph is being captured.
    """

    def __init__(self, file: Path | None, facts: dict[str, str], *, compiled: Callable[[Any], int],
                 timed: Callable[[Any], float], fills: int, capturing: Callable[[], bool]):
        self.file, self.facts, self.fills = file, facts, fills
        self._compiled, self._timed, self._capturing = compiled, timed, capturing
        self._tiles = self._read()

    def tile_for(self, launch: Any) -> Tile:
        """The tile that the launch is to have; the first of its shape, if it is large enough, is timed here."""
        if MODE == "default" or "J" not in launch.constants:
            return launch.tile
        tile = self._tiles.get(launch.shape)
        if tile is not None:
            return tile if _keeps(launch.kernel.__name__, tile, launch.tile) else launch.tile
        if MODE != "tune" or launch.programs < self.fills or self._capturing():
            return launch.tile
        return self.tune(launch)[0]

    def tune(self, launch: Any) -> tuple[Tile, dict[Tile, float], dict[Tile, str]]:
        """Time the launch's candidates and keep the fastest; also milliseconds by tile, and why others were left out.

        A tile is not timed where the GPU refuses it or where it spills more than the launch's own.
        """
        began = time.perf_counter()
        launch = launch.repeatable()
        times: dict[Tile, float] = {}
        without: dict[Tile, str] = {}
        most = None
        for tile in candidates(launch.kernel.__name__, launch.tile, launch.half):
            other = launch.with_tile(tile)
            try:
                spilled = self._compiled(other)
            except Refused as error:
                without[tile] = str(error)
                continue
            if most is not None and spilled > most:
                without[tile] = f"{spilled} words spill, {most} with {tuple(launch.tile)}"
                continue
            most = spilled if most is None else most
            times[tile] = self._timed(other)
        best = min(times, key=times.__getitem__, default=launch.tile)
        self._keep(launch.shape, best)
        _logger.info("tile %s for %s: the fastest of %d, found in %.1f s", tuple(best), launch.shape, len(times),
                     time.perf_counter() - began)
        return best, times, without

    def _read(self) -> dict[str, Tile]:
        """What the file has; nothing where it is not there, is another GPU's, or cannot be read, which is logged."""
        if self.file is None:
            return {}
        try:
            found = json.loads(self.file.read_text())
            if found["facts"] != self.facts:
                return {}
            tiles = {shape: Tile(*tile) for shape, tile in found["tiles"].items()}
            if not all(isinstance(n, int) and n >= 0 for tile in tiles.values() for n in tile):
                raise ValueError("a tile is five numbers")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _logger.warning("the tiles kept in %s cannot be read and are found anew: %s: %s", self.file,
                            type(error).__name__, error)
            return {}
        return tiles

    def _keep(self, shape: str, tile: Tile) -> None:
        """Add a tile to the file; what another process has written meanwhile stays there and counts from now on."""
        self._tiles[shape] = tile
        if self.file is None:
            return
        self._tiles = self._read() | self._tiles
        try:
            create(self.file.parent)
            write_json(self.file, {"facts": self.facts, "tiles": self._tiles})
        except (RunError, UsageError) as error:
            self.file = None
            _logger.warning("the tiles found are lost when this process ends: %s", error)


def _keeps(kernel: str, tile: Tile, own: Tile) -> bool:
    """Whether a tile keeps the block by which the launch's partial sums are laid out."""
    return tile.keys == own.keys if kernel in BY_KEYS else tile.queries == own.queries


def facts_of(device: torch.device) -> dict[str, str]:
    """What a tile was timed on and with: GPU, versions, and a digest of the kernels' own text."""
    text = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("triton_kernels.py", "triton_tiles.py"))
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "GPU": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}", "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"), "ea_vision": ea_vision.__version__,
        "kernels": hashlib.sha256(text).hexdigest()[:16],
    }


def file_of(facts: dict[str, str]) -> Path:
    """Where tiles are kept: in `cache_root`, a file for each set of facts."""
    name = "".join(c if c.isalnum() else "-" for c in facts["GPU"])
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return cache_root() / f"tiles-{name}-{digest}.json"


def _compiled(launch: Any) -> int:
    """Compile the launch and run it once: words a thread that spill.

    Raises:
        Refused: the GPU or its assembler does not take it.
    """
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        built = launch.run()
    except (OutOfResources, PTXASError) as error:
        raise Refused(f"{type(error).__name__}: {str(error)[:200]}") from error
    return built.n_spills


def _timed(launch: Any, budget: float = 10.0) -> float:
    """Milliseconds of the launch: the mean of 3 to 30 runs, about `budget` milliseconds."""
    def run(times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            launch.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times

    return run(min(30, max(3, round(budget / max(run(1), 1e-3)))))


@functools.cache
def tuner_of(device: torch.device) -> Tuner | None:
    """The tuner of a GPU; None of any other device."""
    if device.type != "cuda":
        return None
    facts = facts_of(device)
    try:
        file = file_of(facts)
    except RuntimeError as error:
        _logger.warning("the tiles found are lost when this process ends: %s", error)  # the user has no home
        file = None
    return Tuner(
        file, facts, compiled=_compiled, timed=_timed,
        fills=torch.cuda.get_device_properties(device).multi_processor_count,
        capturing=torch.cuda.is_current_stream_capturing)
