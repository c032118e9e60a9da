"""Unchained attention (AA) without an N x N tensor: torch's scaled_dot_product_attention with position folded in.

The position terms become part of the dot product: append to q its products with the tables, by absolute key row and
column, and to k a one-hot encoding of its row and of its column:

    [q, q.height_rel(row(i), .), q.width_rel(col(i), .)] . [k, onehot(row(j)), onehot(col(j))]

This is the AA paper's equation 4, so any fused kernel can compute it. D grows by H + W.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops.problem import Implementation, Problem
from ea_vision.ops.reference import relative_logits


def folded(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return scaled q, and k, (B, K, N, D + H + W) each. Their dot product includes the position terms.

    Without position terms they are (B, K, N, D).
    """
    height_rel, width_rel = problem.tables()
    q = problem.q * problem.scale
    k = problem.k
    if height_rel is None:
        return q, k
    B, K, N, D = q.shape
    H, W = problem.feat_size
    row_terms, column_terms = relative_logits(
        q.reshape(B, K, H, W, D), height_rel.to(q.dtype), width_rel.to(q.dtype)
    )
    pixel = torch.arange(N, device=q.device)
    rows = F.one_hot(pixel // W, H).to(k.dtype).expand(B, K, N, H)
    cols = F.one_hot(pixel % W, W).to(k.dtype).expand(B, K, N, W)
    row_terms = row_terms.reshape(B, K, N, H)
    column_terms = column_terms.reshape(B, K, N, W)
    return torch.cat([q, row_terms, column_terms], dim=-1), torch.cat([k, rows, cols], dim=-1)


def widened(x: Tensor, width: int) -> Tensor:
    """Return x (B, K, N, D) padded with zeros to (B, K, N, width)."""
    return F.pad(x, (0, width - x.shape[-1]))


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
        out = F.scaled_dot_product_attention(
            widened(q, width),
            widened(k, width),
            widened(v, width),
            dropout_p=problem.dropout_p,
            scale=1.0,
        )
        return out[..., : v.shape[-1]], None
