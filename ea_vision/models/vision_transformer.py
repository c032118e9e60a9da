"""timm's vision transformers with attention maps that evolve from block to block: EA-ViT, PA-ViT, EA-DeiT, PA-DeiT.

    model = timm.create_model("ea_vit_small_patch16_224", pretrained=True)      # timm's weights, identity start
    model = timm.create_model("ea_vit_small_patch16_224", alpha=0.5, beta=1.0)  # the papers' constants, from scratch
    model = ea_vision.evolve(timm.create_model("vit_base_patch16_224.augreg2_in21k_ft_in1k", pretrained=True))
    plain = ea_vision.unevolve(model)                                           # an error once the gates have moved

No paper has these networks: PA and EA report BERT, whose maps are convolved whole, including the class token's row and
column, as here unless prefix="pass". With alpha = beta = 0 a network computes what timm's plain one does. So with
learnable gates, fine-tuning a pretrained transformer begins where its training ended. State dicts have timm's names,
and `blocks.{i}.attn.evolution.*` from the second block on. Each head and layer needs a T x T map, which timm's fused
attention never stores: use these networks for images of 224 pixels and up to about 600 tokens.

Papers:
* ViT: `An Image is Worth 16x16 Words` - https://arxiv.org/abs/2010.11929
* DeiT: `Training data-efficient image transformers` - https://arxiv.org/abs/2012.12877
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895

Shape letters: B batch, C channels, H x W image in pixels, K heads, P prefix tokens (class token, registers), T tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import timm
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn

from ea_vision.layers import evolution_class
from ea_vision.layers.fit_weights import checkpoint_filter_fn
from ea_vision.models._attention_config import take_evolution_options
from ea_vision.models._build import Network, build_network, cifar_cfg, register_networks
from ea_vision.models._mechanisms import Mechanisms
from ea_vision.models.any_transformer import evolve_blocks

_logger = logging.getLogger(__name__)


class EvolvingVisionTransformer(VisionTransformer):
    """timm's VisionTransformer whose attention maps evolve.

    Args:
        evolution: a registered kind, "ea", "pa", "conv2d", ...; None for maps that do not evolve.
        attn_layers: the blocks that evolve, counted from 1 as in `record_attention`. None: all, except the first if the
            kind reads the previous block's maps.
        prefix: "convolve": the maps' convolutions run over all T x T (as in the papers); "pass": over the patches only,
            and the prefix tokens' rows and columns bypass them.
        value_residual: whether to mix the first block's values into those of the others (ResFormer). True begins as the
            plain network, "paper" with 0.5 of each.
        token_conv: whether each block except the first begins with a depthwise 3x3 convolution over the patches. True
            begins as the plain network, "paper" with random kernels.
        alpha, beta, learnable, kernel_size, ...: options of the evolution. By default it begins as timm's plain network
            and learns from there. It begins as in its paper with start="paper" or learnable=False, or if an option that
            defines the identity start (alpha, beta) is set and learnable is not.
        **kwargs: those of timm's VisionTransformer.

    Raises:
        ValueError: the evolution does not have an option, or layers, blocks, attention or a patch dropout do not allow
            evolution.
    """

    feature_indices = 3  # by default features_only returns the last three, as in timm

    def __init__(
        self,
        *args: Any,
        evolution: str | None = "ea",
        attn_layers: Sequence[int] | None = None,
        prefix: str = "convolve",
        value_residual: bool | str = False,
        token_conv: bool | str = False,
        **kwargs: Any,
    ):
        options = take_evolution_options(kwargs)
        mechanisms = Mechanisms(
            evolution,
            attn_layers,
            prefix,
            token_conv,
            value_residual,
            _with_start(evolution, options),
        )
        super().__init__(*args, **kwargs)
        evolve_blocks(self, mechanisms)

    @staticmethod
    def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Make a checkpoint of timm's network, or of an evolving one, fit `model`.

        If the checkpoint has no evolution at all, the model's stays at its start. An attention pooling that the model
        does not have is dropped (SigLIP's checkpoints have one).
        """
        converted = checkpoint_filter_fn(state_dict, model)
        state = timm_filter(converted, model, adapt_layer_scale=True)
        if model.attn_pool is None:
            state = {name: state[name] for name in state if not name.startswith("attn_pool.")}
        if any(_is_added(name) for name in state):
            return state
        start = {name: tensor for name, tensor in model.state_dict().items() if _is_added(name)}
        _logger.info(
            "checkpoint without evolution: %d tensors of the maps' convolutions and gates stay at their start",
            len(start),
        )
        return {**state, **start}


