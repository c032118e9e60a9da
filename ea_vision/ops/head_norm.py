"""The norm of queries and keys (`qk_norm`): each head's vector divided by the root of its mean square.

    q_i <- gain * q_i / rms(q_i),   k_j <- k_j / rms(k_j),   rms(x) = sqrt(mean(x**2) + 1e-6)

One equation in three forms. `readable` is the reference, has derivatives of every order and is what a compiler fuses;
`by_parts` saves memory traffic on a CPU; `by_rms_norm` makes few calls, which matters most on a GPU.

Shape letters: B batch, K heads, D width of a head, N pixels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6
CACHED_NUMBERS = 2**17  # half a megabyte in float32


def _gains(gain: Tensor) -> Tensor:
    """Return the factors of all heads, (2K, 1, 1): the gain (K) for queries, then 1 for keys."""
    return torch.cat([gain, torch.ones_like(gain)]).view(-1, 1, 1)


def _rate(wide: Tensor) -> Tensor:
    """Return one over the root of the mean square: (B, 2K, D, N) -> (B, 2K, 1, N)."""
    return ((wide * wide).mean(2, keepdim=True) + EPSILON).rsqrt()


def readable(qk: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise the queries and keys.

    Args:
        qk: (B, 2K, D, N), the heads of queries, then those of keys.
        gain: (K,).

    Returns:
        queries and keys, (B, K, N, D) each, computed in float32 at least.
    """
    wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
    normalised = wide * (_rate(wide) * _gains(gain))
    q, k = normalised.to(qk.dtype).transpose(2, 3).chunk(2, dim=1)
    return q, k


def by_rms_norm(qk: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `readable` with torch's fused norm."""
    width = qk.shape[2]
    normalised = F.rms_norm(qk.transpose(2, 3), (width,), eps=EPSILON).to(qk.dtype)
    q, k = normalised.chunk(2, dim=1)
    return q * gain.view(-1, 1, 1).to(qk.dtype), k


def by_parts(qk: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `readable` for a few images at a time, so that intermediate results stay in the cache."""
    q, k, _ = _ByParts.apply(qk, gain)
    return q, k


def _in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (B, ...) along the batch into parts that fit a CPU's cache."""
    first = tensors[0]
    images = max(1, len(first) * CACHED_NUMBERS // max(1, first.numel()))
    return zip(*(tensor.split(images) for tensor in tensors), strict=True)


class _ByParts(torch.autograd.Function):
    """The autograd function of `by_parts`; it also returns the rates."""

    @staticmethod
    def forward(qk: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normalised = torch.empty_like(qk)
        wide_dtype = torch.promote_types(qk.dtype, torch.float32)
        rate = torch.empty_like(qk[:, :, :1], dtype=wide_dtype)
        gains = _gains(gain)
        for x, to_normalised, to_rate in _in_parts(qk, normalised, rate):
            wide = x.to(wide_dtype, copy=True)
            to_rate.copy_(_rate(wide))
            to_normalised.copy_(wide.mul_(to_rate * gains))
        q, k = normalised.transpose(2, 3).chunk(2, dim=1)
        return q, k, rate

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        rate = output[2]
        ctx.mark_non_differentiable(rate)
        ctx.save_for_backward(*inputs, rate)

    @staticmethod
    def backward(ctx, grad_q: Tensor, grad_k: Tensor, _) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients, from y = rate * gain * x and d rate / dx = -rate**3 x / D."""
        qk, gain, rate = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated again
            learns = [
                x for x, needed in zip((qk, gain), ctx.needs_input_grad, strict=True) if needed
            ]
            outputs = readable(qk, gain)
            grads = torch.autograd.grad(outputs, learns, (grad_q, grad_k), create_graph=True)
            remaining = iter(grads)
            return tuple(next(remaining) if needed else None for needed in ctx.needs_input_grad)
        gains = _gains(gain)
        grad_qk = torch.empty_like(qk)
        along = torch.empty_like(rate)
        grad_q = grad_q.transpose(2, 3)
        grad_k = grad_k.transpose(2, 3)
        parts = _in_parts(qk, rate, grad_q, grad_k, grad_qk, along)
        for x, r, from_q, from_k, to_qk, to_along in parts:
            x = x.to(rate.dtype)
            grad = torch.cat([from_q, from_k], dim=1).to(rate.dtype)
            product = (grad * x).sum(2, keepdim=True).mul_(r)
            to_along.copy_(product)
            times = r * gains
            grad.mul_(times).addcmul_(x, times.mul_(r).mul_(product), value=-1 / qk.shape[2])
            to_qk.copy_(grad)
        grad_gain = along[:, : len(gain)].sum((0, 2, 3))
        return grad_qk, grad_gain.to(gain.dtype)
