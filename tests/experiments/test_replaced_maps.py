"""experiments/replaced_maps.py: each replacement is what it says, against a network with other weights or keywords."""
import numpy as np
import pytest
import timm
import torch

import ea_vision
from ea_vision.layers import AugmentedConv2d
from ea_vision.recorder.loading import load_model
from experiments import replaced_maps

KEYWORDS = dict(widths=[8, 16, 16, 16], num_classes=3)


def network(name="ea_conv_transformer_cifar", state=None, **keywords):
    torch.manual_seed(0)
    model = timm.create_model(name, **KEYWORDS, **keywords).eval()
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(norm.weight)  # the last of a block begins at 0, and no map would matter
    if state is not None:
        model.load_state_dict(state)
    return model


def outputs(model, kind, x, means=None):
    layers = [module for module in model.modules() if isinstance(module, AugmentedConv2d)]
    with torch.no_grad(), replaced_maps.replace_maps(model, kind, means or [torch.zeros(1)] * len(layers)):
        return model(x)


def zeroed(state, part):
    """Queries and position tables, or values, of all layers set to zero."""
    model = network("conv_transformer_cifar", state)
    for module in model.modules():
        if isinstance(module, AugmentedConv2d):
            rows = slice(0, module.dim_qk) if part == "queries" else slice(2 * module.dim_qk, None)
            tables = (module.height_rel.data, module.width_rel.data) if part == "queries" else ()
            for tensor in (module.qkv.weight.data[rows], module.qkv.bias.data[rows], *tables):
                tensor.zero_()
    return model


@pytest.mark.parametrize("kind, name, replaced", [
    ("uniform", "conv_transformer_cifar", lambda state: zeroed(state, "queries")),
    ("none", "conv_transformer_cifar", lambda state: zeroed(state, "values")),
    ("own", "ea_conv_transformer_cifar", lambda state: network(state=state, alpha=0.0, beta=0.0))])
def test_replaced_maps_are_those_of_zero_queries_of_zero_values_and_without_shares(kind, name, replaced):
    model, x = network(name), torch.randn(2, 3, 32, 32)
    plain, found = outputs(model, "trained", x), outputs(model, kind, x)
    with torch.no_grad():
        torch.testing.assert_close(found, replaced(model.state_dict())(x), atol=1e-5, rtol=1e-4)
        assert (found - plain).abs().max() > 1e-3
        torch.testing.assert_close(model(x), plain)  # given back


def test_maps_of_another_image_and_the_mean():
    model, x = network(), torch.randn(3, 3, 32, 32)
    plain = outputs(model, "trained", x)
    same = x[:1].expand(3, -1, -1, -1)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, "other", same), plain[:1].expand(3, -1), atol=1e-5, rtol=1e-4)
        assert (outputs(model, "other", x) - plain).abs().max() > 1e-3
        means = replaced_maps.mean_maps(model, [x[:1]])
        torch.testing.assert_close(outputs(model, "mean", x[:1], means), plain[:1], atol=1e-5, rtol=1e-4)
        several = replaced_maps.mean_maps(model, [x[:2], x[2:]])
        with ea_vision.record_attention(model) as maps:
            model(x)
    for mean, layer in zip(several, maps.values(), strict=True):
        torch.testing.assert_close(mean, sum(layer.attn[image] for image in range(3)) / 3, atol=1e-4, rtol=1e-3)


def test_figures_of_logits_against_numpy():
    loaded = load_model("ea_conv_transformer_cifar", random=True, **KEYWORDS)
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad(), ea_vision.record_attention(loaded.model, parts=("logits", "self_logits")) as maps:
        x = loaded.normalize(pixels / 255)
        rows = replaced_maps.logits(loaded, [x[:2], x[2:]])
        loaded.model(x)
    assert [row[1] for row in rows] == list(maps)
    for (_, number, own_std, entering_std, correlation) in rows:
        own, entering = (part.double().numpy() for part in (maps[number].self_logits, maps[number].logits))
        assert own_std == pytest.approx(own.std(-1).mean(), abs=6e-4)
        assert entering_std == pytest.approx(entering.std(-1).mean(), abs=6e-4)
        heads = [[(maps - maps.mean(-1, keepdims=True)).ravel() for maps in part.reshape(-1, *part.shape[2:])]
                 for part in (own, entering)]
        alike = [np.corrcoef(a, b)[0, 1] if a.any() and b.any() else 0.0 for a, b in zip(*heads, strict=True)]
        assert correlation == pytest.approx(np.mean(alike), abs=6e-4)
    assert rows[0][-1] == 1.0 and rows[1][-1] < 0.99  # the first layer has nothing to evolve from
