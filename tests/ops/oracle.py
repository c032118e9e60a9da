"""Problems for every implementation, their comparison with the float64 reference, and the entries dropout keeps."""

from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from ea_vision.layers import AugmentedConv2d, EvolvingAttention
from ea_vision.ops import evolving_attention
from tests.layers.oracle import gradients

# Error as a share of the truth, by their norms. In half precision the signs of relu's arguments near zero decide: there
# torch's own bfloat16 errs by up to 8e-2 in these cases, and its float16 by 1e-3.
TOLERANCE = {torch.float32: 8e-6, torch.float16: 4e-3, torch.bfloat16: 8e-2}


def problem(
    kind,
    size,
    K=8,
    D=4,
    E=1,
    *,
    B=1,
    kernel=3,
    relative=True,
    dtype=torch.float32,
    device="cpu",
    seed=0,
    gates=None,
    channels_last=True,
):
    """Tensors by name; q, k, v as views of one projection (B, N, C), or (B, C, N), as in the layers.

    kind: aa, ea or pa; gates: "one" or "heads", random alpha and beta, or their numbers, which learn.
    """
    generator = torch.Generator().manual_seed(seed)
    H, W = size
    N = H * W
    C = K * (2 * D + E)

    def new(*shape, std=1.0, cast=torch.float32):
        drawn = torch.randn(shape, generator=generator) * std
        return drawn.to(device, cast)

    if channels_last:
        projected = new(B, N, C, cast=dtype)
    else:
        projected = new(B, C, N, cast=dtype).transpose(1, 2)
    projected[..., : K * D] *= 2
    tensors = {}
    parts = projected.split([K * D, K * D, K * E], 2)
    for name, part in zip("qkv", parts, strict=True):
        tensors[name] = part.unflatten(2, (K, -1)).transpose(1, 2)
    if relative:
        tensors["height_rel"] = new(2 * H - 1, D)
        tensors["width_rel"] = new(2 * W - 1, D)
    if kind == "aa":
        return tensors
    tensors["prev_logits"] = new(B, K, N, N, std=2, cast=dtype)
    if kernel:
        std = (2 / (K * kernel**2)) ** 0.5
        tensors["weight"] = new(K, K, kernel, kernel, std=std)
        tensors["bias"] = new(K, std=0.1)
    if gates is None:
        return tensors
    for place, name in enumerate(["alpha", "beta"] if kind == "ea" else ["alpha"]):
        if gates == "one":
            tensors[name] = new(std=0.5)
        elif gates == "heads":
            tensors[name] = new(K, std=0.5)
        else:
            tensors[name] = torch.full((K,), gates[place], device=device)
    return tensors


def outputs_and_gradients(tensors, *, double=False, uses=("out", "logits"), **options):
    """Return out, logits, and for each tensor the gradient of a fixed random projection of the outputs in `uses`."""
    inputs = {}
    for name, tensor in tensors.items():
        tensor = tensor.double() if double else tensor.detach()
        inputs[name] = tensor.requires_grad_()
    out, logits = evolving_attention(**inputs, **options)
    results = {"out": out}
    if logits is not None:
        results["logits"] = logits
    used = [result for name, result in results.items() if name in uses]
    detached = {name: result.detach() for name, result in results.items()}
    grads = gradients(used, list(inputs.values()))
    return detached | dict(zip(inputs, grads, strict=True))


def rounding(name, tensors, slow):
    """Return the norm below which a result is only rounding error."""
    B, _, N, _ = tensors["q"].shape
    if name in ("alpha", "beta"):  # a sum of all entries, most of which cancels
        return (tensors["prev_logits"].numel() / slow[name].numel()) ** 0.5
    if name == "bias":  # a sum over the queries and keys of every image
        return B**0.5 * N
    least = 1e-3 if N > 1 else 1.0  # a softmax over one key passes on nothing but rounding
    if name in ("height_rel", "width_rel"):  # one is rounding where a map has one row or column
        return max(least, slow["height_rel"].norm(), slow["width_rel"].norm())
    return least


