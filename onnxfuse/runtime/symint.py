"""Symbolic integers: a host that computes with them makes a plan for all sizes at once.

A host, which is the Python module that makes a kernel's plans, is written as if sizes were plain numbers.  For a plan
template, which has plans for all sizes, dynamic sizes are `SymInt`s: each has a value (the hint) and an expression over
the sizes.  Arithmetic makes expressions.  A comparison returns its answer for the hints, and becomes a guard: the plan
that the host then returns is valid for all sizes for which the guards hold.  Using a symbolic integer as a plain
one (an index or a compile-time constant) adds a guard that it equals its hint.

Real numbers are estimates: comparing them adds a soft guard, which says for which sizes the host would choose this
plan, not for which it is correct.  `estimate` converts an integer to a real number.  PyTorch's compiler uses the same
idea and the same names.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from onnxfuse.runtime.expressions import Expressions, Op, float_bits, real_bits

T = TypeVar("T")
SLACK: Final = 0.03  # maximum fraction by which a choice costs more than the best one; estimates are inexact
PLAIN: Final = -1  # in place of an expression's number: the result is the same for all sizes
_HERE: Final = Path(__file__).name


@dataclass
class Trace:
    """The comparisons that a host (the module that makes plans) makes while it plans for sizes equal to the hints."""

    expressions: Expressions
    hard: dict[int, bool] = field(default_factory=dict)  # conditions of the plan: comparison -> required answer
    soft: dict[int, bool] = field(default_factory=dict)
    later: dict[int, bool] = field(default_factory=dict)  # conditions only of the plans after the first
    fixed: dict[str, int] = field(default_factory=dict)  # sizes used as plain integers: line of code -> value
    is_choosing: bool = True  # whether comparisons of estimates add soft guards; see `without_soft_guards`

    def size(self, index: int, hint: int) -> int:
        """Return size number `index` as a symbolic integer."""
        return cast(int, SymInt(self, self.expressions.number(Op.SIZE, index), hint))

    def fix(self, value: SymInt, where: str = "") -> int:
        """Return a symbolic integer's hint, which is its value at the sizes for which the plan is made.

        Adds a guard (a condition of the plan) that the integer equals this value.

        where  the key under which `fixed` stores the hint; by default, the line of code that uses the integer
        """
        same = self.expressions.number(Op.EQUAL, value.number, self.expressions.constant(value.hint))
        if same not in self.hard:
            self.hard[same] = True
            self.fixed.setdefault(where or _caller(), value.hint)
        return value.hint


def _caller() -> str:
    """Return file and line of the innermost frame outside this module."""
    frame = sys._getframe(1)
    while frame.f_back and Path(frame.f_code.co_filename).name in (_HERE, "dataclasses.py", "enum.py"):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


class Symbolic:
    """A number that depends on sizes."""

    __slots__ = ("hint", "number", "trace")

    def __init__(self, trace: Trace, number: int, hint: Any) -> None:
        """Store the number of the expression in the trace's list, and its value for the trace's sizes."""
        self.trace, self.number, self.hint = trace, number, hint

    def _with(self, op: Op, other: Any, swap: bool = False) -> Any:
        """Return the result of an integer operation with another number, which is the first operand if `swap`."""
        raise NotImplementedError

    def _compare(self, op: Op, other: Any, swap: bool = False) -> Any:
        """Return the answer of a comparison of integers; the comparison becomes a guard, a condition of the plan."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return self._with(Op.ADD, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(Op.SUBTRACT, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(Op.SUBTRACT, other, swap=True)

    def __mul__(self, other: Any) -> Any:
        return self._with(Op.MULTIPLY, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._with(Op.REAL_DIVIDE, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(Op.REAL_DIVIDE, other, swap=True)

    def __pow__(self, exponent: Any) -> Any:
        return self._with(Op.POWER, exponent)

    def __neg__(self) -> Any:
        return 0 - self

    def __lt__(self, other: Any) -> Any:
        return self._compare(Op.LESS, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(Op.LESS, other, swap=True)

    def __le__(self, other: Any) -> Any:
        return self._compare(Op.LESS_EQUAL, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(Op.LESS_EQUAL, other, swap=True)

    def __eq__(self, other: object) -> Any:
        return self._compare(Op.EQUAL, other)

    def __ne__(self, other: object) -> Any:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __repr__(self) -> str:
        return self.trace.expressions.text(self.number)


_COMPUTE: Final[Mapping[Op, Callable[[Any, Any], Any]]] = {  # a result's hint (value) from the operands' hints
    Op.ADD: operator.add, Op.SUBTRACT: operator.sub, Op.MULTIPLY: operator.mul, Op.FLOOR_DIVIDE: operator.floordiv,
    Op.MODULO: operator.mod, Op.MINIMUM: min, Op.MAXIMUM: max, Op.LESS: operator.lt, Op.LESS_EQUAL: operator.le,
    Op.EQUAL: operator.eq, Op.REAL_DIVIDE: operator.truediv, Op.POWER: operator.pow,
}  # fmt: skip
_REAL: Final[Mapping[Op, Op]] = {  # by operation on integers: the same operation on real numbers
    Op.ADD: Op.REAL_ADD, Op.SUBTRACT: Op.REAL_SUBTRACT, Op.MULTIPLY: Op.REAL_MULTIPLY, Op.MINIMUM: Op.REAL_MINIMUM,
    Op.MAXIMUM: Op.REAL_MAXIMUM, Op.LESS: Op.REAL_LESS, Op.LESS_EQUAL: Op.REAL_LESS_EQUAL, Op.EQUAL: Op.REAL_EQUAL,
    Op.REAL_DIVIDE: Op.REAL_DIVIDE, Op.POWER: Op.POWER,
}  # fmt: skip


class SymInt(Symbolic):
    """An integer that depends on sizes."""

    __slots__ = ()
    hint: int

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def _number_of(self, other: int | SymInt) -> tuple[int, int]:
        if isinstance(other, SymInt):
            return other.number, other.hint
        return self.trace.expressions.constant(int(other)), int(other)

    def _made(self, op: Op, a: tuple[int, int], b: tuple[int, int], hint: int) -> Any:
        rows, key = self.trace.expressions, (op, a[0], b[0])
        number = rows.simplified.get(key)
        if number is None:
            number = rows.simplified[key] = _simplified(rows, *key)
        return hint if number == PLAIN else SymInt(self.trace, number, hint)

    def _with(self, op: Op, other: Any, swap: bool = False) -> Any:
        if op in (Op.REAL_DIVIDE, Op.POWER) or (isinstance(other, float) and op in _REAL):
            return self._real()._with(op, other, swap)
        if not isinstance(other, _INTEGERS):
            return NotImplemented
        mine, its = (self.number, self.hint), self._number_of(other)
        a, b = (its, mine) if swap else (mine, its)
        if op in (Op.FLOOR_DIVIDE, Op.MODULO) and self.trace.expressions.constant_of(b[0]) is None:
            _ask(self.trace, self.trace.hard, Op.EQUAL, b[0], self.trace.expressions.constant(0), b[1] == 0)
        return self._made(op, a, b, _COMPUTE[op](a[1], b[1]))

    def _real(self) -> SymReal:
        return SymReal(self.trace, self.trace.expressions.number(Op.TO_REAL, self.number), float(self.hint))

    def __floordiv__(self, other: Any) -> Any:
        return self._with(Op.FLOOR_DIVIDE, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with(Op.FLOOR_DIVIDE, other, swap=True)

    def __mod__(self, other: Any) -> Any:
        return self._with(Op.MODULO, other)

    def __rmod__(self, other: Any) -> Any:
        return self._with(Op.MODULO, other, swap=True)

    def __pos__(self) -> SymInt:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __ceil__(self) -> SymInt:
        return self

    __floor__ = __ceil__
    __round__ = __ceil__
    __trunc__ = __ceil__

    def _compare(self, op: Op, other: Any, swap: bool = False) -> Any:
        if isinstance(other, float | SymReal):
            return self._real()._compare(op, other, swap)
        if not isinstance(other, int | SymInt):
            return NotImplemented
        number, hint = self._number_of(other)
        if number == self.number:
            return op is not Op.LESS
        a, b = ((number, hint), (self.number, self.hint)) if swap else ((self.number, self.hint), (number, hint))
        return _ask(self.trace, self.trace.hard, op, a[0], b[0], _COMPUTE[op](a[1], b[1]))

    # --- as a plain integer ------------------------------------------------------------------------------------------

    def __index__(self) -> int:
        return self.trace.fix(self)

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(self.trace.fix(self))

    def bit_length(self) -> int:
        """Return the integer's number of bits; restricts the plan to sizes at which the integer has this value."""
        return self.trace.fix(self).bit_length()

    def __float__(self) -> float:
        return float(self.trace.fix(self))


_INTEGERS: Final = (int, SymInt)  # `int | SymInt` would be made at each of thousands of operations


class SymReal(Symbolic):
    """A real number that depends on sizes: an estimate, or an argument of a kernel."""

    __slots__ = ()

    def _with(self, op: Op, other: Any, swap: bool = False) -> Any:
        if not isinstance(other, int | float | Symbolic):
            return NotImplemented
        real = as_real(self.trace, other)
        a, b = (real, self) if swap else (self, real)
        rows = self.trace.expressions
        if op is Op.REAL_DIVIDE and rows.rows[b.number][0] is not Op.REAL_CONSTANT:  # Python would raise an error for 0
            _ask(self.trace, self.trace.hard, Op.REAL_EQUAL, b.number, as_real(self.trace, 0.0).number, b.hint == 0)
        return SymReal(self.trace, rows.number(_REAL[op], a.number, b.number), float(_COMPUTE[op](a.hint, b.hint)))

    def __ceil__(self) -> Any:
        return SymInt(self.trace, self.trace.expressions.number(Op.CEILING, self.number), math.ceil(self.hint))

    def __floor__(self) -> Any:
        return SymInt(self.trace, self.trace.expressions.number(Op.FLOOR, self.number), math.floor(self.hint))

    def _compare(self, op: Op, other: Any, swap: bool = False) -> Any:
        if not isinstance(other, int | float | Symbolic):
            return NotImplemented
        its = as_real(self.trace, other)
        a, b = (its, self) if swap else (self, its)
        answer = _COMPUTE[op](a.hint, b.hint)
        if not self.trace.is_choosing:
            return answer
        return _ask(self.trace, self.trace.soft, _REAL[op], a.number, b.number, answer)

    def __hash__(self) -> int:
        raise TypeError("a number that depends on dynamic sizes cannot be a key; compare it instead")

    def __float__(self) -> float:
        raise TypeError("a number that depends on dynamic sizes is not plain; use arithmetic and comparisons only")


def _simplified(rows: Expressions, op: Op, a: int, b: int) -> int:
    """Return the number of the simplest expression for an operation on integers; PLAIN if its result is constant."""
    left, right = rows.constant_of(a), rows.constant_of(b)
    if left is not None and right is not None:
        return PLAIN
    if (op is Op.MULTIPLY and 0 in (left, right)) or (op is Op.MODULO and right == 1):
        return PLAIN
    if (right == 0 and op in (Op.ADD, Op.SUBTRACT)) or (right == 1 and op in (Op.MULTIPLY, Op.FLOOR_DIVIDE)):
        return a
    if (left == 0 and op is Op.ADD) or (left == 1 and op is Op.MULTIPLY):
        return b
    if right and op in (Op.MODULO, Op.FLOOR_DIVIDE) and divisor_of(rows, a) % right == 0:
        if op is Op.MODULO:
            return PLAIN
        divided = _divided(rows, a, right)
        if divided is not None:
            return divided
    return rows.number(op, a, b)


def _ask(trace: Trace, guards: dict[int, bool], op: Op, a: int, b: int, answer: bool) -> bool:
    guards[trace.expressions.number(op, a, b)] = answer
    return answer


def divisor_of(rows: Expressions, number: int) -> int:
    """Return an integer by which an integer expression is divisible for all sizes; 0 for the constant 0."""
    op, a, b = rows.rows[number]
    if op is Op.CONSTANT:
        return abs(a)
    if op is Op.MULTIPLY:
        return divisor_of(rows, a) * divisor_of(rows, b)
    if op in (Op.ADD, Op.SUBTRACT, Op.MINIMUM, Op.MAXIMUM):
        return math.gcd(divisor_of(rows, a), divisor_of(rows, b))
    return 1


def _divided(rows: Expressions, number: int, divisor: int) -> int | None:
    """Return the number of an expression divided by `divisor`; None if `divisor` divides no constant factor of it."""
    op, a, b = rows.rows[number]
    if op is not Op.MULTIPLY:
        return None
    for factor, rest in ((a, b), (b, a)):
        constant = rows.constant_of(factor)
        if constant is not None and constant % divisor == 0:
            left = constant // divisor
            return rest if left == 1 else rows.number(Op.MULTIPLY, rows.constant(left), rest)
        inner = _divided(rows, factor, divisor)
        if inner is not None:
            return rows.number(Op.MULTIPLY, inner, rest)
    return None


# --- functions for hosts instead of Python's own ones ----------------------------------------------------------------


def as_real(trace: Trace, value: Any) -> SymReal:
    """Return a number as a symbolic real number."""
    if isinstance(value, SymReal):
        return value
    if isinstance(value, SymInt):
        return SymReal(trace, trace.expressions.number(Op.TO_REAL, value.number), float(value.hint))
    return SymReal(trace, trace.expressions.number(Op.REAL_CONSTANT, real_bits(float(value))), float(value))


def _pairwise(op: Op, a: Any, b: Any) -> Any:
    symbolic = a if isinstance(a, Symbolic) else b
    if not isinstance(symbolic, Symbolic):
        return _COMPUTE[op](a, b)
    if isinstance(symbolic, SymInt) and all(isinstance(each, int | SymInt) for each in (a, b)):
        other = b if symbolic is a else a
        return symbolic if symbolic._number_of(other)[0] == symbolic.number else symbolic._with(op, other)
    return as_real(symbolic.trace, a)._with(op, b)


def minimum(first: Any, *others: Any) -> Any:
    """Return the least of some numbers as an expression; Python's `min` compares, which adds guards (conditions)."""
    for each in others:
        first = _pairwise(Op.MINIMUM, first, each)
    return first


def maximum(first: Any, *others: Any) -> Any:
    """Return the greatest of some numbers as an expression; Python's `max` compares, which adds guards (conditions)."""
    for each in others:
        first = _pairwise(Op.MAXIMUM, first, each)
    return first


def gcd(*values: Any) -> Any:
    """Return the greatest common divisor of integers, or a common divisor for all sizes if some are symbolic.

    The result is a plain integer: the greatest one that is known to divide all of them.
    """
    known = [value if isinstance(value, int) else divisor_of(value.trace.expressions, value.number) for value in values]
    return math.gcd(*known)


def estimate(value: Any) -> Any:
    """Return an integer as a real number; comparing it affects which plan is chosen, not which plan is correct."""
    return value._real() if isinstance(value, SymInt) else float(value)


def is_symbolic(*values: Any) -> bool:
    """Return whether any of these numbers depends on dynamic sizes."""
    return any(isinstance(value, Symbolic) for value in values)


@contextmanager
def without_soft_guards(*values: Any) -> Iterator[None]:
    """Return a context in which comparisons of estimates of the sizes `values` add no guards (conditions).

    A host, the module that makes plans, enters the context to order its plans after the first one.
    """
    traces = {id(each.trace): each.trace for each in values if isinstance(each, Symbolic)}
    before = {key: trace.is_choosing for key, trace in traces.items()}
    for trace in traces.values():
        trace.is_choosing = False
    try:
        yield
    finally:
        for key, trace in traces.items():
            trace.is_choosing = before[key]


@contextmanager
def for_later_plans(*values: Any) -> Iterator[None]:
    """Return a context in which a host (the module that makes plans) makes its plans after the first one.

    Comparisons of estimates, which order these plans, add no guards.  All other comparisons add guards (conditions)
    that apply to these plans only.  `values` are symbolic sizes; if there are none, the context has no effect.
    """
    trace = next((each.trace for each in values if isinstance(each, Symbolic)), None)
    if trace is None:
        yield
        return
    hard = trace.hard
    trace.hard = trace.later
    try:
        with without_soft_guards(*values):
            yield
    finally:
        trace.hard = hard


_first_plan_suffices: Final = ContextVar("_first_plan_suffices", default=False)


@contextmanager
def only_first_plans() -> Iterator[None]:
    """Return a context in which hosts (the modules that make plans) may leave out all plans after the first one."""
    token = _first_plan_suffices.set(True)
    try:
        yield
    finally:
        _first_plan_suffices.reset(token)


def first_plan_suffices() -> bool:
    """Return whether a host may leave out all plans after the first one.  Hosts ask if those take long to make."""
    return _first_plan_suffices.get()


def expect_equal(first: Any, second: Any) -> bool:
    """Return whether two sizes that are usually equal, such as a mask's length and the number of keys, are equal.

    If they differ and one of them is a dynamic dim, not an expression, later samples of the template set that dim to
    the other size.
    """
    equal = bool(first == second)
    if not equal:
        for size, other in ((first, second), (second, first)):
            if isinstance(size, SymInt) and _tie(size, other):
                break
    return equal


def _tie(size: SymInt, other: int | SymInt) -> bool:
    """Record that a size usually equals another number; return whether it can be computed from that number."""
    rows = size.trace.expressions
    op, index, _ = rows.rows[size.number]
    number, _ = size._number_of(other)
    if op is not Op.SIZE or index in rows.ties or rows.sizes_in(number) & {index, *rows.ties}:
        return False
    rows.ties[index] = number
    return True


def always(condition: Callable[[], Any], *values: Any) -> bool:
    """Return whether a condition is known to hold at all sizes; adds no guard.

    The condition depends on `values`.  If one of them is symbolic, the result is False.
    """
    return not is_symbolic(*values) and bool(condition())


def best_first(items: Iterable[T], cost: Callable[[T], Any], slack: float = SLACK) -> list[T]:
    """Return the items by their cost, the lowest first; record for which sizes the first item is good enough.

    An item is good enough where its cost exceeds the lowest one by a fraction of at most `slack`.  With some slack, a
    template needs plans for few of the items.
    """
    costs = [(cost(item), item) for item in items]
    ordered = sorted(costs, key=lambda pair: _hint(pair[0]))
    symbolic = next((each for each, _ in costs if is_symbolic(each)), None)
    if symbolic is not None and symbolic.trace.is_choosing and len(costs) > 1:
        # The minimum takes the costs in the order of `items`, not sorted: the order of sorted costs would depend on the
        # hints (the sizes at which the host plans), and so would the expression of the minimum.
        _ = ordered[0][0] * 1.0 <= minimum(*(each for each, _ in costs)) * (1.0 + slack)
    return [item for _, item in ordered]


def _hint(value: Any) -> Any:
    return value.hint if isinstance(value, Symbolic) else value


def float_word(value: Any) -> Any:
    """Round a number to float32, and return its bits as an integer; the integer is symbolic if the number is."""
    if not isinstance(value, SymReal):
        return float_bits(float(value))
    number = value.trace.expressions.number(Op.FLOAT_BITS, value.number)
    return SymInt(value.trace, number, float_bits(value.hint))
