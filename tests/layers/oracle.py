"""An independent attention branch, written from DESIGN's equations alone, by sums over offsets and shifted maps; and
the comparison of outputs and gradients."""

import itertools
import math

import torch
import torch.nn.functional as F


def offsets(size):
    """Rows and columns from each query to each key, (N, N) each."""
    row, col = (
        torch.arange(size[0]).repeat_interleave(size[1]),
        torch.arange(size[1]).repeat(size[0]),
    )
    return row - row.unsqueeze(1), col - col.unsqueeze(1)


def own_logits(q, k, height_rel, width_rel, size):
    """q, k (B, N, D), q scaled -> (B, N, N); in the middle of a table is offset 0."""
    logits = q @ k.transpose(1, 2)
    for table, offset in zip((height_rel, width_rel), offsets(size), strict=True):
        if table is not None:
            middle = len(table) // 2
            logits = logits + torch.einsum(
                "bnd,nmd->bnm", q, table[middle + offset.clamp(-middle, middle)]
            )
    return logits


def neighbours(x, height, width):
    """Of each tap of a centred kernel, its place in it and x (..., H, W) as that tap sees it, zeros around."""
    H, W = x.shape[-2:]
    padded = F.pad(x, [width // 2, width // 2, height // 2, height // 2])
    for u, w in itertools.product(range(height), range(width)):
        yield u, w, padded[..., u : u + H, w : w + W]


def map_conv(maps, conv):
    """(B, K, N, N) -> the same: a same-padded convolution and ReLU, tap by tap."""
    total = sum(
        torch.einsum("oc,bcij->boij", conv.weight[..., u, w], seen)
        for u, w, seen in neighbours(maps, *conv.weight.shape[2:])
    )
    return (total + conv.bias.view(-1, 1, 1)).clamp(min=0)


def attention_branch(layer, x, prev_logits=None, evolve=None):
    """The whole layer, head by head, from its parameters; -> y, logits."""
    size = [(side + layer.stride - 1) // layer.stride for side in x.shape[2:]]
    conv = torch.zeros(len(x), 0, *size, dtype=x.dtype)
    if layer.conv is not None:
        conv = F.conv2d(x, layer.conv.weight, stride=layer.conv.stride, padding=layer.conv.padding)
    pooled = x
    for _ in range(layer.num_pools):
        total, count = (
            sum(seen[..., ::2, ::2] for _, _, seen in neighbours(y, 3, 3))
            for y in (pooled, torch.ones_like(pooled))
        )
        pooled = total / count
    K, D, Dv, (H, W) = layer.num_heads, layer.dim_head_qk, layer.dim_head_v, pooled.shape[2:]
    projected = pooled.flatten(2).transpose(1, 2) @ layer.qkv.weight.flatten(1).t() + layer.qkv.bias
    q, k, v = (
        part.split(part.shape[2] // K, 2) for part in projected.split([K * D, K * D, K * Dv], 2)
    )
    if layer.qk_gain is not None:
        q, k = (
            [
                gains[h] * part[h] / ((part[h] ** 2).sum(2, keepdim=True) / D + 1e-6).sqrt()
                for h in range(K)
            ]
            for part, gains in ((q, layer.qk_gain), (k, torch.ones(K)))
        )
    logits = torch.stack(
        [
            own_logits(q[h] / math.sqrt(D), k[h], layer.height_rel, layer.width_rel, (H, W))
            for h in range(K)
        ],
        1,
    )
    if evolve is not None:
        logits = evolve(logits, prev_logits)
    attn = logits.exp() / logits.exp().sum(-1, keepdim=True)
    heads = torch.cat([attn[:, h] @ v[h] for h in range(K)], 2)  # (B, N, K*Dv)
    out = (
        (heads @ layer.proj.weight.flatten(1).t() + layer.proj.bias)
        .transpose(1, 2)
        .unflatten(2, (H, W))
    )
    if out.shape[2:] != conv.shape[2:]:
        out = F.interpolate(out, size=size, mode="bilinear", align_corners=False)
    return conv + out if layer.fusion == "add" else torch.cat([conv, out], 1), logits


def pooled_pixels(x):
    """(B, C, H, W): the mean of each 3x3 neighbourhood at stride 2, of the pixels that the image has."""
    H, W = x.shape[2:]
    rows = []
    for row in range(0, H, 2):
        top = max(row - 1, 0)
        row_of_means = []
        for col in range(0, W, 2):
            left = max(col - 1, 0)
            row_of_means.append(x[:, :, top : row + 2, left : col + 2].mean((2, 3)))
        rows.append(torch.stack(row_of_means, -1))
    return torch.stack(rows, -2)


def convolved_pixels(conv, x):
    """(B, C, H', W'): a convolution's sum over the taps of each output pixel, group by group."""
    (stride, _), (dilation, _), (padding, _) = conv.stride, conv.dilation, conv.padding
    high, wide = conv.kernel_size
    padded = F.pad(x, [padding] * 4)
    parts = []
    for image, weight in zip(
        padded.chunk(conv.groups, 1), conv.weight.chunk(conv.groups), strict=True
    ):
        rows = []
        for row in range(0, padded.shape[2] - dilation * (high - 1), stride):
            sums = []
            for col in range(0, padded.shape[3] - dilation * (wide - 1), stride):
                taps = [
                    image[:, :, row + dilation * u, col + dilation * w] @ weight[:, :, u, w].t()
                    for u in range(high)
                    for w in range(wide)
                ]
                sums.append(sum(taps))
            rows.append(torch.stack(sums, -1))
        parts.append(torch.stack(rows, -2))
    return torch.cat(parts, 1)


def added_by_double_loop(layer, x):
    """A layer with fusion="add" and no evolution, by a loop over queries and one over keys; -> y."""
    pooled = x
    for _ in range(layer.num_pools):
        pooled = pooled_pixels(pooled)
    H, W = pooled.shape[2:]
    pixels = [(row, col) for row in range(H) for col in range(W)]
    queries, keys, values = [], [], []
    for row, col in pixels:
        projected = pooled[:, :, row, col] @ layer.qkv.weight[:, :, 0, 0].t() + layer.qkv.bias
        q, k, v = projected.split([layer.dim_qk, layer.dim_qk, layer.dim_v], 1)
        queries.append(q.unflatten(1, (layer.num_heads, -1)) / layer.dim_head_qk**0.5)
        keys.append(k.unflatten(1, (layer.num_heads, -1)))
        values.append(v.unflatten(1, (layer.num_heads, -1)))
    outputs = []
    for (row, col), q in zip(pixels, queries, strict=True):
        total, weights = 0, 0
        for (key_row, key_col), k, v in zip(pixels, keys, values, strict=True):
            key = k
            if layer.height_rel is not None:
                key = key + layer.height_rel[key_row - row + H - 1]
                key = key + layer.width_rel[key_col - col + W - 1]
            weight = (q * key).sum(-1, keepdim=True).exp()
            total = total + weight * v
            weights = weights + weight
        heads = (total / weights).flatten(1)
        outputs.append(heads @ layer.proj.weight[:, :, 0, 0].t() + layer.proj.bias)
    attention = torch.stack(outputs, -1).unflatten(-1, (H, W))
    convolved = convolved_pixels(layer.conv, x)
    if attention.shape != convolved.shape:
        size = convolved.shape[2:]
        attention = F.interpolate(attention, size=size, mode="bilinear", align_corners=False)
    return convolved + attention


def gradients(outputs, inputs):
    """Of a fixed random projection of the outputs, so that every element counts differently."""
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in outputs
    )
    return torch.autograd.grad(total, inputs, retain_graph=True)


def assert_same(actual, expected, inputs, **near):
    """Outputs, a tensor or several, and their gradients for the inputs."""
    actual, expected = (
        [made] if isinstance(made, torch.Tensor) else made for made in (actual, expected)
    )
    torch.testing.assert_close(actual, expected, **near)
    torch.testing.assert_close(gradients(actual, inputs), gradients(expected, inputs), **near)
