"""Evolving vision transformers: equal to timm's where they begin, alive one step later, in timm's ways throughout."""

import copy
import inspect
import logging

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import set_fused_attn
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from torch import nn
from torch.testing import assert_close

import ea_vision
import ea_vision.ops as ops
from ea_vision.layers import EvolvingAttention, PredictiveAttention
from ea_vision.models import get_network, list_networks
from tests.models.zoo import TINY, assert_compiles_and_exports, idle, images, stepped

NAMES = list_networks("vision_transformer")
# what older timm lacks
HAS_CAUSAL = "is_causal" in inspect.signature(VisionTransformer.forward).parameters
RESETS = "needs_reset" in inspect.signature(VisionTransformer.init_weights).parameters
needs_attn_layer = pytest.mark.skipif(
    "attn_layer" not in inspect.signature(VisionTransformer).parameters,
    reason="needs a timm whose ViT has attn_layer",
)


def lively(model):
    """Maps that differ from uniform, and every block different from its neighbours."""
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(
                module.weight,
                std=1.5 * module.in_features**-0.5,
                generator=torch.Generator().manual_seed(number),
            )
    return model.eval()


def tiny(name="ea_vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return lively(timm.create_model(name, **{**TINY, **options}))


def plain(**options):
    return tiny("vit_tiny_patch16_224", **options)


def active(model):
    """Shares that count, different in each block."""
    with torch.no_grad():
        for number, block in enumerate(model.blocks, start=1):
            if block.attn.evolution is not None:
                for gate in filter(torch.is_tensor, block.attn.evolution.gates().values()):
                    gate.fill_(0.1 * number)
    return model


def fused(model, on):
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = on
    return model


@torch.no_grad()
def assert_same_function(evolving, timms, *inputs):
    """Bit for bit with fused attention off, and as near as timm's fused attention is to its plain one with it on."""
    for x in inputs:
        expected = fused(timms, False).forward_features(x)
        assert torch.equal(fused(evolving, False).forward_features(x), expected)
        assert torch.equal(evolving(x), timms(x))
        assert (
            expected - expected.mean(1, keepdim=True)
        ).abs().max() > 0.1  # tokens differ: the maps count
        fused(timms, True)
        for need in (True, False):
            with torch.set_grad_enabled(
                need
            ):  # with gradients the reference runs, without them the kernel
                difference = (
                    (fused(evolving, True).forward_features(x) - timms.forward_features(x))
                    .abs()
                    .max()
                )
            assert difference.item() < 3e-6 * expected.abs().max().item()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_timms_network_with_convolutions_of_maps(name):
    with torch.device("meta"):
        evolving, timms = timm.create_model(name).eval(), timm.create_model(name[3:]).eval()
        shapes, theirs = (
            {key: value.shape for key, value in of.state_dict().items()} for of in (evolving, timms)
        )
        assert theirs.items() <= shapes.items()
        extra = {key: shape for key, shape in shapes.items() if key not in theirs}
        gates = ["alpha", "beta"] if name.startswith("ea") else ["alpha"]
        assert list(extra) == [
            f"blocks.{i}.attn.evolution.{part}"
            for i in range(1, 12)
            for part in (*gates, "convs.0.weight", "convs.0.bias")
        ]
        K = timms.blocks[0].attn.num_heads
        assert sum(shape.numel() for shape in extra.values()) == 11 * (9 * K**2 + K + len(gates))
        assert evolving(torch.empty(1, 3, 224, 224)).shape == (
            1,
            timms.num_classes or timms.num_features,
        )
    cfg, timms_cfg = evolving.pretrained_cfg, timms.pretrained_cfg
    for key in (
        "hf_hub_id",
        "tag",
        "url",
        "input_size",
        "num_classes",
        "mean",
        "classifier",
        "first_conv",
    ):
        assert cfg.get(key) == timms_cfg.get(key), key
    assert "not fine-tuned" in cfg["description"] and "not fine-tuned" in get_network(name).about
    tags, timms_tags = (
        [each.split(".")[1] for each in timm.list_pretrained(f"{of}.*")] for of in (name, name[3:])
    )
    assert tags and sorted(tags) == sorted(timms_tags)


EXACT = [  # timm's names of many families, made small where the names allow it
    ("vit_tiny_patch16_224", {}),
    ("deit_tiny_patch16_224", {}),
    ("deit_tiny_distilled_patch16_224", {}),
    (
        "deit3_small_patch16_224",
        dict(init_values=0.5),
    ),  # layer scale, no position for the class token
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
    "kind, name, options", [*(("ea", *each) for each in EXACT), ("pa", *EXACT[0])]
)
def test_evolve_is_exact_in_many_families(kind, name, options):
    timms = tiny(name, **options)
    if name == "vit_base_patch16_rpn_224":
        for block in timms.blocks:
            nn.init.ones_(block.norm1.weight)
    evolving = ea_vision.evolve(timms, kind)
    assert_same_function(
        evolving, timms, images(), *([images(40, 64)] if "dynamic_img_size" in options else [])
    )
    assert evolving.state_dict().keys() - timms.state_dict().keys() == {
        key for key in evolving.state_dict() if ".attn.evolution." in key
    }
    for key, parameter in timms.named_parameters():
        assert evolving.get_parameter(key) is parameter  # one weight, two models
    assert type(timms.blocks[0].attn).__name__ == "Attention" and not evolving.training


@needs_attn_layer
def test_other_attention_of_timms_is_refused():
    with pytest.raises(ValueError, match="blocks.0: its attention must be .*, got DiffAttention"):
        tiny(attn_layer="diff")


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
    evolving = [
        number for number, block in enumerate(model.blocks, 1) if block.attn.evolution is not None
    ]
    last = 2 if options.get("prefix") == "pass" and model.global_pool == "token" else 3
    assert evolving == options.get("attn_layers", list(range(2, last + 1)))
    assert idle(model, ".evolution.") == []


@pytest.mark.skipif(not RESETS, reason="needs a timm whose ViT resets every module in init_weights")
def test_convolutions_are_alive_whatever_initialises_the_network():
    for mode in ("", "jax", "jax_nlhb", "moco", "reset"):
        model = tiny()
        with torch.no_grad():
            for block in model.blocks[1:]:
                for parameter in block.attn.evolution.parameters():
                    parameter.zero_()
        model.init_weights(mode)
        for block in model.blocks[1:]:
            evolution = block.attn.evolution
            assert evolution.convs[0].weight.any() and evolution.alpha == 0 and evolution.beta == 0
    meta = timm.create_model("ea_vit_tiny_patch16_224", **TINY, device="meta").to_empty(
        device="cpu"
    )
    meta.init_weights()
    assert all(parameter.isfinite().all() for parameter in meta.parameters())


@pytest.mark.parametrize(
    "name,options,expected",
    [
        ("ea", {}, (0.0, 0.0)),
        ("ea", dict(alpha=0.5, beta=1.0, kernel_size=5), (0.5, 1.0)),  # the papers' constants
        ("ea", dict(alpha=0.3), (0.3, 1.0)),
        ("ea", dict(alpha=0.3, learnable=True), (0.3, 0.0)),
        ("pa", dict(alpha=0.5), (0.5, 1.0)),
        ("pa", {}, (0.0, 1.0)),
        ("ea", dict(learnable="per_head"), (0.0, 0.0)),
    ],
)
def test_gates_are_what_the_keywords_say(name, options, expected):
    first, *others = [
        block.attn.evolution for block in tiny(f"{name}_vit_tiny_patch16_224", **options).blocks
    ]
    learnable = options.get("learnable", "alpha" not in options)
    assert first is None
    for e in others:
        assert type(e) is (EvolvingAttention if name == "ea" else PredictiveAttention)
        for gate, value in zip((e.alpha, e.beta), expected, strict=True):
            assert torch.as_tensor(gate).tolist() == pytest.approx(
                [value] * 3 if learnable == "per_head" else value
            )
        assert all(isinstance(gate, nn.Parameter) == bool(learnable) for gate in e.gates().values())
        assert e.convs[0].kernel_size[0] == options.get("kernel_size", 3)


def test_evolve_takes_gates_and_layers():
    for layers in (dict(layers=[3]), dict(attn_layers=[3])):
        model = ea_vision.evolve(plain(), alpha=0.2, beta=0.1, learnable=False, **layers)
        one, other, last = [block.attn.evolution for block in model.blocks]
        assert one is other is None and (last.alpha, last.beta) == (0.2, 0.1)


@torch.no_grad()
def test_by_hand():
    """Two blocks' maps from timm's own layers, evolved by the papers' equations."""
    model = tiny(alpha=0.3, beta=0.6, attn_layers=[2], depth=2)
    x = images()
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    attn = model.blocks[0].attn
    q, k, _ = attn.qkv(model.blocks[0].norm1(tokens)).view(2, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
    logits = q @ k.transpose(-2, -1) / 4
    tokens = model.blocks[0](tokens)
    y = model.blocks[1].norm1(tokens)
    attn = model.blocks[1].attn
    q, k, v = attn.qkv(y).view(2, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
    mixed = 0.3 * logits + 0.7 * q @ k.transpose(-2, -1) / 4
    evolved = 0.6 * attn.evolution.convs[0](mixed).relu() + 0.4 * mixed
    tokens = tokens + attn.proj((evolved.softmax(-1) @ v).transpose(1, 2).reshape(2, 17, 48))
    tokens = tokens + model.blocks[1].mlp(model.blocks[1].norm2(tokens))
    assert_close(model.forward_features(x), model.norm(tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [dict(alpha=0.4, beta=0.7), dict(evolution="pa", alpha=0.4, num_layers=2)]
)
def test_prefix_tokens_pass_the_convolution(options):
    evolution = (
        tiny(prefix="pass", class_token=True, reg_tokens=2, **options).blocks[1].attn.evolution
    )
    whole = copy.deepcopy(evolution)
    whole.num_prefix_tokens = 0
    logits, prev = torch.randn(2, 2, 3, 12, 12)
    expected = 0.4 * prev + 0.6 * logits
    expected[:, :, 3:, 3:] = whole(logits[:, :, 3:, 3:], prev[:, :, 3:, 3:])
    assert_close(evolution(logits, prev), expected)
    assert not torch.allclose(whole(logits, prev), expected)
    q, k, v = torch.randn(3, 2, 3, 12, 4)
    by_operator = ops.evolving_attention(q, k, v, **evolution.operands(prev))[1]
    assert_close(by_operator, evolution(q @ k.transpose(-2, -1) / 2, prev))


def chosen(caplog, monkeypatch, model):
    """What the log says of the implementations that a forward took."""
    monkeypatch.setattr(ops, "_logged", set())
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ea_vision.ops"):
        model(images())
    return [record.message.partition(" by ")[2] for record in caplog.records]


def test_the_kernel_takes_learnable_gates_and_the_log_says_what_it_does_not_take(
    caplog, monkeypatch
):
    models = [
        tiny(**options)
        for options in (
            {},
            dict(learnable="per_head"),
            dict(alpha=0.5, beta=1.0),
            dict(evolution="pa", alpha=0.1),
            dict(prefix="pass"),
        )
    ]
    frozen = tiny()
    for block in frozen.blocks[1:]:
        block.attn.evolution.requires_grad_(False)
    for model in (*models, frozen):
        assert chosen(caplog, monkeypatch, model) == ["'cpu'"]
    with torch.no_grad():
        assert chosen(caplog, monkeypatch, models[0]) == ["'cpu'"]
    compiled = torch.compile(
        tiny(depth=2), fullgraph=True, backend="aot_eager"
    )  # in silence neither
    assert chosen(caplog, monkeypatch, compiled)[0].startswith("'cpu'")
    torch._dynamo.reset()


@torch.no_grad()
def test_intermediates_are_timms():
    timms = plain(reg_tokens=2)
    evolving = ea_vision.evolve(timms)
    for options in (
        {},
        dict(norm=True),
        dict(indices=2),
        dict(indices=[0, 2]),
        dict(indices=[-2], stop_early=True),
        dict(output_fmt="NLC"),
        dict(return_prefix_tokens=True),
        dict(intermediates_only=True),
        dict(output_dict=True),
        dict(output_dict=True, return_prefix_tokens=True, intermediates_only=True),
    ):
        assert_close(
            evolving.forward_intermediates(images(), **options),
            timms.forward_intermediates(images(), **options),
        )
    last_two = [model.get_intermediate_layers(images(), 2) for model in (evolving, timms)]
    assert_close(*last_two)
    final, taken = active(evolving).forward_intermediates(images(), norm=True, output_fmt="NLC")
    assert_close(final[:, 3:], taken[-1])
    assert_close(final, evolving.forward_features(images()))
    with pytest.raises(AssertionError, match="NCHW or NLC"):
        evolving.forward_intermediates(images(), output_fmt="NHWC")


@torch.no_grad()
def test_other_sizes_in_timms_ways():
    model = active(tiny())
    model.set_input_size((48, 32))
    assert model.pos_embed.shape == (1, 1 + 6 * 4, 48) and model(images(48, 32)).shape == (2, 5)
    dynamic = active(tiny(dynamic_img_size=True, dynamic_img_pad=True))
    assert dynamic.forward_features(images(44, 61)).shape == (2, 1 + 6 * 8, 48)
    model.reset_classifier(7, "avg")
    assert model(images(48, 32)).shape == (2, 7)


def test_compiles_in_one_graph_and_exports_with_any_batch_size():
    assert_compiles_and_exports(active(tiny(depth=2)), images(), atol=1e-5, rtol=1e-4)


def test_layer_decay_and_weight_decay_are_timms():
    model = tiny(learnable="per_head")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for number, block in enumerate(model.blocks):
        assert len({group_of[p]["lr_scale"] for p in block.parameters()}) == 1, number
        for p in block.attn.evolution.parameters() if number else ():
            assert group_of[p]["weight_decay"] == (0.05 if p.ndim == 4 else 0.0), number


def test_masks_are_refused():
    model = tiny()
    for call in (
        lambda: model(images(), attn_mask=torch.ones(17, 17)),
        *([lambda: model(images(), is_causal=True)] if HAS_CAUSAL else []),
        lambda: model.forward_intermediates(images(), is_causal=True),
    ):
        with pytest.raises(ValueError, match="take no mask"):
            call()


def pretrained(path, name="ea_vit_tiny_patch16_224", **options):
    overlay = dict(file=str(path), num_classes=TINY["num_classes"], custom_load=False)
    return timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, **{**TINY, **options}
    ).eval()


@torch.no_grad()
def test_pretrained_takes_timms_weights(tmp_path, caplog):
    timms, path = plain(), tmp_path / "timms.safetensors"
    safetensors.torch.save_file(timms.state_dict(), path)
    with caplog.at_level(logging.INFO, logger="ea_vision.models"):
        model = pretrained(path)
    assert "8 tensors of the maps' convolutions and gates stay at their start" in caplog.text
    assert_same_function(model, timms, images())
    assert_same_function(pretrained(path, "pa_vit_tiny_patch16_224"), timms, images())
    larger = pretrained(
        path, img_size=48, num_classes=0
    )  # positions are resampled, the head is left
    expected = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(path), num_classes=5, custom_load=False),
        **{**TINY, "img_size": 48, "num_classes": 0},
    ).eval()
    assert_close(larger(images(48, 48)), expected(images(48, 48)), atol=1e-5, rtol=1e-4)

    safetensors.torch.save_file(active(model).state_dict(), path)
    again = pretrained(path)
    assert torch.equal(again(images()), model(images()))
    with pytest.raises(
        RuntimeError, match="evolution.alpha"
    ):  # a fixed network cannot hold learnt gates
        pretrained(path, alpha=0.5, beta=1.0)


@torch.no_grad()
def test_checkpoints_with_attention_pooling_load_into_the_network_without(tmp_path):
    timms = tiny("vit_base_patch16_siglip_224")
    path = tmp_path / "siglip.safetensors"
    safetensors.torch.save_file(timms.state_dict(), path)
    model = pretrained(path, "ea_vit_base_patch16_siglip_gap_224")
    assert_close(
        model.forward_features(images()), timms.forward_features(images()), atol=1e-5, rtol=1e-4
    )


def test_set_fused_attn_is_heeded():
    set_fused_attn(False)
    try:
        model = tiny()
    finally:
        set_fused_attn(True)
    assert not any(block.attn.fused_attn for block in model.blocks)
    with (
        torch.no_grad(),
        ops.use_implementation("triton"),
    ):  # which cannot run here, and is not asked
        model(images())
