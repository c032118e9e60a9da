"""Write a classification network as ONNX (.onnx) or torch.export (.pt2).

    ea-vision export ea_conv_transformer_cifar -o net.onnx --check photos/   # ea-vision predict net.onnx photo.jpg
    ea-vision export ea_aa_resnet50 -o net.onnx --random                     # a network without weights

The network is first prepared by `ea_vision.deploy`. The file takes `images`, normalised float32 (batch, 3, H, W) of one
size and any batch, and returns `logits` (batch, classes). Its metadata hold class names, mean, std and size. ONNX files
have opset 20. The command then runs file and network on the same images and prints their largest difference.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ea_vision.base.errors import CommandParser, RunError, UsageError
from ea_vision.base.files import check_output
from ea_vision.deployment.deploy import LARGEST, difference_of
from ea_vision.deployment.files import (
    EXPORTED,
    OPSET,
    About,
    ExportedNetwork,
    check_packages,
    export_program,
    write,
)
from ea_vision.recorder.selection import add_options
from ea_vision.zoo.inputs import find_images, read_image
from ea_vision.zoo.loaded import LoadedModel, check_classifies, load_model
from ea_vision.zoo.preparation import Processed
from ea_vision.zoo.source import TARGET_HELP


def compare(model: LoadedModel, images: Sequence[Tensor], output: Path) -> str:
    """Compare a written file with its network on inputs (3, H, W); return how often their classes agree and how
    far their outputs differ.

    Raises:
        RunError: the outputs differ by LARGEST or more, relative to the largest logit.
    """
    if output.suffix.lower() == ".onnx" and importlib.util.find_spec("onnxruntime") is None:
        return "not compared, since onnxruntime is not installed"
    network = ExportedNetwork(output)
    with torch.inference_mode():
        expected = [model.model(image[None]) for image in images]
        got = [network(image[None]) for image in images]
    both = zip(expected, got, strict=True)
    agreeing = sum(torch.equal(logits.argmax(1), other.argmax(1)) for logits, other in both)
    largest = difference_of(expected, got)
    comparison = (
        f"same class on {agreeing} of {len(images)} image(s), largest difference {largest:.1e} "
        "of the largest logit"
    )
    if not largest < LARGEST:
        raise RunError(
            f"{output} was written, but its outputs differ from those of {model.label}: {comparison}"
        )
    return comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Export the network that the arguments name."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL", help=TARGET_HELP.replace("else random", "or --random")
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"file to write, {' or '.join(EXPORTED)}",
    )
    parser.add_argument(
        "--check",
        nargs="+",
        default=[],
        metavar="IMAGE",
        help="image files or folders on which to compare file and network (default: two images of noise)",
    )
    add_options(parser, "--random", "--img-size")
    args = parser.parse_args(argv)
    check_packages(args.output, "onnx", "onnxscript")
    paths = find_images(args.check) if args.check else []
    check_output(args.output)
    model = load_model(args.model, random=args.random, img_size=args.img_size)
    check_classifies(model, without_classes=True)
    if isinstance(model.model, ExportedNetwork):
        raise UsageError(f"a model or run is required, and {args.model} is an exported file")
    if isinstance(model.preparation, Processed):
        raise UsageError(
            f"a network of timm's or a run is required, and {args.model} is transformers'"
        )
    if not model.trained and not args.random:
        raise UsageError(f"{args.model} has no weights: --random exports it with random ones")
    noise = torch.rand(2, 3, *model.img_size, generator=torch.Generator().manual_seed(0))
    images = [model.input_of(read_image(path)) for path in paths]
    images = images or list(model.preparation.normalize(noise))
    about = About(
        name=model.label,
        **asdict(model.preparation),
        num_classes=model.num_classes,
        classes=model.classes,
    )
    write(export_program(model.model, model.img_size), args.output, about)
    comparison = compare(model, images, args.output)
    kind = f"opset {OPSET}" if args.output.suffix.lower() == ".onnx" else "torch.export"
    size = args.output.stat().st_size / 2**20
    print(f"written: {args.output} ({size:.1f} MiB, {kind}); {comparison}")
    return 0
