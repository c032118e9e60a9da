"""`deploy` folds where it is sure, leaves alone or refuses where it is not, and never changes an output."""
import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import ea_vision
from ea_vision.base.errors import RunError, UsageError

NORMS = nn.modules.batchnorm._BatchNorm
SIDE, CHANNELS = 6, 3


def scramble(model: nn.Module) -> nn.Module:
    """Give norms statistics that count, and the network a size; in evaluation mode."""
    for module in model.modules():
        if isinstance(module, NORMS):
            for tensor in (module.running_mean, module.bias):
                nn.init.uniform_(tensor, -1, 2)
            for tensor in (module.running_var, module.weight):
                nn.init.uniform_(tensor, 0.3, 2)
    model.img_size = SIDE
    return model.eval()


def images() -> list[torch.Tensor]:
    """Return images unlike the noise that `deploy` looks at: brighter, darker, constant."""
    noise = torch.randn(2, 2, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(7))
    return [noise[0] + 2, noise[1] - 2, torch.zeros(1, CHANNELS, SIDE, SIDE), noise[0] * 10]


def same(model: nn.Module, deployed: nn.Module) -> None:
    """Assert that all outputs of two networks are the same on several images."""
    for x in images():
        with torch.no_grad():
            for own, got in zip(model(x), deployed(x), strict=True):
                assert (own - got).abs().max() <= 1e-4 * own.abs().max().clamp(min=1e-3)


class Net(nn.Module):
    """A network of steps, each of which takes a tensor of CHANNELS, and what a convolution makes of it, and gives one.

    steps: name in STEPS, number of the convolution, number of the norm.
    decorated: name in DECORATIONS, number of the convolution or norm.
    """

    def __init__(self, steps, decorated=()):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=bool(n)) for n in range(3))
        self.norms = nn.ModuleList(kind(CHANNELS) for kind in (nn.BatchNorm2d, BatchNormAct2d, nn.BatchNorm2d))
        self.listed = [self.norms[0], scramble(nn.BatchNorm2d(CHANNELS))]
        self.steps = steps
        for name, number in decorated:
            DECORATIONS[name](self, number)

    def forward(self, x):
        kept = []
        for name, conv, norm in self.steps:
            y = self.convs[conv](x)
            x = STEPS[name](self, x, y, self.convs[conv], self.norms[norm], kept)
        return [x, *kept]


def half(module, inputs, output):
    return output / 2


def double(module, inputs):
    return (2 * inputs[0],)


def ordinary(conv: nn.Module) -> bool:
    """Return whether the weight is a parameter, neither pruned nor parametrised."""
    return "weight" in conv._parameters


