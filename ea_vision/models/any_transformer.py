"""`evolve` and `unevolve`: a transformer gets mechanisms across its layers, and goes back to what it was.

    model = ea_vision.evolve(timm.create_model("vit_small_patch16_dinov3", pretrained=True), "ea")
    model = ea_vision.evolve(torchvision.models.vit_b_16(), kind=None, token_conv=True, value_residual=True)
    plain = ea_vision.unevolve(model)                               # an error once the gates have moved

The network stays what it is, and its blocks, in place, become ours: each runs timm's or torchvision's own forward, in
which the attention does what the mechanisms ask. From block to block their tokens carry, as an attribute, what the next
one reads, so features, gradient checkpointing, torch.compile and torch.export see nothing unusual.

Shape letters: B batch, C channels, K heads, T tokens, P prefix tokens, D width of a head.
"""
import copy
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models import beit, cait, deit, eva, naflexvit, register_notrace_module, vision_transformer
from torch import Tensor, nn

from ea_vision.layers import TokenAttention, TokenConv, ValueResidual, create_evolution, evolution_class
from ea_vision.layers.token_attention import Carried, this_thread
from ea_vision.models._chain import check_numbers, frozen_statistics

CARRIED = "_ea_vision_carried"  # attribute of the tokens between blocks


class PatchGrid:
    """(H, W) of the patches by thread, noted by a hook behind the patch embedding; None where images are packed."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, int] | None] = {}

    def __call__(self, embedding: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        size = output[1] if isinstance(output, tuple) else output.shape[-2:]  # NaFlex says it, others are convolutions
        self.sizes[this_thread()] = None if size is None else (size[0], size[1])


@register_notrace_module  # what a block hands on is no part of a graph of FX, which keeps it whole
class CarryingBlock(nn.Module):
    """A block, beside its own class, that reads and hands on what `Carried` has.

    attention: the name of its attention layer.
    """

    attention = "attn"

    def __prepare_scriptable__(self) -> nn.Module:
        """Say to torch.jit.script why it cannot read this block."""
        raise ValueError("TorchScript cannot read what evolving blocks hand on beside their tokens: torch.jit.trace or "
                         f"torch.export required, got {type(self).__name__} to script")

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block's own forward on (B, T, C) tokens."""
        attn, carried = getattr(self, self.attention), getattr(x, CARRIED, None)
        if carried is None:  # of the first block; a recomputation, in another thread perhaps, finds it there
            carried = Carried(self.grid.sizes.pop(this_thread(), None))
            setattr(x, CARRIED, carried)
        if self.token_conv is not None:
            if carried.feat_size is None:
                raise ValueError("token_conv needs the patches' (height, width): images (B, C, H, W) required")
            x = self.token_conv(x, carried.feat_size)
        attn.carried[this_thread()] = carried
        again = self.training and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        try:
            with frozen_statistics(self) if again else nullcontext():  # timm's checkpointing, in the backward pass
                y = super().forward(x, *args, **kwargs)
        finally:
            carried = attn.carried.pop(this_thread())
        setattr(y, CARRIED, carried)
        return y


