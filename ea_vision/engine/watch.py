"""What the attention maps of a few images come to after each epoch: entropy and largest probability by layer, columns
of metrics.csv. The recorder lives on a floor above and is loaded by its name.
"""

import importlib
import logging
import math

import torch
from torch import nn

COLLAPSED = 0.05  # mean entropy of a layer's rows over that of uniform attention
log = logging.getLogger(__name__)


class MapsWatch:
    """What the attention maps of a run come to; a warning is logged once."""

    warned = False

    @torch.no_grad()
    def __call__(self, network: nn.Module, images: torch.Tensor) -> dict[str, float]:
        """Return entropy_N and largest_N of each layer N: the mean entropy of its maps' rows over that of uniform
        attention (nan for maps with negative entries), and their mean largest probability; {} of a network without
        attention that can be recorded. The network is left in eval mode.

        Of images (B, 3, S, S) about as many pixels as 32 of 32 x 32 have are taken.
        """
        recorder = importlib.import_module("ea_vision.recorder.recording")
        attention_entropy = importlib.import_module(
            "ea_vision.recorder.quantities"
        ).attention_entropy
        if not recorder.recordable_layers(network):
            return {}
        columns = {}
        try:
            with recorder.record_attention(network.eval()) as maps:
                network(images[: max(4, 2**15 // images.shape[-1] ** 2)])
        except (
            ValueError,
            RuntimeError,
        ) as error:  # maps that are not of tokens over the image, or none formed
            self._warn(f"attention maps are not watched: {error}")
            return {}
        for number, layer in maps.items():
            attn = layer.attn.float()  # (B, heads, N, keys)
            entropy = attention_entropy(attn).mean().item() / max(math.log(attn.shape[-1]), 1e-9)
            columns |= {
                f"entropy_{number}": entropy,
                f"largest_{number}": attn.amax(-1).mean().item(),
            }
            if entropy < COLLAPSED:
                self._warn(f"layer {number}: attention has collapsed to single pixels; see qk_norm")
        return columns

    def _warn(self, message: str) -> None:
        """Log a warning, once in a run."""
        if not self.warned:
            log.warning(message)
        self.warned = True
