"""Find objects: names, scores and boxes, as text, COCO's results and pictures; and what a found object attends to.

    ea-vision detect runs/mine photo.jpg -o found.png
    ea-vision detect runs/mine photos/ --json results.json -o pictures/found.png
    ea-vision detect runs/mine photo.jpg --attention 1,2 --layers 3-5 -o found.png

--attention 1 draws the backbone's maps of the surest object as found-attention.png: the query is the middle of its box.
An image that cannot be read is named, the others are gone through, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from ea_vision.base import files
from ea_vision.base.errors import UsageError
from ea_vision.base.figures import COLORS, dpi, inches
from ea_vision.base.files import atomic_write
from ea_vision.base.processes import choose_device
from ea_vision.detection.coco import read_coco
from ea_vision.detection.draw import picture
from ea_vision.detection.predict import Detections
from ea_vision.detection.transforms import boxes_to_square
from ea_vision.recorder.inputs import find_images, read_image
from ea_vision.recorder.loading import DetectorModel, add_options, load_model, positive
from ea_vision.recorder.recording import AttentionLayer
from ea_vision.visualize.figure_options import Asked, add_style, style_of
from ea_vision.visualize.heatmap import draw_heatmap
from ea_vision.visualize.image_maps import Head, record
from ea_vision.visualize.map_style import STYLE, MapStyle
from ea_vision.visualize.writing import check_output, name_outputs, save


def attention_figure(model: DetectorModel, image: Image.Image, found: Detections, numbers: Sequence[int],
                     layers: Sequence[AttentionLayer], heads: Sequence[Head], style: MapStyle = STYLE, *,
                     width: float | None = None) -> Figure:
    """Draw what the middle of a box attends to, by head and layer of the backbone; the photo above has the boxes.

    Args:
        numbers: of the objects, counted from 0.
        layers: of `parse_layers`.
        heads: counted from 0, or "mean".
        width: inches.
    """
    recording = record(model, image, layers)
    points = [model.query_in(found, number) for number in numbers]
    figure = draw_heatmap(recording, [layer.number for layer in layers], heads, points, style, width=width)
    [photo] = [axes for axes in figure.axes if axes.get_label() == "photo"]
    boxes = boxes_to_square(found.boxes, found.size, model.img_size[0]).tolist()
    for place, number in enumerate(numbers):
        x1, y1, x2, y2 = boxes[number]
        photo.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, linewidth=1.5,
                                  edgecolor=COLORS[place % len(COLORS)]))
    return figure


def ids_of(path: Path) -> dict[str, int | str]:
    """Image ids by file name, of a COCO JSON, where each file's name is there once."""
    images = read_coco(path)["images"]
    ids = {Path(image["file_name"]).name: image["id"] for image in images}
    if len(ids) < len(images):
        raise UsageError(f"{path} must have each file name once, got {len(images)} images with {len(ids)} names")
    return ids


def parse_numbers(text: str) -> list[int]:
    """`1,3` -> [0, 2]."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--attention must be numbers of objects, counted from 1, the surest first, got {text!r}")
    return [int(word) - 1 for word in words]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="RUN", help="run folder of train-detection, or a checkpoint in one")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files or folders of them")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw what is found: PNG, SVG or PDF by its suffix; of "
                        "several images, each gets its own file, its name added")
    parser.add_argument("--json", metavar="FILE", help="write COCO's results: image_id (the path, or as --ids says), "
                        "category_id, bbox, score ('-': to standard output instead of the text)")
    parser.add_argument("--ids", type=Path, metavar="JSON", help="a COCO JSON whose image ids --json takes, by file "
                        "name")
    parser.add_argument("--min-score", type=float, default=0.05, metavar="0..1",
                        help="of what --json holds (default: %(default)s)")
    parser.add_argument("--draw-score", type=float, default=0.4, metavar="0..1",
                        help="of what is named, drawn and counted by --attention (default: %(default)s)")
    parser.add_argument("--attention", metavar="1,2", help="draw what these objects of each image attend to, counted "
                        "from 1, the surest first, as FILE-attention beside --output")
    parser.add_argument("--layers", metavar="1,2|3-5|all", help="attention layers of --attention (default: up to 6)")
    parser.add_argument("--heads", default="all,mean", metavar="0,1|all|mean",
                        help="heads of --attention (default: %(default)s)")
    add_style(parser)
    parser.add_argument("--width", type=inches, metavar="3.3|6.75|N", help="of the pictures in inches; names have 7 "
                        "points at any width (default: 6.4 for the longer side)")
    parser.add_argument("--dpi", type=dpi, default=150, help="of pictures made of pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=8, help="images computed together (default: 8)")
    add_options(parser, "--device", "--exif-rotation")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    paths = find_images(args.images)
    if args.attention and not args.output:
        raise UsageError("--attention needs --output, the file beside which it draws")
    numbers, style = parse_numbers(args.attention) if args.attention else [], style_of(args)
    outputs = name_outputs(check_output(Path(args.output)), paths) if args.output else []
    if args.json not in (None, "-"):
        files.check_output(Path(args.json))
    ids = ids_of(args.ids) if args.ids else None
    unknown = [path for path in paths if ids is not None and Path(path).name not in ids]
    if unknown:
        raise UsageError(f"{args.ids} has no image {Path(unknown[0]).name} ({len(unknown)} of {len(paths)} are not "
                         "there)")
    model = load_model(args.model, device=choose_device(args.device))
    if not isinstance(model, DetectorModel):
        raise UsageError(f"a run of train-detection is required, and {args.model} is none")
    layers, heads = [], []
    if numbers:
        asked = Asked.by_options(args, [model], some=True)
        [layers], heads = asked.layers, asked.heads

    rows, written, broken = [], [], 0
    places = list(zip(paths, outputs or [None] * len(paths), strict=True))
    for start in range(0, len(places), args.batch_size):
        images = []
        for path, output in places[start:start + args.batch_size]:
            try:
                images.append((path, output, read_image(path, exif_rotation=args.exif_rotation)))
            except UsageError as error:
                print(f"error: {error}", file=sys.stderr)
                broken += 1
        detected = model.detect([image for *_, image in images])
        for (path, output, image), found in zip(images, detected, strict=True):
            rows += found.above(args.min_score).results(path if ids is None else ids[Path(path).name],
                                                        model.category_ids)
            sure = found.above(args.draw_score)
            if args.json != "-":
                names = [f"{model.classes[label]} {score:.2f}" for label, score in
                         zip(sure.labels.tolist(), sure.scores.tolist(), strict=True)]
                print(f"{path}: {', '.join(names) or 'nothing found'}", flush=True)
            if output is None:
                continue
            save(picture(image, sure, model.classes, width=args.width), output, args.dpi)
            written.append(output)
            shown = [number for number in numbers if number < len(sure)]
            if shown:
                beside = output.with_stem(f"{output.stem}-attention")
                figure = attention_figure(model, image, sure, shown, layers, heads, style, width=args.width)
                save(figure, beside, args.dpi)
                written.append(beside)
    if args.json == "-":
        print(json.dumps(rows))
    elif args.json:
        atomic_write(Path(args.json), (json.dumps(rows) + "\n").encode())
        written.append(args.json)
    if written and args.json != "-":
        print("written:", *written)
    return 1 if broken else 0
