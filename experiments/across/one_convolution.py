"""The rival of token_conv: the verdict's small ViT with one convolution over the tokens, after the first block.

    python -m experiments.across.one_convolution train-cifar --model vit_mini_one_conv ...    # ea_vision's commands

Paper: `Conditional Positional Encodings for Vision Transformers` - https://arxiv.org/abs/2102.10882 (its positional
encoding generator). The convolution and its start are those of token_conv="paper" before the second block.
"""

import sys
from typing import Any

import timm
from timm.models import register_model

from ea_vision.__main__ import main
from ea_vision.models.vision_transformer import EvolvingVisionTransformer


@register_model
def vit_mini_one_conv(pretrained: bool = False, **kwargs: Any) -> EvolvingVisionTransformer:
    """Create `vit_mini_patch4_32` with one convolution over the tokens, before the second block."""
    network = timm.create_model("vit_mini_patch4_32", pretrained, token_conv="paper", **kwargs)
    for block in network.blocks[2:]:
        block.token_conv = None
    return network


if __name__ == "__main__":
    sys.exit(main())
