#!/usr/bin/env python3
"""Accuracy, size and speed of exported weights in float32, float16 and 8 bits.

    python experiments/precisions.py --data-dir DIR

exports ea_conv_transformer_cifar, with its shipped weights, in each precision of `ea-vision export`, runs ONNX Runtime
on all test images, and prints a table. DIR has train and test of CIFAR-10, folders or tars; 8 bits are calibrated on
128 training images.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

import timm
import torch

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import exit_code
from ea_vision.base.networks import image_statistics
from ea_vision.data.small_images import load_dataset
from ea_vision.deployment.files import PRECISIONS, About, ExportedNetwork, export_program, write

SIZE = (32, 32)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ea_conv_transformer_cifar", help="default: %(default)s")
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as folders or tars of class/name.png")
    args = parser.parse_args(argv)
    data = load_dataset("folder", args.data_dir)
    model = timm.create_model(args.model, pretrained=True).eval()
    mean, std = image_statistics(model)

    def normalised(images: torch.Tensor) -> torch.Tensor:
        return (images / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)

    program = export_program(model, SIZE)
    about = About(args.model, SIZE, mean, std, 1.0, "bilinear", model.num_classes, data.classes)
    photos = list(normalised(data.train.images[::len(data.train.images) // 128][:128]).split(1))
    print("| precision | MiB | top-1, % | ms an image, batch 100 |\n| --- | --- | --- | --- |")
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            write(program, path, about, precision, photos)
            size, network = path.stat().st_size / 2**20, ExportedNetwork(path, torch.get_num_threads())
        right, start = 0, time.perf_counter()
        for images, targets in zip(data.test.images.split(100), data.test.targets.split(100), strict=True):
            right += int((network(normalised(images)).argmax(1) == targets).sum())
        count = len(data.test.targets)
        milliseconds = 1e3 * (time.perf_counter() - start) / count
        print(f"| {precision} | {size:.1f} | {100 * right / count:.2f} | {milliseconds:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
