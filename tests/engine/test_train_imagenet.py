"""The ImageNet command: the papers' rates, exact evaluation, runs that survive, bad input in one clear line."""

import copy
import json
import os
import shutil
import time
from functools import partial

import pytest
import timm
import torch

from ea_vision.data import write_ffcv
from ea_vision.engine import train_imagenet
from ea_vision.engine.preflight import trial_step
from ea_vision.engine.train_imagenet import ImageNetConfig
from experiments.learning_curves import read_metrics
from tests.data.photos import make_photos
from tests.engine import runner
from tests.engine.runner import assert_equal, same_result
from tests.slow import needs_ffcv


@pytest.fixture(scope="module")
def finished(imagenet, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(imagenet(folder))
    return folder


train = partial(runner.train, main=train_imagenet.main)


def test_run_folder(finished):
    files = "best.ckpt config.yaml last.ckpt last.prev.ckpt metrics.csv model.md model.safetensors"
    assert sorted(os.listdir(finished)) == [*files.split(), "results.json", "speed.csv"]
    speed = runner.rows_of(finished / "speed.csv")
    # every second update and at the end of an epoch
    assert [int(row["step"]) for row in speed] == [2, 4, 5, 7, 9, 10]
    for row in speed:
        assert 0 < float(row["data_wait_percent"]) < 100
        assert float(row["images_per_s"]) > 0
    log = finished.with_suffix(".log").read_text()
    warning = (
        "the best epoch was chosen by the images that it is evaluated on: quote the last weights"
    )
    assert f"{warning}\n" in log
    assert "accuracy on the images to evaluate on: best weights" in log
    assert "(test)" not in log
    assert "test accuracy" not in log


@pytest.mark.slow
@needs_ffcv
def test_ffcv_files_train_and_resume_as_images_do(photos, imagenet, tmp_path):
    """Two processes on .beton files, one killed. Images are stored as evaluated: the folder gives the same results."""
    train_file, val_file = (tmp_path / f"{split}.beton" for split in ("train", "validation"))
    for file in (train_file, val_file):
        writing = f"--data-dir {photos} --split {file.stem} --out {file} --jpeg-share 0"
        write_ffcv.main(runner.words(writing, "--eval-img-size 16 --eval-resize 20"))
    options = f"--data-dir= --train-beton {train_file} --val-beton {val_file} --batch-size 4"
    whole, broken, other = (
        imagenet(tmp_path / name, options, "--model-kwargs drop_rate=0.2")
        for name in ("whole", "broken", "other")
    )
    train(whole, size=2)
    runner.stopped(broken, 8, rank=1, size=2, main=train_imagenet.main)
    train(broken, size=2)
    same_result(tmp_path / "broken", tmp_path / "whole")
    losses = set()
    for name, more in (("images", ["--val-beton", "", "--data-dir", str(photos)]), ("beton", [])):
        train(["--evaluate", str(tmp_path / "whole"), "--output", str(tmp_path / name), *more])
        evaluation = (tmp_path / name / "evaluation.json").read_text()
        losses.add(json.loads(evaluation)["loss"])
    assert len(losses) == 1
    printed = train([*other, "--eval-resize", "24"], code=2)
    assert "eval_resize=24" in printed
    assert "eval_resize=20" in printed
    printed = train([*other, "--train-beton", str(val_file)], code=2)
    assert "must have whole images, for training, got" in printed
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_small_evolving_network_learns_its_images_by_heart(imagenet, folder, tmp_path):
    """From layers to training loop: ea_aa_resnet34, narrow and with few blocks, at 64 pixels, on 16 images."""
    data = make_photos(tmp_path / "photos", train=16, val=0, side=64)
    for path in (data / "train").glob("*/*.jpg"):  # the same images by other names
        again = data / "val" / path.parent.name / f"again{path.name}"
        again.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, again)
    train(
        imagenet(
            folder,
            "--model ea_aa_resnet34 --model-kwargs layers=[1,2,2,1] channels=[16,32,64,64]",
            "--img-size 64 --eval-resize 64 --crop-scale 0.5 --batch-size 16 --workers 0",
            "--lr 0.05 --lr-base-size 0 --sched constant --checkpoint-steps 0",
            f"--epochs 16 --eval-epochs 16 --data-dir {data}",
        )
    )
    metrics = read_metrics(folder)
    assert metrics["top1"][-1] > 95
    assert metrics["train_loss"][-1] < 0.1 * metrics["train_loss"][0]
    weights = runner.weights_of(folder)
    assert sum(name.endswith("evolution.convs.0.weight") for name in weights) == 8


def test_too_many_unreadable_images_stop_the_run_and_are_listed(imagenet, folder, tmp_path):
    root = make_photos(tmp_path / "photos")
    broken = [root / f"train/class_0/{name}.jpg" for name in ("000", "003", "006")]
    for path in broken:
        path.write_text("no image")
    argv = imagenet(folder, f"--data-dir {root} --max-bad-images")
    printed = train([*argv, "2"], code=1)
    assert "3 images cannot be read, --max-bad-images allows 2" in printed
    assert "Traceback" not in printed
    rows = runner.rows_of(folder / "bad_images.csv")
    assert [row["path"] for row in rows] == [str(path) for path in broken]
    train([*argv, "3"])  # the same run goes on when it may


def test_a_trial_step_changes_nothing_and_does_not_take_the_building_of_kernels_for_the_pace(
    tmp_path,
):
    model = timm.create_model("test_resnet")
    steps = []
    trainer = runner.make_trainer(tmp_path, model, schema=ImageNetConfig, batch_size=8, img_size=16)
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()

    def loss_on_noise(model, images):
        time.sleep(0 if steps else 1)  # the first step after an installation builds kernels
        steps.append(len(images))
        return model(images).square().mean()

    trainer.loss_on_noise = loss_on_noise
    assert 0 < trial_step(trainer) < 1
    assert len(steps) > 1
    assert set(steps) == {8}
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert_equal(model.state_dict(), before)
