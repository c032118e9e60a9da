"""Images that cannot be read: counted over all processes, listed with their path, a run stopped when they are many."""

import logging
from pathlib import Path

from ea_vision.base.errors import RunError
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.base.processes import World

log = logging.getLogger(__name__)
FILE = "bad_images.csv"


class BadImages:
    """The unreadable images of a run. `collect` brings those that the processes meet together.

    Args:
        limit: the run stops when there are more.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.known: dict[str, str] = {}  # path -> what is wrong with it, over all processes
        self.new: dict[
            str, str
        ] = {}  # what this process's loaders have met since the last `collect`

    def collect(self, world: World, folder: Path) -> None:
        """Merge what the processes met, log it and list it in bad_images.csv. All processes must call this together.

        Raises:
            RunError: on every process, when there are more than `limit`.
        """
        met = {
            path: error
            for of_rank in world.gather(self.new)
            for path, error in of_rank.items()
            if path not in self.known
        }
        self.new = {}
        self.known.update(met)
        for path, error in met.items():
            log.warning("unreadable image %s: %s", path, error)
        if met and world.is_main:
            rows = [{"path": path, "error": error} for path, error in sorted(self.known.items())]
            atomic_write(folder / FILE, csv_text(rows).encode())
        if len(self.known) > self.limit:
            path, error = min(self.known.items())
            raise RunError(
                f"{len(self.known)} images cannot be read, --max-bad-images allows {self.limit}; the first: "
                f"{path} ({error}); all are listed in {folder / FILE}"
            )
