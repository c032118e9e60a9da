"""Optimisers: all that timm builds by name, parameter groups and their rates, and restored states."""

import re
import warnings

import pytest
import timm
import torch

import ea_vision
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


def evolved(name, *how, **options):
    return ea_vision.evolve(timm.create_model(name, num_heads=3, **TINY), *how, **options)


def resnet(fusion):
    narrow = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}
    return timm.create_model("ea_aa_resnet34", fusion=fusion, **narrow)


EVOLVES = r"qkv\.\w+|evolution\.convs\.0\.\w+"


@pytest.mark.parametrize(
    "model, scaled",
    [
        # learnable gates have gate_lr
        (lambda: timm.create_model("ea_vit_tiny_patch16_224", **TINY), rf"attn\.({EVOLVES})"),
        (lambda: evolved("vit_small_patch16_dinov3", "ea"), rf"attn\.({EVOLVES}|[qv]_bias)"),
        (
            lambda: evolved("vit_small_patch16_224", None, token_conv=True, value_residual=True),
            r"attn\.(qkv|value_residual)\.\w+|token_conv\..*",
        ),
        (lambda: resnet("concat"), rf"{EVOLVES}|\w+_rel"),
        (lambda: resnet("add"), rf"{EVOLVES}|\w+_rel|proj\.\w+"),
    ],
)
def test_attention_lr_has_all_of_attention_that_is_new(model, scaled):
    model = model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gates = ea_vision.layers.learnable_gates(model)
    options = {"attention_lr": 0.5, "gate_lr": 30 if gates else 1}
    for group in build_optimizer(config(**options), model, 1).param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            expected = 0.5 if re.search(rf"\.({scaled})$", name) else 1
            assert group["lr_scale"] == (30 if name in gates else expected), name


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
