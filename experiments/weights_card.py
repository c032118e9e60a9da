"""Write the weights of a complete run of train_cifar.py or train_imagenet.py, and a model card beside them.

    python -m experiments.weights_card RUN -o weights/MODEL.TAG.safetensors --data-dir DIR

The weights are stored in float16 if their top-1 on the test images then stays within 0.1 point of the run's, else in
float32. A run of train_cifar.py has test images; a run of train_imagenet.py needs a split that it has not seen. If the
run was tested with several views of an image (--tta), the card has this result, too. For weights that load by name, add
the tag to `default_cfgs` in the model's file, and the run's model keywords that differ from the network's defaults to
its `Network(..., trained={TAG: keywords})`; then renew the table of results by `python experiments/shipped_weights.py`.
"""

import argparse
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from statsmodels.stats.proportion import proportion_confint

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write
from ea_vision.base.processes import World, join_world
from ea_vision.data.on_device import EvalLoader
from ea_vision.data.scaling import Scaling
from ea_vision.data.small_images import load_dataset
from ea_vision.engine import run_folder
from ea_vision.engine.card import facts, front_matter, tables
from ea_vision.engine.config import resolve
from ea_vision.engine.data_module import check_classes
from ea_vision.engine.evaluate import Evaluation, evaluate
from ea_vision.engine.evaluation import options_of
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ClassFolders, ImageNetConfig
from ea_vision.models.conv_transformer import CIFAR10
from ea_vision.zoo.create import load_network
from ea_vision.zoo.preparation import OPTIONS
from ea_vision.zoo.source import source_of
from ea_vision.zoo.weights_file import encode_weights
from experiments.learning_curves import read_metrics

LARGEST_LOSS = 0.1  # points of top-1 that float16 may cost
SHOWN_OPTIONS = """
    epochs batch_size opt opt_kwargs lr momentum weight_decay attention_lr sched warmup_epochs smoothing flip
    crop_padding crop_padding_mode cutout img_size first_img_size grow_epochs eval_resize crop_scale hflip aa mixup
    cutmix model_ema_decay amp channels_last
""".split()


