"""An independent implementation of the attention branch, written only from the papers' equations (AA paper, section
3.2; EA paper, equations 3 and 4; docs/how-it-works.md has them all), by sums over offsets and shifted maps; and the
comparison of outputs and gradients."""

import itertools
import math

import torch
import torch.nn.functional as F


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
            rel_logits = table[middle + offset.clamp(-middle, middle)]
            logits = logits + torch.einsum("bnd,nmd->bnm", q, rel_logits)
    return logits


def neighbours(x, height, width):
    """Yield for each tap of a centred kernel its position and x (..., H, W) shifted to that tap, padded with zeros."""
    H, W = x.shape[-2:]
    padded = F.pad(x, [width // 2, width // 2, height // 2, height // 2])
    for u, w in itertools.product(range(height), range(width)):
        yield u, w, padded[..., u : u + H, w : w + W]


def map_conv(maps, conv):
    """(B, K, N, N) -> the same: a same-padded convolution and ReLU, tap by tap."""
    total = conv.bias.view(-1, 1, 1)
    for u, w, seen in neighbours(maps, *conv.weight.shape[2:]):
        total = total + torch.einsum("oc,bcij->boij", conv.weight[..., u, w], seen)
    return total.clamp(min=0)


def by_head(gate):
    """Return a gate, a single one or one per head, in a shape that multiplies maps (B, K, N, N)."""
    return torch.as_tensor(gate, dtype=torch.float64).view(-1, 1, 1)


def evolved_maps(evolution, logits, prev):
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


def fused(layer, x, attention):
    """The layer's output from its attention branch (B, C, H, W), which is resized to the convolution's result."""
    size = [(side + layer.stride - 1) // layer.stride for side in x.shape[2:]]
    if list(attention.shape[2:]) != size:
        attention = F.interpolate(attention, size=size, mode="bilinear", align_corners=False)
    if layer.conv is None:
        return attention
    convolved = convolved_pixels(layer.conv, x)
    return convolved + attention if layer.fusion == "add" else torch.cat([convolved, attention], 1)


def attention_branch(layer, x, prev_logits=None):
    """The whole layer, head by head, from its parameters; -> y, logits."""
    pooled = x
    for _ in range(layer.num_pools):
        pooled = pooled_pixels(pooled)
    size = pooled.shape[2:]
    K = layer.num_heads
    D = layer.dim_head_qk
    pixels = pooled.flatten(2).transpose(1, 2)
    projected = F.linear(pixels, layer.qkv.weight.flatten(1), layer.qkv.bias)
    queries, keys, values = projected.split([layer.dim_qk, layer.dim_qk, layer.dim_v], 2)
    queries_and_keys = zip(queries.chunk(K, 2), keys.chunk(K, 2), strict=True)
    head_logits = []
    for head, (q, k) in enumerate(queries_and_keys):
        if layer.qk_gain is not None:
            q = normalised(q, layer.qk_gain[head])
            k = normalised(k, 1.0)
        q = q / math.sqrt(D)
        head_logits.append(own_logits(q, k, layer.height_rel, layer.width_rel, size))
    logits = torch.stack(head_logits, 1)
    if prev_logits is not None:
        logits = evolved_maps(layer.evolution, logits, prev_logits)
    attn = logits.exp() / logits.exp().sum(-1, keepdim=True)
    heads = [attn[:, head] @ v for head, v in enumerate(values.chunk(K, 2))]
    out = F.linear(torch.cat(heads, 2), layer.proj.weight.flatten(1), layer.proj.bias)
    attention = out.transpose(1, 2).unflatten(2, size)
    return fused(layer, x, attention), logits


def pooled_pixels(x):
    """(B, C, H, W): the mean over each 3x3 neighbourhood at stride 2, counting only pixels inside the image."""
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
    stride = conv.stride[0]
    dilation = conv.dilation[0]
    padded = F.pad(x, [conv.padding[0]] * 4)
    reach = dilation * (conv.kernel_size[0] - 1)
    taps = list(itertools.product(range(conv.kernel_size[0]), repeat=2))
    images = padded.chunk(conv.groups, 1)
    weights = conv.weight.chunk(conv.groups)
    parts = []
    for image, weight in zip(images, weights, strict=True):
        rows = []
        for row in range(0, padded.shape[2] - reach, stride):
            pixels = []
            for col in range(0, padded.shape[3] - reach, stride):
                total = 0
                for u, w in taps:
                    seen = image[:, :, row + dilation * u, col + dilation * w]
                    total = total + seen @ weight[:, :, u, w].t()
                pixels.append(total)
            rows.append(torch.stack(pixels, -1))
        parts.append(torch.stack(rows, -2))
    return torch.cat(parts, 1)


def doubles(*shape):
    """Draw a tensor of this shape in float64."""
    return torch.randn(shape, dtype=torch.float64)


def gradients(outputs, inputs):
    """Return the gradients of a fixed random projection of the outputs, so that every element counts differently."""
    generator = torch.Generator().manual_seed(1)
    total = 0
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
        total = total + (y * weights).sum()
    return torch.autograd.grad(total, inputs, retain_graph=True)


def assert_same(actual, expected, inputs, **near):
    """Compare outputs (one tensor or several) and their gradients with respect to the inputs."""
    if isinstance(actual, torch.Tensor):
        actual = [actual]
        expected = [expected]
    torch.testing.assert_close(actual, expected, **near)
    torch.testing.assert_close(gradients(actual, inputs), gradients(expected, inputs), **near)
