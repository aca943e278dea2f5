"""Ctrl-C and other requests to end: one exception for all, put off in some imports, sent again if Python drops it."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

INTERRUPT_AGAIN_S = 0.02
"""Wait before a lost interrupt comes again; Python leaves the place that lost it within microseconds."""


def end_cleanly_on_signals() -> list[int]:
    """Treat a request to end, or a closed terminal, like Ctrl-C: finished rows and no process left behind.

    Gives a list that holds what came. What is ignored stays so: under nohup a closed terminal ends nothing.
    """
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    _bring_back_lost(came)
    return came


def _bring_back_lost(came: list[int]) -> None:
    """Interrupt once more where Python would print the interrupt and go on as if none had come.

    It does so wherever nothing can be raised: in a destructor, in a weak reference's callback, and in compiled code
    that calls Python and does not look at how that ended (pydantic, while it builds its validators).
    """
    tell = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        if not came or not issubclass(lost.exc_type, KeyboardInterrupt):
            tell(lost)
            return
        later = threading.Timer(INTERRUPT_AGAIN_S, _thread.interrupt_main, [came[-1]])
        later.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread starts while Python ends, and then all is done
            later.start()

    sys.unraisablehook = unraisable


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C and the like wait until the block is done.

    For imports of compiled packages: numpy turns an interrupt that hits its own import into an ImportError.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
