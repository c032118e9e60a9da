"""Evolving attention of chained layers (EA, PA) on CUDA, in Triton, forward and backward.

Every kind of layer is one formula with three constants, of which a kernel drops the terms that are zero:

    logits = conv_share * relu(conv(maps)) + maps_share * maps + own_share * own
    own = scale * (q.k + q.height_rel + q.width_rel)

* first layer of a chain: logits = own;
* PA, or no convolution: maps = prev_logits, one kernel;
* EA: m = alpha * prev + (1 - alpha) * own in a first kernel, which stores m; logits from maps = m in a second. The
  convolution needs its neighbours' m, and Triton cannot shift a tile that lies in registers: fusing the two would mean
  to compute own nine times, or to keep a halo in scratch memory behind barriers. m costs one write and one read.

The work is memory traffic: bytes that move per entry (one number of the B x K x N x N) in bfloat16, in training:

| | forward | backward |
| --- | --- | --- |
| first | 2: logits written | 10: logits and their gradient read; g written, read twice |
| PA | 4: prev read; logits | 20: logits, gradient; d_conv, g; prev, d_conv; d_conv, g; d_prev; g once more |
| EA, beta = 1 | 8: prev; m; m; logits | 16: logits, gradient; d_conv; prev, d_conv; d_conv; d_prev; d_prev once more |

Less 2 backward where the logits have no gradient (the last layer). g is the logits' gradient, d_conv what of it enters
the convolution. Queries, keys and values are small beside the maps (a tenth each at N = 196, D = 20) and are read
through the L2 cache, once for each block of 16 or 32 pixels. Of N x N size a layer keeps for backward its logits, which
the next layer has as prev_logits, and no other map: m is computed again, tile by tile, where the weight's gradient
needs it. Where the ReLU passed its gradient is read off the logits, or, where these are a sum (PA, beta < 1, gates,
prefix tokens), off a bit an entry. Two scratch maps live as long as backward runs, three where beta < 1.

Choices:
* Maps lie in memory as (B, N, N, K), torch's channels_last of (B, K, N, N): see `triton_kernels`. A map that comes in
  another layout is copied once.
* Tensor cores for all products, operands in the maps' dtype, sums in float32 (for float32 three tf32 products, which
  keep its accuracy). The convolution of 8 heads is 3 products (pixels, 24 of 32) x (24 of 32, 8).
* The softmax is of the stored, rounded logits, so that backward, which reads or recomputes them, sees the same.
* Gates that learn cost no map, since what they stand before is linear in something: the sum of g * relu(conv) is the
  weight times its gradient (and the bias), that of g * own is q times its gradient, both before their shares, which
  may be 0. So d_m is stored whole, and multiplied by alpha in place by the kernel that reads it last.
* Dropout is drawn by counter (seed, query, key), in forward and again in backward, as the C kernel draws it.
* Gradients of weight, bias, gates and tables are summed per program, each into a slot of its own, then by torch: no
  atomics, the same bits on every run.
* Backward of the softmax has no convolution in it, and the weight's gradient has a kernel of its own: together they
  need 254 registers a thread, apart two blocks of 256 threads fit on a multiprocessor.
* torch.library.custom_op, not triton_op: nothing beside the kernels is left for inductor to fuse, and the opaque
  operator runs in Triton's interpreter too.
"""

import importlib.util
import os
from collections import namedtuple
from collections.abc import Sequence

import torch
from torch import Tensor

from ea_vision.ops import triton_tiles
from ea_vision.ops.problem import Implementation, Problem, refuse_second_derivatives
from ea_vision.ops.triton_tiles import BY_KEYS, SMALL_MEMORY, Tile, default_tile

MAX_HEADS = 16
MAX_DIM_HEAD = 64
MAX_PIXELS = 4096
MAX_SIDES = (
    80  # rows and columns together, with position tables: what the kernels' shared memory holds
)
MAX_SIDES_WIDE = 64  # of heads that are more than 256 channels wide together
MAX_SIDES_FLOAT32 = 64
MAX_SIDES_FLOAT32_SMALL = 32  # where a block has 99 KiB, see SMALL_MEMORY
LEAST_CAPABILITY = (8, 0)
LEAST_VERSION = (3, 5)  # before, products need 16 columns, and there may be 8 heads
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, reads it once


