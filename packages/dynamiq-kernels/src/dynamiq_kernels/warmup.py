"""Compile ahead of the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynamiq_core import SUPER_GROUP, CodecConfig, DynamiQ, Operations, Received
from dynamiq_core.dynamiq import DTYPES


def warmup(
    operations: Operations,
    device: torch.device | str = "cpu",
    *,
    config: CodecConfig | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Run every operation once on a tiny tensor, so that little is left to compile when training begins.

    With Numba nothing is. Triton has kernels of their own for tensors that end inside a super-group, and for hops with
    two and with more messages, which are compiled when they are first used. Compiled code is kept on disk, so that this
    takes seconds once per machine and a fraction of a second thereafter.

    Args:
        operations: the backend, from `dynamiq_kernels.operations`.
        device: where the tensors will live.
        config: the codec's parameters; ``CodecConfig()`` when None.
        dtypes: of the gradients to come.
    """
    codec = DynamiQ(config, operations=operations)
    for dtype in dtypes:
        x = torch.ones(SUPER_GROUP, dtype=dtype, device=device)
        plan = codec.plan(codec.statistics(x), x.numel(), device=x.device, workers=2, chunks=1)
        message = codec.compress(x, plan, chunk=0, slot=0)
        message = codec.decompress_accumulate_recompress([Received(message, 0)], x, plan, chunk=0, slot=1)
        codec.decompress(message, plan, chunk=0, slot=1, out=torch.empty_like(x))
        codec.decompress_accumulate(message, x.to(torch.float32), plan, chunk=0, slot=1)
