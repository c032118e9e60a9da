#!/usr/bin/env python3
"""Train or evaluate any registered timm model on small images: digits, CIFAR-10, CIFAR-100, or folders of your own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.data.augment import Augmentation
from ea_vision.data.cifar import DATASETS, DataSet, hold_out, load_dataset
from ea_vision.data.on_device import EvalLoader, TrainLoader
from ea_vision.engine import run_folder
from ea_vision.engine.build import build_model, check_model_name, image_statistics
from ea_vision.engine.config import TrainConfig, make_parser, option, parse, resolve
from ea_vision.engine.distributed import World, join_world
from ea_vision.engine.errors import exit_code
from ea_vision.engine.run import begin_or_resume, finish, is_complete, log_to_stdout, seed_everything
from ea_vision.engine.signals import StopRequest
from ea_vision.engine.train import Trainer

EXAMPLES = """\
  python train_cifar.py                                         # digits, a few minutes on a CPU
  python train_cifar.py --dataset cifar10 --download --amp bfloat16 --channels-last
  python train_cifar.py --dataset folder --data-dir DIR         # DIR has train and test, folders or tars of class/name.png
  python train_cifar.py --recipe pa_cifar10 --dataset cifar10 --data-dir DIR --device cuda
  python train_cifar.py --model-kwargs alpha=0.3 beta=0.5       # keywords of the model
  torchrun --nproc-per-node 4 train_cifar.py --dataset cifar10 --data-dir DIR --device cuda
"""


@dataclass
class CifarConfig(TrainConfig):
    """The options of this trainer."""

    dataset: str = option("digits", "digits (scikit-learn's, enlarged), cifar10, cifar100 (torchvision's files), folder",
                          choices=DATASETS)
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

        seed_everything(config.seed)
        model, kwargs = build_model(config.model, config.model_kwargs, optional_kwargs, num_classes=len(data.classes),
                                    img_size=config.img_size)
        config.model_kwargs = {k: v for k, v in kwargs.items() if k in config.model_kwargs}
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
            "hardware": run_folder.hardware(world.device, world.size), "command": " ".join(sys.argv),
            **run_folder.provenance(),
        }
        trainer = Trainer(config, model, train_loader, eval_loader, num_classes=len(data.classes), world=world,
                          folder=folder, stop=stop, data_fingerprint=fingerprint, describe=training.names.__getitem__)
        begin_or_resume(trainer, run)
        trainer.fit()
        test_loader = EvalLoader(data.test, batch_size=config.eval_batch_size, **common) if config.holdout else eval_loader
        finish(trainer, test_loader, len(data.test), eval_split, run)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(CifarConfig, "train_cifar.py", __doc__, EXAMPLES)
    config, optional_kwargs = resolve(CifarConfig, parse(parser, argv))
    return train(config, optional_kwargs)


if __name__ == "__main__":
    sys.exit(exit_code(main))
