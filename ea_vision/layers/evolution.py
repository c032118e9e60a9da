"""Evolution of attention maps from layer to layer.

Papers:
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9

The N x N logits of all heads are an image with K (heads) channels. alpha and beta are the papers'; the EA authors'
TensorFlow code swaps their names.

To add an evolution, decorate a subclass of `Evolution` with `@register_evolution("name")`. Networks then take
`evolution="name"` and the keywords of its constructor.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.ops.reference import among_patches, evolve_logits, mixed, readable, with_prefix

_EVOLUTIONS: dict[str, type["Evolution"]] = {}


class Operands(TypedDict, total=False):
    """Keywords of `evolving_attention`; `own_scale` multiplies the layer's own logits."""

    prev_logits: Tensor
    weight: Tensor | None
    bias: Tensor | None
    alpha: float | Tensor
    beta: float | Tensor
    predict: bool
    num_prefix_tokens: int
    own_scale: float


class Evolution(nn.Module):
    """A mechanism over a layer's maps: before the softmax (`forward`), after it (`mix_attn`), or both.

    A subclass defines `__init__(self, num_heads, *, its options, device=None, dtype=None)` and at least one of these
    methods. All other methods have defaults: no maps to record beside prev_logits, no change before or after the
    softmax, and no faster form than `forward`; its layers then run the reference, and the log says so.

    Class attributes:
        reads_previous: whether `forward` needs the previous layer's logits. If not, the first layer of a chain has the
            mechanism, too, and `forward` gets the layer's own logits as prev_logits if there are no previous ones.
        spatial: whether `forward` takes the map's (H, W) as a third argument. In a vision transformer, the network then
            sets the mechanism's `num_prefix_tokens`.
        mixes_attn: whether the class defines `mix_attn`.
        mixes_output: whether the class defines `mix_output`.
        identity_start: options with which the network begins as the plain one and can learn from there.
        gate_names: names of its gates (alpha, beta, ...): numbers, or parameters if learnable.
        part_names: names of further maps that `parts` returns. The default `parts` returns "softmax", the probabilities
            before `mix_attn`, if it is named.
        convolved_parts: names of the recorded parts that its convolution mixes, with the gates alpha and beta.
    """

    reads_previous = True
    spatial = False
    mixes_attn = False
    mixes_output = False
    identity_start: Mapping[str, Any] = MappingProxyType({})
    gate_names: tuple[str, ...] = ()
    part_names: tuple[str, ...] = ()
    convolved_parts: tuple[str, ...] = ()

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """Return the evolved logits from the layer's own and the previous layer's, (B, K, N, N) each."""
        return logits

    def mix_attn(self, attn: Tensor) -> Tensor:
        """Return the maps by which values are averaged, computed from the probabilities, (B, K, N, N) each."""
        return attn

    def mix_output(self, out: Tensor, values: Tensor, x: Tensor) -> Tensor:
        """Return the heads' outputs (B, K, N, D), computed from those of attention, the values (B, K, N, D) and the
        layer's input (B, N, C)."""
        return out

    def restore_start(self) -> None:
        """Reset parameters that the network's own initialisation would overwrite. Default: none."""

    def operands(self, prev_logits: Tensor) -> Operands | None:
        """Return the keywords with which `evolving_attention` computes `forward`; None: see `reason_against`."""
        return None

    def reason_against(self) -> str | None:
        """Return why `operands` returns None."""
        return f"{type(self).__name__} defines only forward, which the others cannot run"

    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        """Return the maps of `part_names`, (B, K, N, N) each, from the arguments and the result of `forward`."""
        return {"softmax": evolved.softmax(-1)} if "softmax" in self.part_names else {}

    def gates(self) -> dict[str, float | Tensor]:
        """Return the gates by name, without those that are None."""
        gates = {name: getattr(self, name) for name in self.gate_names}
        return {name: gate for name, gate in gates.items() if gate is not None}

    def changes_nothing(self) -> bool:
        """Return whether the mechanism leaves the layer's result unchanged.

        By default: whether it has gates, and they have the values of `identity_start`, which names no other options.
        """
        gates = self.gates()
        start = dict(self.identity_start)
        start.pop("learnable", None)
        if not gates or gates.keys() != start.keys():
            return False
        return all((torch.as_tensor(gate) == start[name]).all() for name, gate in gates.items())


