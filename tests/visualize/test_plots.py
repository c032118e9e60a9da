"""One call per figure: what the functions take, what they draw, and that they leave the model as it was."""

import copy
import io

import numpy as np
import pytest
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from torchvision.transforms.functional import normalize

from ea_vision.visualize import (
    plot_heatmap,
    plot_jacobian,
    plot_rollout,
    plot_statistics,
    plot_strip,
)
from ea_vision.zoo.loaded import load_model
from tests.recorder.networks import padding_vit, recorded

from .conftest import PHOTO, overlaid, small, texts_of

FIGURES = {  # the figures that run a network in different ways
    "heatmap": lambda model: plot_heatmap([model, model], PHOTO, layers=[2]),
    "strip": lambda model: plot_strip(model, PHOTO, layers="1-3"),
    "statistics": lambda model: plot_statistics(model, PHOTO, layers="1,2"),
    "jacobian": lambda model: plot_jacobian(model, PHOTO, 1, layers=2),
}


@pytest.fixture(scope="module")
def model():
    return small().train()


def normalised(model, images):
    config = timm.data.resolve_model_data_config(model)
    return normalize(torch.stack(images), config["mean"], config["std"])


@pytest.mark.parametrize("name", FIGURES)
def test_each_is_a_figure_that_a_notebook_shows_and_leaves_the_model_alone(name, model):
    model.train()
    next(model.children()).eval()  # as some keep their BatchNorm in fine-tuning
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    figure = FIGURES[name](model)
    assert isinstance(figure, Figure)
    with Image.open(io.BytesIO(figure._repr_png_())) as picture:
        assert picture.format == "PNG"
        assert np.ptp(np.asarray(picture.convert("L"))) > 100
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FIGURES)
def test_the_networks_own_precision(name, dtype):
    assert FIGURES[name](small().to(dtype)).axes


def test_paths_and_numbers_of_numpy_are_taken(run):
    for queries in ([np.array([5, 9])], np.array([[5, 9]])):
        figure = plot_heatmap(run, PHOTO, np.int64(1), np.int64(2), queries)
        assert len(overlaid(figure)) == 1
        assert "head 2; query y 5, x 9" in texts_of(figure)
    assert len(overlaid(plot_heatmap(run, PHOTO, 1, 2, np.array([[5, 9], [1, 1]])))) == 2


def test_a_compiled_network_is_drawn_as_it_is():
    model = small()
    one = plot_strip(model, PHOTO, layers=[2])
    other = plot_strip(torch.compile(model), PHOTO, layers=[2])
    assert texts_of(other) == texts_of(one)
    for a, b in zip(overlaid(other), overlaid(one), strict=True):
        np.testing.assert_array_equal(a.get_array(), b.get_array())


def test_titles_say_model_weights_layer_head_and_query():
    name = "ea_conv_transformer_cifar"
    image = torch.rand(3, 32, 32)
    untrained = load_model(name, random=True)
    heatmap = texts_of(plot_heatmap(name, image, layers=[2], heads=1, queries=[(9, 14)]))
    for text in (f"{name}, weights long_c10", "layer 2, map 8x8", "head 1", "query y 9, x 14"):
        assert text in heatmap
    titles = texts_of(plot_heatmap(untrained, [image, image], layers=[2], heads=1))
    for text in (f"{name} (untrained)", "layer 2", "head 1", "mean of all queries"):
        assert text in titles


def test_a_tile_is_its_images_map():
    """One image by head; several images with the attention that each pixel gets, or with one query's map."""
    model = small(img_size=(16, 32))
    query = (5, 9)
    token = 1 * 8 + 2  # on a map of 4x8
    images = [torch.rand(3, 16, 32), torch.rand(3, 16, 32)]
    attn = 32 * recorded(model, normalised(model, images), layers=[1])[1].attn
    query_map = attn[:, :, token]
    for figure, expected in (
        (
            plot_heatmap(model, images[0], 1, "1,mean", [query]),
            [query_map[0, 1], query_map[0].mean(0)],
        ),
        (plot_heatmap(model, images, 1, 1), attn[:, 1].mean(1)),
        (plot_heatmap(model, images, 1, 1, [query]), query_map[:, 1]),
    ):
        for tile, values in zip(overlaid(figure), expected, strict=True):
            np.testing.assert_allclose(tile.get_array(), values.view(4, 8), rtol=1e-4)
            assert tile.get_extent() == [0, 32, 16, 0]


def test_statistics_in_numbers(model):
    """Entropy, mean of heads and images, and share of position alone: the mean product of two images' maps."""
    images = list(torch.rand(3, 3, 16, 16))
    figure = plot_statistics(model, images)
    drawn = {}
    for axes in figure.axes:
        if axes.get_visible():
            drawn[axes.get_title()] = dict(axes.lines[0].get_xydata())
    for number, layer in recorded(model.eval(), normalised(model, images)).items():
        attn = layer.attn
        entropies = torch.special.entr(attn).sum(-1)
        entropy = entropies.mean() / np.log(attn.shape[-1])
        assert drawn["entropy / log N"][number] == pytest.approx(entropy.item(), rel=1e-4)
        products = torch.einsum("ikqn,jkqn->kij", attn, attn)  # of two images' maps
        same = products.diagonal(dim1=1, dim2=2)
        others = (products.sum((1, 2)) - same.sum(1)) / 6
        share = (others / same.mean(1)).mean()
        assert drawn["share of position alone"][number] == pytest.approx(share.item(), rel=1e-4)
    assert "mean over 3 images" in texts_of(figure)
    # it takes two images
    one = plot_statistics(model, images[0], layers=1, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert "share of position" not in texts_of(one)


def test_default_queries_where_patches_exceed_the_image():
    """17 pixels are padded to three patches of 8: the default queries lie in patches, not in pixels."""
    for plot in (plot_heatmap, plot_rollout):
        assert texts_of(plot(padding_vit(), torch.rand(3, 17, 17)))
