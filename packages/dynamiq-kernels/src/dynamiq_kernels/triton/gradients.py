"""Gradients in their own dtype, from memory and back, whatever the size of the tensor.

Only the last super-group can be partly filled. TAIL says how the tensor ends: 0, with a full super-group; 1, with a
whole octet of coordinates, so that every lane has all or nothing; 2, anywhere: coordinates are read and written one by
one then.
Shapes as in `lanes`.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from dynamiq_kernels.triton.lanes import NATIVE, floating, unsigned

_LARGEST_FLOAT16 = tl.constexpr(65504.0)
_LARGEST_BFLOAT16 = tl.constexpr((2.0 - 2.0**-7) * 2.0**127)


def tail_of(numel: int) -> int:
    """How a tensor of d coordinates ends."""
    if numel % 256 == 0:
        return 0
    return 1 if numel % 8 == 0 else 2


@triton.jit
def lanes_within(counter, numel, TAIL: tl.constexpr):
    """Whether a lane's coordinates exist: [SG, 32]; where a tensor ends anywhere, coordinates say it one by one."""
    if TAIL == 1:
        return counter.to(tl.int64) < numel // 8
    else:
        return counter == counter


@triton.jit
def coordinates_within(super_group, numel):
    """Whether coordinates exist: [8, SG, 32]."""
    return coordinates(super_group) < numel


@triton.jit
def coordinates(super_group):
    """int64 [8, SG, 32]."""
    lane, q = tl.arange(0, 32)[None, None, :], tl.arange(0, 8)[:, None, None]
    return super_group.to(tl.int64)[None] * 256 + (lane * 8 + q)


@triton.jit
def halves(pointer, super_group, lane):
    """Pointers to the coordinates of a lane, four neighbours in the last dimension: [2, SG, 32, 4]."""
    own = pointer + super_group.to(tl.int64) * 256 + lane * 8
    within = tl.arange(0, 2)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    return own[None, :, :, None] + within


@triton.jit
def load(pointer, super_group, within, numel, TAIL: tl.constexpr):
    """float32 [8, SG, 32]; lanes not ``within`` have anything, single coordinates past the end zero."""
    SG: tl.constexpr = super_group.shape[0]
    if TAIL == 2:
        values = tl.load(pointer + coordinates(super_group), mask=coordinates_within(super_group, numel), other=0.0)
    else:
        # Lanes past the end read what lane 0 reads.
        lane = tl.where(within, tl.arange(0, 32)[None, :], 0)
        values = tl.reshape(tl.permute(tl.load(halves(pointer, super_group, lane)), [0, 3, 1, 2]), [8, SG, 32])
    return to_float32(values)


@triton.jit
def store(pointer, values, super_group, within, numel, TAIL: tl.constexpr):
    """Write float32 [8, SG, 32] in the pointer's dtype where ``within`` and before the end."""
    SG: tl.constexpr = super_group.shape[0]
    narrow = from_float32(values, pointer.dtype.element_ty)
    if TAIL == 2:
        mask = coordinates_within(super_group, numel) & within[None]
        tl.store(pointer + coordinates(super_group), narrow, mask=mask)
    else:
        lane = tl.broadcast_to(tl.arange(0, 32)[None, :], [SG, 32])
        narrow = tl.permute(tl.reshape(narrow, [2, 4, SG, 32]), [0, 2, 3, 1])
        mask = tl.broadcast_to(within[None, :, :, None], [2, SG, 32, 4])
        tl.store(halves(pointer, super_group, lane), narrow, mask=mask)


@triton.jit
def up_to_the_largest(values, gap, dtype: tl.constexpr):
    """Float32 [8, SG, 32] that end at a narrow dtype's largest number, unless the gap between levels is infinite."""
    if dtype == tl.bfloat16:
        largest = tl.where(tl.abs(gap) < float("inf"), _LARGEST_BFLOAT16, float("inf"))
    else:
        largest = tl.where(tl.abs(gap) < float("inf"), _LARGEST_FLOAT16, float("inf"))
    values = tl.maximum(values, -largest[None], propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(values, largest[None], propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_float32(x):
    """Exact; bfloat16 by its bits, as the interpreter does not convert subnormal ones."""
    if x.dtype == tl.bfloat16:
        return floating(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def from_float32(x, dtype: tl.constexpr):
    """Rounded to nearest even, which the interpreter does not do for bfloat16."""
    if dtype == tl.bfloat16 and not NATIVE:
        return round_to_bfloat16(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def round_to_bfloat16(x):
    """Bits of the nearest bfloat16, ties to even: uint32 like float32 ``x``."""
    rounded = (unsigned(x) + 0x7FFF + ((unsigned(x) >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)
