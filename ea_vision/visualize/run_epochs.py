"""The epochs of training runs: their checkpoints and snapshots, as models."""

from collections.abc import Callable
from pathlib import Path

from ea_vision.base.errors import UsageError
from ea_vision.recorder.selection import numbered
from ea_vision.visualize.figure_request import Models
from ea_vision.zoo.loaded import LoadedModel, load_model
from ea_vision.zoo.source import checkpoints_of, folder_of_file

NEED_RUNS = "checkpoints need a run folder, its *.ckpt files or its snapshots"


def epochs_of(
    targets: Models, load: Callable[[str], LoadedModel] = load_model
) -> list[LoadedModel]:
    """Load the *.ckpt files and snapshots of run folders, or such files, ordered by run and epoch. If several files
    have the same epoch, the last one is returned. Models that are loaded already are returned unchanged.

    Runs whose folders have the same name are numbered.

    Raises:
        UsageError: a run folder without such files, or a model without an epoch.
    """
    targets = list(targets) if isinstance(targets, (list, tuple)) else [targets]
    if all(isinstance(target, LoadedModel) for target in targets):
        return targets
    runs = {}
    for target in targets:
        if not isinstance(target, (str, Path)):
            raise UsageError(f"{NEED_RUNS}, got {type(target).__name__}")
        for path in checkpoints_of(str(target)):
            model = load(path)
            if model.epoch is None:
                raise UsageError(f"{NEED_RUNS}, got {model.label}")
            run = folder_of_file(Path(path).resolve())
            runs.setdefault(run, {})[model.epoch] = model
    labels = numbered([run_label(next(iter(epochs.values()))) for epochs in runs.values()])
    models = []
    for label, epochs in zip(labels, runs.values(), strict=True):
        for epoch in sorted(epochs):
            epochs[epoch].label = f"{label}, epoch {epoch}"
            models.append(epochs[epoch])
    return models


def run_label(model: LoadedModel) -> str:
    """Return a checkpoint's label without its epoch."""
    return model.label.removesuffix(f", epoch {model.epoch}")
