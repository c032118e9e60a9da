"""Train a network on ImageNet, or on any images in class folders, tars or FFCV files, to the papers' recipe.

The data folder has train and val (or validation, test), each a folder or a .tar of class/name.jpg. Images are read by
processes that decode them, or from .beton files that `python -m ea_vision.data.write_ffcv` wrote (much faster).
Started by torchrun it runs on several GPUs or machines; the same command continues a run that was interrupted.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError
from ea_vision.base.networks import build_model, check_model_name, image_statistics
from ea_vision.base.processes import World, join_world
from ea_vision.base.provenance import hardware, provenance
from ea_vision.data.bad_images import BadImages
from ea_vision.data.ffcv import BetonEvalLoader, BetonTrainLoader, open_beton
from ea_vision.data.imagenet import (
    ImageEvalLoader,
    ImageSource,
    ImageTrainLoader,
    eval_transform,
    train_transform,
)
from ea_vision.data.splits import find_split
from ea_vision.engine import run_folder
from ea_vision.engine.config import TrainConfig, make_parser, option, parse, resolve
from ea_vision.engine.evaluate import evaluate
from ea_vision.engine.preflight import preflight
from ea_vision.engine.report import timm_row, write_evaluation, write_timm_results
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
from ea_vision.engine.step_log import StepLog
from ea_vision.engine.train import Trainer

EXAMPLES = """\
  torchrun --nproc-per-node 8 train_imagenet.py --data-dir /data/imagenet --model ea_aa_resnet50
  python train_imagenet.py --data-dir DIR --recipe imagenet_ea_aa_resnet50 --device cuda --amp bfloat16 --channels-last
  python train_imagenet.py --train-beton train.beton --val-beton val.beton --model aa_resnet34
  python train_imagenet.py --data-dir DIR --model resnet18 --img-size 64 --eval-resize 72 --epochs 5   # any timm model
  python train_imagenet.py --dataset torch/cifar10 --data-dir DIR --model ea_aa_resnet34               # timm's readers
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 \\
      train_imagenet.py --data-dir DIR --output /shared/runs/ea50
  python train_imagenet.py --evaluate runs/imagenet-ea_aa_resnet50 --data-dir DIR
  python train_imagenet.py --evaluate resnet50 --data-dir DIR                                          # timm's weights
