"""Evolving vision transformers: equal to timm's at the start, learning after one step, with timm's interfaces."""

import inspect
from itertools import product

import pytest
import safetensors.torch
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.testing import assert_close

import ea_vision
import ea_vision.ops as ops
from ea_vision.layers import evolution_class, learnable_gates
from ea_vision.models import get_network, list_networks
from tests.models.zoo import (
    KINDS,
    TINY,
    assert_compiles_and_exports,
    groups_of,
    idle,
    images,
    stepped,
)
from tests.refused import refused

NAMES = list_networks("vision_transformer")
# what older timm lacks
RESETS = "needs_reset" in inspect.signature(VisionTransformer.init_weights).parameters
needs_attn_layer = pytest.mark.skipif(
    "attn_layer" not in inspect.signature(VisionTransformer).parameters,
    reason="needs a timm whose ViT has attn_layer",
)


def lively(model):
    """Draw weights that make maps non-uniform and all blocks different."""
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.Linear):
            generator = torch.Generator().manual_seed(number)
            std = 1.5 * module.in_features**-0.5
            nn.init.normal_(module.weight, std=std, generator=generator)
    return model.eval()


def tiny(name="ea_vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return lively(timm.create_model(name, **{**TINY, **options}))


def plain(**options):
    return tiny("vit_tiny_patch16_224", **options)


def active(model):
    """Move all learned gates away from their start, to a different value in each block."""
    with torch.no_grad():
        for number, block in enumerate(model.blocks, start=1):
            for gate in learnable_gates(block).values():
                gate.fill_(0.1 * number)
    return model


def fused(model, on):
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = on
    return model


@torch.no_grad()
def assert_same_function(evolving, timms, x):
    """Compare bit for bit without fused attention; with it, within the difference of timm's fused and plain forms."""
    fused(timms, False)
    fused(evolving, False)
    expected = timms.forward_features(x)
    assert torch.equal(evolving.forward_features(x), expected)
    assert torch.equal(evolving(x), timms(x))
    spread = expected - expected.mean(1, keepdim=True)
    assert spread.abs().max() > 0.1  # tokens differ: the maps count
    fused(timms, True)
    fused(evolving, True)
    for need in (True, False):
        # with gradients the reference runs, without them the kernel
        with torch.set_grad_enabled(need):
            difference = evolving.forward_features(x) - timms.forward_features(x)
        assert difference.abs().max() < 3e-6 * expected.abs().max()


def shapes_of(model):
    return {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_timms_network_with_convolutions_of_maps(name):
    with torch.device("meta"):
        evolving = timm.create_model(name).eval()
        timms = timm.create_model(name[3:]).eval()
        shapes = shapes_of(evolving)
        theirs = shapes_of(timms)
        K = timms.blocks[0].attn.num_heads
        parts = {"alpha": ()} if name.startswith("pa") else {"alpha": (), "beta": ()}
        parts |= {"convs.0.weight": (K, K, 3, 3), "convs.0.bias": (K,)}
        extra = {}
        for number, (part, shape) in product(range(1, 12), parts.items()):
            extra[f"blocks.{number}.attn.evolution.{part}"] = shape
        assert shapes == theirs | extra
        width = timms.num_classes or timms.num_features
        assert evolving(torch.empty(1, 3, 224, 224)).shape == (1, width)
    cfg = evolving.pretrained_cfg
    timms_cfg = timms.pretrained_cfg
    keys = "hf_hub_id tag url input_size num_classes mean classifier first_conv"
    for key in keys.split():
        assert cfg.get(key) == timms_cfg.get(key), key
    assert "not fine-tuned" in cfg["description"]
    assert "not fine-tuned" in get_network(name).about
    tagged = timm.list_pretrained(f"{name[3:]}.*")
    assert tagged
    assert timm.list_pretrained(f"{name}.*") == [name[:3] + each for each in tagged]


EXACT = [  # timm's names of many families, made small where the names allow it
    ("vit_tiny_patch16_224", {}),
    ("deit_tiny_patch16_224", {}),
    ("deit_tiny_distilled_patch16_224", {}),
    ("deit3_small_patch16_224", dict(init_values=0.5)),  # no position for the class token
    ("vit_small_patch14_reg4_dinov2", dict(init_values=0.5)),  # registers
    ("vit_base_patch16_clip_224", {}),  # norm before the blocks
    ("vit_base_patch16_siglip_224", {}),  # attention pooling, no class token
    ("vit_base_patch16_siglip_gap_224", {}),
    ("vit_medium_patch16_gap_240", {}),
    ("vit_base_patch16_rpn_224", {}),  # norms after the branches
    ("flexivit_small", {}),
    ("vit_tiny_patch16_224", dict(qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True)),
    ("vit_small_patch16_224", dict(dynamic_img_size=True)),
    ("vit_tiny_patch16_224", dict(global_pool="", num_classes=0)),
]


@pytest.mark.parametrize(
    "kind, name, options",
    [("ea", *each) for each in EXACT] + [(kind, *EXACT[0]) for kind in KINDS[1:]],
)
def test_evolve_is_exact_in_many_families(kind, name, options):
    timms = tiny(name, **options)
    if name == "vit_base_patch16_rpn_224":
        for block in timms.blocks:
            nn.init.ones_(block.norm1.weight)
    evolving = ea_vision.evolve(timms, kind)
    assert_same_function(evolving, timms, images())
    if "dynamic_img_size" in options:
        assert_same_function(evolving, timms, images(40, 64))
    assert not evolving.training
    first = evolving.blocks[0].attn.evolution
    assert (first is None) == evolution_class(kind).reads_previous


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(learnable="per_head"),
        dict(prefix="pass"),
        dict(attn_layers=[3]),
        dict(evolution="pa"),
        dict(evolution="pa", num_layers=2),
        dict(evolution="pa", prefix="pass", num_layers=2),
        dict(alpha=0.5, beta=0.5),
        dict(weight_init="jax"),
        dict(weight_init="moco"),
        dict(class_token=False, global_pool="avg", prefix="pass"),
    ],
)
def test_every_evolution_parameter_has_a_gradient_after_one_step(options):
    model = stepped(tiny(**options), images(batch=8))
    evolving = [i for i, block in enumerate(model.blocks, 1) if block.attn.evolution is not None]
    reads_token = options.get("prefix") == "pass" and model.global_pool == "token"
    expected = [2] if reads_token else [2, 3]
    assert evolving == options.get("attn_layers", expected)
    assert idle(model, ".evolution.") == []


