"""Problems for every implementation, their comparison with the reference in float64, and what dropout keeps."""

from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from ea_vision.ops import evolving_attention

# Error as a share of the truth, by their norms. In half precision the signs of relu's arguments near zero decide: there
# torch's own bfloat16 errs by up to 8e-2 in these cases, and its float16 by 1e-3.
TOLERANCE = {torch.float32: 8e-6, torch.float16: 4e-3, torch.bfloat16: 8e-2}


def problem(
    kind,
    size,
    num_heads=8,
    dim_qk=20,
    dim_v=3,
    *,
    batch=2,
    kernel=3,
    relative=True,
    dtype=torch.float32,
    device="cpu",
    seed=0,
    gates=None,
    channels_last=False,
) -> dict[str, torch.Tensor]:
    """Tensors by name; q, k, v as views of one projection (B, C, N), or (B, N, C), as in the layers.

    kind: aa, ea or pa; gates: "one" or "heads", random alpha and beta, or their numbers, which learn.
    """
    generator = torch.Generator().manual_seed(seed)
    (H, W), B, K, D, E, N = size, batch, num_heads, dim_qk, dim_v, size[0] * size[1]

    def new(*shape, std=1.0, cast=torch.float32):
        return (torch.randn(shape, generator=generator) * std).to(device, cast)

    C = K * (2 * D + E)
    projected = (
        new(B, N, C, cast=dtype) if channels_last else new(B, C, N, cast=dtype).transpose(1, 2)
    )
    projected[..., : K * D] *= 2
    parts = projected.split([K * D, K * D, K * E], 2)
    tensors = {
        name: x.unflatten(2, (K, -1)).transpose(1, 2) for name, x in zip("qkv", parts, strict=True)
    }
    if relative:
        tensors |= {"height_rel": new(2 * H - 1, D), "width_rel": new(2 * W - 1, D)}
    if kind == "aa":
        return tensors
    tensors["prev_logits"] = new(B, K, N, N, std=2, cast=dtype)
    if kernel:
        tensors |= {
            "weight": new(K, K, kernel, kernel, std=(2 / (K * kernel**2)) ** 0.5),
            "bias": new(K, std=0.1),
        }
    for place, name in enumerate(
        ("alpha", "beta") if kind == "ea" else ("alpha",) if gates else ()
    ):
        if gates in ("one", "heads"):
            tensors[name] = new(*([K] if gates == "heads" else []), std=0.5)
        elif gates is not None:
            tensors[name] = torch.full((K,), gates[place], device=device)
    return tensors


def outputs_and_gradients(
    tensors, *, double=False, uses=("out", "logits"), **options
) -> dict[str, torch.Tensor]:
    """out, logits, and the gradient of a fixed random projection of those in `uses` for each tensor."""
    inputs = {
        n: (t.double() if double else t.detach()).requires_grad_() for n, t in tensors.items()
    }
    out, logits = evolving_attention(**inputs, **options)
    results = {"out": out} if logits is None else {"out": out, "logits": logits}
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum()
        for name, x in results.items()
        if name in uses
    )
    gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return {name: x.detach() for name, x in results.items()} | {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), gradients, strict=True)
    }


def assert_as_reference(
    tensors, implementation="cpu", seed=123456789123456789, tolerance=None, **options
) -> dict[str, torch.Tensor]:
    """Compare outputs and all gradients with float64, and with the same entries dropped; return them."""
    (B, K, N, _), p, device = tensors["q"].shape, options.get("dropout_p", 0.0), tensors["q"].device
    with mock.patch.object(torch, "randint", lambda *_, **__: torch.tensor([seed], device=device)):
        fast = outputs_and_gradients(tensors, implementation=implementation, **options)
    kept = kept_entries(seed, B, K, N, p).to(device) if p else 1.0
    with mock.patch.object(F, "dropout", lambda x, p: x * kept / (1 - p)):
        slow = outputs_and_gradients(tensors, implementation="reference", double=True, **options)
    for name, expected in slow.items():
        assert fast[name].dtype == (tensors[name].dtype if name in tensors else tensors["q"].dtype)
        least = 1e-3 if N > 1 else 1.0  # a softmax over one key passes on nothing but rounding
        if name in ("alpha", "beta"):  # a sum of all entries, most of which cancels
            least = (tensors["prev_logits"].numel() / expected.numel()) ** 0.5
        elif name == "bias":  # likewise, over the queries and keys of every image
            least = B**0.5 * N
        elif name in (
            "height_rel",
            "width_rel",
        ):  # one is nothing but rounding where a map has one row or column
            least = max(least, *(slow[table].norm() for table in ("height_rel", "width_rel")))
        error = (fast[name].double() - expected).norm() / expected.norm().clamp_min(least)
        assert error <= (tolerance or TOLERANCE[tensors["q"].dtype]), (
            f"{name}: relative error {error:.1e}"
        )
    return fast


