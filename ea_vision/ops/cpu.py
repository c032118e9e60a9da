"""Evolving attention on a CPU, and pooling and the convolution over planes, by the C kernels of `cpu_library`.

An image's maps are made, mixed, convolved, normalised and multiplied with the values row by row while they lie in the
cache: main memory sees the previous logits once and this layer's once. The backward pass keeps nothing but them (and
one number a row) and computes the rest again. What enters exp is kept above the threshold of subnormal numbers, so the
speed does not depend on torch.set_flush_denormal.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ea_vision.ops.cpu_library import DTYPES, AttentionStruct, PlanesStruct, load, reason_against_library
from ea_vision.ops.problem import Implementation, Problem, check_prev_logits

NONE, MIX, PREDICT = range(3)  # as in problem.h


def _lies_pixels_last(x: Tensor) -> bool:
    """Whether each image of (B, K, N, D) lies as (K, D, N), as where it is a part of a (B, C, H, W) tensor."""
    return x.stride()[1:] == (x.shape[2] * x.shape[3], 1, x.shape[2])


def _lies_channels_last(x: Tensor) -> bool:
    """Whether each pixel of (B, K, N, D) lies as (K, D), as in a part of a channels-last tensor or of tokens."""
    return x.stride(3) == 1 and x.stride(1) == x.shape[3] and x.stride(2) >= x.shape[1] * x.shape[3]


def _in_order(x: Tensor, channels_last: bool) -> Tensor:
    """(B, K, N, D) -> the same numbers as (B, K, D, N), each image contiguous, or channels last as (B, N, K, D), each
    pixel contiguous; a view where they lie so."""
    if channels_last:
        return x.transpose(1, 2) if _lies_channels_last(x) else x.transpose(1, 2).contiguous()
    return x.transpose(2, 3) if _lies_pixels_last(x) else x.transpose(2, 3).contiguous()


def _as_heads(x: Tensor, channels_last: bool) -> Tensor:
    """`_in_order` back: a view (B, K, N, D)."""
    return x.transpose(1, 2) if channels_last else x.transpose(2, 3)


def _run(function: str, feat_size: tuple[int, int], scale: float, alpha: float, beta: float, kind: int,
         dropout_p: float, prefix: int, channels_last: bool, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None,
         seed: Tensor | None, **tensors: Tensor | None) -> None:
    """q, k, v by `_in_order`; the others contiguous; gates (2, K), unless alpha and beta are all; seed (1) of the
    dropout."""
    B, K, _, D = _as_heads(q, channels_last).shape
    if gates is None:
        gates = torch.tensor([[alpha] * K, [beta] * K], dtype=torch.float32)
    weight = tensors.get("weight")
    problem = AttentionStruct(B=B, K=K, H=feat_size[0], W=feat_size[1], D=D,
                       E=_as_heads(v, channels_last).shape[3],
                       kernel=0 if weight is None else weight.shape[-1], kind=kind, dtype=DTYPES[q.dtype],
                       threads=torch.get_num_threads(), scale=scale, dropout=dropout_p, prefix=prefix,
                       channels_last=channels_last, q_row=q.stride(1), k_row=k.stride(1), v_row=v.stride(1),
                       seed=0 if seed is None else seed.item(),
                       q_step=q.stride(0), k_step=k.stride(0), v_step=v.stride(0))
    for name, tensor in {"q": q, "k": k, "v": v, "gates": gates, **tensors}.items():
        setattr(problem, name, None if tensor is None else tensor.data_ptr())
    getattr(load(), function)(ctypes.byref(problem))


@torch.library.custom_op("ea_vision::cpu_attention", mutates_args=(), device_types="cpu")
def _forward(
        q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None, width_rel: Tensor | None, prev: Tensor | None,
        weight: Tensor | None, bias: Tensor | None, gates: Tensor | None, seed: Tensor | None, alpha: float,
        beta: float, kind: int, scale: float, dropout_p: float, prefix: int, height: int, width: int, need_logits: bool,
        channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> out in the order of v, logits (B, K, N, N) or empty, norm (B, K, N, 2): see problem.h.

    gates: alpha and beta by heads, (2, K), in place of the numbers; seed (1): of the dropout, an integer;
    channels_last: the order in which q, k, v and out lie, see `_in_order` (others are copied).
    """
    B, K, N, _ = q.shape
    q, k, v = (_in_order(x, channels_last) for x in (q, k, v))
    out = v.new_empty(v.shape)
    logits = q.new_empty((B, K, N, N) if need_logits else 0)
    norm = torch.empty(B, K, N, 2, dtype=torch.float32)
    _run("evolving_attention_forward", (height, width), scale, alpha, beta, kind, dropout_p, prefix, channels_last, q,
         k, v, gates, seed, prev=prev, height_rel=height_rel, width_rel=width_rel, weight=weight, bias=bias, out=out,
         logits=logits if need_logits else None, norm=norm)
    return out, logits, norm


