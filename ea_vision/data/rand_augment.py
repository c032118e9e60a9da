"""timm's RandAugment on batches of bytes, on their device, by torchvision's functions.

An image's operations, and the direction of those that have one, are drawn for it alone, as timm does. Images of a batch
that drew the same operation in the same direction share its magnitude, which timm draws for each image: so a layer is
one call of a function for all of them, and a batch of any size at most 26. The draws are functions of seed, epoch and
the image's place in the epoch, whatever the device and the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ea_vision.base.errors import UsageError
from ea_vision.data.batches import Share, epoch_generator, sent

MOST = 10.0  # timm's largest magnitude, unless the policy has an mmax
LAYER_SEED = 7  # of the generator, beside the seed of an epoch's order


class Draws(NamedTuple):
    """Operations on a batch: operation (B, layers), -1 for none; whether in the negative direction (B, layers);
    magnitudes (layers, operations, 2), by direction."""

    operations: torch.Tensor
    negative: torch.Tensor
    magnitudes: torch.Tensor


def _affine(images: torch.Tensor, fill: list[float], shear: Sequence[float] = (0.0, 0.0),
            translate: Sequence[float] = (0.0, 0.0)) -> torch.Tensor:
    return F.affine(images, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear), center=[0.0, 0.0],
                    interpolation=InterpolationMode.BILINEAR, fill=fill)


def _degrees(slope: float) -> float:
    return math.degrees(math.atan(slope))


def _posterized(images: torch.Tensor, bits: int) -> torch.Tensor:
    return F.posterize(images, bits) if bits < 8 else images


def _solarized(images: torch.Tensor, threshold: int) -> torch.Tensor:
    return F.solarize(images, threshold) if threshold < 256 else images


def _added(images: torch.Tensor, amount: int) -> torch.Tensor:
    """timm's SolarizeAdd: what is below 128 is raised."""
    return torch.where(images < 128, (images.to(torch.int16) + amount).clamp(max=255).to(torch.uint8), images)


def _increasing(level: float, sign: int) -> float:
    return max(0.1, 1 + sign * 0.9 * level)


# By timm's name: whether it has two directions, and (images, magnitude / 10, direction, colour of what is uncovered).
OPERATIONS: dict[str, tuple[bool, Callable]] = {
    "AutoContrast": (False, lambda x, level, sign, fill: F.autocontrast(x)),
    "Equalize": (False, lambda x, level, sign, fill: F.equalize(x)),
    "Invert": (False, lambda x, level, sign, fill: F.invert(x)),
    "Rotate": (True, lambda x, level, sign, fill: F.rotate(x, sign * 30 * level, InterpolationMode.BILINEAR,
                                                           fill=fill)),
    "Posterize": (False, lambda x, level, sign, fill: _posterized(x, int(4 * level))),
    "PosterizeIncreasing": (False, lambda x, level, sign, fill: _posterized(x, 4 - int(4 * level))),
    "Solarize": (False, lambda x, level, sign, fill: _solarized(x, min(256, int(256 * level)))),
    "SolarizeIncreasing": (False, lambda x, level, sign, fill: _solarized(x, 256 - min(256, int(256 * level)))),
    "SolarizeAdd": (False, lambda x, level, sign, fill: _added(x, min(128, int(110 * level)))),
    "Color": (False, lambda x, level, sign, fill: F.adjust_saturation(x, 0.1 + 1.8 * level)),
    "ColorIncreasing": (True, lambda x, level, sign, fill: F.adjust_saturation(x, _increasing(level, sign))),
    "Contrast": (False, lambda x, level, sign, fill: F.adjust_contrast(x, 0.1 + 1.8 * level)),
    "ContrastIncreasing": (True, lambda x, level, sign, fill: F.adjust_contrast(x, _increasing(level, sign))),
    "Brightness": (False, lambda x, level, sign, fill: F.adjust_brightness(x, 0.1 + 1.8 * level)),
    "BrightnessIncreasing": (True, lambda x, level, sign, fill: F.adjust_brightness(x, _increasing(level, sign))),
    "Sharpness": (False, lambda x, level, sign, fill: F.adjust_sharpness(x, 0.1 + 1.8 * level)),
    "SharpnessIncreasing": (True, lambda x, level, sign, fill: F.adjust_sharpness(x, _increasing(level, sign))),
    "ShearX": (True, lambda x, level, sign, fill: _affine(x, fill, shear=(_degrees(sign * 0.3 * level), 0.0))),
    "ShearY": (True, lambda x, level, sign, fill: _affine(x, fill, shear=(0.0, _degrees(sign * 0.3 * level)))),
    "TranslateXRel": (True, lambda x, level, sign, fill: _affine(
        x, fill, translate=(-sign * 0.45 * level * x.shape[-1], 0.0))),
    "TranslateYRel": (True, lambda x, level, sign, fill: _affine(
        x, fill, translate=(0.0, -sign * 0.45 * level * x.shape[-2]))),
}


