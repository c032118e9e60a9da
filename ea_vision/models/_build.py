"""How timm builds and registers our networks."""

import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    get_pretrained_cfg,
    is_model,
    is_model_pretrained,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from ea_vision.base.errors import UsageError
from ea_vision.layers.fit_weights import checkpoint_filter_fn
from ea_vision.models.note import check_agreement, defaults_of, fixed, is_free, read_note, take_note

log = logging.getLogger(__name__)
# by the beginning of a network's name: the keywords of its attention's evolution
KINDS = {"aa": {}, "pa_aa": {"evolution": "pa"}, "ea_aa": {"evolution": "ea"}}
# The classes of experiments/scenes, in their order.
SCENES = ("buildings", "forest", "glacier", "mountain", "sea", "street")


@dataclass(frozen=True)
class Network:
    """A registered network.

    about: one sentence. kwargs: its keywords. trained: for each tag of weights, the keywords they were trained with.
    plain: timm's network without attention; with fusion="add", pretrained=True begins with its weights.
    """

    about: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plain: str | None = None


# by name: (module of the family, network), in order of registration
_NETWORKS: dict[str, tuple[str, Network]] = {}


def register_networks(
    module: str, model_cls: type[nn.Module], networks: Mapping[str, Network]
) -> None:
    """Register a family's networks with timm, each as a function of the family's module.

    Args:
        module: `__name__` of the family's file, which defines `default_cfgs` for the names.
        model_cls: the class, built with a network's keywords and those of `timm.create_model`.
        networks: by name.
    """
    for name, network in networks.items():

        def entry(
            pretrained: bool = False, *, name: str = name, network: Network = network, **kwargs: Any
        ):
            trained = {}
            if pretrained:
                kwargs = _choose_plain_weights(name, network, kwargs)
                trained = _trained_with(name, model_cls, kwargs)
            keywords = {**network.kwargs, **trained, **kwargs}
            model = build_network(model_cls, name, pretrained, **keywords)
            # needed to build it again; timm's configuration has no field for it
            model.trained_with = trained
            model._model_args = dict(trained)  # timm's save_for_hf writes these
            check = partial(_check_note, module, model_cls, keywords)
            model.register_load_state_dict_pre_hook(check)
            return model

        entry.__name__ = name
        entry.__qualname__ = name
        entry.__module__ = module
        entry.__doc__ = network.about
        setattr(sys.modules[module], name, register_model(entry))
        _NETWORKS[name] = (module, network)


