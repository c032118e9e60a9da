"""ResNets with attention-augmented convolutions: AA-, PA-, EA- and CSAN-ResNets.

timm's ResNet (stride on the 3x3 convolution), in which the 3x3 convolutions of the last three stages are augmented.

Papers:
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895
* CSAN: `Convolutional Self-Attention Networks` - https://arxiv.org/abs/1904.03107
* `Stand-Alone Self-Attention in Vision Models` - https://arxiv.org/abs/1906.05909

The widths are the papers': dim_qk = max(0.2 planes, 20 per head), dim_v = 0.1 planes; ResNet-34 planes/4 and planes/8.
Other published widths are keywords:
* the EA authors' public TensorFlow ResNet-50: qk_ratio=0.25, v_ratio=0.125;
* the AA paper's shares of attention: qk_ratio=v_ratio=0.25|0.5|0.75|1 with min_head_qk=20. At 1, attention replaces the
  whole convolution in the last three stages (the paper does not say whether also in the first: the printed sizes would
  be the same; here the first stays convolutional);
* the AA paper's ResNet-34: augment="first", v_ratio=0.25, min_head_qk=20;
* similar to stand-alone self-attention, 7x7 windows instead of all 3x3 convolutions of the last three stages:
  aa_resnet50 with qk_ratio=v_ratio=1, window=7, map_reduction=8 (in that paper, half of an embedding is the row's and
  half the column's; here the two are added, as in the AA paper).
No paper has CSAN's windows on images: csan_resnet50 applies the paper's setting for text, windows in the lower layers
and global attention above.

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d
from ea_vision.models._attention_config import AttentionConfig, ChainBuilder, check_numbers, to_size
from ea_vision.models._build import (
    KINDS,
    Network,
    imagenet_cfg,
    register_networks,
    scenes_cfg,
    shipped_weights,
)
from ea_vision.models._network import ChainedNetwork
from ea_vision.models._stages import Step, TensorStage, hand_on, run_conv, through
from ea_vision.models._stem import put_small_stem
from ea_vision.ops import Size

STAGES = (1, 2, 3, 4)
MakeLayer = Callable[[nn.Conv2d, int], AugmentedConv2d]


class _Block:
    """The common part of the blocks with attention: (x, prev_logits) -> (x, logits) | x."""

    def add_shortcut(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Return the branch's output plus the shortcut."""
        if self.se is not None:
            x = self.se(x)

        if self.drop_path is not None:
            x = self.drop_path(x)

        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return x


