"""The mechanisms' equations as slow loops over single entries, in plain Python over float64 tensors."""
import itertools
import math

import torch
from torch import Tensor


def residual(logits: Tensor, prev: Tensor, alpha: float, mixture: bool) -> Tensor:
    own = 1 - alpha if mixture else 1.0
    return torch.stack([own * a + alpha * b for a, b in zip(logits.flatten(), prev.flatten(), strict=True)]
                       ).view(logits.shape)


def softmax(logits: Tensor) -> Tensor:
    rows = [row.exp() / sum(entry.exp() for entry in row) for row in logits.reshape(-1, logits.shape[-1])]
    return torch.stack(rows).view(logits.shape)


def mix_heads(maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """out[a] = sum_b weight[a, b] maps[b] + bias[a], head by head."""
    out = [[sum(weight[a, b] * maps[n, b] for b in range(maps.shape[1])) + (0.0 if bias is None else bias[a])
            for a in range(len(weight))] for n in range(maps.shape[0])]
    return torch.stack([torch.stack(heads) for heads in out])


def batch_norm(maps: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    heads = []
    for k in range(maps.shape[1]):
        values = maps[:, k].flatten()
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        heads.append((maps[:, k] - mean) / (variance + eps).sqrt() * weight[k] + bias[k])
    return torch.stack(heads, dim=1)


def depthwise(maps: Tensor, weight: Tensor) -> Tensor:
    """weight (K, 1, q, k), centred, zeros around the map."""
    B, K, Q, N = maps.shape
    q, k = weight.shape[2:]
    entries = []
    for b, a, i, j in itertools.product(range(B), range(K), range(Q), range(N)):
        inside = [(u, w) for u in range(q) for w in range(k)
                  if 0 <= i + u - q // 2 < Q and 0 <= j + w - k // 2 < N]
        entries.append(sum(weight[a, 0, u, w] * maps[b, a, i + u - q // 2, j + w - k // 2] for u, w in inside))
    return torch.stack(entries).view(maps.shape)


def relu6(x: Tensor) -> Tensor:
    return x.clamp(0, 6)


def conv2d(logits: Tensor, prev: Tensor, alpha: Tensor, keys: Tensor, queries: Tensor, size: tuple[int, int],
           prefix: int = 0) -> Tensor:
    """Four-dimensional: the entry from pixel (y, x) to pixel (v, u) sees the neighbours of either."""
    m = logits + alpha * prev
    H, W = size
    K, reach = m.shape[1], keys.shape[-1] // 2
    out = [[[list(row) for row in head] for head in image] for image in m]
    near = list(itertools.product(range(-reach, reach + 1), repeat=2))

    def token(y: int, x: int) -> int:
        return prefix + y * W + x

    for n, a, y, x, v, u in itertools.product(range(len(m)), range(K), *(range(s) for s in (H, W, H, W))):
        total = m[n, a, token(y, x), token(v, u)]
        for b, (i, j) in itertools.product(range(K), near):
            if 0 <= v + i < H and 0 <= u + j < W:
                total = total + keys[a, b, i + reach, j + reach] * m[n, b, token(y, x), token(v + i, u + j)]
            if 0 <= y + i < H and 0 <= x + j < W:
                total = total + queries[a, b, i + reach, j + reach] * m[n, b, token(y + i, x + j), token(v, u)]
        out[n][a][token(y, x)][token(v, u)] = total
    return torch.stack([torch.stack([torch.stack([torch.stack(row) for row in head]) for head in image])
                        for image in out])


def value_residual(values: Tensor, first: Tensor, lambdas: Tensor) -> Tensor:
    return torch.stack([lambdas[0] * a + lambdas[1] * b
                        for a, b in zip(first.flatten(), values.flatten(), strict=True)]).view(values.shape)


def mrla_light(x: Tensor, shortcut: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: Tensor, dim: int,
               ) -> Tensor:
    """Before the norm. query, key (k), value (C, 1, 3, 3), scale (C)."""
    B, C = x.shape[:2]
    pad = len(query) // 2
    images = []
    for b in range(B):
        y = [sum(x[b, c].flatten()) / x[b, c].numel() for c in range(C)]

        def convolved(weight: Tensor, y=y) -> list[Tensor]:
            return [sum(weight[i] * y[c + i - pad] for i in range(len(weight)) if 0 <= c + i - pad < C)
                    for c in range(C)]

        q, k = convolved(query), convolved(key)
        v = depthwise(x[b:b + 1], value)[0]
        channels = []
        for c in range(C):
            group = range(c // dim * dim, c // dim * dim + dim)
            share = 1 / (1 + (-sum(q[d] * k[d] for d in group) / math.sqrt(dim)).exp())
            channels.append(share * v[c] + scale[c] * shortcut[b, c])
        images.append(torch.stack(channels))
    return torch.stack(images)


def exclusive(out: Tensor, values: Tensor, gain: Tensor) -> Tensor:
    """out, values (B, K, N, D); gain (K)."""
    rows = [o - gain[k] * (o @ v) / (v @ v) * v for n in range(len(out)) for k in range(out.shape[1])
            for o, v in zip(out[n, k], values[n, k], strict=True)]
    return torch.stack(rows).view(out.shape)


def gated(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    """x (B, N, C), weight (K, C)."""
    rows = [scale / (1 + (-(weight[k] @ x[n, i]) - bias[k]).exp()) * out[n, k, i]
            for n, k, i in itertools.product(*(range(size) for size in out.shape[:3]))]
    return torch.stack(rows).view(out.shape)
