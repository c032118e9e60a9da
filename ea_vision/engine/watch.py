"""What the attention maps of one batch of images come to after each epoch: entropy and largest probability by layer in
metrics.csv, and pictures (--log-maps). Recorder and figures live on floors above: they are loaded by their names, and
the former where a network may have attention.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from ea_vision.base.errors import UsageError
from ea_vision.engine.step_log import StepLog

RECORDER, QUANTITIES = "ea_vision.recorder.recording", "ea_vision.recorder.quantities"
DRAWN_BY = "ea_vision.visualize.training_maps"
FOLDER = "maps"  # of a run folder
DRAWN = 4  # images
COLLAPSED = 0.05  # mean entropy of a layer's rows over that of uniform attention
log = logging.getLogger(__name__)


class FirstImages:
    """A loader that keeps the first images that it gives, about as many pixels as 32 images of 32 x 32 have."""

    def __init__(self, loader):
        self.loader, self.images, self.targets = loader, None, []

    def __len__(self) -> int:
        return len(self.loader)

    def batches(self) -> Iterator:
        with closing(self.loader.batches()) as batches:
            for batch in batches:
                if self.images is None and len(batch[0]):
                    self.images = batch[0][:max(DRAWN, min(32, 2**15 // batch[0].shape[-1] ** 2))].clone()
                    self.targets = batch[1][:DRAWN].tolist()
                yield batch


class MapsWatch:
    """Called after an epoch with the network that was evaluated, and the epochs and updates so far.

    Args:
        loader: of the images that are evaluated on; its first ones are watched, from the first evaluation on.
        mean, std: of their normalisation.
        every: epochs between pictures; 0: none.
        epochs: of the run; the last epoch is drawn, too.
        classes: names of the targets, for the pictures.

    Raises:
        UsageError: pictures of a network without attention that can be recorded, or no place for them.
    """

    def __init__(self, model: nn.Module, loader: FirstImages, mean: Sequence[float], std: Sequence[float], folder: Path,
                 step_log: StepLog | None, every: int, epochs: int, classes: Sequence[str] = ()):
        self.loader, self.normalisation, self.folder, self.step_log = loader, (mean, std), folder, step_log
        self.every, self.epochs, self.classes, self.warned = every, epochs, classes, False
        self.recorder = importlib.import_module(RECORDER)
        self.has_attention = bool(self.recorder.recordable_layers(model))
        if every and not self.has_attention:
            raise UsageError(f"--log-maps needs a network with attention that can be recorded, and "
                             f"{type(model).__name__} has none")
        if every and (folder / FOLDER).exists() and not (folder / FOLDER).is_dir():
            raise UsageError(f"--log-maps draws into {folder / FOLDER}, which must be a folder, and is a file")

    def __call__(self, network: nn.Module, epoch: int, updates: int) -> dict[str, float]:
        """Return entropy_N and largest_N of each layer N: the mean entropy of its maps' rows over that of uniform
        attention, and their mean largest probability."""
        images = self.loader.images
        if images is None or not self.has_attention:
            return {}
        if self.every and (epoch % self.every == 0 or epoch >= self.epochs):
            names = [f"image {number}: {self.classes[target]}" for number, target in enumerate(self.loader.targets)]
            picture = importlib.import_module(DRAWN_BY).draw_maps(self.folder, network, epoch, images[:DRAWN], names,
                                                                  *self.normalisation)
            if self.step_log is not None:
                self.step_log.add_picture("attention maps", picture, updates)
        columns = self.numbers(network, images)
        collapsed = [name.partition("_")[2] for name, value in columns.items()
                     if name.startswith("entropy") and value < COLLAPSED]
        if collapsed and not self.warned:
            self.warned = True
            log.warning("layer %s: attention has collapsed to single pixels; see qk_norm", ", ".join(collapsed))
        return columns

    @torch.no_grad()
    def numbers(self, network: nn.Module, images: torch.Tensor) -> dict[str, float]:
        """Return the columns for images (B, 3, H, W); an entropy of maps with negative entries is not a number."""
        attention_entropy = importlib.import_module(QUANTITIES).attention_entropy
        training, columns = network.training, {}
        try:
            with self.recorder.record_attention(network.eval()) as maps:
                network(images)
        except (ValueError, RuntimeError) as error:  # maps that are not of tokens over the image, or none formed
            self.has_attention = False
            log.warning("attention maps are not watched: %s", error)
            return {}
        finally:
            network.train(training)
        for number, layer in maps.items():
            attn = layer.attn.float()  # (B, heads, N, keys)
            entropy = attention_entropy(attn).mean().item() / max(math.log(attn.shape[-1]), 1e-9)
            columns |= {f"entropy_{number}": entropy, f"largest_{number}": attn.amax(-1).mean().item()}
        return columns
