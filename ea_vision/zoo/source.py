"""What a target names: a model's name, a run, a file of weights, an exported file, or a folder or hub with a model.

`source_of` alone looks at prefixes and paths. What it returns says how to build the network (`zoo.create`), where its
weights are (`zoo.weights_file`) and how its images are prepared (`zoo.loaded`).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import yaml
from timm.models import is_model, is_model_pretrained

from ea_vision.base.errors import UsageError, as_usage_error, near_matches
from ea_vision.models import plain_network
from ea_vision.models.note import read_note

TARGET_HELP = (
    "NAME of a timm model (pretrained where it has weights, else random), RUN folder or a checkpoint in one, a file "
    "of weights, a saved folder, hf-hub:OWNER/NAME or local-dir:FOLDER"
)
# files of a run's folder
FORMAT = 1
CONFIG = "config.yaml"
WEIGHTS = "model.safetensors"
SNAPSHOTS = "snapshots"  # the folder of --snapshot-epochs
CHECKPOINTS = ("*.ckpt", f"{SNAPSHOTS}/*.safetensors")
SAVED = "config.json"  # of a folder that timm's save_for_hf or transformers' save_pretrained wrote
# kinds of networks
CLASSIFICATION = "classification"  # what a run learns, unless its config.yaml has another `task`
TRANSFORMERS = "transformers"
HUBS = ("hf-hub:", "local-dir:")  # before the names of timm's models elsewhere
EXPORTED = (".onnx", ".pt2")  # by the suffix of a file
# what reading a config.yaml raises that is damaged, missing or another program's
CONFIG_ERRORS = (OSError, yaml.YAMLError, ValueError, TypeError, LookupError)


@dataclass(frozen=True)
class Source:
    """What a target names.

    Attributes:
        target: as it was written.
        name, kwargs: how the network is built; see `ea_vision.zoo.create.Kind`.
        label: for titles.
        kind: key of `ea_vision.zoo.create.KINDS`.
        weights: a file to load, or None.
        pretrained: whether building the network loads its weights.
        options: of a run, or those of its weights about the images to evaluate on, else {}.
        note: of a run or of weights, else {}: classes, mean, std, ...
        run: the folder, if the target is one or a file in one.
    """

    target: str
    name: str
    label: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: str = CLASSIFICATION
    weights: Path | None = None
    pretrained: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the network has trained weights."""
        return self.pretrained or self.weights is not None

    @property
    def is_run(self) -> bool:
        """Whether the target is a run folder, not a file in one."""
        return self.run is not None and self.target in (str(self.run), str(self.run / SNAPSHOTS))

    def check_kind(self, kind: str = CLASSIFICATION) -> None:
        """Raise UsageError unless the network is of this kind."""
        if self.kind != kind:
            raise UsageError(f"{self.target} must be a model of {kind}, got one of {self.kind}")


def source_of(target: str, **kwargs: Any) -> Source:
    """Return what a target names.

    Args:
        target: a name, a run folder, a file, a folder of `save_pretrained` or of timm's `save_for_hf`,
            hf-hub:OWNER/NAME or local-dir:FOLDER.
        kwargs: further keywords of a model that is not of a run or file.

    Raises:
        UsageError: there is no such model, run or file, a file does not name its network, or keywords are given beside
            a run or a file.
    """
    if not target:  # a shell's variable without a value, not the working directory
        raise UsageError("a model's name, a run folder or a file is required, got an empty text")
    path = Path(target)
    if os.path.isfile(path):
        _refuse(kwargs, target)
        return _of_file(path)
    if os.path.exists(path):
        return _of_folder(path, kwargs)
    prefix, _, place = target.partition(":")
    if prefix == "local-dir":
        return _of_saved(Path(place), target, kwargs)
    if prefix == "hf-hub":
        return Source(target, target, target, kwargs, pretrained=True)
    check_model_name(target, "or run folder ")
    # a network with fusion="add" begins with the weights of the plain network
    begins = kwargs.get("fusion") == "add" and plain_network(target) is not None
    return Source(target, target, target, kwargs, pretrained=begins or is_model_pretrained(target))


def _refuse(kwargs: Mapping[str, Any], target: str) -> None:
    """Raise UsageError for keywords beside a run or a file of weights."""
    if kwargs:
        raise UsageError(
            f"{target} has the keywords that its weights were trained with, got "
            f"{', '.join(f'{key}={value!r}' for key, value in kwargs.items())} beside it"
        )


def _of_folder(path: Path, kwargs: Mapping[str, Any]) -> Source:
    run = path.parent if path.name == SNAPSHOTS else path
    if not (run / CONFIG).is_file() and (path / SAVED).is_file():
        return _of_saved(path, str(path), kwargs)
    _refuse(kwargs, str(path))
    return _of_run(run, run / WEIGHTS, str(path))


def _of_saved(folder: Path, target: str, kwargs: Mapping[str, Any]) -> Source:
    """Return the source of a folder with a config.json: transformers' has a model_type, timm's has an architecture.

    Raises:
        UsageError: it has none that can be read.
    """
    problem = f"{target} must be a folder with a {SAVED} of save_pretrained or timm's save_for_hf"
    with as_usage_error(problem):
        config = json.loads((folder / SAVED).read_text(encoding="utf-8"))
        is_transformers = "model_type" in config
    if is_transformers:
        label = folder.resolve().name
        return Source(target, str(folder), label, kwargs, TRANSFORMERS, pretrained=True)
    label = f"local-dir:{folder.name}"
    return Source(target, f"local-dir:{folder}", label, kwargs, pretrained=True)


