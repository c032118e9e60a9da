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
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.layers import Attention
from timm.models import generate_default_cfgs, register_model, register_notrace_function
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn

from ea_vision.layers import (
    TokenAttention,
    TokenConv,
    ValueResidual,
    create_evolution,
    evolution_class,
    evolution_options,
)
from ea_vision.models._build import Network, build_network, cifar_cfg, register_networks
from ea_vision.models._chain import AttnStage, check_numbers, checkpoint, take_indices_of
from ea_vision.models._convert import checkpoint_filter_fn

__all__ = ["EvolvingVisionTransformer", "EvolvingVisionTransformerDistilled"]

_logger = logging.getLogger(__name__)


class EvolvingBlock(Block):
    """timm's Block; (x, prev_logits) -> (x, logits). A dropped block still hands its maps on."""

    def forward(
            self, x: Tensor, prev_logits: Tensor | None = None, feat_size: tuple[int, int] | None = None,
            first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.token_conv is not None:
            assert feat_size is not None
            x = self.token_conv(x, feat_size)
        y, logits = self.attn(self.norm1(x), prev_logits, feat_size, first_values)
        x = x + self.drop_path1(self.ls1(y))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x, logits

    def values_of(self, x: Tensor) -> Tensor:
        """Return the attention's values, (B, K, T, D), of the block's input (B, T, C)."""
        return self.attn.values_of(self.norm1(x))


class EvolvingResPostBlock(ResPostBlock):
    """timm's ResPostBlock; (x, prev_logits) -> (x, logits)."""

    def forward(
            self, x: Tensor, prev_logits: Tensor | None = None, feat_size: tuple[int, int] | None = None,
            first_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.token_conv is not None:
            assert feat_size is not None
            x = self.token_conv(x, feat_size)
        y, logits = self.attn(x, prev_logits, feat_size, first_values)
        x = x + self.drop_path1(self.norm1(y))
        x = x + self.drop_path2(self.norm2(self.mlp(x)))
        return x, logits

    def values_of(self, x: Tensor) -> Tensor:
        """Return the attention's values, (B, K, T, D), of the block's input (B, T, C)."""
        return self.attn.values_of(x)


class TokenStage(AttnStage):
    """A transformer's blocks: (x, prev_logits, (H, W) of the patches) -> (x, logits).

    spatial: whether a block needs the patches' (H, W).
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.spatial = any(block.token_conv is not None or getattr(block.attn.evolution, "spatial", False)
                           for block in self)
        self.carries_values = any(block.attn.value_residual is not None for block in self)

    def forward(
            self, x: Tensor, prev_logits: Tensor | None = None, feat_size: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        logits = prev_logits
        first_values: Tensor | None = None
        if self.carries_values:
            first_values = self[0].values_of(x)
        for block in self:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x, logits = checkpoint(block, x, logits, feat_size, first_values)
            else:
                x, logits = block(x, logits, feat_size, first_values)
        return x, logits


_BLOCKS = {Block: EvolvingBlock, ResPostBlock: EvolvingResPostBlock}


@torch.fx.wrap
@register_notrace_function
def _check_no_mask(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise ValueError("maps that evolve take no mask (their convolutions would read what it hides): "
                         "attn_mask=None and is_causal=False required")


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
    ) -> None:
        check_starts(value_residual=value_residual, token_conv=token_conv)
        options = {name: kwargs.pop(name) for name in evolution_options() if name in kwargs}
        super().__init__(*args, **kwargs)
        reason = reason_against(self)
        if reason is not None:
            raise ValueError(f"{type(self).__name__} must be able to evolve: {reason}")
        options = _with_start(evolution, options)
        evolve_blocks(self, kind=evolution, attn_layers=attn_layers, prefix=prefix, options=options,
                       value_residual=value_residual, token_conv=token_conv)

    @staticmethod
    def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Make a checkpoint of timm's network, or of ours, fit `model`.

        Where it has no evolution at all, the model's stays at its start. An attention pooling that the model lacks is
        left out (SigLIP's checkpoints have one).
        """
        state = timm_filter(checkpoint_filter_fn(state_dict, model), model, adapt_layer_scale=True)
        if model.attn_pool is None:
            state = {name: tensor for name, tensor in state.items() if not name.startswith("attn_pool.")}
        if not any(_is_added(name) for name in state):
            start = {name: tensor for name, tensor in model.state_dict().items() if _is_added(name)}
            _logger.info("checkpoint without evolution: %d tensors of the maps' convolutions and gates stay at their "
                         "start", len(start))
            state.update(start)
        return state

    def _embed(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> tokens (B, T, C), timm's steps before the blocks."""
        x = self.patch_embed(x)
        x = self._pos_embed(x)
        x = self.patch_drop(x)
        return self.norm_pre(x)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, in_chans, H, W) -> (B, T, C).

        Raises:
            ValueError: a mask.
        """
        _check_no_mask(attn_mask, is_causal)
        feat_size: tuple[int, int] | None = None
        if self.blocks.spatial:
            feat_size = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        x, logits = self.blocks(self._embed(x), None, feat_size)
        return self.norm(x)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        self.blocks.grad_checkpointing = enable

    def forward_intermediates(
            self,
            x: Tensor,
            indices: int | list[int] | None = None,
            return_prefix_tokens: bool = False,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = "NCHW",
            intermediates_only: bool = False,
            output_dict: bool = False,
            attn_mask: Tensor | None = None,
            is_causal: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
        """The blocks' outputs, as timm's `VisionTransformer.forward_intermediates` gives them.

        Args:
            x: (B, in_chans, H, W).
            indices: the last n blocks if a number, all if None, else those listed, counted from 0.
            return_prefix_tokens: pairs (patches, prefix tokens) in place of the patches alone.
            norm: normalise them as the last one.
            stop_early: stop after the last one wanted.
            output_fmt: "NCHW" for maps, "NLC" for tokens.
            intermediates_only: leave out the final features.
            output_dict: a dict with "image_features", "image_intermediates" and "image_intermediates_prefix".

        Raises:
            ValueError: another output_fmt, an index that does not exist, or a mask.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        _check_no_mask(attn_mask, is_causal)
        take_indices, max_index = take_indices_of(len(self.blocks), indices)
        B, _, height, width = x.shape
        H, W = self.patch_embed.dynamic_feat_size((height, width))
        x, logits, taken = self._embed(x), None, []
        first_values = self.blocks[0].values_of(x) if self.blocks.carries_values else None
        for index, block in enumerate(self.blocks[:max_index + 1] if stop_early else self.blocks):
            carried = (x, logits, (H, W), first_values)
            x, logits = checkpoint(block, *carried) if self.grad_checkpointing else block(*carried)
            if index in take_indices:
                taken.append(self.norm(x) if norm else x)

        P = self.num_prefix_tokens
        prefix_tokens, patches = [y[:, :P] for y in taken], [y[:, P:] for y in taken]
        if output_fmt == "NCHW":
            patches = [y.reshape(B, H, W, -1).permute(0, 3, 1, 2).contiguous() for y in patches]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if P and return_prefix_tokens:
                result["image_intermediates_prefix"] = prefix_tokens
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        if P and return_prefix_tokens:
            patches = list(zip(patches, prefix_tokens, strict=True))
        return patches if intermediates_only else (self.norm(x), patches)


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


NETWORK_CLASSES = {VisionTransformer: EvolvingVisionTransformer,
                    VisionTransformerDistilled: EvolvingVisionTransformerDistilled}


def reason_against(model: nn.Module) -> str | None:
    """Return why the blocks of a VisionTransformer cannot evolve, or None."""
    for index, block in enumerate(model.blocks):
        if type(block) not in _BLOCKS:
            known = " or ".join(cls.__name__ for cls in _BLOCKS)
            return f"blocks.{index} must be timm's {known}, got {type(block).__name__}"
        if type(block.attn) is not Attention:
            return f"blocks.{index}.attn must be timm's Attention, got {type(block.attn).__name__}"
        if not isinstance(block.attn.qkv.weight, Tensor):
            return f"blocks.{index}.attn.qkv must be a Linear layer that is not quantised, got {block.attn.qkv}"
        if block.attn.num_heads != model.blocks[0].attn.num_heads:
            return (f"blocks.{index}.attn must have the {model.blocks[0].attn.num_heads} heads of the blocks before, "
                    f"got {block.attn.num_heads}")
    if not isinstance(model.patch_drop, nn.Identity):
        return f"patch_drop must be off (tokens would stop being neighbours), got {model.patch_drop}"
    return None


def check_starts(**options: bool | str) -> None:
    for name, value in options.items():
        if value not in (False, True, "paper"):
            raise ValueError(f"{name} must be False, True or 'paper', got {value!r}")


def _is_added(name: str) -> bool:
    """Return whether a tensor of this name is none of timm's plain network."""
    return any(part in name for part in (".attn.evolution.", ".attn.value_residual.", ".token_conv."))


def _with_start(kind: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return an evolution's options with a `start`: the identity, unless they set an option of that start and no
    learnable gates."""
    given = {name: value for name, value in options.items() if value is not None}
    if kind is None or "start" in given:
        return given
    chooses = any(name in given for name in evolution_class(kind).identity_start if name != "learnable")
    return {"start": "identity" if given.get("learnable", not chooses) else "paper", **given}


def _evolving_layers(depth: int, class_token_alone: bool, kind: str, attn_layers: Sequence[int] | None,
                     prefix: str) -> list[int]:
    """Return the blocks, counted from 1, that are to evolve; see `evolve` for the errors."""
    kind_class = evolution_class(kind)
    if attn_layers is not None:
        check_numbers("attn_layers", attn_layers)
    if prefix not in ("convolve", "pass"):
        raise ValueError(f"prefix must be 'convolve' or 'pass', got {prefix!r}")
    # the class token's row is all that is read of the last map, and it would pass the convolution
    idle_last = (prefix == "pass" or kind_class.spatial) and class_token_alone
    possible = range(1 + kind_class.reads_previous, depth + (not idle_last))
    chosen = list(possible) if attn_layers is None else sorted(set(attn_layers))
    wrong = [layer for layer in chosen if layer not in possible]
    if wrong or not chosen:
        why = "the first block has no predecessor"
        if idle_last:
            passing = "prefix='pass'" if prefix == "pass" else "prefix tokens that pass"
            why += f", and with {passing} a convolution in the last would never get a gradient, since only the class " \
                   "token's row is read there"
        raise ValueError(f"attn_layers of this model that can evolve are {list(possible)} of {depth} ({why}); "
                         f"got {wrong or 'none'}")
    return chosen


def new_mechanisms(
        blocks: Sequence[nn.Module], num_heads: int, channels: int, num_prefix_tokens: int, class_token_alone: bool, *,
        kind: str | None, attn_layers: Sequence[int] | None, prefix: str, options: dict[str, Any],
        value_residual: bool | str, token_conv: bool | str,
) -> list[dict[str, Any]]:
    """Return for each block its new `evolution`, `value_residual` and `token_conv`, each a module or None, and
    `need_logits`.

    class_token_alone: whether nothing but the class token's row of the last map is read.
    """
    depth, weight = len(blocks), next(blocks[0].parameters())
    dd = {"device": weight.device, "dtype": weight.dtype}
    chosen = [] if kind is None else _evolving_layers(depth, class_token_alone, kind, attn_layers, prefix)
    if kind is None:
        create_evolution(None, 1, **options)  # refuses options
    reads = kind is not None and evolution_class(kind).reads_previous
    made = []
    for number, block in enumerate(blocks, start=1):
        evolution = create_evolution(kind, num_heads, channels=channels, **dd, **options) if number in chosen else None
        if hasattr(evolution, "num_prefix_tokens"):
            evolution.num_prefix_tokens = num_prefix_tokens if prefix == "pass" or evolution.spatial else 0
        elif prefix == "pass" and evolution is not None:
            raise ValueError(f"prefix='pass' needs an evolution with num_prefix_tokens, got {kind!r}")
        modules = {
            "evolution": evolution,
            "value_residual": ValueResidual(value_residual != "paper", **dd) if value_residual and number > 1 else None,
            "token_conv": TokenConv(channels, num_prefix_tokens, token_conv != "paper", **dd)
            if token_conv and number > 1 else None}
        for module in filter(None, modules.values()):
            module.train(block.training)
        made.append({**modules, "need_logits": reads and number + 1 in chosen})
    return made


def evolve_blocks(model: nn.Module, **mechanisms: Any) -> None:
    """Turn the blocks of a VisionTransformer, in place, into evolving ones; the keywords of `new_mechanisms`."""
    made = new_mechanisms(model.blocks, model.blocks[0].attn.num_heads, model.embed_dim, model.num_prefix_tokens,
                          model.global_pool == "token", **mechanisms)
    for block, new in zip(model.blocks, made, strict=True):
        TokenAttention.of(block.attn, new["evolution"], new["need_logits"])
        block.attn.value_residual, block.token_conv = new["value_residual"], new["token_conv"]
        block.__class__ = _BLOCKS[type(block)]
    model.blocks = TokenStage(*model.blocks)
    model.blocks.training, model.blocks.grad_checkpointing = model.training, model.grad_checkpointing


def plain_again(model: nn.Module) -> VisionTransformer:
    """Turn an evolving network, in place, into timm's, without its mechanisms."""
    plain_blocks = {evolving: block for block, evolving in _BLOCKS.items()}
    for block in model.blocks:
        block.attn.back()
        del block.token_conv
        block.__class__ = plain_blocks[type(block)]
    training = model.blocks.training
    model.blocks = nn.Sequential(*model.blocks)
    model.blocks.training = training
    model.__class__ = next(plain for plain, evolving in NETWORK_CLASSES.items() if evolving is type(model))
    return model


_VIT = {"patch_size": 16}
_SIZES = {"tiny": dict(embed_dim=192, depth=12, num_heads=3), "small": dict(embed_dim=384, depth=12, num_heads=6),
          "base": dict(embed_dim=768, depth=12, num_heads=12)}
_PLAIN = {f"{family}_{size}_patch16_224": _VIT | options for family in ("vit", "deit")
          for size, options in _SIZES.items()}
_PLAIN["vit_base_patch16_siglip_gap_224"] = _VIT | _SIZES["base"] | dict(
    class_token=False, global_pool="avg", fc_norm=False)


def _cfgs(kind: str, plain: str) -> dict[str, Any]:
    """timm's own weights of the plain network, its default first."""
    first = f"{plain}.{timm.get_pretrained_cfg(plain).tag}"
    tagged = sorted(timm.list_pretrained(f"{plain}.*"), key=lambda name: name != first)
    return {f"{kind}_{name}": replace(
        timm.get_pretrained_cfg(name), description=f"identity start from timm's {name}, not fine-tuned")
        for name in tagged}


_NETWORKS, _CFGS = {}, {}
for _kind in ("ea", "pa"):
    for _name, _options in _PLAIN.items():
        _NETWORKS[f"{_kind}_{_name}"] = Network(
            f"{_kind.upper()} in timm's {_name}: learnable gates that begin at 0, where it computes what that does; "
            "pretrained weights are timm's, not fine-tuned.", {**_options, "evolution": _kind})
        _CFGS |= _cfgs(_kind, _name)
_CFGS["vit_mini_patch4_32"] = cifar_cfg("patch_embed.proj", "head", pool_size=None, fixed_input_size=True)
default_cfgs = generate_default_cfgs(_CFGS)
register_networks(__name__, EvolvingVisionTransformer, _NETWORKS)


@register_model
def vit_mini_patch4_32(pretrained: bool = False, **kwargs: Any) -> EvolvingVisionTransformer:
    """Small ViT for 32x32 images, ours: 5 blocks, 64 wide, 4 heads, mean pooling, plain unless `evolution` says how."""
    options = dict(img_size=32, patch_size=4, embed_dim=64, depth=5, num_heads=4, class_token=False, global_pool="avg",
                   fc_norm=False, evolution=None)
    return build_network(EvolvingVisionTransformer, "vit_mini_patch4_32", pretrained, **{**options, **kwargs})
