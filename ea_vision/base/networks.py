"""Models by name and their weights, with errors that name near matches."""

import hashlib
import json
import math
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import safetensors
import safetensors.torch
import timm
import timm.data
import torch
from timm.layers import to_ntuple
from torch import Tensor, nn

from ea_vision.base.errors import UsageError, near_matches

# CIFAR-10's classes in its order, as timm's `label_names` and our folders have them.
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# The classes of experiments/scenes, in their order.
SCENES = ("buildings", "forest", "glacier", "mountain", "sea", "street")

# name of the metadata entry, and of the note, that say what weights were made with
MADE_WITH = "made_with"
DATA_KEYWORDS = ("num_classes", "in_chans", "img_size")  # of a model, fixed by data and options

# Exceptions that constructors raise for keywords that they refuse.
REFUSALS = (
    ValueError,
    TypeError,
    AssertionError,
    RuntimeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    OSError,
)


def channel_statistics(name: str, values: Any) -> tuple[float, ...]:
    """Return the mean or standard deviation of images' three channels as floats. A single value is that of each
    channel, as in timm.

    Args:
        name: "mean" or "std".

    Raises:
        UsageError: it is not one or three finite numbers, or one of "std" is not above 0.
    """
    try:
        numbers = () if isinstance(values, (str, Mapping)) else tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) == 1:
        numbers *= 3
    usable = len(numbers) == 3 and all(map(math.isfinite, numbers))
    above = ""
    if name == "std":
        above = ", above 0"
        usable = usable and min(numbers) > 0
    if not usable:
        raise UsageError(f"{name} must be three numbers, one per channel{above}, got {values!r}")
    return numbers


def hub_source(name: str) -> tuple[str, str]:
    """Return ("hf-hub", OWNER/NAME) or ("local-dir", FOLDER) for names of timm's that begin so, else ("", name)."""
    source, colon, place = name.partition(":")
    if colon and source in ("hf-hub", "local-dir"):
        return source, place
    return "", name


def check_model_name(name: str, alternative: str = "") -> None:
    """Raise UsageError, with near matches, unless timm has a model of this name (a `.tag` is allowed).

    A name may also be hf-hub:OWNER/NAME, which is not looked up here, or local-dir:FOLDER.

    Args:
        alternative: what else the name might be, such as "or run folder "; then folders beside it are matches, too.
    """
    source, place = hub_source(name)
    if source == "local-dir" and not Path(place, "config.json").is_file():
        raise UsageError(
            f"{name} must be a folder with a config.json, as timm's save_for_hf writes"
        )
    if source or timm.is_model(name):
        return
    if not alternative and Path(name, "config.yaml").is_file():
        raise UsageError(
            f"the name of a model is required, got the run {name}: --pretrained-path {name} begins with its weights"
        )
    folder = Path(name).parent
    beside = []
    if alternative and "/" in name:
        beside = [str(path) for path in folder.glob("*") if path.is_dir()]
    if beside:
        near = near_matches(name, beside, f"folders in {folder}")
    else:
        near = near_matches(name.split(".")[0], timm.list_models(), "models")
    raise UsageError(f"unknown model {alternative}{name!r}; {near}")


def create_classifier(
    name: str,
    kwargs: dict,
    optional: frozenset[str] = frozenset(),
    *,
    num_classes: int,
    img_size: int,
    pretrained: bool = False,
    weights: str = "",
    notice=print,
) -> tuple[nn.Module, dict]:
    """Create a registered timm model for square RGB images.

    Args:
        kwargs: further keywords of the model; those in `optional` are left out, with a notice, if it lacks them.
        img_size: side of the images in pixels; passed on to models that take an image size.
        pretrained: load its pretrained weights; those of the classifier only for the same number of classes.
        weights: a file to take as its pretrained weights.

    Returns:
        The model, and the keywords that `timm.create_model(name, **keywords)` needs to build it again.

    Raises:
        UsageError: unknown model or keyword, or values the model refuses.
    """

    def create(**keywords: Any) -> nn.Module:
        if weights:
            return _with_weights(name, keywords, weights, notice)
        return (
            pretrained_model(name, keywords) if pretrained else timm.create_model(name, **keywords)
        )

    fixed = {"num_classes": num_classes, "in_chans": 3, "img_size": img_size}
    model, taken = create_by_keywords(create, name, fixed, kwargs, optional, notice)
    return model, {**getattr(model, "trained_with", {}), **taken}


