"""The all-reduce over nodes: at full precision inside a node, by another all-reduce between the nodes.

Inside a node it is the direct exchange. Rank c of the node receives part c of every gradient as it is, adds them up in
float32, and averages the sum with those of the other nodes; what comes out is sent to the node in the gradient's dtype,
and taken as it is by everybody. So all ranks end with the bits of the part's owners, which are the same in all nodes.

Shapes: d coordinates, m ranks in a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynamiq_core import Received

from .frames import NODE, Header, Seal
from .job import Job
from .meter import MeteredTransport
from .route import NodeRoute, Route
from .walk import Walk, reduce_and_gather

Finish = Callable[[], None]
"""Writes the mean, of which everything has arrived."""


def receive_over_nodes(
    x: Tensor, job: Job, route: NodeRoute, seal: Seal, receive: Callable[[Tensor, Job, Seal], Finish]
) -> Finish:
    """Do everything of the all-reduce of ``x`` [d] but to write the result.

    Args:
        x: the gradient.
        job: the all-reduce.
        route: its two levels.
        seal: compares headers on both levels: who has seen a wrong one inside a node says so between the nodes.
        receive: the all-reduce of a part between the nodes, up to but without writing its result.
    """
    inside = route.inside
    m = inside.schedule.size
    parts = torch.tensor_split(x, m)
    own = parts[inside.schedule.rank]
    sums = torch.promote_types(x.dtype, torch.float32)
    stream = job.bucket if job.stream is None else job.stream
    between = job._replace(route=route.between, stream=stream * m + inside.schedule.rank)

    def encode(chunk: int, received: Sequence[Received], out: Tensor) -> None:
        if chunk not in inside.schedule.owned:
            out.copy_(parts[chunk].view(torch.uint8))
            return
        with job.meter.span("node", x.device):
            total = own.to(sums, copy=True)
            for message, _ in received:
                total += message.view(x.dtype)
            total /= m
        if total.numel():
            receive(total, between, seal)()
        out.view(x.dtype).copy_(total)

    finished = reduce_and_gather(
        Walk(
            route=inside,
            transport=MeteredTransport(job.transport, job.meter, "node"),
            sizes=[part.numel() * part.element_size() for part in parts],
            encode=encode,
            header=Header(NODE, 0, 0, job.bucket, job.step),
            seal=seal,
            device=x.device,
            align=16,
            meter=job.meter,
            moving="node",
        )
    )
    others = x.numel() - own.numel()
    moved = others + (m - 1) * own.numel()  # once to be summed up, and once finished

    def finish() -> None:
        with job.meter.span("node", x.device):
            for chunk, part in enumerate(parts):
                part.copy_(finished.message(chunk).view(x.dtype))
        job.meter.coordinates += moved
        job.meter.coordinates_node += moved

    return finish


def own_part(x: Tensor, route: Route | NodeRoute) -> tuple[Tensor, int]:
    """The part of x [d] that this rank encodes, a view of it, and how many ranks it encodes it for."""
    ranks = 1
    while isinstance(route, NodeRoute):
        inside = route.inside.schedule
        x, ranks, route = torch.tensor_split(x, inside.size)[inside.rank], ranks * inside.size, route.between
    return x, ranks
