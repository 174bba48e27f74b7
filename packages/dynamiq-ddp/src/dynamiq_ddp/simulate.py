"""The real all-reduce on ranks inside one process: what a codec does to given gradients.

Shapes: n ranks, d coordinates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Codec, InputError, vnmse
from dynamiq_transport import Link, Transport, run_local

from .engine import DTYPES, all_reduce
from .errors import ReplicaError
from .meter import Meter
from .probe import probe, remember
from .route import ScheduleChoice, measures

_links: dict[int, Link] = {}


class SimulationResult(NamedTuple):
    """What came out.

    Attributes:
        mean: [d], what every rank holds afterwards, in the dtype of the gradients.
        vnmse: ``|mean - exact mean|**2 / |exact mean|**2``, in double precision.
        bytes_sent: int64 [n], everything that each rank handed to the transport.
    """

    mean: Tensor
    vnmse: float
    bytes_sent: Tensor


def simulate(
    gradients: Tensor,
    *,
    codec: Codec[Any],
    schedule: ScheduleChoice = "ring",
    step: int = 0,
    bucket: int = 0,
) -> SimulationResult:
    """Average the rows of a matrix as that many ranks would, one thread each.

    Args:
        gradients: float32, bfloat16 or float16 [n, d], one gradient per rank; not changed.
        codec: shared by the ranks.
        schedule: as for `all_reduce`. What ``"auto"`` measures are threads that copy memory, once for each number of
            ranks in a process; the bytes of that are not counted.
        step: as for `all_reduce`; repetitions with other steps see other random numbers.
        bucket: as for `all_reduce`.

    Raises:
        InputError: the gradients are of another kind.
        ConfigError: no such schedule, or no codec.
        ReplicaError: the ranks ended with different bits.
    """
    if not isinstance(gradients, Tensor) or gradients.dim() != 2 or 0 in gradients.shape:
        shape = tuple(gradients.shape) if isinstance(gradients, Tensor) else type(gradients).__name__
        raise InputError(f"gradients cannot be {shape}; allowed: a tensor [n, d] with n and d at least 1")
    if gradients.dtype not in DTYPES:
        raise InputError(f"gradients cannot be {gradients.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    rows = gradients.detach()
    link = _link(rows.shape[0]) if measures(schedule) else None

    def rank(transport: Transport) -> tuple[Tensor, int]:
        meter = Meter()
        if link is not None:
            remember(transport, link)
        row = rows[transport.rank].clone(memory_format=torch.contiguous_format)
        # The ranks share their arguments, so there is nothing to compare.
        all_reduce(
            row, transport=transport, codec=codec, schedule=schedule, step=step, bucket=bucket, check=False, meter=meter
        )
        return row, meter.bytes_sent

    results = run_local(rows.shape[0], rank)
    mean = results[0][0]
    for other, (row, _) in enumerate(results):
        if not torch.equal(row.view(torch.uint8), mean.view(torch.uint8)):
            raise ReplicaError(
                f"rank {other} ended with other bits than rank 0: schedule {schedule!r}, codec {codec!r}"
            )
    exact = rows.to(torch.float64).mean(dim=0)
    return SimulationResult(mean, vnmse(mean, exact), torch.tensor([sent for _, sent in results]))


def _link(size: int) -> Link:
    if size not in _links:
        _links[size] = run_local(size, lambda transport: probe(transport, torch.device("cpu"), Meter()))[0]
    return _links[size]
