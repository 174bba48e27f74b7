"""The hop: decompress, accumulate and recompress in one pass over memory; with nothing received it is compress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dynamiq_core import scales
from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.plan import DynamiQPlan
from dynamiq_core.protocol import Received
from dynamiq_kernels.numba.chunk import chunk_arguments, row_of, slot_arguments
from dynamiq_kernels.numba.compiling import kernel
from dynamiq_kernels.numba.floats import clear_padding, fetch_ahead, gradient_arguments, read
from dynamiq_kernels.numba.memory import array_at, float_of, stack
from dynamiq_kernels.numba.philox import SIZE, expand_key
from dynamiq_kernels.numba.quantise import add_message, write_message
from dynamiq_kernels.numba.threads import for_each_range

SOURCE_BYTES = 16
"""A received message is two int64: its address and its sender's slot."""
ONE = np.float32(1.0)


@kernel
def _hop(first: Any, last: Any, x: Any, received: Any, sources: Any, slot: Any, chunk: Any, out: Any) -> None:
    keys = stack(SIZE, np.uint64)
    expand_key(keys, chunk.key)
    for k in range(first, last):
        values = stack(256, np.float32)
        row = row_of(chunk, k)
        start = np.int64(row[0]) * SUPER_GROUP
        count = min(chunk.numel - start, SUPER_GROUP)
        fetch_ahead(x, k, last, chunk)
        read(values, x, start, count, float_of(row[3]))
        for r in range(received):
            source = array_at(sources + SOURCE_BYTES * r, np.int64)
            add_message(values, source[0], k, source[1], ONE, chunk, keys)
        clear_padding(values, count)
        write_message(out, values, k, slot, chunk, keys)


def decompress_accumulate_recompress(
    received: Sequence[Received], x: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor
) -> None:
    """Encode a chunk of ``x`` plus the received messages; see `dynamiq_core.reference`."""
    view = chunk_arguments(plan, chunk)
    used = view.scales_at + view.nonzero * (scales.group_bytes(plan.config.scales) + scales.SUPER_BYTES)
    sources = np.array([(m.data_ptr(), sender_slot) for m, sender_slot in received], dtype=np.int64)
    for_each_range(
        _hop,
        view.nonzero,  # super-groups of width 0 come last and send nothing
        gradient_arguments(x),
        len(received),
        sources.ctypes.data,
        slot_arguments(plan, slot),
        view,
        out.data_ptr(),
    )
    out[used:].zero_()
