"""Train or evaluate any registered timm model on small images: digits, CIFAR-10, CIFAR-100, or folders of your own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError
from ea_vision.base.networks import build_model, check_model_name, image_statistics
from ea_vision.base.processes import World, join_world
from ea_vision.base.provenance import hardware, provenance
from ea_vision.data.augment import Augmentation
from ea_vision.data.on_device import EvalLoader, TrainLoader
from ea_vision.data.on_disk import on_disk
from ea_vision.data.small_images import DATASETS, DataSet, Images, cache_folder, hold_out, load_dataset
from ea_vision.engine import run_folder
from ea_vision.engine.config import TrainConfig, make_parser, option, parse, resolve
from ea_vision.engine.curves import draw_learning_curves
from ea_vision.engine.evaluate import evaluate
from ea_vision.engine.report import write_evaluation
from ea_vision.engine.run import (
    begin_or_resume,
    finish,
    is_complete,
    log_to_stdout,
    model_to_evaluate,
    resolve_target,
    seed_everything,
)
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train import Trainer

EXAMPLES = """\
  python train_cifar.py                                         # digits, a few minutes on a CPU
  python train_cifar.py --dataset cifar10 --download --amp bfloat16 --channels-last
  python train_cifar.py --dataset folder --data-dir DIR         # DIR: train and test, folders or tars of class/name.png
  python train_cifar.py --recipe pa_cifar10 --dataset cifar10 --data-dir DIR --device cuda
  python train_cifar.py --model-kwargs alpha=0.3 beta=0.5       # keywords of the model
  python train_cifar.py --evaluate runs/digits-ea_conv_transformer_cifar
  python train_cifar.py --learning-curves runs/a runs/b --output curves.png
  torchrun --nproc-per-node 4 train_cifar.py --dataset cifar10 --data-dir DIR --device cuda
