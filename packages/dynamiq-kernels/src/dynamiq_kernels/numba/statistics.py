"""Mean and root mean square of every super-group, as sums of integers: equal to `dynamiq_core.statistics`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.statistics import BYTES, MEAN_BITS, SQUARE_SHIFT, super_groups
from dynamiq_kernels.numba.compiling import kernel
from dynamiq_kernels.numba.floats import clear_padding, gradient_arguments, read, to_bfloat16
from dynamiq_kernels.numba.memory import array_at, bits_of, float_of, stack
from dynamiq_kernels.numba.threads import for_each_range

ZERO = np.float32(0.0)
NAN = np.uint16(0x7FC0)
ROUNDER = np.float32(1.5 * 2**23)
"""A sum with it has the nearest integer, ties to even, in its low bits."""
ROUNDER_BITS = 0x4B400000
ROUND = 1 << (SQUARE_SHIFT - 1)
SQUARE_UNIT = np.float32(2.0**SQUARE_SHIFT)


@kernel
def _statistics(first: Any, last: Any, x: Any, numel: Any, rows: Any) -> None:
    for j in range(first, last):
        values = stack(256, np.float32)
        start = j * SUPER_GROUP
        count = min(numel - start, SUPER_GROUP)
        read(values, x, start, count, ZERO)
        clear_padding(values, count)
        largest = np.int32(0)
        for i in range(SUPER_GROUP):
            largest = max(largest, np.int32(bits_of(values[i]) & 0x7FFFFFFF))
        row = array_at(rows + BYTES * j, np.uint16)
        exponent = largest >> 23
        if exponent == 255:
            row[0] = NAN
            row[1] = NAN
            continue
        biased = 254 + MEAN_BITS - exponent if exponent > MEAN_BITS else 253
        scale = float_of(np.int32(biased << 23))
        unit = float_of(np.int32((254 - biased) << 23))
        total, squares = np.int32(0), np.int32(0)
        for i in range(SUPER_GROUP):
            q = np.int32(bits_of(values[i] * scale + ROUNDER) - ROUNDER_BITS)
            r = np.int32(np.int32(q + ROUND) >> SQUARE_SHIFT)
            total = np.int32(total + q)
            squares = np.int32(squares + r * r)
        mean = np.float32(total) / np.float32(count) * unit
        rms = np.sqrt(np.float32(squares) / np.float32(count)) * np.float32(unit * SQUARE_UNIT)
        row[0] = to_bfloat16(np.float32(mean))
        row[1] = to_bfloat16(np.float32(rms))


def statistics(x: Tensor) -> Tensor:
    """bfloat16 [M, 2] of a tensor [d]; see `dynamiq_core.statistics`."""
    rows = torch.empty(super_groups(x.numel()), 2, dtype=torch.bfloat16)
    for_each_range(_statistics, len(rows), gradient_arguments(x), x.numel(), rows.data_ptr())
    return rows
