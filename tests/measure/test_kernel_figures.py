"""The figures that the compiler gives for the Triton kernels, without a GPU."""
import csv
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from ea_vision.measure import kernel_figures as ours
from ea_vision.ops import triton_attention

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if triton_attention.INTERPRETING:
    pytest.skip("needs Triton's compiler", allow_module_level=True)


SPILLED = {  # bytes, in half precision; docs/kernels.md says what is known of them
    ("pa50", "evolve", "12.0"): 48, ("ea-vit-tiny", "evolve", "12.0"): 16,
    ("ea-vit-base", "evolve (convolves)", "10.0"): 184, ("ea-vit-base", "queries_backward", "10.0"): 128,
}


def check(figures, spilled=8):
    """Products on tensor cores, at most so many bytes spilled in half precision, shared memory that the GPU has, none
    of 10.x's tensor memory, where Triton sums chained products wrongly."""
    for f in figures:
        assert (f.products > 0) == (f.kernel != "row_products") and not f.tensor_memory, f
        assert f.shared <= (ours.CHIPS[f.capability].shared_kib - 1) * 1024, f
        if f.dtype != "fp32":
            assert f.spilled <= SPILLED.get((f.layer, f.kernel, f.capability), spilled), f
        assert f.blocks >= 1, f


@pytest.mark.slow
def test_bounds_of_half_precision():
    figures = {f.kernel: f for f in ours.all_figures(["ea50"], ["9.0"], ["bf16"])}
    check(figures.values(), spilled=0)
    assert set(figures) == {"evolve", "evolve (mixes)", "row_products", "logits_backward", "weight_backward",
                            "queries_backward", "keys_backward"}
    for f in figures.values():
        assert f.registers <= 128 and f.blocks >= 2, f
    for kernel, barriers in {"evolve": 4, "logits_backward": 8, "weight_backward": 8, "queries_backward": 6}.items():
        assert figures[kernel].barriers <= barriers, figures[kernel]


@pytest.mark.slow
def test_bounds_of_small_shared_memory_and_of_many_heads():
    check(ours.all_figures(["pa-cifar"], ["8.6", "9.0"], ["fp16"]), spilled=0)  # dropout, and heads 64 wide
    five, = (x for x in ours.launches_of(ours.LAYERS["ea-5x5"], torch.bfloat16, "8.6")
             if x.kernel.__name__ == "weight_backward")  # five rows of taps
    check([ours.figures_of("ea-5x5", five, "8.6", "bf16")], spilled=0)
    assert all(f.shared <= 99 * 1024 for f in ours.all_figures(["ea-vit-base"], ["8.6"], ["bf16"]))


@pytest.mark.skipif(os.environ.get("EA_VISION_TEST_ALL") != "1", reason="EA_VISION_TEST_ALL=1 compiles the whole table")
def test_bounds_of_the_whole_table():
    check(ours.all_figures(list(ours.LAYERS), list(ours.CHIPS), list(ours.DTYPES)))


def test_the_shipped_table_has_all_kernels_and_keeps_the_bounds():
    """What docs/kernels.md says of it, without compiling anything."""
    with open(Path(__file__).parents[2] / "experiments" / "results" / "kernel-figures.csv") as file:
        rows = list(csv.DictReader(file))
    assert {(row["layer"], row["GPU"], row["dtype"]) for row in rows} == {
        (layer, chip, dtype) for layer in ours.LAYERS for chip in ours.CHIPS for dtype in ours.DTYPES
        if ours.LAYERS[layer].heads <= 8 or dtype != "fp32"}
    for row in rows:
        half, spilled = row["dtype"] != "fp32", int(row["spilled"])
        if half:
            assert spilled <= SPILLED.get((row["layer"], row["kernel"], row["GPU"]), 8), row
            assert not spilled or row["layer"] not in ("ea50", "ea50-7", "first", "pa-cifar", "ea-vit-small"), row
        assert spilled <= 696 and row["tcgen05"] == "no", row
    assert f"{len(rows):,} kernels" in (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()


def test_longest_loop_is_found():
    listing = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;
        /*0030*/               @P0 BRA 0x30 ;
        /*0040*/                   FADD R1, R1, R2 ;
        /*0050*/               @P1 BRA 0x10 ;
        /*0060*/                   EXIT ;
    """
    loop = ours.loop_of(listing)
    assert len(loop) == 5 and loop[0].startswith("BAR") and loop[-1] == "@P1 BRA 0x10"


@pytest.mark.parametrize("chip, warps, registers, shared, blocks", (
    ("9.0", 8, 128, 0, 2), ("9.0", 8, 129, 0, 1), ("9.0", 8, 64, 60 * 1024, 3), ("8.6", 8, 64, 49 * 1024, 2),
    ("8.6", 8, 32, 16, 6), ("8.9", 8, 64, 60 * 1024, 1)))
def test_blocks_of_a_multiprocessor(chip, warps, registers, shared, blocks):
    assert ours.blocks_per_multiprocessor(ours.CHIPS[chip], warps, registers, shared) == blocks


def test_launches_are_recorded_not_run():
    launches = ours.launches_of(ours.LAYERS["first"], torch.bfloat16, "9.0")
    assert [x.kernel.__name__ for x in launches] == ["evolve", "row_products", "logits_backward", "queries_backward",
                                                     "keys_backward"]
    assert all(x.programs == 13 for x in launches[1:4])  # 196 pixels by 16


def test_command(capsys, tmp_path, monkeypatch):
    table = tmp_path / "figures.csv"
    monkeypatch.setattr(ours, "all_figures", lambda *args: [
        ours.Figures("ea50", "evolve", "9.0", "bf16", 256, 100, 0, 2048, 2, 300, 16, 6, False)])
    assert ours.main(["--csv", str(table)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["ea50", "evolve", "9.0", "bf16", "256", "100", "0", "2.0", "2", "16", "300", "16",
                                  "6", "no"]
    assert table.read_text().splitlines()[1].split(",") == printed[1].split()
