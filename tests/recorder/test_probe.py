"""The probe: its network, its controls, and the command from end to end."""

import argparse
import csv
import json

import numpy as np
import pytest
import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.data.small_images import load_dataset
from ea_vision.recorder import probe
from ea_vision.recorder.loading import load_model
from ea_vision.recorder.probe import extract_maps, shuffled_in_space, untrained_network
from ea_vision.recorder.probe_network import ProbeNet, ProbeRecipe, train_probe
from tests.recorder.networks import gap, recorded

SHORT = [
    "--model",
    "ea_conv_transformer_cifar",
    "--img-size",
    "16",
    "--layers",
    "2",
    "--epochs",
    "1",
    "--width",
    "8",
]


def small_model(name="ea_conv_transformer_cifar", **options):
    return load_model(name, random=True, img_size=(16, 16), **options or {"widths": (8, 8, 16, 16)})


def rows_of(folder, *names):
    """Return columns of results.csv, row by row."""
    return [
        tuple(row[name] for name in names)
        for row in csv.DictReader((folder / "results.csv").open())
    ]


def test_the_network_has_12_layers_and_the_papers_poolings():
    net, seen = ProbeNet(8, 10, width=256).eval(), []
    for name, module in net.named_modules():
        if name.split(".")[-1].startswith("denselayer"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].shape[1:3]))
    with torch.no_grad():
        assert net(torch.randn(2, 8, 14, 14)).shape == (2, 10)
    assert seen == [(256, 14)] * 4 + [(512, 7)] * 3 + [(1024, 4)] * 5


@pytest.mark.parametrize(
    "model, layers, text, query, row",
    [
        (small_model, "1,5", None, (8, 8), 10),
        (small_model, "1", "0,15", (0, 15), 3),
        (
            lambda: small_model(
                "ea_vit_tiny_patch16_224", patch_size=4, embed_dim=12, depth=2, num_heads=3
            ),
            "2",
            "cls",
            "cls",
            0,
        ),
    ],
)
def test_maps_are_those_of_the_query(model, layers, text, query, row):
    """Of the middle, of a pixel and of a class token, towards the pixels."""
    model, pixels = model(), torch.randint(0, 256, (10, 3, 16, 16), dtype=torch.uint8)
    chosen = [int(number) for number in layers.split(",")]
    assert probe.layers_and_query(argparse.Namespace(layers=layers, query=text), model) == (
        chosen,
        query,
    )
    with pytest.raises(UsageError, match="--query must be y,x.*, got 'reg1'"):
        probe.layers_and_query(argparse.Namespace(layers=layers, query="reg1"), model)
    maps = extract_maps(model, pixels, chosen, query, batch_size=4)
    expected = recorded(model.model, model.normalize(pixels / 255))[chosen[0]].attn[:, :, row, -16:]
    assert [len(of) for of in maps] == [10] * len(chosen) and maps[0].dtype == torch.float16
    np.testing.assert_allclose(maps[0].flatten(2), expected, atol=1e-3)
    assert maps[-1].shape[-2:] == ((2, 2) if 5 in chosen else (4, 4))


def test_shuffling_moves_the_pixels_of_each_map():
    places = torch.arange(16.0).half().view(4, 4).expand(400, 3, 4, 4)
    moved = shuffled_in_space(places, 0).flatten(2)
    assert torch.equal(moved.sort().values, places.flatten(2))  # every value stays in its map
    assert (moved[:, 0] == moved[:, 1]).float().mean() < 0.1  # chance: 1/16
    assert len(moved[:, 0].unique(dim=0)) == 400  # each image has its own order
    came_from = torch.stack([(moved[:, 0] == place).float().mean(0) for place in range(16)])
    assert gap(came_from, 1 / 16) < 0.06  # from anywhere to anywhere


def test_the_probe_learns_what_is_in_the_maps_and_shuffling_takes_it_away():
    """The class is where the maps' spot lies; the same seed gives the same result."""
    targets, maps = torch.randint(4, (260,)), 0.01 * torch.rand(260, 2, 4, 4)
    maps[torch.arange(260), :, targets] *= 3
    maps = maps.half()

    def top1(maps, train, epochs):
        recipe = ProbeRecipe(epochs=epochs, batch_size=20, width=8)
        return train_probe(maps[:train], targets[:train], maps[-100:], targets[-100:], 4, recipe)

    assert top1(maps, 160, 6) > 75 and top1(shuffled_in_space(maps, 0), 160, 6) < 50
    assert top1(maps, 40, 1) == top1(maps, 40, 1)


