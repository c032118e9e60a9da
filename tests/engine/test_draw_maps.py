"""Pictures of attention maps during training: every few epochs, in run folder and logs; nothing else changes."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from ea_vision.base.processes import WorkerLost
from ea_vision.engine import train_cifar, train_imagenet
from ea_vision.engine.watch import MapsPictures
from tests.data.photos import make_photos
from tests.engine.runner import assert_equal, saved, weights_of, words
from tests.refused import refused

MODEL = "--model ea_vit_tiny_patch16_224 --recipe none --img-size 16"
VIT = ["--model-kwargs", "patch_size=4", "embed_dim=12", "depth=2", "num_heads=3"]


def cifar(data, output, *more):
    usual = "--dataset folder --epochs 3 --batch-size 8 --lr 0.01 --device cpu"
    return words(MODEL, *VIT, usual, f"--data-dir {data} --output {output}", *more)


def pictures_of(folder):
    return sorted(path.name for path in (folder / "maps").iterdir())


def test_pictures_come_every_few_epochs_and_change_nothing(data, tmp_path):
    assert train_cifar.main(cifar(data, tmp_path / "plain")) == 0
    drawn = tmp_path / "drawn"
    assert train_cifar.main(cifar(data, drawn, "--draw-maps 2")) == 0
    assert pictures_of(drawn) == ["epoch_0002.png"]
    with Image.open(drawn / "maps" / "epoch_0002.png") as image:
        assert image.width > 400
        assert np.asarray(image).std() > 10
    assert not (tmp_path / "plain" / "maps").exists()
    assert_equal(weights_of(drawn), weights_of(tmp_path / "plain"))
    assert_equal(saved(drawn)["random"], saved(tmp_path / "plain")["random"])


def test_a_run_may_begin_to_draw_when_it_continues(data, tmp_path):
    output = tmp_path / "run"
    assert train_cifar.main(cifar(data, output, "--epochs 1")) == 0
    assert train_cifar.main(cifar(data, output, "--epochs 2 --draw-maps 1")) == 0
    assert pictures_of(output) == ["epoch_0002.png"]


def test_the_imagenet_trainer_draws_the_same_images_each_time(tmp_path, monkeypatch):
    photos = make_photos(tmp_path / "photos", train=16, val=10)
    sent = []
    board = SimpleNamespace(log=lambda row, step: sent.append((row, step)), finish=lambda: None)
    module = SimpleNamespace(
        init=lambda **kw: board, Image=lambda pixels: pixels.shape, Error=RuntimeError
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    output = tmp_path / "run"
    argv = words(
        MODEL,
        *VIT,
        "--eval-resize 20 --epochs 2 --warmup-epochs 0 --batch-size 8 --workers 0 --device cpu",
        f"--data-dir {photos} --output {output} --draw-maps 1 --wandb trial",
    )
    assert train_imagenet.main(argv) == 0
    assert pictures_of(output) == ["epoch_0001.png", "epoch_0002.png"]
    maps = [(row["maps"], step) for row, step in sent if "maps" in row]
    assert [step for _, step in maps] == [2, 4]
    assert all(len(shape) == 3 for shape, _ in maps)


def test_a_network_without_maps_is_refused_before_training(data, tmp_path):
    output = tmp_path / "run"
    argv = words("--model test_resnet --recipe none --img-size 16 --dataset folder --device cpu")
    argv += words(f"--batch-size 8 --data-dir {data} --output {output} --draw-maps 1")
    with refused("--draw-maps needs .* test_resnet has none"):
        train_cifar.main(argv)
    assert not output.exists()


@pytest.mark.parametrize(
    "error", [WorkerLost("lost"), RuntimeError("DataLoader worker (pid 1) is killed by signal")]
)
def test_a_lost_worker_is_not_a_warning(error, tmp_path):
    def images_of(places):
        raise error

    loader = SimpleNamespace(
        device=torch.device("cpu"), count=4, mean=torch.zeros(3), std=torch.ones(3)
    )
    loader.images_of = images_of
    with pytest.raises(type(error), match=str(error).partition("(")[0]):
        MapsPictures(loader, tmp_path, 1).draw(torch.nn.Identity(), "net", 1)
