"""`evolve` on every block type it knows: equal to the plain network at the start, learning after one step, reverted."""

import inspect
import json
from functools import partial
from itertools import product

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.testing import assert_close

from ea_vision import deploy, evolve, unevolve
from ea_vision.layers import attention_layers, learnable_gates
from ea_vision.sizes import count
from tests.models.test_vision_transformer import fused as set_fused
from tests.models.test_vision_transformer import lively as random_linear
from tests.models.test_vision_transformer import needs_attn_layer, plain
from tests.models.zoo import (
    KINDS,
    TINY,
    assert_checkpointing_changes_nothing,
    assert_intermediates,
    assert_onnx_agrees,
    images,
    on_meta,
    stepped,
    stirred,
)
from tests.refused import refused
from tests.slow import slow_but

NAMES = [  # one of each block, attention layer and kind of position
    "vit_tiny_patch16_224",
    "eva02_tiny_patch14_224",  # rotary, split q, k, v, SwiGLU
    "eva02_enormous_patch14_clip_224",  # norms behind the branches
    "vit_small_patch16_dinov3",  # rotary, registers
    "vit_pe_core_tiny_patch16_384",  # AttentionRope
    "naflexvit_base_patch16_gap",
    "beit_base_patch16_224",  # relative bias a block
    "cait_xxs24_224",  # talking heads
    "torchvision",
]
KEPT = {"vit_small_patch16_dinov3", "cait_xxs24_224", "torchvision"}
thorough = pytest.mark.parametrize("name", slow_but(KEPT, NAMES[1:]))
SOME = ["ea", "conv2d", "gated", "xsa", "reattention"]


def create(name, depth=3):
    """Return a small network without parameters at zero, which would hide mistakes."""
    torch.manual_seed(0)
    if name == "torchvision":
        model = torchvision.models.VisionTransformer(32, 8, depth, 3, 48, 96, num_classes=5)
    else:
        options = {**TINY, "depth": depth}
        if "naflex" in name:
            del options["img_size"]
        model = timm.create_model(name, **options)
    random_linear(model)
    for key, parameter in model.named_parameters():
        is_zero_scale = key.endswith(".weight") and parameter.ndim == 1 and not parameter.any()
        if key.endswith(("q_bias", "v_bias", "relative_position_bias_table", "in_proj_weight")):
            nn.init.normal_(parameter, std=0.3)
        elif "gamma" in key or is_zero_scale:  # they begin at 0 or nearly
            nn.init.constant_(parameter, 0.7)
    return model


def size_of(name):
    return (64, 32) if "naflex" in name else (32, 32)


def differ(actual, expected):
    """Return the largest difference relative to the largest entry."""
    return (actual - expected).abs().max() / expected.abs().max()


def assert_near(actual, expected):
    assert differ(actual, expected) < 1e-5


CASES = [*product(NAMES[:1], KINDS), *product(NAMES[1:], SOME)]
FAST = [*product(KEPT | {NAMES[0]}, KINDS)]


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_learned_gates_are_named_and_checkpoints_change_nothing(case):
    name, kind = case
    x = images(*size_of(name))
    again = evolve(create(name), kind, token_conv=True, value_residual=True)
    added = again.state_dict().keys() - create(name).state_dict().keys()
    assert learnable_gates(again).keys() <= added
    stirred(again)
    if name == "torchvision":  # it has no gradient checkpointing
        return
    assert_checkpointing_changes_nothing(again, x, atol=1e-4, rtol=1e-3)
    if hasattr(again, "forward_intermediates"):
        assert len(assert_intermediates(again.eval(), x)) == 3