"""


@dataclass
class CifarConfig(TrainConfig):
    """The options of this trainer."""

    dataset: str = option("digits", "digits (scikit-learn's), cifar10, cifar100 (torchvision's files), folder",
                          choices=DATASETS)
    loader: str = option("device", "where decoded images are kept; device: in its memory; ffcv: in FFCV files in "
                                   "cache_dir, for more images than fit", choices=("device", "ffcv"))
    download: bool = option(False, "fetch cifar10 or cifar100 if it is not in data_dir")
    img_size: int = option(32, "side of the images in pixels; others are scaled and cut", minimum=8)
    holdout: int = option(0, "training images to hold out and evaluate on each epoch; 0: the test images are used",
                          minimum=0)
    flip: str = option("auto", "mirror half of the training images; auto: on, except for digits",
                       choices=("auto", "on", "off"))
    crop_padding: int = option(4, "pixels by which training images are padded before the random crop", minimum=0)
    cutout: int = option(8, "side, in pixels, of the square cut out of each training image; 0: none", minimum=0)


def load_data(config: CifarConfig, world: World) -> DataSet:
    with world.main_first():
        return load_dataset(config.dataset, config.data_dir, config.cache_dir, config.img_size, config.download,
                            config.workers)


def kept(config: CifarConfig, split: Images, world: World) -> Images:
    """The split where --loader wants it."""
    if config.loader == "device":
        return split
    cache = cache_folder(config.cache_dir)
    if cache is None:
        raise UsageError("--loader ffcv needs a folder for its files, got --cache-dir none")
    with world.main_first():
        return on_disk(split, cache, config.workers)


def train(config: CifarConfig, optional_kwargs: frozenset[str]) -> int:
    check_model_name(config.model)
    folder = Path(config.output or f"runs/{config.dataset}-{config.model}")
    if is_complete(folder, config):
        print(f"{folder} is complete")
        return 0
    with join_world(config.device) as world, StopRequest() as stop:
        log_to_stdout(world.rank)
        data = load_data(config, world)
        fingerprint = data.fingerprint()
        training, evaluated, eval_split = data.train, data.test, "test"
        if config.holdout:
            training, evaluated = hold_out(data.train, config.holdout, config.seed)
            eval_split = "held_out"
        training, evaluated, test = (kept(config, split, world) for split in (training, evaluated, data.test))

        seed_everything(config.seed)
        model, kwargs = build_model(config.model, config.model_kwargs, optional_kwargs, num_classes=len(data.classes),
                                    img_size=config.img_size)
        model.to(world.device)
        seed_everything(config.seed + 1 + world.rank)  # dropout must differ between processes
        mean, std = image_statistics(model)
        augmentation = Augmentation(flip=config.flip == "on" or config.flip == "auto" and config.dataset != "digits",
                                    crop_padding=config.crop_padding, cutout=config.cutout)
        common = {"mean": mean, "std": std, "device": world.device, "rank": world.rank, "world_size": world.size}
        train_loader = TrainLoader(training, batch_size=config.batch_size, augmentation=augmentation, seed=config.seed,
                                   **common)
        eval_loader = EvalLoader(evaluated, batch_size=config.eval_batch_size, **common)

        run = {
            "model_kwargs": kwargs, "classes": data.classes, "mean": list(mean), "std": list(std),
            "train_images": len(training), "eval_images": len(evaluated), "eval_split": eval_split,
            "data_fingerprint": fingerprint, "processes": world.size,
            "hardware": hardware(world.device, world.size), "command": " ".join(sys.argv),
            **provenance(),
        }
        trainer = Trainer(config, model, train_loader, eval_loader, num_classes=len(data.classes), world=world,
                          folder=folder, stop=stop, data_fingerprint=fingerprint, describe=training.names.__getitem__)
        test_loader = EvalLoader(test, batch_size=config.eval_batch_size, **common)
        with run_folder.locked(folder, world):
            begin_or_resume(trainer, run)
            trainer.fit()
            finish(trainer, test_loader, len(test), eval_split, run)
    return 0


def evaluate_target(target: str, weights: str, given: dict) -> int:
    """Evaluate a run folder, or a model by name, on the test images."""
    config, run = resolve_target(CifarConfig, target, given)
    with join_world(config.device) as world:
        log_to_stdout(world.rank)
        data = load_data(config, world)
        model, output = model_to_evaluate(target, run, weights, config, data.classes)
        mean, std = image_statistics(model)
        loader = EvalLoader(kept(config, data.test, world), mean=mean, std=std, device=world.device,
                            batch_size=config.eval_batch_size, rank=world.rank, world_size=world.size)
        model.to(world.device, memory_format=torch.channels_last if config.channels_last else torch.preserve_format)
        result = evaluate(model, loader, len(data.classes), world, config.amp, config.channels_last)
        if world.is_main:
            about = {"target": target, "weights": weights or None, "dataset": config.dataset, "amp": config.amp,
                     "data_fingerprint": data.fingerprint(), **provenance()}
            written = write_evaluation(output, result, data.classes, about)
            print(f"top1 {result.top1:.2f}%  top5 {result.top5:.2f}%  loss {result.loss:.4f}  {result.images} images")
            print("written:", *written)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(CifarConfig, "train_cifar.py", __doc__, EXAMPLES)
    modes = parser.add_argument_group("instead of training")
    modes.add_argument("--evaluate", metavar="RUN|MODEL", help="test a run folder's best weights, or a model by name: "
                       "accuracy, per class too, and a confusion picture, into --output (default: RUN/evaluation)")
    modes.add_argument("--weights", metavar="FILE", default="", help="with --evaluate MODEL: safetensors weights "
                       "(default: the model's own pretrained ones)")
    modes.add_argument("--learning-curves", metavar="RUN", nargs="+", help="draw loss and accuracy of run folders "
                       "into the PNG --output (default: learning_curves.png)")
    given = parse(parser, argv)
    target, weights, runs = given.pop("evaluate", ""), given.pop("weights"), given.pop("learning_curves", [])
    if runs:
        output = Path(given.get("output", "learning_curves.png"))
        draw_learning_curves([Path(run) for run in runs], output)
        print(f"written: {output}")
        return 0
    if target:
        return evaluate_target(target, weights, given)
    if weights:
        raise UsageError("--weights goes with --evaluate MODEL")
    config, optional_kwargs = resolve(CifarConfig, given)
    return train(config, optional_kwargs)