def assert_as_reference(
    tensors, implementation="cpu", seed=123456789123456789, tolerance=None, **options
):
    """Compare outputs and all gradients with float64, with the same entries dropped; return outputs and gradients."""
    q = tensors["q"]
    B, K, N, _ = q.shape
    p = options.get("dropout_p", 0.0)
    tolerance = tolerance or TOLERANCE[q.dtype]
    with mock.patch.object(
        torch, "randint", lambda *_, **__: torch.tensor([seed], device=q.device)
    ):
        fast = outputs_and_gradients(tensors, implementation=implementation, **options)
    kept = kept_entries(seed, B, K, N, p).to(q.device) if p else 1.0
    with mock.patch.object(F, "dropout", lambda x, p: x * kept / (1 - p)):
        slow = outputs_and_gradients(tensors, implementation="reference", double=True, **options)
    for name, expected in slow.items():
        assert fast[name].dtype == tensors.get(name, q).dtype
        difference = fast[name].double() - expected
        least = rounding(name, tensors, slow)
        error = difference.norm() / expected.norm().clamp_min(least)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
    return fast


SHAPE = "K D E B kernel relative gates dtype device channels_last".split()


def check(implementation, kind, size, *, bias=0.0, prefix=0, alpha=0.5, **options):
    """Compare an implementation with the reference on a `problem`.

    `bias` is added to the convolution's, if any.
    """
    shape = {name: options.pop(name) for name in SHAPE if name in options}
    tensors = problem(kind, size, **shape)
    if "bias" in tensors:
        tensors["bias"] += bias
    options["alpha"] = alpha
    numbers = {name: value for name, value in options.items() if name not in tensors}
    assert_as_reference(
        tensors,
        implementation,
        feat_size=size,
        predict=kind == "pa",
        num_prefix_tokens=prefix,
        **numbers,
    )


CASES = {
    "EA": dict(size=(4, 5), D=20, E=6),
    "EA, two images, last layer": dict(size=(3, 4), B=2, D=20, E=3, alpha=0.7, need_logits=False),
    "EA, beta 0.6, wide heads": dict(size=(3, 6), K=4, D=64, E=64, beta=0.6),
    "EA without convolution": dict(size=(5, 4), kernel=0),
    "EA, beta 0": dict(size=(3, 3), beta=0.0),
    "EA, alpha 0": dict(size=(2, 3), alpha=0.0),
    "EA, alpha 1": dict(size=(3, 3), alpha=1.0),
    "EA, 1x1, not relative": dict(size=(4, 4), kernel=1, relative=False),
    "PA": dict(size=(6, 3), D=4, E=1),
    "PA without convolution": dict(size=(2, 9), K=4, kernel=0),
    "first": dict(size=(5, 4), D=20),
    "first, last layer": dict(size=(3, 2), K=3, relative=False, need_logits=False),
    "PA, one row": dict(size=(1, 17), K=4),
    "EA, gates": dict(size=(4, 5), D=20, E=6, gates="heads"),
    "EA, gates, no table": dict(size=(1, 17), K=3, D=16, E=16, relative=False, gates=(0.2, -0.1)),
    "EA, gates at 0": dict(size=(3, 3), K=4, gates=(0.0, 0.0)),
    "EA, gates at 1": dict(size=(3, 3), K=4, gates=(1.0, 1.0)),
    "EA, gates without convolution": dict(size=(3, 4), kernel=0, gates="heads"),
    "PA, gates": dict(size=(4, 3), K=4, D=12, E=16, gates="heads"),
    "PA, gate at 0, without convolution": dict(size=(2, 4), K=4, kernel=0, gates=(0.0, 1.0)),
    "EA, dropout": dict(size=(3, 4), B=2, D=20, E=6, dropout_p=0.1),
    "EA, dropout, last layer": dict(
        size=(1, 17), K=3, relative=False, dropout_p=0.6, seed=-3, need_logits=False
    ),
    "PA, dropout": dict(size=(4, 3), K=4, D=12, E=16, dropout_p=0.3, seed=1 << 40),
    "first, dropout": dict(size=(5, 4), D=20, dropout_p=0.3),
    "EA, 12 heads": dict(size=(1, 19), K=12, D=16, E=16, relative=False),
    "PA, 16 heads, kernel 5": dict(size=(3, 4), K=16, D=6, E=5, kernel=5),
    "EA, kernel 5": dict(size=(5, 4), K=3, kernel=5),
    "EA, long sides": dict(size=(2, 33), K=4, D=20, E=3),
    "EA, prefix": dict(size=(1, 19), K=3, relative=False, prefix=1),
    "EA, prefix, 12 heads, gates": dict(
        size=(1, 18), K=12, relative=False, prefix=2, gates="heads"
    ),
    "EA, prefix, beta 0.6, last layer": dict(
        size=(1, 18), B=2, K=4, relative=False, prefix=5, beta=0.6, need_logits=False
    ),
    "PA, prefix": dict(size=(1, 19), K=3, relative=False, prefix=1, dropout_p=0.2),
    "PA, prefix, gates": dict(size=(1, 18), K=4, relative=False, prefix=2, gates="heads"),
    "EA, only the logits are used": dict(size=(3, 3), uses=("logits",)),
    "PA, the logits are not used": dict(size=(3, 3), uses=("out",)),
}
for name, case in CASES.items():
    case["kind"] = {"EA": "ea", "PA": "pa", "fi": "aa"}[name[:2]]


