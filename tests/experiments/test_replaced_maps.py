"""experiments/replaced_maps.py: each replacement is what it says, its figures of logits are numpy's, and the script."""

import numpy as np
import pandas as pd
import pytest
import timm
import torch

import ea_vision
from ea_vision.recorder.loading import load_model
from experiments import replaced_maps
from tests.models.zoo import woken

NAME, KEYWORDS = "ea_conv_transformer_cifar", dict(widths=[8, 16, 16, 16], num_classes=3)


def network(state=None, **keywords):
    torch.manual_seed(0)
    model = woken(timm.create_model(NAME, **KEYWORDS, **keywords)).eval()
    if state is not None:
        model.load_state_dict(state)
    return model


@torch.no_grad()
def test_each_kind_of_replaced_maps():
    """The mean over one image is its map, over several the recorded one's; uniform maps and none are means, too."""
    model, x = network(), torch.randn(3, 3, 32, 32)

    def outputs(kind, x=x, means=None):
        with replaced_maps.replace_maps(model, kind, means or [torch.zeros(1)] * 6):
            return model(x)

    plain, uniform, none, own, other = map(outputs, ("trained", "uniform", "none", "own", "other"))
    of_first, several = (
        replaced_maps.mean_maps(model, batches) for batches in ([x[:1]], [x[:2], x[2:]])
    )
    with ea_vision.record_attention(model) as maps:
        model(x)
    for mean, layer in zip(several, maps.values(), strict=True):
        torch.testing.assert_close(
            mean, sum(layer.attn[image] for image in range(3)) / 3, atol=1e-4, rtol=1e-3
        )
    for found, expected in (
        (outputs("mean", x[:1], of_first), plain[:1]),
        (none, outputs("mean")),
        (
            uniform,
            outputs("mean", means=[torch.full_like(mean, 1 / len(mean[0])) for mean in several]),
        ),
        (own, network(model.state_dict(), alpha=0.0, beta=0.0)(x)),
        (outputs("other", x[:1].expand(3, -1, -1, -1)), plain[:1].expand(3, -1)),
        (model(x), plain),
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert all((found - plain).abs().max() > 1e-3 for found in (uniform, none, own, other))


def test_figures_of_logits_against_numpy():
    loaded = load_model(NAME, random=True, **KEYWORDS)
    x = torch.randn(3, 3, 32, 32)
    with (
        torch.no_grad(),
        ea_vision.record_attention(loaded.model, parts=("logits", "self_logits")) as maps,
    ):
        rows = replaced_maps.logits(loaded, [x[:2], x[2:]])
        loaded.model(x)
    assert [row[1] for row in rows] == list(maps)
    for _, number, *figures in rows:
        parts = [part.double().numpy() for part in (maps[number].self_logits, maps[number].logits)]
        heads = [(part - part.mean(-1, keepdims=True)).reshape(12, -1) for part in parts]
        alike = [
            np.corrcoef(a, b)[0, 1] if a.any() and b.any() else 0.0
            for a, b in zip(*heads, strict=True)
        ]
        assert figures == pytest.approx(
            [*(part.std(-1).mean() for part in parts), np.mean(alike)], abs=6e-4
        )
    assert rows[0][-1] == 1.0 and rows[1][-1] < 0.99  # the first layer has nothing to evolve from


def test_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(
        replaced_maps, "load_model", lambda name: load_model(name, random=True, **KEYWORDS)
    )
    assert (
        replaced_maps.main([str(tmp_path), "--model", NAME, "--dataset", "digits", "--limit", "4"])
        == 0
    )
    assert pd.read_csv(tmp_path / "replaced.csv")["maps"].tolist() == list(replaced_maps.KINDS)
    assert len(pd.read_csv(tmp_path / "logits.csv")) == 6
