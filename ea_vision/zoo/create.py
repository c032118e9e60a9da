"""Build networks: by a source, or for a trainer's data and options. What a constructor raises becomes one line."""

import importlib
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import torch
from timm.layers import to_ntuple
from torch import nn

from ea_vision.base.errors import UsageError, as_usage_error, extra_required
from ea_vision.models import plain_network
from ea_vision.zoo.source import (
    CLASSIFICATION,
    EXPORTED,
    TRANSFORMERS,
    WEIGHTS,
    Source,
    check_model_name,
)
from ea_vision.zoo.weights_file import DAMAGED, UNREADABLE, check_finite, load_file, read_weights

log = logging.getLogger(__name__)
DATA_KEYWORDS = ("num_classes", "in_chans", "img_size")  # of a model, fixed by data and options


@dataclass(frozen=True)
class Kind:
    """Networks that are built and prepared in one way.

    Attributes:
        create: (name, **keywords) -> the network.
        prepared: (network, source, trained) -> a `LoadedModel`, with the preparation of its images.
        fixed_size: whether they take images of one size.
    """

    create: Callable[..., nn.Module]
    prepared: Callable[..., Any]
    fixed_size: bool = False


# By a run's task or a file's suffix. A room registers its kinds when it is imported; ROOMS names those that `kind_of`
# imports when a target needs them.
KINDS: dict[str, Kind] = {}
ROOMS = {
    CLASSIFICATION: "ea_vision.zoo.loaded",
    TRANSFORMERS: "ea_vision.zoo.loaded",
    "detection": "ea_vision.detection.loaded",
    **dict.fromkeys(EXPORTED, "ea_vision.deployment.files"),
}


def register_kind(name: str, kind: Kind) -> None:
    """Let the door build networks of a kind: of a run's task, or of files with a suffix."""
    KINDS[name] = kind


def kind_of(source: Source) -> Kind:
    """Return how networks of a source's kind are built and prepared; import the room that registers it.

    Raises:
        UsageError: the kind is unknown.
    """
    if source.kind in ROOMS:
        importlib.import_module(ROOMS[source.kind])
    if source.kind not in KINDS:
        raise UsageError(
            f"{source.target} must be a model of {', '.join(ROOMS)}, got one of {source.kind!r}: "
            "another release wrote it"
        )
    return KINDS[source.kind]


def create(source: Source, *, random: bool = False, seed: int = 0) -> nn.Module:
    """Build the network of a source. Weights in a file of their own (`source.weights`) are not loaded.

    Args:
        random: whether to leave out pretrained weights.
        seed: of random weights; torch's generator is not changed.

    Raises:
        UsageError: the network refuses its keywords, or pretrained weights cannot be loaded.
    """
    pretrained = source.pretrained and not random
    constructor = partial(kind_of(source).create, source.name, pretrained=pretrained)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the network is built on the CPU
        model, _ = build(constructor, source.name, source.kwargs)
    return model


def load_network(
    source: Source, *, random: bool = False, seed: int = 0
) -> tuple[nn.Module, int | None]:
    """Build the network of a source and load its weights; return it in evaluation mode, with the epoch of its
    checkpoint.

    Args:
        random: whether it keeps random weights.
        seed: of random weights.

    Raises:
        UsageError: the network refuses its keywords, or weights are missing or do not fit.
    """
    model = create(source, random=random, seed=seed)
    epoch = None
    if source.weights is not None and not random:
        if source.is_run and not source.weights.exists():
            raise UsageError(
                f"run {source.target} has no {WEIGHTS} yet: it appears with the first evaluated epoch"
            )
        epoch = load_file(model, source.weights)
    return model.eval(), epoch


