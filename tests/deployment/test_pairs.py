"""`deploy` folds a norm only if that is safe, otherwise it keeps the norm or refuses; it never changes an output."""

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
SIDE = 6
CHANNELS = 3


def scramble(model):
    """Return the model in evaluation mode, with random statistics in its norms and an input size."""
    for module in model.modules():
        if isinstance(module, NORMS):
            nn.init.uniform_(module.running_mean, -1, 2)
            nn.init.uniform_(module.bias, -1, 2)
            nn.init.uniform_(module.running_var, 0.3, 2)
            nn.init.uniform_(module.weight, 0.3, 2)
    model.img_size = SIDE
    return model.eval()


def images():
    """Return images unlike the noise that `deploy` looks at: brighter, darker, constant."""
    noise = torch.randn(2, 2, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(7))
    return [noise[0] + 2, noise[1] - 2, torch.zeros(1, CHANNELS, SIDE, SIDE), noise[0] * 10]


def same(model, deployed):
    """Assert that all outputs of two networks are the same on several images."""
    for x in images():
        with torch.no_grad():
            outputs = zip(model(x), deployed(x), strict=True)
        for own, other in outputs:
            largest = own.abs().max().clamp(min=1e-3)
            assert (own - other).abs().max() <= 1e-4 * largest


class Net(nn.Module):
    """A network of steps. Each step gets x (CHANNELS channels) and a convolution's output for x, and returns a tensor.

    steps: name in STEPS, number of the convolution, number of the norm.
    decorated: name in DECORATIONS, number of the convolution or norm.
    """

    def __init__(self, steps, decorated=()):
        super().__init__()
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for bias, norm in ((False, nn.BatchNorm2d), (True, BatchNormAct2d), (True, nn.BatchNorm2d)):
            self.convs.append(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=bias))
            self.norms.append(norm(CHANNELS))
        self.listed = [self.norms[0], scramble(nn.BatchNorm2d(CHANNELS))]
        self.steps = steps
        for name, number in decorated:
            DECORATIONS[name](self, number)

    def forward(self, x):
        kept = []
        for name, conv, norm in self.steps:
            x = STEPS[name](self.norms[norm], self.convs[conv](x), x, self.convs[conv], self, kept)
        return [x, *kept]


def half(module, inputs, output):
    return output / 2


def double(module, inputs):
    return (2 * inputs[0],)


def ordinary(conv):
    """Return whether the weight is a parameter, neither pruned nor parametrised."""
    return "weight" in conv._parameters


STEPS = {  # of the norm, what the convolution makes of x, x, the convolution, the network, what is kept
    "pair": lambda norm, y, *_: norm(y),
    "unused": lambda norm, y, x, *_: norm(x),
    "relu": lambda norm, y, *_: norm(y).relu(),
    "skip": lambda norm, y, *_: norm(y) + y,
    "residual": lambda norm, y, x, *_: norm(y) + x,
    "data": lambda norm, y, *_: norm(y) + y.data,
    "detached": lambda norm, y, *_: norm(y) + y.detach(),
    "transposed": lambda norm, y, *_: norm(y) + y.mT,
    "view": lambda norm, y, *_: norm(y.view_as(y)),
    "part": lambda norm, y, *_: norm(y) + y[:, :1],
    "later": lambda norm, y, x, conv, net, kept: kept.append(y) or norm(y),
    "earlier": lambda norm, y, x, conv, net, kept: norm(y) + sum(kept),
    "listed": lambda norm, y, x, conv, net, *_: net.listed[0](y),
    "unlisted": lambda norm, y, x, conv, net, *_: net.listed[1](y),
    "in place": lambda norm, y, *_: norm(y) + y.mul_(2),
    "tied": lambda norm, y, x, conv, *_: F.conv_transpose2d(norm(y), conv.weight, padding=1),
    "weight": lambda norm, y, *_: norm(y) * norm.weight.mean(),
    "chosen": lambda norm, y, x, conv, net, *_: net.norms[int(y.mean() > 0)](y),
    "chosen by a sum": lambda norm, y, x, *_: norm(y) if x.sum() > 0 else y,
    "chosen by item": lambda norm, y, x, *_: norm(y) if x.mean().item() > 0.5 else y,
    "chosen by a list": lambda norm, y, *_: norm(y) if sum(y.flatten().tolist()) > 0 else y,
    "chosen by NumPy": lambda norm, y, x, *_: norm(y) if x.numpy().mean() > 0.5 else y,
    "chosen by a count": lambda norm, y, x, *_: norm(y) if len(x[x > 1]) > 40 else y,
    "both": lambda norm, y, *_: torch.where(y.mean() > 0, norm(y), y),
}
OTHER_STEPS = {
    "random": lambda norm, y, *_: norm(y) + torch.rand(()),
    "object": lambda *_: object(),
    "failing": lambda norm, y, x, *_: x @ x.new_ones(1, 99),
}
DECORATIONS = {
    "hook": lambda net, n: net.norms[n].register_forward_hook(half),
    "hook on conv": lambda net, n: net.convs[n].register_forward_hook(half),
    "hook before": lambda net, n: net.convs[n].register_forward_pre_hook(double),
    "hook between": lambda net, n: net.norms[n].register_forward_pre_hook(double),
    "two names": lambda net, n: net.add_module("again", nn.Sequential(net.norms[n])),
    "two names of both": lambda net, n: net.add_module(
        "again", nn.Sequential(net.convs[n], net.norms[n])
    ),
    "conv's two names": lambda net, n: net.add_module("conv", net.convs[n]),
    "one weight": lambda net, n: (
        all(map(ordinary, net.convs)) and setattr(net.convs[n], "weight", net.convs[0].weight)
    ),
    "one bias of norms": lambda net, n: setattr(net.norms[n], "bias", net.norms[0].bias),
    "pruned": lambda net, n: (
        ordinary(net.convs[n]) and prune.l1_unstructured(net.convs[n], "weight", 0.5)
    ),
    "weight_norm": lambda net, n: ordinary(net.convs[n]) and weight_norm(net.convs[n]),
    "parametrised": lambda net, n: (
        ordinary(net.convs[n]) and parametrizations.weight_norm(net.convs[n])
    ),
    "forward": lambda net, n: setattr(net.convs[n], "forward", lambda x: x.relu() + 1),
}
CASES = {  # what a warning says, "" where the norm is folded: steps, and decorations of the first pair
    "": ("pair", "listed"),
    "more than once": ["pair, pair"],
    "read elsewhere": ("tied", "weight"),
    "cannot trace": ("unlisted", *(step for step in STEPS if step.startswith("chosen"))),
    "an input that others read": ("skip", "data", "transposed", "detached", "in place", "later"),
    "a second name": ("two names of both", "two names"),
    "pruning": ["pruned"],
    "a parametrisation": ["parametrised"],
    "hooks": ("hook", "hook on conv", "hook before", "hook between", "forward", "weight_norm"),
}
STEPS |= OTHER_STEPS


