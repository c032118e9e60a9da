"""Export a run of train-detection, non-maximum suppression included, to ONNX (.onnx) or torch.export (.pt2).

    ea-vision export-detector runs/mine -o detector.onnx

The file takes one image, `images`: float32 (1, 3, S, S) in 0..1, RGB, the longer side fitted to the run's S pixels, the
rest padded at the right and below with the grey (124, 116, 104) / 255. It gives `boxes` (n, 4), x1 y1 x2 y2 in pixels
of that square, `scores` (n,) and `labels` (n,) from 0, the surest first. The names of the classes are in its metadata.
What was written is run on images beside the run's own detector, and the largest difference is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ea_vision.analysis.inputs import find_images, read_image
from ea_vision.analysis.loading import DetectorModel, load_model
from ea_vision.base.errors import RunError, UsageError
from ea_vision.detection.export import SUFFIXES, TOLERANCE, export


def runner(path: Path) -> Callable[[Tensor], list[np.ndarray]] | None:
    """What runs an exported detector: (1, 3, S, S) -> boxes, scores, labels. None: onnxruntime is not installed."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return lambda images: [output.detach().numpy() for output in program(images)]
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})


def largest_difference(model: DetectorModel, run: Callable[[Tensor], list[np.ndarray]], image: Tensor) -> float:
    """Between the boxes (in units of the image's side) and scores of both on an image (3, S, S); infinite where they
    find other objects. Objects of the same score may change places."""
    with torch.inference_mode():
        own = model.model(image[None])[0]
    boxes, scores, labels = (torch.as_tensor(output) for output in run(image[None]))
    if len(scores) != len(own["scores"]):
        return float("inf")
    largest = float((scores - own["scores"]).abs().max()) if len(scores) else 0.0
    left = list(range(len(scores)))
    for box, label in zip(own["boxes"] / model.img_size[0], own["labels"], strict=True):
        away = [float((boxes[n] / model.img_size[0] - box).abs().max()) if labels[n] == label else float("inf")
                for n in left]
        nearest = int(np.argmin(away))
        largest = max(largest, away[nearest])
        del left[nearest]
    return largest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run folder of train-detection, or a checkpoint in one")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE",
                        help=f"{' or '.join(SUFFIXES)}")
    parser.add_argument("--check", nargs="+", default=[], metavar="IMAGE", help="image files or folders to compare on "
                        "(default: noise)")
    args = parser.parse_args(argv)
    paths = find_images(args.check) if args.check else []
    model = load_model(args.run)
    if not isinstance(model, DetectorModel):
        raise UsageError(f"a run of train-detection is required, and {args.run} is none")
    images = [model.prepare(read_image(path)) for path in paths] or [
        torch.rand(3, *model.img_size, generator=torch.Generator().manual_seed(0))]
    export(model.model, args.output, model.classes)
    run = runner(args.output)
    if run is None:
        print(f"written: {args.output}; not compared, since onnxruntime is not installed")
        return 0
    differences = [largest_difference(model, run, image) for image in images]
    about = f"largest difference on {len(images)} image(s): {max(differences):.1e}"
    if max(differences) > TOLERANCE:
        raise RunError(f"{args.output} was written, and finds other objects than {args.run}; {about}")
    print(f"written: {args.output}; {about}")
    return 0
