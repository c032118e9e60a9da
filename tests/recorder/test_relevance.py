"""AttnLRP's rules, on any network of torch functions: what they conserve, and what they do not depend on."""
import importlib.util
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.patch_rankings import CamSource
from ea_vision.recorder.relevance import RelevanceSource, _layer_norm, share, slope
from tests.recorder.test_any_transformer import lively, torchvision_vit

CONFIG = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "input_size": (3, 32, 32), "interpolation": "bilinear",
          "crop_pct": 1.0}


def loaded(network):
    return LoadedModel(network, "network", (32, 32), CONFIG)


def vit(**kwargs):
    torch.manual_seed(0)
    return lively(timm.create_model("vit_tiny_patch16_224", **{
        **dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=4), **kwargs}))


def relevance(network, x, classes):
    return RelevanceSource(loaded(network), (4, 4)).relevance(x, classes)


X, CLASSES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3)), torch.tensor([1, 2])


def test_a_network_of_linear_layers_and_activations_conserves_the_logit():
    """Without biases each rule hands on all that it gets; gradient times input does not."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(3600, 9, bias=False),
                            nn.ReLU(inplace=True), nn.Linear(9, 4, bias=False), nn.SiLU()).eval()
    got = relevance(network, X, CLASSES).sum((1, 2, 3))
    with torch.no_grad():
        logits = network(X).gather(1, CLASSES[:, None])[:, 0]
    torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-5)
    x = X.clone().requires_grad_()
    gradient, = torch.autograd.grad(network(x).gather(1, CLASSES[:, None]).sum(), x)
    assert not torch.allclose((gradient * x).sum((1, 2, 3)), logits, rtol=1e-2)


def test_values_get_half_of_what_attention_gets():
    """Of uniform attention the map gets the other half, and loses it: the keys and queries are zero."""
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Linear(3, 4, bias=False)

        def forward(self, x):
            v = self.value(x.flatten(2).transpose(1, 2))[:, None]
            q = torch.zeros_like(v)
            return nn.functional.scaled_dot_product_attention(q, q, v)[:, 0, 0]

    torch.manual_seed(0)
    network = Mean()
    with torch.no_grad():
        logits = network(X).gather(1, CLASSES[:, None])[:, 0]
    torch.testing.assert_close(relevance(network, X, CLASSES).sum((1, 2, 3)), logits / 2, rtol=1e-4, atol=1e-6)


def test_it_does_not_depend_on_how_attention_is_written():
    network = vit()
    fused = relevance(network, X, CLASSES)
    for block in network.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(relevance(network, X, CLASSES), fused, rtol=1e-3, atol=1e-5)
    assert fused.abs().max() > 1e-4


def test_multihead_attention_gets_the_same_rules():
    """torchvision's ViT, and the same written with scaled_dot_product_attention."""
    class Written(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, *_, **__):
            q, k, v = nn.functional.linear(x, self.layer.in_proj_weight, self.layer.in_proj_bias).unflatten(
                -1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
            out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.layer.out_proj(out), None

    network = torchvision_vit()
    whole = relevance(network, X, CLASSES)
    for block in network.encoder.layers:
        block.self_attention = Written(block.self_attention)
    torch.testing.assert_close(relevance(network, X, CLASSES), whole, rtol=1e-3, atol=1e-5)
    assert isinstance(network, torchvision.models.VisionTransformer)


def test_the_networks_outputs_and_gradients_stay_as_they_were():
    network = vit()

    def step():
        x = X.clone().requires_grad_()
        output = network(x)
        gradient, = torch.autograd.grad(output.sum(), x)
        return output.detach(), gradient

    before = step()
    relevance(network, X, CLASSES)
    assert all(torch.equal(a, b) for a, b in zip(before, step(), strict=True))
    x, weight, bias = torch.randn(2, 5, 24), torch.randn(24), torch.randn(24)
    torch.testing.assert_close(_layer_norm(x, [24], weight, bias, 1e-6),
                               nn.functional.layer_norm(x, [24], weight, bias, 1e-6))


def test_what_it_cannot_do_says_so():
    evolving = loaded(timm.create_model("ea_vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3))
    with pytest.raises(UsageError, match=r"attnlrp has rules for .* evolving or augmented attention: blocks.0.attn"):
        RelevanceSource(evolving, (2, 2))


def test_the_rules_are_those_of_the_authors_package():
    """Its file of rules alone: the package around it does not load beside every release of transformers."""
    package = importlib.util.find_spec("lxt")
    if package is None:
        pytest.skip("lxt is not installed")
    path = Path(package.submodule_search_locations[0]) / "efficient" / "rules.py"
    spec = importlib.util.spec_from_file_location("lxt_rules", path)
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    for theirs, ours in ((lambda x: rules.divide_gradient(x, 4), lambda x: share(x, 4)),
                         (lambda x: rules.identity_rule_implicit(nn.functional.gelu, x),
                          lambda x: slope(nn.functional.gelu, x))):
        x, weights = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
        a, b = theirs(x), ours(x)
        assert torch.equal(a, b)
        assert torch.equal(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (a, b)))


@pytest.mark.parametrize("make,layer", [
    (vit, "blocks.1.norm1"), (torchvision_vit, "encoder.layers.encoder_layer_1.ln_1")])
def test_grad_cam_by_hand(make, layer):
    """Channels weighted by the mean gradient of the class's logit over the patches; what is below 0 is cut."""
    pytest.importorskip("pytorch_grad_cam", reason="grad-cam is not installed")
    network, held = make(), []
    module = network.get_submodule(layer)
    handle = module.register_forward_hook(lambda _, args, out: out.retain_grad() or held.append(out))
    network(X).gather(1, CLASSES[:, None]).sum().backward()
    handle.remove()
    maps, gradient = held[0].detach()[:, 1:], held[0].grad[:, 1:]
    cam = (maps * gradient.mean(1, keepdim=True)).sum(-1).relu().unflatten(-1, (4, 4))
    network.zero_grad()
    got = CamSource(loaded(network), ["GradCAM"], layer)(X, CLASSES)["GradCAM"]
    expected = nn.functional.interpolate(cam[:, None], (32, 32), mode="bilinear")[:, 0]
    expected = (expected - expected.amin((1, 2), True)) / expected.amax((1, 2), True).sub(expected.amin((1, 2), True))
    assert cam.std() > 0
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=0)
