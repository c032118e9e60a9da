"""Views of a numbered image, pixel by pixel, and the mean of their logits."""
import torch

from ea_vision.engine.evaluate import logits_by_views


def test_six_are_airbenchs():
    """Its arithmetic: half the mirrored image's mean, half the mean over both shifts of theirs."""
    images = torch.randn(5, 3, 32, 32)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3136, 10))

    def mirrored(inputs):
        return 0.5 * net(inputs) + 0.5 * net(inputs.flip(-1))

    with torch.no_grad():
        padded = torch.nn.functional.pad(images, (1,) * 4, "reflect")
        shifted = [padded[:, :, 0:32, 0:32], padded[:, :, 2:34, 2:34]]
        wanted = 0.5 * mirrored(images) + 0.5 * torch.stack([mirrored(s) for s in shifted]).mean(0)
        torch.testing.assert_close(logits_by_views(net, images, "six"), wanted)
        torch.testing.assert_close(logits_by_views(net, images, "mirror"), mirrored(images))
        assert torch.equal(logits_by_views(net, images, "none"), net(images))
