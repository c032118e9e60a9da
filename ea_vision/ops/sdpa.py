"""Unchained attention (AA) without an N x N tensor: torch's scaled_dot_product_attention with position folded in.

The position terms become part of the dot product: append to q its products with the tables, by absolute key row and
column, and to k a one-hot encoding of its row and of its column:

    [q, q.height_rel(row(i), .), q.width_rel(col(i), .)] . [k, onehot(row(j)), onehot(col(j))]

This is the AA paper's equation 4, so any fused kernel can compute it. D grows by H + W.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops.problem import Implementation, Problem, raise_without_second
from ea_vision.ops.reference import relative_logits


def folded(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return scaled q, and k, (B, K, N, D + H + W) each. Their dot product includes the position terms.

    Without position terms they are (B, K, N, D).
    """
    q = problem.q * problem.scale
    k = problem.k
    if problem.height_rel is None:
        return q, k
    B, K, N, D = q.shape
    H, W = problem.feat_size
    row_terms, column_terms = relative_logits(
        q.reshape(B, K, H, W, D), problem.height_rel.to(q.dtype), problem.width_rel.to(q.dtype)
    )
    pixel = torch.arange(N, device=q.device)
    rows = F.one_hot(pixel // W, H).to(k.dtype).expand(B, K, N, H)
    cols = F.one_hot(pixel % W, W).to(k.dtype).expand(B, K, N, W)
    row_terms = row_terms.reshape(B, K, N, H)
    column_terms = column_terms.reshape(B, K, N, W)
    return torch.cat([q, row_terms, column_terms], dim=-1), torch.cat([k, rows, cols], dim=-1)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, scale: float
) -> Tensor:
    """Return torch's fused attention of q, k, v (B, K, N, D), with bias added to the logits: (B, K, N, D).

    Its kernels have no second derivatives: asking for them is an error that names the reference.
    """
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    if not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        for x in (q, k, v):
            if x.requires_grad and not x.is_leaf:  # a hook on a leaf would stay
                x.register_hook(_refuse_second)
    return out


def _refuse_second(grad: Tensor) -> Tensor | None:
    """Return a gradient whose derivative is an error, if a kernel without second derivatives computed it."""
    if grad.grad_fn is not None and grad.grad_fn.name().endswith("NotImplemented"):
        return _WithoutSecond.apply(grad)
    return None


class _WithoutSecond(torch.autograd.Function):
    """The identity, whose derivative is an error."""

    @staticmethod
    def forward(ctx, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_) -> None:
        raise_without_second("torch's fused attention")


class Sdpa(Implementation):
    """torch's scaled_dot_product_attention."""

    name = "sdpa"
    maps = False
    fewer_keys = True

    def forward(self, problem: Problem) -> tuple[Tensor, None]:
        q, k = folded(problem)
        v = problem.v
        # fused kernels want one width, a multiple of 8
        widest = max(q.shape[-1], v.shape[-1])
        width = (widest + 7) // 8 * 8
        wide = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        out = fused_attention(*wide, None, problem.dropout_p, 1.0)
        return out[..., : v.shape[-1]], None