class RandAugment:
    """A policy of timm's, such as rand-m7-mstd0.5-inc1, for batches.

    Args:
        mean: of images in 0..1; what an operation uncovers gets this colour.

    Raises:
        UsageError: not timm's RandAugment, or an operation that is not in OPERATIONS.
    """

    def __init__(self, policy: str, mean: Sequence[float]):
        wanted = "such as rand-m7-mstd0.5-inc1, is required over FFCV files and for threads"
        try:
            found = rand_augment_transform(policy, {})  # of none, older releases of timm make an error
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            raise UsageError(f"aa: a policy of timm's RandAugment, {wanted}, got {policy!r}") from error
        unknown = sorted({op.name for op in found.ops} - set(OPERATIONS))
        if unknown or found.choice_weights is not None:
            raise UsageError(f"aa: a policy of operations that are drawn alike, {wanted}; {policy!r} has "
                             f"{', '.join(unknown) or 'weights'}")
        self.names, self.layers = [op.name for op in found.ops], found.num_layers
        first = found.ops[0]
        self.share, self.magnitude, self.std = first.prob, float(first.magnitude), float(first.magnitude_std)
        self.most = float(first.magnitude_max or MOST)
        self.fill = [float(min(255, round(255 * value))) for value in mean]

    def draws(self, count: int, seed: int, epoch: int, share: Share, first: int = 0) -> Iterator[Draws]:
        """Yield the draws for the batches of one process from number `first` on, in an epoch of `count` images."""
        generator = epoch_generator(seed + LAYER_SEED, epoch)
        form = (count, self.layers)
        operations = torch.randint(len(self.names), form, generator=generator)
        operations[torch.rand(form, generator=generator) >= self.share] = -1
        negative = torch.rand(form, generator=generator) < 0.5
        form = (share.train_batches, self.layers, len(self.names), 2)
        if math.isinf(self.std):
            magnitudes = self.magnitude * torch.rand(form, generator=generator)
        else:
            magnitudes = self.magnitude + self.std * torch.randn(form, generator=generator)
        magnitudes.clamp_(0.0, self.most)
        for number, places in enumerate(share.train_places(first), start=first):
            yield Draws(operations[places], negative[places], magnitudes[number])

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Augment uint8 (B, 3, S, S); the result is another tensor."""
        images = images.clone(memory_format=torch.contiguous_format)
        for layer in range(self.layers):
            for number, name in enumerate(self.names):
                directed, function = OPERATIONS[name]
                chosen = draws.operations[:, layer] == number
                for negative in ((False, True) if directed else (False,)):
                    alike = chosen & (draws.negative[:, layer] == negative) if directed else chosen
                    if not alike.any():
                        continue
                    where = sent(alike.nonzero()[:, 0], images.device)
                    level = draws.magnitudes[layer, number, int(negative)].item() / MOST
                    images[where] = function(images[where], level, -1 if negative else 1, self.fill)
        return images
