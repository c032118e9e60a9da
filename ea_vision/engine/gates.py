"""Values of learnable gates (alpha and beta of evolutions) by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ea_vision.layers import learnable_gates


def gate_values(model: nn.Module) -> dict[str, float]:
    """Return the gates that are parameters, by their names in the state dict; of one for each head NAME[0], NAME[1]."""
    values = {}
    for name, gate in learnable_gates(model).items():
        numbers = gate.detach().flatten().tolist()
        values |= {name: numbers[0]} if gate.ndim == 0 else {f"{name}[{i}]": v for i, v in enumerate(numbers)}
    return values


def by_gate(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Return what `gate_values` gives as lists by alpha and beta."""
    lists: dict[str, list[float]] = {}
    for path, value in values.items():
        lists.setdefault(path.rpartition(".")[2].partition("[")[0], []).append(value)
    return lists
