"""MnasNets with attention-augmented convolutions whose attention maps may evolve: AA-, PA- and EA-MnasNets.

timm's EfficientNet in the form of MnasNet-A1 (timm's `semnasnet_*`). The expanding 1x1 convolutions of the last 13
inverted residuals are augmented, with 4 heads, dim_qk = 0.1 and dim_v = 0.05 of their width and no minimum width: so
the number of parameters is the AA paper's at all four widths. Stage 2 attends at 14x14, as the paper's ResNets do;
stage 3 begins at 28x28. The chains, 3, 1, 6 and 3 layers with maps of one shape, are ours: no paper has evolving maps
in MnasNet.

Papers:
* MnasNet: `Platform-Aware Neural Architecture Search for Mobile` - https://arxiv.org/abs/1807.11626
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""

from itertools import pairwise
from typing import Any

from timm.layers import make_divisible
from timm.models import generate_default_cfgs
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d
from ea_vision.layers.recomputing import checkpoint
from ea_vision.models._attention_config import AttentionConfig, ChainBuilder, to_size
from ea_vision.models._build import KINDS, Network, imagenet_cfg, register_networks
from ea_vision.models._network import ChainedNetwork
from ea_vision.models._stages import Step, TensorStage, hand_on, run_conv, through
from ea_vision.ops import Size

MNASNET_A1 = [  # in timm's notation, stages 0 to 6
    ["ds_r1_k3_s1_e1_c16_noskip"],
    ["ir_r2_k3_s2_e6_c24"],
    ["ir_r3_k5_s2_e3_c40_se0.25"],
    ["ir_r4_k3_s2_e6_c80"],
    ["ir_r2_k3_s1_e6_c112_se0.25"],
    ["ir_r3_k5_s2_e6_c160_se0.25"],
    ["ir_r1_k3_s1_e6_c320"],
]


class AttnInvertedResidual(nn.Module):
    """timm's InvertedResidual with its expanding convolution augmented: (x, prev_logits) -> (x, logits) | x.

    Args:
        block: timm's block; this one takes over its modules.
        conv_pw: the augmented convolution.
    """

    def __init__(self, block: nn.Module, conv_pw: AugmentedConv2d):
        super().__init__()
        self.has_skip = block.has_skip
        for name, module in block.named_children():
            setattr(self, name, conv_pw if name == "conv_pw" else module)

    def forward(
        self, x: Tensor, prev_logits: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, logits = run_conv(self.conv_pw, x, prev_logits)
        y = self.conv_dw(self.bn1(y))
        y = self.se(self.aa(self.bn2(y)))
        y = self.bn3(self.conv_pwl(y))
        if self.has_skip:
            y = self.drop_path(y) + x
        return hand_on(y, logits)


class PlainStage(TensorStage):
    """A stage of timm's blocks, which hands the logits on unchanged: x -> x."""

    def forward(self, x: Tensor) -> Tensor:
        handed = self.relay.find(x)
        for block in self:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        self.relay.hand_on(x, handed)
        return x


