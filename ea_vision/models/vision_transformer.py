"""timm's vision transformers with attention maps that evolve from block to block: EA-ViT, PA-ViT, EA-DeiT, PA-DeiT.

    model = timm.create_model("ea_vit_small_patch16_224", pretrained=True)      # timm's weights, identity start
    model = timm.create_model("ea_vit_small_patch16_224", alpha=0.5, beta=1.0)  # the papers' constants, from scratch
    model = ea_vision.evolve(timm.create_model("vit_base_patch16_224.augreg2_in21k_ft_in1k", pretrained=True))
    plain = ea_vision.unevolve(model)                                           # an error once the gates have moved

No paper has these networks: PA and EA report BERT, whose maps are convolved whole, the class token's row and column
among them, as here unless prefix="pass". A network with alpha = beta = 0 computes what timm's plain one does, so with
learnable gates the fine-tuning of a pretrained transformer begins where its training ended. State dicts have timm's
names, and besides `blocks.{i}.attn.evolution.*` from the second block on. The maps are T x T a head and layer, which
timm's fused attention never keeps: for images of 224 pixels and up to about 600 tokens.

Papers:
* ViT: `An Image is Worth 16x16 Words` - https://arxiv.org/abs/2010.11929
* DeiT: `Training data-efficient image transformers` - https://arxiv.org/abs/2012.12877
* PA: `Predictive Attention Transformer` (2020) - https://openreview.net/forum?id=YQVjbJPnPc9
* EA: `Evolving Attention with Residual Convolutions` (ICML 2021) - https://arxiv.org/abs/2102.12895

Shape letters: B batch, C channels, H x W image in pixels, K heads, P prefix tokens (class token, registers), T tokens.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import Attention
from timm.models import generate_default_cfgs, register_model, register_notrace_function
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn

from ea_vision.layers import TokenAttention, evolution_class, evolution_options
from ea_vision.models._build import Network, build_network, cifar_cfg, register_networks
from ea_vision.models._chain import AttnStage, checkpoint
from ea_vision.models._convert import checkpoint_filter_fn
from ea_vision.models._mechanisms import Mechanisms

_logger = logging.getLogger(__name__)


class EvolvingBlock(Block):
    """timm's Block; (x, prev_logits) -> (x, logits). A dropped block still hands its maps on."""

    def forward(
        self,
        x: Tensor,
        prev_logits: Tensor | None = None,
        feat_size: tuple[int, int] | None = None,
        first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.token_conv is not None:
            assert feat_size is not None
            x = self.token_conv(x, feat_size)
        y, logits = self.attn(self.norm1(x), prev_logits, feat_size, first_values)
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x, logits


class TokenStage(AttnStage):
    """A transformer's blocks: (x, prev_logits, (H, W) of the patches) -> (x, logits).

    spatial: whether a block needs the patches' (H, W).
    carries_values: whether a block reads the first one's values.
    """

    def __init__(self, *blocks: nn.Module):
        super().__init__(*blocks)
        self.spatial = any(
            block.token_conv is not None or getattr(block.attn.evolution, "spatial", False)
            for block in self
        )
        self.carries_values = any(block.attn.value_residual is not None for block in self)

    def first_values(self, x: Tensor) -> Tensor | None:
        """Return the first block's values, (B, K, T, D), of its input (B, T, C), where a block reads them."""
        return self[0].attn.values_of(self[0].norm1(x)) if self.carries_values else None

    def forward(
        self,
        x: Tensor,
        prev_logits: Tensor | None = None,
        feat_size: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        logits, first_values = prev_logits, self.first_values(x)
        for block in self:
            if self.grad_checkpointing:
                x, logits = checkpoint(block, x, logits, feat_size, first_values)
            else:
                x, logits = block(x, logits, feat_size, first_values)
        return x, logits

    def one_by_one(self, feat_size: tuple[int, int]) -> list[Callable[[Tensor], Tensor]]:
        """Return the blocks as functions of the tokens alone, to be called once each and in order."""
        logits = first_values = None

        def call(x: Tensor, block: nn.Module) -> Tensor:
            nonlocal logits, first_values
            if block is self[0]:
                first_values = self.first_values(x)
            run = partial(checkpoint, block) if self.grad_checkpointing else block
            x, logits = run(x, logits, feat_size, first_values)
            return x

        return [partial(call, block=block) for block in self]


@torch.fx.wrap
@register_notrace_function
def refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raise ValueError if attention is to be masked, in whatever way."""
    if attn_mask is not None or is_causal:
        raise ValueError(
            "maps that evolve take no mask (their convolutions would read what it hides): "
            "attn_mask=None and is_causal=False required"
        )


class _Evolves:
    """The common part of the evolving networks, beside timm's class."""

    feature_indices = 3  # what features_only returns unless asked, timm's way: the last three

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
        options = {name: kwargs.pop(name) for name in evolution_options() if name in kwargs}
        mechanisms = Mechanisms(
            evolution,
            attn_layers,
            prefix,
            token_conv,
            value_residual,
            _with_start(evolution, options),
        )
        super().__init__(*args, **kwargs)
        reason = reason_against_blocks(self)
        if reason is not None:
            raise ValueError(f"{type(self).__name__} must be able to evolve: {reason}")
        give(self, mechanisms)

    @staticmethod
    def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Make a checkpoint of timm's network, or of ours, fit `model`.

        Where it has no evolution at all, the model's stays at its start. An attention pooling that the model lacks is
        left out (SigLIP's checkpoints have one).
        """
        state = timm_filter(checkpoint_filter_fn(state_dict, model), model, adapt_layer_scale=True)
        if model.attn_pool is None:
            state = {
                name: tensor for name, tensor in state.items() if not name.startswith("attn_pool.")
            }
        if not any(_is_added(name) for name in state):
            start = {name: tensor for name, tensor in model.state_dict().items() if _is_added(name)}
            _logger.info(
                "checkpoint without evolution: %d tensors of the maps' convolutions and gates stay at their "
                "start",
                len(start),
            )
            state.update(start)
        return state

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Turn (B, in_chans, H, W) into (B, T, C).

        Raises:
            ValueError: a mask.
        """
        refuse_masks(attn_mask, is_causal)
        feat_size: tuple[int, int] | None = None
        if self.blocks.spatial:
            feat_size = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        x = self._pos_embed(self.patch_embed(x))
        x, logits = self.blocks(self.norm_pre(x), None, feat_size)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        *args: Any,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the blocks' outputs as timm's method of this name, whose arguments it takes.

        Raises:
            ValueError: a mask.
        """
        refuse_masks(attn_mask, is_causal)
        as_timms = copy.copy(
            self
        )  # shares all but the blocks, which timm calls with the tokens alone
        feat_size = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        as_timms._modules = {**self._modules, "blocks": self.blocks.one_by_one(feat_size)}
        as_timms.grad_checkpointing = False  # the functions know it
        return super(_Evolves, as_timms).forward_intermediates(x, *args, **kwargs)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        self.blocks.grad_checkpointing = enable


class EvolvingVisionTransformer(_Evolves, VisionTransformer):
    """timm's VisionTransformer whose attention maps evolve.

    Args:
        evolution: a registered kind, "ea", "pa", "conv2d", ...; None for maps that do not evolve.
        attn_layers: the blocks that evolve, counted from 1 as `record_attention` does; None is all, without the first
            where the kind reads the predecessor's maps.
        prefix: "convolve": the maps' convolutions run over all T x T (the papers' way); "pass": over the patches, and
            the prefix tokens' rows and columns pass them by.
        value_residual: mix the first block's values into the others' (ResFormer): True begins as the plain network,
            "paper" at halves.
        token_conv: a depthwise 3x3 convolution over the patches before each block but the first: True begins as the
            plain network, "paper" with random kernels.
        alpha, beta, learnable, kernel_size, ...: the evolution's. Unless one is set on which its identity start depends
            (alpha, beta), it begins there, as timm's plain network, and learns; start="paper" begins as its paper does.
        **kwargs: those of timm's VisionTransformer.

    Raises:
        ValueError: an option that the evolution does not have, layers that cannot evolve, or blocks, attention or a
            patch dropout that do not allow it.
    """


class EvolvingVisionTransformerDistilled(_Evolves, VisionTransformerDistilled):
    """timm's VisionTransformerDistilled (DeiT with a distillation token) whose attention maps evolve.

    Args: those of `EvolvingVisionTransformer`.
    """


NETWORK_CLASSES = {
    VisionTransformer: EvolvingVisionTransformer,
    VisionTransformerDistilled: EvolvingVisionTransformerDistilled,
}


def reason_against_blocks(model: nn.Module) -> str | None:
    """Return why the blocks of a VisionTransformer cannot become ours, or None."""
    for index, block in enumerate(model.blocks):
        for path, module, known in (
            (f"blocks.{index}", block, Block),
            (f"blocks.{index}.attn", block.attn, Attention),
        ):
            if type(module) is not known:
                return f"{path} must be timm's {known.__name__}, got {type(module).__name__}"
    if not isinstance(model.patch_drop, nn.Identity):
        return (
            f"patch_drop must be off (tokens would stop being neighbours), got {model.patch_drop}"
        )
    return None


def give(model: nn.Module, mechanisms: Mechanisms) -> None:
    """Turn the blocks of a VisionTransformer, in place, into evolving ones."""
    for block in model.blocks:
        TokenAttention.of(block.attn, None, False)
        block.__class__ = EvolvingBlock
    mechanisms.give(
        model.blocks,
        [block.attn for block in model.blocks],
        model.embed_dim,
        model.num_prefix_tokens,
        model.global_pool == "token",
    )
    stage = TokenStage(*model.blocks)
    stage.training, stage.grad_checkpointing = model.training, model.grad_checkpointing
    model.blocks = stage


def _is_added(name: str) -> bool:
    """Return whether a tensor of this name is none of timm's plain network."""
    return any(
        part in name for part in (".attn.evolution.", ".attn.value_residual.", ".token_conv.")
    )


def _with_start(kind: str | None, options: dict) -> dict:
    """Return an evolution's options with a `start`: the identity, unless they set an option of that start and no
    learnable gates."""
    given = {name: value for name, value in options.items() if value is not None}
    if kind is None or "start" in given:
        return given
    chooses = any(
        name in given for name in evolution_class(kind).identity_start if name != "learnable"
    )
    return {"start": "identity" if given.get("learnable", not chooses) else "paper", **given}


_VIT = {"patch_size": 16}
_SIZES = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
}
_PLAIN = {
    f"{family}_{size}_patch16_224": _VIT | options
    for family in ("vit", "deit")
    for size, options in _SIZES.items()
}
_PLAIN["vit_base_patch16_siglip_gap_224"] = (
    _VIT | _SIZES["base"] | dict(class_token=False, global_pool="avg", fc_norm=False)
)


def _cfgs(kind: str, plain: str) -> dict:
    """Return timm's own weights of the plain network, its default first."""
    first = f"{plain}.{timm.get_pretrained_cfg(plain).tag}"
    tagged = sorted(timm.list_pretrained(f"{plain}.*"), key=lambda name: name != first)
    return {
        f"{kind}_{name}": replace(
            timm.get_pretrained_cfg(name),
            description=f"identity start from timm's {name}, not fine-tuned",
        )
        for name in tagged
    }


_NETWORKS, _CFGS = {}, {}
for _kind in ("ea", "pa"):
    for _name, _options in _PLAIN.items():
        _NETWORKS[f"{_kind}_{_name}"] = Network(
            f"{_kind.upper()} in timm's {_name}: learnable gates that begin at 0, where it computes what that does; "
            "pretrained weights are timm's, not fine-tuned.",
            {**_options, "evolution": _kind},
        )
        _CFGS |= _cfgs(_kind, _name)
_CFGS["vit_mini_patch4_32"] = cifar_cfg(
    "patch_embed.proj", "head", pool_size=None, fixed_input_size=True
)
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
