"""All options of the trainers as Markdown, which docs/options.md is.

    ea-vision options > docs/options.md
"""
from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence

from ea_vision.engine.config import TrainConfig, resolve
from ea_vision.engine.train_cifar import CifarConfig
from ea_vision.engine.train_imagenet import ImageNetConfig

INTRODUCTION = """\
# Options of the trainers

`ea-vision options` prints this page. Defaults are those without a recipe (`--recipe none`), and in brackets those
of the trainer's default recipe, where they differ. Options are also keys of recipes, with underscores."""
TRAINERS = (("train-cifar", CifarConfig), ("train-imagenet", ImageNetConfig))


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


def table(cls: type[TrainConfig], names: Sequence[str]) -> str:
    """A Markdown table of some options: flag, values, default and what it does."""
    defaults, hints = default_cells(cls), typing.get_type_hints(cls)
    lines = ["| option | values | default | |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        if field.name not in names:
            continue
        kind, choices = hints[field.name], field.metadata["choices"]
        if kind is bool:
            values = "`--no-" + field.name.replace("_", "-") + "`"
        elif choices:
            values = ", ".join(f"`{choice}`" for choice in choices)
        else:
            values = {int: "whole number", float: "number", str: "", dict: "KEY=VALUE ..."}.get(kind, "epochs ...")
        about = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `--{field.name.replace('_', '-')}` | {values} | {defaults[field.name]} | {about} |")
    return "\n".join(lines)


def page() -> str:
    """The whole page: what both trainers have with equal defaults and words, then what each has of its own."""
    shown = {name: {line.split("|")[1].strip(" `-").replace("-", "_"): line
                    for line in table(cls, [field.name for field in dataclasses.fields(cls)]).splitlines()[2:]}
             for name, cls in TRAINERS}
    (first, cifar), (second, imagenet) = TRAINERS
    common = [name for name, line in shown[first].items() if shown[second].get(name) == line]
    parts = [INTRODUCTION, f"## Of both trainers\n\n{table(cifar, common)}"]
    parts += [f"## Of {name}\n\n{table(cls, [option for option in shown[name] if option not in common])}"
              for name, cls in TRAINERS]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print(page(), end="")
    return 0