class AttendsInBasicBlock(_Block):
    """A mixin for a BasicBlock with timm's names: augments both 3x3 convolutions, or the first."""

    def augment(self, make: MakeLayer, which: str, strided: bool) -> None:
        """Replace 3x3 convolutions by `make(convolution, the block's stride at it)`.

        Args:
            which: "all" or "first".
            strided: whether to replace a convolution with a stride, too.
        """
        if strided or self.stride == 1:
            self.conv1 = make(self.conv1, self.stride)
        if which == "all":
            self.conv2 = make(self.conv2, 1)

    def forward(
        self, x: Tensor, prev_logits: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        shortcut = x

        x, logits = run_conv(self.conv1, x, prev_logits)
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self.act1(x)
        x = self.aa(x)

        x, logits = run_conv(self.conv2, x, logits)
        x = self.bn2(x)

        x = self.add_shortcut(x, shortcut)
        return hand_on(self.act2(x), logits)


class AttendsInBottleneck(_Block):
    """A mixin for a Bottleneck with timm's names: augments its 3x3 convolution."""

    def augment(self, make: MakeLayer, which: str, strided: bool) -> None:
        """Replace the 3x3 convolution by `make(convolution, stride)`, unless it has a stride and `strided` is false."""
        if strided or self.stride == 1:
            self.conv2 = make(self.conv2, self.stride)

    def forward(
        self, x: Tensor, prev_logits: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        shortcut = x

        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)

        x, logits = run_conv(self.conv2, x, prev_logits)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self.act2(x)
        x = self.aa(x)

        x = self.conv3(x)
        x = self.bn3(x)

        x = self.add_shortcut(x, shortcut)
        return hand_on(self.act3(x), logits)


class AttnBasicBlock(AttendsInBasicBlock, BasicBlock):
    """timm's BasicBlock with attention."""


class AttnBottleneck(AttendsInBottleneck, Bottleneck):
    """timm's Bottleneck with attention."""


@dataclass(frozen=True)
class Placement:
    """Where a ResNet attends; see `AttnResNet`."""

    augment: str = "all"
    augment_strided: bool = True
    map_reduction: int = 16

    def __post_init__(self) -> None:
        if self.augment not in ("all", "first"):
            raise ValueError(f"augment must be 'all' or 'first', got {self.augment!r}")
        reduction = self.map_reduction
        if not isinstance(reduction, int) or reduction.bit_count() != 1:
            raise ValueError(f"map_reduction must be a power of two, got {reduction!r}")

    def put(self, network: ChainedNetwork, attention: AttentionConfig, device, dtype) -> None:
        """Augment the 3x3 convolutions of a ResNet, and let its stages hand the logits on.

        Args:
            network: its blocks have `augment`, and its `img_size` and `feature_info` are set.
        """
        attending = attention.stages(STAGES, default=(2, 3, 4))
        chains = ChainBuilder(attention, network, device, dtype)
        for stage in STAGES:
            name = f"layer{stage}"
            blocks = getattr(network, name)
            if stage in attending:
                reduction = network.feature_info[stage]["reduction"]
                make = partial(self._layer, chains, stage, reduction)
                for block in blocks:
                    block.augment(make, self.augment, self.augment_strided)
            tensor_stage = TensorStage(*blocks, relay=network.relay)
            tensor_stage.training = blocks.training
            setattr(network, name, tensor_stage)

    def _layer(
        self, chains: ChainBuilder, stage: int, reduction: int, conv: nn.Conv2d, stride: int
    ) -> AugmentedConv2d:
        """Return the attention layer that replaces a convolution or, with fusion="add", contains it; in its mode.

        Args:
            reduction: image pixels per pixel of the stage's output, along a side.
            stride: the block's stride at the convolution. An anti-aliased block strides after the convolution, so the
                attention pools instead.
        """
        pools = (max(self.map_reduction, reduction) // reduction).bit_length() - 1
        layer = chains.layer(
            conv.in_channels,
            conv.out_channels,
            3,
            conv.stride[0],
            reduction=reduction << pools,
            stage=stage,
            pool_attention=pools + (stride != conv.stride[0]),
            dilation=conv.dilation[0],
            conv=conv,
        )
        return layer.train(conv.training)


class ResNetStages(ChainedNetwork):
    """The forward of timm's or torchvision's ResNet with attention: the network's stem and four stages."""

    def forward_stem(self, x: Tensor) -> Tensor:
        """Turn (B, in_chans, H, W) into (B, 64, H/2, W/2); stem_stride replaces the 2."""
        raise NotImplementedError

    def feature_steps(self) -> list[Step]:
        """Return the stem and the four stages."""
        return [
            through(self.forward_stem),
            through(self.maxpool, self.layer1),
            through(self.layer2),
            through(self.layer3),
            through(self.layer4),
        ]


class AttnResNet(ResNetStages, ResNet):
    """ResNet with augmented convolutions, in its last three stages as published (EA paper, section 4.1).

    Args:
        block: AttnBasicBlock or AttnBottleneck.
        layers: blocks by stage, four numbers.
        img_size: input size in pixels, one number or (height, width), for which position tables are made. Other input
            sizes run, too.
        augment: which 3x3 convolutions of a block are augmented, "all" or the "first". A bottleneck has one. In a
            ResNet-34 the EA paper augments all 26, the AA paper 13 (augment="first", v_ratio=0.25, min_head_qk=20:
            20.75M parameters).
        augment_strided: whether convolutions with stride 2, one at the beginning of each stage, are augmented, too.
        map_reduction: image pixels per pixel of the finest attention map, along a side: 16, as in the papers, pools the
            28x28 stage to 14x14; with 8 it attends at 28x28.
        stem_stride: for small images, a 3x3 stem of this stride (1, 2 or 4) without max-pooling; None: timm's stem,
            with a total stride of 4. At 64 pixels stem_stride=2 with map_reduction=4 attends at 16x16, 8x8 and 4x4.
        **kwargs: those of `AttentionConfig` (attn_stages, from 1 to 4, by default (2, 3, 4); num_heads, qk_ratio,
            v_ratio, position, window, ...), of the evolution (evolution, alpha, beta, kernel_size, num_layers, ...) and
            of timm's ResNet (num_classes, in_chans, output_stride, global_pool, drop_rate, drop_path_rate, ...).

    Raises:
        ValueError: the evolution does not have an option; num_heads does not divide a width; `augment`, `stem_stride`
            or attn_stages are unknown; map_reduction is not a power of two; layers or channels are not four numbers; or
            window_stages have no attention.
    """

    def __init__(
        self,
        block: type[AttnBasicBlock | AttnBottleneck],
        layers: tuple[int, int, int, int],
        img_size: int | Size = 224,
        augment: str = "all",
        augment_strided: bool = True,
        map_reduction: int = 16,
        stem_stride: int | None = None,
        device=None,
        dtype=None,
        **kwargs: Any,
    ):
        placement = Placement(augment, augment_strided, map_reduction)
        attention = AttentionConfig.take(kwargs)
        check_numbers("layers", layers, 4)
        if "channels" in kwargs:
            check_numbers("channels", kwargs["channels"], 4)
        super().__init__(block, layers, **kwargs, device=device, dtype=dtype)
        if stem_stride is not None:
            put_small_stem(self, kwargs.get("in_chans", 3), stem_stride, device, dtype)
        self.img_size = to_size(img_size)
        placement.put(self, attention, device, dtype)

    def forward_stem(self, x: Tensor) -> Tensor:
        return self.act1(self.bn1(self.conv1(x)))


_DEPTHS = {
    34: dict(block=AttnBasicBlock, layers=(3, 4, 6, 3), qk_ratio=0.25, v_ratio=0.125),
    50: dict(block=AttnBottleneck, layers=(3, 4, 6, 3)),
    101: dict(block=AttnBottleneck, layers=(3, 4, 23, 3)),
    152: dict(block=AttnBottleneck, layers=(3, 8, 36, 3)),
}
_AA_LAYERS = {34: 26, 50: 13, 101: 30, 152: 47}
# a ResNet-34 of half the width, for photos of 112 pixels: stage 2 attends at 14x14, as stage 3 of 224 pixels
_HALF = {
    **_DEPTHS[34],
    "channels": (32, 64, 128, 256),
    "img_size": 112,
    "map_reduction": 8,
    "num_classes": 6,
}


_NETWORKS = {}
for _prefix, _evolution in KINDS.items():
    for _depth, _options in _DEPTHS.items():
        _gates = {"alpha": 0.7} if _prefix == "ea_aa" and _depth > 50 else {}
        _details = {
            "aa": f"{_AA_LAYERS[_depth]} attention layers",
            "pa_aa": "alpha 0.5, one convolution",
            "ea_aa": f"alpha {_gates.get('alpha', 0.5)}, beta 1.0",
        }
        _NETWORKS[f"{_prefix}_resnet{_depth}"] = Network(
            f"{_prefix.upper().replace('_', '-')}-ResNet-{_depth}, {_details[_prefix]}.",
            {**_options, **_evolution, **_gates},
            plain=f"resnet{_depth}",
        )
_NETWORKS["csan_resnet50"] = Network(
    "CSAN-ResNet-50: AA-ResNet-50 whose stages 2 (here at 28x28) and 3 attend in windows of 7x7 pixels and 3 "
    "heads; no paper has it.",
    {
        **_DEPTHS[50],
        "window": 7,
        "head_window": 3,
        "head_border": "clip",
        "window_stages": (2, 3),
        "map_reduction": 8,
    },
    plain="resnet50",
)
for _prefix, _evolution in KINDS.items():
    _NETWORKS[f"{_prefix}_resnet34_050"] = Network(
        f"{_prefix.upper().replace('_', '-')}-ResNet-34 of half the width, for photos of 112 pixels.",
        {**_HALF, **_evolution},
    )
# trained on six kinds of scenes, not on ImageNet
SHIPPED = ("aa_resnet34_050.scenes", "ea_aa_resnet34_050.scenes")
_with_plain = [name for name, network in _NETWORKS.items() if network.plain]
default_cfgs = generate_default_cfgs(
    {
        "pa_aa_resnet34_050": scenes_cfg("conv1", "fc"),
        **{name: scenes_cfg("conv1", "fc", file=shipped_weights(name)) for name in SHIPPED},
        **dict.fromkeys(_with_plain, imagenet_cfg("conv1", "fc")),
    }
)
register_networks(__name__, AttnResNet, _NETWORKS)
