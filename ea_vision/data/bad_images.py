"""Images that cannot be read: counted over all processes, listed with their path, a run stopped when they are many."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path

from ea_vision.base.errors import RunError
from ea_vision.base.files import atomic_write
from ea_vision.base.processes import World

log = logging.getLogger(__name__)
FILE = "bad_images.csv"


def without(count: int, bad: Sequence[int]) -> list[int]:
    """The good places of a batch of `count` images."""
    return sorted(set(range(count)) - set(bad))


class BadImages:
    """The unreadable images of a run. Loaders `add` what their process meets; `collect` brings all processes together.

    Args:
        limit: the run stops when there are more.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.known: dict[str, str] = {}  # path -> what is wrong with it, over all processes
        self.new: dict[str, str] = {}  # met by this process since the last `collect`

    def add(self, path: str, error: str) -> None:
        if path not in self.known:
            self.new[path] = error

    def replacements(self, count: int, bad: Sequence[int]) -> list[tuple[int, int]]:
        """For the bad places of a training batch of `count` images: (place, the place of the image that takes it).

        Raises:
            RunError: no image of the batch is good.
        """
        good = without(count, bad)
        if not good:
            path, error = next(iter({**self.new, **self.known}.items()))
            raise RunError(f"none of the {count} images of a batch can be read, such as {path} ({error})")
        return [(place, good[number % len(good)]) for number, place in enumerate(bad)]

    def collect(self, world: World, folder: Path) -> None:
        """Merge what the processes met, log it and list it in bad_images.csv. All processes must call this together.

        Raises:
            RunError: on every process, when there are more than `limit`.
        """
        met = {path: error for of_rank in world.gather(self.new) for path, error in of_rank.items()}
        self.new = {}
        for path, error in met.items():
            log.warning("unreadable image %s: %s", path, error)
        self.known.update(met)
        if met and world.is_main:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerows([("path", "error"), *sorted(self.known.items())])
            atomic_write(folder / FILE, text.getvalue().encode())
        if len(self.known) > self.limit:
            first = next(iter(self.known.items()))
            raise RunError(f"{len(self.known)} images cannot be read, --max-bad-images allows {self.limit}; the first: "
                           f"{first[0]} ({first[1]}); all are listed in {folder / FILE}")
