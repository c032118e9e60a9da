"""How tiles are timed and kept, with a made timer in place of a GPU; test_triton.py runs it with the kernels."""
import json
import logging
from typing import NamedTuple

import pytest
import torch

from ea_vision.ops import triton_tiles as ours
from ea_vision.ops.triton_tiles import Refused, Tile, Tuner


class Kernel:
    __name__ = "evolve"


class Launch(NamedTuple):
    tile: Tile = Tile()
    shape: str = "evolve bf16 K8"
    programs: int = 200
    constants: dict = {"J": 16}
    kernel: type = Kernel
    half: bool = True

    def repeatable(self):
        return self

    def with_tile(self, tile):
        return self._replace(tile=tile)


def tuner(file, times=None, spills=None, refuses=(), **options):
    """One that takes each tile to last times[tile], or 9 ms, and says what was timed."""
    timed = []

    def compiled(launch):
        if launch.tile in refuses:
            raise Refused("OutOfResources: shared memory")
        return (spills or {}).get(launch.tile, 0)

    def milliseconds(launch):
        timed.append(launch.tile)
        return (times or {}).get(launch.tile, 9.0)

    options = {"fills": 132, "capturing": lambda: False, "facts": {"GPU": "one"}} | options
    made = Tuner(file, options.pop("facts"), compiled=compiled, timed=milliseconds, **options)
    return made, timed


FAST = Tile(keys=32)


def test_the_fastest_is_kept_and_read_again(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "folder" / "tiles.json"
    one, timed = tuner(file, {FAST: 5.0})
    assert one.tile_for(Launch()) == FAST and len(timed) == len(set(timed)) == len(
        ours.candidates("evolve", Tile(), True))
    assert "the fastest of" in caplog.text and "evolve bf16 K8" in caplog.text
    assert one.tile_for(Launch()) == FAST and len(timed) <= 6  # once a shape
    assert json.loads(file.read_text()) == {"facts": {"GPU": "one"}, "tiles": {"evolve bf16 K8": list(FAST)}}
    again, timed = tuner(file)
    assert again.tile_for(Launch()) == FAST and timed == []
    other, timed = tuner(file, facts={"GPU": "another"})
    assert other.tile_for(Launch()) == Tile() and timed


def test_what_does_not_fit_or_spills_is_not_timed(tmp_path):
    refused, spills = Tile(stages=1), Tile(registers=128)
    one, timed = tuner(tmp_path / "t.json", {refused: 1.0, spills: 1.0, FAST: 5.0}, {spills: 2}, [refused])
    best, times, without = one.tune(Launch())
    assert best == FAST and set(times) == set(timed) and not {refused, spills} & set(timed)
    assert "shared memory" in without[refused] and without[spills].startswith("2 words spill, 0 with")
    # where its own spills as much, it may win; where all are refused, its own stays
    both = dict.fromkeys(ours.candidates("evolve", Tile(), True), 2)
    assert tuner(None, {spills: 1.0}, both)[0].tune(Launch())[0] == spills
    assert tuner(None, refuses=list(both))[0].tune(Launch())[:2] == (Tile(), {})


@pytest.mark.parametrize("reason", ("captured", "small", "kept", "default", "nothing to choose"))
def test_when_nothing_is_timed(reason, tmp_path, monkeypatch):
    options = {"capturing": lambda: True} if reason == "captured" else {}
    one, timed = tuner(tmp_path / "t.json", {FAST: 5.0}, **options)
    launch = Launch()
    if reason == "small":
        launch = Launch(programs=131)
    elif reason == "nothing to choose":
        launch = Launch(constants={"I": 16})
    elif reason in ours.MODES:
        monkeypatch.setattr(ours, "MODE", reason)
    assert one.tile_for(launch) == Tile() and timed == [] and not (tmp_path / "t.json").exists()
    one.tune(Launch())  # what is known is used, but not in mode `default`
    if reason != "nothing to choose":
        assert one.tile_for(launch) == (Tile() if reason == "default" else FAST)


def test_files_that_cannot_be_used(tmp_path, caplog):
    file = tmp_path / "tiles.json"
    for text in ("", "[]", '{"facts": {"GPU": "one"}}', '{"facts": {"GPU": "one"}, "tiles": {"x": ["a", 1, 1, 1, 1]}}'):
        file.write_text(text)
        caplog.clear()
        one, timed = tuner(file, {FAST: 5.0})
        assert "cannot be read and are found anew" in caplog.text, text
        assert one.tile_for(Launch()) == FAST
        assert list(json.loads(file.read_text())["tiles"]) == ["evolve bf16 K8"]
    (tmp_path / "no folder").write_text("")
    one, timed = tuner(tmp_path / "no folder" / "tiles.json", {FAST: 5.0})
    caplog.clear()
    assert one.tile_for(Launch()) == FAST == one.tile_for(Launch())
    assert one.tile_for(Launch(shape="another")) == FAST and caplog.text.count("lost when this process ends") == 1


def test_two_processes_write_one_file(tmp_path):
    file = tmp_path / "tiles.json"
    (one, _), (two, _) = (tuner(file, {FAST: 5.0}) for _ in range(2))
    one.tile_for(Launch(shape="a"))
    two.tile_for(Launch(shape="b"))
    assert set(json.loads(file.read_text())["tiles"]) == {"a", "b"}
    assert two.tile_for(Launch(shape="a")) == FAST


def test_a_tile_with_another_block_is_not_used(tmp_path):
    """Partial sums are laid out by the block that a program keeps."""
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps({"facts": {"GPU": "one"}, "tiles": {"evolve bf16 K8": [8, 16, 8, 2, 0]}}))
    assert tuner(file)[0].tile_for(Launch()) == Tile()
    for kernel in ("evolve", "keys_backward"):
        tiles = ours.candidates(kernel, Tile(16, 32), True)
        assert 2 < len(tiles) <= 6 and len({t.keys if kernel == "keys_backward" else t.queries for t in tiles}) == 1
        assert all(max(t.queries, t.keys) <= 32 for t in tiles)


def test_shapes_tell_what_the_kernel_is_compiled_for():
    made = {"K": 8, "N": 196, "PREFIX": 0, "UNIT": 4, "OWN": True, "MAPS": False, "OWN_ROW": 2, "MAPS_ROW": -1, "I": 16,
            "SPLIT": True}
    assert ours.shape_of("evolve", tuple(made.items())) == "evolve K8 N196 UNIT4 OWN OWN_ROW"


def test_modes_and_devices(monkeypatch, tmp_path):
    assert ours.mode_of(None) == ours.mode_of("") == "tune" and ours.mode_of("kept") == "kept"
    with pytest.raises(ValueError, match="tune, kept, default, got 'no'"):
        ours.mode_of("no")
    assert ours.tuner_of(torch.device("cpu")) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = ours.file_of({"GPU": "NVIDIA H100/80 GB", "triton": "3.6.0"})
    assert first.parent == tmp_path / "ea_vision" and first.name.startswith("tiles-NVIDIA-H100-80-GB-")
    assert first != ours.file_of({"GPU": "NVIDIA H100/80 GB", "triton": "3.7.0"})
