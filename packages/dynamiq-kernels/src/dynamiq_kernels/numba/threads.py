"""Super-groups shared out among as many threads as torch would use.

Where it can be had, they are torch's own: the team that OpenMP keeps for the calling thread. After each of torch's
operations its members go on looking for work for some milliseconds, on the very processors that other threads would
have to share with them; given ours, they begin at once. Elsewhere, and in the child of a fork, where no thread of the
team is left, helpers serve that wait for work.

Numba's own parallel loops are not used: the thread pool that is always there aborts the process when two Python
threads enter it at once, and ranks in one process or the worker of a hook do exactly that. Kernels release the GIL, so
ordinary Python threads serve. No result depends on who computes it: super-groups are independent of each other.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

SMALLEST = 128
"""Fewest super-groups for which another thread is worth waking."""

PIECES = 4
"""Pieces per thread: enough that a thread delayed by others leaves the rest of its share to somebody else."""

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""What every member of a team runs."""


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

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call ``work`` here and on helpers, ``threads`` times in all, or less often if none is left for some to do."""
        helping = [self.pool().submit(work) for _ in range(threads - 1)]
        work()
        for helper in helping:
            # Helpers that found no time yet have nothing left to do.
            if not helper.cancel():
                helper.result()


class Team:
    """The threads that OpenMP keeps for whichever thread calls.

    Args:
        parallel: ``GOMP_parallel`` of the OpenMP that torch itself uses, which GCC's, LLVM's and Intel's have on Linux.
    """

    def __init__(self, parallel: Any) -> None:
        self._parallel = parallel
        parallel.argtypes, parallel.restype = (BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call ``work`` on every member of a team of at most ``threads``, of whom the caller is one."""
        errors: list[BaseException] = []

        def body(_: object) -> None:
            try:
                work()
            except BaseException as error:  # it must not leave through OpenMP's frames
                errors.append(error)

        self._parallel(BODY(body), None, threads, 0)
        if errors:
            raise errors[0]


def team_of_torch() -> Team | None:
    """Torch's own threads, or None where its OpenMP has no such entry point."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return Team(library.GOMP_parallel)
    except (OSError, AttributeError):
        return None


class Threads:
    """Who computes."""

    def __init__(self) -> None:
        self.helpers = Helpers()
        self.team = team_of_torch()

    def forget(self) -> None:
        """Do without the threads of a parent process."""
        self.helpers.forget()
        self.team = None

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call ``work`` on up to ``threads`` threads at once, among them this one, and wait for all of them."""
        (self.team or self.helpers).run(work, threads)


THREADS = Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=THREADS.forget)


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

    THREADS.run(work, threads)
