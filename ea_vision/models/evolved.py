"""One registered name for all networks of timm that `ea_vision.evolve` has evolved, so that saved ones can be loaded.

model = ea_vision.evolve(timm.create_model("vit_small_patch16_224", pretrained=True), "ea")
timm.models.save_for_hf(model, "folder", safe_serialization=True)       # or push_to_hf_hub
model = timm.create_model("local-dir:folder", pretrained=True)          # after `import ea_vision`
"""

from collections.abc import Mapping
from typing import Any

import timm
from timm.models import load_pretrained, register_model, resolve_pretrained_cfg
from torch import nn

from ea_vision.models.evolve import evolve
from ea_vision.models.note import EVOLVED


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
