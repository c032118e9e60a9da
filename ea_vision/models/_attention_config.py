"""The attention of a convolutional network: from its keywords to its layers, and where chains begin."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any

from timm.layers import to_2tuple

from ea_vision.layers import (
    AugmentedConv2d,
    Evolution,
    check_fusion,
    check_position,
    create_evolution,
    evolution_class,
    evolution_options,
)
from ea_vision.layers.handing_on import Relay
from ea_vision.ops import Size, check_windows

if TYPE_CHECKING:
    from ea_vision.models._network import ChainedNetwork


def to_size(img_size: int | Size, least: int = 1) -> Size:
    """Return an img_size of one number or two as (height, width) in pixels.

    Raises:
        ValueError: img_size is not one or two whole numbers, or a side is below `least`.
    """
    size = to_2tuple(img_size)
    if len(size) != 2 or any(not isinstance(side, int) or side < 1 for side in size):
        raise ValueError(
            f"img_size must be a positive whole number or a (height, width) of them, got {img_size!r}"
        )
    if min(size) < least:
        raise ValueError(f"img_size must be at least {least} pixels per side, got {img_size}")
    return size


def check_numbers(name: str, value: Any, count: int | None = None) -> None:
    """Raise ValueError unless a network's keyword `name` is a collection of whole numbers, `count` of them if given."""
    required = "whole numbers, such as (2, 3)" if count is None else f"{count} whole numbers"
    fits = isinstance(value, Collection) and count in (None, len(value))
    if not fits or not all(isinstance(number, Integral) for number in value):
        raise ValueError(f"{name} must be {required}, got {value!r}")


def take_evolution_options(kwargs: dict) -> dict:
    """Remove the options of evolutions from a network's keywords, and return them."""
    return {name: kwargs.pop(name) for name in evolution_options() if name in kwargs}


