"""The likeliest classes of images.

    ea-vision predict ea_conv_transformer_cifar photo.jpg
    ea-vision predict net.onnx photo.jpg                       # a file of ea-vision export
    ea-vision predict runs/mine photos/ --top 3 --json predictions.json
    find photos -name '*.jpg' | ea-vision predict resnet50 - --json -

An image that cannot be read is named, the others are classified, and the exit code is 1.
"""
from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write, check_output
from ea_vision.base.processes import choose_device
from ea_vision.recorder.inputs import ImageSource, as_input, find_images
from ea_vision.recorder.loading import (
    WEIGHTS_HELP,
    LoadedModel,
    add_options,
    check_classifies,
    class_names_of,
    load_model,
    parse_size,
    positive,
)


@dataclass(frozen=True)
class Prediction:
    """Prediction for an image: (class, probability) from the likeliest on, or why the image cannot be read."""

    image: str
    classes: list[dict[str, str | int | float]]  # name, index and probability
    error: str = ""


def predict(loaded: LoadedModel, images: Sequence[ImageSource | Tensor], names: Sequence[str] | None = None,
            top: int = 5, batch_size: int = 16) -> Iterator[Prediction]:
    """Classify images, in their order.

    Args:
        images: paths, PIL images, arrays or tensors; see `ea_vision.recorder.inputs.as_input`. One that is no path is
            called by its number, from "image 1" on.
        names: of the classes; None: they are named by their number.
        top: number of classes an image, at most as many as there are.
        batch_size: images that go through the network together.
    """
    device = next((weight.device for weight in loaded.model.parameters()), "cpu")
    for start in range(0, len(images), batch_size):
        chunk = images[start:start + batch_size]
        prepared, errors = [], {}
        called = [str(image) if isinstance(image, (str, Path)) else f"image {number}"
                  for number, image in enumerate(chunk, start=start + 1)]
        for name, image in zip(called, chunk, strict=True):
            try:
                prepared.append(as_input(loaded, image))
            except UsageError as error:
                errors[name] = str(error)
        if prepared:
            with torch.inference_mode():
                likely = loaded.model(loaded.normalize(torch.stack(prepared).to(device))).float().softmax(-1)
        rows = iter(likely.cpu() if prepared else ())
        for name in called:
            if name in errors:
                yield Prediction(name, [], errors[name])
                continue
            values, indices = next(rows).topk(min(top, likely.shape[1]))
            yield Prediction(name, [
                {"name": names[index] if names else f"class {index}", "index": index, "probability": round(value, 6)}
                for value, index in zip(values.tolist(), indices.tolist(), strict=True)])


def _files(words: Sequence[str], lines) -> list[str]:
    """The images of the command line; `-` stands for the paths on standard input, a line each."""
    paths: list[str] = []
    for word in words:
        paths += [line.rstrip("\r\n") for line in lines if line.strip()] if word == "-" else [word]
    return find_images(paths)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help=WEIGHTS_HELP.replace("else random", "which it must have"))
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, folders, digits:N (the Nth test image "
                        "of the digits), or - for paths on standard input, one a line")
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes an image (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write a list of images with their classes to FILE ('-': to "
                        "standard output instead of the table)")
    parser.add_argument("--batch-size", type=positive, default=16, help="images computed together (default: 16)")
    add_options(parser, "--img-size", "--device")
    args = parser.parse_args(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # names that are not UTF-8 are names of files, too
    images = _files(args.images, sys.stdin)
    if args.json not in (None, "-"):
        check_output(Path(args.json))
    loaded = load_model(args.model, img_size=parse_size(args.img_size), device=choose_device(args.device))
    check_classifies(loaded)
    if not loaded.trained or not loaded.model.num_classes:
        lacking = "weights" if not loaded.trained else "classifier"
        raise UsageError("a run folder or a model with trained weights and a classifier is required (`ea-vision models "
                         f"--weights` lists ours), and {args.model} has no {lacking}")
    names = class_names_of(args.model, loaded)
    found = []
    for prediction in predict(loaded, images, names, args.top, args.batch_size):
        found.append(prediction)
        if prediction.error:
            print(f"error: {prediction.error}", file=sys.stderr)
        elif args.json != "-":
            likely = ", ".join(f"{c['name']} {100 * c['probability']:.1f}%" for c in prediction.classes)
            print(f"{prediction.image}: {likely}", flush=True)
    if args.json:
        text = json.dumps([{key: value for key, value in asdict(row).items() if value or key != "error"}
                           for row in found], indent=1) + "\n"
        if args.json == "-":
            print(text, end="")
        else:
            atomic_write(Path(args.json), text.encode())
            print(f"written: {args.json}")
    return 1 if any(prediction.error for prediction in found) else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
