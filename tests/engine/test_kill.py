"""The kill matrix: a run that was killed, anywhere, and continued by the same command ends as one that was not."""
from __future__ import annotations

import json
import os
import signal
import time
from functools import partial

import pytest
import torch

from ea_vision.base.errors import UsageError
from ea_vision.base.processes import World
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.train import Progress
from tests.engine.runner import (
    DiskFullInWrite,
    KillInWrite,
    SignalAfterUpdate,
    SignalInEvaluation,
    SpoilLoss,
    SpoilTensor,
    arguments,
    nothing_truncated,
    run,
    run_world,
    same_result,
    start,
)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The run that all others are held to, with everything on that has a state."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    log = folder.with_suffix(".log")
    assert run(arguments(data, folder, *EXTRAS), log) == 0, log.read_text()
    assert os.listdir(folder / run_folder.SNAPSHOTS) == ["epoch_0002.safetensors"]
    return folder


EXTRAS = "--model-ema-decay 0.9 --mixup 0.2 --reprob 0.5 --holdout 0 --snapshot-epochs 2".split()


def continued(data, folder, uninterrupted):
    """Continue the run in `folder` with the same command, and hold it to the uninterrupted one."""
    log = folder.with_suffix(".log")
    nothing_truncated(folder)
    assert run(arguments(data, folder, *EXTRAS), log) == 0, log.read_text()
    nothing_truncated(folder)
    same_result(folder, uninterrupted)
    assert not list(folder.rglob(".*.tmp")), "an interrupted write is cleared away"
    return log.read_text()


def killed(data, folder, uninterrupted, *sabotages) -> str:
    """Start the same command again and again, each time killed in another way, and then once more."""
    for sabotage in sabotages:
        code = run(arguments(data, folder, *EXTRAS), folder.with_suffix(".log"), sabotage)
        assert code == -signal.SIGKILL, folder.with_suffix(".log").read_text()
        nothing_truncated(folder)
    return continued(data, folder, uninterrupted)


# Updates 1 to 5 are the first epoch; checkpoints lie before 1 and after 2, 4, 5, 7, 9 and 10. Each start counts its own
# updates: killed in update 1, 4, 7, 6 and 10 of the run, of which those since the last checkpoint are made again.
def test_sigkill_during_training(data, uninterrupted, tmp_path):
    killed(data, tmp_path / "run", uninterrupted, *(SignalAfterUpdate(signal.SIGKILL, n) for n in (1, 4, 5, 1, 4)))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_sigkill_during_checkpoint_writes(data, uninterrupted, tmp_path, first):
    """At every stage of a write: of the run's first, one inside an epoch, one at its end."""
    stages = [stage for stage in KillInWrite.STAGES if (first, stage) != (1, "between")]  # the first replaces none
    before = [KillInWrite("renamed", 1)] * (first - 1)
    killed(data, tmp_path / "run", uninterrupted, *before, *(KillInWrite(stage, 1) for stage in stages))


@pytest.mark.parametrize("names", [(run_folder.CONFIG, run_folder.METRICS, checkpoint.BEST),
                                   (run_folder.WEIGHTS, "epoch_0002.safetensors", run_folder.RESULTS)])
def test_sigkill_during_other_writes(data, uninterrupted, tmp_path, names):
    killed(data, tmp_path / "run", uninterrupted, *(KillInWrite(stage, 1, name) for name in names
                                                    for stage in ("half", "renamed")))


def test_sigkill_between_the_last_epochs_best_and_last_checkpoint(data, uninterrupted, tmp_path):
    """best.ckpt alone says that the epochs are done: the run that continues writes last.ckpt."""
    folder = tmp_path / "run"
    assert checkpoint.read_checkpoint(uninterrupted / checkpoint.BEST)["progress"]["epoch"] == 2, "or it says nothing"
    code = run(arguments(data, folder, *EXTRAS), tmp_path / "run.log", KillInWrite("renamed", 2, checkpoint.BEST))
    assert code == -signal.SIGKILL
    assert checkpoint.read_checkpoint(folder / checkpoint.LAST)["progress"]["updates"] == 9
    continued(data, folder, uninterrupted)


