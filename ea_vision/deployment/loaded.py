"""Exported files at the door: how a file of ea-vision export is opened, and how its images are prepared."""

from pathlib import Path

from ea_vision.base.errors import UsageError
from ea_vision.deployment.files import SUFFIXES, ExportedNetwork
from ea_vision.zoo.create import Kind, register_kind
from ea_vision.zoo.loaded import LoadedModel
from ea_vision.zoo.source import Source


def _open(name: str, *, pretrained: bool) -> ExportedNetwork:
    if not pretrained:
        raise UsageError(f"random weights are of models and runs, got the exported file {name}")
    return ExportedNetwork(Path(name))


def _prepared(network: ExportedNetwork, source: Source, trained: bool) -> LoadedModel:
    about = network.about
    return LoadedModel(network, about.name, about, classes=about.classes)


for suffix in SUFFIXES:
    register_kind(suffix, Kind(_open, _prepared, fixed_size=True))
