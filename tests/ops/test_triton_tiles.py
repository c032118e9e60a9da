"""Which tiles triton.autotune is given to try; test_triton.py runs it with the kernels, in Triton's interpreter."""
import importlib.util
import json

import pytest
import torch

from ea_vision.ops import triton_tiles as ours
from ea_vision.ops.triton_tiles import Tile

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize("kernel", ("evolve", "keys_backward"))
def test_candidates_keep_the_block_by_which_partial_sums_are_laid_out(kernel):
    tile = Tile(16, 32)
    tiles = ours.candidates(kernel, tile)
    assert tiles[0] == tile and 2 < len(tiles) <= 6 and len(set(tiles)) == len(tiles)
    assert len({each.keys if kernel == "keys_backward" else each.queries for each in tiles}) == 1
    assert all(max(each.queries, each.keys) <= 32 and each.warps >= 4 and each.stages in (1, 2) for each in tiles)


@triton
def test_triton_is_given_the_stepped_side_alone_and_a_key_that_its_cache_can_write():
    from ea_vision.ops import triton_kernels

    kernel = triton_kernels.keys_backward
    constants = {"N": 196, "K": 8, "D": 20, "KP": 8, "DP": 32, "UNIT": 4, "I": 16, "J": 32, "OP": object(),
                 "PRECISION": "tf32", "SHARE_ROW": 2, "STORED_ROW": 0}
    one = ours.tuned(kernel, Tile(16, 32), tuple(constants.items()))
    assert {tuple(config.kwargs) for config in one.configs} == {("I",)} and "I" not in one.keys
    assert set(one.keys) == set(constants) - {"I", "OP"}
    json.dumps([constants[name] for name in one.keys])
    assert one.restore_value == ["maps"]  # multiplied in place
    assert one.configs[0].num_warps == 8 and one.configs[0].maxnreg is None
    assert one is ours.tuned(kernel, Tile(16, 32), tuple(constants.items()))
    other = ours.tuned(kernel, Tile(16, 32, registers=128), tuple((constants | {"STORED_ROW": -1}).items()))
    assert other.restore_value == [] and other.configs[0].maxnreg == 128


@triton
@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: text[:len(text) // 2], lambda text: "null", lambda text: "{}",
    lambda text: "[" * 100000, lambda text: text.replace("configs_timings", "x"),
    lambda text: text.replace("num_warps", "warps"),
    lambda text: text.replace('"I": 16', '"I": 64').replace('"I": 32', '"I": 64'),
    lambda text: text.replace('"I": 16', '"I": 16.0').replace('"I": 32', '"I": 32.0'),
    lambda text: text.replace("[0.5]", "null"), lambda text: "\udcff",
])
def test_a_damaged_file_of_times_is_not_used(damage, tmp_path, monkeypatch, caplog):
    """Triton's own file, read by Triton's own tuner: a whole one is used, another one is timed anew."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from ea_vision.ops import triton_kernels

    if not hasattr(triton_kernels.keys_backward, "cache_key"):
        pytest.skip("Triton's interpreter keeps no times")

    class Device:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(type(driver), "active", Device())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"N": 196, "K": 8, "D": 20, "KP": 8, "DP": 32, "UNIT": 4, "I": 16, "J": 32, "STORED_ROW": 0}
    asked = []

    def new_process():
        ours.tuned.cache_clear()
        tuner = ours.tuned(triton_kernels.keys_backward, Tile(16, 32), tuple(constants.items()))

        def bench():
            asked.append(tuner)
            tuner.configs_timings = {config: [0.5] for config in tuner.configs}
            tuner.cache[(196,)] = tuner.configs[0]

        found = tuner.check_disk_cache((196,), tuner.configs, bench)
        assert str(tuner.cache[(196,)]) in map(str, tuner.configs)
        return found

    assert not new_process() and len(asked) == 1
    assert new_process() and len(asked) == 1 and not caplog.messages
    path, = tmp_path.rglob("*.autotune.json")
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    assert not new_process() and len(asked) == 2
    assert caplog.messages[0].startswith("tiles are timed again, a file of times in Triton's cache")


@triton
def test_faults_of_the_timing_itself_are_not_hidden():
    class Tuner:
        cache = {}

        def check_disk_cache(self, key, configs, bench):
            bench()
            raise OSError("the folder is read-only")

    def fails():
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        ours.guarded(Tuner()).check_disk_cache((), [], fails)
    assert not ours.guarded(Tuner()).check_disk_cache((), [], lambda: None), "times that are not kept"


def test_what_is_timed(monkeypatch):
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda, stepped = torch.device("cuda"), {"J": 16}
    assert ours.tunes(cuda, 132, stepped)
    assert not ours.tunes(cuda, 131, stepped)  # does not fill the GPU
    assert not ours.tunes(cuda, 132, {"I": 16}) and not ours.tunes(torch.device("cpu"), 132, stepped)
    monkeypatch.setattr(ours, "MODE", "default")
    assert not ours.tunes(cuda, 132, stepped)


def test_modes():
    assert ours.mode_of(None) == ours.mode_of("") == "tune" and ours.mode_of("default") == "default"
    with pytest.raises(ValueError, match="tune, default, got 'no'"):
        ours.mode_of("no")
