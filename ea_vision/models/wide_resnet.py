"""Wide-ResNets for 32x32 images: plain, with squeeze-excite or gather-excite, and with augmented convolutions.

The network is that of the AutoAugment code (tensorflow/models, research/autoaugment/wrn.py): pre-activation blocks of
two 3x3 convolutions in three groups, and shortcuts without parameters. The AA paper's Wide-ResNet-28-10 has the same
size and number of operations. That code also has shortcuts around the groups and the network, which are left out here;
it is not known whether the AA paper had them.

In AA-Wide-ResNet the first 3x3 convolution of every block is augmented, at full resolution: its maps have 32x32, 16x16
and 8x8 pixels. The widths are the paper's rule read literally, dim_qk = 0.2 and at least 20 per head, dim_v = 0.1; that
gives 36.06M parameters where the paper prints 36.2M. Maps that evolve in this network are ours, no paper has them.

Papers:
* `Wide Residual Networks` - https://arxiv.org/abs/1605.07146
* SE: `Squeeze-and-Excitation Networks` - https://arxiv.org/abs/1709.01507
* GE: `Gather-Excite` - https://arxiv.org/abs/1810.12348
* AA: `Attention Augmented Convolutional Networks` - https://arxiv.org/abs/1904.09925
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895

Shape letters: B batch, C channels, H x W image or map, N = H*W pixels of a map, K heads.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers import BatchNormAct2d, ClassifierHead, DropPath, SEModule
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from ea_vision.models._attention_config import AttentionConfig, ChainBuilder, to_size
from ea_vision.models._build import Network, cifar_cfg, register_networks
from ea_vision.models._network import HeadedNetwork
from ea_vision.models._stages import Step, TensorStage, growing_rates, hand_on, run_conv, through
from ea_vision.ops import Size


class Shortcut(nn.Module):
    """A change of shape without parameters: average pooling with kernel = stride, zero channels before and after."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.behind = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Turn (B, in_channels, H, W) into (B, out_channels, H/stride, W/stride), sides rounded up."""
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        if self.before + self.behind > 0:
            x = F.pad(x, [0, 0, 0, 0, self.before, self.behind])
        return x


