"""A slow, independent attention branch: explicit loops over pixels, written from DESIGN's equations alone."""
import math

import torch
import torch.nn.functional as F


def loop_logits(q, k, height_rel, width_rel, size):
    """q, k: (K, N, D), q scaled; -> (K, N, N) by a double loop over query and key pixels."""
    H, W = size
    K, N, _ = q.shape
    rows = []
    for i in range(N):
        for j in range(N):
            value = (q[:, i] * k[:, j]).sum(-1)
            if height_rel is not None:
                value = value + q[:, i] @ height_rel[j // W - i // W + H - 1]
                value = value + q[:, i] @ width_rel[j % W - i % W + W - 1]
            rows.append(value)
    return torch.stack(rows, dim=-1).view(K, N, N)


def loop_unit(rows, gain):
    """(N, D): each row divided by the root of its mean square, times the gain."""
    return torch.stack([gain * row / (sum(value ** 2 for value in row) / len(row) + 1e-6).sqrt() for row in rows])


def loop_layer(layer, x, prev_logits=None, evolve=None):
    """The whole layer, image by image and head by head, from its parameters; -> y, logits."""
    size = [(side + layer.stride - 1) // layer.stride for side in x.shape[2:]]
    conv = torch.zeros(len(x), 0, *size, dtype=x.dtype)
    if layer.conv is not None:
        conv = F.conv2d(x, layer.conv.weight, stride=layer.conv.stride, padding=layer.conv.padding)
    pooled = x
    for _ in range(layer.num_pools):
        ones = torch.ones_like(pooled[:1, :1])
        kernel = torch.ones(pooled.shape[1], 1, 3, 3, dtype=x.dtype)
        total = F.conv2d(pooled, kernel, stride=2, padding=1, groups=pooled.shape[1])
        pooled = total / F.conv2d(ones, kernel[:1], stride=2, padding=1)
    B, _, H, W = pooled.shape
    K, D, Dv, N = layer.num_heads, layer.dim_head_qk, layer.dim_head_v, H * W
    weight = layer.qkv.weight.flatten(1)
    outputs, all_logits = [], []
    for b in range(B):
        pixels = pooled[b].permute(1, 2, 0).reshape(N, -1)
        projected = pixels @ weight.t() + layer.qkv.bias  # (N, q | k | v)
        q, k, v = projected[:, :K * D], projected[:, K * D:2 * K * D], projected[:, 2 * K * D:]
        q = torch.stack([q[:, h * D:(h + 1) * D] for h in range(K)])
        k = torch.stack([k[:, h * D:(h + 1) * D] for h in range(K)])
        if layer.qk_gain is not None:
            q = torch.stack([loop_unit(q[h], layer.qk_gain[h]) for h in range(K)])
            k = torch.stack([loop_unit(k[h], 1.0) for h in range(K)])
        q = q / math.sqrt(D)
        v = torch.stack([v[:, h * Dv:(h + 1) * Dv] for h in range(K)])
        logits = loop_logits(q, k, layer.height_rel, layer.width_rel, (H, W))
        if evolve is not None:
            logits = evolve(logits, prev_logits[b])
        attn = logits.exp() / logits.exp().sum(-1, keepdim=True)
        heads = torch.cat([attn[h] @ v[h] for h in range(K)], dim=1)  # (N, K*Dv)
        out = heads @ layer.proj.weight.flatten(1).t() + layer.proj.bias
        outputs.append(out.view(H, W, -1).permute(2, 0, 1))
        all_logits.append(logits)
    attn = torch.stack(outputs)
    if attn.shape[2:] != conv.shape[2:]:
        attn = F.interpolate(attn, size=conv.shape[2:], mode="bilinear", align_corners=False)
    return torch.cat([conv, attn], dim=1), torch.stack(all_logits)


def loop_map_conv(maps, conv):
    """(K, N, N) -> (K, N, N): a same-padded convolution and ReLU, entry by entry of the kernel."""
    K, N, _ = maps.shape
    side = conv.weight.shape[-1]
    r = side // 2
    padded = F.pad(maps, (r, r, r, r))
    out = []
    for o in range(K):
        total = conv.bias[o]
        for c in range(K):
            for dy in range(side):
                for dx in range(side):
                    total = total + conv.weight[o, c, dy, dx] * padded[c, dy:dy + N, dx:dx + N]
        out.append(total)
    return torch.stack(out).clamp(min=0)