"""
RESULTS_CSV = "results.csv"
log = logging.getLogger("ea_vision.train_imagenet")


@dataclass
class ImageNetConfig(TrainConfig):
    """The options of this trainer."""

    model: str = option("ea_aa_resnet50", "registered timm model, ours or timm's")
    recipe: str = option("imagenet", "recipe: a name in ea_vision/recipes, a YAML file, or none")
    data_dir: str = option("", "folder with train and val, each a folder or .tar of class/name.jpg")
    output: str = option("", "run folder; empty: runs/imagenet-MODEL")
    workers: int = option(8, "processes (threads for FFCV) that decode images, per training process", minimum=1)
    dataset: str = option("", "timm's name of another data set that can be indexed (torch/*, hfds/*); empty: images")
    train_beton: str = option("", "FFCV file of the training images; empty: data_dir is read")
    val_beton: str = option("", "FFCV file of the images to evaluate on; empty: data_dir is read")
    os_cache: str = option("auto", "FFCV: order of the training images; on: random over the whole file; off: random "
                                   "within a few pages at a time; auto: on if the file fits in half the memory",
                           choices=("auto", "on", "off"))
    num_classes: int = option(0, "classes the data must have; 0: those it has", minimum=0)
    img_size: int = option(224, "side of the images in pixels", minimum=8)
    eval_resize: int = option(256, "evaluation: the short side in pixels, before the middle is cut out", minimum=8)
    crop_scale: float = option(0.08, "least share of an image's area in a training crop", minimum=0.0, maximum=1.0)
    hflip: float = option(0.5, "probability of a left-right flip", minimum=0.0, maximum=1.0)
    color_jitter: float = option(0.0, "strength of brightness, contrast and saturation changes (not FFCV)", minimum=0.0)
    auto_augment: str = option("", "timm's policy, such as rand-m9-mstd0.5 (not FFCV); empty: none")
    interpolation: str = option("bilinear", "how images are scaled (FFCV: area)", choices=("bilinear", "bicubic"))
    max_bad_images: int = option(10, "the run stops when more images cannot be read", minimum=0)
    log_steps: int = option(50, "updates between rows of speed.csv", minimum=1)
    tensorboard: bool = option(False, "write TensorBoard events into the run folder")
    wandb: str = option("", "Weights & Biases project; empty: none")

    def __post_init__(self):
        super().__post_init__()
        if self.eval_resize < self.img_size:
            raise UsageError(f"eval_resize must be at least img_size ({self.img_size}), got {self.eval_resize}")
        if self.train_beton and (self.color_jitter or self.auto_augment):
            raise UsageError("color_jitter and auto_augment must be 0 and empty with --train-beton, got "
                             f"{self.color_jitter:g} and {self.auto_augment!r}")


def open_split(config: ImageNetConfig, split: str):
    """The images of a split ("train" or "validation"): an FFCV file where one is given, else what --data-dir holds."""
    beton = config.train_beton if split == "train" else config.val_beton
    if beton:
        return open_beton(Path(beton), config.num_classes)
    if not config.data_dir:
        raise UsageError(f"no {split} images: --data-dir is required, or --train-beton and --val-beton")
    root = Path(config.data_dir)
    place = root if config.dataset else find_split(root, split, or_root=True)
    return ImageSource(config.dataset, place, split, config.num_classes)


def make_train_loader(config: ImageNetConfig, source, bad_images: BadImages, world: World, **common):
    common = {**common, "batch_size": config.batch_size, "workers": config.workers, "seed": config.seed}
    if config.train_beton:
        fits = all(world.gather(source.fits_in_memory()))  # one order for all, on whatever machine they are
        os_cache = config.os_cache == "on" or config.os_cache == "auto" and fits
        return BetonTrainLoader(source, img_size=config.img_size, scale=(config.crop_scale, 1.0), hflip=config.hflip,
                                os_cache=os_cache, **common)
    transform = train_transform(config.img_size, scale=(config.crop_scale, 1.0), hflip=config.hflip,
                                color_jitter=config.color_jitter, auto_augment=config.auto_augment,
                                interpolation=config.interpolation)
    return ImageTrainLoader(source, transform=transform, img_size=config.img_size, bad_images=bad_images, **common)


def make_eval_loader(config: ImageNetConfig, source, bad_images: BadImages, **common):
    common = {**common, "batch_size": config.eval_batch_size, "workers": config.workers}
    if config.val_beton:
        return BetonEvalLoader(source, img_size=config.img_size, resize=config.eval_resize, **common)
    transform = eval_transform(config.img_size, config.eval_resize, config.interpolation)
    return ImageEvalLoader(source, transform=transform, img_size=config.img_size, bad_images=bad_images, **common)


def check_same_classes(train, evaluated) -> None:
    if train.classes != evaluated.classes:
        differ = sorted(set(train.classes) ^ set(evaluated.classes)) or ["their order"]
        raise UsageError(f"{train.name} ({len(train.classes)} classes) and {evaluated.name} ({len(evaluated.classes)}) "
                         f"must have the same classes; they differ in {', '.join(differ[:5])}"
                         f"{' ...' if len(differ) > 5 else ''}")


def train(config: ImageNetConfig, optional_kwargs: frozenset[str]) -> int:
    check_model_name(config.model)
    folder = Path(config.output or f"runs/imagenet-{config.model}")
    if is_complete(folder, config):
        print(f"{folder} is complete")
        return 0
    with join_world(config.device) as world, StopRequest() as stop:
        log_to_stdout(world.rank)
        training, evaluated = open_split(config, "train"), open_split(config, "validation")
        check_same_classes(training, evaluated)
        if training.name == evaluated.name:
            log.warning("%s is neither train nor val: the same images are trained and evaluated on", training.name)
        fingerprint = training.fingerprint() + evaluated.fingerprint()

        seed_everything(config.seed)
        model, kwargs = build_model(config.model, config.model_kwargs, optional_kwargs,
                                    num_classes=len(training.classes), img_size=config.img_size)
        model.to(world.device)
        seed_everything(config.seed + 1 + world.rank)  # dropout must differ between processes
        mean, std = image_statistics(model)
        bad_images = BadImages(config.max_bad_images)
        common = {"mean": mean, "std": std, "device": world.device, "rank": world.rank, "world_size": world.size}
        train_loader = make_train_loader(config, training, bad_images, world, **common)
        eval_loader = make_eval_loader(config, evaluated, bad_images, **common)

        run = {
            "model_kwargs": kwargs, "classes": training.classes, "mean": list(mean), "std": list(std),
            "train_images": len(training), "eval_images": len(evaluated), "eval_split": "test",
            "train_data": training.name, "eval_data": evaluated.name, "data_fingerprint": fingerprint,
            "processes": world.size, "hardware": hardware(world.device, world.size),
            "command": " ".join(sys.argv), **provenance(),
        }
        step_log = None
        if world.is_main:
            step_log = StepLog(folder, config.log_steps, tensorboard=config.tensorboard, wandb=config.wandb,
                               config=config.as_dict())
        trainer = Trainer(config, model, train_loader, eval_loader, num_classes=len(training.classes), world=world,
                          folder=folder, stop=stop, data_fingerprint=fingerprint, describe=training.describe,
                          bad_images=bad_images, step_log=step_log)
        preflight(model, config, img_size=config.img_size, folder=folder, world=world, batches=len(train_loader),
                  train_images=len(training), eval_images=len(evaluated), classes=len(training.classes),
                  ahead=2 * config.workers)
        with run_folder.locked(folder, world):
            begin_or_resume(trainer, run)
            if step_log is not None:
                step_log.begin(trainer.progress.updates)
            trainer.fit()
            finish(trainer, eval_loader, len(evaluated), "test", run, before=lambda results: write_results_row(
                folder / RESULTS_CSV, config, results["test_best"]["top1"], results["test_best"]["top5"], model))
            if step_log is not None:
                step_log.close()
    return 0


def write_results_row(path: Path, config: ImageNetConfig, top1: float, top5: float, model: torch.nn.Module) -> None:
    """Write the accuracy, in percent, in the columns of timm's results files."""
    write_timm_results(path, [timm_row(
        config.model, model, top1, top5, config.img_size, config.img_size / config.eval_resize,
        "area" if config.val_beton else config.interpolation)])


