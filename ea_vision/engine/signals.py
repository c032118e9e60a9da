"""SIGTERM and Ctrl-C as a wish to stop, which the training loop fulfils after the step it is in."""

from __future__ import annotations

import signal


class StopRequest:
    """While active, remembers the first SIGTERM or SIGINT; a second one acts at once, as it would have without us."""

    def __init__(self):
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame) -> None:
        self.signal = number
        self._restore()