def cases():
    """Return steps, the norm that reads a convolution's output, and the reason for not folding it."""
    found = [("pair", 1, "")]
    for reason, names in CASES.items():
        found += [(name, 0, reason) for name in names]
    return found


@pytest.mark.parametrize("steps, norm, reason", cases())
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_is_folded_and_what_is_left_alone(steps, norm, reason, recwarn):
    if steps in DECORATIONS:
        model = Net([("pair", 0, norm)], [(steps, 0)])
    else:
        model = Net([(step, 0, norm) for step in steps.split(", ")])
    model = scramble(model)
    before = copy.deepcopy(model.state_dict())
    recwarn.clear()
    deployed = ea_vision.deploy(model)
    warnings = [str(warning.message) for warning in recwarn]
    said = [text for text in warnings if "deploy leaves" in text]
    norms = [module for module in deployed.modules() if isinstance(module, NORMS)]
    assert len(norms) == (3 if reason else 2)
    assert bool(said) == bool(reason), said
    assert all(reason in text for text in said), said
    same(model, deployed)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} has changed"


NUMBER = st.integers(0, 2)
DRAWN = [name for name in STEPS if name not in OTHER_STEPS]


STEP = st.tuples(st.sampled_from([*DRAWN, *["pair"] * 8]), NUMBER, NUMBER)
DECORATION = st.tuples(st.sampled_from(list(DECORATIONS)), NUMBER)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(steps=st.lists(STEP, min_size=1, max_size=4), decorated=st.lists(DECORATION, max_size=2))
@pytest.mark.filterwarnings("ignore:deploy leaves", "ignore:.*weight_norm.* is deprecated")
def test_generated_networks_give_the_same_or_are_refused(steps, decorated):
    torch.manual_seed(0)
    model = scramble(Net(steps, decorated))
    try:
        deployed = ea_vision.deploy(model)
    except (UsageError, RunError):
        return
    same(model, deployed)


@pytest.mark.parametrize(
    "step, kind, message",
    [
        (
            "random",
            RunError,
            "Net cannot be deployed: on noise of 6x6 .* outputs differ by .* run twice",
        ),
        ("object", UsageError, "a network that returns tensors is required, got object"),
        ("failing", UsageError, r"for images \(1, 3, 6, 6\) is required, and Net fails on one"),
    ],
)
def test_what_cannot_be_compared_is_refused(step, kind, message):
    model = scramble(Net([(step, 0, 0)]))
    with pytest.raises(kind, match=message):
        ea_vision.deploy(model)
