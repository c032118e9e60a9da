"""Figures and the page of networks with every kind of evolution, and of models of other packages."""

import re

import numpy as np
import pytest
import timm
import torch
import transformers

import ea_vision
from ea_vision.layers import evolution_kinds
from ea_vision.visualize import (
    plot_heads,
    plot_matrix,
    plot_rollout,
    plot_statistics,
    plot_strip,
    show_page,
)
from ea_vision.zoo.loaded import LoadedModel, as_model
from ea_vision.zoo.preparation import Preparation
from tests.recorder.networks import (
    CAIT,
    TINY,
    XCIT,
    lively,
    recorded,
    small_swin,
    timms,
    torchvision_vit,
    transformers_model,
)
from tests.refused import refused

from .conftest import PHOTO, maps_of, small, texts_of, tiles_of, titles_of

PREPARATION = Preparation((32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
IMAGE = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))


def check(figure):
    """Require finite maps."""
    maps = maps_of(figure)
    assert maps
    for values in maps:
        assert np.isfinite(values).all()
    return maps


@pytest.mark.parametrize("transformer", [True, False], ids=["transformer", "convolutional"])
@pytest.mark.parametrize("kind", sorted(evolution_kinds()))
def test_every_kind_of_evolution(kind, transformer):
    if transformer:
        model = ea_vision.evolve(timm.create_model("vit_tiny_patch16_224", **TINY), kind).eval()
    else:
        model = small("conv_transformer_cifar", evolution=kind)
    check(plot_strip(model, PHOTO, layers="1,2"))
    assert show_page(model, PHOTO, layers="1,2").text


def test_an_evolving_transformer_of_hugging_face():
    """Its outputs are not tensors; a page shows its likeliest classes."""
    classifier = transformers.ViTForImageClassification(transformers_model("ViT").config)
    evolving = lively(ea_vision.evolve(classifier, "ea"))
    strip = plot_strip(evolving, PHOTO, layers="1,2")
    check(strip)
    assert "own alone" in texts_of(strip)
    assert '"predictions":[{"name":"class' in show_page(evolving, PHOTO).text


MODELS = {
    "torchvision": torchvision_vit,
    "transformers": lambda: transformers_model("ViT"),
    "swin": small_swin,
    "pvt": lambda: timms("pvt_v2_b0"),
    "mobilevit": lambda: timms("mobilevit_xxs"),
}


@pytest.mark.parametrize("name", MODELS)
def test_figures_of_any_transformer(name):
    model = MODELS[name]()
    query = [(5, 20)]
    heads = plot_heads(model, IMAGE, layers=[1, 2], heads="mean", queries=query, overlay=False)
    assert len(heads.axes) >= 3
    check(heads)
    check(plot_matrix(model, IMAGE, layers=[1], heads=[0]))
    assert plot_strip(model, IMAGE, layers=[1, 2]).axes
    assert plot_rollout(model, IMAGE, queries=query).axes
    assert plot_statistics(model, [IMAGE]).axes
    assert show_page(LoadedModel(model, "network", PREPARATION), PHOTO, layers=[1, 2]).text


@pytest.mark.parametrize("layer, side", [(1, 4), (2, 2)])
def test_a_querys_map_covers_its_window_alone(layer, side):
    """A window of 4 cells, 2 pixels each: at the left upper corner 8 x 8 pixels; shifted by 2 cells 4 x 4."""
    figure = plot_heads(small_swin(), IMAGE, [layer], [0], [(0, 0)], overlay=False)
    shown = maps_of(figure)[-1]
    window = shown[:side, :side]
    assert shown.shape == (16, 16)
    assert (window > 0).all()
    # in units of uniform attention in the window
    assert window.mean() == pytest.approx(1, rel=1e-4)
    window[:] = 0
    assert np.abs(shown).max() < 1e-6


def test_heads_that_not_every_layer_has_are_told(caplog):
    """With layers of 2 and 3 heads; if no heads are chosen, nothing is logged."""
    model = small_swin()
    told = "layers have 2 to 3 heads, so only heads 0 to 1 of each are drawn"
    for plot in (plot_heads, plot_matrix):
        caplog.clear()
        plot(model, IMAGE, [1, 3], [0])
        plot(model, IMAGE, [3], "all")
        assert told not in caplog.text
        plot(model, IMAGE, [1, 3])
        assert told in caplog.text
    caplog.clear()
    plot_statistics(model, [IMAGE], [1, 3])
    assert told not in caplog.text


def test_channel_maps_have_a_matrix_and_nothing_else():
    model = timms("xcit_nano_12_p16_224", **XCIT)
    [matrix, *_] = maps_of(plot_matrix(model, IMAGE, layers=[1, 2], heads="all"))
    assert matrix.shape == (8, 8)
    message = "attends from channel to channel of a head: draw its matrix"
    for plot in (plot_heads, plot_strip, plot_rollout):
        with refused(message):
            plot(model, IMAGE, layers=[1])


def test_class_attention_shows_its_one_query():
    """Figures pass over CaiT's last two layers unless they are named, or a query cls; a rollout says so."""
    model = timms("cait_xxs24_224", **CAIT)
    for queries, numbers in ((None, {"1", "2"}), ("cls", {"3", "4"})):
        texts = texts_of(plot_heads(model, IMAGE, heads="mean", queries=queries))
        assert set(re.findall(r"layer (\d)", texts)) == numbers
    assert plot_statistics(model, IMAGE).axes
    assert plot_strip(model, IMAGE).axes
    heads = plot_heads(model, IMAGE, [3, 4], [0], ["cls"], overlay=False)
    assert maps_of(heads)[-1].shape == (4, 4)
    [matrix, *_] = maps_of(plot_matrix(model, IMAGE, layers=[3], heads=[0]))
    assert matrix.shape == (1, 17)
    with refused("is class attention: its queries are cls alone"):
        plot_heads(model, IMAGE, layers=[3], queries=[(4, 4)])
    with refused("query cls must be a token before .* layer 1 .*, which has none"):
        plot_heads(model, IMAGE, layers=[1], queries=["cls"])
    texts = texts_of(plot_rollout(model, PHOTO, queries=[(5, 20)]))
    assert "layers 1, 2" in texts
    assert "class attention is left out" in texts


def test_cross_attention_of_a_detector():
    """DETR's modules state no number of heads; its learned queries have names, and their keys lie on the photo."""
    from tests.recorder.test_huggingface import create  # which needs it

    model = lively(create("DETR"))
    image = torch.rand(3, 96, 96)
    maps = recorded(model, as_model(model).input_of(image)[None])
    cross = maps["decoder.layers.0.encoder_attn"]
    H, W = cross.feat_size
    for head, queries in ((3, ["query3"]), ("mean", ["query1", "query5"])):
        attn = cross.attn[0].mean(0) if head == "mean" else cross.attn[0, head]
        figure = plot_heads(model, image, [cross.name], [head], queries, overlay=False)
        for axes, query in zip(tiles_of(figure), queries, strict=True):
            expected = attn[int(query[-1]) - 1].view(H, W) * H * W
            np.testing.assert_allclose(axes.images[-1].get_array(), expected, rtol=1e-4)
    assert "head 3" in titles_of(plot_heads(model, image, [1]))
    with refused("query query99 must be .* of layer"):
        plot_heads(model, image, [cross.name], [0], ["query99"])
