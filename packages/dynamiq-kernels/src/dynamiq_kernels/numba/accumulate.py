"""Add what a message carries to a float32 sum, for schedules that keep one."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.plan import DynamiQPlan
from dynamiq_kernels.numba.chunk import chunk_arguments, row_of
from dynamiq_kernels.numba.compiling import kernel
from dynamiq_kernels.numba.floats import fetch_ahead, gradient_arguments, read, write
from dynamiq_kernels.numba.memory import stack
from dynamiq_kernels.numba.philox import SIZE, expand_key
from dynamiq_kernels.numba.quantise import add_message
from dynamiq_kernels.numba.threads import for_each_range

ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@kernel
def _accumulate(first: Any, last: Any, message: Any, slot: Any, chunk: Any, total: Any) -> None:
    keys = stack(SIZE, np.uint64)
    expand_key(keys, chunk.key)
    for k in range(first, last):
        values = stack(256, np.float32)
        start = np.int64(row_of(chunk, k)[0]) * SUPER_GROUP
        count = min(chunk.numel - start, SUPER_GROUP)
        fetch_ahead(total, k, last, chunk)
        read(values, total, start, count, ZERO)
        add_message(values, message, k, slot, ONE, chunk, keys)
        write(total, values, start, count)


def decompress_accumulate(message: Tensor, total: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int) -> None:
    """Add what a message carries to ``total``; see `dynamiq_core.reference`."""
    view = chunk_arguments(plan, chunk)
    for_each_range(_accumulate, view.nonzero, message.data_ptr(), slot, view, gradient_arguments(total))
