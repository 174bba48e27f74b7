"""The compressed multi-hop all-reduce: codec, schedule and transport put together.

Shapes: d coordinates, M rows of statistics with K values each, C chunks, n workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import dynamiq_core
from dynamiq_core import Codec, ConfigError, DynamiQError, InputError, Plan, Received
from dynamiq_transport import Transport, TransportError

from . import frames
from .agreement import PROBLEM, agree
from .errors import CommunicationError, ConfigMismatchError
from .frames import GRADIENT, STATISTICS, Frames, Header, Seal
from .job import Job as Job
from .meter import Meter, MeteredTransport
from .nodes import Finish, receive_over_nodes
from .probe import bytes_of, known_link, probe
from .route import NodeRoute, Route, ScheduleChoice, find_route, measures, quick_route
from .walk import Walk, reduce_and_gather

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be compressed; all sums are float32."""


def all_reduce(
    tensor: Tensor,
    *,
    transport: Transport,
    codec: Codec[Any],
    schedule: ScheduleChoice = "ring",
    step: int = 0,
    bucket: int = 0,
    check: bool = True,
    meter: Meter | None = None,
) -> Tensor:
    """Replace a tensor by its mean over the ranks, in place. All ranks end with the same bits.

    Every rank of the transport calls it with a tensor of the same number of elements and dtype, and the same codec,
    schedule, step and bucket. The tensor is not written before everything has arrived.

    An error in the middle, be it the codec's own or an interrupt, aborts the transport, as what its peers still expect
    of this rank will not come; a new group is needed to go on. It stays usable after what is found out before the first
    message is encoded, and after messages that have come but do not belong here.

    Args:
        tensor: float32, bfloat16 or float16, of any shape and strides, not empty.
        transport: to the other ranks; used by this call alone while it lasts.
        codec: how messages are compressed, for instance ``dynamiq_core.DynamiQ()``.
        schedule: ``"ring"``, ``"butterfly"``, ``"direct"``, ``dynamiq_transport.hierarchical(node_size)`` (or as text
            ``"hierarchical:8"``), or a function ``(rank, size) -> Schedule``. ``"auto"`` takes one of the first three
            by the size of the message; the first call with it measures the transport, which remembers the numbers.
        step: number of the training step. With ``bucket`` it keys the codec's random numbers, so two all-reduces
            should not share both.
        bucket: number of this tensor within the step.
        check: compare on all ranks first what they are about to do. On CUDA the host waits for that; without it
            nothing is read from the device, and ranks that disagree end in a `CommunicationError` at best.
        meter: counts bytes and seconds; see `Meter`.

    Returns:
        ``tensor``.

    Raises:
        InputError: the tensor is of another kind, or step or bucket is no number; on every rank that is wrong.
        ConfigError: no such schedule, none that fits the number of ranks, or no codec.
        ConfigMismatchError: the ranks disagree, be it in what is wrong; on every rank.
        CommunicationError: a peer died, stalled, or sent a message that does not belong here. With CUDA tensors a
            message that does not belong here turns the result into NaN instead, on all ranks that learn of it.
    """
    meter = Meter() if meter is None else meter
    device = tensor.device if isinstance(tensor, Tensor) and tensor.is_cuda else torch.device("cpu")
    job: Job | None = None
    problem: DynamiQError | None = None
    try:
        _check_tensor(tensor)
        _check_numbers(step=step, bucket=bucket)
        if not isinstance(codec, Codec):
            raise ConfigError(f"codec cannot be {codec!r}; allowed: a dynamiq_core.Codec")
        if measures(schedule) and known_link(transport) is None:
            _probe(schedule, transport, device, meter, step=step, bucket=bucket, check=check)
        route = route_of(schedule, transport, codec, tensor.numel(), tensor.device)
        job = Job(transport, codec, route, step, bucket, meter)
    except (ConfigMismatchError, CommunicationError):
        raise  # of these, all ranks know
    except DynamiQError as error:
        problem = error
    if check:
        # A rank with a problem takes part all the same: alone, it would leave the others waiting.
        facts = {PROBLEM: problem} if job is None else describe(tensor, codec, job.route, step=step, bucket=bucket)
        compare_ranks(facts, transport, device, meter, step=step, bucket=bucket)
    if job is None:
        raise problem or AssertionError("no job without a problem")
    return reduce_tensor(tensor, job)


