"""Accuracy, size and speed of exported weights in float32, float16 and 8 bits.

    python experiments/precisions.py --data-dir DIR

exports ea_conv_transformer_cifar, with its shipped weights, converts the file by onnxruntime's tools, runs ONNX Runtime
on all test images, and prints a table. DIR has train and test of CIFAR-10, folders or tars; 8 bits are calibrated on
128 training images.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import onnx
import timm
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import exit_code
from ea_vision.base.files import atomic_write
from ea_vision.data.small_images import load_dataset
from ea_vision.deployment.files import About, ExportedNetwork, export_program, sealed, write
from ea_vision.zoo.preparation import image_statistics

SIZE = (32, 32)


def to_float16(path: Path) -> bytes:
    """Return an ONNX file computed in float16, its input and output in float32."""
    return sealed(convert_float_to_float16(onnx.load(path), keep_io_types=True))


def to_int8(path: Path, photos: list[torch.Tensor]) -> bytes:
    """Return an ONNX file whose convolutions and matrix products with weights run in 8 bits, calibrated on photos.

    photos: normalised, (1, 3, H, W) each.
    """

    class Reader(CalibrationDataReader):
        left = iter(photos)

        def get_next(self):
            photo = next(self.left, None)
            return None if photo is None else {"images": photo.numpy()}

    plain = path.with_name("plain.onnx")
    small = path.with_name("int8.onnx")
    quant_pre_process(path, plain)
    graph = onnx.load(plain).graph
    # per-channel quantization needs weights with two axes
    weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    maps = [node.name for node in products if node.input[1] not in weights]
    quantize_static(
        plain,
        small,
        Reader(),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"],
        nodes_to_exclude=maps,
    )
    return sealed(onnx.load(small))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ea_conv_transformer_cifar", help="default: %(default)s")
    parser.add_argument(
        "--data-dir", required=True, help="CIFAR-10 as folders or tars of class/name.png"
    )
    args = parser.parse_args(argv)
    data = load_dataset("folder", args.data_dir)
    model = timm.create_model(args.model, pretrained=True).eval()
    mean, std = image_statistics(model)
    channel_mean = torch.tensor(mean).view(-1, 1, 1)
    channel_std = torch.tensor(std).view(-1, 1, 1)

    def normalised(images: torch.Tensor) -> torch.Tensor:
        return (images / 255 - channel_mean) / channel_std

    program = export_program(model, SIZE)
    about = About(
        SIZE,
        mean=mean,
        std=std,
        name=args.model,
        num_classes=model.num_classes,
        classes=data.classes,
    )
    every = len(data.train.images) // 128
    sample = data.train.images[::every][:128]
    photos = list(normalised(sample).split(1))
    print("| precision | MiB | top-1, % | ms per image, batch 100 |\n| --- | --- | --- | --- |")
    for precision in ("float32", "float16", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            write(program, path, about)
            if precision == "float16":
                atomic_write(path, to_float16(path))
            elif precision == "int8":
                atomic_write(path, to_int8(path, photos))
            size = path.stat().st_size / 2**20
            network = ExportedNetwork(path)
        start = time.perf_counter()
        predicted = [network(normalised(batch)).argmax(1) for batch in data.test.images.split(100)]
        seconds = time.perf_counter() - start
        targets = data.test.targets
        right = torch.cat(predicted) == targets
        top1 = 100 * right.double().mean()
        milliseconds = 1e3 * seconds / len(targets)
        print(f"| {precision} | {size:.1f} | {top1:.2f} | {milliseconds:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