def create_by_keywords(
    create: Callable[..., nn.Module],
    name: str,
    fixed: dict,
    kwargs: dict,
    optional: frozenset[str],
    notice=print,
) -> tuple[nn.Module, dict]:
    """Call `create` with the keywords that data and options have `fixed` and with `kwargs`, dropping img_size and
    `optional` keywords (a recipe's) that it does not accept.

    Args:
        name: of the model.
        notice: called with a line for each of a recipe's keywords that was dropped.

    Returns:
        the model, and the keywords that it was made with.

    Raises:
        UsageError: unknown model, a keyword that contradicts a fixed one or that it lacks, or values that it refuses.
    """
    check_model_name(name)
    for key, value in fixed.items():
        if kwargs.get(key, value) != value:
            raise UsageError(
                f"model keyword {key} must be {value}, as data and options are, got {kwargs[key]!r}"
            )
    wanted = fixed | kwargs
    try:
        model, taken = create_leaving_out(create, wanted, optional | {"img_size"})
    except UsageError:  # from loading weights
        raise
    except REFUSALS as error:
        unknown = _unknown_keyword(error)
        if unknown in wanted:
            raise UsageError(
                f"model {name} has no keyword {unknown!r} (given by --model-kwargs)"
            ) from error
        shown = " ".join(f"{k}={v}" for k, v in wanted.items())
        raise UsageError(f"model {name} refuses {shown}: {error}") from error
    for key in wanted:
        if key not in taken and key != "img_size":
            notice(f"{name} has no {key}: the recipe's {key}={wanted[key]} is left out")
    return model, taken


def create_leaving_out(
    create: Callable[..., nn.Module], wanted: dict, optional: Collection[str]
) -> tuple[nn.Module, dict]:
    """Call create(**wanted), dropping `optional` keywords that it does not accept; return the model and the keywords.

    Raises:
        TypeError and others: what `create` raises with the keywords that are left.
    """
    wanted = dict(wanted)
    random_state = torch.get_rng_state()
    while True:
        # a refused attempt must not change the weights of the next
        torch.set_rng_state(random_state)
        try:
            return create(**wanted), wanted
        except TypeError as error:
            unknown = _unknown_keyword(error)
            if unknown not in wanted or unknown not in optional:
                raise
            del wanted[unknown]


def _unknown_keyword(error: Exception) -> str | None:
    """Return the keyword that an error of Python's or timm's calls unexpected (the first of several), or None."""
    found = re.search(r"unexpected keyword argument(?:\(s\): \[| )'(\w+)'", str(error))
    return found[1] if found else None


def pretrained_model(name: str, kwargs: dict | None = None, **more: Any) -> nn.Module:
    """Create a model with its pretrained weights, by a registered name, hf-hub:OWNER/NAME or local-dir:FOLDER.

    Raises:
        TypeError: it lacks a keyword.
        UsageError: no such model or weights, or they cannot be fetched or loaded.
    """
    check_model_name(name)
    tagged = timm.models.is_model_pretrained(name) or timm.list_pretrained(f"{name}.*")
    if not hub_source(name)[0] and not tagged:
        raise UsageError(
            f"there are no pretrained weights of {name}: train it, or give a file by --pretrained-path"
        )
    try:
        model = timm.create_model(name, pretrained=True, **(kwargs or {}), **more)
        shipped = str(model.pretrained_cfg.get("file") or "")
        if shipped.endswith(".safetensors"):
            read_weights(Path(shipped))  # verifies the checksum, which timm does not
        return model
    except (TypeError, UsageError):
        raise
    except Exception as error:  # the Hub's clients raise classes of their own
        raise UsageError(
            f"the pretrained weights of {name} cannot be fetched or loaded ({shorten(str(error), 400)}): "
            "connect to the network, or give a file by --pretrained-path"
        ) from error


def _with_weights(name: str, kwargs: dict, path: str, notice) -> nn.Module:
    """Create a model with the weights of a file, as timm would load its pretrained ones. If the file's classifier has
    another number of classes, the model keeps its own.

    Raises:
        UsageError: the file cannot be read, or does not fit the model.
    """
    model = timm.create_model(name, **kwargs)
    try:
        Path(path).stat()  # timm's error says nothing
        safe = path.lower().endswith(".safetensors")
        state = read_weights(Path(path)) if safe else timm.models.load_state_dict(path)
    except UsageError:
        raise
    except (*REFUSALS, safetensors.SafetensorError, pickle.UnpicklingError) as error:
        raise UsageError(f"weights {path} cannot be read: {error}") from error
    classifiers = to_ntuple(1)(model.pretrained_cfg.get("classifier") or ())
    for key, own in model.state_dict().items():
        of_classifier = key.rpartition(".")[0] in classifiers
        if of_classifier and key in state and state[key].shape != own.shape:
            notice(
                f"{key} of {path} is left out: its shape {list(state[key].shape)} is not {list(own.shape)}"
            )
            state[key] = own
    given = {
        "file": path,  # its metadata names the keywords; the tensors are those of state_dict
        "state_dict": state,
        "num_classes": model.num_classes,
        "label_offset": 0,
        "custom_load": False,
    }
    try:
        loaded = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=given, **kwargs)
    except REFUSALS as error:
        raise UsageError(f"weights {path} do not fit {name}: {shorten(str(error), 400)}") from error
    loaded.pretrained_cfg = model.pretrained_cfg
    check_finite(loaded.state_dict(), path)
    return loaded