def half(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return floating-point tensors in float16, the others (BatchNorm's counters) as they are."""
    halved = dict(state)
    for name, value in state.items():
        if value.is_floating_point():
            halved[name] = value.half()
    return halved


def evaluated_on(split: str, metrics: dict) -> str:
    """Say which images the run was evaluated on, after which epochs, and what that means for its best weights."""
    epochs = []
    for epoch, accuracy in zip(metrics["epoch"], metrics["top1"], strict=True):
        if not math.isnan(accuracy):
            epochs.append(f"{epoch:.0f}")
    if split != "test":
        return f"training images held out; after epoch {', '.join(epochs)}"
    if len(epochs) == 1:
        return f"the test images, once, after epoch {epochs[0]}: nothing was chosen by them"
    return f"the test images, so the choice of the best epoch has seen them; after epoch {', '.join(epochs)}"


def interval(percent: float, images: int) -> str:
    """Return Wilson's 95% interval of an accuracy in percent on this many images."""
    low, high = proportion_confint(percent / 100 * images, images, method="wilson")
    return f"{100 * low:.2f} to {100 * high:.2f}"


@dataclass
class FinishedRun:
    """A complete run: options, `about` section, metrics, the split of its evaluations, and its best weights' result."""

    config: dict
    about: dict
    metrics: dict[str, list[float]]
    eval_split: str
    best: dict


def read_finished(folder: Path) -> FinishedRun:
    """Return a run; raise UsageError if it is not complete or was not tested."""
    results = run_folder.read_results(folder)
    if results is None:
        raise UsageError(
            f"only a complete run can be exported, and {folder} has no {run_folder.RESULTS}"
        )
    if "test_best" not in results:
        raise UsageError(f"{folder} has not been tested: continue it without --no-test")
    return FinishedRun(
        *run_folder.read_config(folder),
        read_metrics(folder),
        results["eval_split"],
        results["test_best"],
    )


def check_command(name: str, config: dict, dataset: str, split: str) -> str:
    """Return the command that evaluates the weights as their run did."""
    if not split:
        return f"python train_cifar.py --evaluate {name} --dataset {dataset} --data-dir DIR"
    recipe = asdict(resolve(ImageNetConfig, {"recipe": config["recipe"]}))
    changed = ""
    for key in OPTIONS:
        if config[key] != recipe[key]:
            changed += f" --{key.replace('_', '-')} {config[key]}"
    return (
        f"python train_imagenet.py --evaluate {name} --recipe {config['recipe']}{changed} --data-dir DIR "
        f"--val-split {split}"
    )


def facts_of(finished: FinishedRun, dtype: str, split: str) -> dict[str, str]:
    """Return the rows of a card's table: left column -> right column."""
    about = finished.about
    seen = evaluated_on(finished.eval_split, finished.metrics)
    if split:
        validation = Path(about["eval_data"]).name
        seen = (
            f"{about['eval_images']} images of `{validation}`, by which the best epoch was chosen"
        )
    return {
        **facts(finished.config, about, SHOWN_OPTIONS),
        "evaluated in training on": f"{seen}; the weights are those of epoch {finished.best['epoch']}",
        "stored as": dtype,
    }


def card(
    finished: FinishedRun,
    name: str,
    dtype: str,
    result: Evaluation,
    by_views: Evaluation | None,
    tta: str,
    split: str,
) -> str:
    """Return Markdown: what the weights are, how they were trained, and the command that checks them.

    by_views: the result with several views of the kind `tta`, if the run uses them. split: as in `write_weights`.
    """
    config = finished.config
    dataset = config["dataset"] if not split else config["recipe"]
    if not split and tuple(finished.about["classes"]) == CIFAR10:
        dataset = "cifar10"
    check = check_command(name, config, dataset, split)
    views = ""
    if by_views is not None:
        check += f" --tta {tta}"
        views = f" With several views of an image (`--tta {tta}`): {by_views.top1:.2f}%."
    top5 = "" if math.isnan(result.top5) else f", {result.top5:.2f}% top-5"
    where = f" of `{split}`" if split else ""
    lines = [
        front_matter(name, "top-1", result.top1, dataset, license="apache-2.0") + f"# {name}",
        "",
        f'`timm.create_model("{name}", pretrained=True)`: {result.top1:.2f}% top-1{top5} on the '
        f"test images{where}.{views} {result.images} images: 95% interval of the top-1 "
        f"{interval(result.top1, result.images)}.",
        "",
        tables(facts_of(finished, dtype, split), finished.metrics, "top1"),
        "",
    ]
    lines += ["Check:", "", f"    {check}", ""]
    return "\n".join(lines)


def test_images(
    model: torch.nn.Module,
    finished: FinishedRun,
    folder: Path,
    data_dir: str,
    split: str,
    world: World,
):
    """Return the loader of the test images of a run, and the kind of views (`tta`) that the run uses.

    Raises:
        UsageError: the data are not the run's, or the run has seen the split.
    """
    run = finished.about
    common = {
        "mean": run["mean"],
        "std": run["std"],
        "device": torch.device("cpu"),
        "batch_size": 100,
        "rank": 0,
        "world_size": 1,
    }
    if split:
        options = options_of(
            ImageNetConfig,
            source_of(str(folder)),
            {"data_dir": data_dir, "val_split": split, "device": "cpu", "workers": 0},
        )
        data = ClassFolders(options, world, training=False)
        check_classes(model, data.classes, run["classes"], str(folder))
        # The run's fingerprint is the training images' one, followed by the validation images' one.
        if data.fingerprint in run["data_fingerprint"]:
            raise UsageError(f"--split must name images that {folder} has not seen, got {split}")
        return data.eval_loader(**{**data.loader_keywords(model), **common}), options.tta
    options = options_of(CifarConfig, source_of(str(folder)), {})
    data = load_dataset(options.dataset, data_dir, Scaling.filled(options.img_size))
    if data.fingerprint() != run["data_fingerprint"]:
        raise UsageError(
            f"{data_dir} is not the data of the run: fingerprint {run['data_fingerprint']} required, "
            f"got {data.fingerprint()}"
        )
    return EvalLoader(data.test, **common), options.tta


def write_weights(folder: Path, output: Path, data_dir: str, split: str = "") -> str:
    """Write the best weights of a complete run to MODEL.TAG.safetensors and its card beside it, MODEL.TAG.md.

    Args:
        folder: the run folder.
        data_dir: the data set of the run, to measure the accuracy of the stored weights.
        split: for a run of train_imagenet.py, the folder or tar of data_dir with the test images.

    Returns:
        a line with the accuracy in float32 and in float16, and the dtype that was written.

    Raises:
        UsageError: the run is damaged, not complete or not tested, the data are not the run's, or the file is not
            named MODEL.TAG.
    """
    finished = read_finished(folder)
    source = source_of(str(folder))
    source.check_kind()
    model, _ = load_network(source)
    config = source.options
    run = source.note
    if bool(split) != ("val_split" in config):
        raise UsageError(
            "--split names the test images of a run of train-imagenet, and of no other: "
            f"{folder} is {'none' if split else 'one'}"
        )
    name = output.stem
    if not name.startswith(f"{config['model']}.") or name.endswith("."):
        raise UsageError(
            f"the file must be named {config['model']}.TAG.safetensors, got {output.name}"
        )
    full = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    with join_world("cpu") as world:
        loader, tta = test_images(model, finished, folder, data_dir, split, world)
        exact = evaluate(model, loader, len(run["classes"]), world)
        state = half(full)
        model.load_state_dict(state)
        rounded = evaluate(model, loader, len(run["classes"]), world)
        result = rounded
        dtype = "float16"
        if abs(rounded.top1 - exact.top1) > LARGEST_LOSS:
            state = full
            model.load_state_dict(full)
            result = exact
            dtype = "float32"
        view_accuracy = None
        if tta != "none":
            view_accuracy = evaluate(model, loader, len(run["classes"]), world, tta=tta)
    text = card(finished, name, dtype, result, view_accuracy, tta, split)
    atomic_write(output, encode_weights(state))
    atomic_write(output.with_suffix(".md"), text.encode())
    return f"{name}: top1 {exact.top1:.2f}% in float32, {rounded.top1:.2f}% in float16; written in {dtype}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a complete run")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="MODEL.TAG.safetensors")
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="data set of the run")
    parser.add_argument(
        "--split",
        default="",
        metavar="NAME",
        help="of a run of train-imagenet: the folder or tar of "
        "--data-dir with test images that the run has not seen",
    )
    args = parser.parse_args(argv)
    print(write_weights(args.run, args.output, args.data_dir, args.split))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
