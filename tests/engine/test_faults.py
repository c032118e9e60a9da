"""One row per fault, by the user or in files on disk, with the one-line error that reports it."""

import math
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ea_vision import __main__ as commands
from ea_vision.base.errors import RunError
from ea_vision.base.processes import MOST_WORKERS, WorkerLost, workers_watched
from ea_vision.data.imagenet import DecodingLoader
from ea_vision.data.on_device import EvalLoader
from ea_vision.engine import checkpoint, train_cifar, train_imagenet
from ea_vision.engine.run import enable_checkpointing
from ea_vision.engine.step_log import StepLog
from experiments.learning_curves import write_learning_curves
from tests.data.photos import make_folder, make_photos
from tests.engine.runner import (
    after_update,
    around,
    failure,
    saved,
    stopped,
    times_of,
    train,
    weights_of,
    words,
)
from tests.refused import refused
from tests.slow import unix_only

unix_only()


def resume(folder):
    """The command of the old run, in `folder`."""
    return words(
        "--dataset digits --recipe none --device cpu --epochs 2 --batch-size 250 --img-size 16",
        f"--model-kwargs depth=1 widths=[8,8,8,8] --output {folder}",
    )


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A run folder with one of two epochs."""
    folder = tmp_path_factory.mktemp("runs") / "half"
    stopped(resume(folder), 6)
    return folder


@pytest.fixture
def old_run(half_done, folder):
    """A copy of the run, which a test may damage."""
    return shutil.copytree(half_done, folder)


# ---- what is refused before anything is written ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, message",
    [
        ("--workers 100000", f"workers must be at most {MOST_WORKERS}, got 100000"),
        (
            "--batch-size 1 --mixup 0.2",
            "mixup and cutmix mix pairs of images: batch_size must be at least 2, got 1",
        ),
        (
            "--model-kwargs num_classes=7",
            "model keyword num_classes must be 3, as data and options are, got 7",
        ),
        (
            "--batch-size 1",
            "model test_resnet cannot be trained on batches of 1 images of 16 pixels: *",
        ),
        (
            "--model ea_aa_resnet34 --model-kwargs alpha=x",
            "model ea_aa_resnet34 refuses num_classes=3 in_chans=3 img_size=16 drop_rate=0.2 alpha=x: *",
        ),
        (
            "--dataset digits --evaluate ea_conv_transformer_cifar.long_c10",
            "ea_conv_transformer_cifar.long_c10 was trained on other classes: 'airplane' where the data has '0'",
        ),
        ("--sync-bn", "--sync-bn needs CUDA, got cpu"),
        ("--draw-maps 1", "--draw-maps needs a network with attention maps, test_resnet has none"),
        ("--epochs 0.01", "epochs must cover at least one of the 5 updates of an epoch, got 0.01"),
        (
            "--model aa_mnasnet_075 --pretrained",
            "aa_mnasnet_075 has no pretrained weights of its own. It can begin as timm's semnasnet_075*",
        ),
        (
            "--evaluate cnn_cifar --model test_resnet",
            "--evaluate cnn_cifar has model 'cnn_cifar', got --model 'test_resnet'",
        ),
        (
            "--evaluate cnn_cifar --pretrained-path weights.pth",
            "--evaluate takes a file of weights itself, got cnn_cifar and --pretrained-path weights.pth",
        ),
        (f"--output {'x' * 256}", "*xxx: File name too long"),
        ("--model-kwargs alpah=0.5", "*has no keyword 'alpah'*"),
        (
            "--batch-size 128",
            "an update needs 128 training images (batch_size x grad_accum_steps x processes), and "
            "the data set has fewer, 40: --batch-size 32",
        ),
        ("--holdout 64", "holdout must lie between 1 and 39*"),
    ],
)
def test_refusals(arguments, folder, refusal, more, message):
    bare = "--evaluate" in more
    argv = words(f"--output {folder}", more) if bare else arguments(folder, more)
    assert fnmatchcase(refusal(argv), message.replace("[", "[[]"))
    assert not folder.exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (
            "--aa zzz",
            "aa must be a policy of timm, such as rand-m9-mstd0.5, augmix-m3 or original, got 'zzz': Unknown "
            "AA policy zzz",
        ),
        ("--data-dir=", "*--data-dir is required*"),
        ("--num-classes 1000", "* must have 1000 classes (--num-classes), got 3"),
        ("--train-beton /nowhere.beton", "there is no file /nowhere.beton"),
        (
            "--train-beton a.beton --val-beton b.beton",
            "data_dir must be empty with --train-beton and *",
        ),
        ("--val-beton a.beton --val-split dev", "val_split excludes val_beton, got dev beside it"),
        (
            "--no-test",
            "--no-test needs training images held out (--holdout) to evaluate on, got none",
        ),
    ],
)
def test_refusals_of_the_imagenet_trainer(imagenet, folder, refusal, more, message):
    assert fnmatchcase(refusal(imagenet(folder, more), train_imagenet.main), message)
    assert not folder.exists()


# ---- while it trains -------------------------------------------------------------------------------------------------


def kill_workers(*_):
    """Kill the processes that decode images, as the kernel does when memory runs out."""
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)


def test_a_killed_worker_names_the_last_good_checkpoint(imagenet, folder):
    argv = imagenet(folder, "--batch-size 2 --checkpoint-steps 1")
    error = failure(argv, partial(after_update, 2, kill_workers), train_imagenet.main)
    # torch's two sentences, its signal handler's and its queue's; or a socket's where that notices first.
    torchs = r"RuntimeError: DataLoader worker \(pid.*(killed by signal|exited unexpectedly)"
    pythons = "Connection|BrokenPipe|EOFError|FileNotFoundError|Empty"
    beginning = rf"error: a process that decodes images has ended \(({torchs}|{pythons})"
    assert re.match(beginning, error), error
    assert f"fewer --workers need less; last good checkpoint: {folder / checkpoint.LAST}" in error


def kill_worker_in_evaluation():
    """Kill the processes that decode images once the second evaluation batch has arrived."""

    def hurt(decoded, loader, batches, img_size):
        for number, batch in enumerate(decoded(loader, batches, img_size)):
            if number == 1 and not loader.training:
                kill_workers()
            yield batch

    around(DecodingLoader, "_decoded", hurt)


def test_a_worker_killed_in_an_evaluation(imagenet, folder, tmp_path):
    """In the evaluation of a run, and in --evaluate."""
    argv = imagenet(folder, "--eval-batch-size 1 --epochs 1")
    error = failure(argv, kill_worker_in_evaluation, train_imagenet.main)
    assert error.startswith("error: a process that decodes images has ended (")
    assert error.endswith(f"last good checkpoint: {folder / checkpoint.LAST}")
    train(argv, main=train_imagenet.main)
    argv = words(f"--evaluate {folder} --output {tmp_path / 'evaluation'}")
    error = failure(argv, kill_worker_in_evaluation, train_imagenet.main)
    assert error.startswith("error: a process that decodes images has ended (")
    assert error.endswith("and fewer --workers need less")


@pytest.mark.parametrize(
    "error, lost",
    [
        (BrokenPipeError(), True),
        (EOFError(), True),
        (queue.Empty(), True),
        (FileNotFoundError(), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("Pin memory thread exited unexpectedly"), True),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal"), False),
        (EOFError("Caught EOFError in DataLoader worker process 0.\nOriginal"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("x"), False),
    ],
    ids=repr,
)
def test_each_way_in_which_a_dead_worker_shows(error, lost):
    error_type = WorkerLost if lost else type(error)
    with pytest.raises(error_type) as raised, workers_watched():
        raise error
    if lost:
        printed = str(raised.value)
        assert type(error).__name__ in printed
        assert "--workers" in printed


def test_a_signal_that_comes_while_an_error_is_on_its_way_out():
    """torch's signal handler may raise at any time, also in a `finally`: the first error counts."""
    with refused("last good checkpoint: here", RunError), workers_watched():
        try:
            raise RunError("last good checkpoint: here")
        finally:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


