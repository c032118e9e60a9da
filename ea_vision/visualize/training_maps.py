"""Maps while training: what one query attends to in the same few images, every so many epochs (--log-maps)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.recorder.loading import LoadedModel
from ea_vision.recorder.recording import prefix_names, recordable_layers
from ea_vision.visualize.figure_options import spread
from ea_vision.visualize.heatmap import draw_images
from ea_vision.visualize.image_maps import MEAN, record
from ea_vision.visualize.writing import save

DPI = 100


class TrainingMaps:
    """Draws RUN/maps/epoch_0005.png: a row a layer (of at most six), a column an image, mean of heads.

    Args:
        folder: of the run.
        model: the network that is trained.
        images: (M, 3, H, W), normalised; names: of each, such as its number and class.
        mean, std: of the normalisation, by channel.

    Raises:
        UsageError: a network without attention that can be recorded, or a file in place of the folder.
    """

    def __init__(self, folder: Path, model: nn.Module, images: Tensor, names: Sequence[str], mean: Sequence[float],
                 std: Sequence[float]) -> None:
        layers = recordable_layers(model)
        if not layers:
            raise UsageError(f"--log-maps needs a network with attention that can be recorded, and "
                             f"{type(model).__name__} has none")
        self.run, self.folder, self.layers, self.names = folder.resolve().name, folder / "maps", spread(layers), names
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--log-maps draws into the folder {self.folder}, which is a file")
        scale, shift = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (std, mean))
        self.images = (images.float().cpu() * scale + shift).clamp(0, 1)
        H, W = images.shape[-2:]
        self.config = {"mean": tuple(mean), "std": tuple(std), "input_size": (3, H, W), "crop_pct": 1.0,
                       "interpolation": "bilinear"}
        self.query = "cls" if "cls" in prefix_names(model) else (H // 2, W // 2)

    def draw(self, model: nn.Module, epoch: int) -> Path:
        """Draw the maps of `model`, which is left as it was; return the picture's path.

        Raises:
            UsageError: a layer whose maps have no place in the image, or no such query.
        """
        recordings = [record(LoadedModel(model, name, tuple(image.shape[1:]), self.config), image, self.layers)
                      for name, image in zip(self.names, self.images, strict=True)]
        figure = draw_images(recordings, [layer.number for layer in self.layers], [MEAN], self.query,
                             title=f"{self.run}, epoch {epoch}")
        path = self.folder / f"epoch_{epoch:04d}.png"
        path.parent.mkdir(exist_ok=True)
        save(figure, path, DPI)
        return path
