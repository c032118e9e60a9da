"""Train a small DETR on synthetic scenes and draw where its queries look: the picture of docs/look.md.

    python -m experiments.detr_picture FOLDER -o visualize/detr.webp

A scene is a darkened part of a photo of docs/photos, 64 x 64 pixels, with one to three discs, squares and triangles in
random colours. Held-out scenes have another photo than those for training. The network is transformers' DETR, trained
from random weights with its own loss: a ConvNeXt of two stages (8 x 8 cells), 2 encoder and 3 decoder layers, 6
queries. For a quick start a linear layer on the encoder's cells learns each cell's class and box, too; it is thrown
away. Training takes 4 minutes of one core. FOLDER keeps the network, and a second call draws it.

experiments/results/detr-picture.csv has its accuracy on 300 held-out scenes: the share of objects that a prediction
with a score above 0.5 covers with an IoU above 0.5 ("found"), and with the right class ("named"), and the share of
predictions that cover no object ("false").
"""

import argparse
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torchvision.ops import box_convert, box_iou
from tqdm import tqdm
from transformers import ConvNextConfig, DetrConfig, DetrForObjectDetection

from ea_vision.base.errors import exit_code
from ea_vision.visualize import plot_heatmap
from ea_vision.visualize.tiles import QUERY_COLORS, WHITE_RIM

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "detr-picture.csv"
SIDE = 64  # pixels
CELL = 8
SHAPES = ["disc", "square", "triangle"]
MOST = 3  # objects in a scene
PHOTOS = {"train": ["dog", "horse", "macaw"], "test": ["moose"]}
MEAN = STD = 0.25
WIDTH = 64
BATCH = 16
TEST = 300  # scenes
LR = 1e-3

# image (3, H, W) in 0..1; boxes of the objects (n, 4), corners in pixels; their classes (n)
Scene = tuple[Tensor, Tensor, Tensor]


@cache
def photo(name: str) -> Image.Image:
    with Image.open(ROOT / "docs" / "photos" / f"{name}.jpg") as image:
        return image.convert("RGB")


