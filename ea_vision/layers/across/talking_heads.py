"""Linear maps over the heads before and after the softmax: talking heads, as in CaiT."""

import torch
from torch import Tensor, nn

from ea_vision.layers.evolution import Evolution, is_altered, register_evolution


@register_evolution("talking_heads")
class TalkingHeads(Evolution):
    """Mix the logits of all heads, and then their probabilities.

        L[a] = sum_b W_l[a, b] S[b] + b_l[a],   A = softmax(L),   A'[a] = sum_b W_w[a, b] A[b] + b_w[a]

    Papers: `Talking-Heads Attention` (2020) - https://arxiv.org/abs/2003.02436
            `Going deeper with Image Transformers` (CaiT; form and parameter names follow its code) -
            https://arxiv.org/abs/2103.17239

    Identity start: W = I, b = 0. The paper's start (CaiT's code): W normal with std 0.02, truncated at 2, and b = 0, so
    that all logits are nearly 0. Every layer has the mechanism; nothing passes from layer to layer. The softmax cancels
    b_l, a constant for each row: its gradient is zero up to rounding.

    Args:
        num_heads: K.
        identity: whether to begin at the identity.
    """

    reads_previous = False
    mixes_attn = True
    identity_start = {"identity": True}
    part_names = ("softmax",)

    def __init__(self, num_heads: int, identity: bool = False, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.proj_l = nn.Linear(num_heads, num_heads, **dd)
        self.proj_w = nn.Linear(num_heads, num_heads, **dd)
        for proj in (self.proj_l, self.proj_w):
            if identity:
                nn.init.eye_(proj.weight)
            else:
                nn.init.trunc_normal_(proj.weight, std=0.02)
            nn.init.zeros_(proj.bias)

    def forward(self, logits: Tensor, prev_logits: Tensor) -> Tensor:
        return mix_heads(logits, self.proj_l)

    def mix_attn(self, attn: Tensor) -> Tensor:
        return mix_heads(attn, self.proj_w)

    def changes_nothing(self) -> bool:
        if not _is_plain(self.proj_l) or not _is_plain(self.proj_w) or self.proj_w.bias.any():
            return False
        eye = torch.eye(len(self.proj_l.weight)).to(self.proj_l.weight)
        return torch.equal(self.proj_l.weight, eye) and torch.equal(self.proj_w.weight, eye)


def mix_heads(maps: Tensor, proj: nn.Linear) -> Tensor:
    """Mix the heads of maps (B, K, N, M) by a linear layer over K features."""
    if not _is_plain(proj):
        return proj(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    # calling the layer, or a 1x1 convolution, takes longer on a CPU
    mixed = torch.einsum("ab,nbij->naij", proj.weight, maps)
    return mixed + proj.bias.to(mixed.dtype)[:, None, None]


def _is_plain(proj: nn.Module) -> bool:
    """Return whether a layer computes just its weight and bias, without adapter (LoRA) or hook."""
    return type(proj) is nn.Linear and proj.bias is not None and not is_altered(proj)
