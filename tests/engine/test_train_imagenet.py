"""The ImageNet command: the papers' rates, exact evaluation, runs that survive, bad input in one clear line."""

import copy
import json
import shutil
import time
from functools import partial

import pytest
import safetensors
import timm
import torch

from ea_vision.data import write_ffcv
from ea_vision.engine import run_folder, train_imagenet
from ea_vision.engine.preflight import trial_step
from ea_vision.engine.train_imagenet import ImageNetConfig
from experiments.learning_curves import read_metrics
from tests.data.photos import make_photos
from tests.engine import runner
from tests.engine.runner import assert_equal, same_result
from tests.slow import needs_ffcv

TINY = (
    "--model test_resnet --model-kwargs drop_rate=0.2 --img-size 16 --eval-resize 20 --batch-size 8 --workers 1 "
    "--epochs 2 --warmup-epochs 0 --device cpu --log-steps 2"
)


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(arguments(photos, folder))
    return folder


def arguments(photos, output, *more):
    """Two epochs of five updates of eight images, a checkpoint every second update."""
    return runner.words(TINY, f"--data-dir {photos} --output {output} --checkpoint-steps 2", *more)


train = partial(runner.train, main=train_imagenet.main)


def test_run_folder(finished):
    assert {p.name for p in finished.iterdir()} == {
        "config.yaml",
        "metrics.csv",
        "speed.csv",
        "last.ckpt",
        "last.prev.ckpt",
        "best.ckpt",
        "model.safetensors",
        "model.md",
        "results.json",
    }
    speed = runner.rows_of(finished / "speed.csv")
    assert [int(r["step"]) for r in speed] == [2, 4, 5, 7, 9, 10], (
        "every second update and at the end of an epoch"
    )
    assert all(
        0 < float(r["data_wait_percent"]) < 100 and float(r["images_per_s"]) > 0 for r in speed
    )
    log = finished.with_suffix(".log").read_text()
    assert (
        "the best epoch was chosen by the images that it is evaluated on: quote the last weights\n"
        in log
    )
    assert "accuracy on the images to evaluate on: best weights" in log
    assert "(test)" not in log
    assert "test accuracy" not in log


@pytest.mark.slow
@needs_ffcv
def test_ffcv_files_train_and_resume_as_images_do(photos, tmp_path):
    """Two processes on .beton files, one killed. Images are stored as evaluated: the folder gives the same results."""
    files = {}
    for split in ("train", "validation"):
        files[split] = tmp_path / f"{split}.beton"
        assert (
            write_ffcv.main(
                runner.words(
                    f"--data-dir {photos} --split {split} --out {files[split]} --jpeg-share 0",
                    "--eval-img-size 16 --eval-resize 20",
                )
            )
            == 0
        )
    files_options = f"--train-beton {files['train']} --val-beton {files['validation']} "
    files_options += "--batch-size 4 --checkpoint-steps 2"
    whole, broken, other = (
        runner.words(TINY, files_options, f"--output {tmp_path / name}")
        for name in ("whole", "broken", "other")
    )
    train(whole, size=2)
    runner.stopped(broken, 8, rank=1, size=2, main=train_imagenet.main)
    train(broken, size=2)
    same_result(tmp_path / "broken", tmp_path / "whole")
    results = []
    for name, more in (("images", ["--val-beton", "", "--data-dir", str(photos)]), ("beton", [])):
        train(["--evaluate", str(tmp_path / "whole"), "--output", str(tmp_path / name), *more])
        results.append(json.loads((tmp_path / name / "evaluation.json").read_text()))
    assert results[0]["loss"] == results[1]["loss"]
    printed = train([*other, "--eval-resize", "24"], code=2)
    assert "eval_resize=24" in printed
    assert "eval_resize=20" in printed
    assert "must have whole images, for training, got" in train(
        [*other, "--train-beton", str(files["validation"])], code=2
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_small_evolving_network_learns_its_images_by_heart(tmp_path):
    """From layers to training loop: ea_aa_resnet34, narrow and with few blocks, at 64 pixels, on 16 images."""
    data = make_photos(tmp_path / "photos", train=16, val=0, side=64)
    shutil.copytree(
        data / "train", data / "val", dirs_exist_ok=True
    )  # the same images by other names
    for path in (data / "val").glob("*/*.jpg"):
        path.rename(path.with_stem(f"again{path.stem}"))
    folder = tmp_path / "run"
    train(
        runner.words(
            "--model ea_aa_resnet34 --model-kwargs layers=[1,2,2,1] channels=[16,32,64,64]",
            "--img-size 64 --eval-resize 64",
            "--crop-scale 0.5 --batch-size 16 --epochs 16",
            "--lr 0.05 --lr-base-size 0 --sched constant --warmup-epochs 0",
            f"--workers 0 --device cpu --eval-epochs 16 --data-dir {data} --output {folder}",
        )
    )
    metrics = read_metrics(folder)
    assert metrics["top1"][-1] > 95
    assert metrics["train_loss"][-1] < 0.1 * metrics["train_loss"][0]
    with safetensors.safe_open(folder / run_folder.WEIGHTS, framework="pt") as weights:
        assert sum(name.endswith("evolution.convs.0.weight") for name in weights.keys()) == 8


def test_too_many_unreadable_images_stop_the_run_and_are_listed(tmp_path):
    root = make_photos(tmp_path / "photos")
    broken = [root / f"train/class_0/{name}.jpg" for name in ("000", "003", "006")]
    for path in broken:
        path.write_text("no image")
    folder = tmp_path / "run"
    printed = train(arguments(root, folder, "--max-bad-images 2"), code=1)
    assert "3 images cannot be read, --max-bad-images allows 2" in printed
    assert "Traceback" not in printed
    rows = runner.rows_of(folder / "bad_images.csv")
    assert [row["path"] for row in rows] == [str(path) for path in broken]
    train(arguments(root, folder, "--max-bad-images 3"))  # the same run goes on when it may


def test_a_trial_step_changes_nothing_and_does_not_take_the_building_of_kernels_for_the_pace(
    tmp_path,
):
    model, steps = timm.create_model("test_resnet"), []
    trainer = runner.make_trainer(tmp_path, model, schema=ImageNetConfig, batch_size=8, img_size=16)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()

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
    assert_equal(dict(model.state_dict()), dict(before), "state")
