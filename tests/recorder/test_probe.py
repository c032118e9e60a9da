"""The probe: its network, its controls, and the command from end to end."""

import argparse
import csv
import json

import numpy as np
import pytest
import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.data.scaling import Scaling
from ea_vision.data.small_images import load_dataset
from ea_vision.recorder import probe
from ea_vision.recorder.probe import extract_maps, shuffled_in_space, untrained_network
from ea_vision.recorder.probe_network import ProbeNet, ProbeRecipe, train_probe
from ea_vision.zoo.loaded import load_model
from tests.data.photos import make_folder
from tests.recorder.networks import gap, recorded, write_run
from tests.refused import refused

NAME = "ea_conv_transformer_cifar"
SHORT = f"--model {NAME} --img-size 16 --layers 2 --epochs 1 --width 8"
TINY_VIT = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3}


def small_model(name=NAME, **options):
    if name == NAME:
        options = {"widths": (8, 8, 16, 16)}
    return load_model(name, random=True, img_size=(16, 16), **options)


def run(options, folder):
    """Run the command; return the rows of results.csv."""
    command = [*SHORT.split(), *options.split(), "-o", str(folder)]
    assert probe.main(command) == 0
    with (folder / "results.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_network_has_12_layers_and_the_papers_poolings():
    net = ProbeNet(8, 10, width=256).eval()
    seen = []
    for name, module in net.named_modules():
        if name.split(".")[-1].startswith("denselayer"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].shape[1:3]))
    with torch.no_grad():
        assert net(torch.randn(2, 8, 14, 14)).shape == (2, 10)
    assert seen == [(256, 14)] * 4 + [(512, 7)] * 3 + [(1024, 4)] * 5


@pytest.mark.parametrize(
    "name, options, text, query, rows",
    [
        (NAME, {}, None, (8, 8), {1: 10, 5: 3}),
        (NAME, {}, "0,15", (0, 15), {1: 3}),
        ("ea_vit_tiny_patch16_224", TINY_VIT, "cls", "cls", {2: 0}),
    ],
)
def test_maps_are_those_of_the_query(name, options, text, query, rows):
    """The query is the middle, a pixel or a class token, by its row in each layer; its map covers the pixels."""
    model = small_model(name, **options)
    pixels = torch.randint(0, 256, (10, 3, 16, 16), dtype=torch.uint8)
    args = argparse.Namespace(layers=",".join(map(str, rows)), query=text)
    assert probe.layers_and_query(args, model) == (list(rows), query)
    args.query = "reg1"
    with refused("--query must be y,x.*, got 'reg1'"):
        probe.layers_and_query(args, model)
    maps = extract_maps(model, pixels, list(rows), query, batch_size=4)
    recording = recorded(model.model, model.preparation.normalize(pixels))
    for patches, (number, row) in zip(maps, rows.items(), strict=True):
        height, width = recording[number].feat_size
        expected = recording[number].attn[:, :, row, -height * width :]
        assert patches.dtype == torch.float16
        np.testing.assert_allclose(patches, expected.unflatten(-1, (height, width)), atol=1e-3)


def test_shuffling_moves_the_pixels_of_each_map():
    places = torch.arange(16, dtype=torch.half).view(4, 4).expand(400, 3, 4, 4)
    moved = shuffled_in_space(places, 0).flatten(2)
    first = moved[:, 0]
    assert torch.equal(moved.sort().values, places.flatten(2))  # every value stays in its map
    assert (first == moved[:, 1]).float().mean() < 0.1  # chance: 1/16
    assert len(first.unique(dim=0)) == 400  # each image has its own order
    places = nn.functional.one_hot(first.long())  # from anywhere to anywhere
    assert gap(places.float().mean(0), 1 / 16) < 0.06


def test_the_probe_learns_what_is_in_the_maps_and_shuffling_takes_it_away():
    """The class is the position of a spot in the maps; the same seed gives the same result."""
    targets = torch.randint(4, (260,))
    maps = 0.01 * torch.rand(260, 2, 4, 4)
    maps[torch.arange(260), :, targets] *= 3
    maps = maps.half()

    def top1(maps, train, epochs):
        recipe = ProbeRecipe(epochs=epochs, batch_size=20, width=8)
        return train_probe(maps[:train], targets[:train], maps[-100:], targets[-100:], 4, recipe)

    assert top1(maps, 160, 6) > 75
    assert top1(shuffled_in_space(maps, 0), 160, 6) < 50
    assert top1(maps, 40, 1) == top1(maps, 40, 1)


def test_a_single_image_that_is_left_over_joins_the_last_batch():
    """Its maps of 4x4 become a single pixel, of which alone there are no batch statistics."""
    maps = torch.rand(9, 2, 4, 4)
    targets = torch.arange(9) % 3
    recipe = ProbeRecipe(epochs=1, batch_size=4, width=8)
    assert 0 <= train_probe(maps, targets, maps, targets, 3, recipe) <= 100
    with refused("at least 2 images to learn from, got 1"):
        train_probe(maps[:1], targets[:1], maps, targets, 3, recipe)
    with refused("batch_size of the probe must be at least 2, got 1"):
        ProbeRecipe(batch_size=1)