def build(
    constructor: Callable[..., nn.Module],
    name: str,
    kwargs: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any] | None = None,
    optional: Collection[str] = frozenset(),
) -> tuple[nn.Module, dict]:
    """Call a constructor with the keywords that data and options have `fixed` and with `kwargs`, dropping img_size of
    `fixed` and `optional` keywords (a recipe's) that it does not accept. The log says which of these were dropped.

    Args:
        name: of the model, for messages.

    Returns:
        the model, and the keywords that it was built with.

    Raises:
        UsageError: a keyword that contradicts a fixed one or that the constructor lacks, or values that it refuses.
    """
    fixed = fixed or {}
    for key, value in fixed.items():
        if kwargs.get(key, value) != value:
            raise UsageError(
                f"model keyword {key} must be {value}, as data and options are, got {kwargs[key]!r}"
            )
    keywords = {**fixed, **kwargs}
    droppable = {*optional, "img_size"} if fixed else optional
    values = " ".join(f"{key}={value}" for key, value in keywords.items()) or "its defaults"
    with as_usage_error(f"model {name} refuses {values}"):
        try:
            model, taken = create_leaving_out(constructor, keywords, droppable)
        except TypeError as error:
            unknown = _unknown_keyword(error)
            if unknown not in keywords:
                raise
            raise UsageError(f"model {name} has no keyword {unknown!r}") from error
    for key in keywords:
        if key not in taken and key != "img_size":
            log.info("%s has no %s: the recipe's %s=%s is left out", name, key, key, keywords[key])
    return model, taken


def create_leaving_out(
    constructor: Callable[..., nn.Module], keywords: Mapping[str, Any], optional: Collection[str]
) -> tuple[nn.Module, dict]:
    """Call constructor(**keywords), dropping `optional` keywords that it does not accept; return the model and the
    keywords used.

    Raises:
        TypeError and others: what the constructor raises with the keywords that are left.
    """
    keywords = dict(keywords)
    random_state = torch.get_rng_state()
    while True:
        # a refused attempt must not change the weights of the next
        torch.set_rng_state(random_state)
        try:
            return constructor(**keywords), keywords
        except TypeError as error:
            unknown = _unknown_keyword(error)
            if unknown not in keywords or unknown not in optional:
                raise
            del keywords[unknown]


def _unknown_keyword(error: Exception) -> str | None:
    """Return the keyword that an error of Python's or timm's calls unexpected (the first of several), or None."""
    match = re.search(r"unexpected keyword argument(?:\(s\): \[| )'(\w+)'", str(error))
    return match[1] if match else None


# ---- classifiers -----------------------------------------------------------------------------------------------------


def create_classifier(
    name: str,
    kwargs: Mapping[str, Any],
    optional: frozenset[str] = frozenset(),
    *,
    num_classes: int,
    img_size: int,
    pretrained: bool = False,
    weights: str | Path | None = None,
) -> tuple[nn.Module, dict]:
    """Create a registered timm model for square RGB images.

    Args:
        kwargs: further keywords of the model; those in `optional` are left out if it lacks them, as the log says.
        img_size: side of the images in pixels; passed on to models that take an image size.
        pretrained: load its pretrained weights; those of the classifier only for the same number of classes.
        weights: a file to take as its pretrained weights.

    Returns:
        The model, and the keywords that `timm.create_model(name, **keywords)` needs to build it again.

    Raises:
        UsageError: unknown model or keyword, or values the model refuses.
    """
    check_model_name(name)
    constructor = partial(timm_model, name, pretrained=pretrained)
    if weights is not None:
        constructor = partial(_with_weights, name, Path(weights))
    fixed = {"num_classes": num_classes, "in_chans": 3, "img_size": img_size}
    model, taken = build(constructor, name, kwargs, fixed=fixed, optional=optional)
    return model, {**getattr(model, "trained_with", {}), **taken}


