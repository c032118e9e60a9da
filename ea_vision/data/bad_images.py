"""Images that cannot be read: they are counted over all processes and listed; a run with too many stops."""

import logging
from pathlib import Path

from ea_vision.base.errors import RunError
from ea_vision.base.files import atomic_write, csv_text
from ea_vision.base.processes import World

log = logging.getLogger(__name__)
FILE = "bad_images.csv"


class BadImages:
    """The unreadable images of a run. `collect` merges those that the processes have met.

    Args:
        limit: the run stops when there are more.
    """

    def __init__(self, limit: int):
        self.limit = limit
        # path -> error, over all processes
        self.known: dict[str, str] = {}
        # on the main process: whether the last list was written
        self.listed = True
        # what this process's loaders have met since the last `collect`
        self.new: dict[str, str] = {}

    def collect(self, world: World, folder: Path) -> None:
        """Merge what the processes met, log it and list it in bad_images.csv. All processes must call this together.

        Raises:
            RunError: on every process, when there are more than `limit`.
        """
        met = {}
        for of_rank in world.gather(self.new):
            for path, error in of_rank.items():
                if path not in self.known:
                    met[path] = error
        self.new = {}
        self.known.update(met)
        for path, error in met.items():
            log.warning("unreadable image %s: %s", path, error)
        if met and world.is_main:
            self._write(folder / FILE)
        if len(self.known) > self.limit:
            path, error = min(self.known.items())
            listed = f"; all are listed in {folder / FILE}" if self.listed else ""
            raise RunError(
                f"{len(self.known)} images cannot be read, --max-bad-images allows {self.limit}; the first: "
                f"{path} ({error}){listed}"
            )

    def _write(self, file: Path) -> None:
        """Write the list. If that fails, as on a full disk, warn once: the run can go on without it."""
        rows = [{"path": path, "error": error} for path, error in sorted(self.known.items())]
        # names of files may not be UTF-8
        content = csv_text(rows).encode("utf-8", "surrogateescape")
        try:
            atomic_write(file, content)
            self.listed = True
        except RunError as error:
            if self.listed:
                log.warning("unreadable images are not listed, the run goes on without: %s", error)
            self.listed = False
