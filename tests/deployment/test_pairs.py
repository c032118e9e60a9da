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
    """Assert that two networks give the same on several images, several outputs included."""
    for x in images():
        with torch.no_grad():
            for own, got in zip(*(y if isinstance(y, list) else [y] for y in (model(x), deployed(x))), strict=True):
                assert (own - got).abs().max() <= 1e-4 * own.abs().max().clamp(min=1e-3)


class Net(nn.Module):
    """A convolution, a norm, and what happens between."""

    def __init__(self, forward, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(CHANNELS, CHANNELS, 1), norm(CHANNELS), norm(CHANNELS)
        self.way = forward

    def forward(self, x):
        return self.way(self, x)


def plain(net, x):
    return net.norm(net.conv(x))


def after(change, way=plain):
    """Return a `Net` changed by a function."""
    net = Net(way)
    change(net)
    return net


def body_listed_again():
    """An encoder that lists its body's layers once more, as segmentation networks do."""
    net = Net(lambda net, x: net.stages(x))
    net.stages = nn.Sequential(net.conv, net.norm)
    return net


def half(module, inputs, output):
    return output / 2


def double(module, inputs):
    return (2 * inputs[0],)


def unregistered(way):
    """A norm that a plain list holds, and no name."""
    net = Net(way)
    net.listed = [scramble(nn.BatchNorm2d(CHANNELS))]
    return net


def skipped(alias):
    """A skip over the norm, by an alias of what the convolution gives."""
    def way(net, x):
        y = net.conv(x)
        return net.norm(y) + alias(y)

    return Net(way)


def chosen(question):
    """A norm chosen by what the convolution gives."""
    def way(net, x):
        return (net.norm if question(x) else net.other)(net.conv(x))

    return Net(way)


def in_place(net, x):
    y = net.conv(x)
    z = net.norm(y)
    return z + y.relu_()


FOLDED, ALONE = 1, 2  # norms left, of two
CASES = {  # name: (network, norms that are left, reason in the warning)
    "plain": (lambda: Net(plain), FOLDED, ""),
    "with an activation": (lambda: Net(plain, BatchNormAct2d), FOLDED, ""),
    "a norm in a plain list, too": (lambda: after(
        lambda net: setattr(net, "listed", [net.norm]), lambda net, x: net.listed[0](net.conv(x))), FOLDED, ""),
    "a norm in a plain list alone": (
        lambda: unregistered(lambda net, x: net.listed[0](net.conv(x))), ALONE, "cannot trace"),
    "two names: an encoder": (body_listed_again, ALONE, "a second name"),
    "two names: Sequential": (
        lambda: after(lambda net: setattr(net, "again", nn.Sequential(net.norm))), ALONE, "a second name"),
    "run twice": (lambda: Net(lambda net, x: plain(net, plain(net, x))), ALONE, "more than once"),
    "a hook on the norm": (lambda: after(lambda net: net.norm.register_forward_hook(half)), ALONE, "hooks"),
    "a hook on the convolution": (lambda: after(lambda net: net.conv.register_forward_hook(half)), ALONE, "hooks"),
    "a hook before": (lambda: after(lambda net: net.conv.register_forward_pre_hook(double)), ALONE, "hooks"),
    "a hook between": (lambda: after(lambda net: net.norm.register_forward_pre_hook(double)), ALONE, "hooks"),
    "another forward": (lambda: after(lambda net: setattr(net.conv, "forward", lambda x: 3 * x)), ALONE, "hooks"),
    "pruned": (lambda: after(lambda net: prune.l1_unstructured(net.conv, "weight", 0.5)), ALONE, "pruning"),
    "weight_norm": (lambda: after(lambda net: weight_norm(net.conv)), ALONE, "hooks"),
    "parametrised": (lambda: after(lambda net: parametrizations.weight_norm(net.conv)), ALONE, "a parametrisation"),
    "a tied weight": (lambda: Net(
        lambda net, x: F.conv_transpose2d(net.norm(net.conv(x)), net.conv.weight)), ALONE, "read elsewhere"),
    "a norm's weight is read": (
        lambda: Net(lambda net, x: plain(net, x) + net.norm.weight.sum()), ALONE, "read elsewhere"),
    "a skip": (lambda: skipped(lambda y: y), ALONE, "read past"),
    "a skip by data": (lambda: skipped(lambda y: y.data), ALONE, "read past"),
    "a skip by mT": (lambda: skipped(lambda y: y.mT), ALONE, "read past"),
    "a skip by detach": (lambda: skipped(lambda y: y.detach()), ALONE, "read past"),
    "a change in place": (lambda: Net(in_place), ALONE, "read past"),
    "returned": (lambda: Net(lambda net, x: [y := net.conv(x), net.norm(y)]), ALONE, "read past"),
    "chosen by a sum": (lambda: chosen(lambda x: x.sum() > 0), ALONE, "cannot trace"),
    "chosen by item": (lambda: chosen(lambda x: x.mean().item() > 0.5), ALONE, "cannot trace"),
    "chosen by a list": (lambda: chosen(lambda x: x.flatten().tolist()[0] > 1), ALONE, "cannot trace"),
    "chosen by NumPy": (lambda: chosen(lambda x: x.numpy().mean() > 0.5), ALONE, "cannot trace"),
    "chosen by a count": (lambda: chosen(lambda x: len(x[x > 1]) > 40), ALONE, "cannot trace"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_is_folded_and_what_is_left_alone(case, recwarn):
    make, left, reason = CASES[case]
    model = scramble(make())
    before = copy.deepcopy({name: value.detach() for name, value in model.state_dict().items()})
    recwarn.clear()
    deployed = ea_vision.deploy(model)
    said = [str(warning.message) for warning in recwarn if "deploy leaves" in str(warning.message)]
    assert sum(isinstance(module, NORMS) for module in deployed.modules()) == left
    assert bool(said) == bool(reason) and all(reason in text for text in said), said
    same(model, deployed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "it has changed"


class Generated(nn.Module):
    """A network of drawn steps; each takes a tensor of CHANNELS and gives one."""

    def __init__(self, steps, decorated):
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


STEPS = {
    "pair": lambda net, x, y, conv, norm, kept: norm(y),
    "unused": lambda net, x, y, conv, norm, kept: norm(x),
    "relu": lambda net, x, y, conv, norm, kept: norm(y).relu(),
    "skip": lambda net, x, y, conv, norm, kept: norm(y) + y,
    "residual": lambda net, x, y, conv, norm, kept: norm(y) + x,
    "data": lambda net, x, y, conv, norm, kept: norm(y) + y.data,
    "transposed": lambda net, x, y, conv, norm, kept: norm(y) + y.mT,
    "view": lambda net, x, y, conv, norm, kept: norm(y.view_as(y)),
    "part": lambda net, x, y, conv, norm, kept: norm(y) + y[:, :1],
    "later": lambda net, x, y, conv, norm, kept: kept.append(y) or norm(y),
    "earlier": lambda net, x, y, conv, norm, kept: norm(y) + sum(kept),
    "listed": lambda net, x, y, conv, norm, kept: net.listed[0](y),
    "unlisted": lambda net, x, y, conv, norm, kept: net.listed[1](y),
    "in place": lambda net, x, y, conv, norm, kept: norm(y) + y.mul_(2),
    "tied": lambda net, x, y, conv, norm, kept: F.conv2d(norm(y), conv.weight, padding=1),
    "weight": lambda net, x, y, conv, norm, kept: norm(y) * norm.weight.mean(),
    "chosen": lambda net, x, y, conv, norm, kept: net.norms[int(y.mean() > 0)](y),
    "chosen by one": lambda net, x, y, conv, norm, kept: norm(y) if y.flatten().tolist()[0] > 0 else y,
    "both": lambda net, x, y, conv, norm, kept: torch.where(y.mean() > 0, norm(y), y),
}
def ordinary(conv: nn.Module) -> bool:
    """Return whether the weight is a parameter, neither pruned nor parametrised."""
    return "weight" in conv._parameters


DECORATIONS = {
    "hook": lambda net, n: net.norms[n].register_forward_hook(half),
    "hook on conv": lambda net, n: net.convs[n].register_forward_hook(half),
    "hook before": lambda net, n: net.convs[n].register_forward_pre_hook(double),
    "two names": lambda net, n: net.add_module("again", nn.Sequential(net.norms[n])),
    "conv's two names": lambda net, n: net.add_module("conv", net.convs[n]),
    "one weight": lambda net, n: all(map(ordinary, net.convs)) and setattr(net.convs[n], "weight", net.convs[0].weight),
    "one bias of norms": lambda net, n: setattr(net.norms[n], "bias", net.norms[0].bias),
    "pruned": lambda net, n: ordinary(net.convs[n]) and prune.l1_unstructured(net.convs[n], "weight", 0.5),
    "parametrised": lambda net, n: ordinary(net.convs[n]) and parametrizations.weight_norm(net.convs[n]),
    "forward": lambda net, n: setattr(net.convs[n], "forward", lambda x: x.relu() + 1),
}
NUMBER = st.integers(0, 2)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from([*STEPS, *["pair"] * 8]), NUMBER, NUMBER), min_size=1, max_size=4),
       decorated=st.lists(st.tuples(st.sampled_from(list(DECORATIONS)), NUMBER), max_size=2))
@pytest.mark.filterwarnings("ignore:deploy leaves")
def test_generated_networks_give_the_same_or_are_refused(steps, decorated):
    torch.manual_seed(0)
    model = scramble(Generated(steps, decorated))
    try:
        deployed = ea_vision.deploy(model)
    except (UsageError, RunError):
        return
    same(model, deployed)


def test_a_network_that_gives_something_else_each_time_is_refused():
    model = scramble(Net(lambda net, x: plain(net, x) + torch.rand(())))
    with pytest.raises(RunError, match="Net cannot be deployed: on noise its copy's outputs differ by .* run twice"):
        ea_vision.deploy(model)


@pytest.mark.parametrize("way, message", [
    (lambda net, x: object(), "a network that gives tensors is required, .* got object"),
    (lambda net, x: x @ x.new_ones(1, 99), "a network for images \\(1, 3, 6, 6\\) is required, and Net fails on one"),
])
def test_what_is_no_network_of_images_is_refused(way, message):
    with pytest.raises(UsageError, match=message):
        ea_vision.deploy(scramble(Net(way)))