def evaluate_target(target: str, weights: str, given: dict) -> int:
    """Evaluate a run folder, or a model by name, on the validation images."""
    config, run = resolve_target(ImageNetConfig, target, given)
    with join_world(config.device) as world:
        log_to_stdout(world.rank)
        evaluated = open_split(config, "validation")
        model, output = model_to_evaluate(target, run, weights, config, evaluated.classes)
        mean, std = image_statistics(model)
        bad_images = BadImages(config.max_bad_images)
        loader = make_eval_loader(config, evaluated, bad_images, mean=mean, std=std, device=world.device,
                                  rank=world.rank, world_size=world.size)
        model.to(world.device, memory_format=torch.channels_last if config.channels_last else torch.preserve_format)
        result = evaluate(model, loader, len(evaluated.classes), world, config.amp, config.channels_last)
        if world.is_main:
            about = {"target": target, "weights": weights or None, "data": evaluated.name, "amp": config.amp,
                     "data_fingerprint": evaluated.fingerprint(), **provenance()}
            written = write_evaluation(output, result, evaluated.classes, about)
            write_results_row(output / RESULTS_CSV, config, result.top1, result.top5, model)
            print(f"top1 {result.top1:.2f}%  top5 {result.top5:.2f}%  loss {result.loss:.4f}  {result.images} images")
            print("written:", *written, output / RESULTS_CSV)
        bad_images.collect(world, output)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(ImageNetConfig, "train_imagenet.py", __doc__, EXAMPLES)
    modes = parser.add_argument_group("instead of training")
    modes.add_argument("--evaluate", metavar="RUN|MODEL", help="test a run folder's best weights, or a model by name, "
                       "on the validation images: accuracy, per class too, a confusion picture and timm's results row, "
                       "into --output (default: RUN/evaluation)")
    modes.add_argument("--weights", metavar="FILE", default="", help="with --evaluate MODEL: safetensors weights "
                       "(default: the model's own pretrained ones)")
    given = parse(parser, argv)
    target, weights = given.pop("evaluate", ""), given.pop("weights")
    if target:
        return evaluate_target(target, weights, given)
    if weights:
        raise UsageError("--weights goes with --evaluate MODEL")
    config, optional_kwargs = resolve(ImageNetConfig, given)
    return train(config, optional_kwargs)
