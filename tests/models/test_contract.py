"""What `evolve` promises of every network: it begins as the plain one, shares its parameters, goes back, learns, and
reloads strictly. A new family adds its rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import pytest
import torch

from ea_vision import evolve, unevolve
from tests.models import test_any_transformer as transformers_of_timm
from tests.models import test_evolve_resnet as resnets
from tests.models import test_huggingface as huggingface
from tests.models.zoo import KINDS, idle, images, stepped
from tests.refused import refused


@dataclass(frozen=True)
class Row:
    """A network of the table.

    Attributes:
        create: returns the plain network, in evaluation mode.
        run: network -> output.
        step: takes a step of training, and returns the network with the gradients of the next one.
        kinds: those that the network takes.
        options: of `evolve`.
        exact: whether the evolved network begins as the plain one to the bit.
        added: every new parameter's name contains one of these.
        unmoved: ends of the names of new parameters whose gradients cancel.
        reload: the network that has learned, a folder -> one that is loaded from there; None: its state is loaded.
    """

    create: Callable
    run: Callable
    step: Callable
    kinds: tuple
    options: dict = field(default_factory=dict)
    exact: bool = False
    added: tuple[str, ...] = ("",)
    unmoved: tuple[str, ...] = ()
    reload: Callable | None = None


def run_on(size, model):
    return model(images(*size))


def step_on(size, model):
    return stepped(model, images(*size))


ROWS = {}
for name in transformers_of_timm.NAMES:
    size = transformers_of_timm.size_of(name)
    ROWS[name] = Row(
        partial(transformers_of_timm.create, name),
        partial(run_on, size),
        partial(step_on, size),
        (*KINDS, None),
        {"token_conv": True, "value_residual": True},
        added=(".evolution.", ".value_residual.", ".token_conv."),
        unmoved=("proj_l.bias", "convs.0.weight", "convs.0.bias"),
    )
for name in resnets.NAMES:
    ROWS[name] = Row(
        partial(resnets.plain_network, name),
        partial(run_on, (64, 64)),
        partial(step_on, (64, 64)),
        ("ea", None),
        exact=True,
    )
for name in huggingface.FAMILIES:
    ROWS[f"transformers' {name}"] = Row(
        partial(huggingface.create, name),
        huggingface.output,
        huggingface.stepped,
        tuple(huggingface.kinds_of(name)),
        {"value_residual": True, "token_conv": name in huggingface.IMAGES},
        added=(".maps.", ".token_conv."),
        unmoved=("proj_l.bias",),  # the softmax cancels it
        reload=huggingface.reloaded,
    )
CASES = []
for name, row in ROWS.items():
    CASES += [(name, kind, row.options) for kind in row.kinds]
for name, option in product(transformers_of_timm.NAMES, ("token_conv", "value_residual")):
    CASES.append((name, None, {option: True}))


def assert_same(actual, expected, exact):
    if exact:
        assert torch.equal(actual, expected)
    else:
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name, kind, options", CASES)
def test_begins_as_the_plain_network_goes_back_learns_and_reloads(name, kind, options, tmp_path):
    row = ROWS[name]
    plain = row.create()
    layout = repr(plain)
    with torch.no_grad():
        expected = row.run(plain)
    evolved = evolve(plain, kind, **options)
    with torch.no_grad():
        assert_same(row.run(evolved), expected, row.exact)
    shared = {id(parameter) for parameter in plain.parameters()}
    assert shared <= {id(parameter) for parameter in evolved.parameters()}
    new = [key for key, parameter in evolved.named_parameters() if id(parameter) not in shared]
    assert new
    for key in new:
        assert any(part in key for part in row.added), key

    back = unevolve(evolved)
    assert type(back) is type(plain)
    assert repr(back) == repr(plain) == layout
    saved = {"_model_args"}  # which timm before 1.0.30 does not set
    assert back.__dict__.keys() | saved == plain.__dict__.keys() | saved
    assert getattr(back, "pretrained_cfg", None) == getattr(plain, "pretrained_cfg", None)
    assert {id(parameter) for parameter in back.parameters()} == shared
    back.load_state_dict(plain.state_dict())  # strictly
    with torch.no_grad():
        assert torch.equal(row.run(back), expected)
        assert torch.equal(row.run(plain), expected)

    row.step(evolved)
    assert [key for key in set(new) & set(idle(evolved)) if not key.endswith(row.unmoved)] == []
    with refused(r"must be 0.*got \d+ .*the first of them", ValueError):
        unevolve(evolved)
    if row.reload is None:
        again = evolve(row.create(), kind, **options)
        again.load_state_dict(evolved.state_dict())
    else:
        again = row.reload(evolved, tmp_path)
    assert type(again) is type(evolved)
    with torch.no_grad():
        learned = row.run(evolved.eval())
        assert_same(row.run(again.eval()), learned, row.reload is not None)
        assert (learned - expected).abs().max() > 1e-3 * expected.abs().max()