def fail_to_append():
    """Let every write to speed.csv fail with a full disk."""

    def hurt(append, log, row):
        raise OSError(28, "No space left on device")

    around(StepLog, "_append", hurt)


def test_a_log_that_cannot_be_written_does_not_end_a_run(arguments, folder):
    printed = train(arguments(folder, "--log-steps 1"), fail_to_append)
    warning = "speed.csv cannot be written, training goes on without: [Errno 28] No space left"
    assert printed.count(warning) == 1
    assert saved(folder)["progress"]["epoch"] == 2


@pytest.mark.parametrize("part", ["progress", "random", "model"])
def test_a_checkpoint_without_a_part(old_run, refusal, part):
    """Given by --resume it is refused in one line; found in the run folder it is moved aside."""
    path = old_run / "last.ckpt"
    state = checkpoint.read_checkpoint(path)
    del state[part]
    path.write_bytes(checkpoint.encode(state))
    error = refusal([*resume(old_run), "--resume", str(path)])
    assert error == f"{path} is not the checkpoint of a run: it has no {part}"
    assert checkpoint.newest_checkpoint(old_run)[0].name == checkpoint.PREVIOUS


@pytest.mark.parametrize(
    "world, message",
    [
        (
            {"WORLD_SIZE": "abc"},
            "WORLD_SIZE must be a whole number, as torchrun sets it, got 'abc'",
        ),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a whole number, as torchrun sets it, got 'x'"),
        ({"RANK": "-1"}, "RANK must be a whole number, as torchrun sets it, got '-1'"),
        (
            {"RANK": "3", "WORLD_SIZE": "2"},
            "RANK must be 0 to WORLD_SIZE - 1, got RANK 3 of WORLD_SIZE 2",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2 needs RANK, MASTER_ADDR, MASTER_PORT too: start the "),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"},
            "WORLD_SIZE 2 needs MASTER_ADDR too: start the processes by torchrun, which sets them",
        ),
    ],
    ids=str,
)
def test_invalid_variables_of_torchrun_are_refused(
    arguments, folder, refusal, monkeypatch, world, message
):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert message in refusal(arguments(folder))
    assert not folder.exists()