def _of_run(run: Path, weights: Path, target: str) -> Source:
    options, note = read_config(run)
    name = options["model"]
    return Source(
        target,
        name,
        f"{name}, {run.resolve().name}",
        kwargs=note["model_kwargs"],
        kind=note.get("task", CLASSIFICATION),
        weights=weights,
        options=options,
        note=note,
        run=run,
    )


def _of_file(path: Path) -> Source:
    """Return the source of a file: exported, in a run folder, or with weights whose note or name is a model's."""
    target = str(path)
    suffix = path.suffix.lower()
    if suffix in EXPORTED:
        return Source(target, target, path.name, kind=suffix, pretrained=True)
    run = run_of_file(path)
    if run is not None:
        return _of_run(run, path, target)
    if suffix != ".safetensors":
        raise UsageError(
            f"a file of weights must be a .safetensors file or lie in a run folder, beside its {CONFIG}, got {path}"
        )
    note = read_note(path)
    if note is not None:
        name = note["model"]
        return Source(
            target,
            name,
            f"{name}, {path.stem}",
            kwargs=note["model_kwargs"],
            kind=note.get("task", CLASSIFICATION),
            weights=path,
            options=note.get("evaluation", {}),
            note=note,
        )
    if is_model(path.stem):  # such as the weights that come with the package
        kwargs = {"pretrained_cfg_overlay": {"file": target}}
        return Source(target, path.stem, path.stem, kwargs, pretrained=True)
    raise UsageError(
        f"{path} does not name its network, and is not in a run folder: "
        f"load it by timm.create_model(NAME, checkpoint_path={target!r})"
    )


def check_model_name(name: str, alternative: str = "") -> None:
    """Raise UsageError, with near matches, unless timm has a model of this name (a `.tag` is allowed).

    A name may also be hf-hub:OWNER/NAME, which is not looked up here, or local-dir:FOLDER.

    Args:
        alternative: what else the name might be, such as "or run folder ".
    """
    prefix, _, place = name.partition(":")
    if prefix == "local-dir" and not Path(place, SAVED).is_file():
        raise UsageError(f"{name} must be a folder with a {SAVED}, as timm's save_for_hf writes")
    if name.startswith(HUBS) or is_model(name):
        return
    if not alternative and Path(name, CONFIG).is_file():
        raise UsageError(
            f"the name of a model is required, got the run {name}: --pretrained-path {name} begins with its weights"
        )
    near = near_matches(name.split(".")[0], timm.list_models(), "models")
    raise UsageError(f"unknown model {alternative}{name!r}; {near}")


def is_target(text: str) -> bool:
    """Return whether a text is the name of a model, of a hub's or folder's, or a path that exists."""
    return text.startswith(HUBS) or is_model(text) or os.path.exists(text)


def parse_targets(text: str) -> list[str]:
    """Return the targets that commas separate. If the whole text names a file or folder, such as a sweep's run
    `model=a,seed=0`, it is one target."""
    return [text] if os.path.exists(text) else text.split(",")


# ---- run folders -----------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> tuple[dict, dict]:
    """Return the options and the `about` section of a run folder.

    Raises:
        UsageError: not a run folder, or one of another format.
    """
    problem = f"{folder} is not a run folder of format {FORMAT}, with `about` in its {CONFIG}"
    with as_usage_error(problem, CONFIG_ERRORS):
        config = _read_config(folder)
    about = config.pop("about")
    if about.get("format") != FORMAT:
        raise UsageError(
            f"{folder} must be a run folder of format {FORMAT}, got {about.get('format')}: another "
            "release wrote it"
        )
    return config, about


def _read_config(folder: Path) -> dict:
    """Return the content of config.yaml, which has a mapping `about`."""
    config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config["about"], dict):
        raise ValueError("a run's about is a mapping")
    return config


def folder_of_file(path: Path) -> Path:
    """Return the folder in which a checkpoint, weights or a snapshot of a run lie."""
    return path.parent.parent if path.parent.name == SNAPSHOTS else path.parent


def run_of_file(path: Path) -> Path | None:
    """Return the run folder that holds a checkpoint, weights or a snapshot. None if there is none: the config.yaml
    beside the file may be another program's."""
    folder = folder_of_file(path)
    try:
        return folder if "format" in _read_config(folder)["about"] else None
    except CONFIG_ERRORS:
        return None


def checkpoints_of(target: str) -> list[str]:
    """Return the checkpoints and snapshots of a run folder, or [target] if it is a file.

    Raises:
        UsageError: the folder has none.
    """
    if not Path(target).is_dir():
        return [target]
    paths = []
    for pattern in CHECKPOINTS:
        paths += sorted(str(path) for path in Path(target).glob(pattern))
    if not paths:
        raise UsageError(f"run {target} has no {' nor '.join(CHECKPOINTS)}")
    return paths


def weights_and_note(path: str) -> tuple[Path | None, dict[str, Any]]:
    """Return the file of weights with which a network begins, and its note.

    Args:
        path: a file, which may be of any program and then has the note {}; a run folder; or "" for none.

    Raises:
        UsageError: no such file, or a folder that is no run's.
    """
    if not path:
        return None, {}
    place = Path(path)
    is_run = (place / CONFIG).is_file()
    weights = place / WEIGHTS if is_run else place
    if not weights.is_file():
        raise UsageError(
            f"pretrained_path must be a weights file or a run folder with {WEIGHTS}, got {path}"
        )
    note = read_config(place)[1] if is_run else read_note(place)
    return weights, note or {}
