"""Spatial transformer: sampling for given thetas, gradients, and the identity at the start."""

import timm
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ea_vision.layers import SpatialTransformer, sample_affine
from tests.layers.oracle import doubles
from tests.refused import refused

STAYS = ((1, 0, 0), (0, 1, 0))
CROPS = ((0.5, 0, 0.25), (0, 1 / 3, -1 / 3))
SHIFTS = ((1, 0, 2 * 3 / 8), (0, 1, -2 * 2 / 6))  # by 3 columns and -2 rows; zeros come in
TURNS = ((0, -1, 0), (1, 0, 0))
MIRRORS = ((-1, 0, 0), (0, 1, 0))


def theta(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def test_it_samples_where_theta_points():
    image = doubles(1, 2, 6, 8)
    for rows, expected in (
        (STAYS, image),
        (CROPS, image[:, :, 1:3, 3:7]),
        (SHIFTS, F.pad(image[:, :, :4, 3:], (0, 3, 2, 0))),
        (TURNS, image.rot90(1, (2, 3))),
        (MIRRORS, image.flip(3)),
    ):
        sampled = sample_affine(image, theta(*rows), expected.shape[2:])
        assert_close(sampled, expected, atol=1e-9, rtol=1e-9)


def test_layer_begins_as_the_identity_and_learns_where_to_look():
    layer = SpatialTransformer(2, 8)
    x = torch.randn(3, 2, 12, 10)
    assert_close(layer(x), x)
    assert SpatialTransformer(2, 8, out_size=(5, 7))(x).shape == (3, 2, 5, 7)
    loss = (layer(x) * torch.randn(3, 2, 12, 10)).sum()
    loss.backward()
    assert layer.fc.weight.grad.any()
    assert layer.fc.bias.grad.all()


def test_bad_options_are_named():
    with refused("hidden must be 2 or more, got 1", ValueError):
        SpatialTransformer(2, hidden=1)


def test_network_without_it_is_the_same_network():
    torch.manual_seed(0)
    model = timm.create_model("stn_digits").eval()
    plain = timm.create_model("stn_digits", transform=False).eval()
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys
    assert all("conv1.transform" in key for key in missing.unexpected_keys)
    x = torch.randn(2, 3, 32, 32)
    assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)
