"""`evolve` and `unevolve`: a transformer gets mechanisms across its layers, and goes back to what it was.

    model = ea_vision.evolve(timm.create_model("vit_small_patch16_dinov3", pretrained=True), "ea")
    model = ea_vision.evolve(torchvision.models.vit_b_16(), kind=None, token_conv=True, value_residual=True)
    plain = ea_vision.unevolve(model)                               # an error once the gates have moved

timm's VisionTransformer becomes the network of `vision_transformer.py`, which TorchScript knows. Of the others the
network stays what it is, and its blocks, in place, become ours: each runs timm's or torchvision's own forward, in which
the attention does what the mechanisms ask. From block to block their tokens carry, as an attribute, what the next one
reads, so gradient checkpointing, torch.compile and torch.export see nothing unusual.

Shape letters: B batch, C channels, K heads, T tokens, P prefix tokens, D width of a head.
"""

import copy
import itertools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat, to_2tuple
from timm.models import beit, cait, deit, eva, naflexvit, vision_transformer
from torch import Tensor, nn

from ea_vision.layers import MapsAttention, TokenAttention
from ea_vision.models import vision_transformer as ours
from ea_vision.models._chain import frozen_statistics
from ea_vision.models._made_with import forget_evolution, remember_evolution
from ea_vision.models._mechanisms import Mechanisms

CARRIED = "_ea_vision_carried"  # attribute of the tokens between blocks


@dataclass(frozen=True)
class Carried:
    """What a block hands on: (H, W) of the patches, its logits (B, K, T, T), the first block's values (B, K, T, D)."""

    feat_size: tuple[int, int] | None
    logits: Tensor | None = None
    first_values: Tensor | None = None


def _thread() -> int:
    """Return whose forward runs: what a layer keeps for its length is kept by thread."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class PatchGrid:
    """(H, W) of the patches by thread, noted by a hook before the patch embedding; None where images are packed."""

    def __init__(self):
        self.sizes: dict[int, tuple[int, int] | None] = {}

    def __call__(self, embedding: nn.Module, args: tuple[Any, ...]) -> None:
        images, size = args[0], None
        if images.ndim == 4:
            height, width = images.shape[-2:]
            if hasattr(embedding, "dynamic_feat_size"):
                size = embedding.dynamic_feat_size((height, width))
            else:
                patch = to_2tuple(getattr(embedding, "patch_size", None) or embedding.kernel_size)
                size = height // patch[0], width // patch[1]
        self.sizes[_thread()] = size


class CarryingBlock:
    """A block, beside its own class, that reads and hands on what `Carried` has.

    attention: the name of its attention layer.
    """

    attention = "attn"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block's own forward on (B, T, C) tokens."""
        attn, carried = getattr(self, self.attention), getattr(x, CARRIED, None)
        if (
            carried is None
        ):  # of the first block; a recomputation, in another thread perhaps, finds it there
            carried = Carried(self.grid.sizes.get(_thread()))
            setattr(x, CARRIED, carried)
        if self.token_conv is not None:
            if carried.feat_size is None:
                raise ValueError(
                    "token_conv needs the patches' (height, width): images (B, C, H, W) required"
                )
            x = self.token_conv(x, carried.feat_size)
        attn.carried[_thread()] = carried
        again = (
            self.training
            and not torch.compiler.is_compiling()
            and torch._C._current_graph_task_id() != -1
        )
        try:
            with (
                frozen_statistics(self) if again else nullcontext()
            ):  # timm's checkpointing, in the backward pass
                y = super().forward(x, *args, **kwargs)
        finally:
            carried = attn.carried.pop(_thread())
        setattr(y, CARRIED, carried)
        return y


