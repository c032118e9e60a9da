"""Evolving attention of chained layers (EA, PA) on CUDA, in Triton, forward and backward.

Every kind of layer is one formula with three constants, of which a kernel drops the terms that are zero:

    logits = conv_share * relu(conv(maps)) + maps_share * maps + own_share * own
    own = scale * (q.k + q.height_rel + q.width_rel)

* first layer of a chain: logits = own;
* PA, or no convolution: maps = prev_logits, one kernel;
* EA: m = alpha * prev + (1 - alpha) * own in a first kernel, which stores m; logits from maps = m in a second. The
  convolution needs its neighbours' m, and Triton cannot shift a tile that lies in registers: fusing the two would mean
  to compute own nine times, or to keep a halo in scratch memory behind barriers. m costs one write and one read.

The work is memory traffic: bytes that move per entry (one number of the B x K x N x N) in bfloat16:

| | forward | backward |
| --- | --- | --- |
| first | 2: logits written | 10: logits and their gradient read; g written, read twice |
| PA | 4: prev read; logits | 18: prev, logits, gradient; d_conv, g; both read again; d_prev; g once more |
| EA, beta = 1 | 8: prev; m; m; logits | 16: prev; m; m, gradient; d_conv; d_conv; d_prev; d_prev once more |

Less 2 forward where the logits are not needed, and 2 backward where they have no gradient (the last layer; in PA and
in a first layer backward then computes them again). g is the logits' gradient, d_conv what of it enters the
convolution. Queries, keys and values are small beside the maps (a tenth each at N = 196, D = 20) and are read through
the L2 cache, once for each block of 16 or 32 pixels. Of N x N size a layer keeps for backward only prev_logits and,
where it is not EA, its logits; two scratch maps live as long as backward runs, three where beta < 1.

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
* torch.library.custom_op, not triton_op: nothing beside the kernels is left for inductor to fuse, and the opaque
  operator runs in Triton's interpreter too.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_HEADS = 8
MAX_DIM_HEAD = 64
MAX_PIXELS, MAX_SIDES = 1024, 64
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, reads it once


@torch.compiler.assume_constant_result
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def reason_against(
        q: Tensor, k: Tensor, v: Tensor, prev_logits: Tensor | None, weight: Tensor | None,
        feat_size: tuple[int, int] | None = None,
) -> str | None:
    """Why `attend` cannot take these arguments; None if it can. feat_size: of the position tables, if any."""
    if not INSTALLED:
        return "triton is not installed"
    if not INTERPRETING:
        if q.device.type != "cuda" or torch.version.hip is not None:
            return f"a CUDA device is required, got {q.device.type}"
        # Others have less shared memory, or (10) sum chained products wrongly: triton-lang/triton issue 10821
        if _capability(q.device) not in ((8, 0), (9, 0)):
            return f"compute capability (8, 0) or (9, 0) is required, got {_capability(q.device)}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"float32, bfloat16 or float16 is required, got {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v of one dtype are required, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[1] > MAX_HEADS:
        return f"at most {MAX_HEADS} heads are supported, got {q.shape[1]}"
    if max(q.shape[-1], v.shape[-1]) > MAX_DIM_HEAD:
        return f"heads at most {MAX_DIM_HEAD} wide are supported, got {q.shape[-1]} (q, k) and {v.shape[-1]} (v)"
    if q.shape[2] > MAX_PIXELS:
        return f"maps of at most {MAX_PIXELS} pixels are supported, got {q.shape[2]}"
    if feat_size is not None and sum(feat_size) > MAX_SIDES:
        return f"at most {MAX_SIDES} rows and columns together are supported, got {feat_size[0]} and {feat_size[1]}"
    if weight is not None and weight.shape[-1] not in (1, 3):
        return f"a map convolution of kernel size 1 or 3 is required, got {weight.shape[-1]}"
    return None


def attend(
        q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None, width_rel: Tensor | None,
        prev_logits: Tensor | None, weight: Tensor | None, bias: Tensor | None, alpha: float, beta: float, *,
        predict: bool, scale: float, feat_size: tuple[int, int], need_logits: bool, gates: Tensor | None = None,
        dropout_p: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `ea_vision.ops.reference.attend`; the tables must fit the map.

    gates: alpha and beta by heads, (2, K), in place of the numbers; seed: what the dropout is drawn by, (1) of int64,
    needed with dropout_p > 0.

    Returns:
        out (B, K, N, E), laid out as (B, N, K, E); logits (B, K, N, N) in q's dtype, laid out as (B, N, N, K), or None.

    Raises:
        ValueError: tables of another size than feat_size requires, gates of another, or the wrong number of pixels.
    """
    H, W = feat_size
    B, K, N, D = q.shape
    if N != H * W:
        raise ValueError(f"{H} x {W} = {H * W} pixels required, got q of shape {list(q.shape)}")
    if prev_logits is not None:
        prev_logits = prev_logits.to(q.dtype)
    if height_rel is not None and (height_rel.shape != (2 * H - 1, D) or width_rel.shape != (2 * W - 1, D)):
        raise ValueError(
            f"position tables of shape {[2 * H - 1, D]} and {[2 * W - 1, D]} required, got {list(height_rel.shape)} "
            f"and {list(width_rel.shape)}")
    if prev_logits is None:
        gates = None
    if gates is not None and gates.shape != (2, K):
        raise ValueError(f"gates of shape {[2, K]} required, got {list(gates.shape)}")
    if dropout_p > 0 and seed is None:
        raise ValueError("a seed of shape [1] required for dropout, got None")
    out, logits, _ = _forward(
        q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed, float(alpha), float(beta), predict,
        float(scale), float(dropout_p), H, W, need_logits)
    return out, logits if need_logits else None