def _trained_with(
    name: str, model_cls: type[nn.Module], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords of the weights that timm will load, except those that the network or the caller sets.

    Raises:
        UsageError: the network's or the caller's keywords contradict them.
    """
    weights = _weights_of(name, kwargs)
    if weights is None:
        return {}
    source, trained = weights
    keywords = {**get_network(name).kwargs, **kwargs}
    opening = f"the weights {source} were trained with"
    check_agreement(opening, trained, keywords, defaults_of(model_cls))
    return {
        key: value for key, value in trained.items() if key not in keywords and not is_free(key)
    }


def _weights_of(name: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the name or path of the weights that timm will load, and the keywords that they were trained with, or None
    if these are not known.

    None also for weights of another family's network: they are converted, or do not fit.
    """
    cfg = resolve_pretrained_cfg(
        name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay")
    )
    family, network = _NETWORKS[name]
    # timm reads these from the config.json of the hub or a folder
    saved = kwargs.get("pretrained_model_args")
    if saved:
        return cfg.hf_hub_id or cfg.file or name, {**network.kwargs, **saved}
    if not cfg.file:
        return None
    path = Path(cfg.file)
    for full in (path.stem, f"{name}.{cfg.tag}"):
        base, _, tag = full.partition(".")
        registered = base in _NETWORKS and is_model_pretrained(full)
        if registered and get_pretrained_cfg(full).file == cfg.file:
            trained = get_network(base).trained.get(tag, {})
            return full, {**get_network(base).kwargs, **trained}
    trained = _noted_keywords(read_note(path), family)
    return None if trained is None else (str(path), trained)


def _noted_keywords(note: Mapping[str, Any] | None, family: str) -> dict[str, Any] | None:
    """Return the keywords in the note of weights, or None if there is no note or it is of another family's network."""
    if note is None or _NETWORKS.get(note["model"], ("",))[0] != family:
        return None
    return {**get_network(note["model"]).kwargs, **note["model_kwargs"]}


def _check_note(
    family: str,
    model_cls: type[nn.Module],
    kwargs: Mapping[str, Any],
    model: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    *_: Any,
) -> None:
    """Raise UsageError if a network's keywords contradict those in the note of weights."""
    note = take_note(state, prefix)
    trained = _noted_keywords(note, family)
    if trained is None:
        return  # names or shapes differ
    defaults = defaults_of(model_cls)
    keywords = {**dict.fromkeys(trained), **defaults, **kwargs}
    keywords.pop("qk_norm")  # loading takes it over or refuses the weights
    opening = f"the weights of {note['model']} were trained with"
    check_agreement(opening, trained, fixed(keywords, model), defaults)


def _choose_plain_weights(name: str, network: Network, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a pretrained network; with fusion="add" they contain the plain network's weights.

    The tag of weights, as in "ea_aa_resnet50.a1_in1k", is one of the plain network's.

    Raises:
        UsageError: weights are wanted without fusion="add", and only the plain network has some.
        RuntimeError: the plain network has no weights of this tag.
    """
    tag = kwargs.get("pretrained_cfg")
    if network.plain is None or not isinstance(tag, (str, type(None))):
        return kwargs
    if kwargs.get("fusion") == "add":
        if tag is None and _weights_of(name, kwargs) is not None:
            return kwargs
        cfg = get_pretrained_cfg(f"{network.plain}.{tag}" if tag else network.plain)
        return {**kwargs, "pretrained_cfg": replace(cfg, architecture=name).to_dict()}
    if not kwargs.get("pretrained_cfg_overlay"):
        raise UsageError(
            f"{name} has no pretrained weights of its own. It can begin as timm's {network.plain}, with its weights: "
            f"timm.create_model({name!r}, pretrained=True, fusion='add'), or --model-kwargs fusion=add. "
            "Without weights: pretrained=False"
        )
    return kwargs


def name_plain(plain: nn.Module) -> None:
    """If an unevolved network has a name of this package, rename it to timm's network that it is now, with keywords."""
    cfg = getattr(plain, "pretrained_cfg", None) or {}
    name = cfg.get("architecture")
    if name not in _NETWORKS:
        return
    timms = get_network(name).plain or name.partition("_")[2]
    if not is_model(timms):  # the plain network is one of this package
        return
    plain.pretrained_cfg = plain.default_cfg = {**cfg, "architecture": timms}
    taken = inspect.signature(type(plain)).parameters
    model_args = getattr(plain, "_model_args", {})
    plain._model_args = {key: value for key, value in model_args.items() if key in taken}


def list_networks(module: str | None = None) -> list[str]:
    """Return the names of our networks, from one family's file ("attn_resnet") or all, in order of registration."""
    return [
        name
        for name, (home, _) in _NETWORKS.items()
        if module is None or home.split(".")[-1] == module
    ]


def get_network(name: str) -> Network:
    """Return the network registered under a name of ours, with or without the tag of weights.

    Raises:
        KeyError: the name is not one of ours.
    """
    return _NETWORKS[name.split(".")[0]][1]


def plain_network(name: str) -> str | None:
    """Return the name of timm's network with whose weights fusion="add" begins, or None for other networks."""
    name = name.split(".")[0]
    return get_network(name).plain if name in _NETWORKS else None


def imagenet_cfg(first_conv: str, classifier: str, **kwargs: Any) -> dict:
    """Return timm's default configuration of a network for ImageNet; keywords replace its entries."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": classifier,
        "license": "apache-2.0",
        **kwargs,
    }


# for 32x32 images, CIFAR-10's unless keywords say otherwise, scaled as train-cifar does (`ea_vision.data.scaling`)
cifar_cfg = partial(
    imagenet_cfg,
    num_classes=10,
    input_size=(3, 32, 32),
    pool_size=(4, 4),
    crop_pct=1.0,
    crop_mode="rounded",
    interpolation="bicubic",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
# for photos of six kinds of scenes at 112 pixels (`experiments/scenes`)
scenes_cfg = partial(
    imagenet_cfg,
    num_classes=6,
    input_size=(3, 112, 112),
    pool_size=(4, 4),
    label_names=SCENES,
    notes=("six kinds of scenes at 112 pixels, not ImageNet",),
)


def shipped_weights(name: str) -> str:
    """Return the path of a shipped weights file: in the installed package, or in a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "weights" / f"{name}.safetensors"
    if installed.is_file():
        return str(installed)
    checkout = package.parent / "weights"
    return str(checkout / f"{name}.safetensors")


def build_network(
    model_cls: type[nn.Module], variant: str, pretrained: bool, **kwargs: Any
) -> nn.Module:
    """Build a network by timm's build_model_with_cfg.

    If the class has `feature_indices`, features come from forward_intermediates: timm's default runs stages one by one,
    which is impossible if they hand attention logits on. Checkpoints pass through the class's `checkpoint_filter_fn`,
    if it has one, else through that of `layers.fit_weights`. Notes in the weights' configuration are logged.

    Raises:
        RuntimeError: pretrained weights are wanted, and there are none or their file is missing.
    """
    if pretrained:
        cfg = resolve_pretrained_cfg(
            variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay")
        )
        if cfg.file and not Path(cfg.file).exists():
            raise RuntimeError(
                f"the weights of {variant} are missing: {Path(cfg.file).name} belongs in the folder weights/ of a "
                f"checkout, or comes with the wheel; got neither"
            )
        overlay = kwargs.get("pretrained_cfg_overlay") or {}
        registered = not {"file", "state_dict"} & overlay.keys()
        if cfg.notes and registered:
            log.info("weights of %s: %s", variant, "; ".join(cfg.notes))
    if hasattr(model_cls, "feature_indices"):
        kwargs["feature_cfg"] = {
            "out_indices": kwargs.pop("out_indices", model_cls.feature_indices),
            "feature_cls": "getter",
        }
    filter_fn = getattr(model_cls, "checkpoint_filter_fn", checkpoint_filter_fn)

    def filter_weights(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        take_note(state_dict)  # read from the file's metadata
        return filter_fn(state_dict, model)

    net = build_model_with_cfg(
        model_cls, variant, pretrained, pretrained_filter_fn=filter_weights, **kwargs
    )
    net.pretrained_cfg.pop("state_dict", None)  # already loaded; timm would keep it
    inner = getattr(net, "model", None)
    if hasattr(inner, "feature_indices"):  # timm's feature getter lacks the method
        net.set_grad_checkpointing = inner.set_grad_checkpointing
    return net
