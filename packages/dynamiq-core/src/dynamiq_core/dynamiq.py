"""The DynamiQ codec: the operations, bound to a configuration and a backend, behind the protocol of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dynamiq_core import reference, statistics, wire
from dynamiq_core.config import CodecConfig
from dynamiq_core.errors import InputError
from dynamiq_core.plan import DynamiQPlan
from dynamiq_core.protocol import Codec, Encoding, Received
from dynamiq_core.rounding import Key
from dynamiq_core.statistics import as_super_groups, super_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Gradient dtypes that the codec reads and writes; all arithmetic is float32."""


class Operations(Protocol):
    """The heavy operations, as `dynamiq_core.reference` defines them. Arguments have been checked."""

    @property
    def name(self) -> str: ...

    def statistics(self, x: Tensor) -> Tensor: ...

    def make_plan(
        self,
        statistics: Tensor,
        numel: int,
        *,
        config: CodecConfig,
        key: Key,
        workers: int,
        chunks: int,
        gain: float,
    ) -> DynamiQPlan: ...

    def decompress_accumulate_recompress(
        self, received: Sequence[Received], x: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor
    ) -> None: ...

    def decompress_accumulate(
        self, message: Tensor, total: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int
    ) -> None: ...

    def finish(self, message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> None: ...


class DynamiQ(Codec[DynamiQPlan]):
    """Variable bit widths, hierarchical scales, non-uniform levels and shared-seed rounding.

    Source: "DynamiQ: Accelerating Gradient Synchronization using Compressed Multi-hop All-reduce",
    arXiv 2602.08923; `CodecConfig` says which choices go beyond it.

    Args:
        config: the parameters; ``CodecConfig()`` when None.
        operations: the backend; the plain torch reference when None. ``dynamiq_kernels.operations`` gives faster ones.

    Example:
        >>> import torch
        >>> codec = DynamiQ(CodecConfig(bits=5.0))
        >>> x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        >>> plan = codec.plan(codec.statistics(x), x.numel(), device=x.device, workers=1, chunks=1)
        >>> message = codec.compress(x, plan, chunk=0, slot=0)
        >>> y = codec.decompress(message, plan, chunk=0, slot=0, out=torch.empty_like(x))
        >>> bool((y - x).square().sum() / x.square().sum() < 0.005)
        True
    """

    def __init__(self, config: CodecConfig | None = None, *, operations: Operations | None = None) -> None:
        self.config = CodecConfig() if config is None else config
        self.operations: Operations = reference if operations is None else operations

    def __repr__(self) -> str:
        return f"DynamiQ({self.config}, operations={self.operations.name})"

    def fingerprint(self) -> str:
        """Configuration and wire version, as one line."""
        return f"dynamiq wire={wire.VERSION} {self.config}"

    def statistics(self, x: Tensor) -> Tensor:
        """Phase 1: bfloat16 [M, 2], mean and root mean square of every super-group of ``x`` [d].

        Raises:
            InputError: ``x`` is not a contiguous, non-empty vector of a supported dtype.
        """
        _check_vector("x", x)
        return self.operations.statistics(x)

    def merge_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """Statistics of several workers together; see `dynamiq_core.statistics.merge_statistics`.

        Raises:
            InputError: there are none, or they are not of one shape.
        """
        if not parts:
            raise InputError("statistics of at least one worker are needed, not of 0")
        for part in parts:
            if part.dtype != torch.bfloat16 or part.dim() != 2 or part.shape[1] != 2:
                raise InputError(f"statistics must be bfloat16 [M, 2], not {part.dtype} of shape {tuple(part.shape)}")
            if len(part) != len(parts[0]):
                raise InputError(f"statistics of {len(part)} super-groups do not fit those of {len(parts[0])}")
        return statistics.merge_statistics(parts)

    def plan(
        self,
        statistics: Tensor | None,
        numel: int,
        *,
        device: torch.device,
        workers: int,
        chunks: int,
        step: int = 0,
        bucket: int = 0,
        gain: float | None = None,
    ) -> DynamiQPlan:
        """Means, order, bit widths and offsets; arguments as in `Codec.plan`.

        Raises:
            InputError: an argument is out of range, or the statistics do not belong to d coordinates.
        """
        if statistics is None or statistics.dtype != torch.bfloat16:
            what = "None" if statistics is None else statistics.dtype
            raise InputError(f"statistics must be the merged bfloat16 rows of phase 1, not {what}")
        if workers < 1 or chunks < 1 or numel < 1:
            raise InputError(f"workers, chunks and numel must be positive, not {workers}, {chunks} and {numel}")
        if statistics.shape != (super_groups(numel), 2):
            raise InputError(f"statistics of shape {tuple(statistics.shape)} do not belong to {numel} coordinates")
        if gain is not None and not 0 < gain < math.inf:
            raise InputError(f"gain must be a positive number, not {gain}")
        return self.operations.make_plan(
            statistics.to(device),
            numel,
            config=self.config,
            key=Key(self.config.seed, step, bucket),
            workers=workers,
            chunks=chunks,
            gain=(workers + 1) / 2 if gain is None else gain,
        )

    def decompress_accumulate_recompress(
        self,
        received: Sequence[Received],
        x: Tensor,
        plan: DynamiQPlan,
        *,
        chunk: int,
        slot: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The hop: decode the received messages, add the chunk of ``x``, encode the sum under ``slot``.

        Args:
            received: messages of this chunk with their senders' slots.
            x: this worker's gradient [d], not written.
            plan: of this all-reduce.
            chunk: 0 to chunks - 1.
            slot: 0 to n - 1, used by no other encoding of this chunk.
            out: uint8 [plan.sizes[chunk]] to write into; a new one when None.

        Returns:
            The message.

        Raises:
            InputError: an argument does not fit the plan.
        """
        _check_vector("x", x, plan)
        _check_place(plan, chunk, slot)
        for message, sender_slot in received:
            _check_place(plan, chunk, sender_slot)
            _check_message("message", message, plan, chunk)
        if out is None:
            out = torch.empty(plan.sizes[chunk], dtype=torch.uint8, device=x.device)
        _check_message("out", out, plan, chunk)
        self.operations.decompress_accumulate_recompress(received, x, plan, chunk=chunk, slot=slot, out=out)
        return out

    def decompress_accumulate(
        self, message: Tensor, total: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int
    ) -> Tensor:
        """Add what a message carries, without the subtracted means, to ``total`` (float32 [d]) in place.

        Arguments as in `decompress`.

        Raises:
            InputError: an argument does not fit the plan.
        """
        _check_vector("total", total, plan)
        if total.dtype != torch.float32:
            raise InputError(f"total must be float32, not {total.dtype}")
        _check_place(plan, chunk, slot)
        _check_message("message", message, plan, chunk)
        self.operations.decompress_accumulate(message, total, plan, chunk=chunk, slot=slot)
        return total

    def decompress(self, message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> Tensor:
        """Decode a final message: the chunk's coordinates of ``out`` [d] become the mean over the workers.

        Args:
            message: as its owner encoded it.
            plan: of this all-reduce.
            chunk: which chunk.
            slot: under which the owner encoded it.
            out: float32, bfloat16 or float16 [d]; coordinates of other chunks stay as they are.

        Raises:
            InputError: an argument does not fit the plan.
        """
        _check_vector("out", out, plan)
        _check_place(plan, chunk, slot)
        _check_message("message", message, plan, chunk)
        self.operations.finish(message, plan, chunk=chunk, slot=slot, out=out)
        return out

    def residual(self, encodings: Sequence[Encoding], x: Tensor, plan: DynamiQPlan) -> Tensor:
        """What a rank's own encodings lost; see `Codec.residual`.

        Super-groups of width 0 lose all of what went in but the mean, which is added back at the end and so not lost.

        Raises:
            InputError: an argument does not fit the plan.
        """
        _check_vector("x", x, plan)
        values = as_super_groups(x) - plan.mean[:, None]
        if len(encodings) < len(plan.sizes):
            encoded = torch.zeros(len(values) + 1, dtype=torch.bool, device=x.device)
            for encoding in encodings:
                encoded[plan.index[encoding.chunk].to(torch.int64)] = True  # -1, past a chunk's end, is the extra one
            values = torch.where(encoded[:-1, None], values, 0.0)
        went_in = values.flatten()[: plan.numel]
        carried = torch.zeros_like(went_in)
        for chunk, slot, received, message in encodings:
            for part, sender_slot in received:
                self.decompress_accumulate(part, went_in, plan, chunk=chunk, slot=sender_slot)
            self.decompress_accumulate(message, carried, plan, chunk=chunk, slot=slot)
        return went_in.sub_(carried)


def _check_vector(name: str, x: Tensor, plan: DynamiQPlan | None = None) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise InputError(f"{name} must be float32, bfloat16 or float16, not {x.dtype}")
    if x.dim() != 1 or not x.is_contiguous():
        raise InputError(f"{name} must be a contiguous vector, not of shape {tuple(x.shape)}, strides {x.stride()}")
    if x.numel() == 0:
        raise InputError(f"{name} must not be empty")
    if plan is not None and x.numel() != plan.numel:
        raise InputError(f"{name} has {x.numel()} coordinates, the plan is for {plan.numel}")
    if plan is not None and x.device != plan.mean.device:
        raise InputError(f"{name} is on {x.device}, the plan on {plan.mean.device}")


def _check_message(name: str, message: Tensor, plan: DynamiQPlan, chunk: int) -> None:
    if message.dtype != torch.uint8 or message.shape != (plan.sizes[chunk],) or not message.is_contiguous():
        raise InputError(
            f"{name} of chunk {chunk} must be {plan.sizes[chunk]} contiguous bytes,"
            f" not {message.dtype} of shape {tuple(message.shape)}"
        )
    if message.device != plan.mean.device:
        raise InputError(f"{name} is on {message.device}, the plan on {plan.mean.device}")


def _check_place(plan: DynamiQPlan, chunk: int, slot: int) -> None:
    if not 0 <= chunk < len(plan.sizes):
        raise InputError(f"chunk must be from 0 to {len(plan.sizes) - 1}, not {chunk}")
    if not 0 <= slot < plan.workers:
        raise InputError(f"slot must be from 0 to {plan.workers - 1}, not {slot}")
