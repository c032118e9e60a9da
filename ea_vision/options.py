"""All options of the trainers as Markdown, which docs/options.md is.

    ea-vision options > docs/options.md
"""
from __future__ import annotations

import argparse
import dataclasses
import typing

from ea_vision.detection.train import DetectionConfig
from ea_vision.engine.config import TrainConfig, resolve
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ImageNetConfig

INTRODUCTION = """\
# Options of the trainers

`ea-vision options` prints this page. Defaults are those without a recipe (`--recipe none`), and in brackets those
of the trainer's default recipe, where they differ. Options are also keys of recipes, with underscores."""
TRAINERS = (("train-cifar", CifarConfig), ("train-imagenet", ImageNetConfig), ("train-detection", DetectionConfig))


def default_cells(cls: type[TrainConfig]) -> dict[str, str]:
    """The default of each option of a trainer, as the tables show it."""
    recipe, plain = resolve(cls, {})[0], resolve(cls, {"recipe": "none"})[0]
    cells = {}
    for field in dataclasses.fields(cls):
        own, of_recipe = (_shown(getattr(config, field.name)) for config in (plain, recipe))
        cells[field.name] = own if own == of_recipe or field.name == "recipe" else f"{own} ({of_recipe})"
    cells["recipe"] = f"`{cls.recipe}`"
    return cells


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        value = " ".join(f"{key}={item}" for key, item in value.items())
    return "" if value in ("", []) else f"`{value}`"


def table_lines(cls: type[TrainConfig]) -> dict[str, str]:
    """By option, its line of a Markdown table: flag, values, default and what it does."""
    defaults, hints = default_cells(cls), typing.get_type_hints(cls)
    lines = {}
    for field in dataclasses.fields(cls):
        kind, choices, flag = hints[field.name], field.metadata["choices"], field.name.replace("_", "-")
        if kind is bool:
            values = f"`--no-{flag}`"
        elif choices:
            values = ", ".join(f"`{choice}`" for choice in choices)
        else:
            values = {int: "whole number", float: "number", str: "", dict: "KEY=VALUE ..."}.get(kind, "epochs ...")
        about = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
        lines[field.name] = f"| `--{flag}` | {values} | {defaults[field.name]} | {about} |"
    return lines


def page() -> str:
    """The whole page: the lines that all trainers have in common, then each trainer's own."""
    lines = {name: table_lines(cls) for name, cls in TRAINERS}
    first, *others = lines.values()
    common = set(first.items()).intersection(*(other.items() for other in others))
    sections = {"Of all trainers": [line for item, line in first.items() if (item, line) in common]}
    for name, of_trainer in lines.items():
        sections[f"Of {name}"] = [line for item, line in of_trainer.items() if (item, line) not in common]
    heading = ["| option | values | default | |", "| --- | --- | --- | --- |"]
    return "\n\n".join([INTRODUCTION, *("\n".join([f"## {title}", "", *heading, *rows])
                                        for title, rows in sections.items())]) + "\n"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print(page(), end="")
    return 0
