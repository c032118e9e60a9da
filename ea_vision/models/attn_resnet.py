"""ResNets with attention-augmented convolutions whose attention maps may evolve: AA-, PA- and EA-ResNets.

timm's ResNet (stride on the 3x3 convolution), in which the 3x3 convolutions of the last three stages are augmented.

Papers:
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
* PA: `Predictive Attention Transformer` (2020)
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895

The widths are the papers' (dim_qk = max(0.2 planes, 20 a head), dim_v = 0.1 planes; ResNet-34: planes/4 and planes/8).
The EA authors' public TensorFlow ResNet-50 uses other ones: qk_ratio=0.25, v_ratio=0.125.

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import checkpoint, checkpoint_seq, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d, create_evolution
from ea_vision.models._builder import build_model, take_indices_of, to_size, update_model_input_size

__all__ = ["AttnResNet"]

ATTN_STAGES = ((2, "layer2"), (3, "layer3"), (4, "layer4"))  # index in feature_info, name
ConvFactory = Callable[[nn.Conv2d, int], AugmentedConv2d]


class AttnBasicBlock(BasicBlock):
    """timm's BasicBlock, both 3x3 convolutions augmented; (x, prev_logits) -> (x, logits)."""

    need_logits: bool = True  # whether the next block's maps evolve from this one's

    def augment(self, make: ConvFactory) -> None:
        """Put `make(convolution, stride of the attention branch)` in place of each 3x3 convolution."""
        self.conv1 = make(self.conv1, self.stride)
        self.conv2 = make(self.conv2, 1)

    @torch.jit.ignore
    def first_attention(self) -> AugmentedConv2d:
        """The layer that reads the previous block's logits."""
        return self.conv1

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        shortcut = x

        x, logits = self.conv1(x, prev_logits, self.conv2.evolution is not None)
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self.act1(x)
        x = self.aa(x)

        x, logits = self.conv2(x, logits, self.need_logits)
        x = self.bn2(x)

        if self.se is not None:
            x = self.se(x)

        if self.drop_path is not None:
            x = self.drop_path(x)

        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act2(x)

        return x, logits


class AttnBottleneck(Bottleneck):
    """timm's Bottleneck, its 3x3 convolution augmented; (x, prev_logits) -> (x, logits)."""

    need_logits: bool = True  # whether the next block's maps evolve from this one's

    def augment(self, make: ConvFactory) -> None:
        """Put `make(convolution, stride of the attention branch)` in place of the 3x3 convolution."""
        self.conv2 = make(self.conv2, self.stride)

    @torch.jit.ignore
    def first_attention(self) -> AugmentedConv2d:
        """The layer that reads the previous block's logits."""
        return self.conv2

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        shortcut = x

        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)

        x, logits = self.conv2(x, prev_logits, self.need_logits)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self.act2(x)
        x = self.aa(x)

        x = self.conv3(x)
        x = self.bn3(x)

        if self.se is not None:
            x = self.se(x)

        if self.drop_path is not None:
            x = self.drop_path(x)

        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act3(x)

        return x, logits


