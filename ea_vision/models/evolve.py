"""`evolve` adds mechanisms across layers to a network; `unevolve` removes them again.

    model = ea_vision.evolve(timm.create_model("vit_small_patch16_dinov3", pretrained=True), "ea")
    plain = ea_vision.unevolve(model)                               # an error once the gates have moved

One registered name builds all networks of timm that `evolve` has evolved, so that saved ones can be loaded:

    timm.models.save_for_hf(model, "folder", safe_serialization=True)       # or push_to_hf_hub
    model = timm.create_model("local-dir:folder", pretrained=True)          # after `import ea_vision`

Each family of networks is one entry of `FAMILIES`; the first that accepts a network evolves it.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
from timm.models import load_pretrained, register_model, resolve_pretrained_cfg
from torch import nn

from ea_vision.models import any_transformer, evolve_resnet
from ea_vision.models._build import name_plain
from ea_vision.models.note import EVOLVED, forget_evolution


@dataclass(frozen=True)
class Family:
    """Networks that evolve in the same way.

    accepts: whether a plain network is of this family.
    evolves: whether a network is an evolving one of this family.
    evolve: (model, kind, **options) -> the evolving network, which shares the weights.
    unevolve: the inverse of evolve.
    """

    accepts: Callable[[nn.Module], bool]
    evolves: Callable[[nn.Module], bool]
    evolve: Callable[..., nn.Module]
    unevolve: Callable[[nn.Module], nn.Module]


# The last one accepts all other networks; for unknown ones it raises an error with the reason.
FAMILIES = [
    Family(
        accepts=evolve_resnet.is_resnet,
        evolves=evolve_resnet.has_attention,
        evolve=evolve_resnet.evolve_resnet,
        unevolve=evolve_resnet.unevolve_resnet,
    ),
    Family(
        accepts=lambda model: True,
        evolves=any_transformer.evolves,
        evolve=any_transformer.evolve_transformer,
        unevolve=any_transformer.unevolve_transformer,
    ),
]


def register_family(family: Family) -> None:
    """Add a family before the one that accepts all other networks."""
    FAMILIES.insert(-1, family)


def _families_for(model: nn.Module) -> list[Family]:
    """Return the families, with that of transformers' models if the network is one."""
    packages = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    if "transformers" in packages:
        importlib.import_module("ea_vision.models.huggingface")  # registers it
    return FAMILIES


def evolve(model: nn.Module, kind: str | None = "ea", *args: Any, **options: Any) -> nn.Module:
    """Let the attention maps of a network evolve: return a new model, which shares the weights.

    Args:
        model: timm's or torchvision's vision transformer, or ResNet, which gets attention beside its convolutions; or a
            model of Hugging Face's transformers.
        kind: a registered evolution: "ea", "pa", "residual", "talking_heads", "reattention", "refiner", "mta",
            "conv2d", "xsa", "gated", or one registered by other code; None for maps that do not evolve.
        layers: the blocks that evolve, counted from 1 (in models of transformers, in each chain of layers). None: all
            that can. The first block cannot if the kind reads the previous block's maps.
        prefix: "convolve" or "pass"; see `EvolvingVisionTransformer`.
        start: "identity": the new model computes what the old one does (bit for bit if timm's fused attention is off)
            and learns from there; "paper": it begins as in the kind's paper.
        attn_layers: the name of `layers` in `timm.create_model`.
        token_conv, value_residual: see `EvolvingVisionTransformer`; also possible without a kind.
        **options: of the evolution. alpha, beta: gates of the kinds that have them; 0 at the identity start. learnable:
            whether they are parameters, as at the identity start; "per_head" for one per head. kernel_size, ...

    ResNets take other options: see `ea_vision.models.evolve_resnet.evolve_resnet`.

    Raises:
        ValueError: the model cannot evolve (the message names the module at fault), layers cannot evolve, the evolution
            does not have an option, or there is nothing to add.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a network is required, such as timm.create_model('vit_small_patch16_224'), got {model!r}"
        )
    args = map(_without_numpy, args)
    options = {name: _without_numpy(value) for name, value in options.items()}
    family = next(family for family in _families_for(model) if family.accepts(model))
    return family.evolve(model, kind, *args, **options)


def _without_numpy(value: Any) -> Any:
    """Return a value of an option with Python's numbers in place of NumPy's, which no configuration could store."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, tuple):
        return tuple(map(_without_numpy, value))
    if isinstance(value, list):
        return [_without_numpy(item) for item in value]
    return value


def unevolve(model: nn.Module) -> nn.Module:
    """Return the plain network that computes the same as an evolving one: a new model that shares the weights.

    Raises:
        ValueError: the network does not evolve, or a mechanism changes something.
    """
    for family in _families_for(model):
        if family.evolves(model):
            plain = family.unevolve(model)
            forget_evolution(plain)
            name_plain(plain)
            return plain
    raise ValueError(f"an evolving network required, got {type(model).__name__}")


@register_model
def evolved_transformer(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict | None = None,
    cache_dir: str | None = None,
    pretrained_model_args: dict | None = None,
    base: str = "",
    evolution: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Create timm's network `base` and evolve it.

    Args:
        base: timm's name of the plain network.
        evolution: keywords of `ea_vision.evolve`.
        **kwargs: of the plain network.

    Raises:
        ValueError: base is missing, as in folders saved by timm before 1.0.30 without `model_args=model._model_args`.
    """
    if not base:
        raise ValueError(
            f"{EVOLVED} needs the keywords base and evolution; "
            "save_for_hf(model, ..., model_args=model._model_args) saves them"
        )
    if pretrained_cfg is None:
        return evolve(timm.create_model(base, pretrained=pretrained, **kwargs), **(evolution or {}))
    cfg = resolve_pretrained_cfg(EVOLVED, pretrained_cfg, pretrained_cfg_overlay).to_dict()
    kwargs.setdefault("num_classes", cfg["num_classes"])
    model = evolve(timm.create_model(base, **kwargs), **(evolution or {}))
    model.pretrained_cfg = model.default_cfg = cfg
    if pretrained:
        channels = kwargs.get("in_chans", 3)
        load_pretrained(model, cfg, model.num_classes, channels, cache_dir=cache_dir)
    return model