@dataclass(frozen=True)
class AttentionConfig:
    """The attention of a network, from its keywords.

    Attributes:
        num_heads: K.
        qk_ratio: dim_qk as a share of the replaced convolution's width (the AA paper's kappa). None: the AA paper's
            ImageNet rule, 0.2 and at least 20 per head.
        v_ratio: dim_v likewise (upsilon).
        min_head_qk: minimum width of a head's queries. None: 20 with the paper's rule, else no limit.
        position: "relative", "none", "sine" or "coord", see `AugmentedConv2d`.
        qk_norm: whether each head's queries and keys are normalised. None: if they are in loaded weights, see
            `AugmentedConv2d`.
        window: side of a window of pixels, see `AugmentedConv2d`. None: whole maps.
        head_window: number of neighbouring heads in a window, see `AugmentedConv2d`.
        head_border: "clip" or "wrap", the windows of the first and last heads.
        window_stages: the stages, counted from 1, whose layers have these windows. None: all.
        attn_stages: the stages, counted from 1, that have attention. None: the family's default; (): none.
        evolution: a registered name ("ea", "pa", "conv2d", ...), or None for maps that do not evolve (AA).
        fusion: "concat" divides the output channels between convolution and attention; "add" adds the attention to the
            whole convolution and begins as the plain network, see `AugmentedConv2d`.
        attn_drop_rate: dropout probability of the attention probabilities.
        options: of the evolution: alpha, beta, kernel_size, num_layers, ... None: the option's default.
    """

    num_heads: int = 8
    qk_ratio: float | None = None
    v_ratio: float = 0.1
    min_head_qk: int | None = None
    position: str = "relative"
    qk_norm: bool | None = None
    window: int | Size | None = None
    head_window: int = 1
    head_border: str = "clip"
    window_stages: tuple[int, ...] | None = None
    attn_stages: tuple[int, ...] | None = None
    evolution: str | None = None
    fusion: str = "concat"
    attn_drop_rate: float = 0.0
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be 1 or more, got {self.num_heads}")
        check_position(self.position)
        check_fusion(self.fusion)
        check_windows(self.window, self.head_window, self.head_border, self.num_heads)
        self.new_evolution(device="meta")  # raises for wrong options, even if no layer evolves
        for name in ("window_stages", "attn_stages"):
            if getattr(self, name) is not None:
                check_numbers(name, getattr(self, name))

    @classmethod
    def take(cls, kwargs: dict, **defaults: Any) -> "AttentionConfig":
        """Return the configuration given by a network's keywords, and remove these from `kwargs`."""
        values = dict(defaults)
        for field_ in fields(cls):
            if field_.name in kwargs:
                values[field_.name] = kwargs.pop(field_.name)
        return cls(**{**values, "options": take_evolution_options(kwargs)})

    def dims(self, width: int) -> tuple[int, int]:
        """Return (dim_qk, dim_v) for a convolution of `width` channels, rounded down to multiples of the heads."""
        ratio = self.qk_ratio
        least = 0
        if ratio is None:  # the AA paper's rule
            ratio = 0.2
            least = 20
        if self.min_head_qk is not None:
            least = self.min_head_qk
        dim_qk = max(ratio * width, least * self.num_heads)
        return self._whole_heads(dim_qk), self._whole_heads(self.v_ratio * width)

    def _whole_heads(self, width: float) -> int:
        return max(self.num_heads, int(width + 1e-6) // self.num_heads * self.num_heads)

    def windows(self, stage: int | None) -> dict:
        """Return the keywords of windows for `AugmentedConv2d` in a stage, counted from 1.

        Raises:
            ValueError: window_stages are given, and the network does not number its stages.
        """
        if self.window_stages is not None:
            if stage is None:
                raise ValueError(
                    f"this network's stages have no numbers; got window_stages={self.window_stages}"
                )
            if stage not in self.window_stages:
                return {}
        return {
            "window": self.window,
            "head_window": self.head_window,
            "head_border": self.head_border,
        }

    def stages(self, possible: Collection[int], default: Collection[int]) -> tuple[int, ...]:
        """Return the stages with attention; `possible` and `default` are those of the family.

        Raises:
            ValueError: a stage is not possible, window_stages have no attention, or an evolution has no attention.
        """
        attn_stages = default if self.attn_stages is None else self.attn_stages
        stages = tuple(sorted(set(attn_stages)))
        evolves = self.evolution is not None
        if not set(stages) <= set(possible) or (evolves and not stages):
            why = f", at least one for evolution={self.evolution!r}" if evolves else ""
            raise ValueError(
                f"attn_stages must be of {tuple(possible)}{why}, got {self.attn_stages or stages}"
            )
        windowed = self.window_stages
        if windowed is not None and (not windowed or not set(windowed) <= set(stages)):
            raise ValueError(
                f"window_stages must be of {stages}, which have attention, got {windowed}"
            )
        return stages

    def new_evolution(self, in_channels: int = 1, device=None, dtype=None) -> Evolution | None:
        """Return the evolution module of a layer of `in_channels`, or None; see `create_evolution` for the errors."""
        return create_evolution(
            self.evolution,
            self.num_heads,
            device=device,
            dtype=dtype,
            **self.options,
            channels=in_channels + 3 * (self.position == "coord"),
        )


class ChainBuilder:
    """Create a network's attention layers, in forward order, and decide where chains begin.

    A chain continues while the map keeps its shape, that is, its reduction. The first layer of a chain has no evolution
    that reads previous logits; a layer hands its logits on only if the next one evolves from them.

    Args:
        config: the attention.
        network: a `ChainedNetwork`; its `img_size` must be set.
    """

    def __init__(self, config: AttentionConfig, network: "ChainedNetwork", device=None, dtype=None):
        self.config = config
        self.network = network
        network.relay = Relay()
        network.relay.belong_to(network)
        self.dd = {"device": device, "dtype": dtype}
        self.previous: AugmentedConv2d | None = None

    def layer(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        reduction: int,
        stage: int | None = None,
        **options: Any,
    ) -> AugmentedConv2d:
        """Return the next attention layer.

        Args:
            reduction: image pixels per pixel of the attention map, along a side.
            stage: number of the layer's stage, counted from 1, for `window_stages`.
            **options: further options of `AugmentedConv2d`. `conv`, the plain network's convolution, is used only with
                fusion="add", `attn_channels` only with "concat".
        """
        config = self.config
        previous = self.previous
        follows = previous is not None and previous.map_reduction == reduction
        reads = config.evolution is not None and evolution_class(config.evolution).reads_previous
        evolution = None
        if follows or not reads:
            evolution = config.new_evolution(in_channels, **self.dd)
        if follows:
            previous.need_logits = reads
        dim_qk, dim_v = config.dims(out_channels)
        options.pop("conv" if config.fusion == "concat" else "attn_channels", None)
        layer = AugmentedConv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            num_heads=config.num_heads,
            feat_size=self.network.map_size(self.network.img_size, reduction),
            position=config.position,
            qk_norm=config.qk_norm,
            evolution=evolution,
            fusion=config.fusion,
            attn_drop=config.attn_drop_rate,
            **{"dim_qk": dim_qk, "dim_v": dim_v, **config.windows(stage), **options},
            **self.dd,
        )
        layer.need_logits = False
        layer.map_reduction = reduction
        self.previous = layer
        return layer
