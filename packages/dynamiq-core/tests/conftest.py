"""Ranks in one process: what an engine does with a codec, as a loop over the ranks.

Shapes: n workers, d coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from dynamiq_core import Codec, Received


class Reduced(NamedTuple):
    """What an all-reduce left on every rank, and the plan that it followed."""

    mean: Tensor
    plan: Any


torch.set_num_threads(1)  # the tensors are small, and more threads would only wait for each other

Normal: TypeAlias = Callable[..., Tensor]
PlanOf: TypeAlias = Callable[..., Any]
AllReduce: TypeAlias = Callable[..., Reduced]


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _plan_of(
    gradients: Sequence[Tensor],
    codec: Codec[Any],
    *,
    chunks: int | None = None,
    step: int = 0,
    bucket: int = 0,
    gain: float | None = None,
) -> Any:
    rows = [row for row in map(codec.statistics, gradients) if row is not None]
    return codec.plan(
        codec.merge_statistics(rows) if rows else None,
        gradients[0].numel(),
        device=gradients[0].device,
        workers=len(gradients),
        chunks=len(gradients) if chunks is None else chunks,
        step=step,
        bucket=bucket,
        gain=gain,
    )


def _ring(gradients: Sequence[Tensor], codec: Codec[Any], *, chunks: int | None = None, step: int = 0) -> Reduced:
    """Chunk c starts at rank c + 1, gathers one gradient per hop, and is finished by rank c."""
    plan, size = _plan_of(gradients, codec, chunks=chunks, step=step), len(gradients)
    mean = torch.full_like(gradients[0], torch.nan)
    for chunk in range(len(plan.sizes)):
        received: list[Received] = []
        for hop in range(size):
            rank = (chunk + 1 + hop) % size
            message = codec.decompress_accumulate_recompress(received, gradients[rank], plan, chunk=chunk, slot=rank)
            received = [Received(message, rank)]
        codec.decompress(message, plan, chunk=chunk, slot=rank, out=mean)
    return Reduced(mean, plan)


def _direct(gradients: Sequence[Tensor], codec: Codec[Any], *, chunks: int | None = None, step: int = 0) -> Reduced:
    """Every rank sends every chunk to its owner, who adds them up."""
    plan, size = _plan_of(gradients, codec, chunks=chunks, step=step), len(gradients)
    mean = torch.full_like(gradients[0], torch.nan)
    for chunk in range(len(plan.sizes)):
        owner = chunk % size
        received = [
            Received(codec.compress(gradients[rank], plan, chunk=chunk, slot=rank), rank)
            for rank in range(size)
            if rank != owner
        ]
        message = codec.decompress_accumulate_recompress(received, gradients[owner], plan, chunk=chunk, slot=owner)
        codec.decompress(message, plan, chunk=chunk, slot=owner, out=mean)
    return Reduced(mean, plan)


@pytest.fixture(scope="session")
def normal() -> Normal:
    """``normal(seed, *shape)``: standard normal float32 numbers that depend on the seed alone."""
    return _normal


@pytest.fixture(scope="session")
def plan_of() -> PlanOf:
    """``plan_of(gradients, codec, chunks=, step=, bucket=, gain=)``: the plan of one gradient per worker."""
    return _plan_of


@pytest.fixture(scope="session")
def ring() -> AllReduce:
    """``ring(gradients, codec, chunks=, step=)``: the mean after a ring, and the plan."""
    return _ring


@pytest.fixture(scope="session")
def direct() -> AllReduce:
    """``direct(gradients, codec, chunks=, step=)``: the mean after a direct exchange, and the plan."""
    return _direct


@pytest.fixture(params=[_ring, _direct], ids=["ring", "direct"])
def all_reduce(request: pytest.FixtureRequest) -> AllReduce:
    """Both of them, one after the other."""
    reduce: AllReduce = request.param
    return reduce
