"""Evolving attention of chained layers (EA, PA) on CUDA, in Triton, forward and backward.

Every kind of layer uses one formula with three factors; a kernel drops the terms whose factor is zero:

    logits = conv_share * relu(conv(maps)) + maps_share * maps + own_share * own
    own = scale * (q.k + q.height_rel + q.width_rel)

* first layer of a chain: logits = own;
* PA, or no convolution: maps = prev_logits, one kernel;
* EA: a first kernel stores m = alpha * prev + (1 - alpha) * own; a second computes the logits from maps = m. The
  convolution needs m of neighbouring pixels, and Triton cannot shift a tile in registers: a fused kernel would compute
  own nine times, or keep a halo in scratch memory behind barriers. Storing m costs one write and one read.

Memory traffic dominates. Bytes per entry (one of the B x K x N x N numbers) in bfloat16, in training:

| | forward | backward |
| --- | --- | --- |
| first | 2: logits written | 10: logits and their gradient read; g written, read twice |
| PA | 4: prev read; logits | 20: logits, gradient; d_conv, g; prev, d_conv; d_conv, g; d_prev; g once more |
| EA, beta = 1 | 8: prev; m; m; logits | 16: logits, gradient; d_conv; prev, d_conv; d_conv; d_prev; d_prev once more |

Backward takes 2 bytes less where the logits have no gradient (the last layer). g is the gradient of the logits, d_conv
the part of it that enters the convolution. Queries, keys and values are small beside the maps (a tenth each at N = 196,
D = 20) and are read through the L2 cache, once for each block of 16 or 32 pixels. The only N x N map that a layer keeps
for backward is its logits, which the next layer holds as prev_logits anyway; m is recomputed, tile by tile, for the
weight's gradient. Backward finds out where the ReLU passed from the logits or, if these are a sum (PA, beta < 1, gates,
prefix tokens), from one stored bit per entry. Backward needs two scratch maps, three if beta < 1.

Choices:
* Maps lie in memory as (B, N, N, K), torch's channels_last of (B, K, N, N): see `triton_kernels`. A map in another
  layout is copied once.
* All products run on tensor cores: operands in the maps' dtype, sums in float32 (three tf32 products for float32, which
  keep its accuracy). The 3x3 convolution of 8 heads takes 3 products (pixels, 24) x (24, 8), with 24 padded to 32.
* The softmax takes the stored, rounded logits, so that backward, which reads or recomputes them, sees the same values.
* Gates that learn need no further map, because their terms are linear. The sum of g * relu(conv) is the weight times
  its gradient plus the bias times its gradient; the sum of g * own is q times its gradient. These gradients are taken
  before the shares, which may be 0, are applied. So d_m is stored unscaled, and the kernel that reads it last
  multiplies it by alpha in place.
* Dropout is a function of (seed, query, key), evaluated in forward and again in backward, as in the C kernel.
* Each program sums its part of the gradients of weight, bias, gates and tables into its own slot, and torch adds the
  slots: no atomics, the same bits on every run.
* The backward of the softmax contains no convolution, and the weight's gradient has its own kernel: together they would
  need 254 registers per thread; apart, two blocks of 256 threads fit on a multiprocessor.
* torch.library.custom_op, not triton_op: there is nothing beside the kernels for inductor to fuse, and the opaque
  operator also runs in Triton's interpreter.
"""

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ea_vision.ops.problem import Implementation, Problem, refuse_second_derivatives
from ea_vision.ops.triton_tiles import BY_KEYS, SMALL_MEMORY, Tile, default_tile

MAX_HEADS = 16
MAX_DIM_HEAD = 64
MAX_PIXELS = 4096
MAX_SIDES = 80  # H + W with position tables: what the kernels' shared memory holds
MAX_SIDES_WIDE = 64  # for heads more than 256 channels wide together
MAX_SIDES_FLOAT32 = 64
MAX_SIDES_FLOAT32_SMALL = 32  # where a block has 99 KiB, see SMALL_MEMORY
LEAST_CAPABILITY = (8, 0)
LEAST_VERSION = (3, 5)  # older ones need 16 columns per product; 8 heads give 8
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it once, too


