"""What Numba lacks for loops without allocation: arrays on the stack and at addresses, and a few instructions.

Kernels get addresses instead of NumPy arrays, whose reference counts would be kept within their loops. The arrays made
here are bare pointers; nobody asks for their length. Those on the stack are known not to alias anything, and all are
indexed from zero, so that LLVM needs neither overlap checks at run time nor Python's rule for negative indices; both
would keep loops from being vectorised. The instructions are portable LLVM, of no processor in particular.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.np import arrayobj

from dynamiq_core import config

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic
literal_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic(prefer_literal=True)
make_array: Any = arrayobj.make_array
populate_array: Any = arrayobj.populate_array

ALIGNMENT = 64
"""Of arrays on the stack, in bytes: a cache line, and no less than any vector register."""

GROUP = config.GROUP

LANES = 32
"""Codes whose bits make up one word of a plane."""

BYTES = ir.VectorType(ir.IntType(8), LANES)
BITS = ir.VectorType(ir.IntType(1), LANES)


@literal_intrinsic
def stack(_typing: Any, count: Any, dtype: Any) -> Any:
    """An uninitialised array of ``count`` (a literal) elements, which lives as long as the kernel's call."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    element = dtype.instance_type

    def codegen(context: Any, builder: Any, signature: Any, _args: Any) -> Any:
        block = ir.ArrayType(context.get_data_type(element), count.literal_value)
        with builder.goto_entry_block():
            pointer = builder.alloca(block)
        pointer.align = ALIGNMENT
        return _array(context, builder, signature.return_type, pointer)

    return _kind(element)(count, dtype), codegen


@intrinsic
def array_at(_typing: Any, address: Any, dtype: Any) -> Any:
    """The array of elements of ``dtype`` that starts at an address (int64), which may be that of any byte."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        return _array(context, builder, signature.return_type, pointer)

    return _kind(dtype.instance_type)(types.int64, dtype), codegen


@intrinsic
def recast(_typing: Any, array: Any, dtype: Any) -> Any:
    """The memory of an array seen as another dtype."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        return _array(context, builder, signature.return_type, data)

    return _kind(dtype.instance_type)(array, dtype), codegen


@intrinsic
def bits_of(_typing: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(_typing: Any, bits: Any) -> Any:
    """The float32 whose bits an int32 holds."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def multiply_add(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in float32, fused where the processor does that well: only for products that are exact."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.fmuladd", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, args)

    f = types.float32
    return f(f, f, f), codegen


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address (int64); it need not be one."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(function, [builder.inttoptr(args[0], byte), number(0), number(3), number(1)])
        return _context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def largest_of_group(_typing: Any, values: Any, start: Any) -> Any:
    """Bits of the largest magnitude in ``values[start : start + 16]`` (float32): int32, ordered like magnitudes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(32), GROUP)
        data = make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer())
        magnitudes = builder.and_(builder.load(pointer, align=4), ir.Constant(kind, [0x7FFFFFFF] * GROUP))
        reduce = ir.FunctionType(ir.IntType(32), [kind])
        largest = builder.module.declare_intrinsic(f"llvm.vector.reduce.umax.v{GROUP}i32", (), reduce)
        return builder.call(largest, [magnitudes])

    return types.int32(values, types.int64), codegen


@intrinsic
def gather_bits(_typing: Any, codes: Any, start: Any, bit: Any) -> Any:
    """Word of a plane: bit i of the result (uint32) is bit ``bit`` (int64) of ``codes[start + i]`` (uint8), i < 32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Where there is no shift of bytes there is one of pairs; what enters a byte from below stays below its sign.
        pairs = ir.VectorType(ir.IntType(16), LANES // 2)
        codes = builder.load(_vector_pointer(context, builder, signature, args), align=1)
        count = builder.trunc(builder.sub(ir.IntType(64)(7), args[2]), ir.IntType(16))
        signs = builder.bitcast(builder.shl(builder.bitcast(codes, pairs), _splat(builder, count, pairs)), BYTES)
        return builder.bitcast(builder.icmp_signed("<", signs, ir.Constant(BYTES, None)), ir.IntType(32))

    return types.uint32(codes, types.int64, types.int64), codegen


@intrinsic
def spread_bits(_typing: Any, codes: Any, start: Any, bit: Any, word: Any) -> Any:
    """The reverse: set bit ``bit`` of ``codes[start + i]`` where bit i of ``word`` (uint32) is set, i < 32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature, args)
        value = builder.trunc(builder.shl(ir.IntType(64)(1), args[2]), ir.IntType(8))
        present = builder.sext(builder.bitcast(args[3], BITS), BYTES)
        codes = builder.or_(builder.load(pointer, align=1), builder.and_(present, _splat(builder, value, BYTES)))
        builder.store(codes, pointer, align=1)
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.int64, types.uint32), codegen


def _kind(element: Any) -> Any:
    # A message may start at any byte. Where LLVM knows more, as of arrays on the stack, it makes use of that.
    return types.Array(element, 1, "C", aligned=False)


def _array(context: Any, builder: Any, kind: Any, pointer: Any) -> Any:
    array = make_array(kind)(context, builder)
    element = context.get_data_type(kind.dtype)
    size = context.get_abi_sizeof(element)
    populate_array(
        array,
        data=builder.bitcast(pointer, element.as_pointer()),
        shape=[context.get_constant(types.intp, 0)],
        strides=[context.get_constant(types.intp, size)],
        itemsize=context.get_constant(types.intp, size),
        meminfo=None,
    )
    return array._getvalue()


def _vector_pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), BYTES.as_pointer())


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None))
