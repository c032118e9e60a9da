"""SIGTERM and Ctrl-C: they end a run at once until its first update, and after an update from then on. A file is always
written whole (`base.files.atomic_write`)."""

import signal


class StoppedAtOnce(BaseException):
    """Raised in the main thread by a signal before the first update. No library that catches Exception stops it."""


class StopRequest:
    """While active, the first SIGTERM or SIGINT raises StoppedAtOnce or, once `deferred`, is remembered for the
    training loop. Further SIGTERMs are ignored, because schedulers signal every process of a job, and torchrun forwards
    its own to them. A second Ctrl-C acts at once.

    Attributes:
        signal: the number of the first signal; None without one.
        deferred: whether a signal waits for the end of an update: true from the first update of this start on (until
            then a checkpoint has all that there is), and always if there are several processes, which must agree.
    """

    signal: int | None = None
    deferred = False

    def __enter__(self) -> "StopRequest":
        self._previous = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            # the second one may come at any time
            if number == signal.SIGTERM and self.signal is not None:
                handler = signal.SIG_IGN
            signal.signal(number, handler)

    def _receive(self, number: int, _frame) -> None:
        first = self.signal is None
        if first:
            self.signal = number
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if first and not self.deferred:
            raise StoppedAtOnce
