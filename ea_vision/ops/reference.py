"""Evolving attention in readable torch: what every faster implementation is held to, outputs and gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ea_vision.ops.rel_pos import relative_logits


def own_logits(
        q: Tensor, k: Tensor, height_rel: Tensor | None, width_rel: Tensor | None, scale: float,
        feat_size: tuple[int, int],
) -> Tensor:
    """Dot product and position (AA paper, equation 4): q, k (B, K, N, D) -> (B, K, N, N)."""
    B, K, N, D = q.shape
    H, W = feat_size
    q = q * scale
    logits = q @ k.transpose(-2, -1)
    if height_rel is not None and width_rel is not None:
        by_row, by_col = relative_logits(q.reshape(B, K, H, W, D), height_rel, width_rel)
        logits = logits.view(B, K, H, W, H, W) + by_row.unsqueeze(-1) + by_col.unsqueeze(-2)
        logits = logits.view(B, K, N, N)
    return logits


def evolve(
        logits: Tensor, prev_logits: Tensor, weight: Tensor | None, bias: Tensor | None, alpha: float, beta: float,
        predict: bool,
) -> Tensor:
    """Mix (B, K, N, N) logits with the previous layer's: EA paper, equations 3 and 4, or PA where `predict`."""
    mixed = prev_logits if predict else alpha * prev_logits + (1.0 - alpha) * logits
    convolved = mixed
    if weight is not None:
        convolved = F.relu(F.conv2d(mixed, weight.to(mixed.dtype), bias.to(mixed.dtype), padding=weight.shape[-1] // 2))
    if predict:
        return alpha * convolved + (1.0 - alpha) * logits
    return beta * convolved + (1.0 - beta) * mixed


def attention_of(logits: Tensor) -> Tensor:
    """Softmax over the keys, in float32 at least: (B, K, N, N) -> (B, K, N, N)."""
    half = logits.dtype == torch.float16 or logits.dtype == torch.bfloat16
    return logits.softmax(dim=-1, dtype=torch.float32 if half else logits.dtype)


def attend(
        q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None, width_rel: Tensor | None,
        prev_logits: Tensor | None, weight: Tensor | None, bias: Tensor | None, alpha: float, beta: float, *,
        predict: bool, scale: float, feat_size: tuple[int, int], dropout_p: float, need_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `ea_vision.ops.evolving_attention`."""
    logits = own_logits(q, k, height_rel, width_rel, scale, feat_size)
    if prev_logits is not None:
        logits = evolve(logits, prev_logits, weight, bias, alpha, beta, predict)
    attn = F.dropout(attention_of(logits), dropout_p)
    return attn.to(v.dtype) @ v, logits if need_logits else None
