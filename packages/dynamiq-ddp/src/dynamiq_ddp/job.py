"""What one all-reduce is, apart from its tensor.

Shapes: d coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dynamiq_core import Codec, Plan
from dynamiq_transport import Transport

from .feedback import Feedback
from .meter import Meter
from .route import NodeRoute, Route

Watch = Callable[[Plan, Tensor, Route], None]
"""``watch(plan, mean, route)``."""


class Job(NamedTuple):
    """One all-reduce, apart from its tensor.

    Attributes:
        transport: to the other ranks.
        codec: how messages are made.
        route: which way they go.
        step: training step; keys the random numbers together with ``stream``.
        bucket: index within the step.
        meter: where costs are counted.
        watch: is shown every plan, the mean that came of it, [d], and the route that it went; of this rank's part alone
            where the route has levels, and never where nothing is encoded.
        feedback: adds what the last all-reduce of this bucket lost, and learns what this one loses; of this rank's part
            alone where the route has levels.
        stream: tells apart the random numbers of all-reduces of the same step; the bucket when None.
    """

    transport: Transport
    codec: Codec[Any]
    route: Route | NodeRoute
    step: int
    bucket: int
    meter: Meter
    watch: Watch | None = None
    feedback: Feedback | None = None
    stream: int | None = None
