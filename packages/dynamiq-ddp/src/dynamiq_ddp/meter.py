"""Counts what an all-reduce costs: bytes handed to the transport, and seconds, by what they are spent on.

On CUDA the host only enqueues, so spans are bracketed by events, and read once the device has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch.profiler import record_function

from dynamiq_transport import Handle, Message, Transport

Phase = Literal["agreement", "probe", "node", "statistics", "gradient", "measurement"]
Activity = Literal["agreement", "node", "statistics", "codec", "network"]


class Meter:
    """Totals of one rank; belongs to one thread at a time.

    Attributes:
        bytes: sent, by phase.
        coordinates: gradient coordinates that were moved: 2 (n - 1) / n times d for a ring.
        coordinates_node: thereof inside a node.
        all_reduces: how many were counted.
    """

    def __init__(self) -> None:
        self.bytes: dict[Phase, int] = dict.fromkeys(get_args(Phase), 0)
        self.coordinates = 0.0
        self.coordinates_node = 0.0
        self.all_reduces = 0
        self._seconds: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self._events: deque[tuple[Activity, torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def bytes_sent(self) -> int:
        """Everything that was handed to the transport."""
        return sum(self.bytes.values())

    def seconds(self, activity: Activity) -> float:
        """Seconds spent on an ``activity``; on CUDA up to what the device has finished."""
        self._collect()
        return self._seconds[activity]

    @contextmanager
    def span(self, activity: Activity, device: torch.device) -> Iterator[None]:
        """Time what is done on ``device`` inside the ``with`` block, or enqueued on its stream, as an ``activity``."""
        with record_function(f"dynamiq: {activity}"):
            if device.type == "cuda":
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                stream = torch.cuda.current_stream(device)
                start.record(stream)
                yield
                end.record(stream)
                self._collect()
                self._events.append((activity, start, end))
            else:
                began = time.perf_counter()
                yield
                self._seconds[activity] += time.perf_counter() - began

    def _collect(self) -> None:
        while self._events and self._events[0][2].query():  # type: ignore[no-untyped-call]
            activity, start, end = self._events.popleft()
            self._seconds[activity] += start.elapsed_time(end) / 1000


class MeteredTransport(Transport):
    """Another transport, whose traffic is counted as part of one phase.

    Args:
        transport: the one that moves the bytes.
        meter: where they are counted.
        phase: as what.
    """

    def __init__(self, transport: Transport, meter: Meter, phase: Phase) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.posts_ahead = transport.posts_ahead
        self._transport = transport
        self._meter = meter
        self._phase: Phase = phase

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        handle = self._transport.exchange(sends, recvs)
        self._meter.bytes[self._phase] += sum(tensor.numel() for _, tensor in sends)
        return handle

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