def timm_model(name: str, *, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create a model of timm's registry, or by hf-hub:OWNER/NAME or local-dir:FOLDER; check pretrained weights.

    Raises:
        TypeError and others: the model refuses a keyword.
        UsageError: no such model or weights, or they cannot be fetched or loaded.
    """
    check_model_name(name)
    if not pretrained:
        return timm.create_model(name, **kwargs)
    registered = timm.is_model(name)
    tagged = timm.models.is_model_pretrained(name) or timm.list_pretrained(f"{name}.*")
    lacks_weights = registered and not tagged and plain_network(name) is None
    if lacks_weights and not kwargs.get("pretrained_cfg_overlay"):
        raise UsageError(
            f"there are no pretrained weights of {name}: train it, or give a file by --pretrained-path"
        )
    try:
        model = timm.create_model(name, pretrained=True, **kwargs)
    except (TypeError, UsageError):
        raise
    except Exception as error:  # the Hub's clients raise classes of their own
        if registered:
            with torch.device("meta"):
                timm.create_model(name, **kwargs)  # raises what the model refuses
        raise UsageError(
            f"the pretrained weights of {name} cannot be fetched or loaded ({shorten(str(error), 400)}): "
            "connect to the network, or give a file by --pretrained-path"
        ) from error
    file = str(model.pretrained_cfg.get("file") or "")
    if file.endswith(".safetensors"):
        read_weights(Path(file))  # verifies the checksum, which timm does not
    return model


def _with_weights(name: str, path: Path, **kwargs: Any) -> nn.Module:
    """Create a model with the weights of a file, as timm would load its pretrained ones. If the file's classifier has
    another number of classes, the model keeps its own.

    Raises:
        UsageError: the file cannot be read, or does not fit the model.
    """
    model = timm.create_model(name, **kwargs)
    with as_usage_error(f"weights {path} cannot be read", UNREADABLE):
        path.stat()  # timm's error says nothing
        safe = path.suffix.lower() == ".safetensors"
        state = read_weights(path) if safe else timm.models.load_state_dict(str(path))
    classifiers = to_ntuple(1)(model.pretrained_cfg.get("classifier") or ())
    for key, value in model.state_dict().items():
        is_classifier = key.rpartition(".")[0] in classifiers
        if is_classifier and key in state and state[key].shape != value.shape:
            shape = list(state[key].shape)
            log.info(f"{key} of {path} is left out: its shape {shape} is not {list(value.shape)}")
            state[key] = value
    overlay = {
        "file": str(path),  # its metadata names the keywords; the tensors are those of state_dict
        "state_dict": state,
        "num_classes": model.num_classes,
        "label_offset": 0,
        "custom_load": False,
    }
    with as_usage_error(f"weights {path} do not fit {name}"):
        loaded = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    loaded.pretrained_cfg = model.pretrained_cfg
    check_finite(loaded.state_dict(), str(path))
    return loaded


# ---- models of transformers ------------------------------------------------------------------------------------------


def transformers_model(folder: str, *, pretrained: bool = True, **kwargs: Any) -> nn.Module:
    """Load a model of transformers from a folder of `save_pretrained`, with its evolution if it has one.

    Raises:
        UsageError: random weights are wanted, transformers is missing or does not know the model, or the weights cannot
            be read.
    """
    with extra_required(folder, "transformers"):
        import transformers
    from ea_vision.models import huggingface

    if not pretrained:
        raise UsageError(f"random weights are of timm's models and runs, got the folder {folder}")
    config, _ = transformers.PreTrainedConfig.get_config_dict(folder)
    if huggingface.NAME in config:
        load = huggingface.from_pretrained
    else:
        [architecture] = config.get("architectures") or ["AutoModel"]
        if not hasattr(transformers, architecture):
            raise UsageError(f"{folder} needs a transformers that has {architecture}")
        load = getattr(transformers, architecture).from_pretrained
    with as_usage_error(f"weights in {folder} cannot be read", DAMAGED):
        model, info = load(folder, **kwargs, output_loading_info=True)
    huggingface.check_weights(folder, info)  # also of a plain model with an evolved part
    return model
