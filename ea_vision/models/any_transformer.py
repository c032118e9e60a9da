"""Vision transformers of timm and torchvision whose attention maps evolve from block to block.

    model = ea_vision.evolve(timm.create_model("vit_small_patch16_dinov3", pretrained=True), "ea")
    model = ea_vision.evolve(torchvision.models.vit_b_16(), kind=None, token_conv=True, value_residual=True)
    plain = ea_vision.unevolve(model)                               # an error once the gates have moved

The network keeps its class. The classes of its blocks and their attention layers are replaced, in place, by subclasses
from this file: a block runs its own forward, in which the attention layer applies the mechanisms. What the next block
reads goes through a `Relay`.

Shape letters: B batch, C channels, K heads, T tokens, P prefix tokens, D width of a head.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from timm.layers import Attention, AttentionRope, PatchEmbed, apply_rot_embed_cat, to_2tuple
from timm.models import beit, cait, deit, eva, naflexvit, vision_transformer
from torch import Tensor, nn

from ea_vision.layers import AugmentedConv2d, MapsAttention
from ea_vision.layers.handing_on import (
    HandingBlock,
    Relay,
    check_found,
    remove_hooks,
    thread_of_forward,
    whole,
)
from ea_vision.layers.tracing import keep_whole
from ea_vision.models._mechanisms import Mechanisms, check_idle, refuse
from ea_vision.models.note import remember_evolution
from ea_vision.ops import Size


class PatchRelay(Relay):
    """A relay that begins with the size of the patches' grid."""

    def note_images(self, embedding: nn.Module, args: tuple[Any, ...]) -> None:
        """Note (H, W) of the patches, as a hook before the patch embedding."""
        images = args[0]
        if isinstance(images, torch.fx.Proxy):
            return  # the traced network runs this hook
        size = None
        if images.ndim == 4:
            size = _patches_of(embedding, *images.shape[-2:])
        self.note_size(size)


def _patches_of(embedding: nn.Module, height: int, width: int) -> Size:
    """Return how many patches (down, across) an embedding makes of an image."""
    if hasattr(embedding, "dynamic_feat_size"):
        return embedding.dynamic_feat_size((height, width))
    patch = getattr(embedding, "patch_size", None) or embedding.kernel_size
    patch_height, patch_width = to_2tuple(patch)
    return height // patch_height, width // patch_width


@keep_whole
class WholePatchEmbed(PatchEmbed):
    """timm's PatchEmbed. FX keeps it whole, so that the hook of `PatchRelay` runs in the traced network, too."""


