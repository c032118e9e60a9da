"""Exported files at the door: how a file of ea-vision export is opened, and how its images are prepared."""

from dataclasses import fields
from pathlib import Path

from ea_vision.base.errors import UsageError
from ea_vision.deployment.files import SUFFIXES, ExportedNetwork
from ea_vision.zoo.create import Kind, register_kind
from ea_vision.zoo.loaded import LoadedModel
from ea_vision.zoo.preparation import Preparation
from ea_vision.zoo.source import Source


def _open(name: str, *, pretrained: bool) -> ExportedNetwork:
    if not pretrained:
        raise UsageError(f"random weights are of models and runs, got the exported file {name}")
    return ExportedNetwork(Path(name))


def _prepared(network: ExportedNetwork, source: Source, trained: bool) -> LoadedModel:
    about = network.about
    values = {field.name: getattr(about, field.name) for field in fields(Preparation)}
    return LoadedModel(network, about.name, Preparation(**values), classes=about.classes)


for suffix in SUFFIXES:
    register_kind(suffix, Kind(_open, _prepared, fixed_size=True))