def check(
    implementation,
    kind,
    size,
    *,
    K=8,
    D=4,
    E=1,
    B=1,
    kernel=3,
    relative=True,
    gates=None,
    bias=0.0,
    dtype=torch.float32,
    prefix=0,
    device="cpu",
    channels_last=True,
    **options,
) -> None:
    """Compare an implementation with the reference on a problem; `bias` is added to the convolution's, if any."""
    tensors = problem(
        kind,
        size,
        K,
        D,
        E,
        batch=B,
        kernel=kernel,
        relative=relative,
        gates=gates,
        dtype=dtype,
        device=device,
        channels_last=channels_last,
    )
    if "bias" in tensors:
        tensors["bias"] += bias
    options = {name: x for name, x in ({"alpha": 0.5} | options).items() if name not in tensors}
    assert_as_reference(
        tensors,
        implementation,
        feat_size=size,
        predict=kind == "pa",
        num_prefix_tokens=prefix,
        **options,
    )


KINDS = {"EA": "ea", "PA": "pa", "fi": "aa"}  # by a case's first letters
CASES = {
    name: dict(case, kind=KINDS[name[:2]])
    for name, case in {
        "EA": dict(size=(4, 5), D=20, E=6),
        "EA, two images, last layer": dict(
            size=(3, 4), B=2, D=20, E=3, alpha=0.7, need_logits=False
        ),
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
        "EA, gates, no table": dict(
            size=(1, 17), K=3, D=16, E=16, relative=False, gates=(0.2, -0.1)
        ),
        "EA, gates at 0": dict(size=(3, 3), K=4, gates=(0.0, 0.0)),
        "EA, gates at 1": dict(size=(3, 3), K=4, gates=(1.0, 1.0)),
        "EA, gates without convolution": dict(size=(3, 4), kernel=0, gates="heads"),
        "PA, gates": dict(size=(4, 3), K=4, D=12, E=16, gates="heads"),
        "PA, gate at 0, without convolution": dict(size=(2, 4), K=4, kernel=0, gates=(0.0, 1.0)),
        "EA, dropout": dict(size=(3, 4), B=2, D=20, E=6, dropout_p=0.1, seed=123456789123456789),
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
    }.items()
}


def random_case(data, most_side, heads, kernels, most_width) -> dict:
    """Draw what `check` takes."""

    def among(*values):
        return data.draw(st.sampled_from(values))

    def to(most):
        return data.draw(st.integers(1, most))

    return dict(
        kind=among("aa", "ea", "pa"),
        size=(to(most_side), to(2 * most_side)),
        B=to(3),
        K=among(*heads),
        D=to(most_width),
        E=to(most_width),
        kernel=among(*kernels),
        relative=among(True, False),
        alpha=among(0.5, 0.0, 0.7),
        beta=among(1.0, 0.6),
        gates=among(None, "one", "heads"),
        need_logits=among(True, False),
        channels_last=among(True, False),
    )


def same_bits(compute) -> list[torch.Tensor]:
    """Check that a function's tensors do not depend on how many threads there are; return them."""
    whole, threads = compute(), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert all(torch.equal(*pair) for pair in zip(whole, compute(), strict=True))
    finally:
        torch.set_num_threads(threads)
    return whole


MASK = (1 << 32) - 1


def scramble(x):
    """Wellons's triple32 of whole numbers, in int64."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = times(x ^ x >> shift, factor)
    return x ^ x >> 14


def times(x, factor):
    """x * factor modulo 2**32, in two steps that int64 holds."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & MASK


def kept_entries(seed: int, B: int, K: int, N: int, p: float) -> torch.Tensor:
    """(B, K, N, N), True where the probability is kept."""
    query, key = torch.arange(B * K * N).view(B, K, N, 1), torch.arange(N)
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
