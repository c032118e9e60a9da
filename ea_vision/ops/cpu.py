"""Evolving attention on a CPU, and pooling, by the C kernels of `cpu_library`.

An image's maps are computed, mixed, convolved, normalised and multiplied by the values row by row while they are in the
cache: the previous logits are read from main memory once, and this layer's are written once. For the backward pass only
the logits and two numbers per row are kept; the rest is recomputed. Arguments of exp stay above the threshold of
subnormal numbers, so the speed does not depend on torch.set_flush_denormal.
"""

import ctypes
import functools

import torch
from torch import Tensor

from ea_vision.ops.cpu_library import DTYPES, AttentionStruct, reason_against_library, run
from ea_vision.ops.problem import (
    Implementation,
    Problem,
    reason_against_kernels,
    refuse_second_derivatives,
)

# kinds of problems, as in problem.h
NONE = 0
MIX = 1
PREDICT = 2
SIZES = "kind prefix H W window_height window_width".split()  # of AttentionStruct
# the inputs that have a gradient, in the operator's order
INPUTS = "q k v height_rel width_rel prev weight bias gates".split()
BY_IMAGES = ("q", "k", "v", "prev")  # the others are parameters

operator = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cpu")


def _in_order(x: Tensor) -> Tensor:
    """Return (B, K, N, D) as (B, K, D, N), each image contiguous; no copy if x is a slice of a (B, C, H, W) tensor."""
    x = x.transpose(2, 3)
    return x if x[0].is_contiguous() else x.contiguous()


def _pointers(**tensors: Tensor | None) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


def _run(
    inputs: list[Tensor | None],
    scale: float,
    dropout_p: float,
    sizes: list[int],
    **tensors: Tensor | None,
) -> None:
    """Run the kernel on the operator's inputs and on further `tensors`, which must be contiguous."""
    *others, seed = inputs[3:]
    q, k, v = (_in_order(x) for x in inputs[:3])
    named = dict(zip(INPUTS, (q, k, v, *others), strict=True))
    B, K, D, _ = q.shape
    problem = AttentionStruct(
        **dict(zip(SIZES, sizes, strict=True)),
        B=B,
        K=K,
        D=D,
        E=v.shape[2],
        kernel=0 if named["weight"] is None else named["weight"].shape[-1],
        dtype=DTYPES[q.dtype],
        threads=torch.get_num_threads(),
        scale=scale,
        dropout=dropout_p,
        seed=0 if seed is None else seed.item(),
        q_step=q.stride(0),
        k_step=k.stride(0),
        v_step=v.stride(0),
        **_pointers(**named, **tensors),
    )
    run("evolving_attention", ctypes.byref(problem))


