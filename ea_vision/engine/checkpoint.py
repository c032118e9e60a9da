"""Checkpoints: one safetensors file, no pickle. Tensors are stored as such, all else as JSON in the file's metadata,
and a SHA-256 over both tells damage. Files are written beside their place, synced and renamed: a reader, or a machine
that loses power, finds the old file or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from ea_vision.base.networks import digest_of

FORMAT = "ea_vision-checkpoint-1"
LAST, PREVIOUS, BEST = "last.ckpt", "last.prev.ckpt", "best.ckpt"


class DamagedCheckpoint(ValueError):
    """A file that is no checkpoint of ours, or not the one that was written."""


def _flatten(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Move the tensors of a nested state into `tensors`; return JSON that says where they were."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu().contiguous()
        return {"__tensor__": name}
    if isinstance(value, dict):  # as a list of pairs, for JSON would turn the optimiser's integer keys into text
        return {"__dict__": [[k, _flatten(v, f"{name}.{k}" if name else str(k), tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_flatten(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"checkpoint entry {name} must be a tensor or plain data, got {type(value).__name__}")


def _unflatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(v, tensors) for v in value]
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        return {k: _unflatten(v, tensors) for k, v in value["__dict__"]}
    return value


def encode(state: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint file. Tensors, dicts, lists, tuples (read back as lists), numbers, text and None."""
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_flatten(state, "", tensors))
    metadata = {"format": FORMAT, "tree": tree, "sha256": digest_of(tensors, tree)}
    return safetensors.torch.save(tensors, metadata)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify a checkpoint.

    Raises:
        DamagedCheckpoint: unreadable, foreign, or not what was written.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DamagedCheckpoint(f"{path} is not a checkpoint of this trainer")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as a checkpoint: {error}") from error
    tree = metadata.get("tree", "")
    if digest_of(tensors, tree) != metadata.get("sha256"):
        raise DamagedCheckpoint(f"{path} is damaged: its checksum does not match")
    try:
        state = _unflatten(json.loads(tree), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this trainer: {error!r}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this trainer: it holds a {type(state).__name__}")
    return state


KEYS = {"config": dict, "data_fingerprint": str, "world_size": int, "progress": dict, "model": dict,
        "ema": (dict, type(None)), "optimizer": dict, "scheduler": dict, "scaler": dict, "random": list}


def check_complete(state: dict[str, Any], path: Path, *keys: str) -> None:
    """Raise DamagedCheckpoint unless `state` has all that a run is continued from, or as much of it as `keys` name."""
    for key in keys or KEYS:
        if not isinstance(state.get(key, ...), KEYS[key]):
            found = type(state[key]).__name__ if key in state else "nothing"
            raise DamagedCheckpoint(f"{path} is not a checkpoint of this trainer: {key} has {found}")
    for key in ("model", "ema"):
        if not all(isinstance(value, torch.Tensor) for value in (state[key] or {}).values()):
            raise DamagedCheckpoint(f"{path} is not a checkpoint of this trainer: {key} must hold tensors only")
    _updates(state, path)


def put_damaged_aside(folder: Path, notice) -> None:
    """Rename damaged and foreign checkpoint files to NAME.damaged, so that none pushes out a good one later."""
    for name in (LAST, PREVIOUS, BEST):
        path = folder / name
        try:
            if path.exists():
                _updates(read_checkpoint(path), path)
        except DamagedCheckpoint as error:
            aside = path.with_name(path.name + ".damaged")
            os.replace(path, aside)
            notice(f"skipped: {error}; kept as {aside.name}")


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The valid checkpoint of a run folder with the most updates, and its path, or None."""
    found = []
    for path in (folder / LAST, folder / PREVIOUS, folder / BEST):
        try:
            if path.exists():
                state = read_checkpoint(path)
                found.append((_updates(state, path), path, state))
        except DamagedCheckpoint:
            continue  # put_damaged_aside has named it, or the user asked for another run's folder
    return max(found, key=lambda entry: entry[0])[1:] if found else None


def _updates(state: dict[str, Any], path: Path) -> int:
    """How many updates a checkpoint stands after."""
    progress = state.get("progress")
    if not isinstance(progress, dict) or not isinstance(progress.get("updates"), int):
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this trainer: it does not say its updates")
    return progress["updates"]


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator a step may draw from: torch's, CUDA's, NumPy's and Python's."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": {"key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
                  "pos": int(numpy_state["state"]["pos"]), "has_gauss": int(numpy_state["has_gauss"]),
                  "gauss": float(numpy_state["gauss"])},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    saved = state["numpy"]
    np.random.set_state({"bit_generator": "MT19937", "has_gauss": saved["has_gauss"], "gauss": saved["gauss"],
                         "state": {"key": saved["key"].numpy().astype(np.uint32), "pos": saved["pos"]}})
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
