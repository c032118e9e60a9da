"""Deployed networks as files: ONNX (.onnx) and torch.export (.pt2), with everything needed to classify a photo.

The network takes `images`, float32 (batch, 3, H, W), normalised by the mean and std in the metadata, and returns
`logits`, float32 (batch, classes). The metadata of both kinds are the fields of `About`, as JSON. An ONNX file ends
with one more entry, the SHA-256 of all bytes before it.
"""

import hashlib
import importlib.util
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError, as_usage_error
from ea_vision.base.files import atomic_write
from ea_vision.deployment.deploy import deploy, example_images
from ea_vision.ops import Size
from ea_vision.zoo.create import Kind, register_kind
from ea_vision.zoo.loaded import LoadedModel
from ea_vision.zoo.preparation import Preparation
from ea_vision.zoo.source import EXPORTED, Source

OPSET = 20
_SEAL = b"\x72\x4a\x0a\x06sha256\x12\x40"  # protobuf: an entry of metadata_props, its key, and 64 letters that follow


@dataclass(frozen=True, kw_only=True)
class About(Preparation):
    """The metadata of a file: how to prepare an image, the network's name, and the names of the classes or None."""

    name: str
    num_classes: int
    classes: Sequence[str] | None = None


def check_packages(path: Path, *names: str) -> None:
    """Raise UsageError if `path` has an unknown suffix, or packages for it are missing."""
    if path.suffix.lower() not in EXPORTED:
        raise UsageError(f"the file must end in {' or '.join(EXPORTED)}, got {path}")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if path.suffix.lower() == ".onnx" and missing:
        raise UsageError(
            f"{path.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def export_program(model: nn.Module, size: Size) -> torch.export.ExportedProgram:
    """Return the program of a network's deployed copy, for images (B, 3, H, W) of one size and any batch size."""
    model = deploy(model)
    images = example_images(model, size).expand(2, -1, -1, -1).contiguous()
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        return torch.export.export(model, (images,), dynamic_shapes=({0: batch},))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the converters' warnings and log messages."""
    silenced = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(silenced, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(silenced)


def _onnx_model(program: torch.export.ExportedProgram):
    """Return an onnx.ModelProto of the program, its batch axis named `batch`."""
    with _quiet():
        onnx = torch.onnx.export(
            program,
            (),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),
        )
    proto = onnx.model_proto  # created anew on each access
    for node in proto.graph.node:  # these say where in torch's code it was traced
        del node.metadata_props[:]
    return proto


def _digest(data: bytes) -> bytes:
    """Return the 64 letters of the SHA-256 of a file's content."""
    return hashlib.sha256(data).hexdigest().encode()


def sealed(proto, **metadata: str) -> bytes:
    """Return the file of an onnx.ModelProto with `metadata` added to its metadata, and then the SHA-256 of these bytes.

    After onnxruntime's tools have converted a file (to float16 or 8 bits), this seals it again.
    """
    from onnx.helper import set_model_props

    kept = {entry.key: entry.value for entry in proto.metadata_props if entry.key != "sha256"}
    set_model_props(proto, kept | metadata)
    data = proto.SerializeToString()
    return data + _SEAL + _digest(data)


def write(program: torch.export.ExportedProgram, path: Path, about: About) -> None:
    """Write a program of `export_program` to FILE.onnx or FILE.pt2, in float32, atomically.

    Raises:
        UsageError: the suffix is unknown, or packages are missing.
    """
    check_packages(path, "onnx", "onnxscript")
    metadata = {key: json.dumps(value) for key, value in asdict(about).items()}
    if path.suffix.lower() == ".pt2":
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={"about.json": json.dumps(metadata)})
        data = file.getvalue()
    else:
        data = sealed(_onnx_model(program), **metadata)
    atomic_write(path, data)


def _open_program(path: Path) -> tuple[dict[str, str], Callable[[Tensor], Tensor]]:
    """Open a program of torch.export; return its metadata, and a function that runs it."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise UsageError(f"{path} is damaged: {damaged} in it does not match its checksum")
    extra = {"about.json": ""}
    with _quiet():
        # torch cannot open a name that is not UTF-8
        content = io.BytesIO(path.read_bytes())
        module = torch.export.load(content, extra_files=extra).module()

    def run(images: Tensor) -> Tensor:  # a module would refuse eval()
        return module(images)

    return json.loads(extra["about.json"] or "{}"), run


def _open_onnx(path: Path) -> tuple[dict[str, str], Callable[[Tensor], Tensor]]:
    """Open an ONNX file; return its metadata, and a function that runs it."""
    import onnxruntime

    data = path.read_bytes()
    content = data[: -64 - len(_SEAL)]
    if data[-64:] != _digest(content):
        if _SEAL in data:
            raise UsageError(f"{path} is damaged: its checksum does not match")
        raise UsageError(
            f"{path} must be a network that ea-vision export wrote; its metadata lack 'sha256'"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        [logits] = session.run(["logits"], {"images": images.detach().numpy()})
        return torch.from_numpy(logits)

    return session.get_modelmeta().custom_metadata_map, run


class ExportedNetwork(nn.Module):
    """A file of `write` as a network: (B, 3, H, W) -> (B, num_classes), on a CPU.

    Raises:
        UsageError: the file cannot be read, is damaged or lacks our metadata, its network fails on images of the size
            that they state (it is run once), or onnxruntime is missing.
    """

    def __init__(self, path: Path):
        super().__init__()
        check_packages(path, "onnxruntime")
        # onnxruntime and torch.export have error classes of their own
        with as_usage_error(f"cannot read {path}", Exception):
            open_file = _open_program if path.suffix.lower() == ".pt2" else _open_onnx
            metadata, self.run = open_file(path)
        problem = f"{path} must be a network that ea-vision export wrote, with its metadata"
        with as_usage_error(problem, Exception):
            about = About(
                **{field.name: json.loads(metadata[field.name]) for field in fields(About)}
            )
            about = replace(about, size=tuple(about.size))
        problem = f"{path} says that it takes images {(3, *about.size)} and gives logits, and its network refuses"
        with as_usage_error(problem, Exception):
            self.run(torch.zeros(1, 3, *about.size))
        self.about = about
        self.num_classes = about.num_classes

    def forward(self, images: Tensor) -> Tensor:
        """Classify normalised images (B, 3, H, W) of the file's size."""
        if images.shape[1:] != (3, *self.about.size):
            raise ValueError(
                f"images of shape (B, 3, {self.about.size[0]}, {self.about.size[1]}) are required, got "
                f"{tuple(images.shape)}"
            )
        return self.run(images.cpu())


# ---- at the door -----------------------------------------------------------------------------------------------------


def _open(name: str, *, pretrained: bool) -> ExportedNetwork:
    if not pretrained:
        raise UsageError(f"random weights are of models and runs, got the exported file {name}")
    return ExportedNetwork(Path(name))


def _prepared(network: ExportedNetwork, source: Source, trained: bool) -> LoadedModel:
    about = network.about
    return LoadedModel(network, about.name, about, classes=about.classes)


for suffix in EXPORTED:
    register_kind(suffix, Kind(_open, _prepared, fixed_size=True))
