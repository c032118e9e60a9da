"""Blocks and stages with chained attention, and what they hand on.

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d
from ea_vision.layers.handing_on import Handed, Relay, check_found
from ea_vision.layers.recomputing import checkpoint

# (x, prev_logits) -> (x, logits) | x
Step = Callable[[Tensor, "Tensor | None"], "Tensor | tuple[Tensor, Tensor | None]"]


def growing_rates(last: float, count: int) -> Iterator[float]:
    """Yield a rate of stochastic depth for each of `count` blocks, from 0 at the first to `last` at the last."""
    for number in range(count):
        yield last * number / max(1, count - 1)


def hand_on(x: Tensor, logits: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Return a block's output: (x, logits), or only x if no layer reads the logits.

    Tools that hook a module, such as Grad-CAM, expect a tensor.
    """
    return x if logits is None else (x, logits)


def received(output: Tensor | tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return (x, logits) from the output of a block or a stage; logits are None if it returned a tensor alone."""
    return output if isinstance(output, tuple) else (output, None)


def run_conv(conv: nn.Module, x: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run a convolution, augmented or not; return its output and the logits for the next layer that reads them."""
    if not isinstance(conv, AugmentedConv2d):
        return conv(x), logits
    check_found(conv.evolution, logits)
    x, logits = conv(x, logits)
    return x, logits if conv.need_logits else None


def run_block(
    block: nn.Module, x: Tensor, logits: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a block; return its output and logits. With `recompute` the backward pass runs it again."""
    output = checkpoint(block, x, logits) if recompute else block(x, logits)
    return received(output)


def _run_through(
    parts: Sequence[Callable[[Tensor], Tensor]], x: Tensor, prev_logits: Tensor | None
) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def through(*parts: Callable[[Tensor], Tensor]) -> Step:
    """Return a step of `feature_steps` through parts that take and return a tensor."""
    return partial(_run_through, parts)  # torch 2.8 compiles no nested function with annotations


class AttnStage(nn.Sequential):
    """A stage whose blocks hand their attention logits on: (x, prev_logits) -> (x, logits)."""

    grad_checkpointing: bool = False

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = prev_logits
        for block in self:
            x, logits = run_block(block, x, logits, self.grad_checkpointing)
        return x, logits


class TensorStage(AttnStage):
    """An `AttnStage` that takes and returns a tensor; the logits go from stage to stage by a relay: x -> x.

    So tools can take the network apart like a plain one: nn.Sequential, torchvision's IntermediateLayerGetter, hooks.

    Attributes:
        relay: the network's.
    """

    def __init__(self, *blocks: nn.Module, relay: Relay | None = None):
        super().__init__(*blocks)
        self.relay = Relay() if relay is None else relay

    def __getitem__(self, index: int | slice) -> nn.Module:
        part = super().__getitem__(index)
        if isinstance(part, TensorStage):
            part.relay = self.relay
        return part

    def forward(self, x: Tensor) -> Tensor:
        handed = self.relay.find(x)
        x, logits = super().forward(x, handed.logits)
        with_gradients = torch.is_grad_enabled()
        self.relay.hand_on(x, Handed(logits=logits, with_gradients=with_gradients))
        return x
