"""The picture of what a spatial transformer samples."""

import numpy as np
import timm
import torch
from torch.testing import assert_close

from ea_vision.layers import SpatialTransformer
from experiments.sampling import plot_sampling, quadrilateral
from tests.layers.test_spatial_transformer import CROPS, STAYS, theta
from tests.refused import refused


def test_the_quadrilateral_is_what_is_sampled():
    whole = theta([0, 0], [8, 0], [8, 6], [0, 6])
    part = theta([3, 1], [7, 1], [7, 3], [3, 3])
    assert_close(quadrilateral(theta(*STAYS), (6, 8)), whole)
    assert_close(quadrilateral(theta(*CROPS), (6, 8)), part)


def test_the_quadrilateral_is_drawn_and_what_it_holds():
    digits = torch.rand(2, 3, 32, 32)
    model = timm.create_model("stn_digits")
    half_the_side_right_and_up = torch.tensor([0.5, 0, 0.25, 0, 0.5, -0.25])
    with torch.no_grad():
        model.conv1.transform.fc.bias.copy_(half_the_side_right_and_up)
    figure = plot_sampling(model, list(digits))
    above, _, below, _ = figure.axes
    drawn = np.stack(above.lines[0].get_data(), -1)
    np.testing.assert_allclose(drawn, [[12, 4], [28, 4], [28, 20], [12, 20], [12, 4]], atol=1e-4)
    picture = below.images[0].get_array()
    sampled = torch.from_numpy(picture.data).permute(2, 0, 1)
    part = digits[:1, :, 4:20, 12:28]
    enlarged = torch.nn.functional.interpolate(part, scale_factor=2, mode="bilinear")[0]
    inside = (slice(None), slice(1, -1), slice(1, -1))
    torch.testing.assert_close(sampled[inside], enlarged[inside], atol=1e-5, rtol=1e-5)
    assert model.training
    assert len(plot_sampling(model, digits[0]).axes) == 2  # an image without a list
    with refused("needs a model with a SpatialTransformer.*resnet18_cifar .*with 0"):
        plot_sampling("resnet18_cifar", list(digits))
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), SpatialTransformer(8))
    with refused(r"reads the image \(3 channels\), got one that reads 8"):
        plot_sampling(network, list(digits))