def test_untrained_networks_get_the_statistics_of_images_in_whatever_order_they_lie(monkeypatch):
    """Images in folders are sorted by class, so the first ones are all of one class."""
    kinds = torch.tensor([0, 100, 200], dtype=torch.uint8).repeat_interleave(200)
    pixels = kinds.view(600, 1, 1, 1).expand(600, 3, 16, 16)
    fresh = small_model()
    inputs = []
    seen = []
    norm = next(m for m in fresh.model.modules() if isinstance(m, nn.BatchNorm2d))
    fresh.model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].mean((0, 2, 3))))
    monkeypatch.setattr(probe, "load_model", lambda *_, **__: fresh)
    untrained_network(NAME, small_model(), pixels, seed=0, count=101, batch_size=50)
    mean = torch.stack(seen).mean(0)
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-3, atol=1e-4)
    assert norm.momentum == 0.1
    assert not norm.training
    assert [len(batch) for batch in inputs] == [50, 51]  # one image alone may be one pixel
    for batch in inputs:
        _, counts = batch[:, 0, 0, 0].unique(return_counts=True)
        assert len(counts) == 3
        assert counts.min() > 0.15 * 50


def test_the_command_ends_with_a_table(tmp_path, capsys):
    rows = run("--limit 24", tmp_path)
    assert [row["maps"] for row in rows] == ["trained", "untrained", "shuffled"]
    assert {(row["layer"], row["seed"]) for row in rows} == {("2", "0")}
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    about = json.loads(text)
    assert len(about["data_fingerprint"]) == 1
    assert about["recipe"]["epochs"] == 1
    assert about["versions"]
    assert len(about["results"]) == 3
    assert "31.02 / 31.71 / 31.93" in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_draw_everything_but_the_images_and_unseen_takes_test_images(
    tmp_path, capsys, monkeypatch
):
    seen = []
    networks = set()

    def extract(model, images, *_):
        seen.append(images)
        weight = next(model.model.parameters())
        networks.add(weight.sum().item())
        return [torch.zeros(len(images), 2, 4, 4)]

    monkeypatch.setattr(probe, "extract_maps", extract)
    monkeypatch.setattr(probe, "train_probe", lambda *args: 10.0 * args[5].seed)
    rows = run("--unseen --seeds 1,2,4 --controls untrained", tmp_path)
    digits = load_dataset("digits", scaling=Scaling.filled(16)).test
    train, test = seen[:2]
    assert len(train) == len(digits) - len(digits) // 5
    assert len(test) == len(digits) // 5
    for index, split in enumerate(seen):
        assert torch.equal(split, seen[index % 2])
    assert len(seen) == 8
    assert len(networks) == 4
    # all test images, none twice
    both = torch.cat([train, test]).flatten(1).unique(dim=0)
    assert torch.equal(both, digits.images.flatten(1).unique(dim=0))
    results = [(row["maps"], row["seed"], row["top1"]) for row in rows]
    seeds = [("1", "10.00"), ("2", "20.00"), ("4", "40.00")]
    assert results[:3] == [("trained", *seed) for seed in seeds]
    assert results[3:] == [("untrained", *seed) for seed in seeds]
    assert capsys.readouterr().out.count("23.33 ± 15.28") == 2


def test_runs_in_folders_of_one_name_have_rows_of_their_own(tmp_path, capsys):
    models = ",".join(str(write_run(tmp_path / name / "run")) for name in "ab")
    rows = run(f"--model {models} --limit 24 --controls none", tmp_path / "out")
    assert [row["model"] for row in rows] == [f"{NAME}, run [1]", f"{NAME}, run [2]"]
    assert capsys.readouterr().out.count("| trained |") == 2


def test_a_34_layer_network_is_probed_in_the_papers_layers(tmp_path):
    options = "--model aa_resnet34 --img-size 32 --layers auto --limit 10 --controls none"
    assert [row["layer"] for row in run(options, tmp_path)] == ["16", "17", "18"]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--model cnn_cifar", "has no attention layer"),
        ("--controls x", "--controls must be"),
        ("--query 3,99", "query y,x must lie within 16x16 pixels"),
        ("-o /proc/nowhere", "cannot make the folder /proc/nowhere"),
        ("--seeds=1,x", "invalid seeds value: '1,x'"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    output = tmp_path / "out"
    with pytest.raises((UsageError, SystemExit)) as error:
        probe.main(f"{SHORT} -o {output} {options}".split())
    assert message in f"{error.value} {capsys.readouterr().err}"
    assert not output.exists()


@pytest.mark.parametrize(
    "more, classes, message",
    [
        ("", 1, "at least 2 classes are required, got class_0"),
        ("--unseen", 2, "--unseen needs at least 5 test images, got 4"),
        ("--limit 1", 2, "at least 2 images to learn from, got 1"),
    ],
)
def test_too_few_images_or_classes(more, classes, message, tmp_path):
    data = make_folder(tmp_path / "data", train=8, test=4, classes=classes)
    with refused(message):
        run(f"--dataset folder --data-dir {data} {more}", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_table_of_models_with_other_layers_leaves_places_empty():
    results = [
        {"model": "a", "maps": "trained", "layer": 1, "top1": 50.0},
        {"model": "b", "maps": "trained", "layer": 2, "top1": 60.0},
    ]
    _, _, first, second = probe.results_table(results).splitlines()
    assert first.replace(" ", "") == "|a|trained|50.00||"
    assert second.replace(" ", "") == "|b|trained||60.00|"