@pytest.mark.skipif(not RESETS, reason="needs a timm whose ViT resets every module in init_weights")
@pytest.mark.parametrize("mode", ["", "jax", "jax_nlhb", "moco", "reset"])
@torch.no_grad()
def test_convolutions_are_alive_whatever_initialises_the_network(mode):
    model = tiny()
    evolutions = [block.attn.evolution for block in model.blocks[1:]]
    for evolution in evolutions:
        for parameter in evolution.parameters():
            parameter.zero_()
    model.init_weights(mode)
    for evolution in evolutions:
        assert evolution.convs[0].weight.any()
        assert evolution.alpha == 0
        assert evolution.beta == 0


@pytest.mark.skipif(not RESETS, reason="needs a timm whose ViT resets every module in init_weights")
def test_a_network_made_on_the_meta_device_is_initialised():
    model = timm.create_model("ea_vit_tiny_patch16_224", **TINY, device="meta")
    model = model.to_empty(device="cpu")
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name, options, learned, alpha, beta",
    [
        ("ea", {}, True, 0.0, 0.0),
        ("ea", dict(alpha=0.5, beta=1.0), False, 0.5, 1.0),  # the papers' constants
        ("ea", dict(alpha=0.3), False, 0.3, 1.0),
        ("ea", dict(alpha=0.3, learnable=True), True, 0.3, 0.0),
        ("pa", dict(alpha=0.5), False, 0.5, 1.0),
        ("pa", {}, True, 0.0, 1.0),
        ("ea", dict(learnable="per_head"), True, [0.0] * 3, [0.0] * 3),
    ],
)
def test_gates_are_what_the_keywords_say(name, options, learned, alpha, beta):
    model = tiny(f"{name}_vit_tiny_patch16_224", **options)
    first, *others = [block.attn.evolution for block in model.blocks]
    assert first is None
    for evolution in others:
        assert type(evolution) is evolution_class(name)
        for gate in evolution.gates().values():
            assert isinstance(gate, nn.Parameter) == learned
        assert torch.as_tensor(evolution.alpha).tolist() == pytest.approx(alpha)
        assert torch.as_tensor(evolution.beta).tolist() == pytest.approx(beta)


