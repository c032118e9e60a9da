"""An independent implementation of the attention branch, written only from the papers' equations (AA paper, section
3.2; EA paper, equations 3 and 4; docs/how-it-works.md has them all), by sums over offsets and shifted maps; and the
comparison of outputs and gradients. The convolution beside it and the pooling before it are torch's."""

import itertools
import math

import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed

from ea_vision.layers import AugmentedConv2d


def offsets(size):
    """Return the row and column offsets from each query to each key, (N, N) each."""
    H, W = size
    row = torch.arange(H).repeat_interleave(W)
    col = torch.arange(W).repeat(H)
    return row - row.unsqueeze(1), col - col.unsqueeze(1)


def own_logits(q, k, height_rel, width_rel, size):
    """q, k (B, N, D), q scaled -> (B, N, N); the middle row of a table is offset 0."""
    logits = q @ k.transpose(1, 2)
    for table, offset in zip((height_rel, width_rel), offsets(size), strict=True):
        if table is not None:
            middle = len(table) // 2
            rows = table[middle + offset.clamp(-middle, middle)]
            near = offset.abs() <= middle  # offsets beyond a window's table have no term
            logits = logits + torch.einsum("bnd,nmd->bnm", q, rows) * near
    return logits


def neighbours(x, height, width):
    """Yield for each tap of a centred kernel its position and x (..., H, W) shifted to that tap, padded with zeros."""
    H, W = x.shape[-2:]
    padded = F.pad(x, [width // 2, width // 2, height // 2, height // 2])
    for u, w in itertools.product(range(height), range(width)):
        yield u, w, padded[..., u : u + H, w : w + W]


def convolved(weight, x):
    """Return a convolution of the last two sides of x (B, C, ..., H, W), tap by tap, padded with zeros."""
    total = 0
    for u, w, seen in neighbours(x, *weight.shape[2:]):
        total = total + torch.einsum("oc,bc...->bo...", weight[..., u, w], seen)
    return total


def map_conv(maps, conv):
    """(B, K, N, N) -> the same: a same-padded convolution and ReLU."""
    return (convolved(conv.weight, maps) + by_head(conv.bias)).clamp(min=0)


def by_head(gate):
    """Return a gate, a single one or one per head, in a shape that multiplies maps (B, K, N, N)."""
    return torch.as_tensor(gate, dtype=torch.float64).view(-1, 1, 1)


def evolved_maps(evolution, logits, prev):
    """The equations of EA and PA with an evolution's gates and convolutions, which prefix tokens pass unchanged."""
    alpha = by_head(evolution.alpha)
    mixed = alpha * prev + (1 - alpha) * logits
    new = prev if evolution.predict else mixed
    first = evolution.num_prefix_tokens
    for conv in evolution.convs:
        new = new.clone()
        new[..., first:, first:] = map_conv(new[..., first:, first:], conv)
    if evolution.predict:
        return alpha * new + (1 - alpha) * logits
    beta = by_head(evolution.beta)
    return beta * new + (1 - beta) * mixed


def normalised(heads, gain):
    """Queries or keys (..., N, D) over the root of their mean square, times their gain."""
    mean_square = (heads**2).sum(-1, keepdim=True) / heads.shape[-1]
    return gain * heads / (mean_square + 1e-6).sqrt()


def fused(layer, x, attention):
    """The layer's output from its attention branch (B, C, H, W), which is resized to the convolution's result."""
    size = [(side + layer.stride - 1) // layer.stride for side in x.shape[2:]]
    if list(attention.shape[2:]) != size:
        attention = F.interpolate(attention, size=size, mode="bilinear", align_corners=False)
    if layer.conv is None:
        return attention
    y = layer.conv(x)
    return y + attention if layer.fusion == "add" else torch.cat([y, attention], 1)


def within(size, window):
    """Return (N, N): whether a key lies in a query's window (height, width); None is a window of the whole map."""
    down, right = offsets(size)
    if window is None:
        return torch.ones_like(down, dtype=torch.bool)
    return (down.abs() <= window[0] // 2) & (right.abs() <= window[1] // 2)


def heads_seen(layer, head):
    """Return the heads whose keys a head's queries see under one softmax."""
    reach = layer.head_window // 2
    heads = range(head - reach, head + reach + 1)
    if layer.head_border == "wrap":
        return [other % layer.num_heads for other in heads]
    return [other for other in heads if 0 <= other < layer.num_heads]


def attention_branch(layer, x, prev_logits=None):
    """The whole layer, head by head, from its parameters; -> y, logits."""
    pooled = x
    for _ in range(layer.num_pools):
        pooled = F.avg_pool2d(pooled, 3, 2, 1, count_include_pad=False)
    size = pooled.shape[2:]
    K = layer.num_heads
    pixels = placed(pooled, layer.position).flatten(2).transpose(1, 2)
    projected = F.linear(pixels, layer.qkv.weight.flatten(1), layer.qkv.bias)
    parts = projected.split([layer.dim_qk, layer.dim_qk, layer.dim_v], 2)
    queries, keys, values = [list(part.chunk(K, 2)) for part in parts]
    if layer.qk_gain is not None:
        queries = [normalised(q, gain) for q, gain in zip(queries, layer.qk_gain, strict=True)]
        keys = [normalised(k, 1.0) for k in keys]

    def between(head, other):
        q = queries[head] / math.sqrt(layer.dim_head_qk)
        return own_logits(q, keys[other], layer.height_rel, layer.width_rel, size)

    logits = torch.stack([between(head, head) for head in range(K)], 1)
    if prev_logits is not None:
        logits = evolved_maps(layer.evolution, logits, prev_logits)
    near = within(size, layer.window)
    maps = []
    for head in range(K):
        others = heads_seen(layer, head)
        seen = [logits[:, head] if other == head else between(head, other) for other in others]
        weights = torch.cat([x.exp() * near for x in seen], 2)
        maps.append(weights / weights.sum(2, keepdim=True))
    if layer.evolution is not None and layer.evolution.mixes_attn:
        maps = layer.evolution.mix_attn(torch.stack(maps, 1)).unbind(1)
    heads = []
    for head, attn in enumerate(maps):
        others = heads_seen(layer, head)
        heads.append(attn @ torch.cat([values[other] for other in others], 1))
    out = F.linear(torch.cat(heads, 2), layer.proj.weight.flatten(1), layer.proj.bias)
    attention = out.transpose(1, 2).unflatten(2, size)
    return fused(layer, x, attention), logits


def sine(C, size):
    """Return timm's table of sines and cosines, (C, H, W)."""
    table = build_sincos2d_pos_embed(list(size), C).double()
    return table.t().reshape(C, *size)


def coordinates(size):
    """Return CoordConv's channels, (3, H, W)."""
    axes = []
    for side in size:
        axis = torch.linspace(-1, 1, side, dtype=torch.float64)
        axes.append(axis if side > 1 else torch.zeros_like(axis))
    down, right = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([right, down, torch.hypot(right, down)])


def placed(x, position):
    """Return x (B, C, H, W) with absolute positions added or concatenated, if it has any."""
    size = x.shape[2:]
    if position == "sine":
        return x + sine(x.shape[1], size)
    if position == "coord":
        return torch.cat([x, coordinates(size).expand(len(x), -1, -1, -1)], 1)
    return x


def doubles(*shape):
    """Draw a tensor of this shape in float64."""
    return torch.randn(shape, dtype=torch.float64)


def gradients(outputs, inputs):
    """Return the gradients of a fixed random projection of the outputs, so that every element counts differently."""
    generator = torch.Generator().manual_seed(1)
    total = 0
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        total = total + (y * weights.to(y.device)).sum()
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return torch.autograd.grad(total, inputs, **options)


def assert_same(actual, expected, inputs, **near):
    """Compare outputs (one tensor or several) and their gradients with respect to the inputs."""
    if isinstance(actual, torch.Tensor):
        actual = [actual]
        expected = [expected]
    torch.testing.assert_close(actual, expected, **near)
    torch.testing.assert_close(gradients(actual, inputs), gradients(expected, inputs), **near)


def assert_exact(function, equation, tensors, tolerance):
    """Compare a function's outputs and gradients with those of an equation in float64, relative to their norms."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    outputs = function(*tensors)
    exact = equation(*wide)
    have = [*outputs, *gradients(outputs, tensors)]
    want = [*exact, *gradients(exact, wide)]
    for one, other in zip(have, want, strict=True):
        assert one.dtype == tensors[0].dtype
        assert (one.double() - other).norm() <= tolerance * other.norm()


BRANCH = dict(dim_qk=4, dim_v=6, num_heads=2, feat_size=(3, 4))


def make(stride=1, in_channels=8, **options):
    """An augmented convolution to 10 channels, in float64, whose parameters are all random."""
    layer = AugmentedConv2d(in_channels, 10, 3, stride, **{**BRANCH, **options})
    with torch.no_grad():
        for parameter in layer.parameters():  # biases too
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer.double()


def assert_defined(layer, x, prev=None):
    """Compare a layer's outputs and gradients with those of the definition; without logits where it returns none."""
    inputs = [x.requires_grad_(), *layer.parameters()]
    if prev is not None:
        inputs.append(prev.requires_grad_())
    actual = [y for y in layer(x, prev) if y is not None]
    assert len(actual) == 1 + layer.need_logits
    assert actual[0].shape[1] == layer.out_channels
    near = {"atol": 1e-5, "rtol": 1e-5} if layer.position == "sine" else {}  # timm's are float32
    assert_same(actual, attention_branch(layer, x, prev)[: len(actual)], inputs, **near)
