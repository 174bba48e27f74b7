"""Messages over torch.distributed: batched point-to-point on a given process group, with Gloo, NCCL and their like.

How sizes are guarded. Gloo matches messages by tag, so the tag is the number of bytes: a message of another size than
expected meets no receive, and both sides time out. Under one common tag a longer message would end the process, since
Gloo raises in a thread of its own, and a shorter one would fill part of the buffer without a word. NCCL ignores tags
and matches by order alone; there a wrong size stays unseen, or stalls, and the sizes have to be agreed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dynamiq_transport.batch import PROBE, Failure, Operation, Part, Wait, failure
from dynamiq_transport.gloo import Waiter, backend_for, gone, hang_up, has_gloo
from dynamiq_transport.group import dedicated_group
from dynamiq_transport.transport import (
    DEFAULT_TIMEOUT,
    Handle,
    Message,
    Transport,
    TransportError,
    check_batch,
    check_timeout,
)


class _TorchHandle(Handle):
    """Keeps the operations, and with them the buffers, until they are done."""

    def __init__(self, transport: TorchTransport, parts: list[Part]) -> None:
        self._transport = transport
        self._parts = parts
        self._lost: tuple[int, ...] | None = None

    def wait(self) -> None:
        self._check()
        failures = self._transport._finish(self._parts)
        self._check()  # another thread may have aborted the transport meanwhile
        self._parts.clear()
        self._transport._in_flight.discard(self)
        if failures:
            self._lost = _peers(failures)
            raise self._transport._fail(failures)

    def _check(self) -> None:
        if self._lost is not None:
            raise TransportError(f"this batch has failed before (peers {self._lost})", self._lost)

    def abandon(self) -> None:
        """Let go of the group, which whoever keeps this batch would keep alive, as the traceback of an error does."""
        self._lost = self._lost or ()
        self._parts.clear()


class TorchTransport(Transport):
    """The ranks of a torch.distributed process group.

    Every batch is one ``batch_isend_irecv`` on that group. Give it a group that carries nothing else, since messages
    are matched by order and the user's own collectives must not be caught in between; `TorchTransport.dedicated` makes
    one. Ranks are those of the group, whatever their global ranks. A group that is given stays the caller's to destroy.

    On CPU a failure is raised by ``wait`` within ``timeout``, and with Gloo within some seconds if the peer's process
    has ended or the peer has left. With NCCL a wait only orders the stream; a dead peer shows in NCCL's watchdog after
    the group's own timeout, as for any other collective. The first batch on CUDA also makes every rank of the group
    meet once, because NCCL connects a group in its first call and all must make it.

    Args:
        process_group: the group, registered with torch or made by hand; the default group when None.
        timeout: seconds that a wait lasts at most, above 0.

    Raises:
        ValueError: there is no default group yet, or the timeout is out of range. `exchange` raises it for tensors on
            several devices, and for CUDA tensors where the group has Gloo for them, which only torch's collectives copy
            to the host.
        TypeError: no process group, which is also what torch hands to a process that is not a member.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._group: dist.ProcessGroup | None = _member(process_group)
        self._owned = False
        self.rank = self._group.rank()
        self.size = self._group.size()
        self.posts_ahead = has_gloo(self._group)
        self._waiter = Waiter() if self.posts_ahead else None
        self.timeout = check_timeout(timeout)
        self._in_flight: set[_TorchHandle] = set()
        self._joined: set[torch.device] = set()
        self._closed: str | None = None

    @classmethod
    def dedicated(
        cls, process_group: dist.ProcessGroup | None = None, *, timeout: float = DEFAULT_TIMEOUT
    ) -> TorchTransport:
        """A transport over a new group with the same ranks, used by nobody else; closing the transport ends the group.

        All members of ``process_group`` call it, in the same order, and no other rank; see `dedicated_group`.

        Args:
            process_group: whose ranks to join; the default group when None.
            timeout: seconds that a wait lasts at most, above 0; also for the making of the group.

        Raises:
            ValueError: as for the class, or a backend other than Gloo and NCCL.
            TypeError: as for the class.
            TransportError: the other ranks did not come.
        """
        transport = cls(dedicated_group(_member(process_group), timeout=timeout), timeout=timeout)
        transport._owned = True
        return transport

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        check_batch(self, sends, recvs)
        if self._closed is not None or self._group is None:
            raise TransportError(f"the transport of rank {self.rank} {self._closed}")
        messages = [(dist.irecv, *message) for message in recvs] + [(dist.isend, *message) for message in sends]
        # Not every backend carries empty messages; both sides know the sizes, so both leave them out.
        operations: list[dist.P2POp] = [
            Operation(verb, tensor, self._group, peer) for verb, peer, tensor in messages if tensor.numel()
        ]
        works = self._post(operations)
        if len(works) == len(operations):
            parts = [Part(work, [operation]) for work, operation in zip(works, operations, strict=True)]
        else:
            parts = [Part(work, operations) for work in works]
        handle = _TorchHandle(self, parts)
        self._in_flight.add(handle)
        return handle

    def close(self) -> None:
        """Wait for what is still in flight, so that no message is lost when the process ends."""
        for handle in tuple(self._in_flight):
            handle.wait()
        if self._owned and self._group is not None:
            self._group.shutdown()
        self._leave()

    def abort(self) -> None:
        """Leave without finishing anything; peers notice when the group ends or their timeout has passed."""
        group = self._group  # another thread that waits may fail, and leave, meanwhile
        if self._owned and group is not None:
            if self._waiter is not None:
                hang_up(group)
            group.abort()
        self._leave()

    def _leave(self) -> None:
        for handle in self._in_flight:
            handle.abandon()
        self._in_flight.clear()
        if self._waiter is not None:
            self._waiter.stop()
        self._closed = self._closed or "is closed"
        self._group = None  # with the last reference to a group its sockets and threads go

    def _post(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        if not operations:
            return []  # batch_isend_irecv takes no empty list
        devices = {operation.tensor.device for operation in operations}
        if len(devices) > 1:
            raise ValueError(f"a batch cannot mix devices: {', '.join(sorted(map(str, devices)))}")
        try:
            if (device := devices.pop()).type != "cuda":
                return dist.batch_isend_irecv(operations)
            # Gloo's messages are written from memory of the host.
            if backend_for(operations[0].group, device.type) == "gloo":
                raise ValueError(
                    f"messages on {device} cannot go by gloo; allowed: a group with nccl for cuda, as"
                    ' init_process_group("nccl") or init_process_group("cpu:gloo,cuda:nccl") makes it'
                )
            with torch.cuda.device(device):  # NCCL works on the current device
                self._join(operations[0].group, device)
                return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            failures = _unreachable(operations, error)
        # Raised out here, so that the traceback of torch's error does not keep the group alive.
        operations.clear()
        raise self._fail(failures)

    def _join(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Let all ranks meet before the first batch on a CUDA device, in which only some of them may take part."""
        if device not in self._joined:
            self._joined.add(device)
            group.allreduce([torch.zeros(1, device=device)]).wait()

    def _finish(self, parts: list[Part]) -> list[Failure]:
        """Wait for everything and say what failed."""
        wait = Wait(parts, self.timeout)
        if self._waiter is not None and parts and not parts[0].on_cuda:
            return self._waiter.wait(wait)
        return wait.run()

    def _fail(self, failures: list[Failure]) -> TransportError:
        """Give up for good: the ranks have lost their common place in the order of messages.

        Sends of other batches that have not gone out are named too. Receives are not: they may be posted ahead.
        """
        sends = [part for handle in self._in_flight for part in handle._parts if part.sends]
        failures = failures + Wait(sends, PROBE).run()
        peers = _peers(failures)
        self.abort()
        self._closed = f"has failed before (peers {peers})"
        return TransportError(
            f"rank {self.rank} lost peer {', '.join(map(str, peers))} (timeout {self.timeout:g} s): could not "
            f"{'; '.join(reason for _, reason in failures)}. "
            "A peer that is stopped, dead, behind, or sending another size gives this.",
            peers,
        )


def _member(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group for None."""
    group: object = process_group
    if group is None:
        if not dist.is_initialized():
            raise ValueError("there is no default process group; call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group cannot be {group!r}; allowed: a torch.distributed.ProcessGroup that this process is a "
            "member of (other processes get no transport)"
        )
    return group


def _unreachable(operations: list[dist.P2POp], error: RuntimeError) -> list[Failure]:
    """Those whose peer takes no other message either: a batch that fails to start does not say which part did."""
    lost = [operation for operation in operations if not operation.tensor.is_cuda and gone(operation)]
    return [failure(operation, error) for operation in lost or operations]


def _peers(failures: list[Failure]) -> tuple[int, ...]:
    return tuple(sorted({failure.peer for failure in failures}))