@torch.compiler.assume_constant_result
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@torch.compiler.assume_constant_result
def _version() -> tuple[int, ...]:
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


class Shape(NamedTuple):
    """Compile-time constants of a kernel; `triton_kernels` explains the letters. P: rounded up to a power of two."""

    H: int  # rows and columns of the map, and their product
    W: int
    N: int
    K: int  # heads
    KS: int  # side of the map convolution
    KP: int
    DP: int  # width of a head of queries and keys
    EP: int  # width of a head of values
    RP: int  # numbers of a tap row
    SP: int  # positions: rows and columns
    TP: int  # entries of both position tables
    LINE: int  # rows that a warp loads together
    PREFIX: int  # tokens before those of the map
    RELATIVE: bool  # position tables
    # On compute capability 10.x, products of 64 rows or more use tensor memory, where Triton before its pull request
    # 10988 sums chained products wrongly (triton-lang/triton issue 10821). They are split into groups of 32 rows.
    SPLIT: bool
    SMALL: bool  # one of SMALL_MEMORY
    DTYPE: str
    GATED: bool  # gates are tensors, per head


# the factor of a term in a sum: a number, or with gates a tensor (K), per head; None drops the term
Share = float | Tensor | None


class Rows(NamedTuple):
    """A tensor (B, K, N, D) with its strides. All but the last count UNITs, so the compiler knows how wide to load."""

    data: Tensor
    image: int
    head: int
    pixel: int
    width: int
    UNIT: Any
    D: Any
    DP: Any
    LINE: Any


class Weight(NamedTuple):
    """The convolution's weight with its strides."""

    data: Tensor
    makes: int
    takes: int
    y: int
    x: int


class Dropout(NamedTuple):
    """The seed, the threshold below which 24 random bits drop a probability, and the factor of those kept."""

    seed: Tensor
    threshold: int
    gain: float


def _shares(
    has_prev: bool, has_weight: bool, alpha: float, beta: float, predict: bool, gates: Tensor | None
):
    """Return the (conv, kept, own) shares of the logits, and those of EA's m, or None without an m.

    A share is a number, or with gates a tensor (K), per head, or None if the term is dropped.
    """
    if not has_prev:
        return (None, None, 1.0), None
    if gates is None:
        alphas = alpha or None
        betas = beta or None
        one_less_alpha = 1.0 - alpha or None
        one_less_beta = 1.0 - beta or None
    else:
        factors = torch.cat([gates, 1.0 - gates]).float()
        alphas, betas, one_less_alpha, one_less_beta = factors
    if predict and has_weight:
        return (alphas, None, one_less_alpha), None
    if predict or not has_weight or betas is None:
        return (None, alphas, one_less_alpha), None
    return (betas, one_less_beta, None), (None, alphas, one_less_alpha)


def _heads_last(maps: Tensor | None) -> Tensor | None:
    """Return maps (B, K, N, N) as the contiguous (B, N, N, K) that kernels read; copy them if the layout differs."""
    return None if maps is None else maps.permute(0, 2, 3, 1).contiguous()


def _new_maps(q: Tensor) -> Tensor:
    B, K, N, _ = q.shape
    return q.new_empty(B, N, N, K)


def _new_rows(q: Tensor, width: int) -> Tensor:
    """Return new rows (B, K, N, width), laid out so that heads concatenate without a copy."""
    B, K, N, _ = q.shape
    return q.new_empty(B, N, K, width).transpose(1, 2)


