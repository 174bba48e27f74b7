"""How a super-group lies on a warp, and moves between registers that cost nothing.

Tensors of coordinates are [8, SG, 32]: coordinate 8 t + q of each of SG super-groups is element [q, :, t]. The first
dimension lies in the registers of a lane, the last one on the 32 lanes of a warp (half a wavefront of 64), the middle
one on warps. Splitting and joining the first dimension therefore moves nothing; it renames registers.
"""

# Kernels are untyped: Triton reads annotations of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether kernels run on a device: what Triton's interpreter rounds otherwise is done by other means there."""


@triton.jit
def split(x):
    """The eight [SG, 32] of an [8, SG, 32]."""
    SG: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(x, [2, 4, SG, 32]), [1, 2, 3, 0]))
    x01, x23 = tl.split(tl.permute(tl.reshape(low, [2, 2, SG, 32]), [1, 2, 3, 0]))
    x45, x67 = tl.split(tl.permute(tl.reshape(high, [2, 2, SG, 32]), [1, 2, 3, 0]))
    x0, x1 = tl.split(tl.permute(x01, [1, 2, 0]))
    x2, x3 = tl.split(tl.permute(x23, [1, 2, 0]))
    x4, x5 = tl.split(tl.permute(x45, [1, 2, 0]))
    x6, x7 = tl.split(tl.permute(x67, [1, 2, 0]))
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def join(x0, x1, x2, x3):
    """[4, SG, 32] of four [SG, 32]."""
    SG: tl.constexpr = x0.shape[0]
    return tl.reshape(tl.permute(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [2, 3, 0, 1]), [4, SG, 32])


@triton.jit
def load_four(pointer):
    """Four neighbouring values from where each lane points: four [SG, 32], loaded as one vector."""
    SG: tl.constexpr = pointer.shape[0]
    values = tl.load(pointer[:, :, None] + tl.arange(0, 4)[None, None, :])
    even, odd = tl.split(tl.reshape(values, [SG, 32, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def of_the_group(x):
    """Largest int32 of the two lanes that hold a group, in both: [SG, 32]."""
    SG: tl.constexpr = x.shape[0]
    largest = tl.max(tl.reshape(x, [SG, 16, 2]), axis=2)
    return tl.reshape(tl.broadcast_to(largest[:, :, None], [SG, 16, 2]), [SG, 32])


@triton.jit
def fma(x, y, z):
    """``x * y + z`` of float32, rounded once."""
    if NATIVE:
        return tl.math.fma(x, y, z)
    else:
        # As in `dynamiq_core.fused`: the interpreter would round the product, too.
        product, addend = x.to(tl.float64) * y.to(tl.float64), z.to(tl.float64)
        total = product + addend
        share = total - product
        lost = (product - (total - share)) + (addend - share)
        whole = total.to(tl.int64, bitcast=True)
        inexact = (tl.abs(lost) < float("inf")) & (lost != 0) & ((whole & 1) == 0)
        away = tl.where((lost > 0) == (total > 0), 1, -1)
        return tl.where(inexact, whole + away, whole).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def bits(x):
    """The bits of float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def unsigned(x):
    """The bits of float32 or int32 as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def floating(x):
    """Bits as float32."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def largest_bits(values):
    """Bits of the largest magnitude in each lane, NaN above all: int32 [SG, 32] of float32 [8, SG, 32]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = split(tl.abs(values))
    x01 = tl.maximum(x0, x1, propagate_nan=tl.PropagateNan.ALL)
    x23 = tl.maximum(x2, x3, propagate_nan=tl.PropagateNan.ALL)
    x45 = tl.maximum(x4, x5, propagate_nan=tl.PropagateNan.ALL)
    x67 = tl.maximum(x6, x7, propagate_nan=tl.PropagateNan.ALL)
    low = tl.maximum(x01, x23, propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(x45, x67, propagate_nan=tl.PropagateNan.ALL)
    # As integers magnitudes are ordered alike, and a warp finds the largest integer in one instruction.
    return bits(tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)) & 0x7FFFFFFF