class Share(NamedTuple):
    """Of a term in a sum: a number, or a row of the kernels' gates; a number that is 0 drops the term."""

    number: float = 1.0
    row: int = -1

    def __bool__(self) -> bool:
        return self.number != 0.0


NO_SHARE, WHOLE = Share(0.0), Share(1.0)


def _shares(has_prev: bool, has_weight: bool, alpha: float, beta: float, predict: bool, gated: bool):
    """(conv, maps, own) shares of the logits, and of EA's m, or None where there is none."""
    if not has_prev:
        return (NO_SHARE, NO_SHARE, WHOLE), None
    if gated:
        alphas, betas, one_less_alpha, one_less_beta = (Share(row=row) for row in range(4))
    else:
        alphas, betas, one_less_alpha, one_less_beta = map(Share, (alpha, beta, 1.0 - alpha, 1.0 - beta))
    if predict and has_weight:
        return (alphas, NO_SHARE, one_less_alpha), None
    if predict or not has_weight or not betas:
        return (NO_SHARE, alphas, one_less_alpha), None
    return (betas, one_less_beta, NO_SHARE), (NO_SHARE, alphas, one_less_alpha)


def _gate_rows(gates: Tensor | None) -> Tensor | None:
    """(2, K) -> alpha, beta, 1 - alpha, 1 - beta, (4, K) in float32."""
    return None if gates is None else torch.cat([gates, 1.0 - gates]).float()


def _heads_last(maps: Tensor) -> Tensor:
    """(B, K, N, N) in any layout -> the (B, N, N, K) that the kernels read; a copy only where it lies otherwise."""
    return maps.permute(0, 2, 3, 1).contiguous()


def _new_maps(q: Tensor) -> Tensor:
    B, K, N, _ = q.shape
    return q.new_empty(B, N, N, K)


def _new_rows(q: Tensor, width: int) -> Tensor:
    """(B, K, N, width), laid out so that heads concatenate without a copy."""
    B, K, N, _ = q.shape
    return q.new_empty(B, N, K, width).transpose(1, 2)


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


