"""Optimisers: all that timm builds by name, parameter groups and their rates, and restored states."""

import warnings

import pytest
import timm
import torch

import ea_vision  # noqa: F401
from ea_vision.engine.config import TrainConfig, resolve
from ea_vision.engine.optimizer import build_optimizer, build_schedule, load_optimizer
from tests.refused import refused

TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 2}


def config(**options):
    usual = {"opt": "sgd", "lr": 0.1, "warmup_epochs": 0, "sched": "constant"}
    return TrainConfig(**{**usual, **options})


def network():
    torch.manual_seed(0)
    return timm.create_model("ea_conv_transformer_cifar", widths=(8, 8, 8, 8), depth=1, img_size=8)


def moved(model, optimizer, rate=None):
    """Return how far each parameter moves in a step with random gradients; rate, if given, replaces all groups' lr."""
    before = {}
    for name, parameter in model.named_parameters():
        before[name] = parameter.detach().clone()
        parameter.grad = torch.randn_like(parameter)
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"opt": "lookahed_sgd"}, "did you mean lookahead_sgd"),
        # timm would make it sgd, without a word
        ({"opt": "fused_sgd"}, "unknown optimiser 'fused_sgd'"),
        ({"opt_kwargs": {"nosuch": 1}}, "refuses lr=0.1 momentum=0.9 nosuch=1"),
        (
            {"opt": "muon", "opt_kwargs": {"conv_mode": "x"}},
            "refuses lr=0.1 momentum=0.9 conv_mode=x",
        ),
        ({"gate_lr": 30}, "gate_lr 30 needs learnable gates"),
        ({"attention_lr": 0.25}, "attention_lr 0.25 needs attention layers of ea_vision"),
    ],
)
def test_refusals_are_named(options, message):
    with refused(message):
        build_optimizer(config(**options), timm.create_model("resnet18_cifar"), 1)


@pytest.mark.parametrize(
    "name", ["sgd", "lamb", "lion", "nmuon", "lookahead_adamw", "lookahead_muon"]
)
def test_what_timm_builds_makes_a_step(name):
    if name.removeprefix("lookahead_") not in timm.optim.list_optimizers():
        pytest.skip(f"timm {timm.__version__} has no {name}")
    model = network()
    optimizer = build_optimizer(config(opt=name, lr=0.01), model, 1)
    assert isinstance(optimizer, timm.optim.Lookahead) == name.startswith("lookahead_")
    assert all(way.any() for way in moved(model, optimizer).values())


