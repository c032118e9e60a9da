"""AttnLRP: relevance of the pixels for a class, propagated back layer by layer with rules for attention.

Relevance is gradient times input, where the backward of some functions is another: a layer norm's standard deviation is
a constant, an activation is its slope, and of a product each factor gets half. The rules reach any network of torch
functions, and its modules stay as they are. Linear layers and convolutions have the epsilon rule; the package lxt, from
which this form is, has a gamma rule for them too.

* Paper: `AttnLRP` (Achtibat et al. 2024) - https://arxiv.org/abs/2402.05602
* Its authors' package lxt, whose import fails beside transformers 5 - https://github.com/rachtibat/LRP-eXplains-Transformers
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ea_vision.base.errors import UsageError
from ea_vision.layers import AugmentedConv2d, TokenAttention
from ea_vision.recorder.loading import LoadedModel

ACTIVATIONS = (F.gelu, F.relu, F.silu, F.hardswish, F.mish, F.elu, torch.relu, Tensor.relu, torch.tanh, Tensor.tanh)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
GATED = (torch.mul, Tensor.mul, Tensor.__mul__)


class _Backward(torch.autograd.Function):
    """`result`, whose gradient is the one it gets times `factor`, and goes to `x`."""

    @staticmethod
    def forward(ctx, result: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, gradient * ctx.saved_tensors[0], None


def share(x: Tensor, parts: int) -> Tensor:
    """Return x, which gets one of `parts` of its relevance (the uniform rule of products)."""
    return _Backward.apply(x.detach(), x, x.new_tensor(1 / parts))


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), whose relevance goes to x as it is (the identity rule of activations)."""
    result = function(x.detach())
    return _Backward.apply(result, x, result / (x.detach() + 1e-10))


class _Rules(TorchFunctionMode):
    """Replaces the backward of the functions that have a rule; their results stay the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            query, key, value, *rest = args
            return func(share(query, 4), share(key, 4), share(value, 2), *rest, **kwargs)
        if func in ACTIVATIONS:
            kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}  # keeps the input whole
            return slope(lambda x: func(x, **kwargs), args[0])
        if func is F.layer_norm:
            return _layer_norm(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in PRODUCTS + GATED and all(isinstance(x, Tensor) and x.requires_grad and not isinstance(
                x, nn.Parameter) for x in args[:2]):
            return share(result, 2)
        return result


def _layer_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
                eps: float = 1e-5) -> Tensor:
    """See torch.nn.functional.layer_norm; no gradient goes through the standard deviation."""
    dims = tuple(range(-len(shape), 0))
    deviation = (x.var(dims, correction=0, keepdim=True) + eps).sqrt().detach()
    x = (x - x.mean(dims, keepdim=True)) / deviation
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


class RelevanceSource:
    """A ranking by the relevance of a patch's pixels for the predicted class, "attnlrp".

    Args:
        model: any network whose attention is made of torch functions, with weights.
        grid: (h, w) of the patches.

    Raises:
        UsageError: a network with our layers, whose kernels have no rules.
    """

    def __init__(self, model: LoadedModel, grid: tuple[int, int]) -> None:
        ours = [name for name, m in model.model.named_modules() if isinstance(m, (AugmentedConv2d, TokenAttention))]
        if ours:
            raise UsageError(f"attnlrp has rules for softmax, matmul and torch's attention, and {model.label} has "
                             f"evolving or augmented attention: {ours[0]}")
        self.model, self.grid = model, grid

    def relevance(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return (B, 3, H, W), pixels' relevance for the logit of `classes` (B,); images in 0..1."""
        network = self.model.model
        batch = self.model.normalize(images).detach().requires_grad_()
        with torch.enable_grad(), _Rules():
            logits = network(batch)
        gradient, = torch.autograd.grad(logits.float().gather(1, classes[:, None]).sum(), batch)
        return (gradient * batch).detach()

    def __call__(self, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
        pixels = self.relevance(images, classes).sum(1, keepdim=True)
        return {"attnlrp": F.adaptive_avg_pool2d(pixels, self.grid)[:, 0]}
