"""Spatial transformer: given thetas do as they should, gradients, and the identity at the start."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ea_vision.layers import SpatialTransformer, quadrilateral, sample_affine

D64 = torch.float64


def theta(*rows):
    return torch.tensor([rows], dtype=D64)


@pytest.fixture
def image():
    return torch.randn(1, 2, 6, 8, dtype=D64)


@pytest.mark.parametrize(
    "rows,size,expected",
    [
        (((1, 0, 0), (0, 1, 0)), (6, 8), lambda image: image),
        (
            ((0.5, 0, 0.25), (0, 1 / 3, -1 / 3)),
            (2, 4),
            lambda image: image[:, :, 1:3, 3:7],
        ),  # crops
        # shifts by 3 columns and -2 rows, and brings zeros in
        (
            ((1, 0, 2 * 3 / 8), (0, 1, -2 * 2 / 6)),
            (6, 8),
            lambda image: F.pad(image[:, :, :4, 3:], (0, 3, 2, 0)),
        ),
        (((0, -1, 0), (1, 0, 0)), (8, 6), lambda image: image.rot90(1, (2, 3))),  # turns
        (((-1, 0, 0), (0, 1, 0)), (6, 8), lambda image: image.flip(3)),
    ],
)
def test_it_samples_where_theta_says(image, rows, size, expected):
    assert_close(sample_affine(image, theta(*rows), size), expected(image), atol=1e-9, rtol=1e-9)


def test_the_quadrilateral_is_what_is_sampled():
    assert_close(
        quadrilateral(theta((1, 0, 0), (0, 1, 0)), (6, 8)),
        torch.tensor([[[0, 0], [8, 0], [8, 6], [0, 6]]], dtype=D64),
    )
    assert_close(
        quadrilateral(theta((0.5, 0, 0.25), (0, 1 / 3, -1 / 3)), (6, 8)),
        torch.tensor([[[3, 1], [7, 1], [7, 3], [3, 3]]], dtype=D64),
    )  # as in the crop


def test_layer_begins_as_the_identity_and_learns_where_to_look():
    layer = SpatialTransformer(2, 8)
    x = torch.randn(3, 2, 12, 10)
    assert_close(layer(x), x)
    assert SpatialTransformer(2, 8, out_size=(5, 7))(x).shape == (3, 2, 5, 7)
    (layer(x) * torch.randn(3, 2, 12, 10)).sum().backward()
    assert layer.fc.weight.grad.any() and layer.fc.bias.grad.all()


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="hidden must be 2 or more, got 1"):
        SpatialTransformer(2, hidden=1)


def test_network_without_it_is_the_same_network():
    torch.manual_seed(0)
    model = timm.create_model("stn_digits").eval()
    plain = timm.create_model("stn_digits", transform=False).eval()
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys and all(
        "conv1.transform" in key for key in missing.unexpected_keys
    )
    x = torch.randn(2, 3, 32, 32)
    assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)