_ADDED = (".attn.evolution.", ".attn.value_residual.", ".token_conv.")


def _is_added(name: str) -> bool:
    """Return whether a tensor of this name is one that timm's plain network does not have."""
    return any(part in name for part in _ADDED)


def _with_start(kind: str | None, options: dict) -> dict:
    """Return an evolution's options with a `start`.

    It is the identity if gates learn: by default, unless the options set one that defines the identity start.
    """
    options_set = {name: value for name, value in options.items() if value is not None}
    if kind is None or "start" in options_set:
        return options_set
    start_options = set(evolution_class(kind).identity_start) - {"learnable"}
    chooses_gates = bool(start_options & set(options_set))
    learns = options_set.get("learnable", not chooses_gates)
    return {"start": "identity" if learns else "paper", **options_set}


_TINY = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
_SMALL = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
_BASE = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
_SIGLIP = dict(**_BASE, class_token=False, global_pool="avg", fc_norm=False)


_PLAIN = {
    "vit_tiny_patch16_224": _TINY,
    "vit_small_patch16_224": _SMALL,
    "vit_base_patch16_224": _BASE,
    "deit_tiny_patch16_224": _TINY,
    "deit_small_patch16_224": _SMALL,
    "deit_base_patch16_224": _BASE,
    "vit_base_patch16_siglip_gap_224": _SIGLIP,
}
_NETWORKS = {}
for _kind in ("ea", "pa"):
    for _plain, _options in _PLAIN.items():
        _NETWORKS[f"{_kind}_{_plain}"] = Network(
            f"{_kind.upper()} in timm's {_plain}: learnable gates begin at 0, so that it begins as the plain network; "
            "pretrained weights are timm's, not fine-tuned.",
            {**_options, "evolution": _kind},
        )


def _cfgs(name: str) -> dict:
    """Return the configurations of timm's weights for an evolving network's plain one, timm's default first."""
    kind, _, plain = name.partition("_")
    first = f"{plain}.{timm.get_pretrained_cfg(plain).tag}"
    cfgs = {}
    for tagged in sorted(timm.list_pretrained(f"{plain}.*"), key=lambda each: each != first):
        cfgs[f"{kind}_{tagged}"] = replace(
            timm.get_pretrained_cfg(tagged),
            description=f"identity start from timm's {tagged}, not fine-tuned",
        )
    return cfgs


_CFGS = {
    "vit_mini_patch4_32": cifar_cfg(
        "patch_embed.proj", "head", pool_size=None, fixed_input_size=True
    )
}
for _name in _NETWORKS:
    _CFGS |= _cfgs(_name)
default_cfgs = generate_default_cfgs(_CFGS)
register_networks(__name__, EvolvingVisionTransformer, _NETWORKS)


@register_model
def vit_mini_patch4_32(pretrained: bool = False, **kwargs: Any) -> EvolvingVisionTransformer:
    """Create the small ViT for 32x32 images: 5 blocks, 64 wide, 4 heads, mean pooling, plain without `evolution`."""
    options = dict(
        img_size=32,
        patch_size=4,
        embed_dim=64,
        depth=5,
        num_heads=4,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
        evolution=None,
    )
    return build_network(
        EvolvingVisionTransformer, "vit_mini_patch4_32", pretrained, **{**options, **kwargs}
    )