def _outputs(q: Tensor, v: Tensor, need_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty out (B, K, E, N), logits (B, K, N, N), or (0,) if unneeded, and norm (B, K, N, 2): see problem.h."""
    B, K, N, E = v.shape
    return (
        v.new_empty(B, K, E, N),
        q.new_empty((B, K, N, N) if need_logits else (0,)),
        q.new_empty(B, K, N, 2, dtype=torch.float32),
    )


@operator("ea_vision::cpu_attention")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height_rel: Tensor | None,
    width_rel: Tensor | None,
    prev: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gates: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    sizes: list[int],
    need_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute and return `_outputs`.

    gates: alpha and beta per head, (2, K); seed: one integer for the dropout; sizes: the values named by SIZES.
    """
    out, logits, norm = _outputs(q, v, need_logits)
    _run(
        [q, k, v, height_rel, width_rel, prev, weight, bias, gates, seed],
        scale,
        dropout_p,
        sizes,
        out=out,
        logits=logits if need_logits else None,
        norm=norm,
    )
    return out, logits, norm


@_forward.register_fake
def _(q, k, v, *rest):
    return _outputs(q, v, rest[-1])


def _gradients(inputs: list[Tensor | None], gates_learn: bool, *each: int) -> dict[str, Tensor]:
    """Return empty gradients by input name: (B, K, D, N) for q, k and v, and (*each, *shape) for parameters."""
    gradients = {}
    for name, x in zip(INPUTS, inputs, strict=False):
        if x is None or (name == "gates" and not gates_learn):
            continue
        shape = x.shape if name in BY_IMAGES else (*each, *x.shape)
        if name in "qkv":
            shape = x.transpose(2, 3).shape
        gradients[name] = x.new_empty(shape)
    return gradients


@operator("ea_vision::cpu_attention_backward")
def _backward(
    d_out: Tensor,
    d_logits: Tensor | None,
    inputs: list[Tensor | None],
    logits: Tensor | None,
    norm: Tensor,
    scale: float,
    dropout_p: float,
    sizes: list[int],
    gates_learn: bool,
) -> list[Tensor]:
    """Return the gradients of those inputs of the forward operator that `_gradients` lists, in its order."""
    gradients = _gradients(inputs, gates_learn, len(d_out))
    _run(
        inputs,
        scale,
        dropout_p,
        sizes,
        logits=logits,
        norm=norm,
        d_out=d_out.contiguous(),
        d_logits=None if d_logits is None else d_logits.contiguous(),
        **{f"d_{name}": x for name, x in gradients.items()},
    )
    return [x if name in BY_IMAGES else x.sum(0) for name, x in gradients.items()]


@_backward.register_fake
def _(d_out, d_logits, inputs, *rest):
    gradients = _gradients(inputs, rest[-1])
    return list(gradients.values())


def _save(ctx, inputs, output) -> None:
    tensors = inputs[:10]
    *options, need_logits = inputs[10:]
    ctx.set_materialize_grads(False)  # else unused logits would get a map of zeros as gradient
    ctx.save_for_backward(*tensors, output[1] if need_logits else None, output[2])
    ctx.options = options


def _differentiate(ctx, d_out, d_logits, _):
    *inputs, logits, norm = ctx.saved_tensors
    gates_learn = ctx.needs_input_grad[8]
    if d_out is None:
        d_out = torch.zeros_like(inputs[2].transpose(2, 3), memory_format=torch.contiguous_format)
    d_q, d_k, d_v, *gradients = _backward(
        d_out, None if logits is None else d_logits, inputs, logits, norm, *ctx.options, gates_learn
    )
    rest = iter(gradients)
    gates = inputs[8] if gates_learn else None
    others = [None if x is None else next(rest) for x in (*inputs[3:8], gates)]
    d_rows = [x.transpose(2, 3) for x in (d_q, d_k, d_v)]
    return (*d_rows, *others, *(None,) * 5)


_forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_derivatives(_backward)


def _parameter(x: Tensor | None) -> Tensor | None:
    """Return a parameter as the kernel reads it: contiguous, in float32."""
    return None if x is None else x.float().contiguous()


class Cpu(Implementation):
    """The C kernel."""

    name = "cpu"
    windows = True

    def own_reason_against(self, problem: Problem) -> str | None:
        weight = problem.weight
        if problem.head_window > 1:
            return "it has no windows of heads"
        if weight is not None and weight.shape[-1] > 7:
            return f"it needs map convolutions of at most 7x7, got {weight.shape[-1]}x{weight.shape[-1]}"
        return _reason_against(problem.q, problem.v)

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        p = problem
        kind = NONE
        prev = None
        if p.prev_logits is not None:
            kind = PREDICT if p.predict else MIX
            prev = p.prev_logits.to(p.q.dtype).contiguous()
        window = p.window or (0, 0)
        out, logits, _ = _forward(
            p.q,
            p.k,
            p.v,
            height_rel=_parameter(p.height_rel),
            width_rel=_parameter(p.width_rel),
            prev=prev,
            weight=_parameter(p.weight),
            bias=_parameter(p.bias),
            gates=torch.stack([p.by_head(p.alpha), p.by_head(p.beta)]),
            seed=p.dropout_seed(),
            scale=p.scale,
            dropout_p=p.dropout_p,
            sizes=[kind, p.num_prefix_tokens, *p.feat_size, *window],
            need_logits=p.need_logits,
        )
        return out.transpose(2, 3), logits if p.need_logits else None


def _reason_against(*tensors: Tensor) -> str | None:
    """Return why the C kernels cannot take the tensors, or None."""
    for x in tensors:
        if x.device.type != "cpu":
            return f"it needs tensors on the CPU, got {x.device}"
        if x.dtype not in DTYPES:
            return f"it needs float32 or bfloat16, got {x.dtype}"
        if 0 in x.shape:
            return f"it needs tensors that are not empty, got {list(x.shape)}"
    return reason_against_kernels() or reason_against_library()


def reason_against_pooling(x: Tensor) -> str | None:
    """Return why the kernel cannot pool x (B, C, H, W), or None."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        return f"it needs a contiguous tensor in float32, got {x.dtype}, strides {x.stride()}"
    return _reason_against(x)


def _pool_sizes(x: Tensor) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[1], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2


@operator("ea_vision::cpu_pool")
def pool(x: Tensor) -> Tensor:
    """Average-pool 3x3 with stride 2, padding 1 not counted: float32 (B, C, H, W) -> (B, C, ceil(H/2), ceil(W/2))."""
    x = x.contiguous()
    out = x.new_empty(_pool_sizes(x))
    run(
        "pool_forward",
        out.data_ptr(),
        x.data_ptr(),
        x.shape[0] * x.shape[1],
        *x.shape[2:],
        torch.get_num_threads(),
    )
    return out


@operator("ea_vision::cpu_pool_backward")
def _pool_backward(d_out: Tensor, height: int, width: int) -> Tensor:
    d_out = d_out.contiguous()
    B, C = d_out.shape[:2]
    d_x = d_out.new_empty(B, C, height, width)
    run(
        "pool_backward",
        d_x.data_ptr(),
        d_out.data_ptr(),
        B * C,
        height,
        width,
        torch.get_num_threads(),
    )
    return d_x


def _pool_save(ctx, inputs, output) -> None:
    ctx.size = inputs[0].shape[2:]


pool.register_fake(lambda x: x.new_empty(_pool_sizes(x)))
_pool_backward.register_fake(
    lambda d_out, height, width: d_out.new_empty(*d_out.shape[:2], height, width)
)
pool.register_autograd(
    lambda ctx, d_out: _pool_backward(d_out, *ctx.size), setup_context=_pool_save
)
refuse_second_derivatives(_pool_backward)
