"""Files of weights: safetensors with a checksum and a note, and the checkpoints of runs."""

import hashlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ea_vision.base.errors import REFUSALS, UsageError, as_usage_error
from ea_vision.models.note import NOTE, read_metadata

CHECKPOINT_FORMAT = "ea_vision-checkpoint-3"
# what readers of weights raise for damaged files
DAMAGED = (safetensors.SafetensorError, pickle.UnpicklingError)
UNREADABLE = (*REFUSALS, *DAMAGED)


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return SHA-256 over names, types, shapes and values of contiguous tensors on the CPU."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        header = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        digest.update(header.encode())
        if tensor.numel():
            content = tensor.reshape(-1).view(torch.uint8)
            digest.update(content.numpy())
    return digest.hexdigest()


def encode_weights(state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file for `timm.create_model(..., checkpoint_path=...)`, with a checksum.

    metadata: further entries of the file's metadata.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    entries = {"format": "pt", **(metadata or {}), "sha256": _digest_of(tensors)}
    return safetensors.torch.save(tensors, entries)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read safetensors weights, without their note. Those that `encode_weights` made carry a checksum.

    Raises:
        UsageError: no such file, not safetensors, or another checksum than was written.
    """
    with as_usage_error(f"weights {path} cannot be read", (OSError, *DAMAGED)):
        # safetensors cannot open a name that is not UTF-8
        state = safetensors.torch.load(path.read_bytes())
        expected = read_metadata(path).get("sha256")
    if expected is not None and _digest_of(state) != expected:
        raise UsageError(f"weights {path} are damaged: their checksum does not match")
    state.pop(NOTE, None)
    return state


class DamagedCheckpoint(UsageError):
    """A file that is not a checkpoint of this trainer, or has changed since it was written."""


def read_checkpoint(path: Path) -> dict:
    """Read a checkpoint, with its tensors in main memory, and verify it. Pickled code in it is not executed.

    Raises:
        DamagedCheckpoint: the file cannot be read, is another program's, or fails its checksum.
        UsageError: another release wrote it.
    """
    if path.exists() and not path.is_file():
        raise DamagedCheckpoint(f"{path} is not a file")
    try:
        with zipfile.ZipFile(path) as file:  # torch.load alone does not notice flipped bits
            damaged = file.testzip()
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers of zip and pickle raise many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedCheckpoint(f"{path} cannot be read as a checkpoint: {reason}") from error
    if damaged:
        raise DamagedCheckpoint(
            f"{path} is damaged: the checksum of {damaged} in it does not match"
        )
    format_name = state.pop("format", None) if isinstance(state, dict) else None
    if format_name != CHECKPOINT_FORMAT:
        error = UsageError if str(format_name).startswith("ea_vision") else DamagedCheckpoint
        raise error(
            f"{path} must be a checkpoint of format {CHECKPOINT_FORMAT}, got {format_name}: another release or "
            "program wrote it"
        )
    return state


def load_file(model: nn.Module, path: Path) -> int | None:
    """Load the weights of a safetensors file or a checkpoint strictly; return their epoch, or None if the file does not
    state it.

    Raises:
        UsageError: the file cannot be read or is damaged, or its weights do not fit the model.
    """
    if path.suffix.lower() == ".safetensors":
        state = read_weights(path)
        epoch = read_metadata(path).get("epoch")
    else:
        checkpoint = read_checkpoint(path)
        state = checkpoint["ema"] or checkpoint["model"]
        epoch = checkpoint["progress"].get("epoch")
    load_state(model, state, str(path))
    return int(epoch) if epoch is not None else None


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights and buffers strictly.

    Raises:
        UsageError: names or shapes differ from the model's, or values are not finite.
    """
    check_finite(state, source)
    with as_usage_error(f"weights {source} do not fit the model", RuntimeError):
        model.load_state_dict(state)


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Raise UsageError unless all weights and buffers are finite."""
    names = non_finite(state)
    if names:
        raise UsageError(
            f"weights {source} must be finite numbers, got others in {', '.join(names[:3])}"
        )


def non_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights and buffers that hold NaN or infinity."""
    return [name for name, value in state.items() if not value.isfinite().all()]
