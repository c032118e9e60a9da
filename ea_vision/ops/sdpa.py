"""Unchained attention (AA) without an N x N tensor: torch's scaled_dot_product_attention with position folded in.

The position terms are part of the dot product once q has its products with the tables by absolute row and column, and k
has one-hot rows and columns beside its own entries:

    [q, q.height_rel(row(i), .), q.width_rel(col(i), .)] . [k, onehot(row(j)), onehot(col(j))]

which is the AA paper's equation 4, so any fused kernel can run it. D grows by H + W.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops.problem import Implementation, Problem
from ea_vision.ops.reference import relative_logits


def fold_position(
        q: Tensor, k: Tensor, height_rel: Tensor, width_rel: Tensor, feat_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return q, k (B, K, N, D), q scaled, as (B, K, N, D + H + W) each, whose dot product has the position terms."""
    B, K, N, D = q.shape
    H, W = feat_size
    by_row, by_col = relative_logits(q.reshape(B, K, H, W, D), height_rel.to(q.dtype), width_rel.to(q.dtype))
    pixel = torch.arange(N, device=q.device)
    rows = F.one_hot(pixel // W, H).to(k.dtype).expand(B, K, N, H)
    cols = F.one_hot(pixel % W, W).to(k.dtype).expand(B, K, N, W)
    return (torch.cat([q, by_row.reshape(B, K, N, H), by_col.reshape(B, K, N, W)], dim=-1),
            torch.cat([k, rows, cols], dim=-1))


class Sdpa(Implementation):
    """torch's scaled_dot_product_attention."""

    name = "sdpa"
    evolves = logits = False
    dropout = fewer_keys = True

    def forward(self, problem: Problem) -> tuple[Tensor, None]:
        q, k, v = problem.q * problem.scale, problem.k, problem.v
        if problem.height_rel is not None:
            q, k = fold_position(q, k, problem.height_rel, problem.width_rel, problem.feat_size)
        # fused kernels want one width, a multiple of 8
        D, E = q.shape[-1], v.shape[-1]
        width = -(-max(D, E) // 8) * 8
        q, k, v = F.pad(q, (0, width - D)), F.pad(k, (0, width - D)), F.pad(v, (0, width - E))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=problem.dropout_p, scale=1.0)[..., :E], None


SDPA = Sdpa()
