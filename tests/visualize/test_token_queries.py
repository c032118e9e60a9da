"""Class tokens and registers in figures: as queries, as keys, and in the matrix."""

import numpy as np
import pytest
import timm
import torch

from ea_vision.base.errors import UsageError
from ea_vision.recorder.quantities import attention_rollout
from ea_vision.visualize import (
    plot_frames,
    plot_heads,
    plot_heatmap,
    plot_matrix,
    plot_rollout,
    plot_strip,
)
from ea_vision.visualize.figure_options import parse_queries
from tests.models.test_vision_transformer import active, lively, tiny
from tests.models.zoo import TINY
from tests.recorder.networks import recorded

from .conftest import texts_of


@pytest.fixture(scope="module")
def seen():
    """An evolving transformer with a class token and two registers, an image, and the maps of it."""
    model = active(tiny(reg_tokens=2))
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    return model, image, recorded(model, (image[None] - 0.5) / 0.5)


def drawn(figure, text):
    """The arrays of the maps of a figure in axes whose title or label has this text."""
    return [a for a in figure.axes if text in a.get_title() or text in a.get_xlabel()]


def test_names_of_tokens_are_queries_of_the_commands():
    assert parse_queries(["cls", "3,4", "reg12", "dist"], (8, 8)) == [
        "cls",
        (3, 4),
        "reg12",
        "dist",
    ]


def test_a_class_tokens_maps_are_its_row_in_units_of_uniform_attention(seen):
    model, image, maps = seen
    figure = plot_heads(
        model, image, layers=[2], heads="1", queries=["cls", (12, 20), "reg2"], overlay=False
    )
    assert "map 4x4 after cls, reg1, reg2" in texts_of(figure)
    assert "queries 1: class token; 2: y 12, x 20; 3: register 2" in texts_of(figure)
    for title, token in (("query 1", 0), ("query 2", 3 + 1 * 4 + 2), ("query 3", 2)):
        [axes] = drawn(figure, title)
        row = maps[2].attn[0, 1, token]
        np.testing.assert_allclose(
            np.asarray(axes.images[-1].get_array()).ravel(), row[3:] * 19, rtol=1e-4
        )
        assert " ".join(axes.get_xlabel().split()) == f"cls {row[0]:.0%}, reg {row[1:3].sum():.0%}"
    with pytest.raises(
        UsageError, match=r"query dist must be a token .* of layer 2 .* cls, reg1, reg2"
    ):
        plot_heads(model, image, layers=[2], queries=["dist"])


def test_the_matrix_has_all_tokens(seen):
    model, image, maps = seen
    figure = plot_matrix(model, image, layers=[3], heads="0")
    [axes] = drawn(figure, "head 0")
    np.testing.assert_allclose(
        np.asarray(axes.images[0].get_array()), maps[3].attn[0, 0] * 19, rtol=1e-4
    )
    assert (
        axes.get_xticks()[0] == 2.5 and len(axes.lines) == 2
    )  # the first row of patches, and lines before them


def test_rollout_of_a_class_token(seen):
    model, image, maps = seen
    figure = plot_rollout(model, image, queries=["cls", (0, 0)], overlay=False)
    rollout = attention_rollout(maps)[0] * 19
    for title, row in (
        ("query 1", rollout[0]),
        ("query 2", rollout[3]),
        ("all pixels", rollout[3:].mean(0)),
    ):
        [axes] = drawn(figure, title)
        np.testing.assert_allclose(
            np.asarray(axes.images[-1].get_array()).ravel(), row[3:], rtol=1e-4
        )
    texts = texts_of(figure)
    assert (
        "layers 1 to 3" in texts and "approximation" not in texts
    )  # its only convolutions: of patches and of maps


def test_other_figures_take_a_class_token(seen):
    model, image, _ = seen
    plot_strip(model, image, query="cls")
    figure = plot_heatmap({"one": model, "other": model}, image, layers=[3], queries=["cls"])
    assert (
        "query class token, mean of heads" in texts_of(figure) and len(drawn(figure, "cls ")) == 2
    )
    assert len(list(plot_frames(model, image, layers=[2, 3], queries=["cls", (1, 1)]))) == 2


def test_strip_of_a_network_without_evolution_has_its_layers_in_a_row(seen):
    figure = plot_strip(
        lively(timm.create_model("vit_tiny_patch16_224", **TINY)),
        seen[1],
        head="mean",
        query=(9, 9),
    )
    places = [
        drawn(figure, f"layer {number}")[0].get_position() for number in range(1, TINY["depth"] + 1)
    ]
    assert len({round(place.y0, 6) for place in places}) == 1
    assert [place.x0 for place in places] == sorted({place.x0 for place in places})
    assert "mean of heads, query y 9, x 9" in texts_of(figure)  # not "of their logits"
