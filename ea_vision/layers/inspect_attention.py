"""Facts about the attention of other packages' networks: heads, tokens before the patches, chains of layers, and which
tokens a layer's queries read."""

import inspect
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

# names by which modules store their number of heads
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "heads")
PREFIX_PARAMETERS = {
    "cls_token": "cls",
    "class_token": "cls",
    "class_embedding": "cls",
    "dist_token": "dist",
    "distillation_token": "dist",
    "reg_token": "reg",
    "register_tokens": "reg",
}
CROSS_ATTENTION = re.compile("cross|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)


def heads_of(module: nn.Module) -> int | None:
    """Return a module's number of heads, or None. Modules of Llama and its kin store it in their configuration."""
    holders = [module]
    if hasattr(module, "num_key_value_groups") and hasattr(module, "config"):
        holders.append(module.config)
    for holder in holders:
        for name in HEAD_COUNTS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def names_called(module: nn.Module) -> tuple[str, ...]:
    """Return the names that a module's own forward uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def uses_interface(module: nn.Module) -> bool:
    """Return whether a module attends through the `ALL_ATTENTION_FUNCTIONS` of transformers."""
    return "ALL_ATTENTION_FUNCTIONS" in names_called(module)


def calls_attention(module: nn.Module) -> bool:
    """Return whether a module's forward names scaled_dot_product_attention, or transformers' attention functions."""
    return "scaled_dot_product_attention" in names_called(module) or uses_interface(module)


def prefix_names(model: nn.Module, part: str = "") -> tuple[str, ...]:
    """Return the tokens before a vision transformer's patches, in order: "cls", "dist" (distillation), "reg1", "reg2".

    () for networks without such tokens.

    Args:
        part: name of a submodule: tokens of other submodules do not count. "": all tokens count.
    """
    counts = {}
    for path, parameter in model.named_parameters():
        *modules, name = path.split(".")
        if part and modules and modules[0] != part:
            continue
        if name in PREFIX_PARAMETERS and parameter.numel():
            counts[PREFIX_PARAMETERS[name]] = parameter.shape[-2] if parameter.ndim > 1 else 1
    names = [kind for kind in ("cls", "dist") if kind in counts]
    # timm's networks state the number
    count = getattr(model, "num_prefix_tokens", len(names) + counts.get("reg", 0))
    registers = [f"reg{number}" for number in range(1, count - len(names) + 1)]
    return (*names[:count], *registers)


def owners(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the module with this name, then the modules that contain it, innermost first, the model last."""
    parts = name.split(".")
    depths = range(len(parts), -1, -1)
    return [model.get_submodule(".".join(parts[:depth])) for depth in depths]


# of the configurations of vision models
IMAGE_OPTIONS = ("patch_size", "patch_sizes", "image_size")


def tower_of(model: nn.Module, name: str) -> tuple[object, list[nn.Module]]:
    """Return a layer's configuration, then the layer and the modules around it up to those with another configuration,
    such as CLIP around its image tower."""
    around = owners(model, name)
    config = next(owner.config for owner in around if hasattr(owner, "config"))
    return config, list(takewhile(lambda owner: getattr(owner, "config", config) is config, around))


def embedding_of(model: nn.Module, name: str) -> tuple[nn.Conv2d | None, tuple[str, ...], bool]:
    """Return the convolution that embeds the patches of a layer's tokens or None, the `prefix_names` before the
    patches, and whether the tokens are of images."""
    config, (_, *around) = tower_of(model, name)
    of_images = any(hasattr(config, option) for option in IMAGE_OPTIONS)
    for owner in around if hasattr(config, "patch_size") else ():
        for path, module in owner.named_modules():
            if isinstance(module, nn.Conv2d):
                # tokens of other modules, such as AIMv2's pooling, are not in the sequence
                part = path.partition(".")[0]
                return module, prefix_names(owner, part), of_images
    return None, (), of_images


def is_causal(model: nn.Module, name: str, decodes: bool) -> bool:
    """Return whether a layer is causal: by its attribute `is_causal`, or by the masks that modules around it build.

    Args:
        decodes: whether its block has cross-attention, whose mask is built beside a causal one.
    """
    if getattr(model.get_submodule(name), "is_causal", False):
        return True
    _, tower = tower_of(model, name)
    for owner in tower:
        called = names_called(owner)
        masks = [mask for mask in called if re.fullmatch(r"create_\w*mask\w*", mask)]
        if masks:
            causal = ["causal" in mask for mask in masks]
            return any(causal) if decodes else all(causal)
    return False


@dataclass(frozen=True)
class LayerChain:
    """Consecutive attention layers of a model.

    Attributes:
        layers: their names.
        blocks: names of the blocks that contain them.
        across: whether they attend to another sequence.
        causal: "self": a query reads no later token; "cross": a decoder's queries read the source; "none": all is read.
        embedding: the convolution that embeds the patches that are their tokens, or None.
        prefix: names of the tokens before the patches.
        of_images: whether their tokens are of images.
    """

    layers: tuple[str, ...]
    blocks: tuple[str, ...]
    across: bool
    causal: str
    embedding: nn.Conv2d | None
    prefix: tuple[str, ...]
    of_images: bool


def layer_chains(model: nn.Module) -> list[LayerChain]:
    """Return the chains of layers that `uses_interface` finds, in a model without evolutions.

    Layers of a chain have equally many heads, their names differ only in numbers, and their blocks are in one list: the
    stages of a hierarchical network (SegFormer) have maps of different sizes.
    """
    rows = defaultdict(dict)
    for name, module in model.named_modules():
        if uses_interface(module):
            pattern = re.sub(r"\b\d+\b", "*", name)
            rows[pattern][name] = heads_of(module)
    groups = defaultdict(list)
    for pattern, heads in rows.items():
        for name, block in zip(heads, block_names(list(heads)), strict=True):
            group = groups[pattern, heads[name], block.rpartition(".")[0]]
            group.append((name, block))
    stages = [tuple(zip(*group, strict=True)) for group in groups.values()]
    crossing = set()
    for names, blocks in stages:
        if CROSS_ATTENTION.search(names[0]):
            crossing.update(blocks)
    decoders = set()
    for names, blocks in stages:
        across = CROSS_ATTENTION.search(names[0])
        if not across and is_causal(model, names[0], blocks[0] in crossing):
            decoders.update(blocks)
    chains = []
    for names, blocks in stages:
        across = CROSS_ATTENTION.search(names[0]) is not None
        causal = "none"
        if blocks[0] in decoders:
            causal = "cross" if across else "self"
        chains.append(LayerChain(names, blocks, across, causal, *embedding_of(model, names[0])))
    return chains


def block_names(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the blocks around layers: each name up to the last number that differs."""
    names = [name.split(".") for name in layers]
    numbers = [place for place, part in enumerate(names[0]) if part.isdigit()]
    columns = list(zip(*names, strict=True))
    differing = [place for place in numbers if len(set(columns[place])) > 1]
    place = (differing or numbers or [len(names[0]) - 1])[-1]
    return tuple(".".join(parts[: place + 1]) for parts in names)
