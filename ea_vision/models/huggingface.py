"""Evolving attention in Hugging Face's transformers: one function serves every model of their attention interface.

    model = ea_vision.evolve(AutoModel.from_pretrained("facebook/dinov3-vits16-pretrain-lvd1689m"), "ea")
    model.save_pretrained("folder")
    model = ea_vision.from_pretrained("folder")

The models stay what they are. Each attention layer gets a module `maps` with its mechanisms, and calls it through
`ALL_ATTENTION_FUNCTIONS["ea_vision"]`; each block gets a class of its own, which runs the block's forward.
"""

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.layers.foreign import heads_of, names_called, prefix_names, uses_interface
from ea_vision.layers.sequence_attention import (
    CAUSAL,
    Chain,
    Handed,
    SequenceMaps,
    recomputes,
    thread_of_forward,
)
from ea_vision.models._chain import frozen_statistics
from ea_vision.models._mechanisms import Mechanisms
from ea_vision.models.any_transformer import shared_copy

NAME = "ea_vision"  # of the attention function, and of the evolution in a model's configuration
CARRIED = "_ea_vision_carried"  # attribute of a block's tokens, for its recomputation in the backward pass
FOREIGN = ("softcap", "s_aux", "sinks", "cache", "indices", "block_indices")
CROSS = re.compile("cross|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: (B, K, Q, D), twice (B, heads of keys, N, D) -> (B, Q, K, D).

    Raises:
        ValueError: a keyword that changes what is computed in a way unknown here.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    maps = getattr(module, "maps", None)
    if maps is None:
        options = {"position_bias": position_bias, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    foreign = [name for name in FOREIGN if kwargs.get(name) is not None]
    if foreign:
        raise ValueError(f"evolving maps know no {foreign[0]!r}, which {type(module).__name__} has")
    groups = query.shape[1] // key.shape[1]  # of heads that share keys and values
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = maps(query, key, value, attention_mask, position_bias, causal, scaling, dropout)
    return out, None


def register() -> None:
    """Make `attention` known to transformers, which it leaves whole masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class CarryingBlock:
    """A block of a model, beside its own class: its tokens carry what it needs to run again in the backward pass.

    chains: those that pass through it. token_conv: runs before it, or None.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward on (B, T, C) tokens, its first argument or `hidden_states`."""
        tokens = args[0] if args else kwargs.pop("hidden_states")
        thread = thread_of_forward()
        again = recomputes()
        if again:
            carried = getattr(tokens, CARRIED, None)
            if carried is None:
                raise ValueError("gradient checkpointing with use_reentrant=False required")
            for chain, handed in zip(self.chains, carried, strict=True):
                chain.handed[thread] = handed
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
            carried = [chain.handed.get(thread, Handed()) for chain in self.chains]
            setattr(tokens, CARRIED, carried)
        if self.token_conv is not None:
            grid = self.chains[0].handed[thread].feat_size
            tokens = self.token_conv(tokens, grid)
        with frozen_statistics(self) if again and self.training else nullcontext():
            return super().forward(tokens, *args[1:], **kwargs)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _new_block, (type(self).__mro__[2],), vars(self)


def carrying_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the block's class beside `CarryingBlock`, under the same name, by which others know it."""
    return type(plain.__name__, (CarryingBlock, plain), {"__module__": plain.__module__})


def _new_block(plain: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(carrying_class(plain))


def find_chains(model: nn.Module) -> list[list[str]]:
    """Return the names of the attention layers by chain: those whose names differ in numbers alone."""
    chains = defaultdict(list)
    for name, module in model.named_modules():
        if uses_interface(module):
            chains[re.sub(r"\b\d+\b", "*", name)].append(name)
    return list(chains.values())


def block_name(name: str, chain: Sequence[str]) -> str:
    """Return the name of the block around a layer: up to the last number by which the chain's names differ."""
    parts = name.split(".")
    columns = list(zip(*(other.split(".") for other in chain), strict=True))
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    differing = [place for place in numbers if len(set(columns[place])) > 1]
    place = (differing or numbers or [len(parts) - 1])[-1]
    return ".".join(parts[: place + 1])


def owners(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules around a module, the innermost first, the model last."""
    parts = name.split(".")[:-1]
    paths = itertools.accumulate(parts, "{}.{}".format)
    return [*reversed([model.get_submodule(path) for path in paths]), model]


def _masks_of(owner: nn.Module) -> list[str]:
    """Return the functions that a module's forward makes masks by."""
    return [name for name in names_called(owner) if re.fullmatch(r"create_\w*mask\w*", name)]


def is_causal(model: nn.Module, name: str) -> bool:
    """Return whether no query of a layer reads a later token."""
    module = model.get_submodule(name)
    if getattr(module, "is_causal", False):
        return True
    masks = next(filter(None, map(_masks_of, owners(model, name))), [])
    return bool(masks) and all("causal" in mask for mask in masks)


def causal_forms(model: nn.Module, chains: list[list[str]]) -> list[str]:
    """Return what each chain may read: "self" no later token, "cross" the source for a decoder, "none" everything."""
    decoders = [
        block_name(chain[0], chain)
        for chain in chains
        if not CROSS.search(chain[0]) and is_causal(model, chain[0])
    ]
    forms = []
    for chain in chains:
        decodes = block_name(chain[0], chain) in decoders
        across = CROSS.search(chain[0]) is not None
        forms.append("none" if not decodes else "cross" if across else "self")
    return forms


def patch_embedding(model: nn.Module, name: str, layer: nn.Module) -> nn.Module | None:
    """Return the convolution that makes the patches of a layer's tokens; None of a sequence."""
    if not hasattr(getattr(layer, "config", model.config), "patch_size"):
        return None
    for owner in owners(model, name):
        convolutions = [m for m in owner.modules() if isinstance(m, nn.Conv2d)]
        if convolutions:
            return convolutions[0]
    return None


def reason_against(model: nn.Module) -> str | None:
    """Return why a model of transformers cannot evolve, or None."""
    layers = [module for module in model.modules() if uses_interface(module)]
    if not layers or not model._can_set_attn_implementation():
        return "no attention layer of it goes through transformers' ALL_ATTENTION_FUNCTIONS"
    if any(hasattr(layer, "maps") for layer in layers):
        return "a plain model required, its maps evolve already"
    for name, module in model.named_modules():
        for attribute in ("window_size", "layerdrop"):
            value = getattr(module, attribute, None)
            if isinstance(value, (int, float)) and value > 0:
                return (
                    f"{name}.{attribute} must be 0 for maps to go from layer to layer, got {value}"
                )
    return None


def check_kind(kind: str | None, form: str, across: bool, name: str) -> None:
    """Raise UsageError if a kind would read what a layer must not, or what it has not."""
    allowed = kind is None or kind in CAUSAL or form == "none"
    if across and kind in ("xsa", "conv2d"):
        allowed = False
    if not allowed:
        where = "cross-attention" if across else "causal attention"
        raise UsageError(
            f"evolution {kind!r} has no form for the {where} of {name}: one of {', '.join(sorted(CAUSAL))} required, "
            "or evolve the encoder alone"
        )


def give(model: nn.Module, mechanisms: Mechanisms) -> None:
    """Give a model its mechanisms, in place."""
    register()
    plain_implementation = model.config._attn_implementation
    chains = find_chains(model)
    given = 0
    for names, form in zip(chains, causal_forms(model, chains), strict=True):
        if len(names) > 1 or not mechanisms.reads_previous:
            _give_chain(model, names, form, mechanisms)
            given += 1
    if not given:
        raise UsageError(f"a chain of two layers or more required, got {chains}")
    asked = {**mechanisms.keywords(), "attn_implementation": plain_implementation}
    setattr(model.config, NAME, asked)
    model.set_attn_implementation(NAME)


def _give_chain(model: nn.Module, names: list[str], form: str, mechanisms: Mechanisms) -> None:
    """Give the layers of a chain their mechanisms, and the blocks around them their class."""
    across = CROSS.search(names[0]) is not None
    check_kind(mechanisms.kind, form, across, names[0])
    if mechanisms.kind == "ea" and form != "none":
        options = {"causal": form, **mechanisms.options}
        mechanisms = replace(mechanisms, options=options)
    layers = [model.get_submodule(name) for name in names]
    blocks = [model.get_submodule(block_name(name, names)) for name in names]
    decoder = blocks[0].chains[0] if across and isinstance(blocks[0], CarryingBlock) else None
    chain = Chain(mechanisms.kind, across, len(names), decoder)
    embedding = patch_embedding(model, names[0], layers[0])
    prefix_tokens = 0
    if embedding is not None:
        embedding.register_forward_hook(chain.note_grid)
        stem = next(o for o in owners(model, names[0]) if embedding in o.modules())
        prefix_tokens = len(prefix_names(stem))
    elif mechanisms.token_conv:
        raise UsageError(f"token_conv needs patches of an image, got the sequence of {names[0]}")
    for number, layer in enumerate(layers, start=1):
        heads = heads_of(layer) or layer.config.num_attention_heads
        layer.maps = SequenceMaps(chain, number, heads, prefix_tokens).train(layer.training)
    maps = [layer.maps for layer in layers]
    linear = next(m for m in layers[0].modules() if isinstance(m, nn.Linear))
    mechanisms.give(blocks, maps, linear.in_features, prefix_tokens, False)
    for layer, block in zip(layers, blocks, strict=True):
        if layer.maps.reads_input():
            layer.register_forward_pre_hook(layer.maps.note_input, with_kwargs=True)
        if not isinstance(block, CarryingBlock):
            block.__class__ = carrying_class(type(block))
            block.chains = []
        block.chains.append(chain)


def accepts(model: nn.Module) -> bool:
    """Return whether a network is a model of transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def evolves(model: nn.Module) -> bool:
    """Return whether a network is an evolving model of transformers."""
    return accepts(model) and hasattr(model.config, NAME)


def evolve_huggingface(
    model: nn.Module, kind: str | None = "ea", *args: Any, **options: Any
) -> nn.Module:
    """Let the attention maps of a model of transformers evolve: a new model, which shares the weights.

    Args:
        model: any whose attention goes through `ALL_ATTENTION_FUNCTIONS`: ViT, DINOv2, DINOv3, SigLIP, CLIP, BERT,
            RoBERTa, DistilBERT, T5, BART, Llama, ...
        kind, *args, **options: see `ea_vision.evolve`. In decoders "ea" takes its causal form, without a cache; other
            kinds that convolve are refused there.

    Raises:
        ValueError: a model that cannot evolve, or a mechanism that has no place in it, with the reason.
    """
    reason = reason_against(model)
    if reason is not None:
        raise UsageError(f"this {type(model).__name__} cannot evolve: {reason}")
    mechanisms = Mechanisms.of_evolve(kind, *args, **options)
    evolving = shared_copy(model)
    give(evolving, mechanisms)
    return evolving


def _mechanisms_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the mechanisms of an evolving model with their names."""
    for name, module in model.named_modules():
        if not isinstance(module, (SequenceMaps, CarryingBlock)):
            continue
        for part in ("evolution", "value_residual", "token_conv"):
            mechanism = getattr(module, part, None)
            if mechanism is not None:
                yield f"{name}.{part}", mechanism


def unevolve_huggingface(model: nn.Module) -> nn.Module:
    """Return the plain model from an evolving one that computes the same: a new model, which shares the weights.

    Raises:
        ValueError: a mechanism that changes something.
    """
    active = [name for name, mechanism in _mechanisms_of(model) if not mechanism.changes_nothing()]
    if active:
        raise UsageError(
            "all gates must be 0, or mechanisms at their identity start, for the plain network to compute the same; "
            f"got {len(active)} that are not, the first of them {active[0]}"
        )
    plain = shared_copy(model)
    for module in list(plain.modules()):
        _remove_hooks(module)
        if isinstance(getattr(module, "maps", None), SequenceMaps):
            del module.maps
        if isinstance(module, CarryingBlock):
            del module.token_conv, module.chains
            module.__class__ = type(module).__mro__[2]
    plain.set_attn_implementation(getattr(plain.config, NAME)["attn_implementation"])
    delattr(plain.config, NAME)
    return plain


def _remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of `give`."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), (Chain, SequenceMaps)):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def from_pretrained(folder: str, **kwargs: Any) -> nn.Module:
    """Load a model that `save_pretrained` wrote, with its evolution.

    Args:
        folder: or a name on the hub, as transformers' `from_pretrained` takes it, with its keywords.

    Raises:
        ValueError: a configuration that names no evolution.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    asked = getattr(config, NAME, None)
    if asked is None:
        raise UsageError(
            f"{folder} has no evolution in its config.json; ea_vision.evolve a model of it first"
        )
    plain = getattr(transformers, config.architectures[0])
    asked.pop("attn_implementation")

    def build(self, config, *args, **options):
        plain.__init__(self, config, *args, **options)
        give(self, Mechanisms.of_evolve(**asked))

    cls = type(plain.__name__, (plain,), {"__init__": build, "__module__": plain.__module__})
    model = cls.from_pretrained(folder, **kwargs)
    model.__class__ = plain
    return model
