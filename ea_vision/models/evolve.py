"""`evolve` and `unevolve`: a network gets mechanisms across its layers, and goes back to what it was.

    model = ea_vision.evolve(timm.create_model("vit_small_patch16_dinov3", pretrained=True), "ea")
    plain = ea_vision.unevolve(model)                               # an error once the gates have moved

Each family of networks is one entry of `FAMILIES`; the first that accepts a network evolves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ea_vision.models import any_transformer, evolve_resnet, huggingface
from ea_vision.models._build import name_plain


@dataclass(frozen=True)
class Family:
    """Networks that evolve alike.

    accepts: whether a plain network is of this family.
    evolves: whether a network is one of this family's that evolves.
    evolve: (model, kind, **options) -> the evolving network, which shares the weights.
    unevolve: the way back.
    """

    accepts: Callable[[nn.Module], bool]
    evolves: Callable[[nn.Module], bool]
    evolve: Callable[..., nn.Module]
    unevolve: Callable[[nn.Module], nn.Module]


# The last one accepts what no other does, and refuses what it does not know with the reason.
FAMILIES = [
    Family(
        accepts=evolve_resnet.is_resnet,
        evolves=evolve_resnet.has_attention,
        evolve=evolve_resnet.evolve_resnet,
        unevolve=evolve_resnet.unevolve_resnet,
    ),
    Family(
        accepts=huggingface.accepts,
        evolves=huggingface.evolves,
        evolve=huggingface.evolve_huggingface,
        unevolve=huggingface.unevolve_huggingface,
    ),
    Family(
        accepts=lambda model: True,
        evolves=any_transformer.evolves,
        evolve=any_transformer.evolve_transformer,
        unevolve=any_transformer.unevolve_transformer,
    ),
]


def evolve(
    model: nn.Module,
    kind: str | None = "ea",
    *args: Any,
    **options: Any,
) -> nn.Module:
    """Let the attention maps of a network evolve: return a new model, which shares the weights.

    Args:
        model: timm's or torchvision's vision transformer, or ResNet, which gets attention beside its convolutions; or a
            model of Hugging Face's transformers.
        kind: a registered evolution: "ea", "pa", "residual", "talking_heads", "reattention", "refiner", "mta",
            "conv2d", "xsa", "gated", or one from outside; None for maps that do not evolve.
        layers: the blocks that evolve, counted from 1 (in models of transformers, in each chain of layers). None means
            all that can: the first block has no predecessor, so it cannot where the kind reads the predecessor's maps.
        prefix: "convolve" or "pass"; see `EvolvingVisionTransformer`.
        start: "identity": the new model computes what the old one does (bit for bit where timm's fused attention is
            off) and learns from there; "paper": it begins as its paper does.
        attn_layers: `layers` by its name in `timm.create_model`.
        token_conv, value_residual: see `EvolvingVisionTransformer`; also without a kind.
        **options: the evolution's. alpha, beta: gates of the kinds that have them; 0 at the identity start. learnable:
            whether they are parameters, as at the identity start; "per_head" for one per head. kernel_size, ...

    ResNets take other options: see `ea_vision.models.evolve_resnet.evolve_resnet`.

    Raises:
        ValueError: a model that cannot evolve, naming the module at fault, layers that cannot, an option that the
            evolution does not have, or nothing to add.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a network is required, such as timm.create_model('vit_small_patch16_224'), got {model!r}"
        )
    family = next(family for family in FAMILIES if family.accepts(model))
    return family.evolve(model, kind, *args, **options)


def unevolve(model: nn.Module) -> nn.Module:
    """Return the plain network from an evolving one that computes the same: a new model, which shares the weights.

    Raises:
        ValueError: a network that does not evolve, or a mechanism that changes something.
    """
    for family in FAMILIES:
        if family.evolves(model):
            plain = family.unevolve(model)
            name_plain(plain)
            return plain
    raise ValueError(f"an evolving network required, got {type(model).__name__}")
