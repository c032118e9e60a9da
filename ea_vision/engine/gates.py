"""Learnable gates (alpha and beta of evolutions) in a run: their ramp to fixed values, and their values by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.layers import learnable_gates


def check_gate_ramp(ramp: Mapping[str, object]) -> None:
    """Raise UsageError unless these are gates by name."""
    for name, value in ramp.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0.0 <= value <= 1.0):
            raise UsageError(f"gate_ramp must give each gate a number from 0 to 1, got {name}={value}")


def gate_values(model: nn.Module) -> dict[str, float]:
    """The gates that are parameters, by their names in the state dict; of one for each head NAME[0], NAME[1], ..."""
    values = {}
    for name, gate in learnable_gates(model).items():
        numbers = gate.detach().flatten().tolist()
        values |= {name: numbers[0]} if gate.ndim == 0 else {f"{name}[{i}]": v for i, v in enumerate(numbers)}
    return values


def by_gate(values: Mapping[str, float]) -> dict[str, list[float]]:
    """What `gate_values` gives, in lists by alpha and beta."""
    lists: dict[str, list[float]] = {}
    for path, value in values.items():
        lists.setdefault(path.rpartition(".")[2].partition("[")[0], []).append(value)
    return lists


class GateRamp:
    """Raises gates linearly from where a model has them to fixed values, over the first updates of a run.

    The gates it is given are not learnt any more: they are frozen, so that the implementations that take them as
    numbers run. What is left of the way is all that an update looks at, so a run goes on from any checkpoint.

    Args:
        ends: gate by name, such as {"alpha": 0.5, "beta": 1.0}; others than these stay as they are.
        updates: after which the gates have these values; 0: at once.

    Raises:
        UsageError: the model has no learnable gate of a name.
    """

    def __init__(self, model: nn.Module, ends: Mapping[str, float], updates: int):
        self.ends, self.updates = dict(ends), updates
        known = {path.rpartition(".")[2] for path in learnable_gates(model)}
        foreign = sorted(set(ends) - known)
        if foreign:
            has = f"those of this model are {', '.join(sorted(known))}" if known else "and this model has none"
            raise UsageError(f"gate_ramp is for learnable gates, {has}; got {', '.join(foreign)}")
        for gate, _ in self._gates(model):
            gate.requires_grad_(False)
        if updates == 0:
            self.update(model, 0)

    def _gates(self, model: nn.Module) -> list[tuple[nn.Parameter, float]]:
        """The gates, each with its value at the end."""
        named = ((gate, path.rpartition(".")[2]) for path, gate in learnable_gates(model).items())
        return [(gate, self.ends[name]) for gate, name in named if name in self.ends]

    @torch.no_grad()
    def update(self, model: nn.Module, done: int) -> None:
        """Set the gates to those after `done` updates; call it after each."""
        for gate, end in self._gates(model):
            if done < self.updates:
                gate.add_((end - gate) / (self.updates - done + 1))
            else:
                gate.fill_(end)

    @torch.no_grad()
    def copy(self, model: nn.Module, averaged: nn.Module) -> None:
        """Give averaged weights the gates as they are: an average would lag behind the ramp."""
        for (gate, _), (other, _) in zip(self._gates(model), self._gates(averaged), strict=True):
            other.copy_(gate)