def run_out_of_memory(trainer):
    raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


def test_out_of_memory_advises(arguments, folder):
    error = failure(arguments(folder), partial(after_update, 2, run_out_of_memory))
    assert error.startswith(
        "error: out of memory in update 3 of epoch 1 (tried to allocate 2.00 GiB): a smaller"
    )
    assert "--total-batch 8 adds up more batches, --grad-checkpointing" in error
    assert str(folder / checkpoint.LAST) in error


def test_a_model_without_checkpointing_is_named():
    with refused("--grad-checkpointing needs a model that supports it, linear does not"):
        enable_checkpointing(torch.nn.Linear(2, 2), "linear")


# ---- data -----------------------------------------------------------------------------------------------------------


def test_images_that_cannot_be_trained_or_evaluated_on(
    arguments, imagenet, folder, tmp_path, refusal
):
    """One class; other classes in val; the same images, linked or copied."""

    def refused_data(argv, root, main=train_cifar.main):
        error = refusal([*argv, "--data-dir", str(root)], main)
        assert not folder.exists()
        return error

    small = make_folder(tmp_path / "small", classes=1)
    message = "at least 2 classes of images are required, got class_0"
    assert refused_data(arguments(folder), small) == message
    small = make_folder(tmp_path / "small")
    shutil.rmtree(small / "test")
    (small / "test").symlink_to(small / "train")
    message = "training and evaluation need different images, got the same"
    assert refused_data(arguments(folder), small) == message
    photos = make_photos(tmp_path / "photos")
    shutil.rmtree(photos / "val")
    shutil.copytree(photos / "train", photos / "val")
    assert refused_data(imagenet(folder), photos, train_imagenet.main) == message
    (photos / "val/class_2").rename(photos / "val/class_3")
    assert "class_2, class_3" in refused_data(imagenet(folder), photos, train_imagenet.main)


def test_a_complete_run_of_other_data(arguments, folder, tmp_path, capsys, refusal):
    argv = arguments(folder, "--epochs 1")
    train(argv)
    written = times_of(folder)
    train_cifar.main(argv)
    assert "is complete" in capsys.readouterr().out
    other = make_folder(tmp_path / "other", train=42)
    error = refusal([*argv, "--data-dir", str(other)])
    assert error.startswith(f"{folder} was trained on other data: fingerprint ")
    assert times_of(folder) == written