@_forward.register_fake
def _(q, k, v, height_rel, width_rel, prev, weight, bias, gates, seed, alpha, beta, kind, scale, dropout_p, prefix,
      height, width, need_logits, channels_last):
    B, K, N, _ = q.shape
    out, logits = _in_order(v, channels_last), q.new_empty((B, K, N, N) if need_logits else (0,))
    return out.new_empty(out.shape), logits, q.new_empty(B, K, N, 2, dtype=torch.float32)


@torch.library.custom_op("ea_vision::cpu_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
        d_out: Tensor, d_logits: Tensor | None, q: Tensor, k: Tensor, v: Tensor, height_rel: Tensor | None,
        width_rel: Tensor | None, prev: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        gates: Tensor | None, seed: Tensor | None, logits: Tensor | None, norm: Tensor, alpha: float, beta: float,
        kind: int, scale: float, dropout_p: float, prefix: int, height: int, width: int, channels_last: bool,
) -> list[Tensor]:
    """-> gradients of q, k, v in their order, then of those given: prev, tables, weight, bias, gates."""
    q, k, v = (_in_order(x, channels_last) for x in (q, k, v))
    grads = {"d_q": q.new_empty(q.shape), "d_k": k.new_empty(k.shape), "d_v": v.new_empty(v.shape)}
    if prev is not None:
        grads["d_prev"] = torch.empty_like(prev)
    for name, tensor in (("height_rel", height_rel), ("width_rel", width_rel), ("weight", weight), ("bias", bias),
                         ("gates", gates)):
        if tensor is not None:
            grads[f"d_{name}"] = tensor.new_empty(q.shape[0], *tensor.shape)
    _run("evolving_attention_backward", (height, width), scale, alpha, beta, kind, dropout_p, prefix, channels_last, q,
         k, v, gates, seed, prev=prev, height_rel=height_rel, width_rel=width_rel, weight=weight, bias=bias,
         logits=logits, norm=norm, d_out=d_out.contiguous(),
         d_logits=None if d_logits is None else d_logits.contiguous(), **grads)
    images = ("d_q", "d_k", "d_v", "d_prev")
    return [grad if name in images else grad.sum(0) for name, grad in grads.items()]


