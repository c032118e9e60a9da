"""Whitening: patches leave the first convolution uncorrelated and with variance 1, for any model that names it."""
from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import ea_vision  # noqa: F401
from ea_vision.base.errors import UsageError
from ea_vision.engine.whiten import EPSILON, every_nth, first_conv, patch_covariance, whiten, whitening_filters


def smooth_images(count: int, side: int = 16, channels: int = 3) -> torch.Tensor:
    """Images whose neighbouring pixels and channels are alike, as photographs' are."""
    generator = torch.Generator().manual_seed(0)
    images = F.interpolate(torch.randn(count, channels, side // 4, side // 4, generator=generator), scale_factor=4,
                           mode="bilinear")
    images += images.mean(1, keepdim=True) + 0.1 * torch.randn(images.shape, generator=generator)
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def outputs(conv: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    """What comes out inside the images, (pixels, filters) in float64."""
    found = F.conv2d(images.double(), conv.weight.double(), stride=conv.stride, dilation=conv.dilation)
    return found.transpose(0, 1).flatten(1).T


@pytest.mark.parametrize("name", ["ea_conv_transformer_cifar", "resnet18_cifar", "ea_aa_resnet34", "test_resnet",
                                  "test_vit"])
def test_outputs_are_white(name):
    model = timm.create_model(name)
    images = smooth_images(64, side=160 if name.startswith("test") else 32)
    whiten(model, images.split(16), seed=0)
    conv = first_conv(model)
    assert not conv.weight.requires_grad and sum(not p.requires_grad for p in model.parameters()) == 1
    pairs = min(conv.out_channels // 2, conv.weight[0].numel())
    assert torch.equal(conv.weight[:pairs], -conv.weight[pairs:2 * pairs]), "filters and their negatives"
    out = outputs(conv, images)
    out = out - out.mean(0)
    covariance = out.T @ out / len(out)
    values = torch.linalg.eigvalsh(patch_covariance([images], conv)).flip(0)[:pairs]
    wanted = torch.diag(values / (values + EPSILON))
    torch.testing.assert_close(covariance[:pairs, :pairs], wanted, atol=1e-4, rtol=0)
    assert (covariance.diagonal() > 0.5 * wanted.diagonal().min()).all(), "the filters left over are not dead"


def test_covariance_is_that_of_all_patches_however_they_are_batched():
    conv = nn.Conv2d(3, 8, 3, padding=1)
    images = smooth_images(10)
    patches = images.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1).double()
    wanted = torch.cov(patches.T, correction=0)
    for size in (3, 10):
        torch.testing.assert_close(patch_covariance(images.split(size), conv), wanted)


def test_it_stops_at_5000_images():
    conv = nn.Conv2d(1, 4, 2)
    images = torch.randn(6000, 1, 2, 2)
    batches = iter(images.split(1500))
    found = patch_covariance(batches, conv)
    torch.testing.assert_close(found, patch_covariance([images[:5000]], conv))
    assert [every_nth(count) for count in (10, 5000, 9999, 50_000)] == [1, 1, 1, 10]


def test_the_same_data_gives_the_same_filters_and_the_seed_only_those_left_over():
    covariance = patch_covariance([smooth_images(8)], nn.Conv2d(3, 64, 3))
    first, again, other = (whitening_filters(covariance, 64, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(first, again) and torch.equal(first[:54], other[:54])
    assert not torch.isclose(first[54:], other[54:]).all(1).any()


def test_biases_are_zero_and_trained():
    model = timm.create_model("test_vit")
    whiten(model, [torch.randn(16, 3, 160, 160)], seed=0)
    bias = first_conv(model).bias
    assert bias.requires_grad and not bias.any()


def test_models_and_images_that_cannot_be_whitened_are_named():
    with pytest.raises(UsageError, match="names one first_conv"):
        first_conv(nn.Linear(2, 2))
    grouped = timm.create_model("resnet18_cifar")
    grouped.conv1 = nn.Conv2d(3, 63, 3, groups=3)
    with pytest.raises(UsageError, match="a Conv2d of one group"):
        first_conv(grouped)
    model = timm.create_model("resnet18_cifar")
    for images, message in (([], "got none"), ([torch.randn(2, 1, 8, 8)], "3 channels, got 1"),
                            ([torch.randn(2, 3, 2, 8)], "at least")):
        with pytest.raises(UsageError, match=message):
            whiten(model, images, 0)
