"""Pictures of the attention maps of a few fixed images, every few epochs of a run (--draw-maps).

Figures are imported by name, when a run draws: other runs do not load them."""

import importlib
import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from ea_vision.base.devices import random_state_kept
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, create
from ea_vision.base.processes import worker_lost

log = logging.getLogger(__name__)
FOLDER = "maps"  # in the run folder
IMAGES = 4


def check_has_maps(model: nn.Module, name: str) -> None:
    """Raise UsageError for --draw-maps of a network without attention that can be recorded."""
    recorder = importlib.import_module("ea_vision.recorder.recording")
    if not recorder.recordable_layers(model):
        raise UsageError(f"--draw-maps needs a network with attention maps, {name} has none")


class MapsPictures:
    """Draws what IMAGES images to evaluate on, evenly spaced among them, attend to: the mean over heads and queries, by
    layer.

    Args:
        loader: of the images to evaluate on.
        folder: the run folder.
        every: epochs between pictures.
    """

    def __init__(self, loader, folder: Path, every: int):
        self.loader = loader
        self.every = every
        self.folder = folder / FOLDER
        self._pixels: list[Tensor] = []

    def draw(self, network: nn.Module, name: str, epoch: int) -> Path | None:
        """Write maps/epoch_NNNN.png; return its path, or None, with a warning, if the maps cannot be drawn. The random
        state does not change; the network is left in eval mode."""
        path = self.folder / f"epoch_{epoch:04d}.png"
        plots = importlib.import_module("ea_vision.visualize")
        try:
            with random_state_kept(self.loader.device):
                figure = plots.plot_heatmap(
                    {f"{name}, epoch {epoch}": network.eval()},
                    self.pixels(),
                    heads="mean",
                    mean=self.loader.mean.tolist(),
                    std=self.loader.std.tolist(),
                )
            create(self.folder)
            atomic_write(path, figure_bytes(figure))
        except (ValueError, RuntimeError) as error:  # such as maps without tokens over the image
            if isinstance(error, RunError) or worker_lost(error):  # the images cannot be read
                raise
            log.warning("the attention maps of epoch %d are not drawn: %s", epoch, error)
            return None
        return path

    def pixels(self) -> list[Tensor]:
        """Return the images, (3, H, W) in 0..1, on the CPU. They are read once."""
        if not self._pixels:
            count = self.loader.count
            places = [number * count // IMAGES for number in range(min(IMAGES, count))]
            normalised = self.loader.images_of(places)
            mean = self.loader.mean[:, None, None]
            std = self.loader.std[:, None, None]
            self._pixels = list(torch.clamp(normalised * std + mean, 0, 1).cpu())
        return self._pixels
