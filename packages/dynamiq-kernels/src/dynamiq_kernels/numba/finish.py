"""Decode a final message into the bucket: decompress, add one n-th to the mean, round to the bucket's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.plan import DynamiQPlan
from dynamiq_kernels.numba.chunk import chunk_arguments
from dynamiq_kernels.numba.compiling import kernel
from dynamiq_kernels.numba.floats import fetch_ahead, gradient_arguments, write
from dynamiq_kernels.numba.memory import array_at, stack
from dynamiq_kernels.numba.philox import SIZE, expand_key
from dynamiq_kernels.numba.quantise import add_message
from dynamiq_kernels.numba.threads import for_each_range


@kernel
def _finish(first: Any, last: Any, message: Any, slot: Any, share: Any, chunk: Any, out: Any) -> None:
    keys = stack(SIZE, np.uint64)
    expand_key(keys, chunk.key)
    for k in range(first, last):
        values = stack(256, np.float32)
        super_group = np.int64(array_at(chunk.index, np.int32)[k])
        start = super_group * SUPER_GROUP
        fetch_ahead(out, k, last, chunk)
        mean = array_at(chunk.mean, np.float32)[super_group]
        for i in range(SUPER_GROUP):
            values[i] = mean
        if array_at(chunk.width, np.int32)[k] > 0:
            add_message(values, message, k, slot, share, chunk, keys)
        write(out, values, start, min(chunk.numel - start, SUPER_GROUP))


def finish(message: Tensor, plan: DynamiQPlan, *, chunk: int, slot: int, out: Tensor) -> None:
    """Write the mean over the workers into a chunk of ``out``; see `dynamiq_core.reference`."""
    view = chunk_arguments(plan, chunk)
    share = np.float32(1 / plan.workers)
    for_each_range(_finish, plan.lengths[chunk], message.data_ptr(), slot, share, view, gradient_arguments(out))
