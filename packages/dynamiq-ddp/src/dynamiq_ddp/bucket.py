"""What a lane does for one bucket: compare the ranks, average what is compressed, then what is exempt.

Shapes: d coordinates of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Codec, DynamiQError
from dynamiq_transport import TransportError

from .agreement import PROBLEM
from .engine import Job, compare_ranks, describe, reduce_tensor
from .exact import Exact
from .exempt import Ranges
from .feedback import Feedback
from .gate import Gate
from .lanes import Lane, Work, as_exception
from .quality import reduce_and_measure, reduce_and_predict
from .route import NodeRoute, Route
from .tokens import ComparingTransport

Comparison = Literal["before", "beside", "none"]
"""When the ranks compare what they are about to do: in messages before the others, beside the first of them, or not."""


class Way(NamedTuple):
    """How a bucket is averaged; the same on all ranks but for ``feedback``.

    Attributes:
        codec: for what is not exempt.
        route: likewise.
        ranges: what is exempt.
        exempt_route: for what is; None if nothing is.
        measured: whether the exact mean is computed as well.
        feedback: adds what was lost before.
        settings: of the state, as far as they are not contained in the others, in words.
    """

    codec: Codec[Any]
    route: Route | NodeRoute
    ranges: Ranges
    exempt_route: Route | NodeRoute | None
    measured: bool
    feedback: Feedback | None
    settings: str

    def facts(self, tensor: Tensor, *, step: int, bucket: int) -> dict[str, object]:
        """What must be equal on all ranks."""
        return {
            **describe(tensor, self.codec, self.route, step=step, bucket=bucket),
            "exempt": self.ranges,
            "measured": self.measured,
            "settings": self.settings,
        }


def averaging(
    tensor: Tensor, way: Way, *, step: int, bucket: int, comparison: Comparison, gate: Gate, first: bool
) -> Work:
    """The work on a bucket.

    Args:
        tensor: dense or sparse; its mean is written in place if it is dense.
        way: how.
        step: training step.
        bucket: index within the step.
        comparison: when the ranks compare what they do; ``"beside"`` is for CPU.
        gate: of the step.
        first: whether this is the step's first bucket, which opens the gate.
    """

    def average(lane: Lane) -> Tensor:
        facts = way.facts(tensor, step=step, bucket=bucket)
        # A sparse gradient has other rows on every rank; the messages hold all of them.
        dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
        transport = lane.transport
        if comparison == "before":
            compare_ranks(facts, transport, tensor.device, lane.meter, step=step, bucket=bucket)
        if comparison == "beside":
            transport = ComparingTransport(transport, _summary(facts), _agreement_counter(lane), gate.open)
        else:
            gate.open()
        job = Job(transport, way.codec, way.route, step, bucket, lane.meter, feedback=way.feedback)
        reduce = reduce_and_measure if way.measured else reduce_and_predict
        if way.exempt_route is not None:
            rest, exempt = way.ranges.split(dense.view(-1))
            reduce(rest, job, lane.quality)
            exact = job._replace(codec=Exact(tensor.dtype), route=way.exempt_route, feedback=None)
            reduce_tensor(exempt, exact)
            way.ranges.join(rest, exempt, out=dense.view(-1))
        else:
            reduce(dense, job, lane.quality)
        return dense if dense is tensor else dense.to_sparse(tensor.sparse_dim())

    return _through(gate, average, first=first)


def reporting(
    problem: DynamiQError,
    device: torch.device,
    *,
    step: int,
    bucket: int,
    comparison: Comparison,
    gate: Gate,
    first: bool,
) -> Work:
    """Tell the other ranks, which would wait for this one, and then raise. Arguments are those of `averaging`."""

    def report(lane: Lane) -> Tensor:
        try:
            if comparison == "before":
                compare_ranks({PROBLEM: problem}, lane.transport, device, lane.meter, step=step, bucket=bucket)
            if comparison == "beside":
                names = dict.fromkeys(_SUMMARY)
                count = _agreement_counter(lane)
                ComparingTransport(lane.transport, names, count, _nothing, problem=problem).compare().wait()
        except TransportError as error:  # the others do not compare this bucket, and cannot be told
            raise problem from error
        raise problem

    return _through(gate, report, first=first)


def _through(gate: Gate, action: Work, *, first: bool) -> Work:
    """The same action, once the gate is open; the first bucket's own decides on that."""

    def work(lane: Lane) -> Tensor:
        if not first:
            gate.wait()
            return action(lane)
        try:
            tensor = action(lane)
        except BaseException as error:
            gate.shut(as_exception(error))
            raise
        gate.open()
        return tensor

    return work


_SUMMARY = ("codec", "schedule", "step", "bucket")


def _summary(facts: dict[str, object]) -> dict[str, object]:
    """The same in four facts, as every fact costs a byte in every step."""
    named = {name: facts[name] for name in _SUMMARY[:-1]}
    others = [f"{name}: {fact}" for name, fact in facts.items() if name not in named]
    return {**named, _SUMMARY[-1]: ", ".join(others)}


def _agreement_counter(lane: Lane) -> Callable[[int], None]:
    def count(sent: int) -> None:
        lane.meter.bytes["agreement"] += sent

    return count


def _nothing() -> None:
    """Is not told."""