class _TimmsAttention(TokenAttention):
    """The common part of timm's attention layers with gate, norm and masks."""

    def finish(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Attend, and take timm's steps behind attention: norm, gate, projection."""
        out = self.norm(self.attended(x, q, k, v, self.checked(attn_mask, is_causal)))
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


def by_heads(attn: nn.Module, qkv: Tensor) -> tuple[Tensor, ...]:
    """Split a projection (B, T, 3*K*D) into q, k, v (B, K, T, D)."""
    return qkv.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class EvolvingVitAttention(_TimmsAttention, Attention):
    """timm's Attention."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = by_heads(self, self.qkv(x))
        return self.finish(x, self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal)


class _Rotary(_TimmsAttention):
    """The common part of timm's attention layers with rotary positions."""

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:
        if self.qkv is None:
            q, k, v = (proj(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
                       for proj in (self.q_proj, self.k_proj, self.v_proj))
        else:
            q, k, v = by_heads(self, with_separate_biases(self, x))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            P, half = self.num_prefix_tokens, {"half": True} if getattr(self, "rotate_half", False) else {}
            q, k = (torch.cat([t[:, :, :P], apply_rot_embed_cat(t[:, :, P:], rope, **half)], dim=2).type_as(v)
                    for t in (q, k))
        groups = self.num_heads // v.shape[1]  # of heads that share keys and values
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return self.finish(x, q, k, v, attn_mask, is_causal)


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


class EvolvingBeitAttention(TokenAttention, beit.Attention):
    """timm's BEiT attention; the logits that evolve have its relative position bias."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = self._get_rel_pos_bias() if self.relative_position_bias_table is not None else None
        if shared_rel_pos_bias is not None:
            bias = shared_rel_pos_bias if bias is None else bias + shared_rel_pos_bias
        out = self.attended(x, *by_heads(self, with_separate_biases(self, x)), bias)
        return self.proj_drop(self.proj(out))


class EvolvingTalkingHeadAttn(TokenAttention, cait.TalkingHeadAttn):
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


class EvolvingMultiheadAttention(TokenAttention, nn.MultiheadAttention):
    """torchvision's self-attention, torch's MultiheadAttention."""

    @property
    def scale(self) -> float:
        return self.head_dim ** -0.5

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
    return {cls.__bases__[1]: cls for cls in classes}


ATTENTIONS = _by_plain_class(EvolvingVitAttention, EvolvingEvaAttention, EvolvingAttentionRope, EvolvingBeitAttention,
                             EvolvingTalkingHeadAttn, EvolvingMultiheadAttention)
BLOCKS = _by_plain_class(EvolvingEvaBlock, EvolvingEvaBlockPostNorm, EvolvingVitBlock, EvolvingResPostBlock,
                         EvolvingBeitBlock, EvolvingCaitBlock, EvolvingEncoderBlock)
PLAIN_CLASSES = {ours: plain for classes in (ATTENTIONS, BLOCKS) for plain, ours in classes.items()}


@dataclass(frozen=True)
class Architecture:
    """Where a network has its blocks and its patch embedding, and how many tokens stand before the patches."""

    blocks: str = "blocks"
    embedding: str = "patch_embed.proj"
    num_prefix_tokens: int | None = None  # the network's own


ARCHITECTURES = {
    vision_transformer.VisionTransformer: Architecture(), deit.VisionTransformerDistilled: Architecture(),
    eva.Eva: Architecture(), beit.Beit: Architecture(), naflexvit.NaFlexVit: Architecture(embedding="embeds"),
    cait.Cait: Architecture(num_prefix_tokens=0),  # the class token comes behind these blocks
    torchvision.models.VisionTransformer: Architecture("encoder.layers", "conv_proj", 1),
}


def _blocks_of(model: nn.Module) -> nn.ModuleList | nn.Sequential:
    return model.get_submodule(ARCHITECTURES[type(model)].blocks)


def _attention_of(block: nn.Module) -> nn.Module:
    return getattr(block, CarryingBlock.attention, None) or getattr(block, EvolvingEncoderBlock.attention, None)


def reason_against(model: nn.Module) -> str | None:
    """Return why a network cannot evolve, or None."""
    if type(model) not in ARCHITECTURES:
        attention = next((f"{name} is {type(module).__name__}" for name, module in model.named_modules()
                          if name and "attn" in name.split(".")[-1]), "no attention layer found")
        known = ", ".join(dict.fromkeys(cls.__name__ for cls in ARCHITECTURES if cls.__module__.startswith("timm.")))
        return f"timm's {known} or torchvision's VisionTransformer required, got {type(model).__name__} ({attention})"
    path, places = ARCHITECTURES[type(model)].blocks, {}
    for index, block in enumerate(_blocks_of(model)):
        attn = _attention_of(block)
        if places.setdefault(attn, index) != index:
            return f"{path}.{index} must have an attention layer of its own, got that of {path}.{places[attn]}"
        if isinstance(block, CarryingBlock):
            return f"a plain network required, got {path}.{index} a {type(block).__name__}, whose maps evolve already"
        for found, known, what in ((block, BLOCKS, "block"), (attn, ATTENTIONS, "attention")):
            if type(found) not in known:
                names = " or ".join(sorted({cls.__name__ for cls in known}))
                return f"{path}.{index}: its {what} must be {names}, got {type(found).__name__}"
        if any(type(module).__module__.startswith("torch.ao.") for module in attn.modules()):
            return f"{path}.{index}: its attention must not be quantised, got {attn}"
        if attn.num_heads != _attention_of(_blocks_of(model)[0]).num_heads:
            return f"{path}.{index} must have as many heads as the blocks before, got {attn.num_heads}"
    dropped = getattr(model, "patch_drop", None) or getattr(getattr(model, "embeds", None), "patch_drop", None)
    if dropped is not None and not isinstance(dropped, nn.Identity):
        return f"patch_drop must be off (tokens would stop being neighbours), got {dropped}"
    return None


def _evolving_blocks(kind: str, attn_layers: Sequence[int] | None, depth: int, idle_last: bool) -> list[int]:
    """Return the blocks, counted from 1, that are to evolve.

    idle_last: whether nothing but the class token's row of the last map is read, and that passes the mechanism.
    """
    possible = range(1 + evolution_class(kind).reads_previous, depth + (not idle_last))
    chosen = list(possible) if attn_layers is None else sorted(set(attn_layers))
    wrong = [layer for layer in chosen if layer not in possible]
    if wrong or not chosen:
        why = "the first block has no predecessor"
        if idle_last:
            why += (", and where prefix tokens pass a convolution in the last would never get a gradient, since only "
                    "the class token's row is read there")
        raise ValueError(f"attn_layers of this model that can evolve are {list(possible)} of {depth} ({why}); got "
                         f"{wrong or 'none'}")
    return chosen


def let_evolve(model: nn.Module, kind: str | None, attn_layers: Sequence[int] | None, prefix: str,
               token_conv: bool | str, value_residual: bool | str, options: dict[str, Any]) -> None:
    """Turn the blocks of a network, in place, into evolving ones; see `evolve` for arguments and errors."""
    reason = reason_against(model)
    if reason is not None:
        raise ValueError(f"this {type(model).__name__} cannot evolve: {reason}")
    for name, value in (("token_conv", token_conv), ("value_residual", value_residual)):
        if value not in (False, True, "paper"):
            raise ValueError(f"{name} must be False, True or 'paper', got {value!r}")
    if attn_layers is not None:
        check_numbers("attn_layers", attn_layers)
    if prefix not in ("convolve", "pass"):
        raise ValueError(f"prefix must be 'convolve' or 'pass', got {prefix!r}")
    architecture, blocks, grid = ARCHITECTURES[type(model)], _blocks_of(model), PatchGrid()
    tokens = architecture.num_prefix_tokens
    tokens = model.num_prefix_tokens if tokens is None else tokens
    channels = getattr(model, "embed_dim", None) or model.hidden_dim
    weight = next(blocks.parameters())
    dd = {"device": weight.device, "dtype": weight.dtype}
    evolutions = {}
    if kind is None:
        create_evolution(None, 1, **options)  # refuses options
    else:
        passes = prefix == "pass" or evolution_class(kind).spatial
        idle_last = passes and tokens > 0 and getattr(model, "global_pool", "token") == "token"
        for number in _evolving_blocks(kind, attn_layers, len(blocks), idle_last):
            evolutions[number] = evolution = create_evolution(kind, _attention_of(blocks[0]).num_heads,
                                                              channels=channels, **dd, **options)
            if hasattr(evolution, "num_prefix_tokens"):
                evolution.num_prefix_tokens = tokens if passes else 0
            elif prefix == "pass":
                raise ValueError(f"prefix='pass' needs an evolution with num_prefix_tokens, got {kind!r}")
    for number, block in enumerate(blocks, start=1):
        attn = _attention_of(block)
        attn.__class__, block.__class__ = ATTENTIONS[type(attn)], BLOCKS[type(block)]
        if isinstance(attn, nn.MultiheadAttention):
            attn.attn_drop = nn.Dropout(attn.dropout)
        attn.is_first, attn.carried, block.grid = number == 1, {}, grid
        attn.evolution, reader = evolutions.get(number), evolutions.get(number + 1)
        attn.need_logits = reader is not None and reader.reads_previous
        residual, conv = number > 1 and value_residual, number > 1 and token_conv
        attn.value_residual = ValueResidual(residual != "paper", **dd) if residual else None
        block.token_conv = TokenConv(channels, tokens, conv != "paper", **dd) if conv else None
        block.train(block.training)
    model.get_submodule(architecture.embedding).register_forward_hook(grid)


def _shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


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
        raise ValueError(f"a network is required, such as timm.create_model('vit_small_patch16_224'), got {model!r}")
    if kind is None and not (token_conv or value_residual):
        raise ValueError("a kind, token_conv or value_residual required, got none of them")
    if kind is not None:
        options["start"] = start
    evolving = _shared_copy(model)
    let_evolve(evolving, kind, attn_layers if layers is None else layers, prefix, token_conv, value_residual, options)
    return evolving


def unevolve(model: nn.Module) -> nn.Module:
    """Return the plain network from an evolving one that computes the same: a new model, which shares the weights.

    Raises:
        ValueError: another network, or a mechanism that changes something.
    """
    if type(model) not in ARCHITECTURES or not isinstance(_blocks_of(model)[0], CarryingBlock):
        raise ValueError(f"an evolving vision transformer required, got {type(model).__name__}")
    path, active = ARCHITECTURES[type(model)].blocks, []
    for index, block in enumerate(_blocks_of(model)):
        attn, name = _attention_of(block), block.attention
        parts = {f"{name}.evolution": attn.evolution, f"{name}.value_residual": attn.value_residual,
                 "token_conv": block.token_conv}
        active += [f"{path}.{index}.{name} ({part})" for name, part in parts.items()
                   if part is not None and not part.changes_nothing()][:1]
    if active:
        raise ValueError("all gates must be 0, or mechanisms at their identity start, for the plain network to compute "
                         f"the same; got {len(active)} blocks where they are not, the first of them {active[0]}")
    plain = _shared_copy(model)
    embedding = plain.get_submodule(ARCHITECTURES[type(plain)].embedding)
    for key in [key for key, hook in embedding._forward_hooks.items() if isinstance(hook, PatchGrid)]:
        del embedding._forward_hooks[key]
    for block in _blocks_of(plain):
        attn = _attention_of(block)
        added = ["evolution", "need_logits", "value_residual", "is_first", "carried"]
        added += ["attn_drop"] if isinstance(attn, nn.MultiheadAttention) else []
        for module, names in (attn, added), (block, ["token_conv", "grid"]):
            for name in names:
                delattr(module, name)
            module.__class__ = PLAIN_CLASSES[type(module)]
    plain.__class__ = PLAIN_CLASSES.get(type(plain), type(plain))
    return plain
