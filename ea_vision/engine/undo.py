"""An update that must not count is undone on the device, without the host knowing.

What an update changes is kept before it and put back after it where a flag on the device says so: weights, batch
statistics, averaged weights and the optimiser's tensors. Whatever the optimiser, and with a handful of kernels for all
tensors together: they are copied into one piece for each type, chosen from there, and copied back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

Path = tuple[Any, ...]


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
        self._of_models: dict[Path, torch.Tensor] | None = None
        self._entries: dict[Any, dict[str, Any]] = {}  # what the optimiser had of each parameter before the update
        self._state = _State({})

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the state as it is now."""
        if self._of_models is None:
            models = {"model": self.model} | ({"averaged": self.averaged.module} if self.averaged is not None else {})
            self._of_models = dict(self._on_device({name: model.state_dict(keep_vars=True)
                                                    for name, model in models.items()}))
        state = self.optimizer.state_dict()
        self._entries = {key: dict(entry) for key, entry in state["state"].items()}
        tensors = {**self._of_models, **dict(self._on_device(state))}
        if not self._state.is_of(tensors):
            self._state = _State(tensors)
        self._state.keep()

    @torch.no_grad()
    def end(self, fine: torch.Tensor) -> None:
        """Go back to the state of `begin`, unless `fine`, a boolean () on the device, is true."""
        if self.device.type == "cpu" and fine.item():  # it is at hand
            return
        kept, tensors = self._state, {**self._of_models, **dict(self._on_device(self.optimizer.state_dict()))}
        if not kept.is_of(tensors):
            if fine.item():
                return
            for key, entry in self.optimizer.state_dict()["state"].items():  # the optimiser's own dicts
                entry.clear()
                entry.update(self._entries.get(key, {}))
        kept.choose(fine)

    def _on_device(self, state: dict[str, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
        for path, tensor in _tensors_in(state, ()):
            on_itself = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
            if tensor.device.type == self.device.type and tensor.numel() and not on_itself:  # nothing changes that
                yield path, tensor


class _State:
    """Tensors by name, a copy of them, and what is needed to write them all at once."""

    def __init__(self, tensors: dict[Path, torch.Tensor]):
        self.tensors = tensors
        self._views: dict[torch.dtype, list[torch.Tensor]] = {}  # of one type, flat
        self._loose: list[tuple[torch.Tensor, torch.Tensor]] = []  # what no view flattens (a column), with its copy
        for tensor in tensors.values():
            try:
                flat = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).view(-1)
                self._views.setdefault(tensor.dtype, []).append(flat)
            except RuntimeError:
                self._loose.append((tensor.detach(), torch.empty_like(tensor)))
        self._kept = {kind: torch.empty_like(torch.cat(views)) for kind, views in self._views.items()}

    def is_of(self, tensors: dict[Path, torch.Tensor]) -> bool:
        """Whether these are the very same tensors."""
        return len(tensors) == len(self.tensors) and all(
            tensor is self.tensors.get(path) for path, tensor in tensors.items())

    def keep(self) -> None:
        for kind, views in self._views.items():
            torch.cat(views, out=self._kept[kind])
        for tensor, copy in self._loose:
            copy.copy_(tensor)

    def choose(self, fine: torch.Tensor) -> None:
        """Leave the tensors as they are where `fine`, else give them what was kept."""
        for kind, views in self._views.items():
            chosen = torch.where(fine, torch.cat(views), self._kept[kind])
            torch.split_with_sizes_copy(chosen, [view.numel() for view in views], out=views)
        for tensor, copy in self._loose:
            tensor.copy_(torch.where(fine, tensor, copy))


def _tensors_in(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a nested state with the keys that lead to them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, (*path, key))
