"""LLVM's vectors with Python's operators, for the few places where its loop vectoriser does not see the vectors.

A vector may be wider than any register; LLVM splits it. Nothing here belongs to one processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class Vector:
    """A value that an intrinsic computes: elements of one LLVM type, all operations element by element.

    The other operand may be a Python number or an LLVM scalar of the element's type, which then stands for a vector of
    equal elements. Comparisons are signed or ordered; shifts to the right bring in zeros.
    """

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value

    @classmethod
    def load(cls, builder: Any, pointer: Any, element: Any, count: int) -> Vector:
        """The vector at a pointer, which may be that of any byte."""
        kind = ir.VectorType(element, count)
        return cls(builder, builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1))

    @classmethod
    def of(cls, builder: Any, element: Any, values: Iterable[Any]) -> Vector:
        """A constant vector."""
        constants = list(values)
        return cls(builder, ir.Constant(ir.VectorType(element, len(constants)), constants))

    @classmethod
    def equal(cls, builder: Any, scalar: Any, count: int) -> Vector:
        """A vector of equal elements."""
        kind = ir.VectorType(scalar.type, count)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return cls(builder, builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), None)))

    def store(self, pointer: Any) -> None:
        """Write the vector to a pointer, which may be that of any byte."""
        self.builder.store(self.value, self.builder.bitcast(pointer, self.value.type.as_pointer()), align=1)

    def shuffle(self, other: Vector, order: Iterable[int]) -> Vector:
        """Elements of both vectors, those of the other being numbered after one's own."""
        picked = list(order)
        mask = ir.Constant(ir.VectorType(I32, len(picked)), picked)
        return Vector(self.builder, self.builder.shuffle_vector(self.value, other.value, mask))

    def reduce(self, operation: str) -> Any:
        """The scalar that one of LLVM's reductions of integers gives, for instance ``"umax"``."""
        kind = self.value.type
        name = f"llvm.vector.reduce.{operation}.v{kind.count}i{kind.element.width}"
        function = self.builder.module.declare_intrinsic(name, (), ir.FunctionType(kind.element, [kind]))
        return self.builder.call(function, [self.value])

    def cast(self, element: Any, operation: str) -> Vector:
        """Another element type, by one of LLVM's conversions, for instance ``"zext"``, or ``"bitcast"``."""
        kind = ir.VectorType(element, self.value.type.count)
        return Vector(self.builder, getattr(self.builder, operation)(self.value, kind))

    def where(self, yes: Any, no: Any) -> Vector:
        """For a vector of truth values: elements of ``yes`` where it holds, else of ``no``."""
        like = yes if isinstance(yes, Vector) else no
        return Vector(self.builder, self.builder.select(self.value, like._operand(yes), like._operand(no)))

    def __add__(self, other: Any) -> Vector:
        return self._binary("fadd" if self._floating else "add", other)

    def __sub__(self, other: Any) -> Vector:
        return self._binary("fsub" if self._floating else "sub", other)

    def __mul__(self, other: Any) -> Vector:
        return self._binary("fmul" if self._floating else "mul", other)

    def __truediv__(self, other: Any) -> Vector:
        return self._binary("fdiv", other)

    def __and__(self, other: Any) -> Vector:
        return self._binary("and_", other)

    def __or__(self, other: Any) -> Vector:
        return self._binary("or_", other)

    def __xor__(self, other: Any) -> Vector:
        return self._binary("xor", other)

    def __lshift__(self, other: Any) -> Vector:
        return self._binary("shl", other)

    def __rshift__(self, other: Any) -> Vector:
        return self._binary("lshr", other)

    def __lt__(self, other: Any) -> Vector:
        return self._compare("<", other)

    def __ge__(self, other: Any) -> Vector:
        return self._compare(">=", other)

    @property
    def _floating(self) -> bool:
        return isinstance(self.value.type.element, ir.FloatType)

    def _binary(self, operation: str, other: Any) -> Vector:
        return Vector(self.builder, getattr(self.builder, operation)(self.value, self._operand(other)))

    def _compare(self, comparison: str, other: Any) -> Vector:
        compare = self.builder.fcmp_ordered if self._floating else self.builder.icmp_signed
        return Vector(self.builder, compare(comparison, self.value, self._operand(other)))

    def _operand(self, other: Any) -> Any:
        if isinstance(other, Vector):
            return other.value
        if isinstance(other, (int, float)):
            return ir.Constant(self.value.type, [other] * self.value.type.count)
        return Vector.equal(self.builder, other, self.value.type.count).value


def larger(a: Vector, b: Any) -> Vector:
    """The larger of every two elements; of the other operand if an element is NaN."""
    mask: Vector = a >= b
    return mask.where(a, b)


def smaller(a: Vector, b: Any) -> Vector:
    """The smaller of every two elements; of the other operand if an element is NaN."""
    mask: Vector = a < b
    return mask.where(a, b)