class CarryingAttention(MapsAttention):
    """An attention layer, beside its own class, whose forward calls `attended`."""

    fused_attn = True

    def attended(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Attend, with the layer's mechanisms.

        Args:
            x: (B, T, C), the layer's input.
            q, k, v: (B, K, T, D), q not scaled.
            bias: added to the logits, or a mask for mechanisms that leave the maps alone.

        Returns:
            (B, T, K*D), heads concatenated.
        """
        carried = self.carried[_thread()]
        out, logits, v = self.attend(
            x, q, k, v, carried.logits, carried.feat_size, carried.first_values, bias
        )
        first_values = v if self.is_first else carried.first_values
        self.carried[_thread()] = replace(carried, logits=logits, first_values=first_values)
        return out

    def checked(self, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return the mask as a bias.

        Raises:
            ValueError: a mask where maps evolve, or a causal one.
        """
        if (
            is_causal
            or attn_mask is not None
            and (self.need_logits or self.evolution is not None and not self.evolution.mixes_output)
        ):
            ours.refuse_masks(attn_mask, is_causal)
        if attn_mask is None or attn_mask.dtype != torch.bool:
            return attn_mask
        return torch.zeros_like(attn_mask, dtype=self.proj.weight.dtype).masked_fill(
            ~attn_mask, float("-inf")
        )


def by_heads(attn: nn.Module, qkv: Tensor) -> tuple[Tensor, ...]:
    """Split a projection (B, T, 3*K*D) into q, k, v (B, K, T, D)."""
    return qkv.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class EvolvingVitAttention(CarryingAttention, Attention):
    """timm's Attention."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = by_heads(self, self.qkv(x))
        out = self.attended(
            x, self.q_norm(q), self.k_norm(k), v, self.checked(attn_mask, is_causal)
        )
        return self.finish(out, x)


class _Rotary(CarryingAttention):
    """The common part of timm's attention layers with rotary positions."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if self.qkv is None:
            q, k, v = (
                proj(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
        else:
            q, k, v = by_heads(self, with_separate_biases(self, x))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            P, half = (
                self.num_prefix_tokens,
                {"half": True} if getattr(self, "rotate_half", False) else {},
            )
            q, k = (
                torch.cat(
                    [t[:, :, :P], apply_rot_embed_cat(t[:, :, P:], rope, **half)], dim=2
                ).type_as(v)
                for t in (q, k)
            )
        groups = self.num_heads // v.shape[1]  # of heads that share keys and values
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return self.finish(self.attended(x, q, k, v, self.checked(attn_mask, is_causal)), x)


class EvolvingEvaAttention(_Rotary, eva.EvaAttention):
    """timm's EvaAttention: EVA-02, DINOv3, the Perception Encoder."""


class EvolvingAttentionRope(_Rotary, AttentionRope):
    """timm's AttentionRope."""


def with_separate_biases(attn: nn.Module, x: Tensor) -> Tensor:
    """Return the projection (B, T, 3*K*D) of a layer whose biases of queries and values may be parameters of their
    own."""
    biases = [getattr(attn, name, None) for name in ("q_bias", "k_bias", "v_bias")]
    if biases[0] is None:
        return attn.qkv(x)
    if getattr(attn, "qkv_bias_separate", False):
        return attn.qkv(x) + torch.cat(biases)
    return F.linear(x, attn.qkv.weight, torch.cat(biases))


class EvolvingBeitAttention(CarryingAttention, beit.Attention):
    """timm's BEiT attention; the logits that evolve have its relative position bias."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = self._get_rel_pos_bias() if self.relative_position_bias_table is not None else None
        if shared_rel_pos_bias is not None:
            bias = shared_rel_pos_bias if bias is None else bias + shared_rel_pos_bias
        out = self.attended(x, *by_heads(self, with_separate_biases(self, x)), bias)
        return self.proj_drop(self.proj(out))


class EvolvingTalkingHeadAttn(CarryingAttention, cait.TalkingHeadAttn):
    """CaiT's talking heads; the logits that evolve are the mixed ones, probabilities are mixed by its own first."""

    fused_attn = False

    def logits_of(self, q: Tensor, k: Tensor, feat_size: tuple[int, int]) -> Tensor:
        logits = super().logits_of(q, k, feat_size)
        return self.proj_l(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def attention_of(self, logits: Tensor, feat_size: tuple[int, int]) -> Tensor:
        attn = self.proj_w(logits.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixes = self.evolution is not None and self.evolution.mixes_attn
        return self.evolution.mix_attn(attn) if mixes else attn

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_drop(self.proj(self.attended(x, *by_heads(self, self.qkv(x)))))


class EvolvingMultiheadAttention(CarryingAttention, nn.MultiheadAttention):
    """torchvision's self-attention, torch's MultiheadAttention."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def forward(self, query: Tensor, *_: Tensor, **__: Any) -> tuple[Tensor, None]:
        q, k, v = by_heads(self, F.linear(query, self.in_proj_weight, self.in_proj_bias))
        return self.out_proj(self.attended(query, q, k, v)), None


class EvolvingEvaBlock(CarryingBlock, eva.EvaBlock):
    """timm's EvaBlock."""


class EvolvingEvaBlockPostNorm(CarryingBlock, eva.EvaBlockPostNorm):
    """timm's EvaBlockPostNorm."""


class EvolvingVitBlock(CarryingBlock, vision_transformer.Block):
    """timm's Block."""


class EvolvingResPostBlock(CarryingBlock, vision_transformer.ResPostBlock):
    """timm's ResPostBlock."""


class EvolvingBeitBlock(CarryingBlock, beit.Block):
    """timm's block of BEiT."""


class EvolvingCaitBlock(CarryingBlock, cait.LayerScaleBlock):
    """timm's LayerScaleBlock of CaiT."""


class EvolvingEncoderBlock(CarryingBlock, torchvision.models.vision_transformer.EncoderBlock):
    """torchvision's EncoderBlock."""

    attention = "self_attention"


def _by_plain_class(*classes: type[nn.Module]) -> dict[type[nn.Module], type[nn.Module]]:
    """Return classes of ours by that of timm or torchvision which each extends."""
    return {
        next(base for base in cls.__mro__ if not base.__module__.startswith("ea_vision")): cls
        for cls in classes
    }


ATTENTIONS = _by_plain_class(
    EvolvingVitAttention,
    EvolvingEvaAttention,
    EvolvingAttentionRope,
    EvolvingBeitAttention,
    EvolvingTalkingHeadAttn,
    EvolvingMultiheadAttention,
)
BLOCKS = _by_plain_class(
    EvolvingEvaBlock,
    EvolvingEvaBlockPostNorm,
    EvolvingVitBlock,
    EvolvingResPostBlock,
    EvolvingBeitBlock,
    EvolvingCaitBlock,
    EvolvingEncoderBlock,
)


@dataclass(frozen=True)
class Architecture:
    """Where a network has its blocks and its patch embedding, and how many tokens stand before the patches."""

    blocks: str = "blocks"
    embedding: str = "patch_embed"
    num_prefix_tokens: int | None = None  # the network's own


ARCHITECTURES = {
    vision_transformer.VisionTransformer: Architecture(),
    deit.VisionTransformerDistilled: Architecture(),
    eva.Eva: Architecture(),
    beit.Beit: Architecture(),
    naflexvit.NaFlexVit: Architecture(embedding="embeds"),
    cait.Cait: Architecture(num_prefix_tokens=0),  # the class token comes behind these blocks
    torchvision.models.VisionTransformer: Architecture("encoder.layers", "conv_proj", 1),
}


PLAIN_CLASSES = {
    evolving: plain
    for classes in (
        ATTENTIONS,
        BLOCKS,
        ours.NETWORK_CLASSES,
        {Attention: TokenAttention, vision_transformer.Block: ours.EvolvingBlock},
    )
    for plain, evolving in classes.items()
}


def _shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _attention_of(block: nn.Module) -> nn.Module:
    return getattr(block, CarryingBlock.attention, None) or getattr(
        block, EvolvingEncoderBlock.attention, None
    )


def _reason_against_blocks(model: nn.Module) -> str | None:
    path, places = ARCHITECTURES[type(model)].blocks, {}
    blocks = model.get_submodule(path)
    for index, block in enumerate(blocks):
        attn = _attention_of(block)
        if places.setdefault(attn, index) != index:
            return f"{path}.{index} must have an attention layer of its own, got that of {path}.{places[attn]}"
        if type(block) in BLOCKS.values():
            return f"a plain network required, got {path}.{index} a {type(block).__name__}, whose maps evolve already"
        for found, known, what in ((block, BLOCKS, "block"), (attn, ATTENTIONS, "attention")):
            if type(found) not in known:
                names = " or ".join(sorted({cls.__name__ for cls in known}))
                return f"{path}.{index}: its {what} must be {names}, got {type(found).__name__}"
        if any(type(module).__module__.startswith("torch.ao.") for module in attn.modules()):
            return f"{path}.{index}: its attention must not be quantised, got {attn}"
        if attn.num_heads != _attention_of(blocks[0]).num_heads:
            return (
                f"{path}.{index} must have as many heads as the blocks before, got {attn.num_heads}"
            )
    dropped = getattr(model, "patch_drop", None) or getattr(
        getattr(model, "embeds", None), "patch_drop", None
    )
    if dropped is not None and not isinstance(dropped, nn.Identity):
        return f"patch_drop must be off (tokens would stop being neighbours), got {dropped}"
    return None


def reason_against(model: nn.Module) -> str | None:
    """Return why a network cannot evolve, or None."""
    if type(model) in ours.NETWORK_CLASSES.values():
        return f"a plain network required, got {type(model).__name__}, whose maps evolve already"
    if type(model) in ARCHITECTURES:
        return _reason_against_blocks(model)
    attention = next(
        (
            f"{name} is {type(module).__name__}"
            for name, module in model.named_modules()
            if name and "attn" in name.split(".")[-1]
        ),
        "no attention layer found",
    )
    known = ", ".join(cls.__name__ for cls in [*ARCHITECTURES][:-1])
    return f"timm's {known} or torchvision's VisionTransformer required, got {type(model).__name__} ({attention})"


def _evolve_in_place(model: nn.Module, mechanisms: Mechanisms) -> None:
    """Turn the blocks of a network of `ARCHITECTURES` into evolving ones."""
    architecture, grid = ARCHITECTURES[type(model)], PatchGrid()
    blocks = model.get_submodule(architecture.blocks)
    attentions = [_attention_of(block) for block in blocks]
    for number, (block, attn) in enumerate(zip(blocks, attentions, strict=True)):
        attn.__class__, block.__class__ = ATTENTIONS[type(attn)], BLOCKS[type(block)]
        if isinstance(attn, nn.MultiheadAttention):
            attn.attn_drop = nn.Dropout(attn.dropout).train(block.training)
        attn.is_first, attn.carried, block.grid = number == 0, {}, grid
        attn.gate = getattr(attn, "gate", None)  # older timm has none
    prefix_tokens = architecture.num_prefix_tokens
    prefix_tokens = model.num_prefix_tokens if prefix_tokens is None else prefix_tokens
    class_token_alone = prefix_tokens > 0 and getattr(model, "global_pool", "token") == "token"
    channels = getattr(model, "embed_dim", None) or model.hidden_dim
    mechanisms.give(blocks, attentions, channels, prefix_tokens, class_token_alone)
    model.get_submodule(architecture.embedding).register_forward_pre_hook(grid)


def evolve(
    model: nn.Module,
    kind: str | None = "ea",
    layers: Sequence[int] | None = None,
    prefix: str = "convolve",
    start: str = "identity",
    attn_layers: Sequence[int] | None = None,
    token_conv: bool | str = False,
    value_residual: bool | str = False,
    **options: Any,
) -> nn.Module:
    """Let the attention maps of timm's or torchvision's transformer evolve: a new model, which shares the weights.

    Args:
        model: timm's VisionTransformer or VisionTransformerDistilled (ViT, DeiT, DINO, CLIP, SigLIP, ...), Eva (EVA-02,
            DINOv3, PE), NaFlexVit, Beit or Cait, or torchvision's VisionTransformer.
        kind: a registered evolution: "ea", "pa", "residual", "talking_heads", "reattention", "refiner", "mta",
            "conv2d", "xsa", "gated", or one from outside; None for maps that do not evolve.
        layers, attn_layers: which blocks evolve, counted from 1; None is all that can: not the first, which has no
            predecessor, where the kind reads the predecessor's maps.
        prefix: "convolve" or "pass"; see `EvolvingVisionTransformer`.
        start: "identity": the new model computes what the old one does (bit for bit where timm's fused attention is
            off) and learns from there; "paper": it begins as its paper does.
        token_conv, value_residual: see `EvolvingVisionTransformer`; also without a kind.
        **options: the evolution's. alpha, beta: gates of the kinds that have them; 0 at the identity start. learnable:
            whether they are parameters, as at the identity start; "per_head" for one a head. kernel_size, ...

    Raises:
        ValueError: a model that cannot evolve, naming the module at fault, layers that cannot, an option that the
            evolution does not have, or nothing to add.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a network is required, such as timm.create_model('vit_small_patch16_224'), got {model!r}"
        )
    reason = reason_against(model)
    if reason is not None:
        raise ValueError(f"this {type(model).__name__} cannot evolve: {reason}")
    if kind is None and not (token_conv or value_residual):
        raise ValueError("a kind, token_conv or value_residual required, got none of them")
    if kind is not None:
        options["start"] = start
    chosen = attn_layers if layers is None else layers
    mechanisms = Mechanisms(kind, chosen, prefix, token_conv, value_residual, options)
    evolving = _shared_copy(model)
    if type(model) in ours.NETWORK_CLASSES and ours.reason_against_blocks(model) is None:
        evolving.__class__ = ours.NETWORK_CLASSES[type(model)]
        ours.give(evolving, mechanisms)
    else:
        _evolve_in_place(evolving, mechanisms)
    asked = {
        "kind": kind,
        "attn_layers": chosen,
        "prefix": prefix,
        "token_conv": token_conv,
        "value_residual": value_residual,
    }
    remember_evolution(evolving, {**asked, **options})
    return evolving


def unevolve(model: nn.Module) -> nn.Module:
    """Return the plain network from an evolving one that computes the same: a new model, which shares the weights.

    Raises:
        ValueError: another network, or a mechanism that changes something.
    """
    plain_class = PLAIN_CLASSES.get(type(model), type(model))
    path = getattr(ARCHITECTURES.get(plain_class), "blocks", None)
    if path is None or type(model.get_submodule(path)[0]) not in PLAIN_CLASSES:
        raise ValueError(f"an evolving vision transformer required, got {type(model).__name__}")
    active = []
    for index, block in enumerate(model.get_submodule(path)):
        attn, name = _attention_of(block), getattr(block, "attention", "attn")
        parts = {
            f"{name}.evolution": attn.evolution,
            f"{name}.value_residual": attn.value_residual,
            "token_conv": block.token_conv,
        }
        active += [
            f"{path}.{index}.{name} ({part})"
            for name, part in parts.items()
            if part is not None and not part.changes_nothing()
        ][:1]
    if active:
        raise ValueError(
            "all gates must be 0, or mechanisms at their identity start, for the plain network to compute "
            f"the same; got {len(active)} blocks where they are not, the first of them {active[0]}"
        )
    plain = _shared_copy(model)
    plain.__class__, blocks = plain_class, plain.get_submodule(path)
    if isinstance(blocks, ours.TokenStage):
        plain.blocks = nn.Sequential(*blocks)
        plain.blocks.training = blocks.training
    embedding = plain.get_submodule(ARCHITECTURES[plain_class].embedding)
    for key in [
        key for key, hook in embedding._forward_pre_hooks.items() if isinstance(hook, PatchGrid)
    ]:
        del embedding._forward_pre_hooks[key]
    for block in blocks:
        attn = _attention_of(block)
        if isinstance(attn, nn.MultiheadAttention):
            del attn.attn_drop
        for module in (block, attn):
            module.__class__ = PLAIN_CLASSES[type(module)]
            for name in (
                "token_conv",
                "grid",
                "evolution",
                "need_logits",
                "value_residual",
                "is_first",
                "carried",
            ):
                if hasattr(module, name):
                    delattr(module, name)
    forget_evolution(plain)
    return plain
