"""--dry-run: what it says against what the run then takes; and that it leaves nothing."""
from __future__ import annotations

import os

import pytest

from ea_vision.base.errors import exit_code
from ea_vision.base.process_tree import PeakMemory
from ea_vision.engine import dry_run, run, run_folder, train_imagenet
from ea_vision.engine.train import Trainer
from tests.data.photos import make_photos
from tests.engine import runner

GROWING = ["--first-img-size", "32", "--img-size", "64", "--grow-epochs", "1", "1", "--eval-resize", "72"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), train=96, val=32, side=72)


def arguments(photos, output, *more: str) -> list[str]:
    return ["--data-dir", str(photos), "--recipe", "none", "--model", "test_resnet", *GROWING, "--epochs", "4",
            "--batch-size", "8", "--eval-batch-size", "8", "--workers", "0", "--device", "cpu", "--model-ema-decay",
            "0.9",
            "--snapshot-epochs", "2", "--log-steps", "0", "--output", str(output), *more]


def test_the_estimate_is_near_the_run(photos, tmp_path, monkeypatch, capsys):
    found = []
    rehearse = dry_run.rehearse
    monkeypatch.setattr(run, "rehearse", lambda *args: found.append(rehearse(*args)) or found[0])
    folder = tmp_path / "run"
    assert exit_code(lambda: train_imagenet.main([*arguments(photos, folder), "--dry-run"])) == 0
    assert not os.listdir(tmp_path) and "nothing was written" in capsys.readouterr().out
    fit, memory = Trainer.fit, PeakMemory(0.05)

    def measured(trainer):  # before it, git is asked for the commit: a child that has its parent's memory for a moment
        with memory:
            fit(trainer)

    monkeypatch.setattr(Trainer, "fit", measured)
    assert exit_code(lambda: train_imagenet.main(arguments(photos, folder))) == 0
    estimate, = found
    assert list(estimate.update_seconds) == [32, 64] and estimate.updates == 12
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert estimate.disk == pytest.approx(disk, rel=0.15)
    assert estimate.main_memory == pytest.approx(memory.peak, rel=0.15)
    # What it takes is the sum of its parts: one epoch of small images, three of large ones. Against the clock of a real
    # run it is compared in docs/imagenet.md: a test that shares its machine cannot.
    assert [run_folder.read_metrics(folder)["step"][-1], estimate.epoch_start_seconds > 0] == [48, True]
    training = 12 * (estimate.update_seconds[32] + 3 * estimate.update_seconds[64])
    others = 4 * (estimate.epoch_start_seconds + estimate.eval_seconds) + 5 * estimate.save_seconds
    assert training + others <= 1.001 * estimate.seconds
    assert estimate.images_per_s == pytest.approx(4 * 12 * 8 / training)


def test_more_processes_are_estimated_from_one(photos, tmp_path, capsys):
    argv = [*arguments(photos, tmp_path / "run"), "--grad-accum-steps", "2"]
    assert exit_code(lambda: train_imagenet.main([*argv, "--dry-run", "3"])) == 0
    said = capsys.readouterr().out
    assert "dry run     3 processes" in said and "4 epochs of 2 updates" in said and "MiB of gradients" in said


def test_two_processes_rehearse_together(photos, tmp_path):
    log = tmp_path / "log"
    argv = [*arguments(photos, tmp_path / "run"), "--dry-run"]
    assert runner.run_world(2, argv, log, main=train_imagenet.main) == [0, 0], log.read_text()
    assert log.read_text().count("dry run     2 processes") == 1 and "4 epochs of 6 updates" in log.read_text()
    assert os.listdir(tmp_path) == ["log"]


def test_a_dry_run_checks_what_a_run_checks(photos, tmp_path, capsys):
    argv = arguments(photos, tmp_path / "run", "--dry-run", "--lr", "-1")
    assert exit_code(lambda: train_imagenet.main(argv)) == 2
    argv = arguments(photos, tmp_path / "run", "--dry-run", "--batch-size", "1000")
    assert exit_code(lambda: train_imagenet.main(argv)) == 2
    assert "needs 1000 training images" in capsys.readouterr().err
