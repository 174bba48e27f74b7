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

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic
literal_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic(prefer_literal=True)
make_array: Any = arrayobj.make_array
populate_array: Any = arrayobj.populate_array

ALIGNMENT = 64
"""Of arrays on the stack, in bytes: a cache line, and no less than any vector register."""


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
    """``a * b + c`` in float32, rounded once."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3))
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


def pointer_to(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    """The pointer to an element of an array of a Numba type, within an intrinsic."""
    return builder.gep(make_array(kind)(context, builder, array).data, [start])