@pytest.mark.parametrize("kind", ["ea", "conv2d", "talking_heads", "mta", "xsa", "gated"])
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_by_name_and_by_evolve_it_is_one_network(kind, fused):
    """`timm.create_model` of an evolving name, and `evolve` of timm's network, give the same layers and outputs."""
    options = dict(token_conv="paper", value_residual="paper")
    keywords = dict(**TINY, reg_tokens=1, qk_norm=True)
    named = timm.create_model("ea_vit_tiny_patch16_224", evolution=kind, **options, **keywords)
    named = stirred(named).eval()
    timms = timm.create_model("vit_tiny_patch16_224", **keywords).eval()
    evolved = evolve(timms, kind, **options).eval()
    assert type(evolved) is VisionTransformer
    assert type(named) is not VisionTransformer
    evolved.load_state_dict(named.state_dict())
    for model in (named, evolved):
        set_fused(model, fused)
    assert torch.equal(named(images()), evolved(images()))
    types = [type(layer) for layer in attention_layers(named)]
    assert types == [type(layer) for layer in attention_layers(evolved)]
    assert len(types) == 3
    assert differ(named(images()), timms(images())) > 1e-2


@thorough
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_compiles_and_exports(name, tmp_path):
    x = images(*size_of(name))
    model = stepped(evolve(create(name, 2), "ea", token_conv=True, value_residual=True), x).eval()
    with torch.no_grad():
        expected = model(x)
        assert_close(torch.compile(model, backend="eager")(x), expected, atol=1e-4, rtol=1e-4)
        torch._dynamo.reset()
        assert_close(torch.jit.trace(model, x)(x), expected, atol=1e-4, rtol=1e-4)
        other = stirred(evolve(create(name, 3), "conv2d")).eval()
        assert_close(torch.jit.trace(other, x)(x), other(x), atol=1e-4, rtol=1e-4)
        if name in ("vit_small_patch16_dinov3", "torchvision"):
            assert_onnx_agrees(model, x, tmp_path)
        else:
            program = torch.export.export(model, (x,))
            assert_close(program.module()(x), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_rotary_transformers_of_other_sizes():
    model = timm.create_model("vit_small_patch16_dinov3", **TINY, dynamic_img_size=True).eval()
    evolved = evolve(model, "conv2d", token_conv=True)
    for size in ((32, 48), (40, 16)):
        assert_near(evolved(images(*size)), model(images(*size)))


def quantised():
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def sharing():
    """Return a network whose last block is its first one."""
    model = plain()
    model.blocks[-1] = model.blocks[0]
    return model


REFUSED = [  # network, options of `evolve`, reason
    (partial(on_meta, "convnext_atto"), {}, "required, got ConvNeXt .no attention layer found"),
    (
        partial(on_meta, "conv_transformer_cifar"),
        {},
        "cannot evolve: stages.2.blocks.0.conv is a convolution with attention: .* as evolution=",
    ),
    (partial(on_meta, "vit_relpos_small_patch16_224"), {}, "required, got VisionTransformerRelPos"),
    (partial(on_meta, "vit_tiny_patch16_224", depth=1), {}, r"that can evolve are \[\] of 1"),
    (
        partial(on_meta, "eva02_tiny_patch14_224", patch_drop_rate=0.5),
        {},
        "patch_drop must be off.*PatchDropout",
    ),
    (
        partial(on_meta, "vit_small_patch16_18x2_224", depth=1),
        {},
        "0: its block .* got ParallelThingsBlock",
    ),
    pytest.param(
        partial(on_meta, "vit_tiny_patch16_224", attn_layer="diff", depth=2),
        {},
        "blocks.0: its attention must be .*, got DiffAttention",
        marks=needs_attn_layer,
    ),
    (lambda: None, {}, "a network is required, .* got None"),
    (torchvision.models.swin_t, {}, "or a model of transformers required, got SwinTransf"),
    (
        lambda: evolve(create("torchvision")),
        {},
        r"whose maps evolve already \(encoder.layers.0 is a EvolvingEncoderBlock\)",
    ),
    (lambda: evolve(plain()), {}, "got one whose maps evolve already"),
    (sharing, {}, r"blocks\.2 must have an attention layer of its own, got that of blocks\.0"),
    (quantised, {}, "blocks.0: its attention must not be quantised, got Attention"),
    (plain, {"kind": None}, "a kind, token_conv or value_residual required"),
    (partial(create, "cait_xxs24_224"), {"layers": [1]}, r"that can evolve are \[2, 3\] of 3"),
    (partial(create, "cait_xxs24_224"), {"kind": "xsa", "alpha": 0.5}, "alpha"),
    (
        partial(create, "torchvision"),
        {"kind": "conv2d", "layers": [3]},
        "the class token's row is read there",
    ),
]


@pytest.mark.parametrize("create_model, options, reason", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
def test_what_cannot_evolve_is_refused_with_the_reason(create_model, options, reason):
    model = create_model()
    with refused(reason, ValueError):
        evolve(model, **options)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_masks_are_refused_where_maps_evolve(name):
    model = create(name)
    if "attn_mask" not in inspect.signature(model.forward_features).parameters:
        pytest.skip("this timm has none")
    tokens = 16 + model.num_prefix_tokens
    mask = torch.zeros(1, 1, tokens, tokens)
    mask[..., 0] = -torch.inf
    entries = ("forward", "forward_features", "forward_intermediates")
    for network, entry in product((evolve(model), create("ea_vit_tiny_patch16_224")), entries):
        forward = getattr(network, entry)
        for masked in ({"attn_mask": mask}, {"is_causal": True}):
            if masked.keys() <= inspect.signature(forward).parameters.keys():
                with refused("maps that evolve take no mask", ValueError):
                    forward(images(), **masked)
    exclusive = evolve(model, "xsa")
    expected = model.forward_features(images(), attn_mask=mask)
    for each in (mask, mask == 0):
        assert_near(exclusive.forward_features(images(), attn_mask=each), expected)


def test_a_plain_network_does_not_go_back():
    with refused("required, got VisionTransformer", ValueError):
        unevolve(create("torchvision"))


def test_packed_images_have_no_token_convolution():
    naflex = evolve(create("naflexvit_base_patch16_gap"), None, token_conv=True)
    coordinates = torch.cartesian_prod(torch.arange(2), torch.arange(2)).expand(2, -1, -1)
    with refused(r"images \(B, C, H, W\) required", ValueError):
        naflex(torch.randn(2, 4, 8 * 8 * 3), coordinates, torch.ones(2, 4, dtype=torch.bool))


class LoRA(nn.Linear):
    """A projection with another beside it, which is merged in loralib's way."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features)
        self.load_state_dict(base.state_dict(), strict=False)
        self.added = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return super().forward(x) + self.added(x)

    def merge(self):
        self.weight += self.added.weight
        nn.init.zeros_(self.added.weight)


@torch.no_grad()
@pytest.mark.parametrize(
    "name, value_residual",
    [
        ("vit_tiny_patch16_224", False),
        ("vit_tiny_patch16_224", "paper"),
        ("beit_base_patch16_224", False),  # biases of its own
        ("eva02_enormous_patch14_clip_224", False),
    ],
)
def test_merging_a_lora_changes_nothing(name, value_residual):
    model = create(name)
    for block in model.blocks:
        block.attn.qkv = LoRA(block.attn.qkv)
    evolved = evolve(model, "ea", value_residual=value_residual).eval()
    expected = evolved(images())
    for block in evolved.blocks:
        block.attn.qkv.merge()
    assert_near(evolved(images()), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, name", [("talking_heads", "proj_l"), ("talking_heads", "proj_w"), ("gated", "gate")]
)
def test_a_lora_in_a_mechanism_counts(kind, name):
    model = plain()
    evolved = evolve(model, kind).eval()
    for block in evolved.blocks:
        evolution = block.attn.evolution
        setattr(evolution, name, LoRA(getattr(evolution, name)).eval())
    expected = evolved(images())
    assert differ(expected, model(images())) > 1e-3
    with refused("gates must be 0", ValueError):
        unevolve(evolved)
    assert_near(deploy(evolved)(images()), expected)
    for block in evolved.blocks:
        getattr(block.attn.evolution, name).merge()
    assert_near(evolved(images()), expected)


@torch.no_grad()
def test_an_adapter_of_token_conv_counts():
    evolved = evolve(plain(), None, token_conv=True)
    conv = evolved.blocks[1].token_conv.conv
    conv.adapter = nn.Parameter(torch.ones(1))
    conv.register_forward_hook(lambda module, args, result: result + module.adapter)
    with refused("gates must be 0", ValueError):
        unevolve(evolved)
    evolved.blocks[1].token_conv.conv = nn.Identity()  # without parameters, like a quantised module
    with refused("gates must be 0", ValueError):
        unevolve(evolved)


@pytest.mark.parametrize(
    "name, options, saved",
    [
        ("vit_tiny_patch16_224", {"layers": np.arange(2, 4)}, {"attn_layers": [2, 3]}),
        ("resnet18", {"attn_stages": (np.int64(3), np.int64(4))}, {"attn_stages": [3, 4]}),
    ],
)
def test_options_of_numpy_are_saved_as_numbers(name, options, saved):
    """JSON, in which timm and transformers save options, has none of NumPy's."""
    model = evolve(timm.create_model(name), "ea", alpha=np.float32(0.5), **options)
    evolution = json.loads(json.dumps(model._model_args))["evolution"]
    assert evolution == {**evolution, **saved, "alpha": 0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_of_torch_func_go_through_every_kind(kind):
    model = stirred(evolve(plain().double(), kind, token_conv=True, value_residual=True)).eval()
    x = images(batch=3).double()
    tangent = torch.randn_like(x[0])

    def loss(image):
        return model(image[None]).square().sum()

    alone = torch.stack([loss(image) for image in x])
    assert_close(torch.vmap(loss)(x), alone)
    image = x[0].requires_grad_()
    [gradient] = torch.autograd.grad(loss(image), image)
    _, along = torch.func.jvp(loss, (x[0].detach(),), (tangent,))
    assert_close(along, (gradient * tangent).sum())


@torch.no_grad()
@pytest.mark.parametrize(
    "more, message",
    [
        (dict(need_weights=True), "need_weights=True"),
        (dict(key_padding_mask=torch.zeros(2, 17, dtype=torch.bool)), "got key_padding_mask"),
        (dict(attn_mask=torch.zeros(17, 17)), "no mask .* got attn_mask, is_causal=False"),
        (dict(is_causal=True), "got is_causal=True"),
        (dict(key=torch.zeros(2, 17, 48)), "must be the query itself"),
    ],
)
def test_what_torchs_attention_is_asked_and_cannot_give_is_refused(more, message):
    model = evolve(create("torchvision"), None, value_residual=True)
    x = torch.randn(2, 17, 48)
    call = {"key": x, "value": x, "need_weights": False, **more}
    with refused(message, ValueError):
        model.encoder.layers[0].self_attention(x, **call)


def test_a_changed_dropout_of_torchs_attention_counts():
    model = evolve(create("torchvision"), None, value_residual=True).train()
    for layer in model.encoder.layers:
        layer.self_attention.dropout = 0.5
    torch.manual_seed(0)
    first = model(images())
    assert differ(model(images()), first) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "beit_base_patch16_224"])
def test_sizes_counts_an_evolved_network_as_its_plain_one_and_its_maps(name):
    model = create(name).eval()
    plain_count = count(model, (3, 32, 32))
    evolved_count = count(evolve(model, "residual").eval(), (3, 32, 32))
    assert not plain_count.maps
    tokens = model.num_prefix_tokens + model.patch_embed.num_patches
    heads = model.blocks[0].attn.num_heads
    assert list(evolved_count.maps.values()) == 3 * [(heads, 1, tokens)]
    assert evolved_count.params == plain_count.params + 2


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "beit_base_patch16_224"])
@torch.no_grad()
def test_idle_evolutions_are_dropped_by_deploy(name):
    model = evolve(create(name), "ea")
    deployed = deploy(model.eval())
    assert not any(layer.evolution or layer.need_logits for layer in attention_layers(deployed))
    assert_near(deployed(images()), model(images()))
