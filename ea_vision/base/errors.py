"""The two errors a trainer reports in one line instead of a traceback, and the exit codes that go with them."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path


class UsageError(ValueError):
    """Something the user can mend: an option, a path, a broken image. Exit code 2."""


class RunError(RuntimeError):
    """A run that had to stop: disk full, non-finite loss, a signal. Exit code `code`, never 0."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def near_matches(wrong: str, known, kind: str) -> str:
    """Return the end of an error message: the nearest of the `known` names, or how many there are."""
    known = list(known)
    near = get_close_matches(wrong, known, n=4, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    if len(known) <= 20:
        return f"known {kind}: {', '.join(sorted(known))}"
    return f"none of the {len(known)} known {kind} is close"


def exit_code(main: Callable[[], int]) -> int:
    """Run `main`; turn the errors above into one line on stderr and an exit code.

    Of several processes one tells of an error that all have met, see `World.is_told`. torchrun gets each error in the
    file that it names, as torch's `record` does it.

    What standard output cannot write, such as a file name that is not UTF-8, is printed with backslashes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return main()
    except (UsageError, RunError) as error:
        _record(error)
        rank = os.environ.get("RANK", "0")
        if not getattr(error, "told", rank != "0"):
            who = "" if rank == "0" else f"process {rank}: "
            print(f"error: {who}{' '.join(str(error).split())}", file=sys.stderr)
        return error.code if isinstance(error, RunError) else 2
    except Exception as error:
        _record(error)
        raise
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _record(error: Exception) -> None:
    """Write an error into torchrun's file, if it has started this process: ours in a line, others with the stack."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    if isinstance(error, (UsageError, RunError)):
        text = " ".join(str(error).split())
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": message}))
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
