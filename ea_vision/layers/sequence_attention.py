"""Attention over sequences with masks, caches and several chains, whose maps may evolve from layer to layer.

A chain is a sequence of layers of one kind (an encoder's self-attention, a decoder's self-attention, or its
cross-attention), counted from 1. Padding enters no convolution, and masks are applied only for the softmax.

Shape letters: B batch, C channels, K heads, Q queries, N keys, D width of a head.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.layers.evolution import EvolvingAttention, Operands, PredictiveAttention
from ea_vision.layers.handing_on import Handed, Relay, thread_of_forward
from ea_vision.layers.token_attention import MapsAttention
from ea_vision.ops import Size
from ea_vision.ops.reference import attention_of, readable

# An entry of a map depends on no entry at another place.
POINTWISE = ("residual", "talking_heads", "xsa", "gated", "uniform")
CONVOLVING = ("ea", "pa", "mta", "conv2d")  # padding is set to 0 before these convolve
CAUSAL = ("ea", *POINTWISE)  # kinds with a form for decoders
# Masks hide keys by -10000, -1e9, the smallest finite number or -inf: the softmax turns each into 0.
HIDES = -9000.0


def check_kind(kind: str | None, causal: str, across: bool, name: str) -> None:
    """Raise UsageError if a kind would read entries that the layer `name` must not read, or does not have."""
    refused = kind is not None and kind not in CAUSAL and causal != "none"
    if across and kind in ("xsa", "conv2d"):
        refused = True
    if refused:
        where = "cross-attention" if across else "causal attention"
        causal_kinds = ", ".join(sorted(CAUSAL))
        raise UsageError(
            f"evolution {kind!r} has no form for the {where} of {name}: one of {causal_kinds} required, "
            "or evolve the encoder alone"
        )


class Chain(Relay):
    """Layers of one kind that hand maps to one another.

    Attributes:
        kind: their evolution.
        cross: whether they attend to another sequence.
        decoder: for cross-attention, the chain of the queries' self-attention, which runs before it.
        padding: of the queries of the running block, (B, Q), by thread.
        inputs: the running layer's input (B, Q, C) and its cache, by thread.
    """

    def __init__(self, kind: str | None, cross: bool, depth: int, decoder: "Chain | None" = None):
        super().__init__(depth)
        self.kind = kind
        self.cross = cross
        self.decoder = decoder
        self.padding: dict[int, Tensor | None] = {}
        self.inputs: dict[int, tuple[Tensor, Any]] = {}

    def __reduce__(self) -> tuple:
        return Chain, (self.kind, self.cross, self.depth, self.decoder)

    def end(self, *_: Any) -> None:
        super().end()
        for state in (self.padding, self.inputs):
            state.pop(thread_of_forward(), None)

    def note_grid(self, embedding: nn.Module, args: tuple, patches: Tensor) -> None:
        """Begin the chain with the (H, W) of the patch embedding's result (B, C, H, W)."""
        self.note_size(tuple(patches.shape[-2:]))

    def note_input(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep a layer's input (B, Q, C), and its cache, until its maps are computed."""
        values = [*args, *kwargs.values()]
        sequences = (x for x in values if isinstance(x, Tensor) and x.ndim == 3)
        # models call it cache, past_key_values or layer_past
        caches = (x for x in values if hasattr(x, "get_seq_length"))
        self.inputs[thread_of_forward()] = (next(sequences, None), next(caches, None))

    def written(self, layer: nn.Module, N: int) -> int:
        """Return how many of N keys of a layer's self-attention are tokens: a static cache also has empty places."""
        _, cache = self.inputs.get(thread_of_forward(), (None, None))
        if self.cross or cache is None:
            return N
        tokens = int(cache.get_seq_length(getattr(layer, "layer_idx", 0)))
        # a layer that reads another layer's keys (Gemma 3n) has none in the cache
        tokens = tokens or int(cache.get_seq_length())
        return min(N, tokens) if tokens else N

    def before(self, number: int) -> Handed:
        """Return what the layer before `number` handed on."""
        handed = self.store.pop(thread_of_forward(), Handed())
        if number == 1:
            return Handed(feat_size=handed.feat_size if handed.number == 0 else None)
        if handed.number != number - 1:
            raise ValueError(
                f"layer {number} of the chain must follow layer {number - 1} in the same forward "
                "(no dropped or repeated layers, no checkpointing with use_reentrant=True), "
                f"got it after layer {handed.number}"
            )
        return handed


@dataclass(frozen=True)
class Reading:
    """What the queries of a call may read.

    Attributes:
        bias: added to the logits, such as T5's positions; broadcasts to (B, K, Q, N).
        allowed: (B, 1, Q, N), True where the softmax may read; None: everywhere.
        keys: (B, N), True where a key is padding; None if no padding is known.
        queries: (B, Q), True where a query is padding, likewise.
    """

    bias: Tensor | None = None
    allowed: Tensor | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None

    def of_queries(self, queries: Tensor | None, N: int) -> "Reading":
        """Return the reading of queries from another sequence than the keys, with the queries' padding (B, Q)."""
        if queries is None or self.keys is not None:
            return replace(self, queries=queries)
        B, Q = queries.shape
        keys = queries.new_zeros(B, N)
        return Reading(self.bias, queries.new_ones(B, 1, Q, N), keys, queries)

    def padding(self) -> Tensor:
        """Return a mask that broadcasts to (B, 1, Q, N), True where the key or the query is padding."""
        keys = self.keys[:, None, None, :]
        return keys if self.queries is None else keys | self.queries[:, None, :, None]


def reading_of(
    mask: Tensor | None, bias: Tensor | None, causal: bool, Q: int, k: Tensor
) -> Reading:
    """Return the reading by a mask of transformers, of Q queries and keys (B, K, N, D) that include the same tokens.

    mask: (B, 1, Q, N or more), boolean, or added to the logits, where numbers of HIDES and below hide a key. None: a
    query reads all keys, or if `causal` no later key.
    """
    N = k.shape[2]
    if mask is None and causal and Q > 1:
        mask = torch.ones(1, 1, Q, N, dtype=torch.bool, device=k.device).tril(N - Q)
    if mask is None:
        return Reading(bias)
    mask = mask[..., :N]
    allowed = mask
    if mask.dtype != torch.bool:
        allowed = mask > HIDES
        added = mask.masked_fill(~allowed, 0.0)
        bias = added if bias is None else bias + added
    allowed = allowed.expand(-1, -1, Q, -1)
    keys = ~allowed.any(dim=2).any(dim=1)
    return Reading(bias, allowed, keys, keys[:, -Q:])


def check_grid(feat_size: Size, prefix_tokens: int, tokens: int) -> None:
    """Raise ValueError if there are other tokens beside the patches (YOLOS), or patches are left out (ViTMAE)."""
    H, W = feat_size
    if H * W + prefix_tokens != tokens:
        raise ValueError(
            f"{prefix_tokens} prefix tokens and a grid of {H}x{W} patches required, "
            f"got {tokens} tokens"
        )


class SequenceMaps(MapsAttention, nn.Module):
    """The mechanisms of one attention layer, which has them as its submodule `maps`.

    Attributes:
        chain: the layer's chain.
        num_heads: K.
        prefix_tokens: number of tokens before the patches.
    """

    def __init__(self, chain: Chain, number: int, num_heads: int, prefix_tokens: int = 0):
        super().__init__()
        self.prefix_tokens = prefix_tokens
        self.chain = chain
        self.number = number
        self.num_heads = num_heads
        self.scale = 1.0  # set by each call, like the dropout probability
        self.attn_drop = nn.Dropout(0.0)
        self.readings: dict[int, Reading] = {}

    @property
    def reading(self) -> Reading:
        """The reading of the call that runs in this thread; everything if none runs."""
        return self.readings.get(thread_of_forward(), Reading())

    @property
    def causal(self) -> str:
        """The evolution's causal form (EA paper, section 3.5), or "none"."""
        return getattr(self.evolution, "causal", "none")

    @property
    def reads_input(self) -> bool:
        """Whether the evolution reads the layer's input, or asks how much its cache holds."""
        mixes_output = self.evolution is not None and self.evolution.mixes_output
        return mixes_output or self.causal == "cross"

    @property
    def knows_padding(self) -> bool:
        """Whether the evolution's forward takes the padding."""
        return isinstance(self.evolution, (EvolvingAttention, PredictiveAttention))

    def _operands(self, prev_logits: Tensor | None) -> Operands | None:
        return super()._operands(prev_logits) if self.reading.allowed is None else None

    def attention_of(self, logits: Tensor, feat_size: Size) -> Tensor:
        reading = self.reading
        if reading.allowed is None:
            return super().attention_of(logits, feat_size)
        hidden = ~reading.allowed
        attn = attention_of(logits.masked_fill(hidden, torch.finfo(logits.dtype).min))
        if self.evolution is None or not self.evolution.mixes_attn:
            return attn
        real = attn.masked_fill(reading.padding(), 0.0).to(logits.dtype)
        mixed = self.evolution.mix_attn(real).masked_fill(hidden, 0.0)
        return torch.where(hidden.all(-1, keepdim=True), attn, mixed.to(attn.dtype))

    def evolved(self, logits: Tensor, prev_logits: Tensor, feat_size: Size) -> Tensor:
        """Return the evolved logits. Padding enters no convolution, and keeps the layer's own logits."""
        kind = self.chain.kind
        reading = self.reading
        if reading.allowed is None or kind in POINTWISE:
            return super().evolved(logits, prev_logits, feat_size)
        if kind not in CONVOLVING:
            raise ValueError(
                f"evolution {kind!r} does not support masks: sequences without padding required"
            )
        self.check_reading(logits)
        padding = reading.padding()
        if self.knows_padding:
            evolved = self.evolution(logits, prev_logits, reading.keys, reading.queries)
        else:
            real = logits.masked_fill(padding, 0.0)
            real_before = prev_logits.masked_fill(padding, 0.0)
            evolved = super().evolved(real, real_before, feat_size)
        return torch.where(padding, logits, evolved)

    def parts_of(self, logits: Tensor, prev_logits: Tensor, evolved: Tensor) -> dict[str, Tensor]:
        reading = self.reading
        maps = (logits, prev_logits, evolved)
        if self.knows_padding:
            return self.evolution.parts(*maps, reading.keys, reading.queries)
        parts = super().parts_of(*maps)
        if "softmax" in parts and reading.allowed is not None:
            hidden = torch.finfo(evolved.dtype).min
            parts["softmax"] = evolved.masked_fill(~reading.allowed, hidden).softmax(-1)
        return parts

    def check_reading(self, logits: Tensor) -> None:
        """Raise ValueError if a mask hides other entries than padding and, in a decoder, later keys."""
        message = (
            f"evolution {self.chain.kind!r} (causal={self.causal!r}) needs a mask that hides only padding "
            "and, if causal, later keys: decoders, windows and packed sequences have other masks"
        )
        if logits.is_meta:  # without numbers: only more keys than queries are seen
            Q, N = logits.shape[-2:]
            if N > Q and not self.chain.cross:
                raise ValueError(message)
            return
        reading = self.reading
        differs = reading.allowed != readable(logits, self.causal, reading.keys)
        if reading.queries is not None:
            differs = differs & ~reading.queries[:, None, :, None]
        if torch.compiler.is_compiling():
            torch._assert_async(~differs.any(), message)
        elif differs.any():
            raise ValueError(message)

    def check_rows(self, queries: int, keys: int, cache: Any) -> None:
        """Raise ValueError if the evolution reads rows of earlier queries, which a cache does not keep."""
        rows = queries
        if self.causal == "self":
            rows = keys
        elif self.causal == "cross" and cache is not None:
            rows = cache.get_seq_length()
        if rows != queries:
            raise ValueError(
                f"evolution {self.chain.kind!r} of a decoder convolves the rows of earlier queries, "
                "which a cache does not keep: use_cache=False required, "
                f"got {queries} of {rows} queries"
            )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, reading: Reading, scale: float, dropout: float
    ) -> Tensor:
        """Attend: q (B, K, Q, D), k, v (B, K, N, D) -> (B, Q, K, D)."""
        self.scale = scale
        self.attn_drop.p = dropout
        chain = self.chain
        thread = thread_of_forward()
        Q = q.shape[2]
        N = k.shape[2]
        tokens, cache = chain.inputs.pop(thread, (None, None))
        handed = chain.before(self.number)
        feat_size = (1, Q)  # of sequences, and for kinds that do not depend on places
        if handed.feat_size is not None and chain.kind not in (None, *POINTWISE):
            feat_size = handed.feat_size
            check_grid(feat_size, self.prefix_tokens, Q)
        if self.evolution is not None:
            self.check_rows(Q, N, cache)
            if self.causal == "self" and reading.allowed is None and Q > 1:
                raise ValueError(
                    f"evolution {chain.kind!r} of causal layers needs their mask, and the model builds none (some "
                    "build one only where they get an attention_mask)"
                )
            if chain.kind == "xsa" and N < Q:
                raise ValueError(
                    f"evolution {chain.kind!r} needs each query's own value, got {Q} queries and {N} keys"
                )
        if chain.cross:
            decoder = chain.decoder
            padding = None if decoder is None else decoder.padding.get(thread)
            reading = reading.of_queries(padding, N)
        chain.padding[thread] = reading.queries
        self.readings[thread] = reading
        try:
            out, chain.store[thread] = self.attend(tokens, q, k, v, handed, feat_size, reading.bias)
        finally:
            del self.readings[thread]
        return out.contiguous()  # models may call view on it