@torch.compiler.assume_constant_result
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@torch.compiler.assume_constant_result
def _version() -> tuple[int, ...]:
    import triton

    return tuple(int(number) for number in triton.__version__.split(".")[:2])


# What a kernel is compiled for, see `triton_kernels`. SPLIT: on 10.x products of 64 rows and more go to tensor memory,
# where Triton before its pull request 10988 sums chained products wrongly (triton-lang/triton issue 10821); they are
# done by 32. SMALL: of `triton_tiles`. DTYPE, GATED and GIVEN, the names of the arguments that are not None, tell apart
# what triton.autotune times.
Shape = namedtuple(
    "Shape",
    "H W N K KS KP DP EP RP SP TP LINE PREFIX RELATIVE SPLIT SMALL DTYPE GATED GIVEN",
    defaults=((),),
)
# A tensor (B, K, N, D) with its strides, all but the last by UNITs of numbers: how wide the compiler may load
Rows = namedtuple("Rows", "data image head pixel width UNIT D DP LINE")
# The convolution's weight with its strides
Weight = namedtuple("Weight", "data makes takes y x")
# The seed, how many values of 24 random bits drop, and the gain of what is kept
Dropout = namedtuple("Dropout", "seed threshold gain")


def _shares(
    has_prev: bool, has_weight: bool, alpha: float, beta: float, predict: bool, gates: Tensor | None
):
    """Return the (conv, kept, own) shares of the logits, and of EA's m, or None where there is none. A share is a
    number, or of gates (K) numbers by heads, or None: the term is dropped."""
    if not has_prev:
        return (None, None, 1.0), None
    if gates is None:
        alphas, betas, one_less_alpha, one_less_beta = (
            x or None for x in (alpha, beta, 1.0 - alpha, 1.0 - beta)
        )
    else:
        alphas, betas, one_less_alpha, one_less_beta = torch.cat([gates, 1.0 - gates]).float()
    if predict and has_weight:
        return (alphas, None, one_less_alpha), None
    if predict or not has_weight or betas is None:
        return (None, alphas, one_less_alpha), None
    return (betas, one_less_beta, None), (None, alphas, one_less_alpha)


def _heads_last(maps: Tensor | None) -> Tensor | None:
    """Return (B, K, N, N) in any layout as the (B, N, N, K) that the kernels read, copied where it lies otherwise."""
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
    """Return room for out, logits (empty unless `save`), the rows' log-sum-exp, base 2, and where the ReLU passed its
    gradient, (B, N, N), a bit a head (empty unless `save`, and where the logits, which backward reads, tell)."""
    (B, K, N, _), (conv, kept, own) = q.shape, shares
    alone = isinstance(conv, float) and conv > 0 and kept is None and own is None and prefix == 0
    signs = (B, N, N) if save and conv is not None and not alone else (0,)
    return (
        _new_rows(q, v.shape[-1]),
        _new_maps(q).permute(0, 3, 1, 2) if save else q.new_empty(0),
        q.new_empty(B, K, N, dtype=torch.float32),
        q.new_empty(signs, dtype=torch.uint8 if K <= 8 else torch.int16),
    )