def register_evolution(name: str) -> Callable[[type[Evolution]], type[Evolution]]:
    """Return a decorator that registers a class: networks and `create_evolution` then find it by this name.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[Evolution]) -> type[Evolution]:
        if not cls.__module__.startswith("ea_vision."):
            evolution_kinds()  # the names of ours are taken
        if name in _EVOLUTIONS:
            raise ValueError(
                f"evolution {name!r} is {_EVOLUTIONS[name].__name__}; another name required for "
                f"{cls.__name__}"
            )
        _EVOLUTIONS[name] = cls
        return cls

    return register


def evolution_kinds() -> tuple[str, ...]:
    """Return the names of the registered evolutions. The first call imports those of `layers.across`."""
    importlib.import_module("ea_vision.layers.across.evolutions")
    return tuple(_EVOLUTIONS)


def evolution_class(kind: str) -> type[Evolution]:
    """Return the class that is registered under a name.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in evolution_kinds():
        raise ValueError(
            f"evolution must be one of {', '.join(map(repr, _EVOLUTIONS))} or None, got {kind!r}"
        )
    return _EVOLUTIONS[kind]


def is_altered(module: nn.Module) -> bool:
    """Return whether a call of a module may do more than its class's `forward`: a hook reads or changes its inputs,
    outputs or gradients, or the object has a `forward` of its own."""
    forward_hooks = module._forward_hooks or module._forward_pre_hooks
    backward_hooks = module._backward_hooks or module._backward_pre_hooks
    return bool(forward_hooks or backward_hooks) or "forward" in module.__dict__


def all_zero(layer: nn.Module) -> bool:
    """Return whether all parameters of a layer, and of adapters (LoRA) around or in it, are 0.

    False for a layer without parameters, such as a quantised one.
    """
    parameters = list(layer.parameters())
    return bool(parameters) and not any(parameter.any() for parameter in parameters)


_MADE_BY_NETWORKS = ("num_heads", "channels", "device", "dtype")


def evolution_options(kind: str | None = None) -> tuple[str, ...]:
    """Return the names of an evolution's options; without a kind, of all evolutions' options.

    Raises:
        ValueError: unknown kind.
    """
    kinds = evolution_kinds() if kind is None else [kind]
    names: list[str] = []
    for each in kinds:
        names += inspect.signature(evolution_class(each)).parameters
    if kind is None:
        names.append("start")  # of `create_evolution`
    return tuple(dict.fromkeys(name for name in names if name not in _MADE_BY_NETWORKS))


def create_evolution(
    kind: str | None,
    num_heads: int,
    device=None,
    dtype=None,
    start: str | None = None,
    channels: int | None = None,
    **options,
) -> Evolution | None:
    """Return the evolution module of a layer, or None.

    Args:
        kind: a registered name ("ea", "pa", "conv2d", ...), or None for attention that does not evolve.
        num_heads: K, channels of the attention maps.
        start: "identity": the network begins as the plain one, unless options say otherwise; "paper" or None: as in the
            paper. Any other value is passed to a kind that has an option `start`.
        channels: C of the layer's input, for kinds that read it.
        **options: of the evolution, such as alpha, beta, num_layers, kernel_size; None means its default.

    Raises:
        ValueError: kind or start is unknown, or this kind does not have an option.
    """
    cls = None if kind is None else evolution_class(kind)
    option_names = () if cls is None else evolution_options(kind)
    options = {name: value for name, value in options.items() if value is not None}
    if cls is not None and start == "identity":
        options = {**cls.identity_start, **options}
    elif start is not None and (cls is None or start != "paper"):
        options["start"] = start
    unknown = sorted(set(options) - set(option_names))
    if "start" in unknown and cls is not None:
        raise ValueError(f"start must be 'identity' or 'paper', got {start!r}")
    if unknown:
        has = ", ".join(option_names) or "no options"
        raise ValueError(f"evolution={kind!r} has {has}; got {', '.join(unknown)}")
    if cls is None:
        return None
    if channels is not None and "channels" in inspect.signature(cls).parameters:
        options["channels"] = channels
    return cls(num_heads, **options, device=device, dtype=dtype)


