"""Evolution of attention maps from layer to layer.

Papers:
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895
* PA: `Predictive Attention Transformer` (2020)

The N x N logits of all heads are an image with K (heads) channels. alpha and beta are the papers'; the EA authors'
TensorFlow code swaps their names. The equations are in `ea_vision.ops.reference`.

A new evolution is a subclass of `Evolution` under `@register_evolution("name")`: networks take it by
`evolution="name"`, and the keywords of its constructor as theirs.
"""
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.ops.reference import after_convolution, before_convolution

_EVOLUTIONS: dict[str, type["Evolution"]] = {}


class Evolution(nn.Module):
    """How a layer's logits take up those of the previous layer in its chain.

    A subclass has `__init__(self, num_heads, *, its options, device=None, dtype=None)` and `forward`. The rest is what
    others ask of it, and has defaults: nothing to record beside prev_logits, and no faster form than `forward`.
    """

    part_names: tuple[str, ...] = ()  # further maps that `parts` returns

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """The layer's own logits and the previous layer's, (B, K, N, N) each -> (B, K, N, N)."""
        raise NotImplementedError

    @torch.jit.ignore
    def operands(self, prev_logits: Tensor) -> dict[str, Any] | None:
        """The keywords with which `ea_vision.ops.evolving_attention` does as `forward`; None where it cannot."""
        return None

    @torch.jit.ignore
    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        """The maps of `part_names`, (B, K, N, N) each, from the arguments and the result of `forward`."""
        return {}

    @torch.jit.ignore
    def before_shares(self) -> dict[str, float]:
        """Of which recorded parts, in which shares, the maps before the convolution are made; {} without one."""
        return {}


def register_evolution(name: str) -> Callable[[type[Evolution]], type[Evolution]]:
    """Class decorator: networks and `create_evolution` know the evolution by this name from now on.

    Raises:
        ValueError: the name is taken.
    """
    def register(cls: type[Evolution]) -> type[Evolution]:
        if name in _EVOLUTIONS:
            raise ValueError(f"evolution {name!r} is {_EVOLUTIONS[name].__name__}; another name required for "
                             f"{cls.__name__}")
        _EVOLUTIONS[name] = cls
        return cls

    return register


def evolution_options(kind: str | None = None) -> tuple[str, ...]:
    """The keywords of an evolution's constructor that are its own; of all evolutions where no kind is given."""
    kinds = _EVOLUTIONS if kind is None else (kind,)
    names = (name for each in kinds for name in inspect.signature(_EVOLUTIONS[each].__init__).parameters)
    return tuple(dict.fromkeys(name for name in names if name not in ("self", "num_heads", "device", "dtype")))


def create_evolution(kind: str | None, num_heads: int, device=None, dtype=None, **options) -> Evolution | None:
    """The evolution module of a layer that has a predecessor.

    Args:
        kind: a registered name ("ea", "pa", ...), or None for attention that does not evolve.
        num_heads: K, channels of the attention maps.
        **options: the evolution's, such as alpha, beta, num_layers, kernel_size; None means its default.

    Raises:
        ValueError: unknown kind, or an option that this kind does not have.
    """
    if kind is not None and kind not in _EVOLUTIONS:
        raise ValueError(f"evolution must be one of {', '.join(map(repr, _EVOLUTIONS))} or None, got {kind!r}")
    given = {name: value for name, value in options.items() if value is not None}
    known = evolution_options(kind) if kind is not None else ()
    foreign = sorted(set(given) - set(known))
    if foreign:
        has = f"has {', '.join(known)}" if known else "has no options"
        raise ValueError(f"evolution={kind!r} {has}; got {', '.join(foreign)}")
    return _EVOLUTIONS[kind](num_heads, **given, device=device, dtype=dtype) if kind is not None else None


