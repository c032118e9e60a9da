"""Attention maps of a few images during a run: entropy and largest probability by layer after each epoch, columns of
metrics.csv; and pictures of them, every few epochs (--draw-maps).

Recorder and figures are imported by name, when they are used: runs without them do not load them."""

import importlib
import logging
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.base.devices import random_state_kept
from ea_vision.base.errors import RunError, UsageError
from ea_vision.base.figures import figure_bytes
from ea_vision.base.files import atomic_write, create
from ea_vision.base.processes import worker_lost

PIXELS = 2**15
COLLAPSED = 0.05  # mean entropy of a layer's rows over that of uniform attention
FOLDER = "maps"  # of pictures, in the run folder
IMAGES = 4  # of a picture
log = logging.getLogger(__name__)


class MapsWatch:
    """Watches the attention maps of a run; each kind of warning is logged once.

    Attributes:
        warned: the kinds of warnings that were logged.
    """

    def __init__(self):
        self.warned: set[str] = set()

    @torch.no_grad()
    def __call__(self, network: nn.Module, images: Tensor) -> dict[str, float]:
        """Return entropy_N and largest_N of each layer N: the mean entropy of its maps' rows divided by that of uniform
        attention (nan for maps with negative entries or of one key), and their mean largest probability; {} if the
        network has no attention that can be recorded. The network is left in eval mode.

        Only the first images (B, 3, S, S) are used: about as many pixels as 32 images of 32 x 32, at least 4 images.
        """
        recorder = importlib.import_module("ea_vision.recorder.recording")
        quantities = importlib.import_module("ea_vision.recorder.quantities")
        if not recorder.recordable_layers(network):
            return {}
        columns = {}
        count = max(4, PIXELS // images.shape[-1] ** 2)
        try:
            with recorder.record_attention(network.eval()) as maps:
                network(images[:count])
        except (ValueError, RuntimeError) as error:  # maps without tokens over the image, or none
            self._warn("unwatched", f"attention maps are not watched: {error}")
            return {}
        for number, layer in maps.items():
            attn = layer.attn.float()  # (B, heads, N, keys)
            keys = attn.shape[-1]
            entropy = math.nan  # of one key: it always has all of the attention
            if keys > 1:
                entropy = quantities.attention_entropy(attn).mean().item() / math.log(keys)
            columns[f"entropy_{number}"] = entropy
            columns[f"largest_{number}"] = attn.amax(-1).mean().item()
            if entropy < COLLAPSED:
                message = f"layer {number}: attention has collapsed to single pixels; see qk_norm"
                self._warn("collapsed", message)
        return columns

    def _warn(self, kind: str, message: str) -> None:
        """Log the first warning of a kind in a run."""
        if kind not in self.warned:
            log.warning(message)
        self.warned.add(kind)


def check_has_maps(model: nn.Module, name: str) -> None:
    """Raise UsageError for --draw-maps of a network without attention that can be recorded."""
    recorder = importlib.import_module("ea_vision.recorder.recording")
    if not recorder.recordable_layers(model):
        raise UsageError(f"--draw-maps needs a network with attention maps, {name} has none")


@dataclass(eq=False, repr=False)
class MapsPictures:
    """Draws what IMAGES images to evaluate on, evenly spaced among them, attend to: the mean over heads and queries, by
    layer.

    Attributes:
        loader: of the images to evaluate on.
        folder: the run folder.
        every: epochs between pictures.
    """

    loader: Any
    folder: Path
    every: int

    def draw(self, network: nn.Module, name: str, epoch: int) -> Path | None:
        """Write maps/epoch_NNNN.png every few epochs; return its path, or None, with a warning if the maps cannot be
        drawn. The random state does not change; the network is left in eval mode."""
        if epoch % self.every:
            return None
        path = self.folder / FOLDER / f"epoch_{epoch:04d}.png"
        plots = importlib.import_module("ea_vision.visualize")
        try:
            with random_state_kept(self.loader.device):
                figure = plots.plot_heatmap(
                    {f"{name}, epoch {epoch}": network.eval()},
                    self.pixels,
                    heads="mean",
                    mean=self.loader.mean.tolist(),
                    std=self.loader.std.tolist(),
                )
            create(path.parent)
            atomic_write(path, figure_bytes(figure))
        except (ValueError, RuntimeError) as error:  # such as maps without tokens over the image
            if isinstance(error, RunError) or worker_lost(error):  # the images cannot be read
                raise
            log.warning("the attention maps of epoch %d are not drawn: %s", epoch, error)
            return None
        return path

    @cached_property
    def pixels(self) -> list[Tensor]:
        """The images, (3, H, W) in 0..1, on the CPU. They are read once."""
        count = self.loader.count
        places = [number * count // IMAGES for number in range(min(IMAGES, count))]
        normalised = self.loader.images_of(places)
        return list(self.loader.unnormalize(normalised).clamp(0, 1).cpu())
