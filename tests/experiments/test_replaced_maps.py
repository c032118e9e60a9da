"""experiments/replaced_maps.py: each replacement by its definition, the figures of logits by numpy, and the script."""

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from torch.testing import assert_close

import ea_vision
from ea_vision.zoo.loaded import load_model
from experiments import replaced_maps
from tests.models.zoo import woken

NAME = "ea_conv_transformer_cifar"
KEYWORDS = dict(widths=[8, 16, 16, 16], num_classes=3)


def network(**keywords):
    torch.manual_seed(0)
    return woken(timm.create_model(NAME, **KEYWORDS, **keywords)).eval()


@torch.no_grad()
def test_each_kind_of_replaced_maps():
    """The mean map of one image is its own map; uniform and zero maps are compared by passing them as mean maps."""
    model = network()
    x = torch.randn(3, 3, 32, 32)
    zeros = [torch.zeros(1)] * 6

    def outputs(kind, x=x, means=zeros):
        with replaced_maps.replace_maps(model, kind, means):
            return model(x)

    plain = outputs("trained")
    replaced = {kind: outputs(kind) for kind in ("uniform", "none", "own", "other")}
    for logits in replaced.values():
        assert (logits - plain).abs().max() > 1e-3
    mean_of_batches = replaced_maps.mean_maps(model, [x[:2], x[2:]])
    with ea_vision.record_attention(model) as maps:
        model(x)
    for mean, layer in zip(mean_of_batches, maps.values(), strict=True):
        assert_close(mean, layer.attn.mean(0), atol=1e-4, rtol=1e-3)
    near = {"atol": 1e-5, "rtol": 1e-4}
    first_maps = replaced_maps.mean_maps(model, [x[:1]])
    assert_close(outputs("mean", x[:1], first_maps), plain[:1], **near)
    assert_close(replaced["none"], outputs("mean"), **near)
    uniform = [torch.full_like(mean, 1 / len(mean[0])) for mean in mean_of_batches]
    assert_close(replaced["uniform"], outputs("mean", means=uniform), **near)
    alone = network(alpha=0.0, beta=0.0)
    assert_close(replaced["own"], alone(x), **near)
    three_of_one = x[:1].expand(3, -1, -1, -1)
    assert_close(outputs("other", three_of_one), plain[:1].expand(3, -1), **near)
    assert_close(model(x), plain, **near)


def correlation(a, b):
    """Return the correlation of two maps, 0 where one of them is constant."""
    if not a.any() or not b.any():
        return 0.0
    return np.corrcoef(a, b)[0, 1]


def test_figures_of_logits_against_numpy():
    loaded = load_model(NAME, random=True, **KEYWORDS)
    x = torch.randn(3, 3, 32, 32)
    recording = ea_vision.record_attention(loaded.model, parts=("logits", "self_logits"))
    with torch.no_grad(), recording as maps:
        rows = replaced_maps.logits(loaded, [x[:2], x[2:]])
        loaded.model(x)
    assert [row[1] for row in rows] == list(maps)
    for _, number, *figures in rows:
        plain_logits = maps[number].self_logits.double().numpy()
        evolved = maps[number].logits.double().numpy()
        own_heads = (plain_logits - plain_logits.mean(-1, keepdims=True)).reshape(12, -1)
        evolved_heads = (evolved - evolved.mean(-1, keepdims=True)).reshape(12, -1)
        alike = list(map(correlation, own_heads, evolved_heads))
        expected = [plain_logits.std(-1).mean(), evolved.std(-1).mean(), np.mean(alike)]
        assert figures == pytest.approx(expected, abs=6e-4)
    assert rows[0][-1] == 1.0  # the first layer has nothing to evolve from
    assert rows[1][-1] < 0.99


def test_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(
        replaced_maps, "load_model", lambda name: load_model(name, random=True, **KEYWORDS)
    )
    options = ["--model", NAME, "--dataset", "digits", "--limit", "4"]
    assert replaced_maps.main([str(tmp_path), *options]) == 0
    assert pd.read_csv(tmp_path / "replaced.csv")["maps"].tolist() == list(replaced_maps.KINDS)
    assert len(pd.read_csv(tmp_path / "logits.csv")) == 6
