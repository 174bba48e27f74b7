"""Codecs side by side on the same gradients: what each sends, and how far and in which way its mean is off.

Shapes: n ranks, d coordinates, R repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamiq_core import Codec, InputError, Received, vnmse

from .simulate import simulate

TIMED = 1 << 20
"""Most coordinates over which a codec is timed."""


class Row(NamedTuple):
    """One codec on one schedule.

    Attributes:
        codec: its name.
        schedule: the schedule's name.
        ranks: how many, n.
        bits: on the wire per coordinate and direction: everything that was sent, over the 2 (n - 1) d coordinates that
            any all-reduce has to move.
        vnmse: ``|mean - exact|**2 / |exact|**2``, averaged over the repeats.
        bias: the part of it that does not change from repeat to repeat: ``|E[mean] - exact|**2 / |exact|**2``. All
            of it for a codec without random numbers; None with a single repeat.
        cosine: of the angle between the mean and the exact mean.
        nanoseconds: that a rank computes per coordinate, on one thread with nothing else to do; None if not timed.
    """

    codec: str
    schedule: str
    ranks: int
    bits: float
    vnmse: float
    bias: float | None
    cosine: float
    nanoseconds: float | None


def compare(
    gradients: Tensor,
    codecs: Mapping[str, Codec[Any]],
    *,
    schedules: Sequence[str] = ("ring",),
    repeats: int = 2,
    timed: bool = True,
) -> Iterator[Row]:
    """Average the same gradients with every codec on every schedule, in the real engine.

    Args:
        gradients: float32, bfloat16 or float16 [n, d], one row per rank.
        codecs: by name.
        schedules: names as for `all_reduce`.
        repeats: all-reduces with different random numbers, 1 or more.
        timed: whether to measure how long codecs compute, too.

    Yields:
        A row for every codec and schedule.

    Raises:
        InputError: there are fewer than two ranks or one repeat.
    """
    if gradients.dim() != 2 or gradients.shape[0] < 2:
        raise InputError(f"a comparison needs gradients of 2 ranks or more, [n, d], not {tuple(gradients.shape)}")
    if repeats < 1:
        raise InputError(f"repeats must be 1 or more, not {repeats}")
    n, d = gradients.shape
    exact = gradients.to(torch.float64).mean(dim=0)
    for name, codec in codecs.items():
        seconds = codec_seconds(codec, gradients[:, :TIMED].contiguous()) if timed else None
        for schedule in schedules:
            bits, estimates = 0.0, []
            for step in range(repeats):
                result = simulate(gradients, codec=codec, schedule=schedule, step=step)
                bits = 8 * int(result.bytes_sent.sum()) / (2 * (n - 1) * d)
                estimates.append(result.mean)
            yield Row(
                codec=name,
                schedule=schedule,
                ranks=n,
                bits=bits,
                vnmse=sum(vnmse(estimate, exact) for estimate in estimates) / repeats,
                bias=bias(estimates, exact),
                cosine=sum(cosine(estimate, exact) for estimate in estimates) / repeats,
                nanoseconds=None if seconds is None else 1e9 * seconds,
            )


def bias(estimates: Sequence[Tensor], exact: Tensor) -> float | None:
    """Squared norm of the expected error, relative to that of the exact mean.

    The inner product of two errors with independent random numbers has it as its expectation, so their average over all
    pairs of repeats estimates it without adding the variance; below 0 is chance and given as 0.

    Args:
        estimates: [d] each, with different random numbers.
        exact: float64 [d].

    Returns:
        The estimate, or None for fewer than two repeats.
    """
    count = len(estimates)
    if count < 2:
        return None
    errors = [estimate.to(torch.float64) - exact for estimate in estimates]
    both = sum(errors, torch.zeros_like(exact)).square().sum() - sum(float(error.square().sum()) for error in errors)
    return max(0.0, float(both / (count * (count - 1)) / exact.square().sum()))


def cosine(estimate: Tensor, exact: Tensor) -> float:
    """Cosine of the angle between two vectors [d], in double precision."""
    return float(torch.nn.functional.cosine_similarity(estimate.to(torch.float64), exact, dim=0))


def codec_seconds(codec: Codec[Any], gradients: Tensor, *, repeats: int = 3) -> float:
    """Seconds per coordinate that one rank of a ring computes: statistics, plan, every hop, and the end.

    Args:
        codec: which.
        gradients: [n, d].
        repeats: the least disturbed one counts.
    """
    n, d = gradients.shape
    device = gradients.device
    parts = [part for part in map(codec.statistics, gradients) if part is not None]
    merged = codec.merge_statistics(parts) if parts else None
    plan = codec.plan(merged, d, device=device, workers=n, chunks=n)
    arrived = [codec.compress(gradients[1], plan, chunk=chunk, slot=1) for chunk in range(n)]
    out = torch.empty_like(gradients[0])
    best = float("inf")
    for step in range(repeats):
        _wait(device)
        began = time.perf_counter()
        codec.statistics(gradients[0])
        plan = codec.plan(merged, d, device=device, workers=n, chunks=n, step=step)
        for chunk in range(n):
            received = [Received(arrived[chunk], 1)] if chunk else []  # one chunk starts here
            message = codec.decompress_accumulate_recompress(received, gradients[0], plan, chunk=chunk, slot=0)
            codec.decompress(message, plan, chunk=chunk, slot=0, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return best / d


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
