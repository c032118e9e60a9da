"""Maps of transformers from other packages are those of hooks on their unfused attention, within 1e-5."""
import gc
import weakref

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import ea_vision
from ea_vision.recorder.recording import prefix_names, recordable_layers

LIMIT = 1e-5


def images(height=32, width=32, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def lively(model):
    """Weights large enough that maps are far from uniform, in evaluation mode."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter[0].numel() ** -0.5 * 1.5)
    return model.eval()


def recorded(model, x, **kwargs):
    """The maps; the outputs are those without recording, within 1e-6."""
    def first(output):
        return output if isinstance(output, torch.Tensor) else output[0]

    with torch.no_grad():
        expected = first(model(x, **kwargs))
        with ea_vision.record_attention(model) as maps:
            output = first(model(x, **kwargs))
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return maps


def check(layer, attn, feat_size, names=()):
    assert (layer.attn - attn).abs().max() <= LIMIT and attn.std(-1).max() > 1e-3
    assert layer.feat_size == feat_size and layer.prefix_names == names
    torch.testing.assert_close(layer.attn.sum(-1), torch.ones(layer.attn.shape[:-1]))


def torchvision_vit(num_layers=2, **kwargs):
    torch.manual_seed(0)
    return lively(torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=num_layers, num_heads=3, hidden_dim=24, mlp_dim=32, num_classes=5,
        **kwargs))


def weights_by_hand(model, x):
    """What nn.MultiheadAttention gives when it is asked for weights."""
    maps, handles = [], []
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_pre_hook(
                lambda _, args, kwargs: (args, {**kwargs, "need_weights": True, "average_attn_weights": False}),
                with_kwargs=True))
            handles.append(module.register_forward_hook(lambda _, args, output: maps.append(output[1])))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return maps


def test_torchvision_vit():
    model, x = torchvision_vit(), images()
    maps, by_hand = recorded(model, x), weights_by_hand(model, x)
    assert [layer.name for layer in maps.values()] == [
        f"encoder.layers.encoder_layer_{n}.self_attention" for n in range(2)]
    assert prefix_names(model) == ("cls",) and len(by_hand) == 2
    for layer, attn in zip(maps.values(), by_hand, strict=True):
        check(layer, attn, (4, 4), ("cls",))


def transformers_model(name, **kwargs):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "image_size": 32,
        "patch_size": 8, **kwargs})
    return lively(getattr(transformers, f"{name}Model")(config))


REGISTERS = ("cls", "reg1", "reg2")
TRANSFORMERS = [("ViT", {}, ("cls",)), ("DeiT", {}, ("cls", "dist")), ("Dinov2", {}, ("cls",)),
                ("Dinov2WithRegisters", dict(num_register_tokens=2), REGISTERS),
                ("DINOv3ViT", dict(num_register_tokens=2), REGISTERS), ("CLIPVision", {}, ("cls",)),
                ("SiglipVision", {}, ())]


@pytest.mark.parametrize("name,kwargs,names", TRANSFORMERS, ids=[name for name, *_ in TRANSFORMERS])
def test_transformers(name, kwargs, names):
    model, x = transformers_model(name, **kwargs), images()
    assert prefix_names(model) == names
    maps = recorded(model, x)
    model.set_attn_implementation("eager")
    eager = recorded(model, x)
    with torch.no_grad():
        by_hand = model(x, output_attentions=True).attentions
    assert len(maps) == 2 + (name == "SiglipVision") and len(by_hand) == 2  # its head pools
    for layer, slow, attn in zip(list(maps.values())[:2], list(eager.values())[:2], by_hand, strict=True):
        check(layer, attn, (4, 4), names)
        check(slow, attn, (4, 4), names)
    if name == "SiglipVision":
        [attn] = weights_by_hand(model, x)
        assert maps[3].query_names == ("pool",) and (maps[3].attn - attn).abs().max() <= LIMIT


def test_a_rectangle_is_told_from_the_image():
    model = transformers_model("ViT", image_size=(16, 40))
    maps = recorded(model, images(16, 40))
    assert maps[1].feat_size == (2, 5) and maps[1].attn.shape == (2, 3, 11, 11)


class Plain(nn.Module):
    """Attention as anybody writes it, of tokens or of a sequence."""

    def __init__(self, how, heads=2, dim=8):
        super().__init__()
        self.how, self.k_heads, self.qkv = how, heads, nn.Linear(dim, 3 * dim)

    def forward(self, x, mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.k_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.how(q, k, v, mask, is_causal).transpose(1, 2).flatten(2)


class Fused(Plain):
    def forward(self, x, mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.k_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=0.7)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("case", ["plain", "boolean", "float", "causal"])
def test_scaled_dot_product_attention_in_any_module(case):
    """A sequence without an image is a map of height 1; the map times the values is the output."""
    torch.manual_seed(0)
    layer, x = lively(Fused(None)), torch.randn(3, 6, 8)
    mask = {"boolean": torch.rand(6, 6) > 0.3, "float": torch.randn(6, 6)}.get(case)
    mask = mask | torch.eye(6, dtype=torch.bool) if case == "boolean" else mask
    maps = recorded(nn.Sequential(nn.Identity(), layer) if mask is None and case == "plain" else layer, x,
                    **({} if case == "plain" else dict(mask=mask, is_causal=case == "causal")))
    attn = maps[1].attn
    assert attn.shape == (3, 2, 6, 6) and maps[1].feat_size == (1, 6) and maps[1].heads == (0, 1)
    with torch.no_grad():
        v = layer.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)[2]
        torch.testing.assert_close((attn @ v).transpose(1, 2).flatten(2), layer(
            x, mask=mask, is_causal=case == "causal"), atol=1e-5, rtol=1e-5)
    if case == "causal":
        assert attn.triu(1).abs().max() == 0
    if case == "boolean":
        assert attn[:, :, ~mask].abs().max() == 0


@pytest.mark.parametrize("how", [
    lambda a: a.softmax(-1), lambda a: torch.softmax(a, dim=3), lambda a: F.softmax(a, dim=-1), nn.Softmax(dim=-1),
    lambda a: torch.special.softmax(a, -1), lambda a: a.flatten(0, 1).softmax(dim=-1).view(a.shape)])
def test_softmax_however_it_is_written(how):
    formed = []

    def attend(q, k, v, mask, is_causal):
        formed.append(how(q @ k.transpose(-2, -1)))
        return formed[-1] @ v

    torch.manual_seed(0)
    layer = Plain(attend)
    layer.num_heads = 2
    maps = recorded(lively(layer), torch.randn(3, 6, 8))
    assert torch.equal(maps[1].attn, formed[-1])


@pytest.mark.parametrize("kwargs", [
    dict(batch_first=True), dict(), dict(batch_first=True, kdim=5, vdim=7), dict(batch_first=True, add_bias_kv=True)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_alone(kwargs, need_weights):
    """Self and cross attention, with keys of another number than the queries."""
    torch.manual_seed(0)
    layer = lively(nn.MultiheadAttention(8, 2, **kwargs))
    q, k, v = torch.randn(3, 6, 8), torch.randn(3, 4, kwargs.get("kdim", 8)), torch.randn(3, 4, kwargs.get("vdim", 8))
    if not kwargs.get("batch_first"):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    with torch.no_grad():
        expected, _ = layer(q, k, v, need_weights=False)
        _, attn = layer(q, k, v, average_attn_weights=False)
        with ea_vision.record_attention(layer) as maps:
            output, weights = layer(q, k, v, need_weights=need_weights)
    assert (weights is None) != need_weights
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert (maps[1].attn - attn).abs().max() <= LIMIT and maps[1].attn.shape == attn.shape


def test_training_with_dropout_keeps_outputs_gradients_and_random_numbers():
    def step(record):
        model = torchvision_vit(dropout=0.2, attention_dropout=0.3).train()
        torch.manual_seed(3)
        if record:
            with ea_vision.record_attention(model) as maps:
                output = model(images())
                output.square().sum().backward()
            torch.testing.assert_close(maps[2].attn.sum(-1), torch.ones(2, 3, 17))
        else:
            output = model(images())
            output.square().sum().backward()
        return output, [p.grad for p in model.parameters()], torch.rand(1)

    (plain, plain_grads, drawn), (output, grads, drawn_too) = step(False), step(True)
    torch.testing.assert_close(output, plain, atol=1e-6, rtol=1e-6)
    assert torch.equal(drawn, drawn_too)
    for a, b in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_two_recorders_and_two_networks_do_not_disturb_one_another():
    one, two, x = torchvision_vit(), lively(timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2)), images()
    with torch.no_grad(), ea_vision.record_attention(one) as alone:
        one(x)
    with torch.no_grad(), ea_vision.record_attention(one, [1]) as first, \
            ea_vision.record_attention(one) as all_layers, \
            ea_vision.record_attention(two) as other:
        one(x)
        two(x)
    assert list(first) == [1] and list(all_layers) == list(other) == [1, 2]
    assert torch.equal(first[1].attn, alone[1].attn) and torch.equal(all_layers[2].attn, alone[2].attn)


def test_nothing_is_kept_alive_and_an_error_in_a_forward_leaves_no_trace():
    model, x = torchvision_vit(), images()
    handle = model.encoder.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), ea_vision.record_attention(model):
        model(x)
    handle.remove()
    with torch.no_grad(), ea_vision.record_attention(model) as maps:
        with pytest.raises(AssertionError, match="embedding dimension"):
            model.encoder.layers[0].self_attention(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(1, 2, 3))
        model(x)
    assert list(maps) == [1, 2]
    ref = weakref.ref(model)
    del model, handle
    gc.collect()
    assert ref() is None and len(maps[1].attn) == 2


def test_what_cannot_be_recorded_says_what_is_in_the_way():
    class Linear(nn.Module):
        num_heads = 2

        def forward(self, x):
            return x * x.sigmoid()

    model = Linear()
    with pytest.raises(RuntimeError, match="layer 1 .* ran, and no map went through softmax, scaled_dot_product"), \
            ea_vision.record_attention(model):
        model(torch.ones(1))
    assert recordable_layers(timm.create_model("resnet18")) == []


def test_arrays_of_a_recording():
    model = torchvision_vit()
    arrays = recorded(model, images()).arrays()
    assert arrays["layer2.attn"].shape == (2, 3, 17, 17) and arrays["layer2.attn"].dtype == np.float32