def test_signals_finish_the_update_save_and_leave(data, uninterrupted, tmp_path):
    """TERM inside the first epoch, Ctrl-C inside the second, and TERM in an evaluation, which is made again."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    for sabotage, number, wanted in ((SignalAfterUpdate(signal.SIGTERM, 3), signal.SIGTERM, (0, 3, 3)),
                                     (SignalInEvaluation(), signal.SIGTERM, (0, 5, 5)),
                                     (SignalAfterUpdate(signal.SIGINT, 3), signal.SIGINT, (1, 3, 8))):
        assert run(arguments(data, folder, *EXTRAS), log, sabotage) == 128 + number
        saved = checkpoint.read_checkpoint(folder / checkpoint.LAST)["progress"]
        assert (saved["epoch"], saved["step"], saved["updates"]) == wanted, "the update it was in is finished and saved"
        assert len(saved["rows"]) == wanted[0] and run_folder.read_results(folder) is None
    assert "Traceback" not in log.read_text()
    continued(data, folder, uninterrupted)


def test_a_folder_serves_one_run_at_a_time(data, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    first = start(arguments(data, folder, "--epochs 500"), log)
    while not (folder / checkpoint.BEST).exists() and first.is_alive():
        time.sleep(0.01)
    assert run(arguments(data, folder, "--epochs 500"), tmp_path / "second.log") == 2
    assert "is in use by another run" in (tmp_path / "second.log").read_text()
    assert first.is_alive()
    first.kill()
    first.join()
    nothing_truncated(folder)


def test_a_second_run_that_is_refused_leaves_the_folder_of_one_that_has_only_just_begun(tmp_path):
    """Nothing is in it yet, so it looks like one to clear away."""
    folder, world = tmp_path / "run", World(0, 1, torch.device("cpu"))
    with run_folder.locked(folder, world):
        with pytest.raises(UsageError, match="is in use by another run"), run_folder.locked(folder, world):
            raise AssertionError("two runs in one folder")
        run_folder.write_metrics(folder, [])
    assert (folder / run_folder.METRICS).exists()
    with run_folder.locked(tmp_path / "empty", world):
        pass
    assert not (tmp_path / "empty").exists(), "its own empty folder a run takes away"


def test_kill_at_any_time_and_twice(data, uninterrupted, tmp_path):
    """Kill from outside, whenever it hits, as often as it takes."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    for _ in range(2):
        process = start(arguments(data, folder, *EXTRAS), log)
        deadline = time.monotonic() + 600
        before = (folder / checkpoint.LAST).stat().st_mtime_ns if (folder / checkpoint.LAST).exists() else None
        while time.monotonic() < deadline and process.is_alive():
            path = folder / checkpoint.LAST
            if path.exists() and path.stat().st_mtime_ns != before:
                break
            time.sleep(0.01)
        process.kill()
        process.join()
    continued(data, folder, uninterrupted)


def test_complete_run_ends_at_once(data, uninterrupted, tmp_path):
    files = {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()}
    assert run(arguments(data, uninterrupted, *EXTRAS), tmp_path / "log", SignalAfterUpdate(signal.SIGKILL, 1)) == 0
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()} == files


