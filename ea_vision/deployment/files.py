"""Deployed networks as files: ONNX (.onnx) and torch.export (.pt2), with all that classifying a photo needs in them.

A file takes `images`, float32 (batch, 3, H, W), normalised by the mean and std in its metadata, and gives `logits`,
float32 (batch, classes). The metadata of both kinds are the fields of `About`, as JSON; an ONNX file ends in one more
entry of them, the SHA-256 of what stands before it.
"""
from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.deployment.fold import deploy

SUFFIXES = (".onnx", ".pt2")
OPSET = 20
_SEAL = b"\x72\x4a\x0a\x06sha256\x12\x40"  # protobuf: an entry of metadata_props, its key, and 64 letters that follow


@dataclass(frozen=True)
class About:
    """What a file says of its network: how to prepare an image (timm's words), and the names of the classes or None.

    size: (height, width) in pixels.
    """

    name: str
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str
    num_classes: int
    classes: Sequence[str] | None = None


def check_packages(path: Path, *names: str) -> None:
    """Raise UsageError unless `path` has a suffix that can be written, and the packages for it are installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"the file must end in {' or '.join(SUFFIXES)}, got {path}")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if path.suffix.lower() == ".onnx" and missing:
        raise UsageError(f"{path.name} needs {' and '.join(missing)}: pip install 'ea_vision[export]'")


def export_program(model: nn.Module, size: tuple[int, int]) -> torch.export.ExportedProgram:
    """Return the program of a network's deployed copy, for images (B, 3, H, W) of one size and any batch size."""
    model = deploy(model)
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    images = torch.zeros(2, first.in_channels, *size, dtype=first.weight.dtype)
    with torch.no_grad():
        return torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the converters' remarks to themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _onnx_model(program: torch.export.ExportedProgram):
    """Return an onnx.ModelProto of the program, its batch axis named `batch`."""
    with _quiet():
        onnx = torch.onnx.export(program, (), dynamo=True, verbose=False, opset_version=OPSET,
                                 input_names=["images"], output_names=["logits"])
    proto = onnx.model_proto  # made anew at each look
    graph = proto.graph
    for node in graph.node:  # where in torch's code it was traced
        del node.metadata_props[:]
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(rf"\b{symbol}\b", "batch", dim.dim_param)
    return proto


def sealed(proto) -> bytes:
    """Return the file of an onnx.ModelProto: what it is, then the SHA-256 of that.

    What onnxruntime's tools make of a file (float16, 8 bits) is sealed anew by this.
    """
    kept = {entry.key: entry.value for entry in proto.metadata_props if entry.key != "sha256"}
    del proto.metadata_props[:]
    for key, value in kept.items():
        proto.metadata_props.add(key=key, value=value)
    data = proto.SerializeToString()
    return data + _SEAL + hashlib.sha256(data).hexdigest().encode()


def write(program: torch.export.ExportedProgram, path: Path, about: About) -> None:
    """Write a program of `export_program` to FILE.onnx or FILE.pt2, in float32, all or nothing.

    Raises:
        UsageError: another suffix, or packages missing.
    """
    check_packages(path, "onnx", "onnxscript")
    said = {key: json.dumps(value) for key, value in asdict(about).items()}
    if path.suffix.lower() == ".pt2":
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={"about.json": json.dumps(said)})
        data = file.getvalue()
    else:
        proto = _onnx_model(program)
        for key, value in said.items():
            proto.metadata_props.add(key=key, value=value)
        data = sealed(proto)
    atomic_write(path, data)


class ExportedNetwork(nn.Module):
    """A file of `write` as a network: (B, 3, H, W) -> (B, num_classes), on a CPU.

    Raises:
        UsageError: a file that cannot be read, is damaged, has no metadata of ours or others than its network's, or
            onnxruntime is missing.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        super().__init__()
        check_packages(path, "onnxruntime")
        try:
            read = self._read_program if path.suffix.lower() == ".pt2" else self._read_onnx
            said, inputs, outputs = read(path, threads)
        except UsageError:
            raise
        except Exception as error:  # onnxruntime and torch.export name theirs each in their way
            raise UsageError(f"cannot read {path}: {error}") from error
        try:
            about = About(**{field.name: json.loads(said[field.name]) for field in fields(About)})
            about = replace(about, size=tuple(about.size))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} must be a network that ea-vision export wrote; its metadata lack {error}"
                             ) from error
        wanted = {"images": (3, *about.size)}, {"logits": (about.num_classes,)}
        if (inputs, outputs) != wanted:
            raise UsageError(f"{path} says that it takes {wanted[0]} and gives {wanted[1]}, and its network takes "
                             f"{inputs} and gives {outputs}")
        if about.classes is not None and len(about.classes) != about.num_classes:
            raise UsageError(f"{path} must name {about.num_classes} classes, got {len(about.classes)} names")
        self.about, self.num_classes = about, about.num_classes

    def _read_program(self, path: Path, threads: int) -> tuple[dict, dict, dict]:
        """Open a program of torch.export; return its metadata, and shapes of inputs and outputs without the batch."""
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise UsageError(f"{path} is damaged: {archive.testzip()} in it does not match its checksum")
        extra = {"about.json": ""}
        with _quiet():
            program = torch.export.load(path, extra_files=extra)
        module = program.module()  # hidden from this network, whose eval() it refuses
        self.run = lambda images: module(images)
        values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
        signature = program.graph_signature
        inputs, outputs = ([tuple(values[name].shape[1:]) for name in names]
                           for names in (signature.user_inputs, signature.user_outputs))
        return json.loads(extra["about.json"] or "{}"), dict(zip(["images"], inputs, strict=True)), dict(
            zip(["logits"], outputs, strict=True))

    def _read_onnx(self, path: Path, threads: int) -> tuple[dict, dict, dict]:
        """Open an ONNX file; return its metadata, and shapes of inputs and outputs by name without the batch."""
        import onnxruntime

        data = path.read_bytes()
        if data[-64:] != hashlib.sha256(data[:-64 - len(_SEAL)]).hexdigest().encode():
            raise UsageError(f"{path} is damaged: its checksum does not match" if _SEAL in data else
                             f"{path} must be a network that ea-vision export wrote; its metadata lack 'sha256'")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.run = lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        inputs, outputs = ({value.name: tuple(value.shape[1:]) for value in values}
                           for values in (session.get_inputs(), session.get_outputs()))
        return session.get_modelmeta().custom_metadata_map, inputs, outputs

    def forward(self, images: Tensor) -> Tensor:
        """Classify normalised images (B, 3, H, W) of the file's size."""
        if images.shape[1:] != (3, *self.about.size):
            raise ValueError(f"images of shape (B, 3, {self.about.size[0]}, {self.about.size[1]}) are required, got "
                             f"{tuple(images.shape)}")
        return self.run(images.cpu())