def test_untrained_networks_get_the_statistics_of_images_in_whatever_order_they_lie(monkeypatch):
    """Folders lie class by class: the first images of one are all of a kind."""
    pixels = torch.cat(
        [torch.full((200, 3, 16, 16), value, dtype=torch.uint8) for value in (0, 100, 200)]
    )
    fresh, inputs, seen = small_model(), [], []
    norm = next(m for m in fresh.model.modules() if isinstance(m, nn.BatchNorm2d))
    fresh.model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    monkeypatch.setattr(probe, "load_model", lambda *_, **__: fresh)
    untrained_network(
        "ea_conv_transformer_cifar", small_model(), pixels, seed=0, count=100, batch_size=50
    )
    means = torch.stack([batch.mean((0, 2, 3)) for batch in seen])
    torch.testing.assert_close(norm.running_mean, means.mean(0), rtol=1e-3, atol=1e-4)
    assert (
        norm.momentum == 0.1 and not norm.training and [len(batch) for batch in inputs] == [50, 50]
    )
    for batch in inputs:
        kinds, counts = batch[:, 0, 0, 0].unique(return_counts=True)
        assert len(kinds) == 3 and counts.min() > 0.15 * 50


def test_the_command_ends_with_a_table(tmp_path, capsys):
    assert probe.main([*SHORT, "--limit", "24", "-o", str(tmp_path / "out")]) == 0
    assert rows_of(tmp_path / "out", "maps", "layer", "seed") == [
        (kind, "2", "0") for kind in ("trained", "untrained", "shuffled")
    ]
    about = json.loads((tmp_path / "out" / "results.json").read_text())
    assert str(tmp_path) not in json.dumps(about) and len(about["data_fingerprint"]) == 1
    assert about["recipe"]["epochs"] == 1 and about["versions"] and len(about["results"]) == 3
    assert "31.02 / 31.71 / 31.93" in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_draw_everything_but_the_images_and_unseen_takes_test_images(
    tmp_path, capsys, monkeypatch
):
    seen, networks = [], set()

    def extract(model, images, *_):
        seen.append(images)
        networks.add(next(model.model.parameters()).sum().item())
        return [torch.zeros(len(images), 2, 4, 4)]

    monkeypatch.setattr(probe, "extract_maps", extract)
    monkeypatch.setattr(probe, "train_probe", lambda *given: 10.0 * given[5].seed)
    assert (
        probe.main(
            [*SHORT, "--unseen", "--seeds", "1,2,4", "--controls", "untrained", "-o", str(tmp_path)]
        )
        == 0
    )
    digits = load_dataset("digits", img_size=16).test
    assert [len(split) for split in seen] == [len(digits) - len(digits) // 5, len(digits) // 5] * 4
    assert (
        all(torch.equal(split, seen[index % 2]) for index, split in enumerate(seen))
        and len(networks) == 4
    )
    both = torch.cat(seen[:2]).flatten(1)
    assert torch.equal(both.unique(dim=0), digits.images.flatten(1).unique(dim=0)), (
        "all test images, none twice"
    )
    assert rows_of(tmp_path, "maps", "seed", "top1") == [
        (kind, seed, f"{10 * int(seed):.2f}") for kind in ("trained", "untrained") for seed in "124"
    ]
    assert capsys.readouterr().out.count("23.33 ± 15.28") == 2


def test_a_34_layer_network_is_probed_in_the_papers_layers(tmp_path):
    assert (
        probe.main(
            [
                *SHORT,
                "--model",
                "aa_resnet34",
                "--img-size",
                "32",
                "--layers",
                "auto",
                "--limit",
                "10",
                "--controls",
                "none",
                "-o",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert rows_of(tmp_path, "layer") == [("16",), ("17",), ("18",)]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--model", "cnn_cifar"], "has no attention layer"),
        (["--controls", "x"], "--controls must be"),
        (["--query", "3,99"], "query y,x must lie within the 16x16 input"),
        (["-o", "/proc/nowhere"], "cannot make the folder /proc/nowhere"),
        (["--seeds=1,x"], "invalid seeds value: '1,x'"),
    ],
)
def test_bad_options(argv, message, tmp_path, capsys):
    with pytest.raises((UsageError, SystemExit)) as error:
        probe.main([*SHORT, "-o", str(tmp_path / "out"), *argv])
    assert message in f"{error.value} {capsys.readouterr().err}" and not (tmp_path / "out").exists()