# A program keeps a block of pixels and steps over the other side of the maps by LOOPED; all heads at once.
LOOPED = 16
WARPS = 8


def _sizes(q: Tensor, v: Tensor, H: int, W: int, kernel_size: int, relative: bool) -> dict:
    """The kernels' constants, of which each takes what it knows."""
    import triton.language as tl

    K, D, E = q.shape[1], q.shape[-1], v.shape[-1]
    operand = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[q.dtype]
    if INTERPRETING:
        operand = tl.float32
    return {
        "H": H, "W": W, "N": H * W, "K": K, "D": D, "E": E, "KS": kernel_size,
        "KP": _power(K, 1), "DP": _power(D), "EP": _power(E), "RP": _power(kernel_size * K),
        "SP": _power(H + W if relative else 1), "TP": _power(2 * H + 2 * W - 2 if relative else 1), "GROUPS": WARPS,
        "OP": operand, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }


def _programs(q: Tensor, blocks: int = 1) -> int:
    return q.shape[0] * -(-q.shape[2] // (blocks * LOOPED))


class Launch(NamedTuple):
    """One launch of a kernel: what it is called with, and how many programs there are."""

    kernel: Any
    args: tuple
    constants: dict[str, Any]
    programs: int
    num_warps: int
    num_stages: int

    def run(self) -> None:
        self.kernel[self.programs,](
            *self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)


_recorded: list[list[Launch]] = []


@contextmanager
def launches_recorded() -> Iterator[list[Launch]]:
    """Inside the `with` block kernels are not run but put on the list, which is yielded."""
    _recorded.append([])
    try:
        yield _recorded[-1]
    finally:
        _recorded.pop()


def _launch(kernel, q: Tensor, sizes: dict, *args, queries: int = 1, keys: int = 1, **flags) -> None:
    """One program for each image and block of pixels. A tile has queries x keys, in units of LOOPED."""
    values = {**sizes, **flags, "I": queries * LOOPED, "J": keys * LOOPED}
    constants = {name: values[name] for name in kernel.arg_names if name in values}
    launch = Launch(kernel, args, constants, _programs(q, max(queries, keys)), WARPS,
                    1 if q.dtype == torch.float32 else 2)
    if _recorded:
        _recorded[-1].append(launch)
    else:
        launch.run()


def _strides(*tensors: Tensor) -> tuple[list[int], int]:
    """Strides of (B, K, N, D) tensors, all but the last in units of 4 numbers where they are multiples of 4."""
    unit = 4 if all(x.stride(3) == 1 and all(n % 4 == 0 for n in x.stride()[:3]) for x in tensors) else 1
    return [n for x in tensors for n in (*(n // unit for n in x.stride()[:3]), x.stride(3))], unit


def _drawn(dropout_p: float) -> tuple[int, float]:
    """Of 24 random bits, how many values drop; and the gain of what is kept."""
    return round(dropout_p * (1 << 24)), 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def _evolve(q, k, v, table, maps, weight, bias, gates, shares, scale, sizes, *, logits=None, out=None,
            lse=None, seed=None, dropout_p=0.0) -> None:
    """One forward kernel: fills `logits`, and `out` and `lse`, where given."""
    from ea_vision.ops import triton_kernels

    conv, kept, own = shares
    strides, unit = _strides(q, k)
    v_strides, unit_v = _strides(v)
    # Twice the queries halve the reads of k; a convolution, wide heads and float32 need the room themselves
    wide = not conv and sizes["DP"] <= 32 and q.dtype != torch.float32
    _launch(
        triton_kernels.evolve, q, sizes,
        q, k, v, *(q if x is None else x for x in (table, maps, weight, bias, gates, seed, logits, out, lse)),
        *strides, *v_strides, conv.number, kept.number, own.number, scale, *_drawn(dropout_p),
        queries=2 if wide else 1, UNIT=unit, UNIT_V=unit_v, OWN=bool(own), MAPS=bool(kept), CONV=bool(conv),
        RELATIVE=table is not None, SAVE=logits is not None, ATTEND=out is not None,
        CONV_ROW=conv.row, MAPS_ROW=kept.row, OWN_ROW=own.row, DROP=dropout_p > 0 and out is not None)


def _run_forward(
        q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None, width_rel: Tensor | None,
        prev_logits: Tensor | None, weight: Tensor | None, bias: Tensor | None, gates: Tensor | None,
        seed: Tensor | None, alpha: float, beta: float, predict: bool, scale: float, dropout_p: float, height: int,
        width: int, need_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, logits (empty where not needed) and the rows' log-sum-exp, base 2."""
    sizes = _sizes(q, v, height, width, weight.shape[-1] if weight is not None else 1, height_rel is not None)
    table = None if height_rel is None else torch.cat([height_rel, width_rel])
    weight, bias = _contiguous(weight), _contiguous(bias)
    shares, mixing = _shares(prev_logits is not None, weight is not None, alpha, beta, predict, gates is not None)
    maps, gates = None if prev_logits is None else _heads_last(prev_logits), _gate_rows(gates)
    B, K, N, _ = q.shape
    with torch.cuda.device_of(q):
        if mixing is not None:
            mixed = _new_maps(q)
            _evolve(q, k, v, table, maps, None, None, gates, mixing, scale, sizes, logits=mixed)
            maps = mixed
        logits = _new_maps(q) if need_logits else None
        out, lse = _new_rows(q, v.shape[-1]), q.new_empty(B, K, N, dtype=torch.float32)
        _evolve(q, k, v, table, maps, weight, bias, gates, shares, scale, sizes, logits=logits, out=out, lse=lse,
                seed=seed, dropout_p=dropout_p)
    return out, q.new_empty(0) if logits is None else logits.permute(0, 3, 1, 2), lse


_forward = torch.library.custom_op("ea_vision::triton_attention_forward", _run_forward, mutates_args=())


@_forward.register_fake
def _(q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed, alpha, beta, predict, scale, dropout_p,
      height, width, need_logits):
    B, K, N, _ = q.shape
    logits = _new_maps(q).permute(0, 3, 1, 2) if need_logits else q.new_empty(0)
    return _new_rows(q, v.shape[-1]), logits, q.new_empty(B, K, N, dtype=torch.float32)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _run_backward(
        d_out: Tensor, d_logits: Tensor | None, q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None,
        width_rel: Tensor | None, prev_logits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        gates: Tensor | None, seed: Tensor | None, logits: Tensor | None, out: Tensor, lse: Tensor, alpha: float,
        beta: float, predict: bool, scale: float, dropout_p: float, height: int, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates; empty for those that are None."""
    from ea_vision.ops import triton_kernels

    B, K, N, D = q.shape
    E = v.shape[-1]
    kernel_size = weight.shape[-1] if weight is not None else 1
    sizes = _sizes(q, v, height, width, kernel_size, height_rel is not None)
    gated = gates is not None
    (conv, kept, own), mixing = _shares(prev_logits is not None, weight is not None, alpha, beta, predict, gated)
    rows_of_gates = _gate_rows(gates)
    table = None if height_rel is None else torch.cat([height_rel, width_rel])
    weight_, bias_ = _contiguous(weight), _contiguous(bias)
    prev = maps = None if prev_logits is None else _heads_last(prev_logits)
    with torch.cuda.device_of(q):
        # The logits, from memory or again
        if mixing is not None:
            mixed = _new_maps(q)
            _evolve(q, k, v, table, maps, None, None, rows_of_gates, mixing, scale, sizes, logits=mixed)
            maps, rows = mixed, None
        elif logits is not None:
            rows = _heads_last(logits)
        else:
            rows = _new_maps(q)
            _evolve(q, k, v, table, maps, weight_, bias_, rows_of_gates, (conv, kept, own), scale, sizes, logits=rows)

        # Softmax and ReLU: g (the logits' gradient), d_conv, d_v, d_weight, d_bias, the convolved maps' gate
        d_next = None if d_logits is None else _heads_last(d_logits.to(q.dtype))
        delta = (d_out.float() * out.float()).sum(-1).contiguous()
        d_v = _new_rows(q, E)
        save_g = mixing is None or bool(kept)
        g = _new_maps(q) if save_g else q
        d_conv = d_weights = d_biases = q
        d_maps_gate, d_own_gate = (q.new_empty(_programs(q), K, dtype=torch.float32) if gated else q for _ in range(2))
        if conv:
            d_conv = _new_maps(q)
            parts = _programs(q)
            d_weights = weight.new_empty(parts, *weight.shape, dtype=torch.float32)
            d_biases = weight.new_empty(parts, K, dtype=torch.float32)
        v_strides, unit = _strides(v)
        out_strides, unit_out = _strides(d_out)
        _launch(
            triton_kernels.logits_backward, q, sizes,
            v, *(q if x is None else x for x in (maps, weight_, bias_, rows_of_gates, seed, rows, d_next)), d_out, lse,
            delta, d_conv, g, d_v, d_weights, d_biases, d_maps_gate, *v_strides, *out_strides, conv.number, kept.number,
            *_drawn(dropout_p), UNIT_V=unit, UNIT_OUT=unit_out, MAPS=bool(kept), CONV=bool(conv),
            REBUILD=mixing is not None, FROM_NEXT=d_next is not None, SAVE=save_g, CONV_ROW=conv.row,
            MAPS_ROW=kept.row if mixing is not None else -1, DROP=dropout_p > 0)

        # Convolution, mixing, and the query's side: d_prev, d_q, d_tables, alpha
        if mixing is not None:
            del mixed, maps
            _, prev_share, own_share = mixing
        else:
            prev_share, own_share = WHOLE, own
        # d_k comes from the stored d_prev = alpha * m; with alpha 0 that would be lost, so m is stored, d_prev cleared
        store_share = prev_share if prev_share else WHOLE
        d_prev = _new_maps(q) if prev_logits is not None else q
        d_table = q if table is None else q.new_empty(_programs(q), *table.shape, dtype=torch.float32)
        d_q, d_k = _new_rows(q, D), _new_rows(q, D)
        strides, unit = _strides(q, k)
        _launch(
            triton_kernels.queries_backward, q, sizes,
            q, k, *(q if x is None else x for x in (table, weight_, rows_of_gates, prev)), d_conv, g, d_prev, d_q,
            d_table, d_own_gate, *strides, kept.number, store_share.number, own_share.number, scale,
            UNIT=unit, RELATIVE=table is not None, CONV=bool(conv), LOGITS=save_g, OWN_FROM_MAPS=mixing is not None,
            SAVE=prev_logits is not None, LOGITS_ROW=kept.row, OWN_ROW=own_share.row,
            FROM_PREV=mixing is not None or not conv)

        # The key's side
        share = own_share.number / store_share.number if mixing is not None else own_share.number
        strides, unit = _strides(q)
        _launch(
            triton_kernels.keys_backward, q, sizes, q, g if mixing is None else d_prev,
            q if rows_of_gates is None else rows_of_gates, d_k, *strides, scale * share,
            keys=2, UNIT=unit, SHARE_ROW=own_share.row, STORED_ROW=store_share.row if mixing is not None else -1)

    d_height, d_width, d_weight, d_bias, d_gates = (q.new_empty(0, dtype=torch.float32) for _ in range(5))
    if table is not None:
        d_height, d_width = d_table.sum(0).to(height_rel.dtype).tensor_split([2 * height - 1])
        d_width = d_width.clone()  # two outputs of an operator may not share memory
    if weight is not None:
        d_weight = d_weights.sum(0) if conv else torch.zeros_like(weight_)
        d_bias = d_biases.sum(0) if conv else torch.zeros_like(bias_)
    if gated:
        d_alpha = d_own_gate.sum(0)
        d_convolved = torch.zeros_like(d_alpha)
        if conv:
            used, used_bias = (x.to(q.dtype).float() for x in (weight_, bias_))
            d_convolved = (used * d_weight).sum((1, 2, 3)) + used_bias * d_bias
            d_weight, d_bias = rows_of_gates[conv.row].view(K, 1, 1, 1) * d_weight, rows_of_gates[conv.row] * d_bias
        if mixing is None:  # PA
            d_alpha, d_beta = d_alpha + d_convolved, torch.zeros_like(d_alpha)
        else:
            d_beta = d_convolved - d_maps_gate.sum(0)
        d_gates = torch.stack([d_alpha, d_beta]).to(gates.dtype)
    if weight is not None:
        d_weight, d_bias = d_weight.to(weight.dtype), d_bias.to(bias.dtype)
    if prev_logits is None:
        d_maps = q.new_empty(0)
    else:
        d_maps = (d_prev if prev_share else d_prev.zero_()).permute(0, 3, 1, 2)
    return d_q, d_k, d_v, d_height, d_width, d_maps, d_weight, d_bias, d_gates


_backward = torch.library.custom_op("ea_vision::triton_attention_backward", _run_backward, mutates_args=())


@_backward.register_fake
def _(d_out, d_logits, q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed, logits, out, lse, alpha,
      beta, predict, scale, dropout_p, height, width):
    D = q.shape[-1]

    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape)

    d_maps = q.new_empty(0) if prev_logits is None else _new_maps(q).permute(0, 3, 1, 2)
    return (_new_rows(q, D), _new_rows(q, D), _new_rows(q, v.shape[-1]), like(height_rel), like(width_rel), d_maps,
            like(weight), like(bias), like(gates))


def _keep(ctx, inputs, output) -> None:
    *tensors, alpha, beta, predict, scale, dropout_p, height, width, need = inputs
    _, _, _, _, _, prev_logits, weight, _, gates, _ = tensors
    out, logits, lse = output
    ctx.set_materialize_grads(False)  # the last logits of a chain have no gradient: no N x N zeros for them
    ctx.mark_non_differentiable(lse)
    _, mixing = _shares(prev_logits is not None, weight is not None, alpha, beta, predict, gates is not None)
    ctx.save_for_backward(*tensors, logits if need and mixing is None else None, out, lse)
    ctx.constants = alpha, beta, predict, scale, dropout_p, height, width
    ctx.need_logits = need


def _differentiate(ctx, d_out, d_logits, d_lse):
    inputs = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(inputs[-2])
    grads = _backward(d_out, d_logits if ctx.need_logits else None, *inputs, *ctx.constants)
    grads = [grad if x is not None else None for grad, x in zip(grads, inputs, strict=False)]
    return *grads, *([None] * 9)


_forward.register_autograd(_differentiate, setup_context=_keep)


def launches_of(
        q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None, width_rel: Tensor | None,
        prev_logits: Tensor | None, weight: Tensor | None, bias: Tensor | None, alpha: float, beta: float, *,
        predict: bool, scale: float, feat_size: tuple[int, int], gates: Tensor | None = None, dropout_p: float = 0.0,
        seed: Tensor | None = None,
) -> list[Launch]:
    """What `attend` launches for these arguments, forward and backward, logits needed; nothing is run."""
    inputs = (q, k, v, height_rel, width_rel, prev_logits, weight, bias, gates, seed)
    options = (alpha, beta, predict, scale, dropout_p, *feat_size)
    with launches_recorded() as launches:
        out, logits, lse = _run_forward(*inputs, *options, True)
        _, mixing = _shares(prev_logits is not None, weight is not None, alpha, beta, predict, gates is not None)
        _run_backward(out, logits, *inputs, logits if mixing is None else None, out, lse, *options)
    return launches
