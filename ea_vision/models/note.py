"""The note in a weights file: the network's name and the keywords that its weights were trained with.

A note stands in the metadata of a safetensors file and, for networks of ea_vision, in a tensor of bytes among its
weights. A network that loads the weights checks it: some keywords may change, the others must agree.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import fields
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


def take_note(state: dict[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Remove the note of `with_note` from weights; return its content, or None if there is none."""
    note = state.pop(prefix + NOTE, None)
    return None if note is None else json.loads(bytes(note.tolist()))


def fixed(kwargs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the keywords without learned gates: the weights contain these."""
    learned = {name.rpartition(".")[2] for name in learnable_gates(model)}
    return {key: value for key, value in kwargs.items() if key not in learned}


def check_agreement(
    opening: str, trained: Mapping[str, Any], kwargs: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise UsageError if a network's keywords contradict those that its weights were trained with.

    Args:
        opening: of the message, up to the keyword.
        trained: the keywords of the weights' network.
        kwargs: of the network; a missing keyword takes the weights' value.
        defaults: values of the keywords that the weights' network was not given.
    """
    for key, value in kwargs.items():
        expected = trained.get(key, defaults.get(key))
        if is_free(key) or _comparable(value) == _comparable(expected):
            continue
        compares_evolutions = "kind" not in trained and key in evolution_options()
        if compares_evolutions and _same_evolution(trained, {**trained, key: value}):
            continue
        wording = f"{key}={expected}"
        if key not in trained and expected is None:
            wording = f"the default {key}"
        raise UsageError(f"{opening} {wording}, got {key}={value}")


def defaults_of(model_cls: type[nn.Module]) -> dict[str, Any]:
    """Return the default values of the keywords of a network's class."""
    defaults = {field.name: field.default for field in fields(AttentionConfig)}
    for name, parameter in inspect.signature(model_cls).parameters.items():
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    return defaults


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
    check = partial(_check_evolution, dict(evolution))
    evolving.register_load_state_dict_pre_hook(check)
    cfg = getattr(evolving, "pretrained_cfg", None)
    if not cfg:
        return
    plain = getattr(evolving, "_model_args", {})
    evolving._model_args = {**plain, "base": cfg["architecture"], "evolution": dict(evolution)}
    evolving.pretrained_cfg = evolving.default_cfg = {**cfg, "architecture": EVOLVED}


def _check_evolution(
    evolution: Mapping[str, Any], model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Raise UsageError if weights say that they were trained with another evolution than the network's."""
    note = take_note(state, prefix)
    if note is None or note["model"] != EVOLVED:
        return
    trained = {"kind": "ea", **(note["model_kwargs"].get("evolution") or {})}
    stated = {
        key: value
        for key, value in fixed(evolution, model).items()
        if key == "kind" or None not in (trained.get(key), value)  # None: not said
    }
    check_agreement("the weights were trained with evolution", trained, stated, defaults={})


def forget_evolution(plain: nn.Module) -> None:
    """Undo `remember_evolution`."""
    for key, hook in list(plain._load_state_dict_pre_hooks.items()):
        check = getattr(hook, "hook", None)
        if isinstance(check, partial) and check.func is _check_evolution:
            del plain._load_state_dict_pre_hooks[key]
    saved = dict(getattr(plain, "_model_args", {}))
    if "base" not in saved:
        return
    saved.pop("evolution")
    cfg = {**plain.pretrained_cfg, "architecture": saved.pop("base")}
    plain.pretrained_cfg = plain.default_cfg = cfg
    plain._model_args = saved
