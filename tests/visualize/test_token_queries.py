"""Class tokens and registers in figures: as queries, as keys, and in the matrix."""

import numpy as np
import pytest
import torch

from ea_vision.recorder.quantities import attention_rollout
from ea_vision.visualize import plot_heads, plot_heatmap, plot_matrix, plot_rollout, plot_strip
from tests.models.test_vision_transformer import active, tiny
from tests.recorder.networks import recorded
from tests.refused import refused

from .conftest import texts_of


@pytest.fixture(scope="module")
def seen():
    """An evolving transformer with a class token and two registers, an image, and the image's maps."""
    model = active(tiny(reg_tokens=2))
    image = torch.rand(3, 32, 32)
    return model, image, recorded(model, (image[None] - 0.5) / 0.5)


def drawn(figure, text):
    """Return the axes whose title or label has this text."""
    return [axes for axes in figure.axes if text in axes.get_title() + axes.get_xlabel()]


def check_map(figure, title, expected):
    """Compare the map below a title with values in units of uniform attention; return its axes."""
    [axes] = drawn(figure, title)
    shown = np.asarray(axes.images[-1].get_array())
    np.testing.assert_allclose(shown.ravel(), expected.ravel() * 19, rtol=1e-4)
    return axes


def test_a_class_tokens_maps_are_its_row_in_units_of_uniform_attention(seen):
    model, image, maps = seen
    queries = ["cls", (12, 20), "reg2"]
    figure = plot_heads(model, image, layers=[2], heads="1", queries=queries, overlay=False)
    texts = texts_of(figure)
    assert "map 4x4 after cls, reg1, reg2" in texts
    assert "queries 1: class token; 2: y 12, x 20; 3: register 2" in texts
    for title, token in (("query 1", 0), ("query 2", 3 + 1 * 4 + 2), ("query 3", 2)):
        row = maps[2].attn[0, 1, token]
        axes = check_map(figure, title, row[3:])
        label = " ".join(axes.get_xlabel().split())
        assert label == f"cls {row[0]:.0%}, reg {row[1:3].sum():.0%}"
    for token in ("dist", "reg12"):
        with refused(f"query {token} must be a token .* of layer 2 .* cls, reg1, reg2"):
            plot_heads(model, image, layers=[2], queries=[token])


def test_the_matrix_has_all_tokens(seen):
    model, image, maps = seen
    figure = plot_matrix(model, image, layers=[3], heads="0")
    axes = check_map(figure, "head 0", maps[3].attn[0, 0])
    # the first row of patches, and lines before them
    assert axes.get_xticks()[0] == 2.5
    assert len(axes.lines) == 2


def test_rollout_of_a_class_token(seen):
    model, image, maps = seen
    figure = plot_rollout(model, image, queries=["cls", (0, 0)], overlay=False)
    rollout = attention_rollout(maps)[0, :, 3:]
    check_map(figure, "query 1", rollout[0])
    check_map(figure, "query 2", rollout[3])
    check_map(figure, "all pixels", rollout[3:].mean(0))
    texts = texts_of(figure)
    assert "layers 1 to 3" in texts
    assert "approximation" not in texts  # its only convolutions: of patches and of maps


def test_other_figures_take_a_class_token(seen):
    model, image, _ = seen
    plot_strip(model, image, query="cls")
    figure = plot_heatmap({"one": model, "other": model}, image, layers=[3], queries=["cls"])
    assert "mean of heads; query class token" in texts_of(figure)
    assert len(drawn(figure, "cls ")) == 2