def _outputs(
    q: Tensor, v: Tensor, shares, prefix: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialised out, logits, the rows' log-sum-exp (base 2), and signs (B, N, N), one bit per head where the
    ReLU passes its gradient. Logits and signs have no elements unless `save`, nor signs if the logits tell as much."""
    B, K, N, _ = q.shape
    conv, kept, own = shares
    alone = isinstance(conv, float) and conv > 0 and kept is None and own is None and prefix == 0
    signs = (B, N, N) if save and conv is not None and not alone else (0,)
    return (
        _new_rows(q, v.shape[-1]),
        _new_maps(q).permute(0, 3, 1, 2) if save else q.new_empty(0),
        q.new_empty(B, K, N, dtype=torch.float32),
        q.new_empty(signs, dtype=torch.uint8 if K <= 8 else torch.int16),
    )


def _unless_empty(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def _count(*tensors: Tensor | None) -> int:
    """Return the total number of elements."""
    return sum(x.numel() for x in tensors if x is not None)


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


@functools.lru_cache(maxsize=1024)
def _row_layout(D: int, strides: tuple[int, ...]) -> tuple:
    """Return the fields of `Rows` after the tensor."""
    from triton.language import constexpr

    image, head, pixel, width = strides
    is_aligned = width == 1 and (image | head | pixel) % 4 == 0
    unit = 4 if is_aligned else 1
    line = max(1, 32 * unit // _power(D))
    constants = [constexpr(number) for number in (unit, D, _power(D), line)]
    return (image // unit, head // unit, pixel // unit, width, *constants)


def _rows(x: Tensor) -> Rows:
    return Rows(x, *_row_layout(x.shape[-1], x.stride()))


def _dense(x: Tensor | None) -> Tensor | None:
    """Return the tensor; copy it only if it is not dense (in any order of its axes)."""
    if x is None or x.stride() == torch.empty_like(x).stride():
        return x
    return x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@functools.lru_cache(maxsize=1024)
def _shape(
    K: int,
    D: int,
    E: int,
    H: int,
    W: int,
    kernel_size: int,
    prefix: int,
    relative: bool,
    gated: bool,
    dtype: torch.dtype,
    chip: tuple[int, int] | None,
) -> Shape:
    """Return the compile-time constants of a layer's kernels; chip: the GPU's compute capability."""
    tap_row = _power(kernel_size * K)
    aligned_heads = min(K & -K, 16 // dtype.itemsize)
    return Shape(
        H=H,
        W=W,
        N=H * W,
        K=K,
        KS=kernel_size,
        KP=_power(K, 1),
        DP=_power(D),
        EP=_power(E),
        RP=tap_row,
        SP=_power(H + W if relative else 1),
        TP=_power(2 * H + 2 * W - 2 if relative else 1),
        LINE=max(1, 32 * aligned_heads // tap_row),
        PREFIX=prefix,
        RELATIVE=relative,
        SPLIT=chip is not None and chip[0] == 10,
        SMALL=chip in SMALL_MEMORY,
        DTYPE=str(dtype),
        GATED=gated,
    )


def _dropout(seed: Tensor | None, probability: float) -> Dropout | None:
    if seed is None:
        return None
    gain = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    return Dropout(seed, round(probability * (1 << 24)), gain)


def _prepared(inputs: Sequence[Tensor | None], numbers: Sequence[float], sizes: Sequence[int]):
    """Return the shares of the logits and of EA's m (see `_shares`), and the kernels' arguments by name.

    Args:
        numbers: alpha, beta, scale and the dropout's probability.
        sizes: the map's H and W, the number of tokens before it, and whether PA is computed, 0 or 1.
    """
    q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed = inputs
    alpha, beta, scale, dropout_p = numbers
    H, W, prefix, predict = sizes
    shares, mixing = _shares(
        prev_logits is not None, weight is not None, alpha, beta, predict, gates
    )
    S = _shape(
        q.shape[1],
        q.shape[-1],
        v.shape[-1],
        H,
        W,
        kernel_size=1 if weight is None else weight.shape[-1],
        prefix=0 if weight is None else prefix,
        relative=height_rel is not None,
        gated=gates is not None,
        dtype=q.dtype,
        chip=_capability(q.device) if q.is_cuda else None,
    )
    weight = _dense(weight)
    named = {
        "q": _rows(q),
        "k": _rows(k),
        "v": _rows(v),
        "height_rel": _contiguous(height_rel),
        "width_rel": _contiguous(width_rel),
        "maps": _heads_last(prev_logits),
        "bias": _contiguous(bias),
        "weight": None if weight is None else Weight(weight, *weight.stride()),
        "scale": scale,
        "S": S,
        "dropout": _dropout(seed, dropout_p),
    }
    return shares, mixing, named


def _programs(q: Tensor, pixels: int) -> int:
    return q.shape[0] * -(-q.shape[2] // pixels)


def _launch(kernel, tile: Tile, **arguments) -> None:
    """Run one program for each image and block of pixels, with the arguments that the kernel takes."""
    q = arguments["q"].data
    takes_keys = kernel.__name__ in BY_KEYS
    programs = _programs(q, tile.keys if takes_keys else tile.queries)
    arguments |= {"I": tile.queries, "J": tile.keys}
    arguments = {name: x for name, x in arguments.items() if name in kernel.arg_names}
    limit = {"maxnreg": tile.registers} if tile.registers else {}
    kernel[programs,](**arguments, num_warps=tile.warps, num_stages=tile.stages, **limit)


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height_rel: Tensor | None,
    width_rel: Tensor | None,
    prev_logits: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    seed: Tensor | None,
    numbers: list[float],
    sizes: list[int],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute and return `_outputs`."""
    from ea_vision.ops import triton_kernels

    inputs = q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed
    shares, mixing, common = _prepared(inputs, numbers, sizes)
    maps = common["maps"]
    dropout = common["dropout"]

    def evolve(maps, conv, kept, own, S=common["S"], dropout=None, **outputs):
        """Run the kernel; outputs: the tensors to write, of logits, signs, out and lse."""
        tile = default_tile("evolve", S, conv is not None, "out" in outputs)
        unused = dict.fromkeys(("logits", "signs", "out", "lse"))
        terms = {"maps": maps, "conv": conv, "kept": kept, "own": own, "S": S, "dropout": dropout}
        _launch(triton_kernels.evolve, tile, **common | unused | terms | outputs)

    with torch.cuda.device_of(q):
        if mixing is not None:
            mixed = _new_maps(q)
            evolve(maps, *mixing, logits=mixed)
            maps = mixed
        out, logits, lse, signs = _outputs(q, v, shares, sizes[2], save)
        # convolution and softmax of more than 8 heads do not fit into one kernel
        result = {"dropout": dropout, "out": out, "lse": lse}
        S = common["S"]
        if S.KP > 8 and shares[0] is not None:
            evolved = logits if save else _new_maps(q)
            evolve(maps, *shares, logits=evolved, signs=_unless_empty(signs))
            evolve(evolved, None, 1.0, None, S._replace(GATED=False), **result)
        else:
            maps_written = {"logits": _unless_empty(logits), "signs": _unless_empty(signs)}
            evolve(maps, *shares, **maps_written, **result)
    return out, logits, lse, signs


_forward = torch.library.custom_op(
    "ea_vision::triton_attention_forward", _run_forward, mutates_args=()
)


@_forward.register_fake
def _(q, k, v, *rest):
    *_, prev_logits, weight, _, gates, _, numbers, sizes, save = rest
    alpha, beta, *_ = numbers
    *_, prefix, predict = sizes
    shares, _ = _shares(prev_logits is not None, weight is not None, alpha, beta, predict, gates)
    return _outputs(q, v, shares, prefix, save)


def _softmax_backward(
    common: dict,
    logits: Tensor,
    signs: Tensor,
    lse: Tensor,
    d_logits: Tensor | None,
    stores_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Backpropagate through softmax and ReLU.

    Returns:
        g, the gradient of the logits (B, N, N, K), or None unless `stores_g`; d_conv, the part of it that enters the
        convolution, of the same shape, or None without a convolution; d_v; d_bias (K).
    """
    from ea_vision.ops import triton_kernels

    q = common["q"].data
    convolves = common["conv"] is not None
    tile = default_tile("logits_backward", common["S"], convolves)
    slots = _programs(q, tile.keys) if convolves else 0
    g = _new_maps(q) if stores_g else None
    d_conv = _new_maps(q) if convolves else None
    d_v = _new_rows(q, common["v"].data.shape[-1])
    d_bias = q.new_empty(slots, q.shape[1], dtype=torch.float32)
    _launch(
        triton_kernels.logits_backward,
        tile,
        **common,
        logits=_heads_last(logits),
        signs=_unless_empty(signs),
        lse=lse,
        d_logits=_heads_last(d_logits),
        d_maps=g,
        d_conv=d_conv,
        d_v=d_v,
        d_bias=d_bias,
    )
    return g, d_conv, d_v, d_bias.sum(0)


def _queries_backward(
    common: dict,
    kept: Share,
    own: Share,
    stored: float,
    own_from_maps: bool,
    n_tables: int,
    n_gates: int,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Backpropagate through convolution, mixing and the query's side of the dot product.

    Args:
        kept, own: the shares of the maps in the logits, and of the own logits in the maps or the logits.
        stored: the factor by which d_prev is multiplied when it is stored.

    Returns:
        d_prev (B, N, N, K), or None without previous maps; d_q; d_tables, flat; d_alpha (K), or empty.
    """
    from ea_vision.ops import triton_kernels

    q = common["q"].data
    tile = default_tile("queries_backward", common["S"], common["conv"] is not None)
    slots = q.new_empty(_programs(q, tile.queries), n_tables + n_gates, dtype=torch.float32)
    d_prev = None if common["maps"] is None else _new_maps(q)
    d_q = _new_rows(q, q.shape[-1])
    _launch(
        triton_kernels.queries_backward,
        tile,
        **common,
        d_maps=d_prev,
        d_q=d_q,
        d_table=slots,
        d_alpha=slots[:, n_tables:] if n_gates else None,
        part_stride=slots.shape[1],
        kept=kept,
        maps_share=stored,
        own=own,
        OWN_FROM_MAPS=own_from_maps,
    )
    d_tables, d_alpha = slots.sum(0).split([n_tables, n_gates])
    return d_prev, d_q, d_tables, d_alpha


def _weight_backward(common: dict, prev: Share, own: Share, n_gates: int) -> tuple[Tensor, Tensor]:
    """Return d_weight, flat in the weight's memory order, and d_beta (K), or empty.

    prev, own: the shares of the previous maps and of the own logits in the convolution's input; own is None if the
        input is the previous maps alone.
    """
    from ea_vision.ops import triton_kernels

    q = common["q"].data
    weight = common["weight"]
    n_weight = 0 if weight is None else weight.data.numel()
    if common["conv"] is None:
        nothing = q.new_zeros(n_weight + n_gates, dtype=torch.float32)
        d_weight, d_beta = nothing.split([n_weight, n_gates])
        return d_weight, d_beta
    tile = default_tile("weight_backward", common["S"], own is not None)
    slots = q.new_empty(_programs(q, tile.queries), n_weight + n_gates, dtype=torch.float32)
    _launch(
        triton_kernels.weight_backward,
        tile,
        **common,
        d_weight=slots,
        d_beta=slots[:, n_weight:] if n_gates and own is not None else None,
        part_stride=slots.shape[1],
        kept=prev,
        own=own,
    )
    d_weight, d_beta = slots.sum(0).split([n_weight, n_gates])
    return d_weight, d_beta


def _run_backward(
    d_out: Tensor,
    d_logits: Tensor | None,
    inputs: list[Tensor | None],
    out: Tensor,
    logits: Tensor,
    lse: Tensor,
    signs: Tensor,
    numbers: list[float],
    sizes: list[int],
) -> list[Tensor]:
    """Return gradients of all `inputs` except the seed: one tensor for both tables, empty ones for missing inputs."""
    from ea_vision.ops import triton_kernels

    q, _, _, height_rel, width_rel, _, weight, bias, gates, _ = inputs
    (conv, kept, own), mixing, common = _prepared(inputs, numbers, sizes)
    scale = common["scale"]
    mixes = mixing is not None
    _, prev_share, own_share = mixing if mixes else (None, 1.0, own)
    prev_share = 0.0 if prev_share is None else prev_share
    own_share = 0.0 if own_share is None else own_share
    is_number = isinstance(own_share, float)
    # d_k comes from the stored d_prev = alpha * a; alpha 0 would lose it, so a is stored and d_prev cleared later
    stored = prev_share if is_number and prev_share else 1.0
    n_tables = _count(height_rel, width_rel)
    n_gates = 0 if gates is None else q.shape[1]
    with torch.cuda.device_of(q):
        common |= {"d_out": _rows(d_out), "delta": torch.empty_like(lse), "conv": conv}
        _launch(triton_kernels.row_products, Tile(), **common, out=_rows(out))
        stores_g = not mixes or kept is not None
        g, d_conv, d_v, d_bias = _softmax_backward(common, logits, signs, lse, d_logits, stores_g)
        common |= {"d_logits": g, "d_conv": d_conv}
        d_prev, d_q, d_tables, d_alpha = _queries_backward(
            common, kept, own_share, stored, mixes, n_tables, n_gates
        )
        d_weight, d_beta = _weight_backward(
            common, prev_share, own_share if mixes else None, n_gates
        )
        d_k = _new_rows(q, q.shape[-1])
        common |= {
            "maps": d_prev if mixes else g,
            "d_k": d_k,
            "own": None if is_number else own_share,
            "share": scale * own_share / stored if is_number else scale,
            "stored": prev_share if mixes and gates is not None else None,
        }
        _launch(
            triton_kernels.keys_backward, default_tile("keys_backward", common["S"], True), **common
        )

    if weight is not None:
        d_weight = d_weight.as_strided(weight.shape, _dense(weight).stride())
    d_gates = q.new_empty(0)
    if gates is not None and conv is not None:
        convolved = _through_convolution(weight, bias, d_weight, d_bias, q.dtype)
        d_weight *= conv.view(-1, 1, 1, 1)
        d_bias = conv * d_bias
        if mixes:
            d_beta = d_beta + convolved
        else:  # PA: beta is not in it
            d_alpha = d_alpha + convolved
            d_beta = torch.zeros_like(d_alpha)
    if gates is not None:
        d_gates = torch.stack([d_alpha, d_beta]).to(gates.dtype)
    if d_prev is None:
        d_prev = q.new_empty(0)
    else:
        if is_number and prev_share == 0.0:
            d_prev.zero_()
        d_prev = d_prev.permute(0, 3, 1, 2)
    return [d_q, d_k, d_v, d_tables, d_prev, d_weight, d_bias, d_gates]


def _through_convolution(
    weight: Tensor, bias: Tensor, d_weight: Tensor, d_bias: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the sum of g * relu(conv) per head, (K): the parameters, rounded as used, times their gradients."""
    used_weight = weight.to(dtype).float()
    used_bias = bias.to(dtype).float()
    return (used_weight * d_weight).sum((1, 2, 3)) + used_bias * d_bias


_backward = torch.library.custom_op(
    "ea_vision::triton_attention_backward", _run_backward, mutates_args=()
)


@_backward.register_fake
def _(d_out, d_logits, inputs, *_):
    q, _, v, height_rel, width_rel, prev_logits, weight, _, gates, _ = inputs
    sums = q.new_empty(0, dtype=torch.float32)
    return [
        _new_rows(q, q.shape[-1]),
        _new_rows(q, q.shape[-1]),
        _new_rows(q, v.shape[-1]),
        sums.new_empty(_count(height_rel, width_rel)),
        q.new_empty(0) if prev_logits is None else _new_maps(q).permute(0, 3, 1, 2),
        sums if weight is None else torch.empty_like(_dense(weight), dtype=torch.float32),
        sums.new_empty(q.shape[1]),
        q.new_empty(0) if gates is None else gates.new_empty(gates.shape),
    ]


def _keep(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # the last logits have no gradient: no N x N zeros for them
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:-1]


def _differentiate(ctx, d_out, d_logits, d_lse, d_signs):
    inputs = ctx.saved_tensors[:10]
    out, *saved = ctx.saved_tensors[10:]
    height_rel, width_rel = inputs[3:5]
    if d_out is None:
        d_out = torch.zeros_like(out)
    *d_rows, d_table, d_prev, d_weight, d_bias, d_gates = _backward(
        d_out, d_logits, inputs, out, *saved, *ctx.options
    )
    d_height = d_width = None
    if height_rel is not None:
        d_height, d_width = d_table.split([height_rel.numel(), width_rel.numel()])
        d_height = d_height.view(height_rel.shape)
        d_width = d_width.view(width_rel.shape)
    gradients = *d_rows, d_height, d_width, d_prev, d_weight, d_bias, d_gates
    input_gradients = []
    for x, gradient in zip(inputs[:9], gradients, strict=True):
        input_gradients.append(None if x is None else gradient.to(x.dtype))
    return (*input_gradients, *(None,) * 4)


_forward.register_autograd(_differentiate, setup_context=_keep)
refuse_second_derivatives(_backward)


def _most_sides(q: Tensor) -> int:
    """Return how many rows and columns together a map with position tables may have."""
    if INTERPRETING:
        return MAX_SIDES
    if q.dtype != torch.float32:
        wide = q.shape[1] * _power(q.shape[-1]) > 256
        return MAX_SIDES_WIDE if wide else MAX_SIDES
    small = _capability(q.device) in SMALL_MEMORY
    return MAX_SIDES_FLOAT32_SMALL if small else MAX_SIDES_FLOAT32


class Triton(Implementation):
    """The Triton kernels."""

    name = "triton"

    def own_reason_against(self, problem: Problem) -> str | None:
        q = problem.q
        v = problem.v
        weight = problem.weight
        if not INSTALLED:
            return "triton is not installed"
        if not INTERPRETING:
            if q.device.type != "cuda" or torch.version.hip is not None:
                return f"an NVIDIA GPU is required, got {'ROCm' if torch.version.hip is not None else q.device.type}"
            if _capability(q.device) < LEAST_CAPABILITY:
                return f"compute capability {LEAST_CAPABILITY} or more is required, got {_capability(q.device)}"
            if _version() < LEAST_VERSION:
                return f"Triton {LEAST_VERSION} or later is required, got {_version()}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"float32, bfloat16 or float16 is required, got {q.dtype}"
        # limited by shared memory
        most_heads = 8 if q.dtype == torch.float32 and not INTERPRETING else MAX_HEADS
        if q.shape[1] > most_heads:
            return (
                f"at most {most_heads} heads are supported in {str(q.dtype)[6:]}, got {q.shape[1]}"
            )
        if max(q.shape[-1], v.shape[-1]) > MAX_DIM_HEAD:
            return f"heads at most {MAX_DIM_HEAD} wide are supported, got {q.shape[-1]} (q, k) and {v.shape[-1]} (v)"
        if q.shape[2] > MAX_PIXELS:
            return f"maps of at most {MAX_PIXELS} pixels are supported, got {q.shape[2]}"
        most_sides = _most_sides(q)
        if problem.height_rel is not None and sum(problem.feat_size) > most_sides:
            H, W = problem.feat_size
            return (
                f"at most {most_sides} rows and columns together are supported in "
                f"{str(q.dtype)[6:]} on this GPU, got {H} and {W}"
            )
        if weight is not None and weight.shape[-1] not in (1, 3, 5):
            return f"a map convolution of kernel size 1, 3 or 5 is required, got {weight.shape[-1]}"
        return None

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        """See `Implementation.forward`; in memory out is (B, N, K, E) and logits (B, N, N, K), in q's dtype."""
        p = problem
        prev = gates = None
        if p.prev_logits is not None:
            prev, gates = p.prev_logits.to(p.q.dtype), p.gates()
        alpha, beta = (p.alpha, p.beta) if gates is None else (1.0, 1.0)
        inputs = (
            p.q,
            p.k,
            p.v,
            p.height_rel,
            p.width_rel,
            prev,
            p.weight,
            p.bias,
            gates,
            p.dropout_seed(),
        )
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        out, logits, _, _ = _forward(
            *inputs,
            numbers=[float(number) for number in (alpha, beta, p.scale, p.dropout_p)],
            sizes=[*p.feat_size, p.num_prefix_tokens, int(p.predict)],
            save=p.need_logits or learns,
        )
        return out, logits if p.need_logits else None
