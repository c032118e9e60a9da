"""Spatial transformer: given thetas do as they should, gradients, and the identity at the start."""
import math

import pytest
import timm
import torch

from ea_vision.layers import SpatialTransformer, quadrilateral, sample_affine

D64 = torch.float64


def theta(*rows):
    return torch.tensor([rows], dtype=D64)


@pytest.fixture
def image():
    return torch.randn(1, 2, 6, 8, dtype=D64)


def test_the_identity_is_the_image(image):
    torch.testing.assert_close(sample_affine(image, theta((1, 0, 0), (0, 1, 0)), (6, 8)), image)


def test_it_crops(image):
    """The middle half of each axis, at the same scale."""
    crop = sample_affine(image, theta((0.5, 0, 0.25), (0, 1 / 3, -1 / 3)), (2, 4))
    torch.testing.assert_close(crop, image[:, :, 1:3, 3:7])


def test_it_shifts_and_brings_zeros_in(image):
    shifted = sample_affine(image, theta((1, 0, 2 * 3 / 8), (0, 1, -2 * 2 / 6)), (6, 8))  # 3 columns, -2 rows
    torch.testing.assert_close(shifted[:, :, 2:, :5], image[:, :, :4, 3:])
    assert max(shifted[:, :, :2].abs().max(), shifted[:, :, :, 5:].abs().max()) < 1e-12


def test_it_turns_and_mirrors(image):
    square = image[..., :6]
    turned = sample_affine(square, theta((0, -1, 0), (1, 0, 0)), (6, 6))
    torch.testing.assert_close(turned, square.rot90(1, (2, 3)))
    torch.testing.assert_close(sample_affine(image, theta((-1, 0, 0), (0, 1, 0)), (6, 8)), image.flip(3))


def test_between_pixels_it_is_bilinear_by_a_loop(image):
    angle = 0.3
    where = theta((math.cos(angle), -math.sin(angle), 0.1), (math.sin(angle), math.cos(angle), -0.2))
    result = sample_affine(image, where, (3, 5))
    for row in range(3):
        for col in range(5):
            out = torch.tensor([(2 * col + 1) / 5 - 1, (2 * row + 1) / 3 - 1, 1], dtype=D64)
            x, y = ((where[0] @ out + 1) / 2 * torch.tensor([8, 6], dtype=D64) - 0.5).tolist()
            total = torch.zeros(2, dtype=D64)
            for j in (math.floor(y), math.floor(y) + 1):
                for i in (math.floor(x), math.floor(x) + 1):
                    if 0 <= j < 6 and 0 <= i < 8:
                        total += image[0, :, j, i] * (1 - abs(y - j)) * (1 - abs(x - i))
            torch.testing.assert_close(result[0, :, row, col], total)


def test_gradients_to_image_and_theta():
    x = torch.randn(2, 1, 4, 3, dtype=D64, requires_grad=True)
    where = (theta((0.9, 0.13, 0.07), (-0.17, 1.1, 0.03)).repeat(2, 1, 1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda *args: sample_affine(*args, (3, 5)), (x, where))


def test_the_quadrilateral_is_what_is_sampled():
    torch.testing.assert_close(quadrilateral(theta((1, 0, 0), (0, 1, 0)), (6, 8)),
                               torch.tensor([[[0, 0], [8, 0], [8, 6], [0, 6]]], dtype=D64))
    torch.testing.assert_close(quadrilateral(theta((0.5, 0, 0.25), (0, 1 / 3, -1 / 3)), (6, 8)),
                               torch.tensor([[[3, 1], [7, 1], [7, 3], [3, 3]]], dtype=D64))  # as in the crop


def test_layer_begins_as_the_identity_and_learns_where_to_look():
    layer = SpatialTransformer(2, 8)
    x = torch.randn(3, 2, 12, 10)
    torch.testing.assert_close(layer(x), x)
    torch.testing.assert_close(torch.jit.script(layer)(x), x)
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
    assert not missing.missing_keys and all("conv1.transform" in key for key in missing.unexpected_keys)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)
