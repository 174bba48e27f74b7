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
from dynamiq_kernels.numba.chunk import chunk_arguments, slot_arguments
from dynamiq_kernels.numba.compiling import kernel
from dynamiq_kernels.numba.floats import clear_padding, gradient_arguments, read
from dynamiq_kernels.numba.memory import bytes_at, stack
from dynamiq_kernels.numba.quantise import add_message, write_message
from dynamiq_kernels.numba.threads import for_each_range

ONE = np.float32(1.0)


@kernel
def _hop(first: Any, last: Any, x: Any, received: Any, slots: Any, slot: Any, chunk: Any, out: Any) -> None:
    for k in range(first, last):
        values = stack(256, np.float32)
        super_group = np.int64(chunk.index[k])
        start = super_group * SUPER_GROUP
        count = min(chunk.numel - start, SUPER_GROUP)
        read(values, x, start, count, chunk.mean[super_group])
        for r in range(len(received)):
            add_message(values, bytes_at(received[r]), k, slots[r], ONE, chunk)
        clear_padding(values, count)
        write_message(out, values, k, slot, chunk)


def decompress_accumulate_recompress(
    received: Sequence[Received], x: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor
) -> None:
    """Encode a chunk of ``x`` plus the received messages; see `dynamiq_core.reference`."""
    view = chunk_arguments(plan, chunk)
    used = view.scales_at + view.nonzero * (scales.group_bytes(plan.config.scales) + scales.SUPER_BYTES)
    message = out.numpy()
    addresses = np.array([m.data_ptr() for m, _ in received], dtype=np.int64)
    slots = np.array([s for _, s in received], dtype=np.int64)
    # Super-groups of width 0 come last and send nothing.
    for_each_range(
        _hop, view.nonzero, gradient_arguments(x), addresses, slots, slot_arguments(plan, slot), view, message
    )
    message[used:] = 0