def among(data, *values):
    """Draw one of some values."""
    return data.draw(st.sampled_from(values))


def random_case(data, most_side, heads, kernels, most_width):
    """Draw random arguments of `check`."""

    def up_to(most):
        return data.draw(st.integers(1, most))

    return dict(
        kind=among(data, "aa", "ea", "pa"),
        size=(up_to(most_side), up_to(2 * most_side)),
        B=up_to(3),
        K=among(data, *heads),
        D=up_to(most_width),
        E=up_to(most_width),
        kernel=among(data, *kernels),
        relative=among(data, True, False),
        alpha=among(data, 0.5, 0.0, 0.7),
        beta=among(data, 1.0, 0.6),
        gates=among(data, None, "one", "heads"),
        need_logits=among(data, True, False),
        channels_last=among(data, True, False),
    )


def random_form(data, case, *windows):
    """Draw what only the C kernel has, and what it must not confuse, for a random case."""
    tokens = case["size"][0] * case["size"][1]
    return dict(
        gates=among(data, case["gates"], (0.0, 1.0), (1.0, 0.0)),
        prefix=min(tokens, among(data, 0, 0, 1, 5)),
        dropout_p=among(data, 0.0, 0.0, 0.1, 0.6),
        window=among(data, None, *windows),
        uses=among(data, ("out",), ("out", "logits")),
    )


def chain(dropout_p=0.0, **options):
    """Return three layers, of which each but the first evolves the maps of the one before."""
    torch.manual_seed(0)
    layers = nn.ModuleList()
    sizes = dict(dim_qk=8, dim_v=4, num_heads=4, feat_size=(6, 5), qk_norm=True)
    for number in range(3):
        evolution = EvolvingAttention(4, **options) if number else None
        layers.append(AugmentedConv2d(8, 8, **sizes, attn_drop=dropout_p, evolution=evolution))
    return layers


def run(layers, x):
    """Return the output and the logits of the last of the layers, which nothing reads."""
    logits = None
    for i, layer in enumerate(layers):
        x, logits = layer(x, logits, i + 1 < len(layers))
    return x, logits


MASK = (1 << 32) - 1


def scramble(x):
    """Wellons's triple32 of whole numbers, in int64."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = times(x ^ x >> shift, factor)
    return x ^ x >> 14


def times(x, factor):
    """x * factor modulo 2**32, in two steps that int64 holds."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & MASK


def kept_entries(seed, B, K, N, p):
    """(B, K, N, N), True where the probability is kept."""
    query = torch.arange(B * K * N).view(B, K, N, 1)
    key = torch.arange(N)
    high_seed = torch.tensor(seed >> 32 & MASK)
    low = scramble((seed & MASK) + scramble(high_seed) & MASK)
    high = scramble(low ^ high_seed)
    start = scramble(query + low & MASK)
    salt = scramble(start ^ high)
    x = start + key & MASK
    x = times(x ^ x >> 16, 0x7FEB352D) + salt & MASK
    x = times(x ^ x >> 15, 0x846CA68B)
    x = x ^ x >> 16
    return (x >> 8) >= round(p * (1 << 24))