def learnable_gates(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the learnable gates of a network's evolutions, by their names in its state dict."""
    gates = {}
    for path, module in model.named_modules():
        if not isinstance(module, Evolution):
            continue
        for name, gate in module.gates().items():
            if isinstance(gate, nn.Parameter):
                gates[f"{path}.{name}".removeprefix(".")] = gate
    return gates


def new_gate(
    name: str, value: float, learnable: bool | str, num_heads: int, **dd
) -> float | nn.Parameter:
    """Return a gate: a number from 0 to 1, or a parameter of shape () or (K) that begins at any finite number."""
    if learnable not in (False, True, "per_head"):
        raise ValueError(f"learnable must be False, True or 'per_head', got {learnable!r}")
    is_number = isinstance(value, Real) and not isinstance(value, bool)  # also one of NumPy's
    if not learnable:
        if not is_number or not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")
        return float(value)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    shape = (num_heads,) if learnable == "per_head" else ()
    return nn.Parameter(torch.full(shape, float(value), **dd))


def check_kernel_size(kernel_size: int) -> None:
    """Check the side of a convolution over the maps."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(
            f"kernel_size of an attention-map convolution must be odd and positive, got {kernel_size}"
        )


def reason_against_conv(conv: nn.Module) -> str | None:
    """Return why the operator, which takes only a weight and a bias, cannot compute a module's convolution, or None."""
    if type(conv) is not nn.Conv2d:
        return f"the others take the weights of a Conv2d; got {type(conv).__name__}"
    side = conv.kernel_size[0]
    supported = ((side, side), (1, 1), (side // 2, side // 2), (1, 1), 1, "zeros")
    received = (
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.padding_mode,
    )
    if conv.bias is None or received != supported:
        return (
            "the others take a Conv2d with a bias and zeros around the maps, without stride, dilation and "
            f"groups; got {received}{'' if conv.bias is not None else ' without a bias'}"
        )
    return None


class _ConvolvedEvolution(Evolution):
    """The common part of EA and PA: convolutions over the maps, each followed by a ReLU, and the gates alpha and beta.

    Attributes:
        num_prefix_tokens: number of tokens before the map's pixels (a class token), set by the network. Their rows and
            columns bypass the convolutions. 0: the convolutions take whole maps.
    """

    part_names = ("conv_logits",)
    predict = False  # PA's equations, else EA's
    causal = "none"

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        kernel_size: int,
        gates: dict[str, float],
        learnable: bool | str,
        **dd,
    ):
        super().__init__()
        check_kernel_size(kernel_size)
        self.num_prefix_tokens = 0
        self.reach = kernel_size // 2
        self.starts = gates
        for name, value in gates.items():
            # causal forms keep alpha at 0
            learns = learnable if self.causal == "none" or name != "alpha" else False
            setattr(self, name, new_gate(name, value, learns, num_heads, **dd))
        self.convs = nn.ModuleList()
        for _ in range(num_layers):
            conv = nn.Conv2d(num_heads, num_heads, kernel_size, padding=self.reach, **dd)
            self.convs.append(conv)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the convolutions by He, and learnable gates with their start values."""
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        self.restore_start()

    def restore_start(self) -> None:
        for conv in self.convs:
            nn.init.zeros_(conv.bias)
        for name, gate in self.gates().items():
            if isinstance(gate, nn.Parameter):
                nn.init.constant_(gate, float(self.starts[name]))

    def forward(
        self,
        logits: Tensor,
        prev_logits: Tensor | None = None,
        key_padding: Tensor | None = None,
        query_padding: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            logits, prev_logits: (B, K, N, N), or in sequences (B, K, Q, N) for Q queries; causal forms ignore
                prev_logits.
            key_padding: for sequences: (B, N), True where a token is padding. The result for other tokens does not
                depend on the amount of padding; `mask_logits` hides the result for the padding itself.
            query_padding: (B, Q) likewise; by default key_padding, if queries and keys are the same tokens.
        """
        alpha = self.alpha
        if self.causal != "none":
            # No skip connection: only the own logits are convolved.
            prev_logits = logits
            alpha = 0.0
        elif prev_logits is None:
            raise ValueError(
                "prev_logits of the previous layer required, got None (the first layer of a chain has no evolution)"
            )
        if key_padding is not None and query_padding is None and self.causal != "cross":
            Q, N = logits.shape[2:]
            query_padding = key_padding if Q == N else None
        convolve = self.convolve
        allowed = readable(logits, self.causal, key_padding, query_padding)
        if allowed is not None:
            prev_logits = prev_logits.masked_fill(~allowed, 0.0)
            convolve = partial(self.convolve, allowed=allowed)
            if not self.predict:
                logits = logits.masked_fill(~allowed, 0.0)
        return evolve_logits(logits, prev_logits, alpha, self.beta, self.predict, convolve)

    def convolve(
        self, maps: Tensor, allowed: Tensor | None = None, convs: Sequence[nn.Module] | None = None
    ) -> Tensor:
        """Convolve maps (B, K, Q, N) by `convs`, by default all. Entries that are not `allowed` are 0 before each
        convolution and the shift."""
        patches = among_patches(maps, self.num_prefix_tokens)
        for conv in convs or self.convs:
            patches = F.relu(conv(patches))
            if allowed is not None:
                patches = patches.masked_fill(~allowed, 0.0)
        # shifted so that the kernel's last row (and column) falls on the entry itself
        if self.causal != "none":
            down = min(self.reach, patches.shape[2])
            right = min(self.reach, patches.shape[3]) if self.causal == "self" else 0
            patches = F.pad(patches, [right, -right, down, -down])
        return with_prefix(maps, patches, self.num_prefix_tokens)

    def reason_against(self) -> str | None:
        if self.causal != "none":
            return f"the others have no causal form; got causal={self.causal!r}"
        for conv in self.convs:
            reason = reason_against_conv(conv)
            if reason is not None:
                return reason
        return None

    def operands(self, prev_logits: Tensor) -> Operands | None:
        """Apply all convolutions but the last (PA alone has more than one); the operator applies the last one."""
        if self.reason_against() is not None:
            return None
        *first, last = self.convs or [None]
        if first:
            prev_logits = self.convolve(prev_logits, convs=first)
        weight, bias = (None, None) if last is None else (last.weight, last.bias)
        return {
            "prev_logits": prev_logits,
            "weight": weight,
            "bias": bias,
            "alpha": self.alpha,
            "beta": self.beta,
            "predict": self.predict,
            "num_prefix_tokens": self.num_prefix_tokens,
        }

    def parts(
        self,
        logits: Tensor,
        prev_logits: Tensor,
        evolved: Tensor,
        key_padding: Tensor | None = None,
        query_padding: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return conv_logits: the convolutions' output, after the last activation. Padding: see `forward`."""
        if isinstance(self.beta, float) and self.beta == 1.0 and not self.predict:
            return {"conv_logits": evolved}
        before = prev_logits if self.predict else mixed(self.alpha, prev_logits, logits)
        allowed = readable(logits, self.causal, key_padding, query_padding)
        if allowed is not None:
            before = before.masked_fill(~allowed, 0.0)
        return {"conv_logits": self.convolve(before, allowed)}


@register_evolution("ea")
class EvolvingAttention(_ConvolvedEvolution):
    """EA: a residual convolution over the mixed maps (EA paper, equations 3 and 4).

        m = alpha * prev_logits + (1 - alpha) * logits
        out = beta * relu(conv(m)) + (1 - beta) * m

    Args:
        num_heads: K, channels of the attention maps.
        alpha: gate of the previous layer's maps, 0 to 1 (0: no skip connection). Default: 0.5; 0 in causal forms.
        beta: gate of the convolved maps, 0 to 1 (0: no convolution).
        kernel_size: odd side of the convolution's kernel.
        learnable: whether alpha and beta are unbounded parameters that start at the given values: True for one number
            per layer, "per_head" for one per head. At alpha = beta = 0 the layer equals one without evolution.
        causal: for sequences (EA paper, section 3.5). "self": a decoder's self-attention; the convolved map is shifted
            by kernel_size // 2 down and right, so that it reads no key after its query. "cross": a decoder's attention
            to the source; it is shifted down, along the target, so that it reads no later target. Both have no skip
            connection, and only `forward` computes them, not the operator. "none": an encoder, or images.

    In sequences, logits are handed on as `forward` returns them, and masked only for the softmax:

        logits = evolution(scale * q @ k.transpose(-2, -1), prev_logits, key_padding)
        attn = attention_of(mask_logits(logits, evolution.causal, key_padding))

    Raises:
        ValueError: a fixed alpha or beta outside 0..1, a learnable one that is not finite, an even kernel_size, or
            an alpha other than 0 in a causal form.
    """

    identity_start = {"alpha": 0.0, "beta": 0.0, "learnable": True}
    gate_names = ("alpha", "beta")
    convolved_parts = ("prev_logits", "self_logits")

    def __init__(
        self,
        num_heads: int,
        alpha: float | None = None,
        beta: float = 1.0,
        kernel_size: int = 3,
        learnable: bool | str = False,
        causal: str = "none",
        device=None,
        dtype=None,
    ):
        if causal not in ("none", "self", "cross"):
            raise ValueError(f"causal must be 'none', 'self' or 'cross', got {causal!r}")
        if causal != "none" and alpha:
            raise ValueError(
                f"causal={causal!r} has no skip connection: leave alpha out, got {alpha}"
            )
        if alpha is None:
            alpha = 0.5 if causal == "none" else 0.0
        self.causal = causal
        gates = {"alpha": alpha, "beta": beta}
        super().__init__(num_heads, 1, kernel_size, gates, learnable, device=device, dtype=dtype)


@register_evolution("pa")
class PredictiveAttention(_ConvolvedEvolution):
    """PA: the maps predicted from the previous layer's, mixed with this layer's own.

        out = alpha * CNN(prev_logits) + (1 - alpha) * logits,  CNN = num_layers x (convolution, ReLU)

    Args:
        num_heads: K, channels of the attention maps.
        alpha: gate of the predicted maps, 0 to 1.
        num_layers: number of convolutions; 0 uses the previous maps unchanged.
        kernel_size: odd side of the convolutions' kernels.
        learnable: whether alpha is a parameter; see `EvolvingAttention`.

    Raises:
        ValueError: a fixed alpha outside 0..1, a learnable one that is not finite, negative num_layers or an
            even kernel_size.
    """

    identity_start = {"alpha": 0.0, "learnable": True}
    gate_names = ("alpha",)
    convolved_parts = ("prev_logits",)
    predict = True
    beta = 1.0

    def __init__(
        self,
        num_heads: int,
        alpha: float = 0.5,
        num_layers: int = 1,
        kernel_size: int = 3,
        learnable: bool | str = False,
        device=None,
        dtype=None,
    ):
        if num_layers < 0:
            raise ValueError(f"num_layers must be 0 or more, got {num_layers}")
        gates = {"alpha": alpha}
        super().__init__(
            num_heads, num_layers, kernel_size, gates, learnable, device=device, dtype=dtype
        )
