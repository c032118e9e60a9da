"""What training a classifier adds to the engine: its options, its loss, its evaluation."""

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.engine.config import TrainConfig, option, setting
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.evaluate import VIEWS, autocast, evaluate
from ea_vision.engine.train import Trainer
from ea_vision.engine.watch import MapsPictures, check_has_maps
from ea_vision.zoo.create import load_network
from ea_vision.zoo.preparation import image_statistics
from ea_vision.zoo.source import source_of

log = logging.getLogger(__name__)


@dataclass
class ClassificationConfig(TrainConfig):
    """The options of trainers of classifiers."""

    linear_probe: bool = option(
        False, "train the classifier alone; the rest of the network stays as it begins", "optimiser"
    )
    layer_decay: float = option(
        1.0,
        "timm's layer-wise decay: a layer's learning rate divided by that of the layer above it "
        "(0.65 to 0.9 in fine-tuning); 1: all have the same",
        above=0.0,
        maximum=1.0,
    )

    smoothing: float = option(
        0.1, "label smoothing: part of the target spread over all classes", "loss", maximum=1.0
    )
    bce_loss: bool = option(
        False, "binary cross-entropy for each class, instead of softmax cross-entropy"
    )
    bce_target_thresh: float = option(
        0.0,
        "bce_loss: targets above this become 1, the others 0; 0: as they are",
        maximum=1.0,
        goes_with="bce_loss",
    )
    teacher: str = option(
        "",
        "distil from a network (see --evaluate; with fusion=add the plain one, say): half of the loss is "
        "the Kullback-Leibler divergence from its probabilities of the same images; empty: none",
    )

    mixup: float = option(0.0, "alpha of mixup; 0: off", "augmentation")
    cutmix: float = option(0.0, "alpha of cutmix; 0: off")
    reprob: float = option(
        0.0, "random erasing: probability that an image has a rectangle replaced", maximum=1.0
    )
    remode: str = option(
        "pixel",
        "random erasing: fill; pixel: noise, rand: one random colour, const: the mean",
        choices=("pixel", "rand", "const"),
        goes_with="reprob",
    )

    draw_maps: int = setting(
        0,
        "epochs between pictures of the attention maps of four images to evaluate on, in RUN/maps, "
        "TensorBoard and Weights & Biases; 0: none",
        "checkpoints and logs",
    )

    tta: str = setting(
        "none",
        "evaluation: average the logits of these views of an image; six: mirrored and shifted by a "
        "pixel (timm's --tta is a number)",
        "evaluation",
        choices=VIEWS,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.mixes and self.batch_size < 2:
            raise UsageError(
                f"mixup and cutmix mix pairs of images: batch_size must be at least 2, got "
                f"{self.batch_size}"
            )

    @property
    def mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)

    @property
    def train_sizes(self) -> set[int]:
        """Sides in pixels of the training images of all epochs."""
        return {self.img_size}


class ClassificationTrainer(Trainer):
    """The training loop with a classifier's loss, evaluated by top-1 and top-5."""

    config: ClassificationConfig
    watches = True
    evaluate = staticmethod(evaluate)

    def __post_init__(self):
        super().__post_init__()
        config = self.config
        self.mix = self.erase = self.teacher = None
        if config.teacher:
            self.teacher = create_teacher(self.data).to(self.world.device)
            statistics = image_statistics(self.teacher)
            self.teacher_statistics = torch.tensor(statistics, device=self.world.device)
        if config.mixes:
            self.mix = Mixup(
                config.mixup,
                config.cutmix,
                label_smoothing=config.smoothing,
                num_classes=len(self.data.classes),
            )
        if config.reprob:
            self.erase = RandomErasing(config.reprob, mode=config.remode, device=self.world.device)
        if config.tta != "none":
            log.info("epochs are evaluated by one view of each image; --tta is for --evaluate RUN")
            self.columns = {"views": 1.0}
        if config.draw_maps:
            check_has_maps(self.model, config.model)
            self.pictures = MapsPictures(self.eval_loader, self.folder, config.draw_maps)
        self.loss_of = (
            BinaryCrossEntropy(config.smoothing, config.bce_target_thresh or None)
            if config.bce_loss
            else nn.CrossEntropyLoss(label_smoothing=0.0 if config.mixes else config.smoothing)
        )

    @staticmethod
    def loss_on_noise(model: nn.Module, images: Tensor) -> Tensor:
        """Return the loss on images (B, 3, H, W), all of the first class."""
        return F.cross_entropy(
            model(images).float(), torch.zeros(len(images), dtype=torch.int64, device=images.device)
        )

    def _batch_loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of one batch, images (B, 3, H, W), targets (B,)."""
        config = self.config
        if self.erase is not None:
            images = self.erase(images)
        if self.mix is not None:
            if len(images) % 2:  # timm mixes pairs
                images = images[:-1]
                targets = targets[:-1]
            images, targets = self.mix(images, targets)  # targets (B, classes), smoothed
        if config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with autocast(config.amp, self.world.device):
            logits = self.net(images)
            if self.teacher is not None:
                taught = self._taught(images)
        loss = self.loss_of(logits.float(), targets)
        if self.teacher is None:
            return loss
        divergence = F.kl_div(
            logits.float().log_softmax(1), taught, reduction="batchmean", log_target=True
        )
        return (loss + divergence) / 2

    @torch.no_grad()
    def _taught(self, images: Tensor) -> Tensor:
        """Return the logarithms of the teacher's probabilities (B, classes), of the student's images (B, 3, H, W)."""
        mean, std = self.teacher_statistics[:, :, None, None]
        shown = self.train_loader.unnormalize(images)
        return self.teacher((shown - mean) / std).float().log_softmax(1)


def create_teacher(data: DataModule) -> nn.Module:
    """Return the network that --teacher names, in evaluation mode.

    Raises:
        UsageError: there is no such network, or it has no weights, other classes, or images of another size.
    """
    config = data.config
    source = source_of(config.teacher)
    source.check_kind()
    target = f"--teacher {config.teacher}"
    if not source.has_weights:
        raise UsageError(f"{target} must have trained weights")
    teacher, _ = load_network(source)
    data.take_network(teacher, source.note, target)
    check_sizes(teacher, config.train_sizes, target)
    return teacher.requires_grad_(False)


@torch.no_grad()
def check_sizes(model: nn.Module, sizes: set[int], name: str, hint: str = "") -> None:
    """Raise UsageError if a network refuses square images of one of these sides, in pixels. It is left in eval mode."""
    device = next(model.parameters()).device
    for size in sorted(sizes):
        with as_usage_error(f"{name} does not take {size} pixels{hint}"):
            model.eval()(torch.zeros(1, 3, size, size, device=device))