def test_resume_goes_on_from_an_older_checkpoint_when_the_newest_is_damaged(data, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    assert run(arguments(data, folder, *EXTRAS), tmp_path / "run.log", SignalAfterUpdate(signal.SIGKILL, 8)) < 0
    path = folder / checkpoint.LAST
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert run(arguments(data, folder, *EXTRAS), tmp_path / "run.log") == 0
    same_result(folder, uninterrupted)
    log = (tmp_path / "run.log").read_text()
    assert "skipped" in log and str(path) in log and "checksum" in log
    assert (folder / "last.ckpt.damaged").read_bytes() == damaged, "it is kept, and has pushed out no good one"


@pytest.mark.slow
def test_config_says_which_start_made_which_updates(data, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    argv, two_threads = [*arguments(data, folder), "--epochs", "1"], partial(torch.set_num_threads, 2)
    assert run(argv, log, SignalAfterUpdate(signal.SIGKILL, 4)) < 0  # updates 1 and 2 are saved, the third is lost
    assert run(argv, log, SignalAfterUpdate(signal.SIGTERM, 1)) == 128 + signal.SIGTERM  # 3, like those before
    assert run(argv, log, two_threads) == 0
    _, about = run_folder.read_config(folder)
    threads = [(s["update"], s["hardware"].split(" x ")[1]) for s in about["starts"]]
    assert threads == [(1, "1 threads"), (4, "2 threads")]
    same = ("command", "versions", "git_commit")
    assert all({key: s[key] for key in same} == {key: about[key] for key in same} for s in about["starts"])
    assert checkpoint.read_checkpoint(folder / checkpoint.LAST)["progress"]["starts"] == about["starts"]


def test_a_start_without_updates_is_not_kept():
    progress = Progress()
    for updates, commit in ((0, "a"), (0, "b"), (5, "c"), (5, "d"), (9, "d"), (8, "e"), (7, "d"), (4, "e")):
        progress.updates = updates
        progress.begin({"command": "", "hardware": "", "versions": {}, "git_commit": commit, "classes": []})
        if (updates, commit) == (7, "d"):
            assert [(s["update"], s["git_commit"]) for s in progress.starts] == [(1, "b"), (6, "d")]
    assert [(s["update"], s["git_commit"]) for s in progress.starts] == [(1, "b"), (5, "e")]


def test_disk_full(data, uninterrupted, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    for name, nth in ((checkpoint.LAST, 3), (checkpoint.BEST, 1), (run_folder.WEIGHTS, 1)):
        assert run(arguments(data, folder, *EXTRAS), log, DiskFullInWrite(nth, name)) == 1
        error = log.read_text().splitlines()[-1]
        assert error.startswith("error: ") and f"cannot write {folder / name}" in error
        assert not list(folder.glob(".*.tmp")), "what was written in vain is freed"
        checkpoint.read_checkpoint(folder / checkpoint.LAST)
    assert "Traceback" not in log.read_text()
    continued(data, folder, uninterrupted)


def test_non_finite_loss_stops_and_says_where(data, uninterrupted, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    assert run(arguments(data, folder, *EXTRAS), log, SpoilLoss(4)) == 1
    error = log.read_text().splitlines()[-1]
    assert "update 4 of epoch 1" in error and str(folder / checkpoint.LAST) in error
    report = json.loads((folder / "nonfinite-epoch001-update00004.json").read_text())
    assert (report["epoch"], report["update"]) == (1, 4) and report["last_good_checkpoint"] == str(folder / "last.ckpt")
    assert len(set(report["sample_ids"][0])) == 8 and all(name.endswith(".png") for name in report["samples"][0])
    saved = checkpoint.read_checkpoint(folder / checkpoint.LAST)
    assert saved["progress"]["updates"] == 2
    continued(data, folder, uninterrupted)


@pytest.mark.parametrize("spoilt", ["conv1.0.weight", "bn1.running_var"])
def test_weights_and_statistics_that_are_not_finite_are_never_saved(data, tmp_path, spoilt):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    assert run(arguments(data, folder), log, SpoilTensor(4, spoilt)) == 1
    assert f"a weight is not finite after update 4 of epoch 1 ({spoilt})" in log.read_text()
    saved = checkpoint.read_checkpoint(folder / checkpoint.LAST)
    assert saved["progress"]["updates"] == 2 and all(v.isfinite().all() for v in saved["model"].values())


@pytest.mark.slow
def test_three_processes_add_gradients_in_one_order(data, tmp_path):
    """gloo's own order depends on a gradient's place in its bucket, and DDP lays the buckets anew when a run begins."""
    more = "--model ea_conv_transformer_cifar --model-kwargs widths=[16,16,16,16] --batch-size 2".split()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder, sabotages in ((whole, [None]), (broken, [SignalAfterUpdate(signal.SIGTERM, 4, rank=1), None])):
        log = folder.with_suffix(".log")
        for sabotage in sabotages:
            codes = run_world(3, [*arguments(data, folder), *more], log, sabotage)
            assert codes == [128 + signal.SIGTERM if sabotage else 0] * 3, log.read_text()
    same_result(broken, whole)