def scales_of(options, model):
    """Return the multiple of the rate of each parameter, by its name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {}
    for group in build_optimizer(options, model, 1).param_groups:
        for parameter in group["params"]:
            scales[names[id(parameter)]] = group["lr_scale"]
    return scales


def test_attention_lr_leaves_learnable_gates_to_gate_lr():
    model = timm.create_model("ea_vit_tiny_patch16_224", **TINY)
    scales = scales_of(config(attention_lr=0.5, gate_lr=30), model)
    expected = {"blocks.1.attn.evolution.alpha": 30, "blocks.1.attn.evolution.beta": 30}
    for layer in ("blocks.1.attn.evolution.convs.0", "blocks.0.attn.qkv", "blocks.1.attn.qkv"):
        expected |= {f"{layer}.weight": 0.5, f"{layer}.bias": 0.5}
    assert {name: scale for name, scale in scales.items() if scale != 1} == expected


def test_attention_lr_knows_an_evolved_transformer_of_timms():
    plain = timm.create_model("vit_small_patch16_dinov3", num_heads=3, **TINY)
    model = ea_vision.evolve(plain, "ea")
    scales = scales_of(config(attention_lr=0.5), model)
    names = {name for name, scale in scales.items() if scale == 0.5}
    assert names == {name for name in names if ".attn." in name}
    assert {"blocks.0.attn.qkv.weight", "blocks.1.attn.evolution.convs.0.weight"} <= names


def test_attention_lr_has_what_is_added_to_tokens_and_values():
    options = dict(img_size=32, patch_size=16, embed_dim=48, depth=2, num_heads=3)
    plain = timm.create_model("vit_small_patch16_224", **options)
    model = ea_vision.evolve(plain, None, token_conv=True, value_residual=True)
    scales = scales_of(config(attention_lr=10.0), model)
    added = {name for name in scales if "token_conv" in name or "value_residual" in name}
    assert {name.split(".")[2] for name in added} == {"attn", "token_conv"}
    assert {scales[name] for name in added} == {10.0}


@pytest.mark.parametrize("fusion", ["concat", "add"])
def test_attention_lr_has_all_of_attention_that_is_new(fusion):
    narrow = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}
    model = timm.create_model("ea_aa_resnet34", fusion=fusion, **narrow)
    scales = scales_of(config(attention_lr=10.0), model)
    names = {name for name, scale in scales.items() if scale == 10}
    projections = {name for name, _ in model.named_parameters() if ".proj." in name}
    assert projections & names == (projections if fusion == "add" else set())
    assert "layer2.0.conv1.qkv.weight" in names
    assert not any(".conv.weight" in name for name in names)


@pytest.mark.parametrize("opt", ["sgd", "lookahead_muon"])
def test_attention_lr_scales_the_update(opt):
    """From the same weights and gradients, the attention parameters move by this factor and the others as without it,
    at every rate of a schedule."""
    ways = []
    for scale in (1, 0.25):
        model = network()
        settings = config(opt=opt, lr=0.01, attention_lr=scale, sched="linear")
        optimizer = build_optimizer(settings, model, 1)
        # which multiplies the rates by the groups' scales
        build_schedule(settings, optimizer, 10).step_update(20)
        torch.manual_seed(1)
        ways.append(moved(model, optimizer))
    for name, whole in ways[0].items():
        share = 0.25 if any(part in name for part in (".qkv.", "_rel", ".evolution.")) else 1
        assert whole.abs().max() > 1e-4
        torch.testing.assert_close(ways[1][name], share * whole, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    "opt, kwargs, share",
    [("muon", {"fallback_lr_scale": 0.25}, 0.25), ("lookahead_muon", {"adamw_lr": 0.01}, 0.1)],
)
def test_schedules_reach_all_parameters_of_muon(opt, kwargs, share):
    """Also the parameters of its AdamW, whose rate older releases of timm kept constant; a rate given for AdamW is a
    multiple of lr."""
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of timm warn of adamw_lr
        optimizer = build_optimizer(config(opt=opt, opt_kwargs=kwargs), model, 1)
    # as schedules have it at their end
    for way in moved(model, optimizer, 0.0).values():
        assert not way.any()
    getattr(optimizer, "_base_optimizer", optimizer).state.clear()
    # AdamW's first step: the rate, whatever the gradient
    way = moved(model, optimizer, 0.05)["head.fc.bias"].abs()
    torch.testing.assert_close(way, torch.full_like(way, 0.05 * share), atol=1e-4, rtol=0)
    for parameter, state in optimizer.state.items():
        matrix = parameter.ndim == 4 and len(parameter) > 1
        assert not matrix or "exp_avg" not in state


def test_a_recipes_keywords_are_for_its_own_optimiser(recipe):
    path = recipe("opt: muon\nopt_kwargs: {nesterov: true, fallback_lr_scale: 0.5}\n")

    def kwargs(**options):
        return resolve(TrainConfig, {"recipe": str(path), **options}).opt_kwargs

    assert kwargs() == {"nesterov": True, "fallback_lr_scale": 0.5}
    changed = kwargs(opt_kwargs={"nesterov": False})
    assert changed == {"nesterov": False, "fallback_lr_scale": 0.5}
    assert kwargs(opt="sgd") == {}


def test_what_an_optimiser_counts_in_its_groups_is_kept_and_changed_options_are_the_runs():
    layer = torch.nn.Conv2d(2, 2, 3, bias=False).to(memory_format=torch.channels_last)
    first = build_optimizer(config(opt="lookahead_sgd", weight_decay=0.1), layer, 1)
    changed = config(opt="lookahead_sgd", weight_decay=0.3)
    second = build_optimizer(changed, layer, 1)
    for _ in range(8):  # k is 6
        moved(layer, first)
    saved = first.state_dict()
    made_with = vars(config(opt="lookahead_sgd", opt_kwargs={"nesterov": False}))
    load_optimizer(second, saved, changed, "x", made_with)
    group = second.param_groups[0]
    assert group["lookahead_step"] == 8
    assert group["weight_decay"] == 0.3
    buffers = second.state_dict()["state"][0]
    assert torch.equal(buffers["lookahead_slow_buff"], saved["state"][0]["lookahead_slow_buff"])
    assert buffers["momentum_buffer"].is_contiguous(memory_format=torch.channels_last)
    other = build_optimizer(config(attention_lr=3), network(), 1)
    with refused("optimiser state of x does not fit lookahead_sgd"):
        load_optimizer(other, saved, changed, "x", made_with)
    with refused("of x is of lookahead_sgd and does not fit adamw"):
        load_optimizer(second, saved, config(opt="adamw"), "x", made_with)
