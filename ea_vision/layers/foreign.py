"""What the networks of other packages say of their attention: how many heads it has, which tokens come first."""

import inspect

from torch import nn

# what modules call their number of heads
HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "nhead",
    "heads",
)
PREFIX_PARAMETERS = {
    "cls_token": "cls",
    "class_token": "cls",
    "class_embedding": "cls",
    "dist_token": "dist",
    "distillation_token": "dist",
    "reg_token": "reg",
    "register_tokens": "reg",
}


def heads_of(module: nn.Module) -> int | None:
    """Return the number of heads that a module says it has; Llama's and its kin leave it to their configuration."""
    owner = module
    if hasattr(module, "num_key_value_groups") and hasattr(module, "config"):
        owner = module.config
    for name in HEAD_COUNTS:
        value = getattr(owner, name, None)
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


def prefix_names(model: nn.Module) -> tuple[str, ...]:
    """Return the tokens before a vision transformer's patches, in order: "cls", "dist" (distillation), "reg1", "reg2".

    () of networks that have none.
    """
    counts = {}
    for path, parameter in model.named_parameters():
        name = path.rpartition(".")[2]
        if name in PREFIX_PARAMETERS and parameter.numel():
            counts[PREFIX_PARAMETERS[name]] = parameter.shape[-2] if parameter.ndim > 1 else 1
    names = [kind for kind in ("cls", "dist") if kind in counts]
    # timm's word, where there is one
    known = getattr(model, "num_prefix_tokens", len(names) + counts.get("reg", 0))
    registers = [f"reg{number}" for number in range(1, known - len(names) + 1)]
    return (*names[:known], *registers)
