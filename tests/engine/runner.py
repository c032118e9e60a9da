"""Trainers in processes of their own, started quickly from one that has torch loaded, and means to hurt them."""

import gc
import inspect
import io
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch.utils._pytree import keystr, tree_leaves_with_path

import train_imagenet  # noqa: F401  (loaded once, for the processes that train with it)
from ea_vision.base import files
from ea_vision.base.errors import exit_code
from ea_vision.base.networks import read_weights
from ea_vision.base.processes import World
from ea_vision.data.bad_images import BadImages
from ea_vision.engine import checkpoint, run_folder, train_cifar
from ea_vision.engine.classification import ClassificationTrainer
from ea_vision.engine.config import resolve
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train import Trainer

BN_MODEL = (
    "--model test_resnet --model-kwargs drop_rate=0.2".split()
)  # batch statistics and dropout
SECONDS = 900  # that a run may take on a busy machine
GN_MODEL = "--model test_efficientnet_gn --model-kwargs drop_rate=0".split()  # neither


def make_folder(
    root: Path, train: int = 40, test: int = 13, classes: int = 3, side: int = 32
) -> Path:
    """Write PNG images of `classes` colours in noise: root/{train,test}/class_i/name.png."""
    rng = np.random.default_rng(0)
    for split, index in [("train", index) for index in range(train)] + [
        ("test", index) for index in range(test)
    ]:
        pixels = rng.integers(0, 120, (side, side, 3), dtype=np.uint8)
        pixels[..., index % classes % 3] += 100
        path = root / split / f"class_{index % classes}" / f"{index:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


CPU = World(0, 1, torch.device("cpu"))


def make_trainer(
    folder: Path,
    model: torch.nn.Module,
    train_loader=range(8),
    eval_loader=range(1),
    *,
    classes: int = 3,
    world: World = CPU,
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


def words(*texts: str) -> list[str]:
    """Return the words of a command; a text that begins with a flag may have several."""
    found = []
    for text in texts:
        found += text.split() if text.startswith("--") else [text]
    return found


def arguments(data: Path, output: Path, *more: str) -> list[str]:
    """A run of two epochs of five updates of eight images, a checkpoint every second update."""
    return words(
        *BN_MODEL,
        f"--dataset folder --data-dir {data} --img-size 16 --output {output}",
        "--epochs 2 --batch-size 8 --opt sgd --lr 0.05 --checkpoint-steps 2 --device cpu",
        *more,
    )


def _child(
    main: Callable[[list[str]], int],
    argv: list[str],
    sabotage: Callable[[], None] | None,
    environment: dict[str, str],
    log: Path,
) -> None:
    gc.freeze()  # what is imported is no garbage, and to look at it copies it from the parent's memory
    torch.set_num_threads(1)
    os.environ.clear()  # of the test that was the first to start a process
    os.environ.update(environment)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if sabotage is not None:
        sabotage()
    code = exit_code(lambda: main(argv))
    sys.stdout.flush()
    sys.exit(code)


def start(argv: list[str], log: Path, sabotage=None, main=train_cifar.main, **environment: str):
    """Start `train_cifar.py ARGV`, or another trainer, as a process; stdout and stderr go to `log`."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["tests.engine.runner"])
    process = context.Process(
        target=_child, args=(main, argv, sabotage, {**os.environ, **environment}, log)
    )
    process.start()
    return process


def train(
    argv: list[str], sabotage=None, *, code: int = 0, size: int = 1, main=train_cifar.main
) -> str:
    """Train in `size` processes, which must all end with `code`; return what they, and those before them in the same
    run folder, have said."""
    log = Path(argv[argv.index("--output") + 1]).with_suffix(".log")
    assert run_world(size, argv, log, sabotage, main) == [code] * size, log.read_text()
    return log.read_text()


def stopped(
    argv: list[str],
    update: int,
    number: int = signal.SIGTERM,
    *,
    rank: int | None = None,
    size: int = 1,
    main=train_cifar.main,
) -> str:
    """Train until a signal comes in this update, of one process or of all; they must all end as it asks."""
    code = -number if number == signal.SIGKILL else 128 + number
    return train(argv, SignalAfterUpdate(number, update, rank), code=code, size=size, main=main)


def saved(folder: Path, name: str = checkpoint.LAST) -> dict:
    """Return the content of a run's checkpoint."""
    return checkpoint.read_checkpoint(folder / name)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run exported."""
    return read_weights(folder / run_folder.WEIGHTS)


def error_of(main: Callable[[list[str]], int], argv: list[str], capsys) -> str:
    """Run a command in this process; return its error, which must be one line."""
    assert exit_code(lambda: main(argv)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


def run_world(
    size: int, argv: list[str], log: Path, sabotage=None, main=train_cifar.main
) -> list[int]:
    """Run `size` processes with the environment that torchrun gives them; return their exit codes, negative for a
    signal."""
    processes = start_world(size, argv, log, sabotage, main)
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"no end after {SECONDS} s:\n{log.read_text()}")
    return [process.exitcode for process in processes]


def start_world(
    size: int, argv: list[str], log: Path, sabotage=None, main=train_cifar.main
) -> list:
    """Start `size` processes with the environment that torchrun gives them."""
    log.touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    return [
        start(argv, log, sabotage, main, RANK=str(rank), LOCAL_RANK=str(rank), **world)
        for rank in range(size)
    ]


def same_result(a: Path, b: Path) -> None:
    """Assert that two run folders ended alike, bit for bit, times apart."""
    assert_equal(end_of(a), end_of(b), "")


def end_of(folder: Path) -> dict:
    """Return all that a complete run ended with, but for times."""
    state = saved(folder)
    results = run_folder.read_results(folder)
    metrics = run_folder.read_metrics(folder)
    end = {name: state[name] for name in ("model", "ema", "optimizer", "random", "buffers")}
    end |= {name: results[name] for name in ("test_last", "test_best")}
    for name in metrics.keys() - {"images_per_s", "seconds"}:
        end[name] = repr(metrics[name])  # nan is nan
    for path in folder.rglob("*.safetensors"):
        end[path.name] = safetensors.torch.load_file(path)
    return end


def assert_equal(a, b, where: str) -> None:
    """Assert that two nested states are equal, tensors bit for bit."""
    first = leaves_of(a)
    second = leaves_of(b)
    assert first.keys() == second.keys(), where
    for path, leaf in first.items():
        other = second[path]
        same = torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other
        assert same, f"{where}{path}"


def leaves_of(state) -> dict:
    """Return the leaves of a nested state by their paths."""
    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(state)}


def times_of(folder: Path) -> dict[str, int]:
    """Return when each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}


