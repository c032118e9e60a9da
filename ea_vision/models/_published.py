"""What papers print, read from published.yaml: the one place where these figures are typed."""
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Published:
    """What a paper prints of a network.

    params_m: millions of parameters. gflops: in the paper's own counting. top1, top5: percent, by data set.
    source: paper and table. note: what a reader of the figures must know.
    """

    params_m: float | None = None
    gflops: float | None = None
    top1: Mapping[str, float] = field(default_factory=dict)
    top5: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    note: str = ""


@dataclass(frozen=True)
class PublishedRow:
    """A row of a paper's table, or one of ours beside it, of which nothing is published.

    model: name for `timm.create_model`. kwargs: its keywords where it is not as registered. name: the setting; empty of
    a network as registered. recipes: by data set, of the training that would give the row's accuracy; empty where the
    row is not of a classifier. processes: that this training runs in. figures: what else the table prints.
    """

    model: str
    kwargs: Mapping[str, Any]
    name: str
    published: Published
    recipes: Mapping[str, str]
    processes: int
    figures: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.model}, {self.name}" if self.name else self.model


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper. counting: `paper` or `profiler`, which of our countings its GFLOPs are compared with."""

    name: str
    title: str
    source: str
    data: tuple[str, ...]
    counting: str
    note: str
    rows: tuple[PublishedRow, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrintedTable:
    """A table of a paper that is only printed: of text, or of baselines. rows: by name, the cells of the columns."""

    name: str
    title: str
    source: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float | str, ...]]


def _row(table: Mapping[str, Any], row: Mapping[str, Any]) -> PublishedRow:
    rest, data = dict(row), table["data"]
    model, kwargs, name = rest.pop("model"), rest.pop("kwargs", {}), rest.pop("name", "")
    recipes, processes = rest.pop("recipe", table.get("recipe", {})), rest.pop("processes", table.get("processes", 1))
    if isinstance(recipes, str):
        recipes = dict.fromkeys(data, recipes)
    accuracy = {key: rest.pop(key, {}) for key in ("top1", "top5")}
    accuracy = {key: found if isinstance(found, dict) else {data[0]: found} for key, found in accuracy.items()}
    published = Published(rest.pop("params_m", None), rest.pop("gflops", None), **accuracy,
                          source=rest.pop("source", table["source"]), note=rest.pop("note", ""))
    return PublishedRow(model, kwargs, name, published, {key: recipe.format(model=model) for key, recipe in
                                                         recipes.items()}, processes, rest)


@cache
def _tables() -> list[dict[str, Any]]:
    return yaml.safe_load((resources.files("ea_vision.models") / "published.yaml").read_text())


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Return the tables of networks by name, in the order of published.yaml."""
    return {table["name"]: PublishedTable(table["name"], table["title"], table["source"], tuple(table["data"]),
                                          table["counting"], table.get("note", ""),
                                          tuple(_row(table, row) for row in table["rows"]),
                                          tuple(table.get("remarks", ())))
            for table in _tables() if "columns" not in table}


@cache
def printed_tables() -> dict[str, PrintedTable]:
    """Return the tables that are only printed, by name."""
    return {table["name"]: PrintedTable(table["name"], table["title"], table["source"], tuple(table["columns"]),
                                        {name: tuple(cells) for name, cells in table["rows"].items()})
            for table in _tables() if "columns" in table}


@cache
def papers_figures() -> dict[str, Published]:
    """By network as it is registered, the figures of the first table that has its accuracy."""
    figures: dict[str, Published] = {}
    for table in published_tables().values():
        for row in table.rows:
            if row.published.top1 and not row.kwargs:
                figures.setdefault(row.model, row.published)
    return figures
