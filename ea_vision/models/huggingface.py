"""Evolving attention in Hugging Face's transformers: one function serves every model of their attention interface.

    model = ea_vision.evolve(AutoModel.from_pretrained("facebook/dinov3-vits16-pretrain-lvd1689m"), "ea")
    model.save_pretrained("folder")
    model = ea_vision.from_pretrained("folder")

Models keep their class. Each attention layer gets a module `maps` with its mechanisms, and calls it through
`ALL_ATTENTION_FUNCTIONS["ea_vision"]`. The class of each block is replaced by a subclass that runs the block's forward.
"""

import re
import sys
import types
from dataclasses import replace
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.layers import evolution_class, inspect_attention
from ea_vision.layers import sequence_attention as sequences
from ea_vision.layers.handing_on import Handed, HandingBlock, remove_hooks
from ea_vision.models._mechanisms import Mechanisms, check_idle, refuse
from ea_vision.models.any_transformer import plain_class, shared_copy
from ea_vision.models.evolve import Family, register_family
from ea_vision.ops import Size, use_implementation

NAME = "ea_vision"  # key of the attention function, and of the evolution in a model's configuration
# Saved configurations have this as their implementations, with which transformers refuses to build a plain model. Two,
# since callers may set one.
LOADER = "ea_vision.from_pretrained"
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
WEIGHTS = re.compile(r"\.(maps|token_conv)\.")  # in the names of a mechanism's weights
# layers with these attributes change their logits or maps in unsupported ways
UNKNOWN_ATTRIBUTES = ("attn_logit_softcapping", "sinks", "indexer")
UNKNOWN_KEYWORDS = ("softcap", "s_aux", "sinks", "cache", "indices", "block_indices")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do.

    query (B, K, Q, D), key and value (B, heads of keys, N, D) -> (B, Q, K, D).

    Raises:
        ValueError: a keyword changes the computation in an unsupported way.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if not hasattr(module, "maps"):
        raise ValueError(
            f"{type(module).__name__} was built by an evolved model's configuration, without mechanisms: load it by "
            f"{LOADER}, or evolve the plain model by ea_vision.evolve"
        )
    maps = module.maps
    if maps is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    for name in UNKNOWN_KEYWORDS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"evolving maps do not support {name!r}, which {type(module).__name__} has"
            )
    heads = query.shape[1]  # some may share keys, or values
    written = maps.chain.written(module, key.shape[2])
    key = repeat_kv(key[:, :, :written], heads // key.shape[1])
    value = repeat_kv(value[:, :, :written], heads // value.shape[1])
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False)
    bias = kwargs.get("position_bias")
    reading = sequences.reading_of(attention_mask, bias, causal, query.shape[2], key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return maps(query, key, value, reading, scale, dropout), None


def register() -> None:
    """Register `attention` with transformers, with the whole masks that "eager" attention gets."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class EvolvingBlock(HandingBlock):
    """A mixin for a block's class.

    Attributes:
        attention_config: the configuration of its attention.
    """

    def grid(self, handed: Handed, tokens: Tensor) -> Size:
        prefix_tokens = self.token_conv.num_prefix_tokens
        sequences.check_grid(handed.feat_size, prefix_tokens, tokens.shape[1])
        return handed.feat_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward on (B, T, C) tokens, its first argument or `hidden_states`."""
        implementation = self.attention_config._attn_implementation
        if implementation != NAME:
            raise ValueError(
                f"an evolved model needs attn_implementation {NAME!r}, got {implementation!r}: its maps would not "
                "evolve (ea_vision.record_attention gives the maps, ea_vision.unevolve the plain model)"
            )
        tokens = args[0] if args else kwargs.pop("hidden_states")
        return super().forward(tokens, *args[1:], **kwargs)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _new_block, (plain_class(type(self)),), vars(self)


def evolving_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `EvolvingBlock` and the block's class, with the name by which other code finds blocks."""
    return type(plain.__name__, (EvolvingBlock, plain), {"__module__": plain.__module__})


def _new_block(plain: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(evolving_class(plain))


def reason_against(model: nn.Module) -> str | None:
    """Return why a model of transformers cannot evolve, or None."""
    layers = [module for module in model.modules() if inspect_attention.uses_interface(module)]
    if not layers or not model._can_set_attn_implementation():
        version = sys.modules["transformers"].__version__
        return (
            f"no attention layer of it goes through ALL_ATTENTION_FUNCTIONS of transformers {version} "
            "(tested with 5.20 and later)"
        )
    if any(hasattr(layer, "maps") for layer in layers):
        return "a plain model required, its maps evolve already"
    if hasattr(model.config, NAME):
        return (
            "its configuration names an evolution whose weights it lacks: load both by "
            f"ea_vision.from_pretrained, or begin anew after `del model.config.{NAME}`"
        )
    for layer in layers:
        if "logical_not" in inspect_attention.names_called(layer):
            return f"{type(layer).__name__} applies masks by itself, as booleans alone"
        for attribute in UNKNOWN_ATTRIBUTES:
            if getattr(layer, attribute, None) is not None:
                return (
                    f"evolving maps do not support {attribute!r}, which {type(layer).__name__} has"
                )
    for name, module in model.named_modules():
        for attribute in ("window_size", "layerdrop"):
            value = getattr(module, attribute, None)
            if isinstance(value, (int, float)) and value > 0:
                return (
                    f"{name}.{attribute} must be 0 for maps to go from layer to layer, got {value}"
                )
    return None


def give(model: nn.Module, mechanisms: Mechanisms) -> None:
    """Add mechanisms to a model, in place."""
    register()
    chains = inspect_attention.layer_chains(model)
    shortest = 2 if mechanisms.reads_previous else 1
    evolving = [chain for chain in chains if len(chain.layers) >= shortest]
    if not evolving:
        layers = [chain.layers for chain in chains]
        raise UsageError(f"a chain of two layers or more required, got {layers}")
    for module in model.modules():
        if inspect_attention.uses_interface(module):
            module.maps = None
    for chain in evolving:
        _give_chain(model, chain, mechanisms)
    plain = model.config._attn_implementation
    setattr(model.config, NAME, {**mechanisms.keywords(), "attn_implementation": plain})
    for config in _configurations(model.config):
        for implementation in IMPLEMENTATIONS:
            setattr(config, implementation, LOADER)
    _attend_by(model, NAME)


def _attend_by(model: nn.Module, implementation: str) -> None:
    """Set a model's attention function, also in layers that keep a configuration of their own (CLIPSeg's decoder)."""
    model.set_attn_implementation(implementation)
    for module in model.modules():
        if inspect_attention.uses_interface(module):
            module.config._attn_implementation = implementation


def _configurations(config: Any) -> list[Any]:
    """Return a model's configuration and those within it, such as that of CLIP's image tower."""
    configs = [config]
    for value in vars(config).values():
        if isinstance(value, sys.modules["transformers"].PreTrainedConfig):
            configs += _configurations(value)
    return configs


def _give_chain(
    model: nn.Module, names: inspect_attention.LayerChain, mechanisms: Mechanisms
) -> None:
    """Add mechanisms to the layers of a chain, and replace the class of the blocks around them."""
    sequences.check_kind(mechanisms.kind, names.causal, names.across, names.layers[0])
    layers = [model.get_submodule(name) for name in names.layers]
    blocks = [model.get_submodule(name) for name in names.blocks]
    decodes = names.across and isinstance(blocks[0], EvolvingBlock)
    decoder = blocks[0].relays[0] if decodes else None
    chain = sequences.Chain(mechanisms.kind, names.across, len(layers), decoder)
    chain.belong_to(model)
    chain.watch(_around(model, names.blocks[0]))
    if names.embedding is not None:
        names.embedding.register_forward_hook(chain.note_grid)
    else:
        _check_grid_is_not_needed(mechanisms, names)
    prefix_tokens = len(names.prefix)
    for number, layer in enumerate(layers, start=1):
        heads = inspect_attention.heads_of(layer) or inspect_attention.heads_of(layer.config)
        if heads is None:
            raise UsageError(f"{names.layers[0]} does not say how many heads it has")
        layer.maps = sequences.SequenceMaps(chain, number, heads, prefix_tokens)
        layer.maps.train(layer.training)
    maps = [layer.maps for layer in layers]
    if mechanisms.kind == "ea" and names.causal != "none":  # the other kinds need no causal form
        options = {"causal": names.causal, **mechanisms.options}
        mechanisms = replace(mechanisms, options=options)
    mechanisms.give(blocks, maps, _width_of(layers[0]), prefix_tokens, class_token_alone=False)
    for layer in layers:
        if layer.maps.reads_input or names.causal == "self":
            layer.register_forward_pre_hook(chain.note_input, with_kwargs=True)
    for block in blocks:
        if not isinstance(block, EvolvingBlock):
            _change_class(block, evolving_class(type(block)))
            block.relays = []
            block.attention_config = layers[0].config
        block.relays.append(chain)
        for name, module in block.named_modules():
            if WEIGHTS.search(f".{name}."):
                module._is_hf_initialized = True  # transformers leaves it as it is


def _check_grid_is_not_needed(mechanisms: Mechanisms, names: inspect_attention.LayerChain) -> None:
    """Raise UsageError if mechanisms need the grid of patches, or would take an image for a line of text."""
    spatial = mechanisms.kind is not None and evolution_class(mechanisms.kind).spatial
    if mechanisms.token_conv or (spatial and names.of_images):
        name = "token_conv" if mechanisms.token_conv else repr(mechanisms.kind)
        raise UsageError(
            f"{name} needs patches of an image, embedded by a Conv2d, got the sequence of {names.layers[0]}"
        )


def _change_class(block: nn.Module, cls: type) -> None:
    """Change the class of a block; accelerate's hooks, which keep the old forward beside it, call the new one."""
    block.__class__ = cls
    if "_old_forward" in vars(block):
        block._old_forward = types.MethodType(cls.forward, block)


def _around(model: nn.Module, block: str) -> nn.Module:
    """Return the module whose forward runs a block and those beside it."""
    _, *owners = inspect_attention.owners(model, block)
    return next(owner for owner in owners if not isinstance(owner, (nn.ModuleList, nn.ModuleDict)))


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without numbers, and without hooks."""
    copied = shared_copy(model, on_meta=True).eval()
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


@torch.no_grad()
def _check_forward(model: nn.Module, mechanisms: Mechanisms) -> None:
    """Raise UsageError if a model's forward, on the meta device, fails only once it has mechanisms.

    Models that do not take the usual inputs, or that read numbers, are not tried.
    """
    tried = _on_meta(model)
    give(tried, mechanisms)
    try:
        with use_implementation("reference"):
            tried(**_usual_inputs(model))
    except Exception as error:  # noqa: BLE001
        if re.search("meta tensor|register_meta|device_type='meta'", str(error), re.IGNORECASE):
            return
        try:
            _on_meta(model)(**_usual_inputs(model))
        except Exception:  # noqa: BLE001 the plain model does not take these inputs
            return
        line = str(error).partition("\n")[0]
        refuse(model, f"its forward would fail with {mechanisms.kind!r}: {line}")


def _usual_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return a line of 8 words, or an image, without numbers."""
    config = model.config
    if model.main_input_name == "pixel_values":
        sides = to_2tuple(getattr(config, "image_size", 64))
        frames = getattr(config, "num_frames", 1)  # X-CLIP's are images
        shape = (frames, getattr(config, "num_channels", 3), *sides)
        return {"pixel_values": torch.empty(shape, dtype=model.dtype, device="meta")}
    words = torch.zeros(1, 8, dtype=torch.long, device="meta")
    names = ["input_ids"]
    if getattr(config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    return dict.fromkeys(names, words)


def _width_of(layer: nn.Module) -> int:
    """Return the channels of an attention layer's tokens: the input width of its query projection.

    In cross-attention, keys may come from tokens of another width. GPT-2's Conv1D stores its weight transposed.
    """
    widths = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            widths[name] = module.in_features
        elif type(module).__name__ == "Conv1D":
            widths[name] = module.weight.shape[0]
    query_widths = [width for name, width in widths.items() if "q" in name.split(".")[-1].lower()]
    return [*query_widths, *widths.values()][0]


def accepts(model: nn.Module) -> bool:
    """Return whether a network is a model of transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def evolves(model: nn.Module) -> bool:
    """Return whether a network is an evolving model of transformers."""
    if not accepts(model):
        return False
    return any(isinstance(module, sequences.SequenceMaps) for module in model.modules())


def evolve_huggingface(
    model: nn.Module, kind: str | None = "ea", *args: Any, **options: Any
) -> nn.Module:
    """Let the attention maps of a model of transformers evolve: return a new model that shares the weights.

    Args:
        model: any model whose attention goes through `ALL_ATTENTION_FUNCTIONS`: ViT, DINOv2, DINOv3, SigLIP, CLIP,
            BERT, RoBERTa, DistilBERT, T5, BART, Llama, ...
        kind, *args, **options: see `ea_vision.evolve`. In decoders "ea" takes its causal form, without a cache; other
            kinds that convolve raise an error there.

    Raises:
        ValueError: the model cannot evolve, or does not support a mechanism; the message gives the reason.
    """
    refuse(model, reason_against(model))
    mechanisms = Mechanisms.of_evolve(kind, *args, **options)
    _check_forward(model, mechanisms)
    evolving = shared_copy(model)
    give(evolving, mechanisms)
    # PEFT stores it as an adapter's base, which nobody then takes for the plain model
    evolving.name_or_path = f"ea_vision.evolve({model.name_or_path})"
    return evolving


def unevolve_huggingface(model: nn.Module) -> nn.Module:
    """Return the plain model that computes the same as an evolving one: a new model that shares the weights.

    Raises:
        ValueError: a mechanism changes something.
    """
    check_idle(model)
    plain = shared_copy(model)
    for module in list(plain.modules()):
        remove_hooks(module)
        if inspect_attention.uses_interface(module):
            del module.maps
        if isinstance(module, EvolvingBlock):
            del module.token_conv, module.relays, module.attention_config
            _change_class(module, plain_class(type(module)))
    _attend_by(plain, getattr(plain.config, NAME)["attn_implementation"])
    delattr(plain.config, NAME)
    for config in _configurations(plain.config):
        for implementation in IMPLEMENTATIONS:
            vars(config).pop(implementation, None)  # two may be one
    plain.name_or_path = plain.config.name_or_path
    return plain


def from_pretrained(folder: str, **kwargs: Any) -> nn.Module:
    """Load a model of transformers that `save_pretrained` wrote, with its evolution.

    Args:
        folder: a folder, or a name on the hub.
        **kwargs: those of transformers' `from_pretrained`; with `output_loading_info=True` the result is (model, info).

    Raises:
        UsageError: the configuration names no evolution, or another one than the weights have.
    """
    import transformers

    config, _ = transformers.PreTrainedConfig.get_config_dict(folder, **kwargs)
    keywords = config.get(NAME)
    if keywords is None:
        raise UsageError(
            f"{folder} has no evolution in its config.json; ea_vision.evolve a model of it first"
        )
    plain = getattr(transformers, config["architectures"][0])
    # the plain model's own implementation never runs, and may need a package
    implementations = {"attn_implementation": "eager", "experts_implementation": None}
    attention_of_plain = keywords.pop("attn_implementation")
    attention_of_plain = kwargs.get("attn_implementation", attention_of_plain)
    with_info = kwargs.pop("output_loading_info", False)

    def build(self, config, *args, **options):
        plain.__init__(self, config, *args, **options)
        give(self, Mechanisms.of_evolve(**keywords))
        getattr(self.config, NAME)["attn_implementation"] = attention_of_plain

    cls = type(plain.__name__, (plain,), {"__init__": build, "__module__": plain.__module__})
    kwargs = {**implementations, **kwargs, "output_loading_info": True}
    model, info = cls.from_pretrained(folder, **kwargs)
    check_weights(folder, info)
    model.__class__ = plain
    return (model, info) if with_info else model


def check_weights(folder: str, info: dict[str, Any]) -> None:
    """Raise UsageError if weights of mechanisms are missing, unexpected or of another shape."""
    faults = []
    for status in ("missing", "unexpected", "mismatched"):
        keys = [key if isinstance(key, str) else key[0] for key in info[f"{status}_keys"]]
        names = sorted(key for key in keys if WEIGHTS.search(key))
        if names:
            faults.append(f"{len(names)} {status}, the first of them {names[0]}")
    if faults:
        raise UsageError(
            f"weights of {folder} must be those of the evolution in its config.json, got {'; '.join(faults)}"
        )


register_family(
    Family(
        accepts=accepts, evolves=evolves, evolve=evolve_huggingface, unevolve=unevolve_huggingface
    )
)
