"""The other lanes wait until the first bucket of a step has found that all ranks are about to do the same.

Without that a lane may leave because of what another lane has found, and ranks that have not found it yet would only
see that a peer is gone.
"""

from __future__ import annotations

import threading

from .lanes import Lanes

_LOOK = 0.1
"""Seconds after which a lane that waits looks whether the others have stopped."""


class Gate:
    """Of one step: opened by its first bucket, or shut with the error that this has met.

    Args:
        lanes: those that pass through it.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._decided = threading.Event()
        self._error: Exception | None = None

    def open(self) -> None:
        """Let everybody pass; may be repeated."""
        self._decided.set()

    def shut(self, error: Exception) -> None:
        """Let nobody pass who has not passed yet."""
        if not self._decided.is_set():
            self._error = error
            self._decided.set()

    def wait(self) -> None:
        """Pass, or raise.

        Raises:
            Exception: what the first bucket has met, or what has stopped the lanes before it could begin.
        """
        while not self._decided.wait(_LOOK):
            if self._lanes.error is not None:
                raise self._lanes.error
        if self._error is not None:
            raise self._error