def scene(split: str, rng: np.random.Generator) -> Scene:
    """Draw a scene of a split, "train" or "test". Objects do not overlap."""
    background = photo(rng.choice(PHOTOS[split]))
    size = int(rng.integers(SIDE, 3 * SIDE))
    x, y = rng.integers(0, background.width - size, 2).tolist()
    image = background.crop((x, y, x + size, y + size)).resize((SIDE, SIDE))
    image = image.point(lambda value: 0.45 * value)
    canvas = ImageDraw.Draw(image)
    boxes = []
    classes = []
    count = rng.integers(1, MOST + 1)
    while len(boxes) < count:
        side = int(rng.integers(14, 29))
        x, y = rng.integers(0, SIDE - side, 2).tolist()
        box = [x, y, x + side, y + side]
        if boxes and box_iou(torch.tensor([box]), torch.tensor(boxes)).any():
            continue
        shape = int(rng.integers(len(SHAPES)))
        levels = [255, *rng.integers([256, 100]).tolist()]
        color = tuple(rng.permutation(levels).tolist())
        right, bottom = x + side - 1, y + side - 1
        if SHAPES[shape] == "disc":
            canvas.ellipse([x, y, right, bottom], color)
        elif SHAPES[shape] == "square":
            canvas.rectangle([x, y, right, bottom], color)
        else:
            canvas.polygon([(x, bottom), (right, bottom), (x + side // 2, y)], color)
        boxes.append(box)
        classes.append(shape)
    pixels = torch.from_numpy(np.array(image)).movedim(2, 0) / 255
    return pixels, torch.tensor(boxes, dtype=torch.float32), torch.tensor(classes)


def scenes(split: str, count: int, rng: np.random.Generator) -> list[Scene]:
    return [scene(split, rng) for _ in range(count)]


def batch_of(batch: list[Scene]) -> Tensor:
    return (torch.stack([image for image, _, _ in batch]) - MEAN) / STD


def relative(boxes: Tensor) -> Tensor:
    """Return boxes as DETR predicts them: center, width and height in units of the image."""
    return box_convert(boxes / SIDE, "xyxy", "cxcywh")


def cells_of(boxes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each cell of the encoder's map shows at its middle: its class, (cells), len(SHAPES) where there is no
    object, and its object's box, (cells, 4)."""
    middles = torch.arange(CELL / 2, SIDE, CELL)
    shown = torch.full((len(middles), len(middles)), len(SHAPES))
    goals = torch.zeros(*shown.shape, 4)
    for box, shape in zip(boxes, classes, strict=True):
        left, top, right, bottom = box.tolist()
        rows = (middles >= top) & (middles < bottom)
        columns = (middles >= left) & (middles < right)
        inside = rows[:, None] & columns
        shown[inside] = shape
        goals[inside] = relative(box)
    return shown.flatten(), goals.flatten(0, 1)


def network() -> DetrForObjectDetection:
    """Return DETR with random weights, drawn as in its paper's code: from transformers' (standard deviation 0.02) it
    hardly learns."""
    backbone = ConvNextConfig(
        num_stages=2,
        depths=[1, 2],
        hidden_sizes=[WIDTH // 2, WIDTH],
        layer_scale_init_value=1.0,
        out_features=["stage2"],
    )
    config = DetrConfig(
        backbone_config=backbone,
        id2label=dict(enumerate(SHAPES)),
        label2id={name: number for number, name in enumerate(SHAPES)},
        num_queries=6,
        d_model=WIDTH,
        dropout=0.0,
        auxiliary_loss=True,
        encoder_layers=2,
        encoder_ffn_dim=2 * WIDTH,
        encoder_attention_heads=4,
        decoder_layers=3,
        decoder_ffn_dim=2 * WIDTH,
        decoder_attention_heads=4,
    )
    model = DetrForObjectDetection(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
    nn.init.normal_(model.model.query_position_embeddings.weight)
    return model


def train(model: DetrForObjectDetection, steps: int, rng: np.random.Generator) -> None:
    on_cells = nn.Linear(model.config.d_model, len(SHAPES) + 1 + 4)
    parameters = [*model.parameters(), *on_cells.parameters()]
    optimizer = torch.optim.AdamW(parameters, LR, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, pct_start=0.05)
    model.train()
    progress = tqdm(range(steps), unit="step", mininterval=20)
    for _ in progress:
        batch = scenes("train", BATCH, rng)
        labels = [{"class_labels": kinds, "boxes": relative(boxes)} for _, boxes, kinds in batch]
        output = model(batch_of(batch), labels=labels)
        cells = [cells_of(boxes, kinds) for _, boxes, kinds in batch]
        shown, goals = map(torch.stack, zip(*cells, strict=True))
        guesses = on_cells(output.encoder_last_hidden_state)
        inside = shown < len(SHAPES)
        loss = output.loss + 10 * F.cross_entropy(guesses[..., :-4].movedim(2, 1), shown)
        loss = loss + 10 * F.l1_loss(guesses[..., -4:][inside], goals[inside])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{output.loss.item():.2f}", refresh=False)
    model.eval()


@torch.no_grad()
def predictions(model: DetrForObjectDetection, example: Scene) -> tuple[Tensor, ...]:
    """Return each query's box (corners, in pixels), class and score."""
    output = model(batch_of([example]))
    scores, classes = output.logits[0].softmax(-1)[:, :-1].max(-1)
    return SIDE * box_convert(output.pred_boxes[0], "cxcywh", "xyxy"), classes, scores


def accuracy(model: DetrForObjectDetection, test: list[Scene]) -> dict[str, float]:
    """Return the counts and shares of the docstring above."""
    objects = found = named = predicted = right = 0
    for example in test:
        _, boxes, classes = example
        guesses, guessed, scores = predictions(model, example)
        covers = (box_iou(boxes, guesses) > 0.5) & (scores > 0.5)
        objects += len(boxes)
        predicted += (scores > 0.5).sum().item()
        found += covers.any(1).sum().item()
        right += covers.any(0).sum().item()
        named += (covers & (classes[:, None] == guessed)).any(1).sum().item()
    shares = {"found": found / objects, "named": named / objects}
    shares["false"] = 1 - right / max(1, predicted)
    return {"scenes": len(test), "objects": objects, **shares}


def draw(model: DetrForObjectDetection, example: Scene) -> Figure:
    """Draw the cross attention of the three queries with the highest scores, one row per layer, and their boxes."""
    boxes, classes, scores = predictions(model, example)
    queries = scores.topk(MOST).indices.sort().values.tolist()
    layers = [f"model.decoder.layers.{number}.encoder_attn" for number in range(3)]
    figure = plot_heatmap(
        {"a small DETR, trained on synthetic scenes": model},
        example[0],
        layers=layers,
        heads="mean",
        queries=[f"query{query + 1}" for query in queries],
        mean=[MEAN] * 3,
        std=[STD] * 3,
        style="fog",
    )
    photo_axes, *tiles = [axes for axes in figure.axes if axes.images]
    for number, (query, color) in enumerate(zip(queries, QUERY_COLORS, strict=False)):
        column = tiles[number::MOST]
        left, top, right, bottom = boxes[query].tolist()
        for axes in (photo_axes, *column):
            box = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=color)
            box.set(linewidth=1.2, path_effects=[WHITE_RIM])
            axes.add_patch(box)
        column[0].title.set_text(
            f"query {number + 1}: {SHAPES[classes[query]]} {scores[query]:.0%}"
        )
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, default="detr.webp")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    test = scenes("test", TEST, np.random.default_rng(1000))
    if not (args.folder / "config.json").is_file():
        torch.manual_seed(args.seed)
        model = network()
        start = time.process_time()
        train(model, args.steps, np.random.default_rng(args.seed))
        minutes = (time.process_time() - start) / 60
        model.save_pretrained(args.folder)
        row = {"seed": args.seed, "steps": args.steps, "batch": BATCH, "cpu_minutes": minutes}
        pd.DataFrame([row | accuracy(model, test)]).round(3).to_csv(args.results, index=False)
    model = DetrForObjectDetection.from_pretrained(args.folder).eval()
    example = next(one for one in test if len(one[1]) == MOST)
    draw(model, example).savefig(args.output, dpi=140)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
