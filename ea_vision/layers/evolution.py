"""Evolution of attention maps from layer to layer.

Papers:
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895
* PA: `Predictive Attention Transformer` (2020)

The N x N logits of all heads are an image with K (heads) channels. alpha and beta are the papers'; the EA authors'
TensorFlow code swaps their names.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _head_conv(num_heads: int, kernel_size: int, device=None, dtype=None) -> nn.Conv2d:
    """A convolution over the maps: heads -> heads, same padding."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size of an attention-map convolution must be odd and positive, got {kernel_size}")
    conv = nn.Conv2d(num_heads, num_heads, kernel_size, padding=kernel_size // 2, device=device, dtype=dtype)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(conv.bias)
    return conv


class EvolvingAttention(nn.Module):
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
        super().__init__()
        _check_fraction("alpha", alpha)
        _check_fraction("beta", beta)
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.convs = nn.ModuleList([_head_conv(num_heads, kernel_size, device, dtype)])

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """logits, prev_logits: (B, K, N, N) -> (B, K, N, N)."""
        mixed = self.alpha * prev_logits + (1.0 - self.alpha) * logits
        return self.beta * self._convolved(mixed) + (1.0 - self.beta) * mixed

    def convolved(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """What the convolution makes of the mixed maps: (B, K, N, N) each -> (B, K, N, N)."""
        return self._convolved(self.alpha * prev_logits + (1.0 - self.alpha) * logits)

    def _convolved(self, maps: Tensor) -> Tensor:
        for conv in self.convs:
            maps = F.relu(conv(maps))
        return maps

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}"


class PredictiveAttention(nn.Module):
    """PA: the maps predicted from the previous layer's, mixed with this layer's own.

        out = alpha * CNN(prev_logits) + (1 - alpha) * logits,  CNN = num_layers x (convolution, ReLU)

    Args:
        num_heads: K, channels of the attention maps.
        alpha: share of the prediction, 0 to 1.
        num_layers: convolutions in the CNN; 0 makes it the identity.
        kernel_size: odd side of the convolutions' kernels.

    Raises:
        ValueError: alpha outside 0..1, a negative num_layers or an even kernel_size.
    """

    def __init__(
            self, num_heads: int, alpha: float = 0.5, num_layers: int = 1, kernel_size: int = 3,
            device=None, dtype=None,
    ) -> None:
        super().__init__()
        _check_fraction("alpha", alpha)
        if num_layers < 0:
            raise ValueError(f"num_layers must be 0 or more, got {num_layers}")
        self.alpha = float(alpha)
        self.convs = nn.ModuleList([_head_conv(num_heads, kernel_size, device, dtype) for _ in range(num_layers)])

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """logits, prev_logits: (B, K, N, N) -> (B, K, N, N)."""
        return self.alpha * self.convolved(logits, prev_logits) + (1.0 - self.alpha) * logits

    def convolved(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        """The maps predicted from the previous ones: (B, K, N, N) each -> (B, K, N, N)."""
        predicted = prev_logits
        for conv in self.convs:
            predicted = F.relu(conv(predicted))
        return predicted

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


_EVOLUTIONS = {
    "ea": (EvolvingAttention, ("alpha", "beta", "kernel_size")),
    "pa": (PredictiveAttention, ("alpha", "num_layers", "kernel_size")),
}


def create_evolution(kind: str | None, num_heads: int, device=None, dtype=None, **options) -> nn.Module | None:
    """The evolution module of a layer that has a predecessor.

    Args:
        kind: "ea", "pa", or None for attention that does not evolve.
        num_heads: K, channels of the attention maps.
        **options: alpha, beta, num_layers, kernel_size; None means the module's default.

    Raises:
        ValueError: unknown kind, or an option that this kind does not have.
    """
    if kind is not None and kind not in _EVOLUTIONS:
        raise ValueError(f"evolution must be one of {', '.join(map(repr, _EVOLUTIONS))} or None, got {kind!r}")
    given = {name: value for name, value in options.items() if value is not None}
    module, known = _EVOLUTIONS[kind] if kind is not None else (None, ())
    foreign = sorted(set(given) - set(known))
    if foreign:
        has = f"has {', '.join(known)}" if known else "has no options"
        raise ValueError(f"evolution={kind!r} {has}; got {', '.join(foreign)}")
    return module(num_heads, **given, device=device, dtype=dtype) if module is not None else None
