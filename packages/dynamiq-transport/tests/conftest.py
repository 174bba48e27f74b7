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


def gloo_group(store: Store, rank: int, size: int) -> dist.ProcessGroup:
    """A Gloo group made by hand, of which this thread is a rank."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def run_threads(size: int, function: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Call ``function(group)`` on every rank of a new Gloo group, one thread each."""
    store = HashStore()
    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(lambda rank: function(gloo_group(store, rank, size)), rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:  # the cause rather than what it led to
        raise next((error for error in errors if not isinstance(error, TransportError)), errors[0])
    return [future.result() for future in futures]


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
                transport.timeout = timeout  # of waits; making the group may take longer than a test wants to wait
                return function(transport)

        return run_threads(size, work)

    return launch
