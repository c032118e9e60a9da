"""Figures and the page of networks with every kind of evolution, and of models of other packages."""

import numpy as np
import pytest
import timm
import torch

import ea_vision
from ea_vision.base.errors import UsageError
from ea_vision.layers import evolution
from ea_vision.recorder.loading import LoadedModel
from ea_vision.visualize import (
    plot_heads,
    plot_matrix,
    plot_rollout,
    plot_statistics,
    plot_strip,
    show_page,
)
from tests.recorder.networks import SWIN, TINY, lively, timms, torchvision_vit, transformers_model

from .conftest import PHOTO, maps_of, small, texts_of

CONFIG = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0, "interpolation": "bilinear"}
IMAGE = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))


def swin():
    return timms("swin_tiny_patch4_window7_224", img_size=32, **SWIN)


@pytest.mark.parametrize("transformer", [True, False], ids=["transformer", "convolutional"])
@pytest.mark.parametrize("kind", sorted(evolution._EVOLUTIONS))
def test_every_kind_of_evolution(kind, transformer):
    if transformer:
        model = ea_vision.evolve(timm.create_model("vit_tiny_patch16_224", **TINY), kind).eval()
    else:
        model = small("conv_transformer_cifar", evolution=kind)
    maps = maps_of(plot_strip(model, PHOTO, layers="1,2"))
    assert maps and all(np.isfinite(values).all() for values in maps)
    assert show_page(model, PHOTO, layers="1,2").text


def test_transformers_of_hugging_face():
    """Their outputs are no tensors; a page says their likeliest classes, where they have some."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    backbone = transformers_model("ViT")
    classifier = lively(transformers.ViTForImageClassification(backbone.config))
    for model in (backbone, classifier):
        assert ('"predictions":[{"name":"class' in show_page(model, PHOTO).text) == (
            model is classifier
        )


@pytest.mark.parametrize(
    "make",
    [
        torchvision_vit,
        lambda: transformers_model("ViT"),
        swin,
        lambda: timms("pvt_v2_b0"),
        lambda: timms("mobilevit_xxs"),
    ],
    ids=["torchvision", "transformers", "swin", "pvt", "mobilevit"],
)
def test_figures_of_any_transformer(make):
    model = make()
    heads = plot_heads(model, IMAGE, layers=[1, 2], heads="mean", queries=[(5, 20)], overlay=False)
    assert len(heads.axes) >= 3 and all(np.isfinite(values).all() for values in maps_of(heads))
    assert maps_of(plot_matrix(model, IMAGE, layers=[1], heads=[0]))
    for figure in (
        plot_strip(model, IMAGE, layers=[1, 2]),
        plot_rollout(model, IMAGE, queries=[(5, 20)]),
        plot_statistics(model, [IMAGE]),
    ):
        assert figure.axes
    assert show_page(LoadedModel(model, "network", (32, 32), CONFIG), PHOTO, layers=[1, 2]).text


def test_a_querys_map_covers_its_window_alone():
    """A window of 4 cells, 2 pixels each: at the left upper corner 8 x 8 pixels; shifted by 2 cells 4 x 4."""
    model = swin()
    for layer, side in ((1, 4), (2, 2)):
        shown = maps_of(
            plot_heads(model, IMAGE, layers=[layer], heads=[0], queries=[(0, 0)], overlay=False)
        )[-1]
        assert shown.shape == (16, 16) and (shown[:side, :side] > 0).all()
        assert np.abs(shown[side:]).max() < 1e-6 and np.abs(shown[:, side:]).max() < 1e-6
        assert shown[:side, :side].mean() == pytest.approx(1, rel=1e-4), (
            "in units of uniform attention in the window"
        )


def test_channel_maps_have_a_matrix_and_nothing_else():
    model = timms(
        "xcit_nano_12_p16_224", img_size=32, embed_dim=24, depth=2, num_heads=3, cls_attn_layers=1
    )
    assert maps_of(plot_matrix(model, IMAGE, layers=[1, 2], heads="all"))[0].shape == (8, 8)
    for figure in (plot_heads, plot_strip, plot_rollout):
        with pytest.raises(
            UsageError, match="attends from channel to channel of a head: draw its matrix"
        ):
            figure(model, IMAGE, layers=[1])


def test_class_attention_shows_its_one_query():
    """A rollout stops before it and logs that it does."""
    model = timms("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    assert maps_of(plot_heads(model, IMAGE, [3, 4], [0], ["cls"], overlay=False))[-1].shape == (
        4,
        4,
    )
    assert maps_of(plot_matrix(model, IMAGE, layers=[3], heads=[0]))[0].shape == (1, 17)
    for layers, query, message in (
        ([3], (4, 4), "is class attention: its queries are cls alone"),
        ([1], "cls", "query cls must be a token before .* layer 1 .*, which has none"),
    ):
        with pytest.raises(UsageError, match=message):
            plot_heads(model, IMAGE, layers=layers, queries=[query])
    texts = texts_of(plot_rollout(model, PHOTO, queries=[(5, 20)]))
    assert "layers 1, 2" in texts and "class attention is left out" in texts
