"""Run trainers in separate processes, forked quickly from one that has torch loaded, and inject faults into them."""

import csv
import gc
import inspect
import io
import multiprocessing
import os
import signal
import socket
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import safetensors.torch
import torch
from torch.utils._pytree import keystr, tree_map_with_path

import train_imagenet  # noqa: F401  (loaded once, for the processes that train with it)
from ea_vision.base import files
from ea_vision.base.errors import exit_code
from ea_vision.base.processes import World
from ea_vision.data.bad_images import BadImages
from ea_vision.engine import checkpoint, run_folder, train_cifar
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.config import resolve
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train import Trainer
from ea_vision.zoo.weights_file import read_weights
from experiments.learning_curves import read_metrics

BN_MODEL = "--model test_resnet --model-kwargs drop_rate=0.2"  # batch statistics and dropout
GN_MODEL = "--model test_efficientnet_gn --model-kwargs drop_rate=0".split()  # neither
SECONDS = 900  # that a run may take on a busy machine


CPU = World(0, 1, torch.device("cpu"))


def make_trainer(
    folder,
    model,
    train_loader=range(8),
    eval_loader=range(1),
    *,
    classes=3,
    world=CPU,
    kind=ClassificationTrainer,
    schema=train_cifar.CifarConfig,
    **options,
):
    """Return a training loop of these options, without data of its own."""
    config = resolve(schema, {"recipe": "none", **options})
    data = SimpleNamespace(
        config=config,
        world=world,
        classes=["class"] * classes,
        fingerprint="",
        eval_split="test",
        bad_images=BadImages(0),
        describe=lambda index: f"image {index}",
    )
    return kind(data, model, train_loader, eval_loader, folder, StopRequest())


def words(*texts):
    """Return the words of a command; a text that begins with a flag may have several."""
    parts = []
    for text in texts:
        parts += text.split() if text.startswith("--") else [text]
    return parts


def arguments(data, output, *more):
    """A run of two epochs of five updates of eight images, a checkpoint every second update."""
    return words(
        BN_MODEL,
        f"--dataset folder --data-dir {data} --img-size 16 --output {output}",
        "--epochs 2 --batch-size 8 --opt sgd --lr 0.05 --checkpoint-steps 2 --device cpu",
        *more,
    )


def imagenet(photos, output, *more):
    """The same of photos, by the trainer for ImageNet."""
    return words(
        "--model test_resnet --img-size 16 --eval-resize 20 --batch-size 8 --workers 1 --device cpu",
        "--epochs 2 --warmup-epochs 0 --log-steps 2 --checkpoint-steps 2",
        f"--data-dir {photos} --output {output}",
        *more,
    )


def _child(main, argv, sabotage, environment, log):
    gc.freeze()  # a collection would touch, and so copy, the parent's memory pages
    torch.set_num_threads(1)
    os.environ.clear()  # of the test that was the first to start a process
    os.environ.update(environment)
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if sabotage is not None:
        sabotage()
    code = exit_code(lambda: main(argv))
    sys.stdout.flush()
    sys.exit(code)


def start(argv, log, sabotage=None, main=train_cifar.main, **environment):
    """Start `train_cifar.py ARGV`, or another trainer, as a process; stdout and stderr go to `log`."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["tests.engine.runner"])
    environment = {**os.environ, **environment}
    process = context.Process(target=_child, args=(main, argv, sabotage, environment, log))
    process.start()
    return process


def train(argv, sabotage=None, *, code=0, size=1, main=train_cifar.main):
    """Train in `size` processes, which must all end with `code`; return their output, after that of earlier processes
    in the same run folder."""
    output = Path(argv[argv.index("--output") + 1])
    log = output.with_suffix(".log")
    codes = run_world(size, argv, log, sabotage, main)
    printed = log.read_text(encoding="utf-8")
    assert codes == [code] * size, printed
    return printed


def failure(argv, sabotage, main=train_cifar.main):
    """Train until an error ends the run; return the error, which is the last line."""
    return train(argv, sabotage, code=1, main=main).splitlines()[-1]


def stopped(argv, update, number=signal.SIGTERM, *, rank=None, size=1, main=train_cifar.main):
    """Train and send a signal in this update, to one process or to all; all must end with the signal's exit code."""
    code = -number if number == signal.SIGKILL else 128 + number
    return train(argv, SignalAfterUpdate(number, update, rank), code=code, size=size, main=main)


def saved(folder, name=checkpoint.LAST):
    """Return the content of a run's checkpoint."""
    return checkpoint.read_checkpoint(folder / name)


def weights_of(folder):
    """Return the weights that a run exported."""
    return read_weights(folder / run_folder.WEIGHTS)


def error_of(main, argv, capsys):
    """Run a command in this process; return its error, which must be one line."""
    assert exit_code(lambda: main(argv)) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("error: "), printed
    assert "\n" not in printed
    return printed.removeprefix("error: ")


def run_world(size, argv, log, sabotage=None, main=train_cifar.main):
    """Run `size` processes with the environment that torchrun gives them; return their exit codes, negative for a
    signal."""
    processes = start_world(size, argv, log, sabotage, main)
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            printed = log.read_text(encoding="utf-8")
            raise AssertionError(f"no end after {SECONDS} s:\n{printed}")
    return [process.exitcode for process in processes]


