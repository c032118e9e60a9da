"""Deployed networks as files: ONNX (.onnx) and torch.export (.pt2), with all that classifying a photo needs in them.

A file takes `images`, float32 (B, 3, H, W) of any batch size, normalised by the mean and std in its metadata, and gives
`logits`, float32 (B, classes). The metadata of both kinds are the fields of `About`, as JSON.
"""
from __future__ import annotations

import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.base.files import atomic_write
from ea_vision.deployment.fold import deploy

SUFFIXES = (".onnx", ".pt2")
OPSET = 20
PRECISIONS = ("float32", "float16", "int8")


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
    if path.suffix not in SUFFIXES:
        raise UsageError(f"the file must end in {' or '.join(SUFFIXES)}, got {path}")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise UsageError(f"{path.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


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
    """An onnx.ModelProto of the program, without the exporter's remarks."""
    with _quiet():
        onnx = torch.onnx.export(program, (), dynamo=True, verbose=False, opset_version=OPSET,
                                 input_names=["images"], output_names=["logits"])
    proto = onnx.model_proto
    for node in proto.graph.node:  # where in torch's code it was traced
        del node.metadata_props[:]
    return proto


def _half(proto):
    """The ONNX model computed in float16, its input and output in float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with _quiet():  # of numbers that float16 rounds to 0
        return convert_float_to_float16(proto, keep_io_types=True)


def _quantised(proto, photos: Iterable[Tensor]):
    """The ONNX model with convolutions and products with weights in 8 bits, calibrated on normalised (1, 3, H, W)."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.photos = iter(photos)

        def get_next(self) -> dict[str, np.ndarray] | None:
            photo = next(self.photos, None)
            return None if photo is None else {"images": photo.numpy()}

    with tempfile.TemporaryDirectory() as folder, _quiet():
        plain, quantised = (str(Path(folder) / name) for name in ("plain.onnx", "quantised.onnx"))
        quant_pre_process(proto, plain)
        graph = onnx.load(plain).graph
        # 8 bits by column need weights of two axes
        weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
        maps = [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in weights]
        quantize_static(plain, quantised, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
                        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
                        op_types_to_quantize=["Conv", "Gemm", "MatMul"], nodes_to_exclude=maps)
        return onnx.load(quantised)


def write(program: torch.export.ExportedProgram, path: Path, about: About, precision: str = "float32",
          photos: Sequence[Tensor] = ()) -> None:
    """Write a program of `export_program` to FILE.onnx or FILE.pt2, all or nothing.

    Args:
        precision: of `PRECISIONS`; float16 and int8 are onnxruntime's conversions of FILE.onnx.
        photos: normalised images (1, 3, H, W) on which int8 is calibrated.

    Raises:
        UsageError: another suffix or precision, packages missing, or int8 without photos.
    """
    check_packages(path, "onnx", "onnxscript", *(() if precision == "float32" else ("onnxruntime",)))
    if precision not in PRECISIONS or (path.suffix == ".pt2" and precision != "float32"):
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, float32 for .pt2, got {precision!r}")
    if precision == "int8" and not photos:
        raise UsageError("8 bits are calibrated on photos, at least one required, got none")
    said, data = {key: json.dumps(value) for key, value in asdict(about).items()}, io.BytesIO()
    if path.suffix == ".pt2":
        torch.export.save(program, data, extra_files={"about.json": json.dumps(said)})
    else:
        proto = _onnx_model(program)
        if precision != "float32":
            proto = _half(proto) if precision == "float16" else _quantised(proto, photos)
        for key, value in said.items():
            proto.metadata_props.add(key=key, value=value)
        data.write(proto.SerializeToString())
    atomic_write(path, data.getvalue())


def _checked_about(path: Path, said: Mapping[str, str]) -> About:
    """Return the metadata of a file, which are JSON by name.

    Raises:
        UsageError: a field is missing, or has a value that no network has.
    """
    missing = [field.name for field in fields(About) if not isinstance(said, Mapping) or field.name not in said]
    if missing:
        raise UsageError(f"{path} must be a network that ea-vision export wrote; its metadata lack "
                         f"{', '.join(missing)}")

    def numbers(value: Any, count: int, kinds: tuple[type, ...] = (int, float)) -> bool:
        return isinstance(value, list) and len(value) == count and all(type(x) in kinds and x >= 0 for x in value)

    right = {
        "name": lambda value: isinstance(value, str),
        "size": lambda value: numbers(value, 2, (int,)) and 0 < min(value) and max(value) <= 100_000,
        "mean": lambda value: numbers(value, 3) and max(value) <= 1,
        "std": lambda value: numbers(value, 3) and 0 < min(value) <= max(value) <= 1,
        "crop_pct": lambda value: type(value) in (int, float) and 0 < value <= 10,
        "interpolation": lambda value: isinstance(value, str) and value.upper() in Image.Resampling.__members__,
        "num_classes": lambda value: type(value) is int and value > 0,
        "classes": lambda value: value is None or isinstance(value, list) and all(
            isinstance(name, str) for name in value)}
    values = {}
    for name, check in right.items():
        try:
            values[name] = json.loads(said[name])
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} is damaged: its {name} is no JSON: {error}") from error
        if not check(values[name]):
            raise UsageError(f"{path} is damaged: its {name} cannot be {values[name]!r:.60}")
    if values["classes"] is not None and len(values["classes"]) != values["num_classes"]:
        raise UsageError(f"{path} is damaged: it names {len(values['classes'])} of {values['num_classes']} classes")
    return About(**values | {"size": tuple(values["size"])})


class ExportedNetwork(nn.Module):
    """A file of `write` as a network: (B, 3, H, W) -> (B, num_classes), on a CPU.

    Raises:
        UsageError: a file that cannot be read or has no metadata of ours, or onnxruntime missing.
    """

    def __init__(self, path: Path, threads: int = 0) -> None:
        super().__init__()
        check_packages(path, "onnxruntime")
        try:
            if path.suffix == ".pt2":
                extra = {"about.json": ""}
                with _quiet():
                    program = torch.export.load(path, extra_files=extra)
                module = program.module()  # hidden from this network, whose eval() it refuses
                self.run = lambda images: module(images)
                said = json.loads(extra["about.json"] or "{}")
            else:
                import onnxruntime

                options = onnxruntime.SessionOptions()
                options.intra_op_num_threads, options.log_severity_level = threads, 3
                session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
                self.run = lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
                said = session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime and torch.export name theirs each in their way
            raise UsageError(f"cannot read {path}: {error}") from error
        self.about = _checked_about(path, said)
        self.num_classes = self.about.num_classes

    def forward(self, images: Tensor) -> Tensor:
        return self.run(images.cpu())