STEPS = {
    "pair": lambda net, x, y, conv, norm, kept: norm(y),
    "unused": lambda net, x, y, conv, norm, kept: norm(x),
    "relu": lambda net, x, y, conv, norm, kept: norm(y).relu(),
    "skip": lambda net, x, y, conv, norm, kept: norm(y) + y,
    "residual": lambda net, x, y, conv, norm, kept: norm(y) + x,
    "data": lambda net, x, y, conv, norm, kept: norm(y) + y.data,
    "detached": lambda net, x, y, conv, norm, kept: norm(y) + y.detach(),
    "transposed": lambda net, x, y, conv, norm, kept: norm(y) + y.mT,
    "view": lambda net, x, y, conv, norm, kept: norm(y.view_as(y)),
    "part": lambda net, x, y, conv, norm, kept: norm(y) + y[:, :1],
    "later": lambda net, x, y, conv, norm, kept: kept.append(y) or norm(y),
    "earlier": lambda net, x, y, conv, norm, kept: norm(y) + sum(kept),
    "listed": lambda net, x, y, conv, norm, kept: net.listed[0](y),
    "unlisted": lambda net, x, y, conv, norm, kept: net.listed[1](y),
    "in place": lambda net, x, y, conv, norm, kept: norm(y) + y.mul_(2),
    "tied": lambda net, x, y, conv, norm, kept: F.conv_transpose2d(norm(y), conv.weight, padding=1),
    "weight": lambda net, x, y, conv, norm, kept: norm(y) * norm.weight.mean(),
    "chosen": lambda net, x, y, conv, norm, kept: net.norms[int(y.mean() > 0)](y),
    "chosen by a sum": lambda net, x, y, conv, norm, kept: norm(y) if x.sum() > 0 else y,
    "chosen by item": lambda net, x, y, conv, norm, kept: norm(y) if x.mean().item() > 0.5 else y,
    "chosen by a list": lambda net, x, y, conv, norm, kept: norm(y) if y.flatten().tolist()[0] > 0 else y,
    "chosen by NumPy": lambda net, x, y, conv, norm, kept: norm(y) if x.numpy().mean() > 0.5 else y,
    "chosen by a count": lambda net, x, y, conv, norm, kept: norm(y) if len(x[x > 1]) > 40 else y,
    "both": lambda net, x, y, conv, norm, kept: torch.where(y.mean() > 0, norm(y), y),
}
OTHER_STEPS = {
    "random": lambda net, x, y, conv, norm, kept: norm(y) + torch.rand(()),
    "object": lambda net, x, y, conv, norm, kept: object(),
    "failing": lambda net, x, y, conv, norm, kept: x @ x.new_ones(1, 99),
}
DECORATIONS = {
    "hook": lambda net, n: net.norms[n].register_forward_hook(half),
    "hook on conv": lambda net, n: net.convs[n].register_forward_hook(half),
    "hook before": lambda net, n: net.convs[n].register_forward_pre_hook(double),
    "hook between": lambda net, n: net.norms[n].register_forward_pre_hook(double),
    "two names": lambda net, n: net.add_module("again", nn.Sequential(net.norms[n])),
    "two names of both": lambda net, n: net.add_module("again", nn.Sequential(net.convs[n], net.norms[n])),
    "conv's two names": lambda net, n: net.add_module("conv", net.convs[n]),
    "one weight": lambda net, n: all(map(ordinary, net.convs)) and setattr(net.convs[n], "weight", net.convs[0].weight),
    "one bias of norms": lambda net, n: setattr(net.norms[n], "bias", net.norms[0].bias),
    "pruned": lambda net, n: ordinary(net.convs[n]) and prune.l1_unstructured(net.convs[n], "weight", 0.5),
    "weight_norm": lambda net, n: ordinary(net.convs[n]) and weight_norm(net.convs[n]),
    "parametrised": lambda net, n: ordinary(net.convs[n]) and parametrizations.weight_norm(net.convs[n]),
    "forward": lambda net, n: setattr(net.convs[n], "forward", lambda x: x.relu() + 1),
}
CASES = [  # step, its norm, decoration, reason in the warning ("" where the norm is folded)
    ("pair", 0, "", ""), ("pair", 1, "", ""), ("listed", 0, "", ""), ("unlisted", 0, "", "cannot trace"),
    ("pair", 0, "two names of both", "a second name"), ("pair", 0, "two names", "a second name"),
    ("pair, pair", 0, "", "more than once"), ("pair", 0, "hook", "hooks"), ("pair", 0, "hook on conv", "hooks"),
    ("pair", 0, "hook before", "hooks"), ("pair", 0, "hook between", "hooks"), ("pair", 0, "forward", "hooks"),
    ("pair", 0, "pruned", "pruning"), ("pair", 0, "weight_norm", "hooks"),
    ("pair", 0, "parametrised", "a parametrisation"), ("tied", 0, "", "read elsewhere"),
    ("weight", 0, "", "read elsewhere"), *((step, 0, "", "read past") for step in (
        "skip", "data", "transposed", "detached", "in place", "later")),
    *((step, 0, "", "cannot trace") for step in STEPS if step.startswith("chosen"))]
STEPS |= OTHER_STEPS


@pytest.mark.parametrize("steps, norm, decoration, reason", CASES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_is_folded_and_what_is_left_alone(steps, norm, decoration, reason, recwarn):
    model = scramble(Net([(step, 0, norm) for step in steps.split(", ")], [(decoration, 0)] if decoration else []))
    before = copy.deepcopy({name: value.detach() for name, value in model.state_dict().items()})
    recwarn.clear()
    deployed = ea_vision.deploy(model)
    said = [str(warning.message) for warning in recwarn if "deploy leaves" in str(warning.message)]
    assert sum(isinstance(module, NORMS) for module in deployed.modules()) == (3 if reason else 2)
    assert bool(said) == bool(reason) and all(reason in text for text in said), said
    same(model, deployed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it has changed"


NUMBER = st.integers(0, 2)
DRAWN = [name for name in STEPS if name not in OTHER_STEPS]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from([*DRAWN, *["pair"] * 8]), NUMBER, NUMBER), min_size=1, max_size=4),
       decorated=st.lists(st.tuples(st.sampled_from(list(DECORATIONS)), NUMBER), max_size=2))
@pytest.mark.filterwarnings("ignore:deploy leaves", "ignore:.*weight_norm.* is deprecated")
def test_generated_networks_give_the_same_or_are_refused(steps, decorated):
    torch.manual_seed(0)
    model = scramble(Net(steps, decorated))
    try:
        deployed = ea_vision.deploy(model)
    except (UsageError, RunError):
        return
    same(model, deployed)


@pytest.mark.parametrize("step, kind, message", [
    ("random", RunError, "Net cannot be deployed: on noise its copy's outputs differ by .* run twice"),
    ("object", UsageError, "a network that gives tensors is required, .* got object"),
    ("failing", UsageError, r"a network for images \(1, 3, 6, 6\) is required, and Net fails on one")])
def test_what_cannot_be_compared_is_refused(step, kind, message):
    with pytest.raises(kind, match=message):
        ea_vision.deploy(scramble(Net([(step, 0, 0)])))
