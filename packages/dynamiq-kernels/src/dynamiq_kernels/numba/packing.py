"""Bit planes from codes and back, equal to `dynamiq_core.packing`.

A word of a plane holds one bit of each of 32 neighbouring codes. Processors with vectors of bytes make it with a shift
and a move of the signs, and take it apart with a broadcast and a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from dynamiq_core.config import SUPER_GROUP
from dynamiq_core.packing import PLANE
from dynamiq_kernels.numba.compiling import device
from dynamiq_kernels.numba.memory import array_at, intrinsic, pointer_to
from dynamiq_kernels.numba.vectors import I8, I16, I32, I64, Vector

CODES = 32
"""Codes of a word."""
WORDS = SUPER_GROUP // CODES


@device
def write_planes(message: Any, codes: Any, width: Any, offset: Any) -> None:
    """The planes of codes (uint8 [256]) into the message."""
    for p in range(width):
        plane = array_at(message + offset + PLANE * p, np.uint32)
        for i in range(WORDS):
            plane[i] = gather_bits(codes, CODES * i, p)


@device
def read_planes(codes: Any, message: Any, width: Any, offset: Any) -> None:
    """The codes (uint8 [256]) of planes in the message."""
    for i in range(SUPER_GROUP):
        codes[i] = 0
    for p in range(width):
        plane = array_at(message + offset + PLANE * p, np.uint32)
        for i in range(WORDS):
            spread_bits(codes, CODES * i, p, plane[i])


@intrinsic
def gather_bits(_typing: Any, codes: Any, start: Any, bit: Any) -> Any:
    """Bit i of the result (uint32) is bit ``bit`` (int64) of ``codes[start + i]`` (uint8), i < 32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Processors shift pairs of bytes rather than bytes; what enters a byte from below stays below its sign.
        pairs = Vector.load(builder, pointer_to(context, builder, signature.args[0], *args[:2]), I16, CODES // 2)
        pairs <<= builder.trunc(builder.sub(I64(7), args[2]), I16)
        signs = Vector(builder, builder.bitcast(pairs.value, ir.VectorType(I8, CODES))) < 0
        return builder.bitcast(signs.value, I32)

    return types.uint32(codes, types.int64, types.int64), codegen


@intrinsic
def spread_bits(_typing: Any, codes: Any, start: Any, bit: Any, word: Any) -> Any:
    """The reverse: set bit ``bit`` of ``codes[start + i]`` where bit i of ``word`` (uint32) is set, i < 32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], *args[:2])
        value = builder.trunc(builder.shl(I64(1), args[2]), I8)
        present = Vector(builder, builder.bitcast(args[3], ir.VectorType(ir.IntType(1), CODES))).cast(I8, "sext")
        (Vector.load(builder, pointer, I8, CODES) | (present & value)).store(pointer)
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.int64, types.uint32), codegen
