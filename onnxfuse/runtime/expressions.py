"""Expressions over the sizes of a node's inputs: arithmetic that the native library evaluates for every new shape."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class Op(IntEnum):
    """The operation of an expression (op, a, b); native/expressions.cc has the same numbers.

    The results of REAL_CONSTANT and of the operations after it are real numbers, all others are integers.
    """

    CONSTANT = 0  # an integer, in `a`
    SIZE = 1  # the size number `a`
    ADD = 2
    SUBTRACT = 3
    MULTIPLY = 4
    FLOOR_DIVIDE = 5  # rounds down, as Python does; 0 if the divisor is 0
    MODULO = 6  # has the sign of the divisor, as in Python; 0 if the divisor is 0
    MINIMUM = 7
    MAXIMUM = 8
    LESS = 9  # gives 1 if true, else 0, as the next two operations do
    LESS_EQUAL = 10
    EQUAL = 11
    GCD = 12
    CEILING = 13  # rounds a real number up to an integer; 0 if it is infinite or NaN, as after a division by 0
    FLOOR = 14  # rounds a real number down to an integer; 0 if it is infinite or NaN
    FLOAT_BITS = 15  # the bits of a real number rounded to float32, as an integer
    REAL_LESS = 16
    REAL_LESS_EQUAL = 17
    REAL_EQUAL = 18
    REAL_CONSTANT = 19  # the bits of a float64, in `a`
    TO_REAL = 20
    REAL_ADD = 21
    REAL_SUBTRACT = 22
    REAL_MULTIPLY = 23
    REAL_DIVIDE = 24
    REAL_MINIMUM = 25
    REAL_MAXIMUM = 26
    POWER = 27

    __hash__ = int.__hash__  # an enum's own hash is slow Python code, and making a template calls it thousands of times


LEAVES: Final = (Op.CONSTANT, Op.SIZE, Op.REAL_CONSTANT)
UNARY: Final = (Op.CEILING, Op.FLOOR, Op.FLOAT_BITS, Op.TO_REAL)
COMMUTATIVE: Final = frozenset((Op.ADD, Op.MULTIPLY, Op.MINIMUM, Op.MAXIMUM, Op.EQUAL, Op.GCD))
COMPARISONS: Final = (Op.REAL_LESS, Op.REAL_LESS_EQUAL, Op.REAL_EQUAL)
Values = NDArray[Any]  # int64 or float64, one value per combination of sizes


def float_bits(value: float) -> int:
    """Return the bits of a number rounded to float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def real_bits(value: float) -> int:
    """Return the bits of a float64 as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _floor_divide(a: Values, b: Values) -> Values:
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def _modulo(a: Values, b: Values) -> Values:
    return np.where(b == 0, 0, a % np.where(b == 0, 1, b))


def _divide(a: Values, b: Values) -> Values:
    with np.errstate(all="ignore"):
        return np.asarray(a / b)


def _integer(a: Values) -> Values:
    """Convert integral real numbers to int64; infinities and NaNs become 0.

    The guards of a plan (the conditions under which it is correct) exclude sizes that give such values.
    """
    return np.where(np.isfinite(a), a, 0).astype(np.int64)


def _power(a: Values, b: Values) -> Values:
    with np.errstate(all="ignore"):
        return np.asarray(np.power(a, b))


_FUNCTIONS: Final[dict[Op, Callable[..., Any]]] = {
    Op.ADD: operator.add,
    Op.SUBTRACT: operator.sub,
    Op.MULTIPLY: operator.mul,
    Op.FLOOR_DIVIDE: _floor_divide,
    Op.MODULO: _modulo,
    Op.MINIMUM: np.minimum,
    Op.MAXIMUM: np.maximum,
    Op.LESS: operator.lt,
    Op.LESS_EQUAL: operator.le,
    Op.EQUAL: operator.eq,
    Op.GCD: np.gcd,
    Op.CEILING: lambda a: _integer(np.ceil(a)),
    Op.FLOOR: lambda a: _integer(np.floor(a)),
    Op.FLOAT_BITS: lambda a: a.astype(np.float32).view(np.uint32).astype(np.int64),
    Op.REAL_LESS: operator.lt,
    Op.REAL_LESS_EQUAL: operator.le,
    Op.REAL_EQUAL: operator.eq,
    Op.TO_REAL: lambda a: a.astype(np.float64),
    Op.REAL_ADD: operator.add,
    Op.REAL_SUBTRACT: operator.sub,
    Op.REAL_MULTIPLY: operator.mul,
    Op.REAL_DIVIDE: _divide,
    Op.REAL_MINIMUM: np.minimum,
    Op.REAL_MAXIMUM: np.maximum,
    Op.POWER: _power,
}


class Expressions:
    """A list of expressions.  Operands are the numbers of earlier expressions; equal expressions are stored once."""

    def __init__(self) -> None:
        """Start without expressions."""
        self.rows: list[tuple[Op, int, int]] = []
        # Maps a size's number to the number of an expression that the size usually equals: see symint.expect_equal.
        self.ties: dict[int, int] = {}
        self._numbers: dict[tuple[Op, int, int], int] = {}
        self.simplified: dict[tuple[Op, int, int], int] = {}  # by operation and operands: see symint

    def number(self, op: Op, a: int = 0, b: int = 0) -> int:
        """Return the number of an expression, which is added if it is new."""
        if b < a and op in COMMUTATIVE:
            a, b = b, a
        key = (op, a, b)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.rows)
            self.rows.append(key)
        return found

    def constant(self, value: int) -> int:
        """Return the number of the expression that is this integer.  Raises ValueError if 64 bits do not hold it."""
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"sizes as large as {value} do not fit into 64 bits")
        return self.number(Op.CONSTANT, value)

    def constant_of(self, number: int) -> int | None:
        """Return the value of an expression that is an integer constant; None if it is not."""
        op, value, _ = self.rows[number]
        return value if op is Op.CONSTANT else None

    def sizes_in(self, number: int) -> set[int]:
        """Return the numbers of the sizes on which an expression depends."""
        op, a, b = self.rows[number]
        if op in LEAVES:
            return {a} if op is Op.SIZE else set()
        return self.sizes_in(a) if op in UNARY else self.sizes_in(a) | self.sizes_in(b)

    def text(self, number: int) -> str:
        """Return an expression as text, for messages; sizes are s0, s1 and so on."""
        op, a, b = self.rows[number]
        if op is Op.CONSTANT:
            return str(a)
        if op is Op.SIZE:
            return f"s{a}"
        if op is Op.REAL_CONSTANT:
            return str(struct.unpack("<d", struct.pack("<q", a))[0])
        if op in UNARY:
            return f"{op.name.lower()}({self.text(a)})"
        return f"{op.name.lower()}({self.text(a)}, {self.text(b)})"

    def miss(self, number: int, answer: bool, values: Sequence[Values]) -> Values:
        """Return how far a comparison is from giving `answer`: the greater operand divided by the lesser one, minus 1.

        The result is 0 where the comparison gives that answer.  Elsewhere the result is infinite if the operands are
        integers, or if one of them is not positive.
        """
        op, a, b = self.rows[number]
        right = values[number].astype(bool) == answer
        if right.all():
            return np.zeros(right.shape)
        if op not in COMPARISONS:
            return np.where(right, 0.0, np.inf)
        less, greater = np.minimum(values[a], values[b]), np.maximum(values[a], values[b])
        return np.where(right, 0.0, np.where(less > 0, _divide(greater, less) - 1, np.inf))

    def value(self, number: int, sizes: Mapping[int, Values], known: dict[int, Values]) -> Values:
        """Return the values of one expression.

        sizes  arrays of values by the number of the size, as for `evaluate`
        known  the values of expressions that earlier calls computed, by number; new ones are added
        """
        if number not in known:
            op, a, b = self.rows[number]
            if op is Op.SIZE:
                known[number] = sizes[a]
            elif op in LEAVES:
                known[number] = np.array(a, np.int64) if op is Op.CONSTANT else np.array(a, np.int64).view(np.float64)
            else:
                parts = (a,) if op in UNARY else (a, b)
                known[number] = _FUNCTIONS[op](*(self.value(part, sizes, known) for part in parts))
        return known[number]

    def evaluate(self, sizes: Sequence[Values], known: list[Values] | None = None) -> list[Values]:
        """Return the values of all expressions; `sizes` holds one array per size, all of one length.

        `known` are values that an earlier call returned for the same sizes; they are not computed again.
        """
        values = known if known is not None else []
        shape = sizes[0].shape if sizes else (1,)
        with np.errstate(all="ignore"):  # a plan's expressions can be undefined at sizes that the plan excludes
            for op, a, b in self.rows[len(values) :]:
                if op is Op.CONSTANT:
                    values.append(np.full(shape, a, np.int64))
                elif op is Op.SIZE:
                    values.append(sizes[a])
                elif op is Op.REAL_CONSTANT:
                    values.append(np.full(shape, np.int64(a)).view(np.float64))
                elif op in UNARY:
                    values.append(_FUNCTIONS[op](values[a]))
                else:
                    values.append(_FUNCTIONS[op](values[a], values[b]))
        return values