class WideBlock(nn.Module):
    """BatchNorm, ReLU, 3x3 convolution, twice; beside it a shortcut: (x, prev_logits) -> (x, logits).

    Args:
        conv1: the first convolution, plain or augmented.
        shared_norm: whether the shortcut, too, begins after the first norm and ReLU.
        gate: module on the branch's output, such as squeeze-excite.
    """

    def __init__(
        self,
        conv1: nn.Module,
        in_channels: int,
        out_channels: int,
        stride: int,
        shared_norm: bool,
        gate: nn.Module,
        drop_path: float,
        **dd: Any,
    ):
        super().__init__()
        self.shared_norm = shared_norm
        self.bn1 = nn.BatchNorm2d(in_channels, **dd)
        self.conv1 = conv1
        self.bn2 = nn.BatchNorm2d(out_channels, **dd)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False, **dd)
        self.gate = gate
        self.drop_path = DropPath(drop_path)
        self.shortcut = Shortcut(in_channels, out_channels, stride)

    def forward(
        self, x: Tensor, prev_logits: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = F.relu_(self.bn1(x))
        if self.shared_norm:
            x = y
        y, logits = run_conv(self.conv1, y, prev_logits)
        y = self.gate(self.conv2(F.relu_(self.bn2(y))))
        return hand_on(self.shortcut(x) + self.drop_path(y), logits)


class GatherExcite(nn.Module):
    """Gather-excite over the whole map without parameters; timm's cannot be traced or scripted."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean((2, 3), keepdim=True).sigmoid()


def _gate(kind: str | None, channels: int, **dd: Any) -> nn.Module:
    if kind == "se":
        return SEModule(channels, rd_channels=max(8, channels // 16), bias=False, **dd)
    if kind == "ge":
        return GatherExcite()
    if kind is not None:
        raise ValueError(f"gate must be 'se', 'ge' or None, got {kind!r}")
    return nn.Identity()


class WideResNet(HeadedNetwork, nn.Module):
    """Three groups of pre-activation blocks; with attention, each group is a chain.

    Args:
        num_classes: classes; 0 for no classifier.
        in_chans: channels of the input.
        img_size: input size in pixels, one number or (height, width), for which position tables are made. Other input
            sizes run, too.
        global_pool: pooling of the head, timm's names.
        depth: number of layers, 6 n + 4 for n blocks per group.
        width: the groups have 16, 32 and 64 times this number of channels.
        gate: module on every block's branch: "se" (squeeze-excite, a sixteenth of the channels and at least 8, no
            biases), "ge" (gather-excite without parameters), or None.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth at the last block, growing linearly from 0 at the first.
        **kwargs: those of `AttentionConfig` (attn_stages, the groups, from 1 to 3, whose blocks' first convolutions are
            augmented, by default none; num_heads, qk_ratio, v_ratio, min_head_qk, position, evolution, ...) and of the
            evolution (alpha, beta, kernel_size, num_layers, ...).

    Raises:
        ValueError: a depth that is not 6 n + 4, an unknown gate, an evolution without attention, or an option that the
            evolution does not have.
    """

    feature_indices = (0, 1, 2, 3)

    def __init__(
        self,
        num_classes: int = 100,
        in_chans: int = 3,
        img_size: int | Size = 32,
        global_pool: str = "avg",
        depth: int = 28,
        width: int = 10,
        gate: str | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
        **kwargs: Any,
    ):
        dd = {"device": device, "dtype": dtype}
        config = AttentionConfig.take(kwargs)
        super().__init__(**kwargs)  # raises for unknown keywords
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(
                f"depth must be 6 n + 4 with n blocks per group, n at least 1, got {depth}"
            )
        if width < 1:
            raise ValueError(f"width must be 1 or more, got {width}")
        attending = config.stages((1, 2, 3), default=())
        self.img_size = to_size(img_size)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = 64 * width

        chains = ChainBuilder(config, self, **dd)
        blocks_a_group = (depth - 4) // 6
        drop_paths = growing_rates(drop_path_rate, 3 * blocks_a_group)
        self.conv_stem = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False, **dd)
        self.feature_info = [dict(num_chs=16, reduction=1, module="conv_stem")]
        in_channels = 16
        for group in (1, 2, 3):
            reduction = 2 ** (group - 1)
            channels = 16 * width * reduction
            blocks = []
            for index in range(blocks_a_group):
                first = index == 0
                stride = 2 if first and group > 1 else 1
                if group in attending:
                    conv1 = chains.layer(
                        in_channels, channels, 3, stride, reduction=reduction, stage=group
                    )
                else:
                    conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False, **dd)
                block = WideBlock(
                    conv1,
                    in_channels,
                    channels,
                    stride,
                    shared_norm=first and group == 1,
                    gate=_gate(gate, channels, **dd),
                    drop_path=next(drop_paths),
                    **dd,
                )
                blocks.append(block)
                in_channels = channels
            name = f"group{group}"
            setattr(self, name, TensorStage(*blocks, relay=self.relay))
            self.feature_info.append(dict(num_chs=channels, reduction=reduction, module=name))
        self.feature_info[-1]["end"] = ("norm",)  # removed with the last group
        self.norm = BatchNormAct2d(self.num_features, **dd)
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate, **dd
        )
        self.init_weights()

    def group_matcher(self, coarse: bool = False) -> dict:
        blocks = r"^group(\d+)" if coarse else r"^group(\d+)\.(\d+)"
        return dict(stem=r"^conv_stem", blocks=[(blocks, None), (r"^norm", (99999,))])

    def feature_steps(self) -> list[Step]:
        """Return the stem and the groups, the last one with the norm and ReLU after it."""
        return [
            through(self.conv_stem),
            through(self.group1),
            through(self.group2),
            through(self.group3, self.norm),
        ]


_EVERYWHERE = (1, 2, 3)
_NETWORKS = {
    "wrn28_10_cifar": Network("Wide-ResNet-28-10 for CIFAR, shortcuts without parameters."),
    "se_wrn28_10_cifar": Network("Wide-ResNet-28-10 with squeeze-excite.", {"gate": "se"}),
    "ge_wrn28_10_cifar": Network(
        "Wide-ResNet-28-10 with gather-excite, its form without parameters.", {"gate": "ge"}
    ),
    "aa_wrn28_10_cifar": Network(
        "AA-Wide-ResNet-28-10: the first convolution of each block augmented, 12 attention layers.",
        {"attn_stages": _EVERYWHERE},
    ),
    "pa_aa_wrn28_10_cifar": Network(
        "PA in AA-Wide-ResNet-28-10, alpha 0.5, one convolution; ours.",
        {"attn_stages": _EVERYWHERE, "evolution": "pa"},
    ),
    "ea_aa_wrn28_10_cifar": Network(
        "EA in AA-Wide-ResNet-28-10, alpha 0.5, beta 1.0; ours.",
        {"attn_stages": _EVERYWHERE, "evolution": "ea"},
    ),
}
_cifar100_cfg = partial(
    cifar_cfg,
    "conv_stem",
    "head.fc",
    num_classes=100,
    pool_size=(8, 8),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
default_cfgs = generate_default_cfgs({name: _cifar100_cfg() for name in _NETWORKS})
register_networks(__name__, WideResNet, _NETWORKS)
