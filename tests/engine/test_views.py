"""Views of a numbered image, pixel by pixel, and the mean of their logits."""
from __future__ import annotations

import pytest
import torch

from ea_vision.engine.evaluate import logits_of_views, views

IMAGE = torch.arange(12.0).view(1, 1, 3, 4)  # 0 1 2 3 / 4 5 6 7 / 8 9 10 11


def test_six_are_airbenchs():
    """Its arithmetic: half the mirrored image's mean, half the mean over both shifts of theirs."""
    torch.manual_seed(0)
    images = torch.randn(5, 3, 32, 32)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3136, 10))

    def mirrored(inputs):
        return 0.5 * net(inputs) + 0.5 * net(inputs.flip(-1))

    with torch.no_grad():
        padded = torch.nn.functional.pad(images, (1,) * 4, "reflect")
        shifted = [padded[:, :, 0:32, 0:32], padded[:, :, 2:34, 2:34]]
        wanted = 0.5 * mirrored(images) + 0.5 * torch.stack([mirrored(s) for s in shifted]).mean(0)
        plain, mean = logits_of_views(net, images, "six")
        torch.testing.assert_close(mean, wanted)
        assert torch.equal(plain, net(images))
        torch.testing.assert_close(logits_of_views(net, images, "mirror")[1], mirrored(images))


def test_none_is_the_image_once():
    assert views(IMAGE, "none") == [(1.0, IMAGE)]
    calls = []
    logits_of_views(lambda images: calls.append(1) or images, IMAGE, "none")
    assert len(calls) == 1


def test_bad_kinds_and_sizes_are_named():
    with pytest.raises(ValueError, match="must be one of none, mirror, six, got 'five'"):
        views(IMAGE, "five")
    with pytest.raises(ValueError, match="at least 2 x 2 pixels, got 1 x 4"):
        views(IMAGE[..., :1, :], "six")
