"""Muon batched over equal shapes against timm's: bit-identical, fewer calls, the same state."""

import copy

import pytest
import timm
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ea_vision.engine.muon as muon_module
from ea_vision.engine.muon import BatchedMuon, batch_muon
from tests.engine.runner import assert_equal

STEPS = 3


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
def network(request):
    torch.manual_seed(0)
    model = timm.create_model("ea_conv_transformer_cifar", widths=[16, 32, 64, 64])
    return model.to(memory_format=request.param)


def muon(model, batched, **options):
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01} | options
    optimizer = timm.optim.create_optimizer_v2(model, options.pop("opt", "muon"), **options)
    if batched:
        batch_muon(optimizer)
        assert type(optimizer) is BatchedMuon
    return optimizer


def take_step(model, optimizer, seed):
    """Take a step with gradients drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
        param.grad.copy_(torch.randn(param.shape, generator=generator))
    optimizer.step()


def trained(model, batched, steps=STEPS, **options):
    """Return a copy of the network after some steps, and its optimiser."""
    model = copy.deepcopy(model)
    optimizer = muon(model, batched, **options)
    for seed in range(steps):
        take_step(model, optimizer, seed)
    return model, optimizer


NEEDS_ADAMUON = pytest.mark.skipif(
    "adamuon" not in timm.optim.list_optimizers(), reason="this version of timm has no AdaMuon"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"opt": "nmuon"},
        {"ns_steps": 4, "ns_coefficients": "original", "adjust_lr_fn": "original"},
        {"conv_mode": "batched"},
        pytest.param({"opt": "adamuon"}, marks=NEEDS_ADAMUON),
    ],
    ids=str,
)
def test_updates_and_state_equal_timms_to_the_bit(network, options):
    plain, by_timm = trained(network, False, **options)
    model, batched = trained(network, True, **options)
    assert_equal(dict(model.state_dict()), dict(plain.state_dict()))
    assert_equal(batched.state_dict(), by_timm.state_dict())


class Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **kwargs or {})


def test_a_step_makes_at_most_1000_calls_for_the_matrices(monkeypatch):
    """Small matrices are batched, too, as on a GPU."""
    monkeypatch.setattr(muon_module, "LEAST_SIDE_ON_CPU", 0)
    network = timm.create_model("ea_conv_transformer_cifar")
    counts = []
    for batched in (False, True):
        model, optimizer = trained(network, batched, steps=2)
        for param, state in optimizer.state.items():
            if not state["use_muon"]:
                param.grad = None
        with Counter() as counter:
            optimizer.step()
        counts.append(counter.calls)
    assert counts[0] > 2600
    assert counts[1] <= 1000


def test_gradients_stay_and_parameters_without_one_rest(network):
    model, optimizer = trained(network, True)
    resting = model.get_parameter("stages.0.blocks.0.conv.weight")
    before = resting.detach().clone()
    resting.grad = None
    optimizer.step()
    assert torch.equal(resting, before)
    assert all(p.grad is not None for p in model.parameters() if p is not resting)