class AttnStage(nn.Sequential):
    """A stage whose blocks hand their attention logits on: (x, prev_logits) -> (x, logits)."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = prev_logits
        for block in self:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x, logits = checkpoint(block, x, logits)
            else:
                x, logits = block(x, logits)
        return x, logits


class AttnResNet(ResNet):
    """ResNet with augmented convolutions in its last three stages (EA paper, section 4.1).

    Args:
        block: AttnBasicBlock or AttnBottleneck.
        layers: blocks by stage, four numbers.
        img_size: input size in pixels, one number or (height, width); it sizes the position tables. Other input sizes
            run too.
        evolution: "ea", "pa", or None for maps that do not evolve (AA).
        num_heads: K.
        qk_ratio: dim_qk as a share of the convolution's width (the AA paper's kappa); None is its rule
            max(0.2 width, 20 num_heads). Rounded down to a multiple of num_heads.
        v_ratio: dim_v likewise (upsilon).
        relative: whether the logits have relative position terms.
        alpha: share of the previous layer's maps (EA 0.5, PA 0.5 unless given).
        beta: EA: share of the convolved maps (1.0 unless given).
        kernel_size: side of the map convolutions' kernels (3 unless given).
        num_layers: PA: convolutions that predict the maps (1 unless given).
        attn_drop_rate: dropout on the attention probabilities.
        **kwargs: timm's ResNet's: num_classes, in_chans, output_stride, global_pool, drop_rate, drop_path_rate, ...

    Raises:
        ValueError: an option that the evolution does not have, or widths that the heads do not divide.
    """

    feature_indices = (0, 1, 2, 3, 4)

    def __init__(
            self,
            block: type[AttnBasicBlock | AttnBottleneck],
            layers: tuple[int, int, int, int],
            img_size: int | tuple[int, int] = 224,
            evolution: str | None = None,
            num_heads: int = 8,
            qk_ratio: float | None = None,
            v_ratio: float = 0.1,
            relative: bool = True,
            alpha: float | None = None,
            beta: float | None = None,
            kernel_size: int | None = None,
            num_layers: int | None = None,
            attn_drop_rate: float = 0.0,
            device=None,
            dtype=None,
            **kwargs: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        if num_heads < 1:
            raise ValueError(f"num_heads must be 1 or more, got {num_heads}")
        plain_block = BasicBlock if issubclass(block, BasicBlock) else Bottleneck
        super().__init__((plain_block, block, block, block), layers, **kwargs, **dd)
        self.img_size = to_size(img_size)

        previous = 0  # reduction of the previous layer's map; a chain runs while it stays the same

        def make(conv: nn.Conv2d, stride: int, map_reduction: int, pool_attention: bool) -> AugmentedConv2d:
            nonlocal previous
            first, previous = map_reduction != previous, map_reduction
            width = conv.out_channels
            return AugmentedConv2d(
                conv.in_channels, width, 3, conv.stride[0],
                dim_qk=_dim(max(0.2 * width, 20 * num_heads) if qk_ratio is None else qk_ratio * width, num_heads),
                dim_v=_dim(v_ratio * width, num_heads),
                num_heads=num_heads,
                feat_size=_map_size(self.img_size, map_reduction),
                relative=relative,
                # an anti-aliased block strides after the convolution, so the attention pools in its stead
                pool_attention=int(pool_attention) + (stride != conv.stride[0]),
                evolution=None if first else create_evolution(
                    evolution, num_heads, alpha=alpha, beta=beta, kernel_size=kernel_size, num_layers=num_layers, **dd),
                dilation=conv.dilation[0],
                attn_drop=attn_drop_rate,
                **dd)

        for index, name in ATTN_STAGES:
            reduction = self.feature_info[index]["reduction"]
            blocks = list(getattr(self, name))
            for attn_block in blocks:
                map_reduction = _map_reduction(reduction)
                attn_block.augment(
                    partial(make, map_reduction=map_reduction, pool_attention=reduction < map_reduction))
            setattr(self, name, AttnStage(*blocks))
        blocks = [attn_block for _, name in ATTN_STAGES for attn_block in getattr(self, name)]
        for attn_block, following in zip(blocks, [*blocks[1:], None], strict=True):
            attn_block.need_logits = following is not None and following.first_attention().evolution is not None

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        for _, name in ATTN_STAGES:
            getattr(self, name).grad_checkpointing = enable

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Fit the position tables to another input size, in pixels; see `AugmentedConv2d.set_feat_size`."""
        self.img_size = to_size(img_size)
        update_model_input_size(self, self.img_size)
        for index, name in ATTN_STAGES:
            map_size = _map_size(self.img_size, _map_reduction(self.feature_info[index]["reduction"]))
            for module in getattr(self, name).modules():
                if isinstance(module, AugmentedConv2d):
                    module.set_feat_size(map_size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(("height_rel", "width_rel"))}

    def forward_stem(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, 64, H/2, W/2)."""
        return self.act1(self.bn1(self.conv1(x)))

    def forward_layer1(self, x: Tensor) -> Tensor:
        """The pooling and the stage without attention."""
        x = self.maxpool(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(self.layer1, x)
        return self.layer1(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, num_features, H/32, W/32)."""
        x = self.forward_layer1(self.forward_stem(x))
        x, logits = self.layer2(x)
        x, logits = self.layer3(x, logits)
        x, logits = self.layer4(x, logits)
        return x

    def forward_intermediates(
            self,
            x: Tensor,
            indices: int | list[int] | None = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = "NCHW",
            intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features after the stem and after each stage.

        Args:
            x: (B, in_chans, H, W).
            indices: the last n if a number, all if None, else those listed (0 the stem, 1..4 the stages).
            norm: accepted for timm's interface; there is no final norm.
            stop_early: stop after the last stage wanted.
            output_fmt: "NCHW".
            intermediates_only: leave out the final features.

        Returns:
            final features and the list of intermediates, or the list alone.

        Raises:
            ValueError: another output_fmt.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take_indices, max_index = take_indices_of(5, indices)
        last = max_index if stop_early else 4
        intermediates = []
        x = self.forward_stem(x)
        if 0 in take_indices:
            intermediates.append(x)
        x = self.forward_layer1(x) if last >= 1 else self.maxpool(x)
        if 1 in take_indices:
            intermediates.append(x)
        logits = None
        for index in range(2, last + 1):
            x, logits = getattr(self, f"layer{index}")(x, logits)
            if index in take_indices:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
            self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True,
    ) -> list[int]:
        """Drop what the given intermediates do not need; see timm's ResNet."""
        take_indices = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        for _, name in ATTN_STAGES:
            if not isinstance(getattr(self, name), AttnStage):  # timm has put a placeholder there
                setattr(self, name, AttnStage())
        return take_indices