def test_evaluating_a_run_as_another_model(old_run, refusal):
    error = refusal(["--evaluate", str(old_run), "--model", "resnet18"])
    assert error == (
        f"--evaluate {old_run} has model 'ea_conv_transformer_cifar', got --model 'resnet18'"
    )
    error = refusal(["--evaluate", str(old_run), "--model-kwargs", "alpha=0.1"])
    assert error.startswith(f"--evaluate {old_run} has model_kwargs {{'depth': 1, ")
    train_cifar.main(["--evaluate", str(old_run), "--model", "ea_conv_transformer_cifar"])


# ---- weights that are no numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value", [("stem.bn.running_mean", math.nan), ("head.fc.weight", math.inf)]
)
def test_weights_and_statistics_that_are_not_finite(old_run, refusal, name, value):
    weights = weights_of(old_run)
    weights[name].view(-1)[0] = value
    safetensors.torch.save_file(weights, old_run / "model.safetensors")
    error = refusal(["--evaluate", str(old_run)])
    assert (
        error == f"weights {old_run}/model.safetensors must be finite numbers, got others in {name}"
    )
    state = saved(old_run)
    state["model"][name].view(-1)[0] = value
    (old_run / "last.ckpt").write_bytes(checkpoint.encode(state))
    error = refusal(resume(old_run))
    assert error == f"weights {old_run}/last.ckpt must be finite numbers, got others in {name}"


def spoil_evaluation():
    """Make the loss of every evaluation NaN."""

    def spoilt(batches, loader):
        for batch in batches(loader):
            yield batch._replace(images=batch.images * math.nan)

    around(EvalLoader, "batches", spoilt)


def test_an_evaluation_that_fails_ends_a_run(arguments, folder):
    error = "error: the loss of the evaluation on 13 images is nan; last good checkpoint: "
    assert failure(arguments(folder), spoil_evaluation) == f"{error}{folder}/last.ckpt"


@pytest.mark.parametrize("name", ["model.md", "metrics.csv", "last.ckpt"])
def test_a_folder_where_a_file_of_the_run_belongs(arguments, folder, refusal, name):
    (folder / name).mkdir(parents=True)
    error = refusal(arguments(folder))
    assert error == f"{folder / name} must be a file of the run, and it is a folder"
    assert os.listdir(folder) == [name]


# ---- run folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model", {}, "do not fit the model: "),
        ("optimizer", {"state": {}, "param_groups": []}, "does not fit sgd: "),
        ("data_fingerprint", "0" * 64, "was trained on other data: fingerprint 000000000000, got "),
        ("ema", {}, "has the averaged weights of --model-ema-decay, got 0"),
    ],
)
def test_checkpoints_of_another_run(old_run, refusal, key, value, message):
    """The content is refused in one line, and the file is not changed."""
    path, other = old_run / "last.ckpt", Path(f"{old_run}2")
    path.write_bytes(checkpoint.encode({**checkpoint.read_checkpoint(path), key: value}))
    before = path.read_bytes()
    for more in ([], ["--resume", str(path), "--output", str(other)]):
        error = refusal([*resume(old_run), *more])
        assert str(path) in error
        assert message in error
    assert path.read_bytes() == before
    assert not other.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only there may a name be no UTF-8")
def test_a_run_whose_name_is_no_utf8(old_run, tmp_path):
    """Figures show such a byte as \\xff."""
    run = old_run.rename(tmp_path / os.fsdecode(b"run\xff"))
    write_learning_curves([run], tmp_path / "curves.png")
    assert commands.main(["train-cifar", "--evaluate", str(run)]) == 0
    picture = tmp_path / "heatmap.png"
    words = ["heatmap", "--model", str(run), "--layers", "1", "-o", str(picture), "digits#0"]
    assert commands.main(words) == 0
    assert picture.stat().st_size > 1000


def test_a_run_folder_of_another_format_is_one_line(old_run, refusal):
    """A config.yaml as release 0.3 wrote it, and files that are not a config.yaml."""
    path = old_run / "config.yaml"
    for content in (
        path.read_text().replace("about:", "run:"),
        path.read_text().replace("format: 1", "format: 7"),
        "",
        "[]",
        "a: [",
    ):
        path.write_text(content)
        error = refusal(["--evaluate", str(old_run)])
        assert error.startswith(
            (f"{old_run} must be a run folder of format 1, got ", f"{old_run} is not a run")
        )
        assert "format 1" in error
