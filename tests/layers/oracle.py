"""An independent attention branch, written from DESIGN's equations alone, head by head, its positions by sums over
offsets; and the comparison of outputs and gradients."""

import math

import torch
import torch.nn.functional as F


def offsets(size):
    """Rows and columns from each query to each key, (N, N) each."""
    H, W = size
    row = torch.arange(H).repeat_interleave(W)
    col = torch.arange(W).repeat(H)
    return row - row.unsqueeze(1), col - col.unsqueeze(1)


def own_logits(
    q,
    k,
    height_rel,
    width_rel,
    size,
):
    """q, k (B, N, D), q scaled -> (B, N, N); in the middle of a table is offset 0."""
    logits = q @ k.transpose(1, 2)
    for table, offset in zip((height_rel, width_rel), offsets(size), strict=True):
        if table is not None:
            middle = len(table) // 2
            of_pairs = table[middle + offset.clamp(-middle, middle)]
            logits = logits + torch.einsum("bnd,nmd->bnm", q, of_pairs)
    return logits


def map_conv(maps, conv):
    """(B, K, N, N) -> the same: a same-padded convolution and ReLU."""
    return F.conv2d(maps, conv.weight, conv.bias, padding="same").relu()


def by_head(gate):
    """One gate, or one for each head, so that it multiplies maps (B, K, N, N)."""
    return torch.as_tensor(gate, dtype=torch.float64).view(-1, 1, 1)


def evolved_maps(
    evolution,
    logits,
    prev,
):
    """The equations of EA and PA with an evolution's gates and convolutions."""
    alpha = by_head(evolution.alpha)
    mixed = alpha * prev + (1 - alpha) * logits
    before = prev if evolution.predict else mixed
    new = before
    for conv in evolution.convs:
        new = map_conv(new, conv)
    if evolution.predict:
        return alpha * new + (1 - alpha) * logits
    beta = by_head(evolution.beta)
    return beta * new + (1 - beta) * mixed


def normalised(head, gain):
    """A head's queries or keys (B, N, D) over the root of their mean square, times its gain."""
    mean_square = (head**2).sum(2, keepdim=True) / head.shape[2]
    return gain * head / (mean_square + 1e-6).sqrt()


def fused(
    layer,
    x,
    attention,
):
    """The layer's output from its attention branch (B, C, H, W), which is resized to the convolution's result."""
    size = [(side + layer.stride - 1) // layer.stride for side in x.shape[2:]]
    if list(attention.shape[2:]) != size:
        attention = F.interpolate(attention, size=size, mode="bilinear", align_corners=False)
    if layer.conv is None:
        return attention
    conv = layer.conv
    how = (conv.stride, conv.padding, conv.dilation, conv.groups)
    convolved = F.conv2d(x, conv.weight, None, *how)
    return convolved + attention if layer.fusion == "add" else torch.cat([convolved, attention], 1)


def attention_branch(
    layer,
    x,
    prev_logits=None,
):
    """The whole layer, head by head, from its parameters; -> y, logits."""
    pooled = x
    for _ in range(layer.num_pools):
        pooled = F.avg_pool2d(pooled, 3, stride=2, padding=1, count_include_pad=False)
    size = pooled.shape[2:]
    K = layer.num_heads
    D = layer.dim_head_qk
    pixels = pooled.flatten(2).transpose(1, 2)
    projected = F.linear(pixels, layer.qkv.weight.flatten(1), layer.qkv.bias)
    queries, keys, values = projected.split([layer.dim_qk, layer.dim_qk, layer.dim_v], 2)
    of_heads = zip(queries.chunk(K, 2), keys.chunk(K, 2), strict=True)
    by_head = []
    for head, (q, k) in enumerate(of_heads):
        if layer.qk_gain is not None:
            q = normalised(q, layer.qk_gain[head])
            k = normalised(k, 1.0)
        q = q / math.sqrt(D)
        by_head.append(own_logits(q, k, layer.height_rel, layer.width_rel, size))
    logits = torch.stack(by_head, 1)
    if prev_logits is not None:
        logits = evolved_maps(layer.evolution, logits, prev_logits)
    attn = logits.softmax(-1)
    heads = [attn[:, head] @ v for head, v in enumerate(values.chunk(K, 2))]
    out = F.linear(torch.cat(heads, 2), layer.proj.weight.flatten(1), layer.proj.bias)
    attention = out.transpose(1, 2).unflatten(2, size)
    return fused(layer, x, attention), logits


def gradients(outputs, inputs):
    """Of a fixed random projection of the outputs, so that every element counts differently."""
    generator = torch.Generator().manual_seed(1)
    total = 0
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
        total = total + (y * weights).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True)


def assert_same(
    actual,
    expected,
    inputs,
    **near,
):
    """Outputs, a tensor or several, and their gradients for the inputs."""
    if isinstance(actual, torch.Tensor):
        actual = [actual]
        expected = [expected]
    torch.testing.assert_close(actual, expected, **near)
    torch.testing.assert_close(gradients(actual, inputs), gradients(expected, inputs), **near)
