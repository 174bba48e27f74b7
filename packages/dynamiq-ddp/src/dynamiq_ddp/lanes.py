"""Lanes: each does its all-reduces one after the other, beside the backward pass and beside the other lanes.

On CPU a lane is a thread. On CUDA it is a stream, on which the caller enqueues. Each has a transport of its own, so
that the order of messages within a lane is the same on all ranks, whatever the lanes do relative to each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from dynamiq_core import InputError
from dynamiq_transport import Transport
from dynamiq_transport.worker import Worker

from .errors import first_cause
from .meter import Meter
from .quality import Quality

Work = Callable[["Lane"], Tensor]
"""Does one all-reduce over the lane's transport, and returns the tensor."""

_PATIENCE = 10.0
"""Seconds that closing waits for what a thread is doing."""


class Lane:
    """One transport and what it costs.

    Attributes:
        transport: used by this lane alone.
        meter: counts what the lane does.
        quality: how exactly it does it.
        worker: does it, on CPU.
        streams: on which it is enqueued, on CUDA: one for each device, since a module may be spread over several.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.meter = Meter()
        self.quality = Quality()
        self.worker = Worker("dynamiq lane")
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


def as_exception(error: BaseException) -> Exception:
    """The error itself, or what to tell everybody else if it is an exit or an interrupt of one thread."""
    return error if isinstance(error, Exception) else RuntimeError(f"a lane was stopped by {error!r}")


class Pending:
    """An all-reduce that was begun: a future for DDP, and the outcome for whoever waits for it in Python.

    Attributes:
        error: what went wrong, once it is finished.
        began: when its lane began to work on it, by ``time.perf_counter``.
        ended: when the lane was done.
    """

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.error: Exception | None = None
        self._done = threading.Event()
        self._outcome: Future[Tensor | None] = Future()
        self.future: Future[Tensor] = self._outcome.then(self._unwrap)

    def finish(self, tensor: Tensor | None, error: Exception | None = None) -> None:
        """Hand over the result, or the error."""
        self.error = error
        self.ended = time.perf_counter()
        self._outcome.set_result(tensor)
        self._done.set()

    @property
    def done(self) -> bool:
        """Whether it is finished."""
        return self._done.is_set()

    def wait(self) -> Exception | None:
        """Block until it is finished, and return the error if there was one."""
        self._done.wait()
        return self.error

    def _unwrap(self, outcome: Future[Tensor | None]) -> Tensor:
        # `Future.set_exception` would reach DDP as a value of the wrong type. An error in a callback is an error there.
        if self.error is not None:
            raise self.error
        tensor = outcome.value()
        assert tensor is not None
        return tensor


class Lanes:
    """All lanes of one group of ranks; after an error none of them does anything any more.

    Args:
        transports: one for each lane.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.lanes = [Lane(transport) for transport in transports]
        self.error: Exception | None = None
        self._failing = threading.Lock()

    @property
    def rank(self) -> int:
        """Of this process among those that exchange messages."""
        return self.lanes[0].transport.rank

    @property
    def size(self) -> int:
        """How many processes exchange messages."""
        return self.lanes[0].transport.size

    def begin(self, number: int, work: Work, tensor: Tensor) -> tuple[Future[Tensor], Pending | None]:
        """Start work on a lane and return at once.

        Args:
            number: of the work; its remainder decides the lane, the same on all ranks.
            work: what to do.
            tensor: what it is done with.

        Returns:
            The future for DDP; and on CPU, what to wait for so as to see an error as it was raised.

        Raises:
            InputError: the current stream is being captured into a CUDA graph.
            BaseException: on CUDA, what went wrong while enqueueing; or the error that stopped the lanes before.
        """
        if self.error is not None:
            raise self.error
        lane = self.lanes[number % len(self.lanes)]
        if tensor.is_cuda:
            return self._enqueue(lane, work, tensor), None
        pending = Pending()
        lane.worker.submit(lambda: self._perform(lane, work, pending))
        return pending.future, pending

    def close(self) -> None:
        """Finish what was begun, then leave the group."""
        for lane in self.lanes:
            lane.worker.stop(_PATIENCE)
            lane.transport.abort() if self.error else lane.transport.close()
        self.error = self.error or RuntimeError("these lanes are closed")

    def _perform(self, lane: Lane, work: Work, pending: Pending) -> None:
        """In the lane's thread."""
        pending.began = time.perf_counter()
        if self.error is not None:
            pending.finish(None, self.error)
            return
        try:
            tensor = work(lane)
        except BaseException as error:  # an exit of this thread would leave everybody waiting, and say nothing
            failure = as_exception(error)
            self._fail(failure)
            pending.finish(None, failure)
        else:
            pending.finish(tensor)

    def _enqueue(self, lane: Lane, work: Work, tensor: Tensor) -> Future[Tensor]:
        """On the lane's stream, after what the current stream has been given so far."""
        device = tensor.device
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                "gradients cannot be averaged while the backward pass is captured into a CUDA graph: every step has a"
                " number and random numbers of its own"
            )
        if device not in lane.streams:
            # Before the backward pass where both have something to do, as the peers wait for what is done here.
            lane.streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream, current = lane.streams[device], torch.cuda.current_stream(device)
        stream.wait_stream(current)
        for part in (tensor,) if tensor.layout == torch.strided else (tensor._indices(), tensor._values()):
            part.record_stream(stream)
        future: Future[Tensor] = Future(devices=[device])
        try:
            with torch.cuda.stream(stream):
                future.set_result(work(lane))  # remembers this stream; whoever waits makes theirs wait for it
        except BaseException as error:
            self._fail(as_exception(error))
            current.wait_stream(stream)  # which may still write what whoever catches the error reads
            raise
        return future

    def _fail(self, error: Exception) -> None:
        """Leave every transport, each in its own thread, so that the peers notice and do not wait for this rank."""
        with self._failing:
            self.error = error if self.error is None else first_cause((self.error, error))
        for lane in self.lanes:
            if lane.streams:
                lane.transport.abort()
            else:
                lane.worker.submit(lane.transport.abort)
