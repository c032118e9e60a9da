"""Views of a numbered image, pixel by pixel, and the mean of their logits."""

import torch

from ea_vision.engine.evaluate import logits_by_views


def test_six_are_airbenchs():
    """Its arithmetic: half the mirrored image's mean, half the mean over both shifts of theirs."""
    images = torch.randn(5, 3, 32, 32)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10), torch.nn.ReLU())

    def mirrored(inputs):
        return 0.5 * net(inputs) + 0.5 * net(inputs.flip(-1))

    with torch.no_grad():
        padded = torch.nn.functional.pad(images, (1,) * 4, "reflect")
        shifted = mirrored(padded[:, :, 0:32, 0:32]) + mirrored(padded[:, :, 2:34, 2:34])
        expected = 0.5 * mirrored(images) + 0.5 * shifted / 2
        torch.testing.assert_close(logits_by_views(net, images, "six"), expected)
        torch.testing.assert_close(logits_by_views(net, images, "mirror"), mirrored(images))
        assert torch.equal(logits_by_views(net, images, "none"), net(images))
