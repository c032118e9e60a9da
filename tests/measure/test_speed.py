"""The benchmark: fair turns, figures that follow from the times, floors counted by hand, an error in one line."""
import csv
import io

import pytest
import timm
import torch

from ea_vision.base.errors import exit_code
from ea_vision.base.networks import lay_out
from ea_vision.base.tables import shown
from ea_vision.measure import speed
from ea_vision.measure.branches import branches_of
from ea_vision.measure.peak_memory import KEEP_MEMORY, memory_in_own_process
from ea_vision.measure.speed_report import Row, baseline_of, to_csv, to_tables
from ea_vision.measure.steps import Bench, Setting, interleaved

TINY = ["--device", "cpu", "--batch-size", "2", "--img-size", "32", "--repeats", "1", "--threads", "1"]


def test_channels_last_leaves_weights_of_other_dimensions_alone():
    """timm's lambda networks have 3-D convolutions, which `Module.to` refuses."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv3d(2, 4, 3), torch.nn.Linear(3, 3))
    before = [p.clone() for p in model.parameters()]
    assert lay_out(model, torch.channels_last) is model
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) and not model[0].weight.is_contiguous()
    assert model[1].weight.is_contiguous() and all(map(torch.equal, model.parameters(), before))


def test_a_setting_leaves_the_process_as_it_was():
    threads = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), Setting(2, 32, "cpu", threads=threads + 1).active():
        assert torch.get_num_threads() == threads + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads


def test_turns_are_interleaved_and_medians_are_of_the_counted_ones():
    turns, pauses, now = [], iter((5000, 30, 90, 20)), [0]

    def a():
        turns.append("a")
        now[0] += next(pauses)

    seconds = interleaved({"a": a, "b": lambda: turns.append("b")}, repeats=3, warm_up=1, clock=lambda: now[0])
    rounds = [turns[i:i + 2] for i in range(0, 8, 2)]
    assert all(sorted(turn) == ["a", "b"] for turn in rounds) and len({*map(tuple, rounds)}) == 2, "in any order"
    assert seconds == {"a": 30, "b": 0}, "the median; the warm-up does not count"


def test_baseline_is_the_resnet_of_the_same_depth():
    assert [baseline_of(name) for name in ("ea_aa_resnet101", "resnet34", "halonet50ts", "botnet50ts_256")] == [
        "resnet101", "resnet34", "resnet50", "resnet50"]
    assert baseline_of("ea_conv_transformer_cifar") is None
    assert baseline_of("ea_vit_tiny_patch16_224") == baseline_of("vit_tiny_patch16_224") == "vit_tiny_patch16_224"
    assert baseline_of("pa_deit_base_patch16_224") == "deit_base_patch16_224"


def test_all_is_what_is_registered_for_about_this_size():
    large, small = speed.all_networks(224), speed.all_networks(32)
    assert all(map(timm.is_model, [*large, *small])) and not set(large) & set(small)
    assert {"resnet152", "aa_resnet34", "pa_aa_resnet152", "ea_aa_resnet101", "halonet50ts"} <= set(large)
    assert {"cnn_cifar", "ea_conv_transformer_cifar"} <= set(small)
    assert {baseline_of(name) for name in large if "resnet" in name or name.startswith("ea_vit")} <= set(large)
    names, optional = speed.networks_asked_for(["resnet50", "all", "resnet50"], 224)
    assert sorted(names) == sorted(large) and names[0] == "resnet50" and optional == {*large} - {"resnet50"}


def test_branches_move_the_bytes_counted_by_hand():
    bench = Bench(Setting(batch_size=2, img_size=32, device="cpu"))
    model = timm.create_model("ea_conv_transformer_cifar", widths=(16, 32, 64, 64))
    first, counts = branches_of(bench, model)
    assert sum(counts.values()) == 6 and all("attend" not in vars(layer.layer) for layer in first.values())
    stages = {branch.stage for branch in first.values()}
    assert stages == {"8x8, maps 8x8", "4x4, maps 4x4"}
    at_8x8 = [branch for branch in first.values() if branch.stage == "8x8, maps 8x8"]
    layer, small, one_map = at_8x8[0].layer, 0, 4 * 2 * 4 * 64 * 64  # float32, 2 images, 4 heads, 64 x 64
    small = 4 * 2 * 64 * 2 * (layer.dim_qk + layer.dim_v)  # q, k, v, result
    reads_and_writes = {(branch.prev_logits is not None, branch.need_logits): branch.infer_bytes for branch in at_8x8}
    assert reads_and_writes == {(False, True): small + one_map, (True, True): small + 2 * one_map,
                                (True, False): small + one_map}
    chained = next(b for b in at_8x8 if b.prev_logits is not None and b.need_logits)
    # backward: previous logits, own logits' gradient, previous ones' gradient; q, k, v; three and one gradients
    assert chained.train_bytes - chained.infer_bytes == 3 * one_map + 4 * 2 * 64 * (4 * layer.dim_qk + 3 * layer.dim_v)


def test_branches_of_a_vision_transformer():
    """Every way through the branch gives what the network gets, and moves the bytes counted by hand."""
    bench = Bench(Setting(batch_size=2, img_size=32, device="cpu"))
    options = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3)
    model = timm.create_model("ea_vit_tiny_patch16_224", **options)
    assert not branches_of(bench, timm.create_model("vit_tiny_patch16_224", **options))[0]
    first, counts = branches_of(bench, model)
    assert sorted(counts.values()) == [1, 1, 2] and all("forward" not in vars(b.layer) for b in first.values())
    assert {branch.stage for branch in first.values()} == {"17 tokens"}
    small, one_map = 4 * 2 * 17 * 4 * 48, 4 * 2 * 3 * 17**2  # float32, 2 images: q, k, v, result; 3 heads
    assert {(b.prev_logits is not None, b.need_logits): b.infer_bytes for b in first.values()} == {
        (False, True): small + one_map, (True, True): small + 2 * one_map, (True, False): small + one_map}
    for branch in first.values():
        for what in ("whole", "rest"):
            calls = branch.calls(bench, what, compiled=False)
            calls["train"]()
            outputs = calls["infer"]()
            assert outputs[-1 if what == "rest" else 0].shape == (2, 17, 48)
    with torch.no_grad():
        branch = model.blocks[0].attn
        assert torch.equal(next(iter(first.values())).whole(first_x := next(iter(first.values())).x, None, None)[0],
                           branch(first_x)[0])


def test_a_run(tmp_path, capsys):
    path = tmp_path / "sub" / "speed.csv"
    assert speed.main([*TINY, "--models", "cnn_cifar", "ea_conv_transformer_cifar", "--no-memory",
                           "--opt", "muon", "--cpu-time", "--csv", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in out[0] and "1 threads" in out[0] and "; 20" in out[0]
    assert "batch 2, 32 pixels, float32, contiguous, muon" in out[1]
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert {row["optimizer"] for row in rows} == {"muon"} and {row["clock"] for row in rows} == {"CPU"}
    assert [(row["model"], row["layers"]) for row in rows] == [
        ("cnn_cifar", "0"), *[("ea_conv_transformer_cifar", layers) for layers in ("6", "3", "3")]]
    for row in rows[:2]:
        assert float(row["train_images_per_s"]) == pytest.approx(2000 / float(row["train_ms"]), rel=1e-3)
        assert float(row["infer_ms"]) < float(row["train_ms"]) and row["train_ratio"] == row["memory_mib"] == ""
    for row in rows[2:]:
        assert 0 < float(row["infer_floor_ms"]) < float(row["train_floor_ms"]) and float(row["train_ms"]) > 0


@pytest.mark.slow
def test_runtimes_side_by_side(capsys):
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    names = ["vit_tiny_patch16_224", "ea_vit_tiny_patch16_224"]
    assert speed.main([*TINY, "--models", *names, "--runtime", "eager,onnx", "--cpu-time"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "batch 2, 32 pixels, float32" in out[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out[-4:]]
    assert [row[:2] for row in rows] == [[name, runtime] for name in names for runtime in ("eager", "onnx")]
    for _, runtime, speed_of, ratio, *peaks in rows:
        base = float(next(row[2] for row in rows if row[:2] == [names[0], runtime]))
        assert float(ratio) == pytest.approx(float(speed_of) / base, abs=0.02)
        # above the weights' 21 MiB; at 32 pixels the images of a batch need hardly anything
        assert peaks == ["", ""] if runtime == "eager" else all(20 < float(peak) < 500 for peak in peaks)


def test_tables_with_ratios_and_without():
    rows = [Row("resnet50", mode, "network", 0, 100, 20, 80, 400, 1, 1, 1000 if mode == "eager" else None, None)
            for mode in ("eager", "compiled")]
    rows.append(Row("ea_aa_resnet50", "eager", "branch at 14x14, maps 14x14", 6, 3, 1))
    lines = to_tables(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["resnet50", "eager", "80.00", "1.000", "400.00", "1.000", "1000", "-"]
    assert cells[3][-2:] == ["-", "-"] and "branch at 14x14" in lines[7]
    assert max(map(len, shown("\n".join(lines), terminal=True).splitlines())) <= 100
    assert to_csv(rows, {"torch": "2"}).splitlines()[1].startswith("resnet50,eager,network,0,100,20,80,400,1,1,1000,")


@pytest.mark.slow
def test_memory_is_that_of_the_steps_alone(monkeypatch):
    for name, value in KEEP_MEMORY.items():
        monkeypatch.setenv(name, value)  # the process measured must not have them
    found = memory_in_own_process("resnet18_cifar", Setting(2, 32, "cpu", threads=1))
    weights = 4 * sum(p.numel() for p in timm.create_model("resnet18_cifar").parameters())
    assert found > 3 * weights, "weights, gradients and momentum"
    assert found < 4 * weights, "without python and torch, which take more than this"


@pytest.mark.parametrize("more, message", [
    (["--models", "ea_resnet50"], "unknown model 'ea_resnet50'; did you mean"),
    (["--opt", "muonn"], "unknown optimiser 'muonn'; did you mean"),
    (["--repeats", "0"], "--repeats must be 1 or more, got 0"),
    (["--models", "ea_conv_transformer_cifar", "--implementation", "sdpa"], "'sdpa' cannot run this"),
    (["--runtime", "tensorrt"], "--runtime must be of eager,compiled,onnx, got 'tensorrt'"),
    (["--runtime", "onnx", "--amp", "bfloat16"], "--runtime measures float32 on a CPU"),
    (["--models", "halonet50ts"], "halonet50ts cannot run 2 images of 32 pixels: AssertionError"),
])
def test_bad_input(more, message, capsys):
    assert exit_code(lambda: speed.main([*TINY, *more])) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
