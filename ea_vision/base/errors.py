"""The two errors that a command reports in one line instead of a traceback, and the exit codes that go with them."""

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

# Exceptions that libraries raise for values and files that they refuse.
REFUSALS = (
    ValueError,
    TypeError,
    AssertionError,
    RuntimeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    OSError,
)


class UsageError(ValueError):
    """Something that the user can correct: an option, a path, a broken image. Exit code 2."""


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


@contextmanager
def extra_required(what: str, packages: str, extra: str = "") -> Iterator[None]:
    """Turn the ImportError of packages that `what` needs into a UsageError that names them and their extra."""
    try:
        yield
    except ImportError as error:
        of_extra = f" (the extra {extra})" if extra else ""
        raise UsageError(
            f"{what} needs {packages}, not installed ({error}): pip install {packages}{of_extra}"
        ) from error


@contextmanager
def as_usage_error(problem: str, kinds=REFUSALS) -> Iterator[None]:
    """Turn errors of these kinds into a UsageError of one line: `problem`, and after a colon what they say, of long
    texts both ends."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except kinds as error:
        reason = " ".join(str(error).split())
        if len(reason) > 800:
            reason = f"{reason[:400]} [...] {reason[-400:]}"
        if isinstance(error, KeyError):
            reason = f"there is no {reason}"
        raise UsageError(f"{problem}: {reason or type(error).__name__}") from error


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's arguments. The description keeps its line breaks. An unknown argument raises UsageError
    with near matches."""

    def __init__(self, *, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords):
        super().__init__(formatter_class=formatter_class, **keywords)
        # also lists, such as -1,3: argparse takes them for flags, and says that the flag before lacks its value
        self._negative_number_matcher = re.compile(r"-[\d.][\d.,eE+-]*$")

    def meant(self, word: str) -> str:
        """Return the end of a message: what an unknown word of the command line may have meant."""
        flag = word.partition("=")[0]
        return near_matches(flag, self._option_string_actions, "flags")

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]!r}; {self.meant(unknown[0])}")
        return known


def exit_code(main: Callable[[], int]) -> int:
    """Run `main`; turn the errors above into one line on stderr and an exit code.

    Under torchrun every error is recorded in the file that torchrun names, and torchrun shows the first one. Text that
    standard output cannot encode, such as a file name that is not UTF-8, is printed with backslashes. A closed pipe
    (`| head -1`) ends the command as it ends other programs; a full disk is an error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    in_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ
    if in_torchrun:
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except (UsageError, RunError) as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not in_torchrun:
            who = "" if rank == "0" else f"process {rank}: "
            print(f"error: {who}{' '.join(str(error).split())}", file=sys.stderr)
        return error.code if isinstance(error, RunError) else 2
    except OSError:
        try:
            print(flush=True)  # a flush alone writes nothing if Python does not buffer
        except OSError as refusal:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # discards further output
            if isinstance(refusal, BrokenPipeError):
                return 141  # a shell's exit code for SIGPIPE
            print(f"error: standard output cannot be written: {refusal.strerror}", file=sys.stderr)
            return 1
        raise
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
