"""The figures of a spatial transformer's sampling and of the input Jacobian."""

import numpy as np
import pytest
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.visualize import input_jacobian, plot_jacobian, plot_sampling
from ea_vision.visualize.image_maps import as_model

from .conftest import small


@pytest.fixture(scope="module")
def digits():
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_quadrilateral_is_drawn_and_what_it_holds(digits):
    model = timm.create_model("stn_digits")
    transform = model.conv1.transform
    with torch.no_grad():
        transform.fc.bias.copy_(
            torch.tensor([0.5, 0, 0.25, 0, 0.5, -0.25])
        )  # half the side, right and up
    figure = plot_sampling(model, list(digits))
    above, _, below, _ = figure.axes
    drawn = np.stack(above.lines[0].get_data(), -1)
    np.testing.assert_allclose(drawn, [[12, 4], [28, 4], [28, 20], [12, 20], [12, 4]], atol=1e-4)
    sampled = torch.from_numpy(below.images[0].get_array().data).permute(2, 0, 1)
    enlarged = torch.nn.functional.interpolate(
        digits[:1, :, 4:20, 12:28], scale_factor=2, mode="bilinear"
    )[0]
    torch.testing.assert_close(
        sampled[:, 1:-1, 1:-1], enlarged[:, 1:-1, 1:-1], atol=1e-5, rtol=1e-5
    )
    assert model.training
    with pytest.raises(
        UsageError, match="needs a model with a SpatialTransformer.*resnet18_cifar .*with 0"
    ):
        plot_sampling("resnet18_cifar", list(digits))


def test_the_jacobian_is_the_differences_quotient(digits):
    model, x = small("conv_transformer_cifar").double(), digits[:1].double()
    jacobian, chosen = input_jacobian(model, x)
    assert chosen == model(x).argmax() and jacobian.shape == (32, 32)
    steps = torch.zeros(
        3, 3, 32, 32, dtype=torch.float64
    )  # of a channel each, at the strongest pixel
    steps[(*2 * [range(3)], *divmod(int(jacobian.argmax()), 32))] = 1e-6
    slopes = (model(x + steps) - model(x - steps))[:, chosen] / 2e-6
    assert slopes.abs().max().item() == pytest.approx(jacobian.max().item(), rel=1e-4)
    with pytest.raises(UsageError, match="a class from 0 to 2, got 3"):
        input_jacobian(model, x, 3)


@pytest.mark.parametrize("name,panels", [("csan_conv_transformer_cifar", 8), ("cnn_cifar", 2)])
def test_the_jacobian_stands_beside_the_maps(digits, name, panels):
    """For a class of one's choice, of the image that the network sees, in evaluation mode."""
    model = timm.create_model(name, widths=(8, 8, 16, 16), num_classes=4)
    figure = plot_jacobian(model, digits[0], target=2)
    shown = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(shown) == panels and shown[1].get_title() == "|d class 2 / d input|"
    assert all(p.grad is None for p in model.parameters()) and model.training
    expected, _ = input_jacobian(model.eval(), as_model(model).normalize(digits[:1]), 2)
    np.testing.assert_allclose(shown[1].images[-1].get_array(), expected, rtol=1e-5, atol=1e-7)