def route_of(
    schedule: ScheduleChoice, transport: Transport, codec: Codec[Any], numel: int, device: torch.device
) -> Route | NodeRoute:
    """The route for one tensor [d]; for ``"auto"`` by the numbers that are known of the transport.

    Raises:
        ConfigError: no such schedule, or it does not fit the number of ranks.
    """
    if not measures(schedule):
        return find_route(schedule, transport.rank, transport.size)
    nbytes = bytes_of(codec, numel, device)
    return find_route(schedule, transport.rank, transport.size, link=known_link(transport), nbytes=nbytes)


def _probe(
    schedule: ScheduleChoice,
    transport: Transport,
    device: torch.device,
    meter: Meter,
    *,
    step: int,
    bucket: int,
    check: bool,
) -> None:
    """Measure the network, for which all ranks are needed."""
    if check:
        facts = {"schedule": f"{schedule!r}, by what is to be measured"}
        compare_ranks(facts, transport, device, meter, step=step, bucket=bucket)
    try:
        probe(transport, device, meter)
    except TransportError as error:
        raise CommunicationError(str(error), error.peers, step=step, bucket=bucket) from error


def describe(
    tensor: Tensor, codec: Codec[Any], route: Route | NodeRoute, *, step: int, bucket: int
) -> dict[str, object]:
    """What must be equal on all ranks before they exchange messages of an all-reduce."""
    return {
        "version": f"{dynamiq_core.__version__}, frames {frames.VERSION}",
        "codec": codec.fingerprint(),
        "schedule": route.name,
        "number of elements": tensor.numel(),
        "dtype": tensor.dtype,
        "step": step,
        "bucket": bucket,
    }


def compare_ranks(
    facts: Mapping[str, object], transport: Transport, device: torch.device, meter: Meter, *, step: int, bucket: int
) -> None:
    """`agree` on facts before an all-reduce, counted and with its errors.

    Raises:
        ConfigMismatchError: they differ; on every rank.
        CommunicationError: a rank did not take part.
    """
    try:
        with meter.span("agreement", device):
            agree(MeteredTransport(transport, meter, "agreement"), facts, device=device)
    except TransportError as error:
        raise CommunicationError(str(error), error.peers, step=step, bucket=bucket) from error


@torch.no_grad()
def reduce_tensor(tensor: Tensor, job: Job) -> Tensor:
    """`all_reduce` without the checks: for callers that have compared the ranks by themselves."""
    if job.transport.size == 1:
        return tensor
    values = tensor.detach()  # a parameter may require gradients, which its mean does not need
    x = values.resolve_neg().contiguous().view(-1)
    seal = Seal(x.device)
    try:
        finish = _receive(x, job, seal)
    except TransportError as error:
        raise CommunicationError(str(error), error.peers, step=job.step, bucket=job.bucket) from error
    _raise_if_wrong(seal, x, job)
    finish()
    if x.is_cuda:
        x.masked_fill_(seal.wrong(), torch.nan)
    if x.data_ptr() != values.data_ptr():
        values.copy_(x.view_as(values))
    if job.feedback is not None:
        job.feedback.keep(values)
    job.meter.all_reduces += 1
    return tensor


def _receive(x: Tensor, job: Job, seal: Seal) -> Finish:
    """Everything but to write the result: the tensor stays as it is while something can go wrong.

    Wrong headers are looked at in the end only, when all ranks have had all messages that they wait for.
    """
    if isinstance(job.route, NodeRoute):
        return receive_over_nodes(x, job, job.route, seal, _receive)
    route = job.route
    if route.schedule.size == 1:  # the only node
        return _nothing
    result = x
    if job.feedback is not None:
        x = job.feedback.compensate(x)
    statistics = _merge_statistics(x, job, route, seal)
    with job.meter.span("statistics", x.device):
        plan = _plan(statistics, x, job, route)
    finished = _exchange(x, plan, job, route, seal)

    def finish() -> None:
        with job.meter.span("codec", x.device):
            if job.feedback is not None:
                job.feedback.learn(job.codec, x, plan)
            for chunk, owner in enumerate(route.owners):
                job.codec.decompress(finished.message(chunk), plan, chunk=chunk, slot=owner, out=x)
            if x is not result:
                result.copy_(x)
        if job.watch is not None:
            job.watch(plan, result, route)
        job.meter.coordinates += route.moved * x.numel()

    return finish


