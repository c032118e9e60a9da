"""SIGTERM and Ctrl-C as a request to stop, which the training loop meets after an update."""

import signal


class StopRequest:
    """While active, remembers the first SIGTERM or SIGINT and ignores further SIGTERMs, because schedulers signal every
    process of a job, and torchrun forwards its own to them. A second Ctrl-C acts at once."""

    signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            # the second one may come at any time
            if number == signal.SIGTERM and self.signal is not None:
                handler = signal.SIG_IGN
            signal.signal(number, handler)

    def _remember(self, number: int, _frame) -> None:
        if self.signal is None:
            self.signal = number
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
