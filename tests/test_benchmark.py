"""The benchmark: fair turns, figures that follow from the times, the steps' own memory, errors in one line."""

import csv

import pytest
import timm
import torch

from ea_vision.base.errors import exit_code
from ea_vision.base.networks import lay_out
from ea_vision.benchmark import baseline_of, interleaved, live_network, main

TINY = [
    "--device",
    "cpu",
    "--batch-size",
    "2",
    "--img-size",
    "32",
    "--repeats",
    "1",
    "--threads",
    "1",
]


def test_channels_last_leaves_weights_of_other_dimensions_alone():
    """timm's lambda networks have 3-D convolutions, which `Module.to` refuses."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Conv3d(2, 4, 3), torch.nn.Linear(3, 3)
    )
    before = [p.clone() for p in model.parameters()]
    assert lay_out(model, torch.channels_last) is model
    assert (
        model[0].weight.is_contiguous(memory_format=torch.channels_last)
        and not model[0].weight.is_contiguous()
    )
    assert model[1].weight.is_contiguous() and all(map(torch.equal, model.parameters(), before))


def test_turns_are_interleaved_and_medians_are_of_the_counted_ones():
    turns, pauses, now = [], iter((5000, 30, 90, 20)), [0]

    def a():
        turns.append("a")
        now[0] += next(pauses)

    seconds = interleaved({"a": a, "b": lambda: turns.append("b")}, repeats=3, clock=lambda: now[0])
    rounds = [turns[i : i + 2] for i in range(0, 8, 2)]
    assert all(sorted(turn) == ["a", "b"] for turn in rounds) and len({*map(tuple, rounds)}) == 2, (
        "in any order"
    )
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
    assert all(
        norm.weight.any() for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm2d)
    )
    assert model.training and model.bn1.num_batches_tracked == 2


def test_a_run(tmp_path, capsys):
    path, threads = tmp_path / "sub" / "speed.csv", torch.get_num_threads()
    names = ["cnn_cifar", "vit_tiny_patch16_224", "ea_vit_tiny_patch16_224"]
    words = [*names[:2], "ea_vit_tiny*"]
    assert (
        main(
            [
                *TINY,
                "--models",
                *words,
                "--no-memory",
                "--opt",
                "muon",
                "--cpu-time",
                "--csv",
                str(path),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        f"torch {torch.__version__}" in out
        and "1 threads" in out
        and torch.get_num_threads() == threads
    )
    rows = list(csv.DictReader(path.open()))
    assert [row["model"] for row in rows] == names and {row["clock"] for row in rows} == {"CPU"}
    for row in rows:
        speed, train_ms, infer_ms = (
            float(row[key]) for key in ("train_images_per_s", "train_ms", "infer_ms")
        )
        assert (
            speed == pytest.approx(2000 / train_ms, rel=1e-3)
            and infer_ms < train_ms
            and row["memory_mib"] == ""
        )
        assert row["model"] in out and f"{speed:.2f}" in out
    ratio = float(rows[1]["infer_ms"]) / float(rows[2]["infer_ms"])
    assert (
        float(rows[2]["infer_images_per_s_ratio"]) == pytest.approx(ratio) and f"{ratio:.3f}" in out
    )
    assert rows[0]["train_images_per_s_ratio"] == "", "without its baseline"


@pytest.mark.slow
def test_memory_is_that_of_the_steps_alone(tmp_path):
    assert main([*TINY, "--models", "resnet18_cifar", "--csv", str(tmp_path / "m.csv")]) == 0
    [row] = csv.DictReader((tmp_path / "m.csv").open())
    weights = 4 * sum(p.numel() for p in timm.create_model("resnet18_cifar").parameters()) / 2**20
    # weights, gradients and momentum, and on some CPUs 50 MB of oneDNN's own, but without torch itself, which takes 300
    assert 3 * weights < float(row["memory_mib"]) < 5 * weights


@pytest.mark.parametrize(
    "more, message",
    [
        (["--models", "ea_resnet5O"], "no network fits 'ea_resnet5O'; did you mean"),
        (["--opt", "muonn"], "unknown optimiser 'muonn'; did you mean"),
        (
            ["--models", "halonet50ts"],
            "halonet50ts cannot run 2 images of 32 pixels: AssertionError",
        ),
    ],
)
def test_bad_input(more, message, capsys):
    assert exit_code(lambda: main([*TINY, *more])) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_row_per_implementation_and_mode(tmp_path, monkeypatch):
    """A compiled row tells the seconds of its first use; a plain network has no implementation to choose."""
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: compiled.append(options) or model
    )
    compiled = []
    path = tmp_path / "speed.csv"
    names = ["--models", "cnn_cifar", "ea_conv_transformer_cifar"]
    ways = ["--implementation", "chosen", "reference", "--compile-mode", "reduce-overhead"]
    assert main([*TINY, *names, *ways, "--no-memory", "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["model"], row["implementation"], row["mode"]) for row in rows] == [
        ("cnn_cifar", "chosen", "eager"),
        ("cnn_cifar", "chosen", "reduce-overhead"),
        ("ea_conv_transformer_cifar", "chosen", "eager"),
        ("ea_conv_transformer_cifar", "chosen", "reduce-overhead"),
        ("ea_conv_transformer_cifar", "reference", "eager"),
        ("ea_conv_transformer_cifar", "reference", "reduce-overhead"),
    ]
    assert [bool(row["first_use_s"]) for row in rows] == [False, True] * 3
    assert compiled == [{"dynamic": False, "mode": "reduce-overhead"}] * 3