def _digest_of(tensors: dict[str, Tensor]) -> str:
    """Return SHA-256 over names, types, shapes and values of contiguous tensors on the CPU."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        about = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        digest.update(about.encode())
        if tensor.numel():
            content = tensor.reshape(-1).view(torch.uint8)
            digest.update(content.numpy())
    return digest.hexdigest()


def encode_weights(state: dict[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """Return a safetensors file for `timm.create_model(..., checkpoint_path=...)`, with a checksum.

    about: further metadata of the file.
    """
    tensors = {}
    for name, value in state.items():
        tensors[name] = value.detach().cpu().contiguous()
    metadata = {"format": "pt", **(about or {}), "sha256": _digest_of(tensors)}
    return safetensors.torch.save(tensors, metadata)


def with_note(state: dict[str, Tensor], note: str) -> dict[str, Tensor]:
    """Return weights with `note`, which says what they were made with, as a tensor of bytes.

    timm's `checkpoint_path=` passes the tensors of a file to a network, but not its metadata. Networks of ea_vision
    remove the note and check it; `read_weights` removes it.
    """
    return {**state, MADE_WITH: torch.frombuffer(bytearray(note, "utf-8"), dtype=torch.uint8)}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a safetensors file's header.

    Raises:
        OSError, ValueError: it cannot be read, or is not a safetensors file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    return header.get("__metadata__", {})


def read_made_with(path: Path) -> dict[str, Any] | None:
    """Return what a weights file says about the network that it was made with, or None if it says nothing.

    Returns:
        model, its registered name; model_kwargs; and for a run of ours also task, classes, mean, std.
    """
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return None
    try:
        said = read_metadata(path).get(MADE_WITH)
    except (OSError, ValueError, AttributeError):  # reading the weights reports the error
        return None
    return json.loads(said) if said else None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read safetensors weights. Those that `encode_weights` made carry a checksum.

    Raises:
        UsageError: no such file, not safetensors, or another checksum than was written.
    """
    try:
        # safetensors cannot open a name that is not UTF-8
        state = safetensors.torch.load(path.read_bytes())
        expected = read_metadata(path).get("sha256")
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"weights {path} cannot be read: {error}") from error
    if expected is not None and _digest_of(state) != expected:
        raise UsageError(f"weights {path} are damaged: their checksum does not match")
    state.pop(MADE_WITH, None)
    return state


def load_weights(model: nn.Module, path: Path) -> None:
    """Load safetensors weights strictly; raise UsageError as `read_weights` and `load_state` do."""
    load_state(model, read_weights(path), str(path))


def load_state(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load weights and buffers strictly.

    Raises:
        UsageError: names or shapes differ from the model's, or values are not finite.
    """
    check_finite(state, source)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"weights {source} do not fit the model: {shorten(str(error), 400)}"
        ) from error


def check_finite(state: dict[str, Tensor], source: str) -> None:
    """Raise UsageError unless all weights and buffers are finite."""
    spoilt = non_finite(state)
    if spoilt:
        raise UsageError(
            f"weights {source} must be finite numbers, got others in {', '.join(spoilt[:3])}"
        )


def non_finite(state: dict[str, Tensor]) -> list[str]:
    """Return the names of the weights and buffers that hold NaN or infinity."""
    finite = {name: bool(value.isfinite().all()) for name, value in state.items()}
    return [name for name in state if not finite[name]]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep evaluation mode inside the block, and restore each module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """Give a model's 4-D tensors (the weights of 2-D convolutions) this memory format, in place; return the model.

    `model.to(memory_format=torch.channels_last)` refuses networks with weights of 5 dimensions, as timm's lambda
    networks have.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)
    return model


def check_classes(
    model: nn.Module, classes: list[str], expected: list[str] | None, source: str
) -> None:
    """Raise UsageError if a model's classes differ from those of the data in number or, if they are known, in name."""
    if model.num_classes != len(classes):
        raise UsageError(f"{source} has {model.num_classes} classes, the data {len(classes)}")
    if expected is not None and expected != classes:
        first = next((a, b) for a, b in zip(expected, classes, strict=True) if a != b)
        raise UsageError(
            f"{source} was trained on other classes: {first[0]!r} where the data has {first[1]!r}"
        )


def pretrained_classes(model: nn.Module, classes: list[str]) -> list[str] | None:
    """Return the class names of a model's pretrained weights, to compare with the data's, or None if they are unknown.

    They are the `label_names` of its configuration. Without these they are ImageNet's, if the model has 1000 classes
    and the data's are WordNet IDs.
    """
    if model.pretrained_cfg.get("label_names"):
        return list(model.pretrained_cfg["label_names"])
    if model.num_classes == 1000 and all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return list(timm.data.ImageNetInfo().label_names())
    return None


def image_statistics(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std, per channel, of images in 0..1 that the model's configuration asks for."""
    data_config = timm.data.resolve_model_data_config(model)
    return data_config["mean"], data_config["std"]


def set_image_statistics(model: nn.Module, about: Mapping[str, Any]) -> None:
    """Set mean and std of images in 0..1 in a model's configuration to those of a run.

    about: section of the run, with mean and std per channel; without them the configuration does not change.
    """
    if "mean" in about:
        statistics = {"mean": tuple(about["mean"]), "std": tuple(about["std"])}
        model.pretrained_cfg = {**model.pretrained_cfg, **statistics}
