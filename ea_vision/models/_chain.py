"""The parts of every family with chained attention: configuration, chains, stages, and timm's interface.

A family's file defines its blocks, a subclass of `ChainedNetwork`, and its variants (by `register_networks`), and
quotes the papers' figures for them. A file outside this package can do the same with the names of `ea_vision.models`.

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ea_vision.layers import (
    AugmentedConv2d,
    Evolution,
    check_fusion,
    check_position,
    create_evolution,
    evolution_class,
    evolution_options,
)
from ea_vision.layers.sequence_attention import recomputes, whole
from ea_vision.ops import Size, check_windows

try:
    # Not exported. Newer timm's own models call it, so that its save_for_hf knows of a resize.
    from timm.models import _input as timm_input
except ImportError:
    # Older timm keeps no record of sizes.
    timm_input = None


# (x, prev_logits) -> (x, logits)
Step = Callable[[Tensor, "Tensor | None"], "tuple[Tensor, Tensor | None]"]

# attribute of a stage's output: logits, and whether they have gradients
CARRIED = "_ea_vision_logits"
NOTHING = (None, True)


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
    wanted = "whole numbers, such as (2, 3)" if count is None else f"{count} whole numbers"
    several = isinstance(value, Collection)
    if several and count is not None:
        several = len(value) == count
    if not several or not all(isinstance(number, Integral) for number in value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def take_evolution_options(kwargs: dict) -> dict:
    """Remove the options of evolutions from a network's keywords, and return them."""
    return {name: kwargs.pop(name) for name in evolution_options() if name in kwargs}


@dataclass(frozen=True)
class AttentionConfig:
    """The attention of a network, from its keywords.

    num_heads: K.
    qk_ratio: dim_qk as a share of the replaced convolution's width (the AA paper's kappa). None: the AA paper's
        ImageNet rule, 0.2 and at least 20 per head.
    v_ratio: dim_v likewise (upsilon).
    min_head_qk: minimum width of a head's queries. None: 20 with the paper's rule, else no limit.
    position: "relative", "none", "sine" or "coord", see `AugmentedConv2d`.
    qk_norm: whether each head's queries and keys are normalised. None: if they are in loaded weights, see
        `AugmentedConv2d`.
    window, head_window, head_border: windows of pixels and of neighbouring heads, see `AugmentedConv2d`.
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
        if self.head_window > 1 and self.evolution is not None:
            raise ValueError(
                f"head_window must be 1 where maps evolve (evolution={self.evolution!r}), "
                f"got {self.head_window}"
            )
        self.new_evolution(device="meta")  # raises for wrong options, even if no layer evolves
        for name in ("window_stages", "attn_stages"):
            if getattr(self, name) is not None:
                check_numbers(name, getattr(self, name))

    @classmethod
    def take(cls, kwargs: dict, **defaults: Any) -> "AttentionConfig":
        """Return the configuration given by a network's keywords, and remove these from `kwargs`."""
        chosen = dict(defaults)
        for field_ in fields(cls):
            if field_.name in kwargs:
                chosen[field_.name] = kwargs.pop(field_.name)
        return cls(**{**chosen, "options": take_evolution_options(kwargs)})

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
        chosen = default if self.attn_stages is None else self.attn_stages
        stages = tuple(sorted(set(chosen)))
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


def growing_rates(last: float, count: int) -> Iterator[float]:
    """Yield a rate of stochastic depth for each of `count` blocks, from 0 at the first to `last` at the last."""
    for number in range(count):
        yield last * number / max(1, count - 1)


@contextmanager
def frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Freeze the running statistics of a block's batch norms, which in training still normalise by the batch."""
    before = {}
    for module in block.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            before[module] = (module.momentum, module.num_batches_tracked)
            module.momentum = 0.0
            module.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, batches) in before.items():
            norm.momentum = momentum
            norm.num_batches_tracked = batches


def frozen_in_backward(block: nn.Module) -> AbstractContextManager:
    """Return `frozen_statistics` if the backward pass is recomputing the block, else a context that does nothing."""
    again = block.training and recomputes()
    return frozen_statistics(block) if again else nullcontext()


