"""How sharp the maps of the shipped CIFAR networks are, by layer: entropy over log N, and the largest probability.

    python -m experiments.entropy test.tar experiments/results/shipped-entropy.csv

TAR holds CIFAR-10's test images as class/name.png; every tenth is taken. Entropy is 1 where a query looks at all N
pixels alike, 0 where it looks at one. Means over images, heads and queries; so they hardly change with the images.
"""

import math
import sys
import tarfile

import numpy as np
import pandas as pd
import timm
import torch
from PIL import Image

import ea_vision
from ea_vision.models.conv_transformer import SHIPPED


def photos(tar: str, step: int = 10) -> torch.Tensor:
    """Return every `step`-th image, (B, 3, 32, 32) in 0..1."""
    with tarfile.open(tar) as file:
        images = [
            np.asarray(Image.open(file.extractfile(member)).convert("RGB"))
            for member in [member for member in file if member.isfile()][::step]
        ]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255


@torch.no_grad()
def rows(name: str, images: torch.Tensor) -> list[dict]:
    """Return a row for each attention layer of a network."""
    model = timm.create_model(name, pretrained=True).eval()
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    found: dict[int, list[tuple[float, float]]] = {}
    for batch in images.split(100):
        with ea_vision.record_attention(model) as maps:
            model((batch - mean) / std)
        for number, layer in maps.items():
            share = torch.special.entr(layer.attn.double()).sum(-1).mean() / math.log(
                layer.attn.shape[-1]
            )
            found.setdefault(number, []).append((share.item(), layer.attn.amax(-1).mean().item()))
    return [
        {
            "model": name,
            "layer": number,
            "entropy_share": round(float(np.mean(values, 0)[0]), 3),
            "largest": round(float(np.mean(values, 0)[1]), 3),
        }
        for number, values in found.items()
    ]


if __name__ == "__main__":
    images = photos(sys.argv[1])
    table = pd.DataFrame([row for name in SHIPPED for row in rows(name, images)])
    table.to_csv(sys.argv[2], index=False)
    print(table.to_string(index=False))
