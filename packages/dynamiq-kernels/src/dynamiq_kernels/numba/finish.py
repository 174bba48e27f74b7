"""Decode a final message into the bucket: decompress, add one n-th to the mean, round to the bucket's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.plan import DynamiQPlan
from dynamiq_kernels.numba.chunk import chunk_arguments, row_of
from dynamiq_kernels.numba.compiling import kernel
from dynamiq_kernels.numba.floats import FLOAT32, fetch_ahead, gradient_arguments, largest_of, write
from dynamiq_kernels.numba.memory import float_of, stack
from dynamiq_kernels.numba.philox import SIZE, expand_key
from dynamiq_kernels.numba.quantise import add_message
from dynamiq_kernels.numba.scales import read_super_scale
from dynamiq_kernels.numba.threads import for_each_range

INFINITY = np.float32(np.inf)


@kernel
def _finish(first: Any, last: Any, message: Any, slot: Any, share: Any, chunk: Any, out: Any) -> None:
    keys = stack(SIZE, np.uint64)
    expand_key(keys, chunk.key)
    for k in range(first, last):
        values = stack(256, np.float32)
        row = row_of(chunk, k)
        start = np.int64(row[0]) * SUPER_GROUP
        fetch_ahead(out, k, last, chunk)
        mean = float_of(row[3])
        for i in range(SUPER_GROUP):
            values[i] = mean
        largest = largest_of(out)
        if row[1] > 0:
            add_message(values, message, k, slot, share, chunk, keys)
            if read_super_scale(message, k, chunk) == INFINITY:
                largest = INFINITY
        if out.kind != FLOAT32:
            for i in range(SUPER_GROUP):
                value = largest if values[i] > largest else values[i]
                values[i] = -largest if value < -largest else value
        write(out, values, start, min(chunk.numel - start, SUPER_GROUP))


def finish(message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> None:
    """Write the mean over the workers into a chunk of ``out``; see `dynamiq_core.reference`."""
    view = chunk_arguments(plan, chunk)
    share = np.float32(1 / plan.workers)
    for_each_range(_finish, plan.lengths[chunk], message.data_ptr(), slot, share, view, gradient_arguments(out))