def checkpoint(block: nn.Module, *args: Any) -> Any:
    """Run block(*args) with gradient checkpointing; its recomputation does not update running statistics again."""
    options = {}
    if not torch.compiler.is_compiling():
        options["context_fn"] = lambda: (nullcontext(), frozen_statistics(block))
    return torch_checkpoint.checkpoint(block, *args, use_reentrant=False, **options)


def hand_on(x: Tensor, logits: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Return a block's output: (x, logits), or only x if no layer reads the logits.

    Tools that hook a module, such as Grad-CAM, expect a tensor.
    """
    return x if logits is None else (x, logits)


def carrying(x: Tensor, logits: Tensor | None) -> Tensor:
    """Return a stage's output: x, with the logits as an attribute if the next stage reads them."""
    if logits is not None:
        setattr(x, CARRIED, (logits, torch.is_grad_enabled()))
    return x


def carried_by(x: Tensor) -> Tensor | None:
    """Return the logits that a stage's output carries, or None.

    Raises:
        ValueError: gradients would not reach them, since a reentrant checkpoint made them.
    """
    if isinstance(x, torch.fx.Proxy):  # getattr on it never fails
        return vars(x).get(CARRIED, NOTHING)[0]
    carrier = x if hasattr(x, CARRIED) else whole(x)
    logits, with_gradients = getattr(carrier, CARRIED, NOTHING)
    if not with_gradients and x.requires_grad and not x.is_leaf:
        raise ValueError(
            "a stage's logits must have gradients where its output has: gradient checkpointing with "
            "use_reentrant=False required"
        )
    return logits


def without_logits(x: Tensor) -> Tensor:
    """Return x without its logits, which whoever keeps a feature would keep as well."""
    if carried_by(x) is not None:
        setattr(x, CARRIED, NOTHING)
    return x


def received(output: Tensor | tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return (x, logits) from the output of a block or a stage; logits are None if it handed none on."""
    return output if isinstance(output, tuple) else (output, carried_by(output))


def run_conv(conv: nn.Module, x: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run a convolution, augmented or not; return its output and the logits for the next layer that reads them."""
    if not isinstance(conv, AugmentedConv2d):
        return conv(x), logits
    x, logits = conv(x, logits)
    return x, logits if conv.need_logits else None


def run_block(
    block: nn.Module, x: Tensor, logits: Tensor | None, recompute: bool
) -> tuple[Tensor, Tensor | None]:
    """Run a block; return its output and logits. With `recompute` the backward pass runs it again."""
    output = checkpoint(block, x, logits) if recompute else block(x, logits)
    return received(output)


class AttnStage(nn.Sequential):
    """A stage whose blocks hand their attention logits on: (x, prev_logits) -> (x, logits)."""

    grad_checkpointing: bool = False

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = prev_logits
        for block in self:
            x, logits = run_block(block, x, logits, self.grad_checkpointing)
        return x, logits


class TensorStage(AttnStage):
    """An `AttnStage` that takes and returns a tensor, which carries the logits: x -> x.

    So tools can take the network apart like a plain one: nn.Sequential, torchvision's IntermediateLayerGetter, hooks.
    A copy of a stage's output carries nothing, and the next stage refuses it if it reads logits.
    """

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> Tensor:
        if prev_logits is None:
            prev_logits = carried_by(x)
        return carrying(*super().forward(x, prev_logits))


class ChainedNetwork:
    """timm's interface for a network with chained attention: a mixin for `nn.Module` or a network of timm's.

    The network defines `img_size`, `reset_classifier`, and `feature_info`, one entry for each of `feature_steps()`. An
    entry's "end" names modules that follow its "module".
    """

    feature_indices: tuple[int, ...] = (0, 1, 2, 3, 4)  # default of features_only
    min_img_size = 1  # pixels

    def feature_steps(self) -> list[Step]:
        """Return the network up to its head as functions (x, prev_logits) -> (x, logits), one for each feature of
        `feature_info`."""
        raise NotImplementedError

    def forward_end(self, x: Tensor) -> Tensor:
        """Compute the output of `forward_features` from the last feature; by default it is that feature."""
        return x

    @staticmethod
    def map_size(img_size: Size, reduction: int) -> Size:
        """Return (height, width) of a map, rounded up, since every halving rounds up."""
        return -(-img_size[0] // reduction), -(-img_size[1] // reduction)

    def set_input_size(self, img_size: int | Size) -> None:
        """Fit the position tables to another input size, in pixels; see `AugmentedConv2d.set_feat_size`."""
        self.img_size = to_size(img_size, self.min_img_size)
        if timm_input is not None:
            timm_input.update_model_input_size(self, self.img_size)
        saved = {**getattr(self, "_model_args", {}), "img_size": self.img_size}
        if "base" in saved:  # evolved: the plain network knows no img_size
            saved["evolution"] = {**saved["evolution"], "img_size": saved.pop("img_size")}
            if timm_input is not None:
                self._traits.pop("img_size")
        self._model_args = saved
        for module in self.modules():
            if isinstance(module, AugmentedConv2d):
                module.set_feat_size(self.map_size(self.img_size, module.map_reduction))

    def fill_offsets_beyond(self, img_size: int | Size) -> None:
        """Fill the entries of position tables that images of this size, in pixels, have not trained; see
        `AugmentedConv2d.fill_offsets_beyond`."""
        size = to_size(img_size, self.min_img_size)
        for module in self.modules():
            if isinstance(module, AugmentedConv2d):
                module.fill_offsets_beyond(self.map_size(size, module.map_reduction))

    def no_weight_decay(self) -> set[str]:
        kinds = ("height_rel", "width_rel", "qk_gain")
        return {name for name, _ in self.named_parameters() if name.endswith(kinds)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for module in self.modules():
            if hasattr(module, "grad_checkpointing"):
                module.grad_checkpointing = enable

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the features of `feature_info`.

        Args:
            x: (B, in_chans, H, W).
            indices: the last n if a number, all if None, else those listed.
            norm: accepted for timm's interface; there is no final norm.
            stop_early: stop after the last one wanted.
            output_fmt: "NCHW".
            intermediates_only: leave out the final features.

        Returns:
            final features and the list of intermediates, or the list alone.

        Raises:
            ValueError: another output_fmt.
            AssertionError: an index that does not exist.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        steps = self.feature_steps()
        last = max_index if stop_early else len(steps) - 1
        intermediates = []
        logits = None
        for index, step in enumerate(steps[: last + 1]):
            x, logits = received(step(x, logits))
            if index in take_indices:
                intermediates.append(without_logits(x))
        if intermediates_only:
            return intermediates
        if last == len(steps) - 1:
            x = self.forward_end(x)
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last wanted one, the modules behind them, and the head."""
        take_indices, max_index = feature_take_indices(len(self.feature_info), indices)
        unused = []
        for info in self.feature_info[max_index + 1 :]:
            unused += [info["module"], *info.get("end", ())]
        for name in unused:
            module = self.get_submodule(name)
            nothing = nn.Identity()
            if isinstance(module, AttnStage):
                nothing = TensorStage() if isinstance(module, TensorStage) else AttnStage()
            self.set_submodule(name, nothing)
        if prune_head or unused:
            self.num_features = self.feature_info[max_index]["num_chs"]
            self.reset_classifier(0, "")
        return take_indices


class HeadedNetwork(ChainedNetwork):
    """A `ChainedNetwork` that ends in timm's `ClassifierHead`.

    The network has `head`, `num_classes`, `num_features` and `forward_features`.
    """

    def init_weights(self) -> None:
        """Initialise convolutions by He, then attention layers and evolutions by their own methods."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, AugmentedConv2d):
                module.reset_parameters()
            if isinstance(module, Evolution):
                module.restore_start()

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.in_features = self.num_features
        self.head.reset(num_classes, global_pool)
        # a head without a classifier does not know the network's device and dtype
        weight = next(self.parameters())
        self.head.to(weight.device, weight.dtype).train(self.training)
        self.head_hidden_size = self.num_features * self.head.global_pool.feat_mult()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Turn (B, num_features, H, W) into (B, num_classes), or with `pre_logits` into pooled features."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Turn (B, in_chans, H, W) into (B, num_classes)."""
        return self.forward_head(self.forward_features(x))