def nothing_truncated(folder: Path) -> None:
    """Assert that every file of a run folder is whole (temporary files are hidden and do not count)."""
    for pattern, read in (
        ("[!.]*.ckpt", checkpoint.read_checkpoint),
        ("[!.]*.safetensors", safetensors.torch.load_file),
        (run_folder.CONFIG, lambda path: run_folder.read_config(path.parent)),
        (run_folder.METRICS, lambda path: run_folder.read_metrics(path.parent)),
    ):
        for path in folder.rglob(pattern):
            read(path)


# ---- ways to hurt a run: called in the trainer's process before it starts --------------------------------------------


def around(owner, name: str, hurt: Callable) -> None:
    """Let `hurt(original, ...)` take the place of a function of a class or module; it gets the same arguments."""
    original, found = getattr(owner, name), inspect.getattr_static(owner, name)

    def function(*given, **more):
        return hurt(original, *given, **more)

    setattr(owner, name, staticmethod(function) if isinstance(found, staticmethod) else function)


def after_update(number: int, act: Callable[[Trainer], None]) -> None:
    """Let `act` follow update `number` of the run."""

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


def signal_in_evaluation() -> None:
    """Send this process SIGTERM at the beginning of its first evaluation."""

    def hurt(evaluate, *given, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given, **more)

    around(ClassificationTrainer, "evaluate", hurt)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class HalfFile(io.FileIO):
    """A file of which half of the first write gets out before the process is killed."""

    def write(self, data):
        super().write(data[: len(data) // 2])
        die()


def limit_files() -> None:
    """Let the kernel refuse what lies beyond a size: EFBIG, a real failed write."""
    import resource  # of Unix alone

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


@dataclass
class HurtWrite:
    """SIGKILL this process in the `nth` write of `name`, at one stage of it; or "full": the disk is, half-way."""

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


def spoil_loss(number: int, rank: int) -> None:
    """Make the loss of update `number` of the run non-finite on `rank`."""

    def hurt(batch_loss, trainer, images, targets):
        if (trainer.progress.updates + 1, trainer.world.rank) == (number, rank):
            images = images * float("nan")
        return batch_loss(trainer, images, targets)

    around(ClassificationTrainer, "_batch_loss", hurt)


def spoil_tensor(number: int, name: str) -> None:
    """Put an infinity into a weight or statistic after update `number`, as an overflowing gradient would."""

    def spoil(trainer: Trainer) -> None:
        values = trainer.model.state_dict()[name].view(-1)
        values[0] = float("inf")

    after_update(number, spoil)