@pytest.mark.parametrize("keyword", ["layers", "attn_layers"])
def test_evolve_takes_options_and_layers(keyword):
    options = dict(alpha=0.2, beta=0.1, kernel_size=5, learnable=False, **{keyword: [3]})
    *others, last = [block.attn.evolution for block in ea_vision.evolve(plain(), **options).blocks]
    assert others == [None, None]
    assert (last.alpha, last.beta) == (0.2, 0.1)
    assert last.convs[0].kernel_size == (5, 5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(learnable="per_head"),
        dict(alpha=0.5, beta=1.0),
        dict(evolution="pa", alpha=0.1),
        dict(prefix="pass"),
    ],
)
def test_the_kernel_takes_every_form_and_the_log_says_so(options, log):
    model = tiny(**options)
    model(images())
    assert [message.partition(" by ")[2] for message in log.messages] == ["'cpu'"]
    with ops.use_implementation("cpu"):  # or this is refused
        with torch.no_grad():
            model(images())
        for name, parameter in model.named_parameters():
            if ".evolution." in name:
                parameter.requires_grad_(False)
        model(images())


def test_prefix_tokens_pass_the_convolution():
    model = tiny(prefix="pass", class_token=True, reg_tokens=2)
    assert model.blocks[1].attn.evolution.num_prefix_tokens == 3


def test_compiles_in_one_graph_and_exports_with_any_batch_size():
    assert_compiles_and_exports(active(tiny(depth=2)), images(), atol=1e-5, rtol=1e-4)


def test_layer_decay_and_weight_decay_are_timms():
    model = tiny(learnable="per_head")
    group_of = groups_of(model, layer_decay=0.5)
    for number, block in enumerate(model.blocks):
        assert len({group_of[p]["lr_scale"] for p in block.parameters()}) == 1, number
    for block in model.blocks[1:]:
        for p in block.attn.evolution.parameters():
            assert group_of[p]["weight_decay"] == (0.05 if p.ndim == 4 else 0.0)


def pretrained(path, name="ea_vit_tiny_patch16_224", **options):
    overlay = dict(file=str(path), num_classes=TINY["num_classes"], custom_load=False)
    options = {**TINY, **options}
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    return model.eval()


@torch.no_grad()
def test_pretrained_takes_timms_weights(tmp_path, log):
    timms = plain()
    path = tmp_path / "timms.safetensors"
    safetensors.torch.save_file(timms.state_dict(), path)
    model = pretrained(path)
    assert "8 tensors of the maps' convolutions and gates stay at their start" in log.text
    assert_same_function(model, timms, images())
    assert_same_function(pretrained(path, "pa_vit_tiny_patch16_224"), timms, images())
    # positions are resampled, the head is left
    larger = pretrained(path, img_size=48, num_classes=0)
    expected = pretrained(path, "vit_tiny_patch16_224", img_size=48, num_classes=0)
    assert_close(larger(images(48, 48)), expected(images(48, 48)), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_learned_gates_load_again_and_a_network_with_fixed_gates_refuses_them(tmp_path):
    path = tmp_path / "evolved.safetensors"
    model = active(tiny())
    safetensors.torch.save_file(model.state_dict(), path)
    assert torch.equal(pretrained(path)(images()), model(images()))
    with pytest.raises(RuntimeError, match="evolution.alpha"):
        pretrained(path, alpha=0.5, beta=1.0)


@torch.no_grad()
def test_checkpoints_with_attention_pooling_load_into_the_network_without(tmp_path):
    timms = tiny("vit_base_patch16_siglip_224")
    path = tmp_path / "siglip.safetensors"
    safetensors.torch.save_file(timms.state_dict(), path)
    model = pretrained(path, "ea_vit_base_patch16_siglip_gap_224")
    expected = timms.forward_features(images())
    assert_close(model.forward_features(images()), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_unfused_layers_ask_no_kernel():
    model = fused(tiny(), False)
    with ops.use_implementation("triton"):  # it cannot run here
        model(images())
    with ops.use_implementation("cpu"), refused("defines only forward, which", ValueError):
        tiny(evolution="conv2d")(images())
