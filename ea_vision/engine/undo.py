"""An update that must not count is undone on the device, without the host knowing.

What an update changes is kept before it and put back after it where a flag on the device says so: weights, batch
statistics, averaged weights and the optimiser's tensors. Whatever the optimiser, and with a handful of kernels for all
tensors together: they are copied into one piece for each type, chosen from there, and copied back.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn


class Undo:
    """Takes back what was done since `begin`, for a model, its averaged weights, if any, and its optimiser.

    The cost of an update: the state of the run is moved nine times through the device's memory (written or read), and
    a second copy of it is kept. On a CPU it is moved twice, unless there is something to undo.

    Parameters and buffers are those that the model has at the first `begin`, which must change them in place, as all
    norms do. What an optimiser counts in main memory (Adam's and timm's steps, Lookahead's) cannot be undone from the
    device and goes on counting. Tensors that an optimiser makes in its first steps have no earlier value: where there
    are new ones, or others in place of the old, and only then, the host waits for the flag, and takes them away again.
    """

    def __init__(self, device: torch.device, model: nn.Module, averaged: ModelEmaV3 | None,
                 optimizer: torch.optim.Optimizer):
        self.device, self.model, self.averaged, self.optimizer = device, model, averaged, optimizer
        self._of_models: list[torch.Tensor] = []
        self._of_optimizer: list[torch.Tensor] = []
        self._entries: dict[Any, dict[str, Any]] = {}  # what the optimiser had of each parameter before the update
        self._state: _State | None = None

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the state as it is now."""
        state = self.optimizer.state_dict()
        self._entries = {key: dict(entry) for key, entry in state["state"].items()}
        tensors = _tensors_in(state)
        if self._state is None or not _same(tensors, self._of_optimizer):
            if self._state is None:
                self._of_models = _tensors_in(self.model.state_dict(keep_vars=True))
                if self.averaged is not None:
                    self._of_models += _tensors_in(self.averaged.module.state_dict(keep_vars=True))
            self._of_optimizer = tensors
            self._state = _State([tensor for tensor in self._of_models + tensors
                                  if tensor.device.type == self.device.type])
        self._state.keep()

    @torch.no_grad()
    def end(self, fine: torch.Tensor) -> None:
        """Go back to the state of `begin`, unless `fine`, a boolean () on the device, is true."""
        if self.device.type == "cpu" and fine.item():  # it is at hand
            return
        state = self.optimizer.state_dict()
        if not _same(_tensors_in(state), self._of_optimizer):
            if fine.item():
                return
            for key, entry in state["state"].items():  # the optimiser's own dicts
                entry.clear()
                entry.update(self._entries.get(key, {}))
        self._state.choose(fine)


class _State:
    """Tensors, a copy of them, and what is needed to write them all at once."""

    def __init__(self, tensors: list[torch.Tensor]):
        self._views: dict[torch.dtype, list[torch.Tensor]] = {}  # of one type, flat
        self._loose: list[tuple[torch.Tensor, torch.Tensor]] = []  # what no view flattens (a column), with its copy
        for tensor in tensors:
            on_itself = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
            if not tensor.numel() or on_itself:  # an expanded buffer: nothing changes that in place
                continue
            try:
                flat = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).view(-1)
                self._views.setdefault(tensor.dtype, []).append(flat)
            except RuntimeError:
                self._loose.append((tensor.detach(), torch.empty_like(tensor)))
        self._sizes = {kind: [view.numel() for view in views] for kind, views in self._views.items()}
        self._kept = {kind: torch.empty_like(torch.cat(views)) for kind, views in self._views.items()}

    def keep(self) -> None:
        for kind, views in self._views.items():
            torch.cat(views, out=self._kept[kind])
        for tensor, copy in self._loose:
            copy.copy_(tensor)

    def choose(self, fine: torch.Tensor) -> None:
        """Leave the tensors as they are where `fine`, else give them what was kept."""
        for kind, views in self._views.items():
            chosen = torch.where(fine, torch.cat(views), self._kept[kind])
            torch.split_with_sizes_copy(chosen, self._sizes[kind], out=views)
        for tensor, copy in self._loose:
            tensor.copy_(torch.where(fine, tensor, copy))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested state, in its order."""
    found = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (dict, list, tuple)):
            found += _tensors_in(item)
    return found


def _same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether these are the very same tensors."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))
