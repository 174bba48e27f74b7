"""What the tests share: the codecs that they run over, ranks as threads, and how far a result may be off."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq_core import Codec, DynamiQ
from dynamiq_core.baselines import BF16
from dynamiq_ddp import DynamiQState
from dynamiq_ddp.route import find_route
from dynamiq_kernels import operations, warmup
from dynamiq_transport import Handle, LocalTransport, Message, Transport, run_local

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of an interface, not an address
torch.set_num_threads(1)  # ranks are threads already

CODECS: dict[str, Callable[[], Codec[Any]]] = {"bf16": BF16, "dynamiq": lambda: DynamiQ(operations=operations())}


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile the kernels once, and not in the middle of a test whose ranks wait for each other."""
    warmup(operations())


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec[Any]:
    return CODECS[request.param]()


@pytest.fixture(scope="session")
def run_program() -> Callable[..., tuple[int, str, str]]:
    """``run_program(words, env=..., timeout=...)``: exit status, output and errors; all of it is killed if it hangs."""

    def run(words: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float) -> tuple[int, str, str]:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"hung:\n{out[-3000:]}\n{err[-3000:]}")
        return process.returncode, out, err

    return run


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(size, function)``: what ``function(transport)`` returns or raises on each rank."""

    def launch(size: int, function: Callable[[Transport], Any], *, timeout: float = 30.0) -> list[Any]:
        def work(transport: Transport) -> Any:
            try:
                return function(transport)
            except Exception as error:
                return error

        return run_local(size, work, timeout=timeout)

    return launch


def as_rank(function: Callable[[dist.ProcessGroup], Any], store: dist.Store, rank: int, size: int) -> Any:
    """What ``function(group)`` returns in this thread, as a rank of a Gloo group made by hand."""
    # Kept until the group is gone: its own end lets the interpreter go on. That of the group would not, while it waits
    # for threads that may need the interpreter to drop a tensor.
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    return function(_group(backend, store))


def _group(backend: dist.ProcessGroupGloo, store: dist.Store) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@pytest.fixture
def ddp_ranks() -> Callable[..., list[Any]]:
    """``ddp_ranks(size, function)``: what ``function(group)`` returns on each rank of a Gloo group."""

    def launch(size: int, function: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
        store = dist.HashStore()
        with ThreadPoolExecutor(max_workers=size) as pool:
            futures = [pool.submit(as_rank, function, store, rank, size) for rank in range(size)]
        return [future.result() for future in futures]

    return launch


@pytest.fixture
def states(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``states(size, function, **settings)`` calls ``function(state, rank)`` on ranks with a state each."""

    def run(
        size: int,
        function: Callable[[DynamiQState, int], Any],
        *,
        lanes: int = 2,
        timeout: float = 30.0,
        **settings: Any,
    ) -> list[Any]:
        groups = [LocalTransport.group(size, timeout=timeout) for _ in range(lanes)]
        settings = {"codec": BF16(), "min_compress_numel": 0, **settings}

        def work(outer: Transport) -> Any:
            mine = iter(groups)
            state = DynamiQState(transport=lambda: next(mine)[outer.rank], lanes=lanes, timeout=timeout, **settings)
            try:
                return function(state, outer.rank)
            finally:
                state.close()

        results = ranks(size, work)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    return run


@pytest.fixture
def random_rows() -> Callable[..., Tensor]:
    """``random_rows(n, d)``: gradients that share a part, as those of real workers do."""

    def make(n: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(d, generator=generator) + torch.randn(n, d, generator=generator)).to(dtype)

    return make


@pytest.fixture
def tolerance() -> Callable[..., float]:
    """``tolerance(codec, rows, schedule)``: how far, in Euclidean norm, the mean may be from the exact one."""

    def bound(codec: Codec[Any], rows: Tensor, schedule: str = "ring") -> float:
        n = rows.shape[0]
        norms = float(rows.double().norm(dim=1).sum())
        result = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[rows.dtype] * norms / n
        if isinstance(codec, BF16):  # each of n encodings rounds a partial sum by at most 2**-9 of its norm
            return 2.0**-9 * norms + result
        route = find_route(schedule, 0, n)
        plan = codec.plan(
            codec.merge_statistics([codec.statistics(row) for row in rows]),
            rows.shape[1],
            device=rows.device,
            workers=n,
            chunks=route.schedule.chunks,
            gain=route.gain,
        )
        return 4 * float(plan.expected_error) ** 0.5 / n + result  # what the plan expects, and a margin

    return bound


@pytest.fixture
def same_bits() -> Callable[[Tensor, Tensor], bool]:
    """Equal, with NaN equal to itself."""

    def same(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

    return same


class Recorder(Transport):
    """Keeps what is sent over another transport, and may change what arrives.

    Attributes:
        sent: (peer, number of bytes) of every message, in order.
        exchanges: how many batches there were.
    """

    def __init__(self, transport: Transport, change: Callable[[int, int, Tensor], None] | None = None) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.sent: list[tuple[int, int]] = []
        self.exchanges = 0
        self._transport = transport
        self._change = change

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        self.sent += ((peer, tensor.numel()) for peer, tensor in sends)
        self.exchanges += 1
        handle = self._transport.exchange(sends, recvs)
        return handle if self._change is None else Changed(handle, self._change, self.exchanges - 1, recvs)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class Changed(Handle):
    def __init__(
        self, handle: Handle, change: Callable[[int, int, Tensor], None], number: int, recvs: Sequence[Message]
    ) -> None:
        self._handle, self._change, self._number, self._recvs = handle, change, number, recvs

    def wait(self) -> None:
        self._handle.wait()
        for peer, tensor in self._recvs:
            self._change(self._number, peer, tensor)


@pytest.fixture
def recorder() -> type[Recorder]:
    """``recorder(transport, change)``, where ``change(exchange, peer, tensor)`` sees every message that arrives."""
    return Recorder
