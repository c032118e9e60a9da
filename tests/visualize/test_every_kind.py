"""Every figure and the page, of networks with every kind of evolution and of models of other packages."""
import numpy as np
import pytest
import timm
import torch
from matplotlib.text import Text
from PIL import Image

import ea_vision
from ea_vision.layers import evolution
from ea_vision.visualize import (
    plot_frames,
    plot_heatmap,
    plot_jacobian,
    plot_matrix,
    plot_rollout,
    plot_statistics,
    plot_strip,
    show_page,
)
from tests.models.test_vision_transformer import TINY
from tests.recorder.test_any_transformer import lively, transformers_model

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
FIGURES = {
    "heatmap": lambda model: plot_heatmap(model, PHOTO, layers=[1, 2], heads="0,mean", queries=[(3, 5)]),
    "models": lambda model: plot_heatmap([model, model], PHOTO, layers=[2]),
    "images": lambda model: plot_heatmap(model, [PHOTO, PHOTO], layers=[2], heads=0),
    "strip": lambda model: plot_strip(model, PHOTO, layers="1-3"),
    "frames": lambda model: list(plot_frames(model, PHOTO, layers="1,2", queries=[(1, 1)]))[1],
    "matrix": lambda model: plot_matrix(model, PHOTO, layers=2, heads=0),
    "rollout": lambda model: plot_rollout(model, PHOTO, layers="1-3", queries=[(5, 5)]),
    "statistics": lambda model: plot_statistics(model, PHOTO, layers="1,2"),
    "jacobian": lambda model: plot_jacobian(model, PHOTO, 1, layers=2),
}


def of_kind(kind: str, transformer: bool):
    torch.manual_seed(0)
    if transformer:
        return ea_vision.evolve(timm.create_model("vit_tiny_patch16_224", **TINY), kind).eval()
    return timm.create_model("conv_transformer_cifar", num_classes=3, img_size=16, widths=[8, 8, 16, 16],
                             evolution=kind).eval()


@pytest.mark.parametrize("transformer", [True, False], ids=["transformer", "convolutional"])
@pytest.mark.parametrize("kind", sorted(evolution._EVOLUTIONS))
def test_every_kind_of_evolution(kind, transformer):
    model = of_kind(kind, transformer)
    for name, draw in FIGURES.items():
        assert draw(model).axes, name
    assert show_page(model, PHOTO, layers="1-3").text


def test_transformers_of_hugging_face():
    """Their outputs are no tensors; a page says their likeliest classes, where they have some."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    backbone = transformers_model("ViT")
    classifier = lively(transformers.ViTForImageClassification(backbone.config))
    for model in (backbone, classifier):
        assert ('"predictions":[{"name":"class' in show_page(model, PHOTO).text) == (model is classifier)
    for figure in plot_strip(classifier, PHOTO), plot_rollout(classifier, PHOTO), plot_statistics(classifier, PHOTO):
        assert figure.axes


def test_rollout_stops_before_class_attention():
    torch.manual_seed(0)
    model = lively(timm.create_model("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3,
                                     num_classes=2))
    figure = plot_rollout(model, PHOTO, queries=[(5, 20)])
    texts = " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
    assert "layers 1, 2" in texts and "class attention is left out" in texts
