"""The example of a third-party transport, under the conformance suite as a third party would run it."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dynamiq_transport import Transport
from dynamiq_transport.conformance import Conformance

_SPEC = importlib.util.spec_from_file_location(
    "socket_transport", Path(__file__).parents[1] / "examples" / "socket_transport.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


def run_sockets(size: int, function: Callable[[Transport], Any], *, timeout: float) -> None:
    links: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for a in range(size):
        for b in range(a):
            links[a][b], links[b][a] = socket.socketpair()

    def work(rank: int) -> None:
        with example.SocketTransport(rank, size, links[rank], timeout) as transport:
            function(transport)

    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(work, rank) for rank in range(size)]:
            future.result()


class TestSocketTransport(Conformance):
    launch = staticmethod(run_sockets)
    sizes = (1, 2, 4)