class EvolvingTokens(MapsAttention):
    """A mixin for an attention layer's class, whose forward calls `attended`."""

    def attended(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Attend, with the layer's mechanisms.

        Args:
            x: (B, T, C), the layer's input.
            q, k, v: (B, K, T, D), q not scaled.
            bias: added to the logits; it may be a mask only if the mechanisms do not change the maps.

        Returns:
            (B, T, K*D), heads concatenated.
        """
        thread = thread_of_forward()
        handed = self.relay.store.get(thread)
        if handed is None:
            raise ValueError(
                f"{type(self).__name__} must run inside its block, which passes it the previous maps"
            )
        check_found(self.evolution, handed.logits)
        out, self.relay.store[thread] = self.attend(x, q, k, v, handed, handed.feat_size, bias)
        return out.flatten(2)

    def checked(self, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return the mask as a bias of the logits.

        Raises:
            ValueError: a mask although maps evolve, or a causal mask.
        """
        evolves = self.evolution is not None and not self.evolution.mixes_output
        reads_maps = self.need_logits or evolves
        if is_causal or (attn_mask is not None and reads_maps):
            raise ValueError(
                "maps that evolve take no mask (their convolutions would read what it hides): "
                "attn_mask=None and is_causal=False required"
            )
        if attn_mask is None or attn_mask.dtype != torch.bool:
            return attn_mask
        bias = torch.zeros_like(attn_mask, dtype=next(self.parameters()).dtype)
        return bias.masked_fill(~attn_mask, float("-inf"))


def by_heads(attn: nn.Module, qkv: Tensor) -> tuple[Tensor, ...]:
    """Split a projection (B, T, 3*K*D) into q, k, v (B, K, T, D)."""
    heads = qkv.unflatten(2, (3, attn.num_heads, -1))  # (B, T, 3, K, D)
    return heads.permute(2, 0, 3, 1, 4).unbind(0)


class EvolvingVitAttention(EvolvingTokens, Attention):
    """timm's Attention. With `fused_attn` off it computes timm's operations in timm's order, one by one."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = by_heads(self, self.qkv(x))
        bias = self.checked(attn_mask, is_causal)
        out = self.attended(x, self.q_norm(q), self.k_norm(k), v, bias)
        return self.finish(out, x)


class _Rotary(EvolvingTokens):
    """The common part of timm's attention layers with rotary positions."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if self.qkv is None:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (
                project(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
                for project in projections
            )
        else:
            q, k, v = by_heads(self, with_separate_biases(self, x))
        q = self.rotated(self.q_norm(q), rope, v.dtype)
        k = self.rotated(self.k_norm(k), rope, v.dtype)
        groups = self.num_heads // v.shape[1]  # heads that share keys and values
        if groups > 1:
            k = k.repeat_interleave(groups, 1)
            v = v.repeat_interleave(groups, 1)
        out = self.attended(x, q, k, v, self.checked(attn_mask, is_causal))
        return self.finish(out, x)

    def rotated(self, heads: Tensor, rope: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return queries or keys (B, K, T, D) with rotary positions on the patches, as timm computes them."""
        if rope is None:
            return heads
        prefix = heads[:, :, : self.num_prefix_tokens]
        patches = heads[:, :, self.num_prefix_tokens :]
        half = {"half": True} if getattr(self, "rotate_half", False) else {}
        rotated = apply_rot_embed_cat(patches, rope, **half)
        return torch.cat([prefix, rotated], dim=2).to(dtype)


class EvolvingEvaAttention(_Rotary, eva.EvaAttention):
    """timm's EvaAttention: EVA-02, DINOv3, the Perception Encoder."""


class EvolvingAttentionRope(_Rotary, AttentionRope):
    """timm's AttentionRope."""


def with_separate_biases(attn: nn.Module, x: Tensor) -> Tensor:
    """Return the projection (B, T, 3*K*D) of a layer that may have its biases as separate parameters."""
    biases = [getattr(attn, name, None) for name in ("q_bias", "k_bias", "v_bias")]
    if biases[0] is None:
        return attn.qkv(x)
    if getattr(attn, "qkv_bias_separate", False) or type(attn.qkv) is not nn.Linear:  # LoRA
        return attn.qkv(x) + torch.cat(biases)
    return F.linear(x, attn.qkv.weight, torch.cat(biases))


class EvolvingBeitAttention(EvolvingTokens, beit.Attention):
    """timm's BEiT attention; its relative position bias is part of the logits that evolve."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = None
        if self.relative_position_bias_table is not None:
            bias = self._get_rel_pos_bias()
        if shared_rel_pos_bias is not None:
            bias = shared_rel_pos_bias if bias is None else bias + shared_rel_pos_bias
        q, k, v = by_heads(self, with_separate_biases(self, x))
        return self.proj_drop(self.proj(self.attended(x, q, k, v, bias)))


class EvolvingTalkingHeadAttn(EvolvingTokens, cait.TalkingHeadAttn):
    """CaiT's talking heads: the mixed logits evolve, and CaiT mixes the probabilities before a mechanism does."""

    fused_attn = False

    def logits_of(self, q: Tensor, k: Tensor, feat_size: Size) -> Tensor:
        logits = super().logits_of(q, k, feat_size)
        return self.proj_l(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def attention_of(self, logits: Tensor, feat_size: Size) -> Tensor:
        probabilities = logits.softmax(-1)
        attn = self.proj_w(probabilities.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.evolution is not None and self.evolution.mixes_attn:
            return self.evolution.mix_attn(attn)
        return attn

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_heads(self, self.qkv(x))
        return self.proj_drop(self.proj(self.attended(x, q, k, v)))


class EvolvingMultiheadAttention(EvolvingTokens, nn.MultiheadAttention):
    """torchvision's self-attention: torch's MultiheadAttention over one input, without weights."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend within query (B, T, C).

        Raises:
            ValueError: key or value differs from query, a mask, or need_weights=True.
        """
        if whole(key) is not whole(query) or whole(value) is not whole(query):
            raise ValueError("self-attention required: key and value must be the query itself")
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        received = [name for name, mask in masks.items() if mask is not None]
        if received or is_causal or need_weights:
            raise ValueError(
                "no mask and need_weights=False required (record_attention gives the maps), got "
                f"{', '.join([*received, f'{is_causal=}, {need_weights=}'])}"
            )
        self.attn_drop.p = self.dropout
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = by_heads(self, qkv)
        return self.out_proj(self.attended(query, q, k, v)), None


class EvolvingEvaBlock(HandingBlock, eva.EvaBlock):
    """timm's EvaBlock."""


class EvolvingEvaBlockPostNorm(HandingBlock, eva.EvaBlockPostNorm):
    """timm's EvaBlockPostNorm."""


@keep_whole  # FX would not record what it hands on
class EvolvingVitBlock(HandingBlock, vision_transformer.Block):
    """timm's Block."""


class EvolvingResPostBlock(HandingBlock, vision_transformer.ResPostBlock):
    """timm's ResPostBlock."""


class EvolvingBeitBlock(HandingBlock, beit.Block):
    """timm's block of BEiT."""


class EvolvingCaitBlock(HandingBlock, cait.LayerScaleBlock):
    """timm's LayerScaleBlock of CaiT."""


class EvolvingEncoderBlock(HandingBlock, torchvision.models.vision_transformer.EncoderBlock):
    """torchvision's EncoderBlock."""


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of another package that a class of ours extends; other classes unchanged."""
    modules = (base for base in cls.__mro__ if issubclass(base, nn.Module))
    return next(
        base
        for base in modules
        if not (base.__module__.startswith("ea_vision") or issubclass(base, HandingBlock))
    )


_ATTENTIONS = (
    EvolvingVitAttention,
    EvolvingEvaAttention,
    EvolvingAttentionRope,
    EvolvingBeitAttention,
    EvolvingTalkingHeadAttn,
    EvolvingMultiheadAttention,
)
_BLOCKS = (
    EvolvingEvaBlock,
    EvolvingEvaBlockPostNorm,
    EvolvingVitBlock,
    EvolvingResPostBlock,
    EvolvingBeitBlock,
    EvolvingCaitBlock,
    EvolvingEncoderBlock,
)
ATTENTIONS = {plain_class(cls): cls for cls in _ATTENTIONS}
BLOCKS = {plain_class(cls): cls for cls in _BLOCKS}


@dataclass(frozen=True)
class Architecture:
    """Where a network has what evolves.

    Attributes:
        blocks: name of its blocks.
        embedding: name of its patch embedding.
        num_prefix_tokens: its number of tokens before the patches; None: the network's attribute of this name.
    """

    blocks: str = "blocks"
    embedding: str = "patch_embed"
    num_prefix_tokens: int | None = None


ARCHITECTURES = {
    vision_transformer.VisionTransformer: Architecture(),
    deit.VisionTransformerDistilled: Architecture(),
    eva.Eva: Architecture(),
    beit.Beit: Architecture(),
    naflexvit.NaFlexVit: Architecture(embedding="embeds"),
    cait.Cait: Architecture(num_prefix_tokens=0),  # the class token comes behind these blocks
    torchvision.models.VisionTransformer: Architecture("encoder.layers", "conv_proj", 1),
}


def _architecture_of(model: nn.Module) -> Architecture | None:
    return ARCHITECTURES.get(plain_class(type(model)))


def _attention_of(block: nn.Module) -> nn.Module | None:
    attn = getattr(block, "attn", None)  # timm's
    return getattr(block, "self_attention", attn)  # torchvision's


def _reason_against_blocks(model: nn.Module) -> str | None:
    path = _architecture_of(model).blocks
    blocks = model.get_submodule(path)
    heads = None
    first_user: dict[nn.Module, int] = {}
    for index, block in enumerate(blocks):
        here = f"{path}.{index}"
        if isinstance(block, HandingBlock):
            return f"a plain network required, got one whose maps evolve already ({here} is a {type(block).__name__})"
        attn = _attention_of(block)
        if first_user.setdefault(attn, index) != index:
            return f"{here} must have an attention layer of its own, got that of {path}.{first_user[attn]}"
        for what, module, known in (("block", block, BLOCKS), ("attention", attn, ATTENTIONS)):
            if type(module) not in known:
                names = " or ".join(sorted({cls.__name__ for cls in known}))
                return f"{here}: its {what} must be {names}, got {type(module).__name__}"
        packages = [type(module).__module__ for module in attn.modules()]
        if any(package.startswith("torch.ao.") for package in packages):
            return f"{here}: its attention must not be quantised, got {type(attn).__name__}"
        heads = heads or attn.num_heads
        if attn.num_heads != heads:
            return f"{here} must have as many heads as the blocks before, got {attn.num_heads}"
    embeds = getattr(model, "embeds", None)
    dropped = getattr(model, "patch_drop", None) or getattr(embeds, "patch_drop", None)
    if dropped is not None and not isinstance(dropped, nn.Identity):
        return f"patch_drop must be off (tokens would stop being neighbours), got {dropped}"
    return None


def reason_against(model: nn.Module) -> str | None:
    """Return why a network cannot evolve, or None."""
    if _architecture_of(model) is not None:
        return _reason_against_blocks(model)
    attention = "no attention layer found"
    for name, module in model.named_modules():
        if isinstance(module, AugmentedConv2d):
            return (
                f"{name} is a convolution with attention: timm.create_model takes the kind of such a network "
                "as evolution="
            )
        if name and "attn" in name.split(".")[-1]:
            attention = f"{name} is {type(module).__name__}"
            break
    supported = ", ".join(cls.__name__ for cls in [*ARCHITECTURES][:-1])
    return (
        f"timm's {supported} or ResNet, torchvision's VisionTransformer or ResNet, or a model of transformers "
        f"required, got {type(model).__name__} ({attention})"
    )


def evolve_blocks(model: nn.Module, mechanisms: Mechanisms) -> None:
    """Turn the blocks of a network of `ARCHITECTURES`, in place, into evolving ones.

    Raises:
        ValueError: its blocks, attention or patch dropout do not allow it.
    """
    refuse(model, reason_against(model))
    architecture = _architecture_of(model)
    blocks = model.get_submodule(architecture.blocks)
    attentions = [_attention_of(block) for block in blocks]
    relay = PatchRelay(len(blocks))
    relay.belong_to(model)
    relay.watch(model)
    for number, (block, attn) in enumerate(zip(blocks, attentions, strict=True), start=1):
        block.__class__ = BLOCKS[type(block)]
        block.relays = [relay]
        attn.__class__ = ATTENTIONS[type(attn)]
        attn.relay = relay
        attn.number = number
        attn.gate = getattr(attn, "gate", None)  # older timm has none
        if isinstance(attn, nn.MultiheadAttention):
            attn.attn_drop = nn.Dropout(attn.dropout).train(block.training)
    prefix_tokens = architecture.num_prefix_tokens
    if prefix_tokens is None:
        prefix_tokens = model.num_prefix_tokens
    class_token_alone = prefix_tokens > 0 and getattr(model, "global_pool", "token") == "token"
    channels = getattr(model, "embed_dim", None) or model.hidden_dim
    mechanisms.give(blocks, attentions, channels, prefix_tokens, class_token_alone)
    embedding = model.get_submodule(architecture.embedding)
    embedding.register_forward_pre_hook(relay.note_images)
    if type(embedding) is PatchEmbed:
        embedding.__class__ = WholePatchEmbed


def shared_copy(model: nn.Module, on_meta: bool = False) -> nn.Module:
    """Return a copy of the modules that shares parameters and buffers, or has tensors without numbers instead."""
    memo = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = tensor
        if on_meta:  # never by `to`: that of quantised weights moves their scales
            memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return copy.deepcopy(model, memo)


def evolve_transformer(
    model: nn.Module, kind: str | None = "ea", *args: Any, **options: Any
) -> nn.Module:
    """Return an evolving copy of a vision transformer of timm's or torchvision's, which shares the weights.

    Args:
        model: timm's VisionTransformer or VisionTransformerDistilled (ViT, DeiT, DINO, CLIP, SigLIP, ...), Eva (EVA-02,
            DINOv3, PE), NaFlexVit, Beit or Cait, or torchvision's VisionTransformer.
        kind, *args, **options: see `ea_vision.evolve`.

    Raises:
        ValueError: the model cannot evolve (the message names the module at fault), layers cannot evolve, the evolution
            does not have an option, or there is nothing to add.
    """
    refuse(model, reason_against(model))
    mechanisms = Mechanisms.of_evolve(kind, *args, **options)
    evolving = shared_copy(model)
    evolve_blocks(evolving, mechanisms)
    remember_evolution(evolving, mechanisms.keywords())
    return evolving


_ADDED_TO_BLOCKS = ("token_conv", "relays")
_ADDED_TO_ATTENTION = ("evolution", "need_logits", "value_residual", "relay", "number")


def evolves(model: nn.Module) -> bool:
    """Return whether a network is a vision transformer with evolving blocks."""
    architecture = _architecture_of(model)
    if architecture is None:
        return False
    return isinstance(model.get_submodule(architecture.blocks)[0], HandingBlock)


def keep_logits_that_are_read(model: nn.Module) -> None:
    """Let each block of an evolving network hand its logits on only if the next block's evolution reads them."""
    blocks = model.get_submodule(_architecture_of(model).blocks)
    reads_previous = False
    for block in reversed(list(blocks)):
        attn = _attention_of(block)
        attn.need_logits = reads_previous
        reads_previous = attn.evolution is not None and attn.evolution.reads_previous


def unevolve_transformer(model: nn.Module) -> nn.Module:
    """Return the plain network that computes the same as an evolving one: a new model that shares the weights.

    Raises:
        ValueError: a mechanism changes something.
    """
    check_idle(model)
    architecture = _architecture_of(model)
    plain = shared_copy(model)
    plain.__class__ = plain_class(type(model))
    embedding = plain.get_submodule(architecture.embedding)
    for module in (plain, embedding):
        remove_hooks(module)
    if type(embedding) is WholePatchEmbed:
        embedding.__class__ = PatchEmbed
    for block in plain.get_submodule(architecture.blocks):
        attn = _attention_of(block)
        for name in _ADDED_TO_ATTENTION:
            delattr(attn, name)
        for name in _ADDED_TO_BLOCKS:
            delattr(block, name)
        if isinstance(attn, nn.MultiheadAttention):
            del attn.attn_drop
        attn.__class__ = plain_class(type(attn))
        block.__class__ = plain_class(type(block))
    return plain
