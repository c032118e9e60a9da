"""Write the weights of a complete run of train_cifar.py with their card, for `ea-vision export`.

The weights are stored in float16 where that keeps the
top-1 on the test images within 0.1 point of the run's, else in float32. Where the run was tested with several views of
an image (--tta), the card has their figure, too. To be loaded by name, the tag must stand in
the `default_cfgs` of the model's file; then `python experiments/shipped_weights.py` renews the table of results.
"""
import math
from collections.abc import Callable, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.base.networks import CIFAR10, encode_weights
from ea_vision.base.processes import join_world
from ea_vision.data.on_device import EvalLoader
from ea_vision.data.small_images import load_dataset
from ea_vision.engine import run_folder
from ea_vision.engine.evaluate import Evaluation, evaluate
from ea_vision.engine.finished import FinishedRun, read_finished
from ea_vision.engine.run import resolve_target
from ea_vision.engine.train_cifar import CifarConfig

LARGEST_LOSS = 0.1  # points of top-1 that float16 may cost


def half(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Floating-point tensors in float16, the others (BatchNorm's counters) as they are."""
    return {name: value.half() if value.is_floating_point() else value for name, value in state.items()}


def by_update(starts: list[dict], describe: Callable[[dict], str]) -> str:
    """What `describe` says of a run's last start and, in brackets, of the updates made by starts where it differs."""
    said = [(start["update"], describe(start)) for start in starts]
    if said[0][0] > 1:
        said.insert(0, (1, "not recorded"))
    changes = [next(same) for _, same in groupby(said, key=itemgetter(1))]
    last = changes[-1][1]
    others = [f"updates {first} to {following - 1}: {text}"
              for (first, text), (following, _) in pairwise(changes) if text != last]
    return last + (f" ({'; '.join(others)})" if others else "")


def evaluated_on(split: str, metrics: dict) -> str:
    """Which images the run was evaluated on, after which epochs, and what that says of its best weights."""
    epochs = [f"{epoch:.0f}" for epoch, accuracy in zip(metrics["epoch"], metrics["top1"], strict=True)
              if not math.isnan(accuracy)]
    if split != "test":
        return f"training images held out; after epoch {', '.join(epochs)}"
    if len(epochs) == 1:
        return f"the test images, once, after epoch {epochs[0]}: nothing was chosen by them"
    return f"the test images, so the choice of the best epoch has seen them; after epoch {', '.join(epochs)}"


def check_about(path: Path, config: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise UsageError unless config.yaml, at `path`, says of a run of train-cifar what its card does."""
    def require(where: str, value: Any, right: bool) -> None:
        if not right:
            raise UsageError(f"{path} is not that of a run of train-cifar: {where} cannot be {value!r:.60}")

    for key in ("dataset", "recipe"):
        require(key, config.get(key), isinstance(config.get(key), str))
    for key in ("mean", "std"):
        require(key, run[key], len(run[key]) == 3 and all(type(x) in (int, float) and 0 <= x <= 1 for x in run[key]))
    require("std", run["std"], min(run["std"]) > 0)
    require("classes", run["classes"], all(isinstance(name, str) for name in run["classes"]))
    kinds = {"update": int, "git_commit": (str, type(None)), "hardware": str, "versions": dict}
    for start in starts_of(run):
        require("a start", start, isinstance(start, dict) and kinds.keys() <= start.keys())
        for key, kind in kinds.items():
            require(f"{key} of a start", start[key], isinstance(start[key], kind))


def starts_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the starts of a run, with the update each began at; one from before they were listed has had one."""
    return run.get("starts") or [{"update": 1, **run}]


def card(finished: FinishedRun, name: str, dtype: str, result: Evaluation, tta: str) -> str:
    """Markdown: what the weights are, how they were made, and the command that checks them.

    tta: views that the result has beside the plain figure.
    """
    config, run, metrics = finished.config, finished.run, finished.metrics
    by_views, option = "", ""
    if result.views is not None:
        option = f" --tta {tta}"
        by_views = f" With several views of an image (`{option.strip()}`): {result.views.top1:.2f}%."
    log = ["| epoch | loss | top-1 % | images/s | seconds |", "| --- | --- | --- | --- | --- |"]
    for epoch, loss, accuracy, speed, seconds in zip(*(metrics[k] for k in (
            "epoch", "train_loss", "top1", "images_per_s", "seconds")), strict=True):
        top = "" if math.isnan(accuracy) else f"{accuracy:.2f}"
        log.append(f"| {epoch:.0f} | {loss:.4f} | {top} | {speed:.0f} | {seconds:.0f} |")
    options = ", ".join(f"{k} {config[k]}" for k in (
        "epochs", "batch_size", "opt", "opt_kwargs", "lr", "momentum", "weight_decay", "attention_lr", "sched",
        "warmup_epochs", "smoothing", "flip", "crop_padding", "crop_padding_mode", "cutout", "model_ema_decay", "amp",
        "channels_last") if k in config)  # runs from before an option was there lack it
    commit, hardware, versions = (by_update(starts_of(run), describe) for describe in (
        lambda start: f"`{start['git_commit']}`", lambda start: start["hardware"],
        lambda start: ", ".join(f"{k} {v}" for k, v in start["versions"].items())))
    dataset = "cifar10" if tuple(run["classes"]) == CIFAR10 else config["dataset"]
    return "\n".join([
        f"# {name}", "",
        f"`timm.create_model(\"{name}\", pretrained=True)`: {result.top1:.2f}% top-1, {result.top5:.2f}% top-5 on the "
        f"test images.{by_views}",
        "",
        "| | |", "| --- | --- |",
        f"| recipe | `{config['recipe']}`: {options} |",
        f"| model keywords | {run['model_kwargs']} |",
        f"| data | {run['train_images']} training images, {len(run['classes'])} classes: {', '.join(run['classes'])}; "
        f"SHA-256 of pixels and labels `{run['data_fingerprint']}` |",
        f"| evaluated in training on | {evaluated_on(finished.eval_split, metrics)}; the weights are those of epoch "
        f"{finished.best['epoch']} |",
        f"| seed, runs | {config['seed']}, one run |",
        f"| commit | {commit} |",
        f"| hardware | {hardware} |",
        f"| versions | {versions} |",
        f"| stored as | {dtype} |", "",
        "Log:", "", *log, "",
        "Check:", "",
        f"    python train_cifar.py --evaluate {name} --dataset {dataset} --data-dir DIR{option}", ""])


def write_weights(folder: Path, output: Path, data_dir: str) -> str:
    """Write the best weights of a complete run to MODEL.TAG.safetensors and its card beside it, MODEL.TAG.md.

    Args:
        folder: of the run.
        data_dir: the data set of the run, for the accuracy of what is exported.

    Returns:
        a line that says the accuracy in float32 and float16, and which was written.

    Raises:
        UsageError: a run that is damaged, not complete or not tested, other data, or a file that is not named
            MODEL.TAG.
    """
    finished = read_finished(folder)
    if finished is None:
        raise UsageError(f"only a complete run can be exported, and {folder} has no {run_folder.RESULTS}")
    if finished.split != "test":
        raise UsageError(f"{folder} has not been tested: continue it without --no-test")
    model, config, run = run_folder.load_run(folder, "classes", "train_images", "mean", "std")
    check_about(folder / run_folder.CONFIG, config, run)
    options, _ = resolve_target(CifarConfig, str(folder), {})
    name = output.stem
    if not name.startswith(f"{config['model']}.") or name.endswith("."):
        raise UsageError(f"the file must be named {config['model']}.TAG.safetensors, got {output.name}")
    data = load_dataset(options.dataset, data_dir, img_size=options.img_size)
    if data.fingerprint() != finished.data:
        raise UsageError(f"{data_dir} is not the data of the run: fingerprint {finished.data} required, "
                         f"got {data.fingerprint()}")
    loader = EvalLoader(data.test, mean=run["mean"], std=run["std"], device=torch.device("cpu"), batch_size=100,
                        rank=0, world_size=1)
    full = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    with join_world("cpu") as world:
        exact = evaluate(model, loader, len(data.classes), world)
        state, dtype = half(full), "float16"
        model.load_state_dict(state)
        result = rounded = evaluate(model, loader, len(data.classes), world, tta=options.tta)
        if abs(rounded.top1 - exact.top1) > LARGEST_LOSS:
            state, dtype = full, "float32"
            model.load_state_dict(full)
            result = evaluate(model, loader, len(data.classes), world, tta=options.tta)

    text = card(finished, name, dtype, result, options.tta)
    atomic_write(output, encode_weights(state))
    atomic_write(output.with_suffix(".md"), text.encode())
    return f"{name}: top1 {exact.top1:.2f}% in float32, {rounded.top1:.2f}% in float16; written in {dtype}"
