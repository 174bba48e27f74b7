"""Super-groups shared out among threads: the caller and helpers that wait for work, as many as torch would use.

Numba's own parallel loops are not used: the thread pool that is always there aborts the process when two Python
threads enter it at once, and ranks in one process or the worker of a hook do exactly that. Kernels release the GIL, so
ordinary Python threads serve. No result depends on who computes it: super-groups are independent of each other.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch

SMALLEST = 128
"""Fewest super-groups for which another thread is worth waking."""

PIECES = 4
"""Pieces per thread: enough that a thread delayed by others leaves the rest of its share to somebody else."""


class Helpers:
    """Threads that are started when first needed and wait for work from then on."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, as the child of a fork must: it has inherited the lock and the list of threads, but no thread."""
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        """The threads."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dynamiq-kernels")
            return self._pool


HELPERS = Helpers()
os.register_at_fork(after_in_child=HELPERS.forget)


def for_each_range(kernel: Any, count: int, *arguments: Any) -> None:
    """Call ``kernel(first, last, *arguments)`` on ranges that make up 0..count, on torch.get_num_threads() threads.

    May itself be called from several threads at once.
    """
    threads = min(torch.get_num_threads(), -(-count // SMALLEST))
    if threads <= 1:
        kernel(0, count, *arguments)
        return
    size = max(-(-count // (PIECES * threads)), SMALLEST)
    pieces = deque(range(0, count, size))

    def work() -> None:
        while True:
            try:
                first = pieces.popleft()
            except IndexError:
                return
            kernel(first, min(first + size, count), *arguments)

    helping = [HELPERS.pool().submit(work) for _ in range(threads - 1)]
    work()
    for helper in helping:
        # Helpers that found no time yet have nothing left to do.
        if not helper.cancel():
            helper.result()
