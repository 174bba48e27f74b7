"""A thread that does one thing after the other, beside whoever submits it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Action = Callable[[], None]


class Worker:
    """A thread that begins with the first thing there is to do, and ends when nobody has the worker any more.

    It is a daemon, so that a message that never arrives cannot keep the process from ending. At the end of the
    interpreter it goes on, as whatever else is done there may still need it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Action | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
        self._starting = threading.Lock()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def submit(self, action: Action) -> None:
        """Let the thread call ``action``, which does not raise, after everything that was submitted before."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        self._queue.put(action)

    def stop(self, patience: float = 0.0) -> None:
        """End the thread after what was submitted; what is submitted later is never done. May be repeated.

        Args:
            patience: seconds to wait for that, unless this is the thread itself.
        """
        self._end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(patience)


def _work(queue: SimpleQueue[Action | None]) -> None:
    while (action := queue.get()) is not None:
        action()
        del action  # nothing is kept alive while waiting