def _nothing() -> None:
    """The mean over one node is that node's."""


def _merge_statistics(x: Tensor, job: Job, gradient: Route, seal: Seal) -> Tensor | None:
    """Phase 1: the statistics of all ranks together, bfloat16 [M, K], the same bits everywhere."""
    with job.meter.span("statistics", x.device):
        own = job.codec.statistics(x)
    if own is None:
        return None
    route = quick_route(gradient.schedule.rank, gradient.schedule.size, gradient.ranks)
    chunks = route.schedule.chunks
    rows = torch.tensor_split(own, chunks)

    def encode(chunk: int, received: Sequence[Received], out: Tensor) -> None:
        with job.meter.span("statistics", x.device):
            parts = [message.view(own.dtype).view(-1, own.shape[1]) for message, _ in received]
            merged = job.codec.merge_statistics([rows[chunk], *parts]) if parts else rows[chunk]
            out.copy_(merged.contiguous().view(torch.uint8).view(-1))

    finished = reduce_and_gather(
        Walk(
            route=route,
            transport=MeteredTransport(job.transport, job.meter, "statistics"),
            sizes=[part.numel() * part.element_size() for part in rows],
            encode=encode,
            header=Header(STATISTICS, 0, 0, job.bucket, job.step),
            seal=seal,
            device=x.device,
            align=own.element_size(),
            meter=job.meter,
            moving="statistics",
        )
    )
    return torch.cat([finished.message(chunk) for chunk in range(chunks)]).view(own.dtype).view(own.shape)


def _plan(statistics: Tensor | None, x: Tensor, job: Job, route: Route) -> Plan:
    plan: Plan = job.codec.plan(
        statistics,
        x.numel(),
        device=x.device,
        workers=route.schedule.size,
        chunks=route.schedule.chunks,
        step=job.step,
        bucket=job.bucket if job.stream is None else job.stream,
        gain=route.gain,
    )
    return plan


def _exchange(x: Tensor, plan: Plan, job: Job, route: Route, seal: Seal) -> Frames:
    """Phase 2: the last encoding of every chunk."""

    def encode(chunk: int, received: Sequence[Received], out: Tensor) -> None:
        slot = route.schedule.rank
        with job.meter.span("codec", x.device):
            job.codec.decompress_accumulate_recompress(received, x, plan, chunk=chunk, slot=slot, out=out)
        if job.feedback is not None:
            job.feedback.note(chunk, slot, received, out)

    return reduce_and_gather(
        Walk(
            route=route,
            transport=MeteredTransport(job.transport, job.meter, "gradient"),
            sizes=plan.sizes,
            encode=encode,
            header=Header(GRADIENT, 0, 0, job.bucket, job.step),
            seal=seal,
            device=x.device,
            align=16,  # what vector loads need
            meter=job.meter,
            moving="network",
        )
    )


def _raise_if_wrong(seal: Seal, x: Tensor, job: Job) -> None:
    """On CPU say which message was wrong; on CUDA that would be a host read, and the result becomes NaN instead."""
    if not x.is_cuda and seal.wrong():
        reason, peers = seal.describe()
        raise CommunicationError(reason, peers, step=job.step, bucket=job.bucket)


def _check_tensor(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"tensor cannot be a {type(tensor).__name__}; allowed: a torch.Tensor")
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"tensor cannot be {tensor.layout} on {tensor.device}; allowed: torch.strided on cpu or cuda devices"
        )
    if tensor.dtype not in DTYPES:
        raise InputError(f"tensor cannot be {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if tensor.numel() == 0:
        raise InputError(f"tensor cannot be empty, of shape {tuple(tensor.shape)}; allowed: at least one element")
    if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InputError(
            f"tensor cannot have elements that share memory, as with strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}; allowed: memory of its own for every element"
        )


def _check_numbers(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 0:
            raise InputError(f"{name} cannot be {number!r}; allowed: an integer of at least 0")
