"""The kill matrix: a run killed anywhere and continued by the same command ends like an uninterrupted run."""

import errno
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import timm

from ea_vision.base.errors import RunError
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.train import Progress
from tests.engine.runner import (
    CPU,
    HurtWrite,
    SignalAfterUpdate,
    assert_equal,
    failure,
    nothing_truncated,
    same_result,
    saved,
    signal_in_evaluation,
    spoil_loss,
    spoil_tensor,
    start,
    stopped,
    train,
)
from tests.refused import refused
from tests.slow import unix_only

unix_only()

EXTRAS = "--lr 0.1 --model-ema-decay 0.9 --mixup 0.2 --reprob 0.5 --holdout 0 --snapshot-epochs 2"


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory):
    """The run that all others are compared with; every option that has a state is on."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(arguments(folder, EXTRAS))
    assert os.listdir(folder / run_folder.SNAPSHOTS) == ["epoch_0002.safetensors"]
    return folder


@pytest.fixture
def argv(arguments, folder):
    """The command of the run in `folder`."""
    return arguments(folder, EXTRAS)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def go_on(argv, folder, uninterrupted):
    """Continues the run in `folder` with the same command, and compares it with the uninterrupted one."""

    def continued():
        nothing_truncated(folder)
        train(argv)
        nothing_truncated(folder)
        same_result(folder, uninterrupted)
        assert run_folder.read_config(folder)[1]["starts"] == progress(folder)["starts"]
        assert not list(folder.rglob(".*.tmp")), "an interrupted write is cleared away"

    return continued


@pytest.fixture
def kill(argv, folder, go_on):
    """Starts the same command again and again, each time killed in another way, and then once more."""

    def killed(sabotages):
        for sabotage in sabotages:
            train(argv, sabotage, code=-signal.SIGKILL)
            nothing_truncated(folder)
        go_on()

    return killed


def progress(folder, name=checkpoint.LAST):
    """Return the progress stored in a checkpoint."""
    return saved(folder, name)["progress"]


# Among what `same_result` compares to the bit are the averaged weights (--model-ema-decay).
# Updates 1 to 5 are the first epoch; checkpoints lie before 1 and after 2, 4, 5, 7, 9 and 10. Each start counts its own
# updates: killed in update 1, 4, 7, 6 and 10 of the run, of which those since the last checkpoint are made again.
def test_sigkill_during_training(kill):
    kill(SignalAfterUpdate(signal.SIGKILL, n) for n in (1, 4, 5, 1, 4))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_sigkill_during_checkpoint_writes(kill, first):
    """At every stage of three writes: the run's first, one inside an epoch, one at an epoch's end."""
    stages = ["renamed"] * (first - 1) + ["half", "unsynced", "synced"]
    if first > 1:  # the first replaces none
        stages.append("between")
    kill(HurtWrite(stage, 1) for stage in (*stages, "renamed"))


@pytest.mark.parametrize(
    "names",
    [
        (run_folder.CONFIG, run_folder.METRICS, checkpoint.BEST),
        (run_folder.WEIGHTS, "epoch_0002.safetensors", run_folder.RESULTS),
    ],
)
def test_sigkill_during_other_writes(kill, names):
    writes = []
    for name in names:
        writes += [HurtWrite("half", 1, name), HurtWrite("renamed", 1, name)]
    kill(writes)


def test_sigkill_between_the_last_epochs_best_and_last_checkpoint(
    argv, folder, uninterrupted, go_on
):
    """best.ckpt alone says that the epochs are done: the run that continues writes last.ckpt."""
    assert progress(uninterrupted, checkpoint.BEST)["epoch"] == 2, "or it says nothing"
    train(argv, HurtWrite("renamed", 2, checkpoint.BEST), code=-signal.SIGKILL)
    assert progress(folder)["updates"] == 9
    go_on()


def test_signals_finish_the_update_save_and_leave(argv, folder, go_on):
    """TERM in the first epoch, Ctrl-C in the second, and TERM in an evaluation, which then runs again."""
    for sabotage, number, wanted in (
        (SignalAfterUpdate(signal.SIGTERM, 3), signal.SIGTERM, (0, 3, 3)),
        (signal_in_evaluation, signal.SIGTERM, (0, 5, 5)),
        (SignalAfterUpdate(signal.SIGINT, 3), signal.SIGINT, (1, 3, 8)),
    ):
        printed = train(argv, sabotage, code=128 + number)
        at = progress(folder)
        # the update it was in is finished and saved
        assert (at["epoch"], at["step"], at["updates"]) == wanted
        assert len(at["rows"]) == wanted[0]
        assert run_folder.read_results(folder) is None
    assert "Traceback" not in printed
    go_on()


def test_a_second_run_that_is_refused_leaves_the_folder_of_one_that_has_only_just_begun(folder):
    """The folder is still empty, so the second run might mistake it for its own and delete it."""
    with run_folder.locked(folder, CPU):
        with refused("is in use by another run"), run_folder.locked(folder, CPU):
            raise AssertionError("two runs in one folder")
        run_folder.write_metrics(folder, [])
    assert (folder / run_folder.METRICS).exists()
    with run_folder.locked(folder / "empty", CPU):
        pass
    assert not (folder / "empty").exists(), "its own empty folder a run takes away"


def test_a_disk_that_becomes_read_only_does_not_hide_the_first_error(folder, monkeypatch):
    def unlink(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system", path)

    with refused("^cannot write$", RunError), run_folder.locked(folder, CPU):
        monkeypatch.setattr(Path, "unlink", unlink)
        raise RunError("cannot write")


def test_kill_at_any_time_and_repeatedly(argv, folder, go_on):
    """Kill from outside after 0.4, 0.6 and 0.8 seconds, then let the run complete."""
    for seconds in (0.4, 0.6, 0.8):
        process = start(argv, folder.with_suffix(".log"))
        process.join(seconds)
        process.kill()
        process.join()
    go_on()


def test_resume_goes_on_from_an_older_checkpoint_when_the_newest_is_damaged(
    argv, folder, uninterrupted
):
    stopped(argv, 8, signal.SIGKILL)
    path = folder / checkpoint.LAST
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    printed = train(argv)
    same_result(folder, uninterrupted)
    assert "skipped" in printed
    assert str(path) in printed
    assert "checksum" in printed
    # it is kept, and has pushed out no good one
    assert (folder / "last.ckpt.damaged").read_bytes() == damaged


def test_a_start_without_updates_is_not_kept():
    progress = Progress()
    for updates, commit, kept in (
        (0, "a", "1a"),
        (0, "b", "1b"),
        (5, "c", "1b 6c"),
        (5, "d", "1b 6d"),
        (9, "d", "1b 6d"),
        (8, "e", "1b 6d 9e"),
        (7, "d", "1b 6d"),
        (4, "e", "1b 5e"),
    ):
        progress.updates = updates
        progress.begin({"command": "", "hardware": "", "versions": {}, "git_commit": commit})
        starts = [f"{start['update']}{start['git_commit']}" for start in progress.starts]
        assert starts == kept.split()


def test_disk_full(argv, folder, go_on):
    for name, nth in ((checkpoint.LAST, 3), (checkpoint.BEST, 1), (run_folder.WEIGHTS, 1)):
        printed = train(argv, HurtWrite("full", nth, name), code=1)
        error = printed.splitlines()[-1]
        assert error.startswith("error: ")
        assert f"cannot write {folder / name}" in error
        assert "Traceback" not in printed
        assert not list(folder.glob(".*.tmp")), "what was written in vain is freed"
        saved(folder)
    go_on()


def test_non_finite_loss_stops_and_says_where(argv, folder, go_on):
    error = failure(argv, partial(spoil_loss, 4, 0))
    assert "update 4 of epoch 1" in error
    assert str(folder / checkpoint.LAST) in error
    report = json.loads((folder / "nonfinite-epoch001-update00004.json").read_text())
    assert report["last_good_checkpoint"] == str(folder / checkpoint.LAST)
    [samples] = report["samples"]
    assert len(samples) == 8
    assert all(name.endswith(".png") for name in samples)
    assert progress(folder)["updates"] == 2
    go_on()


@pytest.mark.parametrize("spoilt", ["conv1.0.weight", "bn1.running_var"])
def test_weights_and_statistics_that_are_not_finite_are_never_saved(arguments, folder, spoilt):
    printed = train(arguments(folder), partial(spoil_tensor, 4, spoilt), code=1)
    assert f"a weight is not finite after update 4 of epoch 1 ({spoilt})" in printed
    assert progress(folder)["updates"] == 2
    for value in saved(folder)["model"].values():
        assert value.isfinite().all()


# ---- what the recipes are made of -----------------------------------------------------------------------------------

MUON = "--opt muon --lr 0.02 --opt-kwargs ns_steps=4 --flip alternate --crop-padding-mode reflect --model-ema-decay 0.9"
ATTENTION = "--model ea_conv_transformer_cifar --model-kwargs widths=[16,16,16,16] --batch-size 2"


# Lookahead's two weights meet after update 6, and at the ends of the epochs, updates 5 and 10. gloo's own order of
# adding depends on a gradient's place in its bucket, and DDP lays the buckets anew when a run begins.
@pytest.mark.parametrize(
    "size, options, stops",
    [
        pytest.param(
            1,
            "--opt lookahead_sgd --clip-grad 4",
            {4: signal.SIGKILL, 3: signal.SIGTERM},
            id="lookahead",
        ),
        pytest.param(1, MUON, {4: signal.SIGKILL, 5: signal.SIGTERM}, id="muon"),
        pytest.param(1, "--epochs 2.6", {12: signal.SIGTERM}, id="in the part of an epoch"),
        pytest.param(
            2,
            "--batch-size 4 --model-ema-decay 0.9",
            {1: signal.SIGTERM},  # which comes before the first update
            id="one of two processes",
        ),
        # Statistics of BatchNorm are each process's own; update 5 ends an epoch, where the average's become one.
        pytest.param(
            2,
            "--batch-size 4 --model-ema-decay 0.9 --dist-bn reduce",
            {3: signal.SIGTERM, 6: signal.SIGKILL},
            id="statistics of two processes",
        ),
        pytest.param(
            3, ATTENTION, {4: signal.SIGTERM}, id="three processes", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    arguments, folder, tmp_path, size, options, stops
):
    argv = arguments(folder, options)
    train(arguments(tmp_path / "whole", options), size=size)
    for update, number in stops.items():
        rank = None if number == signal.SIGKILL else size - 1
        stopped(argv, update, number, rank=rank, size=size)
    # all processes hear of it in the same update
    assert len(stops) > 1 or progress(folder)["updates"] == update
    train(argv, size=size)
    same_result(folder, tmp_path / "whole")


def test_exported_weights_are_those_that_were_evaluated(uninterrupted):
    """The averaged ones, bit for bit, as timm loads them by the run's keywords."""
    kwargs = run_folder.read_config(uninterrupted)[1]["model_kwargs"]
    weights = uninterrupted / run_folder.WEIGHTS
    model = timm.create_model("test_resnet", checkpoint_path=weights, **kwargs)
    assert_equal(saved(uninterrupted, checkpoint.BEST)["ema"], model.state_dict())
