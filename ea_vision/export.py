"""Write a network for use elsewhere: ONNX (.onnx) or torch.export (.pt2).

    ea-vision export ea_conv_transformer_cifar -o net.onnx --check photos/   # ea-vision predict net.onnx photo.jpg
    ea-vision export ea_aa_resnet50 -o net.onnx --random                     # a network without weights
    ea-vision export runs/mine -o net.onnx --precision int8 --check photos/  # 8 bits, calibrated on those photos

A network that classifies goes through `ea_vision.deploy`. The file takes `images`, float32 (B, 3, H, W) of one size and
any number B, normalised, and gives `logits` (B, classes). Names of the classes, mean, std and size are in its metadata.
ONNX files have opset 20.
What was written is run beside the network, and the largest difference is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.files import check_output
from ea_vision.deployment.files import (
    OPSET,
    PRECISIONS,
    SUFFIXES,
    About,
    ExportedNetwork,
    check_packages,
    export_program,
    write,
)
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    add_options,
    check_classifies,
    class_names_of,
    load_model,
    parse_size,
)

LARGEST = 1e-3  # of the largest logit, by which a file in float32 may differ


def export_classifier(target: str, model: LoadedModel, images: Sequence[Tensor], output: Path, precision: str) -> str:
    """Write a network that classifies; return how often the file agrees with it on images (3, H, W) in 0..1.

    Raises:
        RunError: a file in float32 that computes something else.
    """
    config = model.config
    about = About(model.label, model.img_size, tuple(config["mean"]), tuple(config["std"]), config["crop_pct"],
                  config["interpolation"], model.model.num_classes, class_names_of(target, model))
    inputs = [model.normalize(image)[None] for image in images]
    write(export_program(model.model, model.img_size), output, about, precision, inputs[:128])
    if output.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        return "not compared, since onnxruntime is not installed"
    network = ExportedNetwork(output)
    with torch.inference_mode():
        pairs = [(model.model(x), network(x)) for x in inputs]
    agreeing = sum(bool((own.argmax(1) == got.argmax(1)).all()) for own, got in pairs)
    largest = max(float((own - got).abs().max() / own.abs().max()) for own, got in pairs)
    said = (f"same class on {agreeing} of {len(pairs)} image(s), largest difference {largest:.1e} of the largest logit")
    if precision == "float32" and not largest < LARGEST:
        raise RunError(f"{output} was written, and computes something else than {model.label}: {said}")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help=WEIGHTS_HELP.replace("else random", "or --random"))
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=" or ".join(SUFFIXES))
    parser.add_argument("--check", nargs="+", default=[], metavar="IMAGE", help="image files or folders to compare on "
                        "(default: two of noise)")
    add_options(parser, "--random", "--img-size")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of an .onnx file that classifies, "
                        "by onnxruntime; int8 is calibrated on the first 128 of --check (default: %(default)s)")
    args = parser.parse_args(argv)
    check_packages(args.output, "onnx", "onnxscript")
    paths = find_images(args.check) if args.check else []
    if args.precision == "int8" and not paths:
        raise UsageError("--precision int8 needs --check, photos to calibrate on")
    if args.precision != "float32" and args.output.suffix != ".onnx":
        raise UsageError(f"--precision {args.precision} needs .onnx, got {args.output}")
    check_output(args.output)
    model = load_model(args.model, random=args.random, img_size=parse_size(args.img_size))
    check_classifies(model)
    if not model.trained and not args.random:
        raise UsageError(f"{args.model} has no weights: --random exports it with random ones")
    noise = torch.Generator().manual_seed(0)
    images = [model.prepare(read_image(path)) for path in paths] or [
        torch.rand(3, *model.img_size, generator=noise) for _ in range(2)]
    if isinstance(model.model, ExportedNetwork):
        raise UsageError(f"a model or run is required, and {args.model} is exported")
    said = export_classifier(args.model, model, images, args.output, args.precision)
    kind = f"opset {OPSET}, {args.precision}" if args.output.suffix == ".onnx" else "torch.export"
    print(f"written: {args.output} ({args.output.stat().st_size / 2**20:.1f} MiB, {kind}); {said}")
    return 0
