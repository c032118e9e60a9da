"""Maps while training: what one query attends to in the same few images, every so many epochs (--log-maps)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.recording import prefix_names, recordable_layers
from ea_vision.visualize.figure_options import spread
from ea_vision.visualize.heatmap import draw_columns
from ea_vision.visualize.image_maps import MEAN, record
from ea_vision.visualize.writing import save

DPI = 100


def draw_maps(folder: Path, model: nn.Module, epoch: int, images: Tensor, names: Sequence[str], mean: Sequence[float],
              std: Sequence[float]) -> Path:
    """Draw RUN/maps/epoch_0005.png: a row a layer (of at most six), a column an image, mean of heads, of the class
    token, or else of the middle pixel.

    Args:
        folder: of the run.
        model: the network that is trained, which is left as it was.
        images: (M, 3, H, W), normalised; names: of each, such as its number and class.
        mean, std: of the normalisation, by channel.

    Returns:
        the picture's path.

    Raises:
        UsageError: a layer whose maps have no place in the image.
    """
    layers = spread(recordable_layers(model))
    H, W = images.shape[-2:]
    scale, shift = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (std, mean))
    seen = (images.float().cpu() * scale + shift).clamp(0, 1)
    config = {"mean": tuple(mean), "std": tuple(std), "input_size": (3, H, W), "crop_pct": 1.0,
              "interpolation": "bilinear"}
    recordings = [record(LoadedModel(model, name, (H, W), config), image, layers)
                  for name, image in zip(names, seen, strict=True)]
    query = "cls" if "cls" in prefix_names(model) else (H // 2, W // 2)
    figure = draw_columns(recordings, names, [[layer.number for layer in layers]] * len(recordings), [MEAN], [query],
                          title=f"{folder.resolve().name}, epoch {epoch}", what=f" on {len(recordings)} images")
    path = folder / "maps" / f"epoch_{epoch:04d}.png"
    path.parent.mkdir(exist_ok=True)
    save(figure, path, DPI)
    return path