class AttnMnasNet(ChainedNetwork, EfficientNet):
    """MnasNet-A1 with augmented convolutions in its last five stages.

    Args:
        multiplier: factor of the channels.
        img_size: input size in pixels, one number or (height, width), for which position tables are made. Other input
            sizes run, too.
        **kwargs: those of `AttentionConfig` (attn_stages, by default all of 2 to 6, () for timm's semnasnet; num_heads,
            qk_ratio, v_ratio, min_head_qk, position, evolution, attn_drop_rate), of the evolution (alpha, beta,
            kernel_size, num_layers, ...) and of timm's EfficientNet (num_classes, in_chans, output_stride, global_pool,
            drop_rate, drop_path_rate, norm_layer, ...).

    Raises:
        ValueError: an option that the evolution does not have, unknown attn_stages, or an evolution without attention.
    """

    def __init__(
        self,
        multiplier: float = 1.0,
        img_size: int | Size = 224,
        device=None,
        dtype=None,
        **kwargs: Any,
    ):
        dd = {"device": device, "dtype": dtype}
        config = AttentionConfig.take(kwargs, num_heads=4, qk_ratio=0.1, v_ratio=0.05)
        attending = config.stages((2, 3, 4, 5, 6), default=(2, 3, 4, 5, 6))
        stage_args = decode_arch_def(MNASNET_A1)
        super().__init__(
            stage_args,
            stem_size=32,
            round_chs_fn=lambda channels: make_divisible(channels * multiplier),
            **kwargs,
            **dd,
        )
        self.img_size = to_size(img_size)
        chains = ChainBuilder(config, self, **dd)
        largest = kwargs.get("output_stride", 32)
        reduction = 2
        stages = [PlainStage(*self.blocks[0], relay=self.relay)]
        for index in range(1, len(self.blocks)):
            blocks = list(self.blocks[index])
            before = reduction
            reduction = min(stage_args[index][0]["stride"] * before, largest)
            if index not in attending:
                stages.append(PlainStage(*blocks, relay=self.relay))
                continue
            links = []
            for number, block in enumerate(blocks):
                # the first block's stride comes after its expansion
                seen = before if number == 0 else reduction
                links.append(AttnInvertedResidual(block, self._augment(block, chains, index, seen)))
            stages.append(TensorStage(*links, relay=self.relay))
        self.blocks = nn.Sequential(*stages)

    @staticmethod
    def _augment(
        block: nn.Module, chains: ChainBuilder, stage: int, reduction: int
    ) -> AugmentedConv2d:
        """Return the attention layer of a block's expanding convolution.

        Args:
            reduction: image pixels per pixel of the block's input, along a side. Stage 2 attends at 1/16.
        """
        map_reduction = max(16, reduction) if stage == 2 else reduction
        return chains.layer(
            block.conv_pw.in_channels,
            block.conv_pw.out_channels,
            1,
            reduction=map_reduction,
            stage=stage,
            pool_attention=(map_reduction // reduction).bit_length() - 1,
            conv=block.conv_pw,
        )

    def forward_stem(self, x: Tensor) -> Tensor:
        """Turn (B, in_chans, H, W) into (B, C, H/2, W/2)."""
        return self.bn1(self.conv_stem(x))

    def forward_end(self, x: Tensor) -> Tensor:
        """Run the last convolution, which is not part of the last feature."""
        return self.bn2(self.conv_head(x))

    def feature_steps(self) -> list[Step]:
        """Return the stages in five groups, each up to the next stride; the first group includes the stem."""
        stages = list(self.blocks)
        first, *others = pairwise([0, *self.stage_ends])
        steps = [through(self.forward_stem, *stages[slice(*first)])]
        return steps + [through(*stages[slice(*ends)]) for ends in others]

    prune_intermediate_layers = EfficientNet.prune_intermediate_layers


_PLAIN = {"075": "semnasnet_075", "100": "semnasnet_100", "125": None, "140": None}
_ABOUT = {
    "aa": "AA-MnasNet of width {:g}, 13 attention layers.",
    "pa_aa": "PA in AA-MnasNet of width {:g}, alpha 0.5, one convolution; ours.",
    "ea_aa": "EA in AA-MnasNet of width {:g}, alpha 0.5, beta 1.0; ours.",
}
_NETWORKS = {
    "semnasnet_125": Network(
        "MnasNet-A1 of width 1.25, which timm lacks.", {"multiplier": 1.25, "attn_stages": ()}
    )
}
for _prefix, _evolution in KINDS.items():
    for _width, _plain in _PLAIN.items():
        _multiplier = int(_width) / 100
        _NETWORKS[f"{_prefix}_mnasnet_{_width}"] = Network(
            _ABOUT[_prefix].format(_multiplier),
            {"multiplier": _multiplier, **_evolution},
            plain=_plain,
        )
_cfg = imagenet_cfg("conv_stem", "classifier", interpolation="bicubic")
default_cfgs = generate_default_cfgs(dict.fromkeys(_NETWORKS, _cfg))
register_networks(__name__, AttnMnasNet, _NETWORKS)