def _dim(wanted: float, num_heads: int) -> int:
    """Rounded down to a multiple of the heads, at least one a head."""
    return max(num_heads, int(wanted + 1e-6) // num_heads * num_heads)


def _map_reduction(reduction: int) -> int:
    """The 28x28 stage (reduction 8) attends at 14x14."""
    return max(16, reduction)


def _map_size(img_size: tuple[int, int], reduction: int) -> tuple[int, int]:
    """Every halving rounds up, so together they do."""
    return -(-img_size[0] // reduction), -(-img_size[1] // reduction)


def _create_attn_resnet(variant: str, pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    return build_model(AttnResNet, variant, pretrained, **kwargs)


def _cfg(url: str = "", **kwargs: Any) -> dict[str, Any]:
    return {
        "url": url,
        "num_classes": 1000, "input_size": (3, 224, 224), "pool_size": (7, 7),
        "crop_pct": 0.875, "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD,
        "first_conv": "conv1", "classifier": "fc",
        "license": "apache-2.0",
        **kwargs,
    }


default_cfgs = generate_default_cfgs({
    "aa_resnet34": _cfg(), "pa_aa_resnet34": _cfg(), "ea_aa_resnet34": _cfg(),
    "aa_resnet50": _cfg(), "pa_aa_resnet50": _cfg(), "ea_aa_resnet50": _cfg(),
    "aa_resnet101": _cfg(), "pa_aa_resnet101": _cfg(), "ea_aa_resnet101": _cfg(),
    "aa_resnet152": _cfg(), "pa_aa_resnet152": _cfg(), "ea_aa_resnet152": _cfg(),
})


_RESNET34 = dict(block=AttnBasicBlock, layers=(3, 4, 6, 3), qk_ratio=0.25, v_ratio=0.125)
_RESNET50 = dict(block=AttnBottleneck, layers=(3, 4, 6, 3))
_RESNET101 = dict(block=AttnBottleneck, layers=(3, 4, 23, 3))
_RESNET152 = dict(block=AttnBottleneck, layers=(3, 8, 36, 3))


@register_model
def aa_resnet34(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """AA-ResNet-34: both 3x3 convolutions of each block augmented, 26 attention layers."""
    return _create_attn_resnet("aa_resnet34", pretrained, **{**_RESNET34, **kwargs})


@register_model
def pa_aa_resnet34(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """PA-AA-ResNet-34, alpha 0.5, one convolution."""
    return _create_attn_resnet("pa_aa_resnet34", pretrained, **{**_RESNET34, "evolution": "pa", **kwargs})


@register_model
def ea_aa_resnet34(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """EA-AA-ResNet-34, alpha 0.5, beta 1.0."""
    return _create_attn_resnet("ea_aa_resnet34", pretrained, **{**_RESNET34, "evolution": "ea", **kwargs})


@register_model
def aa_resnet50(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """AA-ResNet-50: the 3x3 convolution of each block augmented, 13 attention layers."""
    return _create_attn_resnet("aa_resnet50", pretrained, **{**_RESNET50, **kwargs})


@register_model
def pa_aa_resnet50(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """PA-AA-ResNet-50, alpha 0.5, one convolution."""
    return _create_attn_resnet("pa_aa_resnet50", pretrained, **{**_RESNET50, "evolution": "pa", **kwargs})


@register_model
def ea_aa_resnet50(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """EA-AA-ResNet-50, alpha 0.5, beta 1.0."""
    return _create_attn_resnet("ea_aa_resnet50", pretrained, **{**_RESNET50, "evolution": "ea", **kwargs})


@register_model
def aa_resnet101(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """AA-ResNet-101, 30 attention layers."""
    return _create_attn_resnet("aa_resnet101", pretrained, **{**_RESNET101, **kwargs})


@register_model
def pa_aa_resnet101(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """PA-AA-ResNet-101, alpha 0.5, one convolution."""
    return _create_attn_resnet("pa_aa_resnet101", pretrained, **{**_RESNET101, "evolution": "pa", **kwargs})


@register_model
def ea_aa_resnet101(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """EA-AA-ResNet-101, alpha 0.7, beta 1.0."""
    args = {**_RESNET101, "evolution": "ea", "alpha": 0.7, **kwargs}
    return _create_attn_resnet("ea_aa_resnet101", pretrained, **args)


@register_model
def aa_resnet152(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """AA-ResNet-152, 47 attention layers."""
    return _create_attn_resnet("aa_resnet152", pretrained, **{**_RESNET152, **kwargs})


@register_model
def pa_aa_resnet152(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """PA-AA-ResNet-152, alpha 0.5, one convolution."""
    return _create_attn_resnet("pa_aa_resnet152", pretrained, **{**_RESNET152, "evolution": "pa", **kwargs})


@register_model
def ea_aa_resnet152(pretrained: bool = False, **kwargs: Any) -> AttnResNet:
    """EA-AA-ResNet-152, alpha 0.7, beta 1.0."""
    args = {**_RESNET152, "evolution": "ea", "alpha": 0.7, **kwargs}
    return _create_attn_resnet("ea_aa_resnet152", pretrained, **args)
