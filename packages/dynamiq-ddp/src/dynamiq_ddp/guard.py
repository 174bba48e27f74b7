"""Errors in one line, and the exit status that goes with them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dynamiq_core import DynamiQError
from dynamiq_transport import TransportError

from .launched import rank_here

UNEXPECTED, BAD = 1, 2


def guarded(work: Callable[[], int], *, debug: bool) -> int:
    """Do some work, and put an error into one line on standard error.

    Args:
        work: what to do; returns the exit status if nothing goes wrong.
        debug: whether to raise the error instead.

    Returns:
        The exit status.
    """
    try:
        return work()
    except (DynamiQError, TransportError, OSError) as error:
        if debug:
            raise
        return _complain(_words(error), BAD)
    except Exception as error:
        if debug:
            raise
        return _complain(f"{type(error).__name__}: {error} (unexpected; --debug shows where it comes from)", UNEXPECTED)


def _complain(message: str, status: int) -> int:
    where = f"error on rank {rank}" if (rank := rank_here()) else "error"
    print(f"{where}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