def _given(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def _count(*tensors: Tensor | None) -> int:
    """Return how many numbers there are in all."""
    return sum(x.numel() for x in tensors if x is not None)


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _rows(x: Tensor) -> Rows:
    from triton.language import constexpr

    image, head, pixel, width = x.stride()
    unit = 1 if width != 1 or (image | head | pixel) % 4 else 4
    D = x.shape[-1]
    constants = (constexpr(n) for n in (unit, D, _power(D), max(1, 32 * unit // _power(D))))
    return Rows(x, image // unit, head // unit, pixel // unit, width, *constants)


def _dense(x: Tensor | None) -> Tensor | None:
    """Return the tensor, copied only if its numbers do not fill its memory in some order."""
    return x if x is None or torch.empty_like(x).stride() == x.stride() else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _prepared(
    inputs: Sequence[Tensor | None],
    alpha: float,
    beta: float,
    predict: bool,
    scale: float,
    dropout_p: float,
    H: int,
    W: int,
    prefix: int,
):
    """Return the shares of the logits and of EA's m, see `_shares`, and by name what kernels take of the inputs."""
    q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed = inputs
    shares, mixing = _shares(
        prev_logits is not None, weight is not None, alpha, beta, predict, gates
    )
    K, relative = q.shape[1], height_rel is not None
    kernel_size = 1 if weight is None else weight.shape[-1]
    chip = _capability(q.device) if q.is_cuda else None
    RP = _power(kernel_size * K)
    line = 32 * min(K & -K, 16 // q.element_size()) // RP
    S = Shape(
        H,
        W,
        H * W,
        K,
        kernel_size,
        KP=_power(K, 1),
        DP=_power(q.shape[-1]),
        EP=_power(v.shape[-1]),
        RP=RP,
        LINE=max(1, line),
        SP=_power(H + W if relative else 1),
        TP=_power(2 * H + 2 * W - 2 if relative else 1),
        PREFIX=0 if weight is None else prefix,
        RELATIVE=relative,
        SPLIT=chip is not None and chip[0] == 10,
        SMALL=chip in SMALL_MEMORY,
        DTYPE=str(q.dtype),
        GATED=gates is not None,
    )
    weight = _dense(weight)
    dropout = None
    if seed is not None:
        dropout = Dropout(
            seed, round(dropout_p * (1 << 24)), 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
        )
    return (
        shares,
        mixing,
        {
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
            "dropout": dropout,
        },
    )


def _programs(q: Tensor, pixels: int) -> int:
    return q.shape[0] * -(-q.shape[2] // pixels)


def _launch(kernel, tile: Tile, **arguments) -> None:
    """Run one program for each image and block of pixels, with the arguments that the kernel takes."""
    q = arguments["q"].data
    by_keys = kernel.__name__ in BY_KEYS
    programs = _programs(q, tile.keys if by_keys else tile.queries)
    arguments |= {"I": tile.queries, "J": tile.keys}
    arguments = {name: x for name, x in arguments.items() if name in kernel.arg_names}
    if triton_tiles.tunes(kernel.__name__, q.device, programs):
        given = tuple(name for name, x in arguments.items() if x is not None)
        S = arguments["S"]._replace(GIVEN=given)
        tuner = triton_tiles.tuned(kernel, tile, S)
        if tuner.cache or not _is_capturing():
            del arguments["J"]
            tuner[programs,](**arguments | {"S": S})
            return
    limit = {"maxnreg": tile.registers} if tile.registers else {}
    kernel[programs,](**arguments, num_warps=tile.warps, num_stages=tile.stages, **limit)


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured, which would capture the trials of tiles."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
    alpha: float,
    beta: float,
    predict: bool,
    scale: float,
    dropout_p: float,
    height: int,
    width: int,
    prefix: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `_outputs`, filled."""
    from ea_vision.ops import triton_kernels

    inputs = q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed
    shares, mixing, common = _prepared(
        inputs, alpha, beta, predict, scale, dropout_p, height, width, prefix
    )
    maps, dropout, S = common["maps"], common["dropout"], common["S"]

    def evolve(maps, conv, kept, own, dropout=None, logits=None, signs=None, out=None, lse=None):
        tile = default_tile("evolve", S, conv is not None, out is not None)
        _launch(
            triton_kernels.evolve,
            tile,
            **common
            | {
                "maps": maps,
                "conv": conv,
                "kept": kept,
                "own": own,
                "dropout": dropout,
                "logits": logits,
                "signs": signs,
                "out": out,
                "lse": lse,
                "S": S,
            },
        )

    with torch.cuda.device_of(q):
        if mixing is not None:
            mixed = _new_maps(q)
            evolve(maps, *mixing, logits=mixed)
            maps = mixed
        out, logits, lse, signs = _outputs(q, v, shares, prefix, save)
        if (
            S.KP > 8 and shares[0] is not None
        ):  # convolution and softmax of so many heads do not fit into one kernel
            evolved = logits if save else _new_maps(q)
            evolve(maps, *shares, logits=evolved, signs=_given(signs))
            S = S._replace(GATED=False)
            evolve(evolved, None, 1.0, None, dropout, out=out, lse=lse)
        else:
            evolve(maps, *shares, dropout, _given(logits), _given(signs), out, lse)
    return out, logits, lse, signs


_forward = torch.library.custom_op(
    "ea_vision::triton_attention_forward", _run_forward, mutates_args=()
)


@_forward.register_fake
def _(
    q,
    k,
    v,
    height_rel,
    width_rel,
    prev_logits,
    weight,
    bias,
    gates,
    seed,
    alpha,
    beta,
    predict,
    *rest,
):
    *_, prefix, save = rest
    shares, _ = _shares(prev_logits is not None, weight is not None, alpha, beta, predict, gates)
    return _outputs(q, v, shares, prefix, save)


def _run_backward(
    d_out: Tensor,
    d_logits: Tensor | None,
    inputs: list[Tensor | None],
    out: Tensor,
    logits: Tensor,
    lse: Tensor,
    signs: Tensor,
    alpha: float,
    beta: float,
    predict: bool,
    scale: float,
    dropout_p: float,
    height: int,
    width: int,
    prefix: int,
) -> list[Tensor]:
    """Return gradients of q, k, v, both tables, one after the other, prev_logits, weight, bias and gates, which with
    the seed are `inputs`; empty for what there is not."""
    from ea_vision.ops import triton_kernels

    q, _, v, height_rel, width_rel, _, weight, bias, gates, _ = inputs
    (conv, kept, own), mixing, common = _prepared(
        inputs, alpha, beta, predict, scale, dropout_p, height, width, prefix
    )
    K, S, weight = q.shape[1], common["S"], _dense(weight)
    with torch.cuda.device_of(q):
        delta = torch.empty_like(lse)
        common |= {"d_out": _rows(d_out), "delta": delta}
        _launch(triton_kernels.row_products, Tile(), **common, out=_rows(out))

        # Softmax and ReLU: g (the logits' gradient), d_conv, d_v, d_bias
        g = None if mixing is not None and kept is None else _new_maps(q)
        d_conv = None if conv is None else _new_maps(q)
        d_v = _new_rows(q, v.shape[-1])
        common |= {"d_conv": d_conv, "conv": conv}
        tile = default_tile("logits_backward", S, conv is not None)
        d_bias = q.new_empty(0 if conv is None else _programs(q, tile.keys), K, dtype=torch.float32)
        _launch(
            triton_kernels.logits_backward,
            tile,
            **common,
            logits=_heads_last(logits),
            signs=_given(signs),
            lse=lse,
            d_logits=_heads_last(d_logits),
            d_maps=g,
            d_v=d_v,
            d_bias=d_bias,
        )

        # Convolution, mixing, and the query's side: d_prev, d_q, and by program d_tables, d_weight, d_alpha, d_beta
        prev_share, own_share = (
            0.0 if share is None else share for share in (mixing or (1.0, own))[-2:]
        )
        by_number = isinstance(own_share, float)
        # d_k comes from the stored d_prev = alpha * a; with alpha 0 that would be lost, so a is stored, d_prev cleared
        store_share = prev_share if by_number and prev_share else 1.0
        d_prev = None if common["maps"] is None else _new_maps(q)
        n_tables, n_weight = _count(height_rel, width_rel), _count(weight)
        n_gates = 0 if gates is None else K
        tile = default_tile("queries_backward", S, conv is not None)
        by_query = q.new_empty(_programs(q, tile.queries), n_tables + n_gates, dtype=torch.float32)
        d_q, d_k = _new_rows(q, q.shape[-1]), _new_rows(q, q.shape[-1])
        common["d_logits"] = g
        _launch(
            triton_kernels.queries_backward,
            tile,
            **common,
            d_maps=d_prev,
            d_q=d_q,
            d_table=by_query,
            d_alpha=by_query[:, n_tables:] if n_gates else None,
            part_stride=by_query.shape[1],
            kept=kept,
            maps_share=store_share,
            own=own_share,
            OWN_FROM_MAPS=mixing is not None,
        )
        tile = default_tile("weight_backward", S, mixing is not None)
        by_tap = q.new_empty(
            0 if conv is None else _programs(q, tile.queries),
            n_weight + n_gates,
            dtype=torch.float32,
        )
        if conv is not None:
            _launch(
                triton_kernels.weight_backward,
                tile,
                **common,
                d_weight=by_tap,
                d_beta=by_tap[:, n_weight:] if n_gates and mixing else None,
                part_stride=by_tap.shape[1],
                kept=prev_share,
                own=own_share if mixing else None,
            )

        # The key's side
        _launch(
            triton_kernels.keys_backward,
            default_tile("keys_backward", S, True),
            **common
            | {
                "maps": d_prev if mixing else g,
                "d_k": d_k,
                "own": None if by_number else own_share,
                "share": scale * own_share / store_share if by_number else scale,
                "stored": prev_share if mixing and n_gates else None,
            },
        )

    d_table, d_weight, d_bias = by_query.sum(0), by_tap.sum(0), d_bias.sum(0)
    d_alpha, d_beta = d_table[n_tables:], d_weight[n_weight:]
    d_table, d_weight, d_gates = d_table[:n_tables], d_weight[:n_weight], q.new_empty(0)
    if weight is not None:
        d_weight = d_weight.as_strided(weight.shape, weight.stride())
    if gates is not None:
        if conv is not None:
            used, used_bias = (x.to(q.dtype).float() for x in (weight, bias))
            d_convolved = (used * d_weight).sum((1, 2, 3)) + used_bias * d_bias
            d_weight *= conv.view(K, 1, 1, 1)
            d_bias = conv * d_bias
            if mixing:
                d_beta = d_beta + d_convolved
            else:  # PA: beta is not in it
                d_alpha, d_beta = d_alpha + d_convolved, torch.zeros_like(d_alpha)
        d_gates = torch.stack([d_alpha, d_beta]).to(gates.dtype)
    if d_prev is None:
        d_prev = q.new_empty(0)
    else:
        d_prev = (d_prev.zero_() if by_number and prev_share == 0.0 else d_prev).permute(0, 3, 1, 2)
    return [d_q, d_k, d_v, d_table, d_prev, d_weight, d_bias, d_gates]


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
    ctx.set_materialize_grads(
        False
    )  # the last logits of a chain have no gradient: no N x N zeros for them
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:-1]


def _differentiate(ctx, d_out, d_logits, d_lse, d_signs):
    inputs, (out, *saved) = ctx.saved_tensors[:10], ctx.saved_tensors[10:]
    height_rel, width_rel = inputs[3:5]
    if d_out is None:
        d_out = torch.zeros_like(out)
    *d_rows, d_table, d_prev, d_weight, d_bias, d_gates = _backward(
        d_out, d_logits, inputs, out, *saved, *ctx.options
    )
    d_height = d_width = None
    if height_rel is not None:
        d_height, d_width = (
            x.view(table.shape)
            for x, table in zip(
                d_table.split([height_rel.numel(), width_rel.numel()]),
                (height_rel, width_rel),
                strict=True,
            )
        )
    gradients = *d_rows, d_height, d_width, d_prev, d_weight, d_bias, d_gates
    return (
        *(
            None if x is None else gradient.to(x.dtype)
            for x, gradient in zip(inputs[:9], gradients, strict=True)
        ),
        *(None,) * 10,
    )


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
        q, v, weight = problem.q, problem.v, problem.weight
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
        most_heads = (
            8 if q.dtype == torch.float32 and not INTERPRETING else MAX_HEADS
        )  # by the shared memory there is
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
        """As `Implementation.forward`: out lies as (B, N, K, E), logits as (B, N, N, K) in q's dtype."""
        p, prev, gates = problem, None, None
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
            float(alpha),
            float(beta),
            p.predict,
            float(p.scale),
            float(p.dropout_p),
            *p.feat_size,
            p.num_prefix_tokens,
            p.need_logits or learns,
        )
        return out, logits if p.need_logits else None
