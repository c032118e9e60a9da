"""Several gloo processes get the same weights as one process with the same images and see every test image once; a run
can continue with another number of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch

from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine import train as training
from ea_vision.engine.train import Trainer
from experiments.learning_curves import read_metrics
from tests.engine.runner import (
    CPU,
    GN_MODEL,
    SignalAfterUpdate,
    around,
    saved,
    spoil_loss,
    start_world,
    train,
)
from tests.process import ROOT
from tests.slow import unix_only

unix_only()


def test_two_processes_or_two_batches_equal_one_with_twice_the_batch(arguments, tmp_path):
    """Group norm, no dropout: with batch norm each process would use the statistics of its own half. Flips depend on
    the image, and Lookahead synchronises at the same updates."""
    one = tmp_path / "one"
    options = [*GN_MODEL, "--lr 0.02 --clip-grad 1 --opt lookahead_sgd --flip alternate"]
    train(arguments(one, *options))
    expected = read_metrics(one)
    for more, size in (("--batch-size 4", 2), ("--batch-size 4 --grad-accum-steps 2", 1)):
        other = tmp_path / str(size)
        train(arguments(other, *options, more), size=size)
        # up to the order of sums
        torch.testing.assert_close(saved(other)["model"], saved(one)["model"], rtol=1e-6, atol=1e-6)
        metrics = read_metrics(other)
        assert metrics["step"] == expected["step"]
        assert metrics["top1"] == expected["top1"]
        assert metrics["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)


def test_non_finite_loss_on_one_process_stops_all(arguments, folder):
    train(arguments(folder, "--batch-size 4"), partial(spoil_loss, 3, 1), size=2, code=1)
    report = json.loads((folder / "nonfinite-epoch001-update00003.json").read_text())
    assert [len(ids) for ids in report["sample_ids"]] == [4, 4], "the samples of every process"


@pytest.mark.slow
@pytest.mark.parametrize("hung", [1, 0])
def test_a_process_that_hangs_ends_the_run_in_one_line(arguments, folder, tmp_path, hung):
    log = tmp_path / "log"
    argv = arguments(folder, "--dist-timeout 0.1 --batch-size 4")
    # the second epoch's second update
    processes = start_world(2, argv, log, SignalAfterUpdate(signal.SIGSTOP, 7, rank=hung))
    try:
        while "epoch 1/2" not in log.read_text() and processes[1 - hung].is_alive():
            time.sleep(0.1)
        begin = time.monotonic()
        processes[1 - hung].join(60)
        assert processes[1 - hung].exitcode == 1, log.read_text()
        assert time.monotonic() - begin < 6 + 15, log.read_text()
    finally:
        for process in processes:
            process.kill()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    who = "" if hung else "process 1: "
    assert errors == [
        f"error: {who}gave up waiting for the other processes: one has ended or has not answered for 0.1 min"
    ]
    assert saved(folder)["progress"]["epoch"] == 1, "the run can go on"


def rank_statistics(folder):
    """Write each process's own BatchNorm statistics just before they are combined."""

    def watched(distribute, model, *given, **more):
        torch.save(model.bn1.running_mean.clone(), folder / f"rank{os.environ['RANK']}.pt")
        distribute(model, *given, **more)

    around(training, "distribute_bn", watched)


@pytest.mark.parametrize("how", ["reduce", "broadcast"])
def test_statistics_of_unlike_shards(arguments, folder, tmp_path, how):
    """reduce: the mean of all processes' statistics; broadcast: the first process's statistics."""
    argv = arguments(folder, f"--batch-size 4 --epochs 1 --dist-bn {how}")
    train(argv, partial(rank_statistics, tmp_path), size=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    kept = saved(folder)["model"]["bn1.running_mean"]
    assert not torch.allclose(first, second, atol=1e-4), "or this does not test what it says"
    torch.testing.assert_close(kept, (first + second) / 2 if how == "reduce" else first)


def log_ids(folder, stop_after=0):
    """Write the ids of every update to one file per process; send SIGTERM in update `stop_after` if it is not 0."""
    folder.mkdir(exist_ok=True)

    def watched(update, trainer, batches):
        ids = torch.cat([batch.ids for batch in batches])
        line = json.dumps([trainer.progress.epoch, ids.tolist()])
        with open(folder / f"{trainer.world.rank}-of-{trainer.world.size}", "a") as file:
            file.write(f"{line}\n")
        return update(trainer, batches)

    around(Trainer, "_update", watched)
    if stop_after:
        SignalAfterUpdate(signal.SIGTERM, stop_after)()


SHARED = [*GN_MODEL, "--total-batch 8 --batch-size 2 --lr 0.002 --clip-grad 1"]  # small steps


def test_stopped_on_two_continued_on_one_and_back_inside_an_epoch(arguments, folder, tmp_path):
    """Five updates per epoch: two on two processes, two on one, the rest on two. Each image is seen once per epoch, and
    the weights equal those of one process with four batches per update. Without BatchNorm, whose batches of two would
    pair other images."""
    alone = tmp_path / "alone"
    ids = tmp_path / "ids"
    assert "8 images = 2 x 4 batches x 1 processes" in train(arguments(alone, *SHARED))
    argv = arguments(folder, *SHARED, "--checkpoint-steps 1")
    stopping = partial(log_ids, ids, 2)
    printed = train(argv, stopping, size=2, code=143)
    assert "8 images = 2 x 2 batches x 2 processes" in printed
    assert run_folder.read_config(folder)[1]["processes"] == 2
    train(argv, stopping, code=143)
    assert saved(folder)["progress"]["step"] not in (0, 5)
    train(argv, partial(log_ids, ids), size=2)
    assert {path.name for path in ids.iterdir()} == {"0-of-1", "0-of-2", "1-of-2"}
    seen = {0: [], 1: []}
    for path in ids.iterdir():
        for line in path.read_text().splitlines():
            epoch, images = json.loads(line)
            seen[epoch] += images
    for images in seen.values():
        assert sorted(images) == list(range(40)), "each image once"
    torch.testing.assert_close(saved(alone)["model"], saved(folder)["model"], rtol=1e-5, atol=1e-6)
    error = "the images of an update (batch_size x grad_accum_steps x processes) were 8, got 4"
    assert error in train(arguments(alone, *SHARED, "--total-batch 4"), code=2)


AGENT = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:], stdout=open("log", "w"), stderr=subprocess.STDOUT).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_a_trainer_ends_with_a_killed_torchrun(arguments, folder, tmp_path):
    """The trainer notices it, saves, and releases the run folder."""
    argv = [sys.executable, "-m", "ea_vision", "train-cifar", *arguments(folder, "--epochs 900")]
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *argv], cwd=tmp_path, env=env, stdout=subprocess.PIPE
    )
    trainer = psutil.Process(int(agent.stdout.readline()))
    while not (folder / checkpoint.PREVIOUS).exists() and trainer.is_running():
        time.sleep(0.1)
    agent.kill()
    agent.wait()
    psutil.wait_procs([trainer], timeout=60)
    printed = (tmp_path / "log").read_text()
    assert "stopped by signal 15 after update" in printed
    assert f"saved {folder}" in printed
    with run_folder.locked(folder, CPU):
        assert saved(folder)["progress"]["updates"] > 0
