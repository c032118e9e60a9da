"""The note in a weights file: the network's name and the keywords that its weights were trained with.

A note stands in the metadata of a safetensors file and, for networks of ea_vision, in a tensor of bytes among its
weights. A network that loads the weights checks it: some keywords may change, the others must agree.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.layers import evolution_options, learnable_gates
from ea_vision.models._attention_config import AttentionConfig

NOTE = "made_with"  # name of the metadata entry and of the tensor
# Keywords that change training, input or output, but not the trained function.
FREE = {
    "num_classes",
    "in_chans",
    "img_size",
    "dynamic_img_size",
    "dynamic_img_pad",
    "global_pool",
    "zero_init_last",
    "start",
    "learnable",
    "features_only",
    "feature_cls",
    "out_indices",
    "output_fmt",
    "device",
    "dtype",
    "cache_dir",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_model_args",
}


def is_free(key: str) -> bool:
    """Return whether a network may have another value of this keyword than its weights were trained with."""
    return key in FREE or "drop" in key


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a safetensors file's header.

    Raises:
        OSError, ValueError: it cannot be read, or is not a safetensors file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    return header.get("__metadata__", {})


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the note of a weights file, or None if it has none.

    Returns:
        model, its registered name; model_kwargs; and for a run of ours also task, classes, mean, std.
    """
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return None
    try:
        note = read_metadata(path).get(NOTE)
    except (OSError, ValueError, AttributeError):  # reading the weights reports the error
        return None
    return json.loads(note) if note else None


def with_note(state: Mapping[str, Tensor], note: str) -> dict[str, Tensor]:
    """Return weights with a note as a tensor of bytes.

    timm's `checkpoint_path=` passes the tensors of a file to a network, but not its metadata. Networks of ea_vision
    remove the note and check it; `ea_vision.zoo.weights_file.read_weights` removes it.
    """
    return {**state, NOTE: torch.frombuffer(bytearray(note, "utf-8"), dtype=torch.uint8)}


@dataclass(frozen=True)
class TrainedKeywords:
    """The keywords that weights were trained with.

    Attributes:
        source: name or path of the weights, for messages.
        kwargs: all keywords of their network.
    """

    source: str
    kwargs: Mapping[str, Any]

    def missing(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that the weights need and that `kwargs` does not name."""
        return {
            key: value
            for key, value in self.kwargs.items()
            if key not in kwargs and not is_free(key)
        }

    def defaults(self, kwargs: Mapping[str, Any], model_cls: type[nn.Module]) -> dict[str, Any]:
        """Return the default values that a network built with `kwargs` has for the `missing` keywords."""
        return {name: _default(model_cls, name) for name in self.missing(kwargs)}


Check = Callable[[Mapping[str, Any], nn.Module], None]


def check_notes(model: nn.Module, check: Check) -> None:
    """Let `model.load_state_dict` remove the note from weights (see `with_note`), and check it.

    check: called with the note's content and the model; raises UsageError if the weights are another network's.
    """
    model.register_load_state_dict_pre_hook(partial(_take_note, check))


def _take_note(
    check: Check, model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    note = state.pop(prefix + NOTE, None)
    if note is not None:
        check(json.loads(bytes(note.tolist())), model)


def fixed(kwargs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the keywords without learned gates: the weights contain these."""
    learned = {name.rpartition(".")[2] for name in learnable_gates(model)}
    return {key: value for key, value in kwargs.items() if key not in learned}


def check_agreement(
    trained: TrainedKeywords, kwargs: Mapping[str, Any], model_cls: type[nn.Module]
) -> None:
    """Raise UsageError if a network's keywords contradict those that its weights were trained with.

    Args:
        kwargs: of the network; a missing keyword takes the weights' value.
        model_cls: the network's class; its defaults complete the weights' keywords.
    """
    for key, value in kwargs.items():
        if is_free(key):
            continue
        expected = trained.kwargs[key] if key in trained.kwargs else _default(model_cls, key)
        if _comparable(value) == _comparable(expected):
            continue
        if key in evolution_options() and _same_evolution(
            trained.kwargs, {**trained.kwargs, key: value}
        ):
            continue
        wording = f"{key}={expected}"
        if key not in trained.kwargs and expected is None:
            wording = f"the default {key}"
        raise UsageError(
            f"the weights {trained.source} were trained with {wording}, got {key}={value}"
        )


def _default(model_cls: type[nn.Module], key: str) -> Any:
    """Return the default value of a network's keyword, or None if it is not known."""
    defaults = {field.name: field.default for field in fields(AttentionConfig)}
    for name, parameter in inspect.signature(model_cls).parameters.items():
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    return defaults.get(key)


def _same_evolution(*networks: Mapping[str, Any]) -> bool:
    """Return whether the keywords of two networks create evolutions with the same modules and gates."""
    described = []
    for keywords in networks:
        evolution = AttentionConfig.take(dict(keywords)).new_evolution()
        gates = {} if evolution is None else evolution.gates()
        values = {name: torch.as_tensor(gate).tolist() for name, gate in gates.items()}
        described.append((repr(evolution), values))
    return described[0] == described[1]


def _comparable(value: Any) -> Any:
    """Return a value with its tuples turned into lists, as JSON and YAML store them."""
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return value


# ---- evolved networks ------------------------------------------------------------------------------------------------

EVOLVED = (
    "evolved_transformer"  # the registered name that builds any evolved network of timm's again
)


def remember_evolution(evolving: nn.Module, evolution: Mapping[str, Any]) -> None:
    """Let timm's `save_for_hf` save how to build an evolved network again, and let loading check its weights.

    Only timm's networks can be saved so: torchvision's have no name.

    Args:
        evolution: the keywords of `ea_vision.evolve`.
    """
    check_notes(evolving, partial(_check_evolution, dict(evolution)))
    cfg = getattr(evolving, "pretrained_cfg", None)
    if not cfg:
        return
    plain = getattr(evolving, "_model_args", {})
    evolving._model_args = {**plain, "base": cfg["architecture"], "evolution": dict(evolution)}
    evolving.pretrained_cfg = {**cfg, "architecture": EVOLVED}
    evolving.default_cfg = evolving.pretrained_cfg


def _check_evolution(
    evolution: Mapping[str, Any], note: Mapping[str, Any], model: nn.Module
) -> None:
    """Raise UsageError if weights say that they were trained with another evolution than the network's."""
    if note["model"] != EVOLVED:
        return
    noted = {"kind": "ea", **(note["model_kwargs"].get("evolution") or {})}
    for key, value in fixed(evolution, model).items():
        trained = noted.get(key)
        if is_free(key) or _comparable(trained) == _comparable(value):
            continue
        if key == "kind" or None not in (trained, value):  # None: not said
            raise UsageError(
                f"the weights were trained with evolution {key}={trained}, got {key}={value}"
            )


def forget_evolution(plain: nn.Module) -> None:
    """Undo `remember_evolution`."""
    for key, hook in list(plain._load_state_dict_pre_hooks.items()):
        take_note = getattr(hook, "hook", None)
        check = take_note.args[0] if isinstance(take_note, partial) else None
        if isinstance(check, partial) and check.func is _check_evolution:
            del plain._load_state_dict_pre_hooks[key]
    saved = dict(getattr(plain, "_model_args", {}))
    if "base" not in saved:
        return
    saved.pop("evolution")
    plain.pretrained_cfg = {**plain.pretrained_cfg, "architecture": saved.pop("base")}
    plain.default_cfg = plain.pretrained_cfg
    plain._model_args = saved
