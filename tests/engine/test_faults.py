"""One row a fault: what a user can get wrong, or a disk do to files, and the one line that says so."""
from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import yaml

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.networks import create_classifier
from ea_vision.base.processes import MOST_WORKERS, World
from ea_vision.engine import checkpoint, run_folder, train_cifar, train_imagenet
from ea_vision.engine.command import enable_checkpointing
from ea_vision.engine.evaluate import NonFiniteLoss, evaluate
from ea_vision.engine.train import Trainer
from tests.data.photos import make_photos
from tests.engine.runner import SignalAfterUpdate, arguments, make_folder, run

WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


OF_THE_OLD_RUN = ["--dataset", "digits", "--recipe", "none", "--device", "cpu", "--epochs", "2",
                  "--batch-size", "250", "--img-size", "16", "--output"]
NARROW = ["--model-kwargs", "widths=[8,8,8,8]", "depth=1"]


def resume(folder: Path) -> list[str]:
    """The command of the old run, in `folder`."""
    return [*OF_THE_OLD_RUN, str(folder), *NARROW]


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A run folder with one of two epochs."""
    folder = tmp_path_factory.mktemp("runs") / "half"
    assert run(resume(folder), folder.with_suffix(".log"), SignalAfterUpdate(signal.SIGTERM, 6)) == 143
    return folder


@pytest.fixture
def old_run(half_done, tmp_path):
    """A copy of it, which a test may spoil."""
    return Path(shutil.copytree(half_done, tmp_path / "run"))


def error_of(main, argv, capsys, code=2) -> str:
    """Run a command; return its error, which must be one line."""
    assert exit_code(lambda: main(argv)) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


# ---- options --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("more, message", [
    (["--lr", "inf"], "lr must be a finite number, got inf"),
    (["--weight-decay", "inf"], "weight_decay must be a finite number, got inf"),
    (["--clip-grad", "1e999"], "clip_grad must be a finite number, got inf"),
    (["--decay-milestones", "1", "inf"], "decay_milestones must be a finite number, got inf"),
    (["--model-ema-decay", "1"], "model_ema_decay must be below 1.0, got 1.0"),
    (["--workers", "100000"], f"workers must be at most {MOST_WORKERS}, got 100000"),
    (["--workers", "-1"], "workers must be at least 0, got -1"),
    (["--seed", str(2**64)], f"seed must be at most {2**63 - 1}, got {2**64}"),
    (["--seed", "1e400"], "seed must be of type int, got '1e400'"),
    (["--batch-size", "1", "--mixup", "0.2"],
     "mixup and cutmix mix pairs of images: batch_size must be at least 2, got 1"),
    (["--batch-size", "1", "--cutmix", "1"],
     "mixup and cutmix mix pairs of images: batch_size must be at least 2, got 1"),
    (["--model-kwargs", "num_classes=7"], "model keyword num_classes must be 3, as the images are, got 7"),
    (["--model-kwargs", "in_chans=1"], "model keyword in_chans must be 3, as the images are, got 1"),
    (["--batch-size", "1"], "model test_resnet cannot be trained on batches of 1 images of 32 pixels: *"),
    (["--model-kwargs", "a=!!python/object/apply:os.system ['true']"],
     "--model-kwargs takes key=value with a number, true, false, text or a [list], got "
     "\"a=!!python/object/apply:os.system ['true']\" (see *"),
    (["--model-kwargs", "a=[1"], "--model-kwargs takes key=value with *"),
    (["--model-kwargs", "a=2020-13-45"], "--model-kwargs takes key=value with *"),
    (["--model-kwargs", "a=2020-12-24"], "--model-kwargs takes key=value with *"),
    (["--model-kwargs", "a=!!set {1}"], "--model-kwargs takes key=value with *"),
    (["--model", "ea_conv_transformer_cifar", "--model-kwargs", "alpha=x"],
     "model ea_conv_transformer_cifar refuses num_classes=3 in_chans=3 img_size=32 alpha=x: *"),
    (["--dataset", "digits", "--evaluate", "ea_conv_transformer_cifar.fast_c10"],
     "ea_conv_transformer_cifar.fast_c10 was trained on other classes: 'airplane' where the data has '0'"),
    (["--sync-bn"], "--sync-bn needs CUDA, got cpu"),
    (["--img-size", "²"], "img_size must be of type int, got '²'"),
    (["--epochs", "²"], "epochs must be of type float, got '²'"),
    (["--warmup-epochs", "2.5"],
     "warmup_epochs must be at most the 2 epochs of the run, got 2.5; --warmup-epochs 20% is a fifth of them"),
    (["--epochs", "0.4", "--warmup-epochs", "1", "--sched", "constant"],
     "warmup_epochs must be at most the 0.4 epochs of the run, got 1; --warmup-epochs 20% is a fifth of them"),
    (["--opt-betas", "0.9"], "unknown argument '--opt-betas'; *"),
    (["--pretrained-path", "/nowhere.safetensors"],
     "weights /nowhere.safetensors cannot be read: there is no such file"),
    (["--model", "ea_aa_resnet34", "--model-kwargs", "layers=[1,1,1,1]", "--pretrained"],
     "there are no pretrained weights of ea_aa_resnet34: train it, or give a file by --pretrained-path"),
    (["--total-batch", "7", "--teacher", "resnet1"], "unknown model or run folder 'resnet1'; *"),
    (["--evaluate", "cnn_cifar", "--model", "test_resnet"],
     "--evaluate cnn_cifar names the model, got --model test_resnet"),
])
def test_options(data, tmp_path, capsys, more, message):
    folder = tmp_path / "run"
    argv = arguments(data, folder)
    if "ea_conv_transformer_cifar" in more:
        argv = [word for word in argv if word not in ("--model-kwargs", "drop_rate=0.2")]
    if "--evaluate" in more:
        argv = ["--output", str(folder)]
    error = error_of(train_cifar.main, [*argv, *more], capsys)
    assert fnmatchcase(error, message.replace("[", "[[]")), error
    assert not folder.exists()


@pytest.mark.parametrize("more, message", [
    (["--aa", "zzz"], "aa must be a policy of timm, such as rand-m9-mstd0.5, augmix-m3 or "
                                "original, got 'zzz' (Unknown AA policy zzz)"),
    (["--crop-scale", "0"], "crop_scale must be above 0.0, got 0.0"),
    (["--crop-scale", "nan"], "crop_scale must be a number, got nan"),
    (["--workers", "100000"], f"workers must be at most {MOST_WORKERS}, got 100000"),
    (["--model-kwargs", "num_classes=7"], "model keyword num_classes must be 3, as the images are, got 7"),
])
def test_options_of_the_imagenet_trainer(photos, tmp_path, capsys, more, message):
    folder = tmp_path / "run"
    argv = ["--model", "test_resnet", "--img-size", "16", "--eval-resize", "20", "--batch-size", "8", "--workers", "1",
            "--device", "cpu", "--data-dir", str(photos), "--output", str(folder)]
    assert error_of(train_imagenet.main, [*argv, *more], capsys) == message
    assert not folder.exists()


def test_a_data_folder_without_a_split_says_what_was_looked_for(photos, tmp_path, capsys):
    argv = ["--model", "test_resnet", "--img-size", "16", "--eval-resize", "20", "--batch-size", "2", "--workers", "0",
            "--device", "cpu", "--output", str(tmp_path / "run"), "--data-dir"]
    error = error_of(train_imagenet.main, [*argv, str(photos / "train")], capsys)
    assert error.endswith(f"train must have train/ or train.tar; {photos} has it: give that folder")
    shutil.copytree(photos / "train", tmp_path / "mine")
    error = error_of(train_imagenet.main, [*argv, str(tmp_path / "mine")], capsys)
    assert "has neither training images nor others to evaluate on: looked for train/ and train.tar" in error
    assert "ILSVRC/Data/CLS-LOC" in error and "--eval-on-train takes the folder itself for both" in error
    error = error_of(train_imagenet.main, [*argv, str(photos), "--val-split", "dev"], capsys)
    assert error == f"val_split dev: {photos} has neither dev nor dev.tar"


def test_a_model_without_checkpointing_is_named():
    with pytest.raises(UsageError, match="--grad-checkpointing needs a model that has it, linear has not"):
        enable_checkpointing(torch.nn.Linear(2, 2), "linear")


class KillWorker:
    """A process that decodes images is killed after the second update, as the kernel does when memory runs out."""

    def __call__(self):
        update = Trainer._update

        def hurt(trainer, batches):
            update(trainer, batches)
            if trainer.progress.updates == 2:
                for child in multiprocessing.active_children():
                    os.kill(child.pid, signal.SIGKILL)

        Trainer._update = hurt


def test_a_killed_worker_names_the_last_good_checkpoint(photos, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    argv = ["--model", "test_resnet", "--img-size", "16", "--eval-resize", "20", "--batch-size", "2", "--workers", "1",
            "--device", "cpu", "--data-dir", str(photos), "--output", str(folder), "--checkpoint-steps", "1"]
    assert run(argv, log, KillWorker(), main=train_imagenet.main) == 1, log.read_text()
    error = log.read_text().splitlines()[-1]
    # torch's two sentences: its signal handler's, or its queue's where that notices first.
    assert re.match(r"error: DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", error), error
    assert f"fewer --workers need less; last good checkpoint: {folder / checkpoint.LAST}" in error


class RunOutOfMemory:
    """The third update asks for more memory than there is."""

    def __call__(self):
        update = Trainer._update

        def hurt(trainer, batches):
            if trainer.progress.updates == 2:
                raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
            update(trainer, batches)

        Trainer._update = hurt


def test_out_of_memory_advises(data, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert run(arguments(data, folder), log, RunOutOfMemory()) == 1
    error = log.read_text().splitlines()[-1]
    assert error.startswith("error: out of memory in update 3 of epoch 1 (tried to allocate 2.00 GiB): a smaller")
    assert "--grad-checkpointing" in error and str(folder / checkpoint.LAST) in error


def test_what_was_refused_leaves_nothing_in_the_way_of_the_corrected_command(data, tmp_path, capsys):
    folder, log = tmp_path / "run", tmp_path / "log"
    argv = arguments(data, folder, "--epochs", "1")
    error_of(train_cifar.main, [*argv, "--model-kwargs", "num_classes=7"], capsys)
    assert run(argv, log) == 0, log.read_text()
    # and the same keyword with the right value is no error
    assert run([*arguments(data, tmp_path / "second", "--epochs", "1"), "--model-kwargs", "num_classes=3"], log) == 0


def test_large_seeds_are_taken_as_they_are():
    config, _ = train_cifar.command.resolve(train_cifar.CifarConfig, {"seed": str(2**63 - 1)})
    assert config.seed == 2**63 - 1, "not rounded to a float"


def test_alpha_of_another_kind_is_one_error():
    with pytest.raises(UsageError, match="model ea_aa_resnet34 refuses num_classes=10 in_chans=3 .*alpha=x"):
        create_classifier("ea_aa_resnet34", {"alpha": "x"}, num_classes=10, img_size=64)


# ---- data -----------------------------------------------------------------------------------------------------------

def test_one_class(tmp_path, capsys):
    argv = arguments(make_folder(tmp_path / "data", classes=1), tmp_path / "run")
    assert error_of(train_cifar.main, argv, capsys) == "at least 2 classes of images are required, got class_0"
    root = make_photos(tmp_path / "photos", classes=1)
    argv = ["--model", "test_resnet", "--data-dir", str(root), "--output", str(tmp_path / "run"), "--workers", "1"]
    assert error_of(train_imagenet.main, argv, capsys) == "at least 2 classes of images are required, got class_0"
    assert not (tmp_path / "run").exists()


def test_the_same_images_for_training_and_evaluation(tmp_path, capsys):
    root = make_folder(tmp_path / "data")
    shutil.rmtree(root / "test")
    (root / "test").symlink_to(root / "train")
    folder, log = tmp_path / "run", tmp_path / "log"
    argv = arguments(root, folder, "--epochs", "1")
    message = ("the training images are those to evaluate on: give others, or --eval-on-train, which calls no result "
               "an accuracy")
    assert error_of(train_cifar.main, argv, capsys) == message
    assert not folder.exists()
    assert run([*argv, "--eval-on-train"], log) == 0, log.read_text()
    assert "accuracy" not in log.read_text() and "fit to the training images" in log.read_text()
    assert run_folder.read_results(folder).keys() >= {"train_best", "train_last", "train_images"}
    assert run_folder.read_config(folder)[1]["eval_split"] == "train"
    photos = make_photos(tmp_path / "photos")
    shutil.rmtree(photos / "val")
    (photos / "val").symlink_to(photos / "train")
    argv = ["--model", "test_resnet", "--data-dir", str(photos), "--output", str(tmp_path / "b"), "--workers", "1"]
    assert error_of(train_imagenet.main, argv, capsys) == message
    (photos / "val").unlink()
    shutil.copytree(photos / "train", photos / "val")
    assert error_of(train_imagenet.main, argv, capsys) == message, "a copy is no other data"


def test_no_workers_train_as_some_do(data, photos, tmp_path):
    log, ends = tmp_path / "log", []
    tiny = ["--model", "test_resnet", "--img-size", "16", "--eval-resize", "20", "--batch-size", "8", "--epochs", "1",
            "--device", "cpu", "--warmup-epochs", "0", "--data-dir", str(photos)]
    for workers in ("0", "1"):
        folder = tmp_path / f"imagenet{workers}"
        argv = [*tiny, "--workers", workers, "--output", str(folder)]
        assert run(argv, log, main=train_imagenet.main) == 0, log.read_text()
        ends.append(safetensors.torch.load_file(folder / "model.safetensors"))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert run(arguments(data, tmp_path / "cifar", "--epochs", "1", "--workers", "0"), log) == 0, log.read_text()


def test_a_complete_run_of_other_data(data, tmp_path, capsys):
    folder, log = tmp_path / "run", tmp_path / "log"
    argv = arguments(data, folder, "--epochs", "1")
    assert run(argv, log) == 0, log.read_text()
    assert train_cifar.main(argv) == 0 and "is complete" in capsys.readouterr().out
    other = make_folder(tmp_path / "other", train=42)
    argv[argv.index(str(data))] = str(other)
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert error_of(train_cifar.main, argv, capsys).startswith(f"{folder} was trained on other data: fingerprint ")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files


def test_evaluating_a_run_as_another_model(old_run, capsys):
    error = error_of(train_cifar.main, ["--evaluate", str(old_run), "--model", "resnet18"], capsys)
    assert error == f"--evaluate {old_run} is a run with model 'ea_conv_transformer_cifar', got 'resnet18'"
    error = error_of(train_cifar.main, ["--evaluate", str(old_run), "--model-kwargs", "alpha=0.1"], capsys)
    assert error.startswith(f"--evaluate {old_run} is a run with model_kwargs {{'widths': [8, 8, 8, 8], ")
    assert train_cifar.main(["--evaluate", str(old_run), "--model", "ea_conv_transformer_cifar"]) == 0


# ---- weights that are no numbers ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["stem.bn.running_mean", "head.fc.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_and_statistics_that_are_not_finite(old_run, capsys, name, value):
    weights = safetensors.torch.load_file(old_run / "model.safetensors")
    weights[name].view(-1)[0] = value
    safetensors.torch.save_file(weights, old_run / "model.safetensors")
    error = error_of(train_cifar.main, ["--evaluate", str(old_run)], capsys)
    assert error == f"weights {old_run}/model.safetensors must be finite numbers, got others in {name}"
    state = checkpoint.read_checkpoint(old_run / "last.ckpt")
    state["model"][name].view(-1)[0] = value
    (old_run / "last.ckpt").write_bytes(checkpoint.encode(state))
    error = error_of(train_cifar.main, resume(old_run), capsys)
    assert error == f"weights {old_run}/last.ckpt must be finite numbers, got others in {name}"


def test_an_evaluation_whose_loss_is_not_finite_is_an_error():
    class Loader:
        def batches(self):
            yield torch.full((4, 3, 8, 8), 1e30), torch.zeros(4, dtype=torch.int64), torch.arange(4)

    class Overflows(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :5].pow(2) - x.flatten(1)[:, 1:6].pow(2)

    with pytest.raises(NonFiniteLoss, match="the loss of the evaluation on 4 images is nan"):
        evaluate(Overflows(), Loader(), 5, WORLD)


class SpoilStatistics:
    """Put NaN into batch statistics after update `number`, where the weights stay finite."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self):
        from ea_vision.engine.train import Trainer

        update = Trainer._update

        def hurt(trainer, batches):
            result = update(trainer, batches)
            if trainer.progress.updates == self.number:
                dict(trainer.model.named_buffers())["bn1.running_var"][0] = float("nan")
            return result

        Trainer._update = hurt