def _check_fraction(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return float(value)


def _map_conv(num_heads: int, kernel_size: int, device=None, dtype=None) -> nn.Conv2d:
    """A convolution over the maps: heads -> heads, same padding."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size of an attention-map convolution must be odd and positive, got {kernel_size}")
    conv = nn.Conv2d(num_heads, num_heads, kernel_size, padding=kernel_size // 2, device=device, dtype=dtype)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(conv.bias)
    return conv


class _ConvolvedEvolution(Evolution):
    """What EA and PA share: convolutions over the maps, each followed by a ReLU."""

    part_names = ("conv_logits",)

    def __init__(self, num_heads: int, num_layers: int, alpha: float, beta: float, kernel_size: int, predict: bool,
                 device=None, dtype=None) -> None:
        super().__init__()
        self.predict = predict  # PA's equations, else EA's
        self.alpha = _check_fraction("alpha", alpha)
        self.beta = _check_fraction("beta", beta)
        self.convs = nn.ModuleList([_map_conv(num_heads, kernel_size, device, dtype) for _ in range(num_layers)])

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """logits, prev_logits: (B, K, N, N) -> (B, K, N, N)."""
        before = before_convolution(logits, prev_logits, self.alpha, self.predict)
        return after_convolution(logits, before, self.convolve(before), self.alpha, self.beta, self.predict)

    def convolve(self, maps: Tensor) -> Tensor:
        """(B, K, N, N) -> (B, K, N, N)."""
        for conv in self.convs:
            maps = F.relu(conv(maps))
        return maps

    @torch.jit.ignore
    def operands(self, prev_logits: Tensor) -> dict[str, Any] | None:
        """The operator has the last convolution; those before it (PA only) are done here."""
        hooked = any(conv._forward_hooks or conv._forward_pre_hooks for conv in self.convs)
        if hooked or any(type(conv) is not nn.Conv2d for conv in self.convs):
            return None
        *first, last = self.convs or [None]
        for conv in first:
            prev_logits = F.relu(conv(prev_logits))
        weight, bias = (None, None) if last is None else (last.weight, last.bias)
        return {"prev_logits": prev_logits, "weight": weight, "bias": bias, "alpha": self.alpha, "beta": self.beta,
                "predict": self.predict}

    @torch.jit.ignore
    def parts(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        """conv_logits: what the convolutions give, after the last ReLU."""
        if self.beta == 1.0 and not self.predict:
            return {"conv_logits": evolved}
        return {"conv_logits": self.convolve(before_convolution(logits, prev_logits, self.alpha, self.predict))}


@register_evolution("ea")
class EvolvingAttention(_ConvolvedEvolution):
    """EA: a residual convolution over the mixed maps (EA paper, equations 3 and 4).

        m = alpha * prev_logits + (1 - alpha) * logits
        out = beta * relu(conv(m)) + (1 - beta) * m

    Args:
        num_heads: K, channels of the attention maps.
        alpha: share of the previous layer's maps, 0 to 1 (0: no skip connection).
        beta: share of the convolved maps, 0 to 1 (0: no convolution).
        kernel_size: odd side of the convolution's kernel.

    Raises:
        ValueError: alpha or beta outside 0..1, or an even kernel_size.
    """

    def __init__(
            self, num_heads: int, alpha: float = 0.5, beta: float = 1.0, kernel_size: int = 3, device=None, dtype=None,
    ) -> None:
        super().__init__(num_heads, 1, alpha, beta, kernel_size, False, device, dtype)

    @torch.jit.ignore
    def before_shares(self) -> dict[str, float]:
        return {"prev_logits": self.alpha, "self_logits": 1.0 - self.alpha}

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}"


@register_evolution("pa")
class PredictiveAttention(_ConvolvedEvolution):
    """PA: the maps predicted from the previous layer's, mixed with this layer's own.

        out = alpha * CNN(prev_logits) + (1 - alpha) * logits,  CNN = num_layers x (convolution, ReLU)

    Args:
        num_heads: K, channels of the attention maps.
        alpha: share of the predicted maps, 0 to 1.
        num_layers: convolutions that predict; 0 takes the previous maps as they are.
        kernel_size: odd side of the convolutions' kernels.

    Raises:
        ValueError: alpha outside 0..1, negative num_layers or an even kernel_size.
    """

    def __init__(
            self, num_heads: int, alpha: float = 0.5, num_layers: int = 1, kernel_size: int = 3,
            device=None, dtype=None,
    ) -> None:
        if num_layers < 0:
            raise ValueError(f"num_layers must be 0 or more, got {num_layers}")
        super().__init__(num_heads, num_layers, alpha, 1.0, kernel_size, True, device, dtype)

    @torch.jit.ignore
    def before_shares(self) -> dict[str, float]:
        return {"prev_logits": 1.0}

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"
