"""The benchmark: interleaved runs, figures that follow from the times, the steps' own memory, errors in one line."""

import csv
from functools import partial

import pytest
import timm
import torch

from ea_vision.base.errors import exit_code
from ea_vision.models.modes import lay_out
from experiments.benchmark import baseline_of, interleaved, live_network, main
from tests.detection.tiny import tiny_run
from tests.models.zoo import count

TINY = "--device cpu --batch-size 2 --img-size 32 --repeats 1 --threads 1"


def run(options, path):
    """Run the command; return the rows of its file."""
    assert main(f"{TINY} {options} --csv {path}".split()) == 0
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_channels_last_leaves_weights_of_other_dimensions_alone():
    """timm's lambda networks have 3-D convolutions, which `Module.to` refuses."""
    flat = torch.nn.Conv2d(3, 4, 3)
    deep = torch.nn.Conv3d(2, 4, 3)
    model = torch.nn.Sequential(flat, deep, torch.nn.Linear(3, 3))
    before = [p.clone() for p in model.parameters()]
    assert lay_out(model, torch.channels_last) is model
    assert flat.weight.is_contiguous(memory_format=torch.channels_last)
    assert deep.weight.is_contiguous()
    assert all(map(torch.equal, model.parameters(), before))


def test_turns_are_interleaved_and_medians_are_of_the_counted_ones():
    turns = []
    pauses = (5000, 30, 90, 20)
    calls = {name: partial(turns.append, name) for name in "ab"}
    seconds = interleaved(calls, repeats=3, clock=lambda: sum(pauses[: turns.count("a")]))
    rounds = {"".join(turns[i : i + 2]) for i in range(0, 8, 2)}
    assert rounds == {"ab", "ba"}, "in any order"
    assert seconds == {"a": 30, "b": 0}, "the median; the warm-up does not count"


@pytest.mark.parametrize(
    "name, baseline",
    [
        ("ea_aa_resnet101", "resnet101"),
        ("halonet50ts", "resnet50"),
        ("ea_conv_transformer_cifar", None),
        ("ea_vit_tiny_patch16_224", "vit_tiny_patch16_224"),
        ("pa_deit_base_patch16_224", "deit_base_patch16_224"),
    ],
)
def test_baseline_is_the_resnet_of_the_same_depth_or_timms_transformer(name, baseline):
    assert baseline_of(name) == baseline


def test_every_branch_is_alive():
    model = live_network("resnet18", torch.randn(2, 3, 32, 32))
    for module in model.modules():
        assert not isinstance(module, torch.nn.BatchNorm2d) or module.weight.any()
    assert model.training
    assert model.bn1.num_batches_tracked == 2


def test_a_run(tmp_path, capsys):
    threads = torch.get_num_threads()
    options = (
        "--models cnn_cifar vit_tiny_patch16_224 ea_vit_tiny* --no-memory --opt muon --cpu-time"
    )
    rows = run(options, tmp_path / "sub" / "speed.csv")
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out
    assert "1 threads" in out
    assert torch.get_num_threads() == threads
    names = [row["model"] for row in rows]
    assert names == ["cnn_cifar", "vit_tiny_patch16_224", "ea_vit_tiny_patch16_224"]
    for row in rows:
        speed = float(row["train_images_per_s"])
        train_ms = float(row["train_ms"])
        assert speed == pytest.approx(2000 / train_ms, rel=1e-3)
        assert float(row["infer_ms"]) < train_ms
        assert row["memory_mib"] == ""
        assert row["clock"] == "CPU"
        assert row["model"] in out
        assert f"{speed:.2f}" in out
    ratio = float(rows[1]["infer_ms"]) / float(rows[2]["infer_ms"])
    assert float(rows[2]["infer_images_per_s_ratio"]) == pytest.approx(ratio)
    assert f"{ratio:.3f}" in out
    assert rows[0]["train_images_per_s_ratio"] == "", "without its baseline"


@pytest.mark.slow
def test_memory_is_that_of_the_steps_alone(tmp_path):
    [row] = run("--models resnet18_cifar", tmp_path / "m.csv")
    model = timm.create_model("resnet18_cifar")
    weights = 4 * count(model) / 2**20
    # weights, gradients and momentum, and on some CPUs 50 MB of oneDNN's own, but without torch itself, which takes 300
    assert 3 * weights < float(row["memory_mib"]) < 5 * weights


@pytest.mark.parametrize(
    "more, message",
    [
        ("--models ea_resnet5O", "no network fits 'ea_resnet5O'; did you mean"),
        ("--opt muonn", "unknown optimiser 'muonn'; did you mean"),
        ("--models {run}", "detector must be a model of classification, got one of detection"),
        ("--models halonet50ts", "halonet50ts cannot run 2 images of 32 pixels: AssertionError"),
    ],
)
def test_bad_input(more, message, capsys, tmp_path):
    run = tmp_path / "detector"
    tiny_run(run)
    command = f"{TINY} {more.format(run=run)}"
    assert exit_code(lambda: main(command.split())) == 2
    errors = capsys.readouterr().err
    assert message in errors.splitlines()[-1]


def test_a_row_per_implementation_and_mode(tmp_path, monkeypatch):
    """A compiled row has the seconds of its first use; a plain network has no choice of implementations; one that is
    named twice is measured once."""
    compiled = []

    def compile(model, **options):
        compiled.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    names = "--models cnn_cifar ea_conv_transformer_cifar --no-memory"
    ways = "--implementation chosen reference chosen --compile-mode reduce-overhead"
    rows = run(f"{names} {ways}", tmp_path / "speed.csv")
    pairs = [(row["model"], row["implementation"]) for row in rows]
    plain = ("cnn_cifar", "chosen")
    key = ("ea_conv_transformer_cifar", "chosen")
    reference = ("ea_conv_transformer_cifar", "reference")
    assert pairs == [plain, plain, key, key, reference, reference]
    assert [row["mode"] for row in rows] == ["eager", "reduce-overhead"] * 3
    assert [bool(row["first_use_s"]) for row in rows] == [False, True] * 3
    assert compiled == [{"dynamic": False, "mode": "reduce-overhead"}] * 3