def start_world(size, argv, log, sabotage=None, main=train_cifar.main):
    """Start `size` processes with the environment that torchrun gives them."""
    log.touch()
    port = str(free_port())
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in map(str, range(size)):
        processes.append(start(argv, log, sabotage, main, RANK=rank, LOCAL_RANK=rank, **world))
    return processes


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def same_result(a, b):
    """Assert that two runs ended with bit-identical results, except for times."""
    assert_equal(end_of(a), end_of(b))


def end_of(folder):
    """Return the results of a complete run without times."""
    state = saved(folder)
    results = run_folder.read_results(folder)
    metrics = read_metrics(folder)
    end = {name: state[name] for name in ("model", "ema", "optimizer", "random", "buffers")}
    end |= {name: results[name] for name in ("test_last", "test_best")}
    for name in metrics.keys() - {"images_per_s", "seconds"}:
        end[name] = repr(metrics[name])  # nan is nan
    for path in folder.rglob("*.safetensors"):
        end[path.name] = safetensors.torch.load_file(path)
    return end


def assert_equal(a, b):
    """Assert that two nested states are equal, types too, tensors bit for bit."""

    def compare(path, leaf, other):
        assert type(leaf) is type(other), keystr(path)
        same = torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other
        assert same, keystr(path)

    tree_map_with_path(compare, a, b)


def rows_of(path):
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def times_of(folder):
    """Return when each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}


def nothing_truncated(folder):
    """Assert that every file of a run folder is whole (temporary files are hidden and do not count)."""
    for pattern, read in (
        ("[!.]*.ckpt", checkpoint.read_checkpoint),
        ("[!.]*.safetensors", safetensors.torch.load_file),
        (run_folder.CONFIG, lambda path: run_folder.read_config(path.parent)),
        (run_folder.METRICS, lambda path: read_metrics(path.parent)),
    ):
        for path in folder.rglob(pattern):
            read(path)


# ---- faults to inject: called in the trainer's process before it starts ----------------------------------------------


def around(owner, name, hurt):
    """Replace a function of a class or module by `hurt(original, ...)`, which gets the same arguments."""
    original = getattr(owner, name)

    def function(*args, **kwargs):
        return hurt(original, *args, **kwargs)

    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        function = staticmethod(function)
    setattr(owner, name, function)


def after_update(number, act):
    """Call `act` after update `number` of the run."""

    def hurt(update, trainer, batches):
        update(trainer, batches)
        if trainer.progress.updates == number:
            act(trainer)

    around(Trainer, "_update", hurt)


@dataclass
class SignalAfterUpdate:
    """Send this process a signal inside update `number` (counted over the run's life in this process)."""

    signal_number: int
    number: int
    rank: int | None = None

    def __call__(self):
        seen = []

        def hurt(update, trainer, batches):
            seen.append(1)
            if len(seen) == self.number and self.rank in (None, trainer.world.rank):
                os.kill(os.getpid(), self.signal_number)
            return update(trainer, batches)

        around(Trainer, "_update", hurt)


def signal_in_evaluation():
    """Send this process SIGTERM at the beginning of its first evaluation."""

    def hurt(evaluate, *given, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given, **more)

    around(ClassificationTrainer, "evaluate", hurt)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class HalfFile(io.FileIO):
    """A file that writes half of the first write and then kills the process."""

    def write(self, data):
        super().write(data[: len(data) // 2])
        die()


def limit_files():
    """Limit the size of files, so that the kernel fails larger writes with EFBIG."""
    import resource  # of Unix alone

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


@dataclass
class HurtWrite:
    """SIGKILL this process at a stage of the `nth` write of `name`; with "full" the disk is full half-way instead."""

    stage: str
    nth: int
    name: str = checkpoint.LAST

    def __call__(self):
        writes = []

        def now(stage):
            return len(writes) == self.nth and self.stage == stage

        def hurt_open(real, path, *given, **more):
            if fnmatch(Path(path).name, f".{self.name}.*.tmp"):
                writes.append(path)
                if now("half"):
                    return HalfFile(path, *given, **more)
                if now("full"):
                    limit_files()
            return real(path, *given, **more)

        def hurt_fsync(real, descriptor):
            if now("unsynced"):
                die()
            real(descriptor)
            if now("synced"):
                die()

        def hurt_replace(real, source, target):
            real(source, target)
            if now("between") and Path(target).name == checkpoint.PREVIOUS:
                die()
            if now("renamed") and Path(target).name == self.name:
                die()

        files.open = open
        around(files, "open", hurt_open)
        around(os, "fsync", hurt_fsync)
        around(os, "replace", hurt_replace)


def spoil_loss(number, rank):
    """Make the loss of update `number` of the run non-finite on `rank`."""

    def hurt(batch_loss, trainer, images, targets):
        if (trainer.progress.updates + 1, trainer.world.rank) == (number, rank):
            images = images * float("nan")
        return batch_loss(trainer, images, targets)

    around(ClassificationTrainer, "_batch_loss", hurt)


def spoil_tensor(number, name):
    """Put an infinity into a weight or statistic after update `number`, as an overflowing gradient would."""

    def spoil(trainer):
        values = trainer.model.state_dict()[name].view(-1)
        values[0] = float("inf")

    after_update(number, spoil)
