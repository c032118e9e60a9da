"""A first convolution that whitens: its filters are the principal directions of the data's patches, and stay so.

The start of Keller Jordan's airbench (https://arxiv.org/abs/2404.00498, section 3.2), after David Page and Tysam&: the
eigenvectors of the covariance of the training images' patches, each divided by the root of its eigenvalue, and their
negatives, for a rectifier passes one side only. The filters are ordinary weights; nothing else tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from ea_vision.base.errors import UsageError

IMAGES = 5000  # as airbench takes
EPSILON = 5e-4  # added to the eigenvalues, of images with mean 0 and std 1: the smallest directions are noise


def every_nth(images: int) -> int:
    """The n for which every n-th of so many images, sorted by class perhaps, are just about enough to whiten by."""
    return max(1, images // IMAGES)


def first_conv(model: nn.Module) -> nn.Conv2d:
    """The convolution that timm's configuration of the model names as its first.

    Raises:
        UsageError: it names none, several, or what is no plain convolution of images.
    """
    name = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    found = dict(model.named_modules()).get(name) if isinstance(name, str) else None
    if not isinstance(found, nn.Conv2d) or found.groups != 1:
        raise UsageError(f"whiten needs a model whose pretrained_cfg names one first_conv, a Conv2d of one group; "
                         f"{type(model).__name__} has {name!r}" + (f", {found}" if found is not None else ""))
    return found


def patch_covariance(batches: Iterable[torch.Tensor], conv: nn.Conv2d) -> torch.Tensor:
    """Covariance of the patches that `conv` sees inside images, zero padding apart.

    Args:
        batches: normalised images, (B, C, H, W) each; the first 5,000 are used.

    Returns:
        float64 (D, D), D = C x kernel height x kernel width, on the CPU.

    Raises:
        UsageError: no images, or images smaller than the kernel.
    """
    total = products = None
    images = patches = 0
    for batch in batches:
        batch = batch[:IMAGES - images].to("cpu", torch.float32)
        if min(side - reach for side, reach in zip(batch.shape[-2:], _reach(conv), strict=True)) < 0:
            raise UsageError(f"whiten needs images of at least {_reach(conv)} pixels, got {tuple(batch.shape[-2:])}")
        unfolded = F.unfold(batch, conv.kernel_size, conv.dilation, stride=conv.stride)  # (B, D, patches of an image)
        rows = unfolded.transpose(1, 2).flatten(0, 1).double()
        total = rows.sum(0) if total is None else total + rows.sum(0)
        products = rows.T @ rows if products is None else products + rows.T @ rows
        images, patches = images + len(batch), patches + len(rows)
        if images >= IMAGES:
            break
    if not patches:
        raise UsageError("whiten needs training images, got none")
    mean = total / patches
    return products / patches - torch.outer(mean, mean)


def _reach(conv: nn.Conv2d) -> tuple[int, ...]:
    return tuple(d * (k - 1) + 1 for k, d in zip(conv.kernel_size, conv.dilation, strict=True))


def whitening_filters(covariance: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` filters (count, D) whose outputs on such patches have variance 1, nearly.

    First the whitening directions of the largest eigenvalues, then their negatives; what is left of the filters are
    random directions of the whitened patches.
    """
    values, vectors = torch.linalg.eigh(covariance)  # ascending
    values, vectors = values.flip(0), vectors.flip(1).T  # (D,), (D, D) a row each
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    whitening = vectors * largest.sign() / (values.clamp(min=0) + EPSILON).sqrt()[:, None]
    kept = min(count // 2, len(whitening))
    extra = torch.randn(count - 2 * kept, len(whitening), generator=generator, dtype=torch.float64)
    extra = F.normalize(extra, dim=1) @ whitening
    return torch.cat([whitening[:kept], -whitening[:kept], extra])


@torch.no_grad()
def whiten(model: nn.Module, batches: Iterable[torch.Tensor], seed: int) -> None:
    """Set the first convolution's filters to whitening ones and freeze them; a bias that it has is zero, and trained.

    To be called before the optimiser is built.

    Args:
        model: see `first_conv`.
        batches: normalised images as evaluation sees them, the same on every process.
        seed: of the filters that are random directions.

    Raises:
        UsageError: see `first_conv` and `patch_covariance`; images whose channels are not the convolution's.
    """
    conv = first_conv(model)
    batches = iter(batches)
    first = next(batches, None)
    if first is not None and first.shape[1] != conv.in_channels:
        raise UsageError(f"whiten needs images of {conv.in_channels} channels, got {first.shape[1]}")
    covariance = patch_covariance(chain([] if first is None else [first], batches), conv)
    filters = whitening_filters(covariance, conv.out_channels, torch.Generator().manual_seed(seed))
    conv.weight.copy_(filters.view(conv.weight.shape))
    conv.weight.requires_grad_(False)
    if conv.bias is not None:
        conv.bias.zero_()
