"""Attention maps of a few images after each epoch: entropy and largest probability by layer, columns of metrics.csv.
The recorder is imported by name: runs without it do not load it."""

import importlib
import logging
import math

import torch
from torch import nn

PIXELS = 2**15
COLLAPSED = 0.05  # mean entropy of a layer's rows over that of uniform attention
log = logging.getLogger(__name__)


class MapsWatch:
    """Watches the attention maps of a run; each kind of warning is logged once.

    Attributes:
        warned: the kinds of warnings that were logged.
    """

    def __init__(self):
        self.warned: set[str] = set()

    @torch.no_grad()
    def __call__(self, network: nn.Module, images: torch.Tensor) -> dict[str, float]:
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
