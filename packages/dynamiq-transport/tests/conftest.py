"""Ranks as threads: Gloo groups that find each other through a store in memory start in some milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, but not listed in __all__

from dynamiq_transport import TorchTransport, Transport, TransportError

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of an interface, not an address
torch.set_num_threads(1)


def as_rank(function: Callable[[dist.ProcessGroup], Any], store: Store, rank: int, size: int) -> Any:
    """What ``function(group)`` returns in this thread, as a rank of a Gloo group made by hand."""
    # Kept until the group is gone: its own end lets the interpreter go on. That of the group would not, while it waits
    # for threads that may need the interpreter to drop a tensor.
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    return function(_group(backend, store))


def _group(backend: dist.ProcessGroupGloo, store: Store) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def run_threads(size: int, function: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Call ``function(group)`` on every rank of a new Gloo group, one thread each."""
    store = HashStore()
    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(as_rank, function, store, rank, size) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:  # the cause rather than what it led to
        raise next((error for error in errors if not isinstance(error, TransportError)), errors[0])
    return [future.result() for future in futures]


@pytest.fixture
def gloo_rank() -> Callable[..., Any]:
    """``gloo_rank(function, store, rank, size)`` calls ``function(group)`` as one rank of a Gloo group."""
    return as_rank


@pytest.fixture
def gloo_threads() -> Callable[..., list[Any]]:
    """``gloo_threads(size, function)`` calls ``function(group)`` on every rank of a new Gloo group."""
    return run_threads


@pytest.fixture
def torch_threads() -> Callable[..., list[Any]]:
    """``torch_threads(size, function, timeout=...)`` calls ``function(transport)`` on every rank, over Gloo."""

    def launch(size: int, function: Callable[[Transport], Any], *, timeout: float = 60.0) -> list[Any]:
        def work(group: dist.ProcessGroup) -> Any:
            with TorchTransport.dedicated(group, timeout=60.0) as transport:
                group.barrier().wait()  # nobody leaves, as some tests do, while others are still connecting
                transport.timeout = timeout  # of waits; making the group may take longer than a test wants to wait
                return function(transport)

        return run_threads(size, work)

    return launch