@_backward.register_fake
def _(d_out, d_logits, q, k, v, height_rel, width_rel, prev, weight, bias, gates, seed, logits, norm, alpha, beta, kind,
      scale, dropout_p, prefix, height, width, channels_last):
    grads = [x.new_empty(x.shape) for x in (_in_order(y, channels_last) for y in (q, k, v))]
    return grads + [torch.empty_like(x) for x in (prev, height_rel, width_rel, weight, bias, gates) if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, alpha, beta, kind, scale, dropout_p, prefix, height, width, need_logits, last = inputs
    _, logits, norm = output
    ctx.set_materialize_grads(False)  # of unused logits: a map of zeros
    ctx.save_for_backward(*tensors, logits if need_logits else None, norm)
    ctx.options = alpha, beta, kind, scale, dropout_p, prefix, height, width, last


def _differentiate(ctx, d_out, d_logits, _):
    *inputs, logits, norm = ctx.saved_tensors
    if logits is None:
        d_logits = None
    channels_last = ctx.options[-1]
    if d_out is None:
        d_out = torch.zeros_like(_in_order(inputs[2], channels_last), memory_format=torch.contiguous_format)
    grads = iter(_backward(d_out, d_logits, *inputs, logits, norm, *ctx.options))
    d_q, d_k, d_v = (_as_heads(next(grads), channels_last) for _ in range(3))
    _, _, _, height_rel, width_rel, prev, weight, bias, gates, _ = inputs
    d_prev = next(grads) if prev is not None else None
    d_height, d_width, d_weight, d_bias, d_gates = (
        next(grads) if x is not None else None for x in (height_rel, width_rel, weight, bias, gates))
    return d_q, d_k, d_v, d_height, d_width, d_prev, d_weight, d_bias, d_gates, *(None,) * 11


_forward.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.ea_vision.cpu_attention)
def _flops(q, k, v, height_rel, width_rel, prev, weight, *_, out_shape=None, **__) -> int:
    """Shapes -> operations, two for a multiply-add, as torch counts them in the reference."""
    B, K, N, D = q
    maps = 2 * B * K * N * N * (D + v[3])
    if height_rel is not None:
        maps += 2 * B * K * N * D * ((height_rel[0] + 1) // 2 + (width_rel[0] + 1) // 2)
    return maps + (0 if weight is None else 2 * B * N * N * weight[0] * weight[1] * weight[2] * weight[3])


class Cpu(Implementation):
    """The C kernel."""

    name = "cpu"
    dropout = prefix = True

    def own_reason_against(self, problem: Problem) -> str | None:
        q, k, v, weight = problem.q, problem.k, problem.v, problem.weight
        if q.device.type != "cpu":
            return f"it needs tensors on the CPU, got {q.device}"
        if q.dtype not in DTYPES:
            return f"it needs float32, bfloat16 or float16, got {q.dtype}"
        if not q.dtype == k.dtype == v.dtype:
            return f"it needs q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        if 0 in (*q.shape, *v.shape):
            return f"it needs q and v that are not empty, got {list(q.shape)} and {list(v.shape)}"
        if weight is not None and weight.shape[-1] > 7:
            return f"it needs map convolutions of at most 7x7, got {weight.shape[-1]}x{weight.shape[-1]}"
        return reason_against_library(DTYPES[q.dtype])

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        p, kind, prev, gates = problem, NONE, None, None
        if p.prev_logits is not None:
            kind, prev, gates = PREDICT if p.predict else MIX, p.prev_logits.to(p.q.dtype).contiguous(), p.gates()
        alpha, beta = (p.alpha, p.beta) if gates is None else (1.0, 1.0)
        small = [None if x is None else x.float().contiguous()
                 for x in (p.height_rel, p.width_rel, p.weight, p.bias, gates)]
        channels_last = all(_lies_channels_last(x) and not _lies_pixels_last(x) for x in (p.q, p.k, p.v))
        out, logits, _ = _forward(
            p.q, p.k, p.v, *small[:2], prev, *small[2:], p.dropout_seed(), alpha, beta, kind, p.scale, p.dropout_p,
            p.num_prefix_tokens, *p.feat_size, p.need_logits, channels_last)
        return _as_heads(out, channels_last), logits if p.need_logits else None


CPU = Cpu()


def reason_against_pooling(x: Tensor) -> str | None:
    """Return why the kernel cannot halve x (B, C, H, W), or None."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not x.is_contiguous() or 0 in x.shape:
        return f"it needs a contiguous float32 tensor on the CPU, got {x.dtype} {list(x.shape)} on {x.device}"
    return reason_against_library(DTYPES[x.dtype])


@torch.library.custom_op("ea_vision::cpu_pool", mutates_args=(), device_types="cpu")
def _pool(x: Tensor) -> Tensor:
    x = x.contiguous()
    B, C, H, W = x.shape
    out = x.new_empty(B, C, (H + 1) // 2, (W + 1) // 2)
    load().pool_forward(out.data_ptr(), x.data_ptr(), B * C, H, W, torch.get_num_threads())
    return out


@_pool.register_fake
def _(x):
    return x.new_empty(x.shape[0], x.shape[1], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)


@torch.library.custom_op("ea_vision::cpu_pool_backward", mutates_args=(), device_types="cpu")
def _pool_backward(d_out: Tensor, height: int, width: int) -> Tensor:
    d_out = d_out.contiguous()
    B, C = d_out.shape[:2]
    d_x = d_out.new_empty(B, C, height, width)
    load().pool_backward(d_x.data_ptr(), d_out.data_ptr(), B * C, height, width, torch.get_num_threads())
    return d_x


@_pool_backward.register_fake
def _(d_out, height, width):
    return d_out.new_empty(d_out.shape[0], d_out.shape[1], height, width)


def _pool_save(ctx, inputs, output) -> None:
    ctx.size = inputs[0].shape[2:]


_pool.register_autograd(lambda ctx, d_out: _pool_backward(d_out, *ctx.size), setup_context=_pool_save)


def pool(x: Tensor) -> Tensor:
    """3x3 average pooling of stride 2, padding 1 not counted: float32 (B, C, H, W) -> (B, C, ceil(H/2), ceil(W/2))."""
    return _pool(x)


def reason_against_planes(own: Tensor, prev: Tensor) -> str | None:
    """Return why the kernel cannot mix and convolve maps (B, K, N, N), or None."""
    if own.device.type != "cpu" or own.dtype not in DTYPES or prev.dtype != own.dtype or 0 in own.shape:
        return (f"it needs float32, bfloat16 or float16 maps on the CPU, got {own.dtype} and {prev.dtype} "
                f"{list(own.shape)} on {own.device}")
    return reason_against_library(DTYPES[own.dtype])


def _run_planes(own: Tensor, alpha: Tensor, weight: Tensor, height: int, width: int, prefix: int,
                **tensors: Tensor) -> None:
    problem = PlanesStruct(B=own.shape[0], K=own.shape[1], H=height, W=width, size=weight.shape[-1], prefix=prefix,
                      dtype=DTYPES[own.dtype], threads=torch.get_num_threads(), alpha=alpha.item())
    for name, tensor in {"own": own, "weight": weight, **tensors}.items():
        setattr(problem, name, tensor.data_ptr())
    load().convolve_planes(ctypes.byref(problem))


@torch.library.custom_op("ea_vision::cpu_planes", mutates_args=(), device_types="cpu")
def _planes(own: Tensor, prev: Tensor, alpha: Tensor, weight: Tensor, height: int, width: int, prefix: int) -> Tensor:
    own, prev, weight = own.contiguous(), prev.contiguous(), weight.contiguous()
    out = torch.empty_like(own)
    _run_planes(own, alpha, weight, height, width, prefix, prev=prev, out=out)
    return out


@_planes.register_fake
def _(own, prev, alpha, weight, height, width, prefix):
    return own.new_empty(own.shape)


@torch.library.custom_op("ea_vision::cpu_planes_backward", mutates_args=(), device_types="cpu")
def _planes_backward(d_out: Tensor, own: Tensor, prev: Tensor, alpha: Tensor, weight: Tensor, height: int, width: int,
                     prefix: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> gradients of own, prev, alpha and weight."""
    d_out, own, prev, weight = (x.contiguous() for x in (d_out, own, prev, weight))
    d_own, d_prev = torch.empty_like(own), torch.empty_like(own)
    d_weight, d_alpha = weight.new_empty(own.shape[0], *weight.shape), alpha.new_empty(own.shape[0])
    _run_planes(own, alpha, weight, height, width, prefix, prev=prev, d_out=d_out, d_own=d_own, d_prev=d_prev,
                d_weight=d_weight, d_alpha=d_alpha)
    return d_own, d_prev, d_alpha.sum(), d_weight.sum(0)


@_planes_backward.register_fake
def _(d_out, own, prev, alpha, weight, height, width, prefix):
    return own.new_empty(own.shape), own.new_empty(own.shape), alpha.new_empty(()), weight.new_empty(weight.shape)


def _planes_save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.sizes = inputs[4:]


_planes.register_autograd(
    lambda ctx, d_out: (*_planes_backward(d_out, *ctx.saved_tensors, *ctx.sizes), None, None, None),
    setup_context=_planes_save)


@register_flop_formula(torch.ops.ea_vision.cpu_planes)
def _planes_flops(own, prev, alpha, weight, height, width, *_, out_shape=None, **__) -> int:
    """Shapes -> operations, two for a multiply-add, as torch counts them in the reference."""
    return 2 * own[0] * (height * width) ** 2 * math.prod(weight)


def planes(own: Tensor, prev: Tensor, alpha: Tensor, keys: Tensor, queries: Tensor, feat_size: tuple[int, int],
           prefix: int) -> Tensor:
    """Return what `FourDimensionalConvolution` does to maps (B, K, N, N), with its parameters.

    Raises:
        ValueError: maps that are not of the parameters' heads and of prefix + H*W tokens.
    """
    tokens = prefix + feat_size[0] * feat_size[1]
    wanted = [own.shape[0], keys.shape[0], tokens, tokens]
    if list(own.shape) != wanted:
        raise ValueError(f"logits of shape {wanted} required, got {list(own.shape)}")
    check_prev_logits(prev, *wanted)
    weight = torch.stack([keys, queries], 2).float()
    return _planes(own, prev, alpha.float(), weight, *feat_size, prefix)
