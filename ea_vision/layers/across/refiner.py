"""Maps expanded to more heads and convolved after the softmax: Refiner."""

import torch.nn.functional as F
from torch import Tensor, nn

from ea_vision.layers.across.reattention import Gained
from ea_vision.layers.evolution import register_evolution


@register_evolution("refiner")
class Refiner(Gained):
    """Refine the probabilities by distributed local attention, an inverted bottleneck over the N x N maps of all heads.

        D(A) = A + BN3(W3 relu6(BN2(depthwise3x3(relu6(BN1(W1 A))))));   R = BN(D(A))
        A' = R (paper),   A' = A + gain * R (with a gain)

    Paper: `Refiner: Refining Self-attention for Vision Transformers` - https://arxiv.org/abs/2106.03714

    As in the paper, each layer refines its own maps (`apply_transform=True` of the authors' code). In the authors'
    released networks every second block has no queries and keys; it refines the maps of the block before, scaled by
    head_dim ** -0.5. Here every layer has the mechanism, and nothing passes from layer to layer.

    Identity start: the paper's form has none. This package adds a learned gain, which begins at 0.

    Args:
        num_heads: K.
        expansion: heads between W1 and W3, as a multiple of K.
        gain: start of the learned gain; None for the paper's form.
    """

    def __init__(
        self,
        num_heads: int,
        expansion: float = 3.0,
        gain: float | None = None,
        device=None,
        dtype=None,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(gain, **dd)
        wide = round(num_heads * expansion)
        self.conv_exp = nn.Conv2d(num_heads, wide, 1, bias=False, **dd)
        self.bn1 = nn.BatchNorm2d(wide, **dd)
        self.depth_sep_conv = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False, **dd)
        self.bn2 = nn.BatchNorm2d(wide, **dd)
        self.conv_pro = nn.Conv2d(wide, num_heads, 1, bias=False, **dd)
        self.bn3 = nn.BatchNorm2d(num_heads, **dd)
        self.adapt_bn = nn.BatchNorm2d(num_heads, **dd)

    def refine(self, attn: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv_exp(attn)))
        x = F.relu6(self.bn2(self.depth_sep_conv(x)))
        return self.adapt_bn(attn + self.bn3(self.conv_pro(x)))