def test_statistics_that_are_not_finite_are_never_saved(data, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert run(arguments(data, folder), log, SpoilStatistics(4)) == 1
    assert "a weight is not finite after update 4 of epoch 1: bn1.running_var" in log.read_text()
    saved = checkpoint.read_checkpoint(folder / checkpoint.LAST)
    assert saved["progress"]["updates"] == 2 and all(v.isfinite().all() for v in saved["model"].values())


class SpoilEvaluation:
    """Make the images of the first evaluation NaN."""

    def __call__(self):
        from ea_vision.engine import classification

        evaluate, left = classification.evaluate, [1]

        class Spoilt:
            def __init__(self, loader):
                self.loader = loader

            def batches(self):
                for images, targets, ids in self.loader.batches():
                    yield images * math.nan, targets, ids

        def hurt(model, loader, *args, **kwargs):
            return evaluate(model, Spoilt(loader) if left and left.pop() else loader, *args, **kwargs)

        classification.evaluate = hurt


def test_an_evaluation_that_fails_ends_a_run(data, tmp_path):
    log = tmp_path / "log"
    assert run(arguments(data, tmp_path / "a"), log, SpoilEvaluation()) == 1
    assert f"error: the loss of the evaluation on 13 images is nan; last good checkpoint: {tmp_path}/a/last.ckpt\n" \
        in log.read_text()


# ---- run folders --------------------------------------------------------------------------------------------------


def test_a_config_of_a_model_that_refuses(old_run, capsys):
    config = yaml.safe_load((old_run / "config.yaml").read_text())
    config["about"]["model_kwargs"]["depht"] = 3
    (old_run / "config.yaml").write_text(yaml.safe_dump(config))
    error = error_of(train_cifar.main, ["--evaluate", str(old_run)], capsys)
    assert error.startswith(f"run {old_run}: model ea_conv_transformer_cifar refuses ") and "'depht'" in error


def spoil(state, key, value=None):
    """A checkpoint's state with an entry, dotted, replaced or (None) missing."""
    *path, last = key.split(".")
    place = state
    for part in path:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value


@pytest.mark.parametrize("key, value, message", [
    ("model", {}, "do not fit the model: "),
    ("optimizer", {"state": {}, "param_groups": []}, "does not fit sgd: "),
    ("data_fingerprint", "0" * 64, "was trained on other data: fingerprint 000000000000, got "),
    ("ema", {}, "has the averaged weights of --model-ema-decay, got 0"),
])
def test_checkpoints_of_another_run(old_run, capsys, key, value, message):
    """What is refused is the content, in one line, and the file stays as it is."""
    path, other = old_run / "last.ckpt", Path(f"{old_run}2")
    path.write_bytes(checkpoint.encode({**checkpoint.read_checkpoint(path), key: value}))
    before = path.read_bytes()
    for more in ([], ["--resume", str(path), "--output", str(other)]):
        error = error_of(train_cifar.main, [*resume(old_run), *more], capsys)
        assert str(path) in error and message in error
    assert path.read_bytes() == before and not other.exists()


def test_a_run_folder_of_another_format_is_one_line(old_run, capsys):
    """As release 0.3 wrote them, and what is no config.yaml at all."""
    path = old_run / "config.yaml"
    for content in (path.read_text().replace("about:", "run:"), path.read_text().replace("format: 1", "format: 7"),
                    "", "[]", "a: ["):
        path.write_text(content)
        for argv in (["--evaluate", str(old_run)], ["--learning-curves", str(old_run), "--output", "c.png"]):
            error = error_of(train_cifar.main, argv, capsys)
            assert error.startswith((f"{old_run} must be a run folder of format 1, got ", f"{path} is not the config"))


def read_only(monkeypatch):
    """Make every change of files fail as on a read-only mount."""
    import errno
    import os

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def mkdir(folder, *_, exist_ok=False, **__):
        if not (exist_ok and folder.is_dir()):
            refuse()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for name in ("touch", "unlink", "rmdir", "rename"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "replace", refuse)


def test_a_run_folder_on_a_read_only_mount(old_run, capsys, monkeypatch):
    files = {path: path.read_bytes() for path in old_run.iterdir()}
    read_only(monkeypatch)
    error = error_of(train_cifar.main, [*resume(old_run)], capsys)
    assert error == f"cannot write into the folder {old_run}: Read-only file system"
    error = error_of(train_cifar.main, ["--evaluate", str(old_run)], capsys)
    assert error == f"cannot write into the folder {old_run}: Read-only file system"
    error = error_of(train_cifar.main, [*resume(old_run.parent / "new")], capsys)
    assert error == f"cannot make the folder {old_run.parent / 'new'}: Read-only file system"
    assert {path: path.read_bytes() for path in old_run.iterdir()} == files


def test_survivors_stay_as_they_were(old_run, tmp_path, capsys):
    """Rows that were right before: a pickle is not executed, a plain weights file and a foreign file are named."""
    path = old_run / "last.ckpt"
    torch.save({"model": timm.create_model("test_resnet").state_dict()}, path)
    out = str(tmp_path / "other")
    error = error_of(train_cifar.main, [*resume(old_run), "--resume", str(path), "--output", out], capsys)
    assert error.startswith(f"{path} is not a checkpoint of this trainer: its format must be ")
    shutil.copy(old_run / "model.safetensors", path)
    error = error_of(train_cifar.main, [*resume(old_run), "--resume", str(path), "--output", out], capsys)
    assert error.startswith(f"{path} cannot be read as a checkpoint: ")
    path.write_text(json.dumps({}))
    error = error_of(train_cifar.main, [*resume(old_run), "--resume", str(path), "--output", out], capsys)
    assert error.startswith(f"{path} cannot be read as a checkpoint: ")
