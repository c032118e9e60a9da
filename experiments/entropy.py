"""How sharp the maps of CIFAR networks are, by layer: entropy over log N, and the largest probability.

    python -m experiments.entropy TAR experiments/results/shipped-entropy.csv
    git show 3fcdab3:weights/pa_conv_transformer_cifar.fast_c10.safetensors > pa_conv_transformer_cifar.safetensors
    python -m experiments.entropy TAR collapsed-entropy.csv --weights pa_conv_transformer_cifar.safetensors

Without --weights, the networks are the shipped ones. TAR holds CIFAR-10's test images as class/name.png; the script
reads every tenth. Entropy is 1 where a query looks at all N pixels equally, 0 where it looks at one. The figures are
means over images, heads and queries.
"""

import argparse
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import timm
import torch
from PIL import Image
from torch import nn

import ea_vision
from ea_vision.base.errors import exit_code
from ea_vision.models.conv_transformer import SHIPPED


def photos(tar: str, step: int = 10) -> torch.Tensor:
    """Return every `step`-th image, (B, 3, 32, 32) in 0..1."""
    with tarfile.open(tar) as file:
        members = [member for member in file if member.isfile()]
        images = []
        for member in members[::step]:
            image = Image.open(file.extractfile(member))
            images.append(np.asarray(image.convert("RGB")))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255


@torch.no_grad()
def rows(model: nn.Module, name: str, images: torch.Tensor) -> pd.DataFrame:
    """Return one row per attention layer of a network."""
    model.eval()
    mean = torch.tensor(model.pretrained_cfg["mean"]).view(-1, 1, 1)
    std = torch.tensor(model.pretrained_cfg["std"]).view(-1, 1, 1)
    figures = []
    for batch in images.split(100):
        with ea_vision.record_attention(model) as maps:
            model((batch - mean) / std)
        for number, layer in maps.items():
            attn = layer.attn.double()
            entropy = torch.special.entr(attn).sum(-1)
            share = entropy.mean().item() / math.log(attn.shape[-1])
            largest = attn.amax(-1).mean().item()
            figures.append({"layer": number, "entropy_share": share, "largest": largest})
    layers = pd.DataFrame(figures).groupby("layer", as_index=False)
    means = layers.mean().round(3)
    means.insert(0, "model", name)
    return means


def _of_file(path: Path) -> nn.Module:
    name, _, _ = path.name.partition(".")
    return timm.create_model(name, checkpoint_path=str(path))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", metavar="TAR")
    parser.add_argument("output", type=Path, help="CSV file of the table")
    parser.add_argument(
        "--weights", nargs="+", type=Path, metavar="NAME.safetensors", help="files of weights"
    )
    args = parser.parse_args(argv)
    images = photos(args.images)
    if args.weights:
        networks = {path.stem: _of_file(path) for path in args.weights}
    else:
        networks = {name: timm.create_model(name, pretrained=True) for name in SHIPPED}
    table = pd.concat([rows(model, name, images) for name, model in networks.items()])
    table.to_csv(args.output, index=False)
    print(table.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
