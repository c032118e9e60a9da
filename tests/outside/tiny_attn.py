"""A family of networks as somebody outside the package would write it: public names only.

Two stages of plain blocks whose 3x3 convolutions are augmented; both attend at 8x8, so one chain runs through them.
"""

from typing import Any

import torch.nn.functional as F
from timm.layers import ClassifierHead, ConvNormAct, DropPath
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from ea_vision.models import (
    AttentionConfig,
    AttnStage,
    ChainBuilder,
    HeadedNetwork,
    Network,
    register_networks,
    to_size,
)


class TinyBlock(nn.Module):
    """Augmented convolution with a residual: (x, prev_logits) -> (x, logits)."""

    def __init__(self, conv: nn.Module, channels: int, drop_path: float, **dd) -> None:
        super().__init__()
        self.conv = conv
        self.bn = nn.BatchNorm2d(channels, **dd)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, prev_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y, logits = self.conv(x, prev_logits)
        return F.relu(x + self.drop_path(self.bn(y))), logits


class TinyAttn(HeadedNetwork, nn.Module):
    """Stem of stride 4 and two stages of augmented blocks."""

    feature_indices = (0, 1, 2)

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        global_pool: str = "avg",
        width: int = 16,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        attention = AttentionConfig.take(kwargs, num_heads=2, qk_ratio=0.5, v_ratio=0.5)
        super().__init__(**kwargs)  # refuses what is left
        self.img_size = to_size(img_size)
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = width
        chains = ChainBuilder(attention, self, **dd)
        self.stem = ConvNormAct(in_chans, width, 3, stride=4, padding=1, **dd)
        blocks = []
        for number in range(4):
            conv = chains.layer(width, width, reduction=4)
            blocks.append(TinyBlock(conv, width, drop_path_rate * number / 3, **dd))
        self.stage1 = AttnStage(*blocks[:2])
        self.stage2 = AttnStage(*blocks[2:])
        self.feature_info = [
            dict(num_chs=width, reduction=4, module=name) for name in ("stem", "stage1", "stage2")
        ]
        self.head = ClassifierHead(
            width, num_classes, pool_type=global_pool, drop_rate=drop_rate, **dd
        )

    def feature_steps(self):
        return [lambda x, logits: (self.stem(x), logits), self.stage1, self.stage2]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(stem=r"^stem", blocks=r"^stage(\d)" if coarse else r"^stage(\d)\.(\d+)")

    def forward_features(self, x: Tensor) -> Tensor:
        x, logits = self.stage1(self.stem(x))
        return self.stage2(x, logits)[0]


_TINY = {
    "aa_tiny": Network("Tiny network with attention that does not evolve."),
    "ea_aa_tiny": Network("Tiny network with evolving attention.", {"evolution": "ea"}),
}
default_cfgs = generate_default_cfgs(
    {
        name: {
            "url": "",
            "num_classes": 10,
            "input_size": (3, 32, 32),
            "pool_size": (8, 8),
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.25, 0.25, 0.25),
            "first_conv": "stem.conv",
            "classifier": "head.fc",
        }
        for name in _TINY
    }
)
register_networks(__name__, TinyAttn, _TINY)
