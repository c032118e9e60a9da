"""Predict the likeliest classes of images, or the objects in them.

    ea-vision predict ea_conv_transformer_cifar photo.jpg
    ea-vision predict net.onnx photo.jpg                       # a file of ea-vision export
    ea-vision predict runs/mine photos/ --top 3 --json predictions.json
    ea-vision predict runs/detector photos/ --json results.json --output pictures

A run of train-detection finds objects: it prints their names and scores, draws boxes with --output, and writes COCO's
results with the path as image_id with --json. The command names images that it cannot read, or for which the network
returns non-finite numbers, continues with the others, and exits with code 1.
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from ea_vision.base.devices import choose_device
from ea_vision.base.errors import CommandParser, UsageError
from ea_vision.base.files import atomic_write, check_keeps_images, check_output, create, write_json
from ea_vision.data.image_names import IMAGE_SUFFIXES
from ea_vision.recorder.selection import add_options, positive
from ea_vision.zoo.inputs import ImageSource, as_image, find_images, read_image
from ea_vision.zoo.loaded import LoadedModel, load_model
from ea_vision.zoo.source import TARGET_HELP

TOP = 5  # classes of an image
MIN_SCORE = 0.4  # of an object


def predict(
    loaded: LoadedModel,
    images: Sequence[ImageSource | Tensor],
    top: int = TOP,
    batch_size: int = 16,
) -> Iterator[dict]:
    """Classify images; the results come in the order of the images.

    Args:
        images: paths, PIL images, arrays or tensors; see `LoadedModel.input_of`.
        top: number of classes per image, at most as many as there are.
        batch_size: images that go through the network together.

    Yields:
        For each image `image`, its path or "image 1", "image 2", ...; `classes`, the likeliest first, each with `name`,
        `index` and `probability`; and `error`, if the image cannot be read or the network's outputs are not finite.
    """
    for start in range(0, len(images), batch_size):
        entries = []
        inputs = []
        for number, image in enumerate(images[start : start + batch_size], start + 1):
            entry = {
                "image": str(image) if isinstance(image, (str, Path)) else f"image {number}",
                "classes": [],
            }
            entries.append(entry)
            try:
                inputs.append((entry, loaded.input_of(as_image(image))))
            except UsageError as error:
                entry["error"] = str(error)
        if inputs:
            with torch.no_grad():
                try:
                    logits = loaded.classify(loaded.batch_of([x for _, x in inputs]))
                except RuntimeError as error:
                    loaded.check_channels(error)
                    raise
                likely = logits.float().softmax(-1).cpu()
            for (entry, _), shares in zip(inputs, likely, strict=True):
                if shares.isfinite().all():
                    entry["classes"] = loaded.likeliest(shares, top)
                else:
                    entry["error"] = f"{loaded.label} gives no finite number for {entry['image']}"
        yield from entries


def refuse(given: Mapping[str, object], reason: str) -> None:
    """Raise UsageError if an option is given (not None) that only networks of the other kind use."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} {reason}")


def classify(
    loaded: LoadedModel, images: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[str, str, list]]:
    """Yield for each image its error or "", its likeliest classes as text, and its entries of the JSON."""
    if not loaded.trained or not loaded.num_classes:
        missing = "weights" if not loaded.trained else "classifier"
        raise UsageError(
            "a run folder or a model with trained weights and a classifier is required (`ea-vision models` "
            f"lists ours), and {args.model} has no {missing}"
        )
    refuse(
        {"--output": args.output, "--min-score": args.min_score},
        f"applies to objects, and {args.model} finds none: a run of train-detection is required",
    )
    for entry in predict(loaded, images, args.top or TOP):
        likely = ", ".join(
            f"{one['name']} {100 * one['probability']:.1f}%" for one in entry["classes"]
        )
        yield entry.get("error", ""), f"{entry['image']}: {likely}", [entry]


def find_objects(
    loaded: LoadedModel, images: Sequence[str], args: argparse.Namespace
) -> Iterator[tuple[str, str, list]]:
    """Yield for each image its error or "", its objects as text, and COCO's results. Draw the objects if --output is
    given."""
    refuse(
        {"--top": args.top},
        f"applies to classes of images, and {args.model} finds objects (--min-score chooses among them)",
    )
    # a classifier does without the room
    from ea_vision.detection.coco import results_of
    from ea_vision.detection.predict import detect

    least = MIN_SCORE if args.min_score is None else args.min_score
    if not 0 <= least <= 1:
        raise UsageError(f"--min-score must be a number from 0 to 1, got {least}")
    names = [f"{number}-{Path(path).stem}.png" for number, path in enumerate(images, start=1)]
    pictures = [Path(args.output or "", name.replace(":", "-")) for name in names]
    if args.output:
        from ea_vision.detection.draw import draw_detections  # it needs matplotlib's fonts

        create(Path(args.output))
        check_keeps_images(pictures, images)
    for path, picture in zip(images, pictures, strict=True):
        try:
            image = read_image(path)
            [detections] = detect(loaded.model, [image])
        except UsageError as error:
            yield str(error), "", []
        except FloatingPointError as error:
            yield f"{loaded.label} {error} for {path}", "", []
        else:
            sure = detections["scores"] >= least
            detections = {name: value[sure] for name, value in detections.items()}
            if args.output:
                drawn = draw_detections(pil_to_tensor(image), detections, loaded.classes)
                data = io.BytesIO()
                to_pil_image(drawn).save(data, "PNG")
                atomic_write(picture, data.getvalue())
            named = ", ".join(
                f"{loaded.classes[label]} {score:.2f}"
                for label, score in zip(detections["labels"], detections["scores"], strict=True)
            )
            yield (
                "",
                f"{path}: {named or 'nothing found'}",
                results_of(path, detections, loaded.category_ids),
            )


def main(argv: list[str] | None = None) -> int:
    """Predict for the images that the arguments name."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "model", metavar="MODEL", help=TARGET_HELP.replace("else random", "which it must have")
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="image files, folders, or digits#N (the Nth test image of the digits)",
    )
    parser.add_argument(
        "--top", type=positive, metavar="K", help=f"number of classes per image (default: {TOP})"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write a list of images with their classes, or COCO's results, "
        "to FILE ('-': print it instead of the table)",
    )
    parser.add_argument(
        "--min-score",
        type=float,
        metavar="0..1",
        help=f"lowest score of the objects shown (default: {MIN_SCORE})",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        help="draw the objects of each image into a PNG in this folder",
    )
    add_options(parser, "--img-size", "--device")
    args = parser.parse_args(argv)
    images = find_images(args.images)
    if args.json not in (None, "-"):
        if Path(args.json).suffix.lower() in IMAGE_SUFFIXES:
            raise UsageError(f"--json must be a file of JSON, got the image {args.json}")
        check_output(Path(args.json))
    loaded = load_model(args.model, img_size=args.img_size, device=choose_device(args.device))
    rows = []
    code = 0
    each = classify if loaded.classifies else find_objects
    for error, text, of_image in each(loaded, images, args):
        rows += of_image
        if error:
            code = 1
            print(f"error: {error}", file=sys.stderr)
        elif args.json != "-":
            print(text, flush=True)
    if args.json == "-":
        print(json.dumps(rows, indent=1))
    elif args.json:
        write_json(Path(args.json), rows)
        print(f"written: {args.json}")
    return code
