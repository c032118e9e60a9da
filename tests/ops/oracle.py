"""Problems for every implementation, their comparison with the reference in float64, and what dropout keeps."""
from unittest import mock

import torch
import torch.nn.functional as F

from ea_vision.ops import evolving_attention

# Error as a share of the truth, by their norms. In half precision the signs of relu's arguments near zero decide: there
# torch's own bfloat16 errs by up to 8e-2 in these cases, and its float16 by 1e-3.
TOLERANCE = {torch.float32: 8e-6, torch.float16: 4e-3, torch.bfloat16: 8e-2}


def problem(kind, size, num_heads=8, dim_qk=20, dim_v=3, *, batch=2, kernel=3, relative=True, dtype=torch.float32,
            device="cpu", seed=0, gates=None, channels_last=False) -> dict[str, torch.Tensor]:
    """Tensors by name; q, k, v as views of one projection (B, C, N), or (B, N, C), as in the layers.

    kind: aa, ea or pa; gates: "one" or "heads", random alpha and beta, or their numbers, which learn.
    """
    generator = torch.Generator().manual_seed(seed)
    (H, W), B, K, D, E, N = size, batch, num_heads, dim_qk, dim_v, size[0] * size[1]

    def new(*shape, std=1.0, cast=torch.float32):
        return (torch.randn(shape, generator=generator) * std).to(device, cast)

    C = K * (2 * D + E)
    projected = new(B, N, C, cast=dtype) if channels_last else new(B, C, N, cast=dtype).transpose(1, 2)
    projected[..., :K * D] *= 2
    parts = projected.split([K * D, K * D, K * E], 2)
    tensors = {name: x.unflatten(2, (K, -1)).transpose(1, 2) for name, x in zip("qkv", parts, strict=True)}
    if relative:
        tensors |= {"height_rel": new(2 * H - 1, D), "width_rel": new(2 * W - 1, D)}
    if kind == "aa":
        return tensors
    tensors["prev_logits"] = new(B, K, N, N, std=2, cast=dtype)
    if kernel:
        tensors |= {"weight": new(K, K, kernel, kernel, std=(2 / (K * kernel ** 2)) ** 0.5), "bias": new(K, std=0.1)}
    for place, name in enumerate(("alpha", "beta") if kind == "ea" else ("alpha",) if gates else ()):
        if gates in ("one", "heads"):
            tensors[name] = new(*([K] if gates == "heads" else []), std=0.5)
        elif gates is not None:
            tensors[name] = torch.full((K,), gates[place], device=device)
    return tensors


def outputs_and_gradients(tensors, *, double=False, uses=("out", "logits"), **options) -> dict[str, torch.Tensor]:
    """out, logits, and the gradient of a fixed random projection of those in `uses` for each tensor."""
    inputs = {n: (t.double() if double else t.detach()).requires_grad_() for n, t in tensors.items()}
    out, logits = evolving_attention(**inputs, **options)
    results = {"out": out} if logits is None else {"out": out, "logits": logits}
    generator = torch.Generator().manual_seed(1)
    total = sum((x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum()
                for name, x in results.items() if name in uses)
    gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return {name: x.detach() for name, x in results.items()} | {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), gradients, strict=True)}


def assert_as_reference(tensors, implementation="cpu", seed=123456789123456789, tolerance=None,
                        **options) -> dict[str, torch.Tensor]:
    """Compare outputs and all gradients with float64, and with the same entries dropped; return them."""
    (B, K, N, _), p, device = tensors["q"].shape, options.get("dropout_p", 0.0), tensors["q"].device
    with mock.patch.object(torch, "randint", lambda *_, **__: torch.tensor([seed], device=device)):
        fast = outputs_and_gradients(tensors, implementation=implementation, **options)
    kept = kept_entries(seed, B, K, N, p).to(device) if p else 1.0
    with mock.patch.object(F, "dropout", lambda x, p: x * kept / (1 - p)):
        slow = outputs_and_gradients(tensors, implementation="reference", double=True, **options)
    for name, expected in slow.items():
        assert fast[name].dtype == (tensors[name].dtype if name in tensors else tensors["q"].dtype)
        least = 1e-3
        if name in ("alpha", "beta"):  # a sum of all entries, most of which cancels
            least = (tensors["prev_logits"].numel() / expected.numel()) ** 0.5
        elif name == "bias":  # likewise, over the queries and keys of every image
            least = B ** 0.5 * N
        elif name in ("height_rel", "width_rel"):  # one is nothing but rounding where a map has one row or column
            least = max(least, *(slow[table].norm() for table in ("height_rel", "width_rel")))
        error = (fast[name].double() - expected).norm() / expected.norm().clamp_min(least)
        assert error <= (tolerance or TOLERANCE[tensors["q"].dtype]), f"{name}: relative error {error:.1e}"
    return fast


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
