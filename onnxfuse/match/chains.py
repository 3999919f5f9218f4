"""Sums and products against trees of Add or Mul, in any order and grouping, constants collected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from onnxfuse.dsl import Capture, Constant, Product, Sum
from onnxfuse.graph import Node, Tensor, op_of, producer
from onnxfuse.match.state import State
from onnxfuse.match.words import origin

if TYPE_CHECKING:
    from onnxfuse.match.matcher import Matcher

Number: TypeAlias = tuple[float, Tensor]  # what a constant adds or multiplies, and where it is stored


class Chain:
    """A Sum or a Product against a tree of Adds or Muls, in any order and grouping, constants collected."""

    def __init__(self, matcher: Matcher, term: Sum | Product) -> None:
        self.matcher, self.term = matcher, term
        self.product = isinstance(term, Product)
        self.scalar = next((t for t in term.terms if isinstance(t, Capture) and t.kind == "scalar"), None)
        constants = [t.value for t in term.terms if isinstance(t, Constant)]
        self.constant = self._total(constants) if constants else None
        self.values = [t for t in term.terms if not isinstance(t, Constant) and t is not self.scalar]

    def match(self, tensor: Tensor, state: State) -> Iterator[State]:
        """Every way to read the tensor as the term."""
        ways = self._split(tensor)
        if not ways:
            kind = "a product (Mul or Div)" if self.product else "a sum (Add)"
            self.matcher.fail(self.term, state, lambda: f"'{tensor.name}' is {origin(tensor)}; required {kind}")
        for values, numbers, node in ways:
            yield from self._grow(values, numbers, 0, state.with_nodes([node]))

    def _grow(self, values: list[Tensor], numbers: list[Number], start: int, state: State) -> Iterator[State]:
        if len(values) == len(self.values):
            orders = [o for o in itertools.permutations(values) if all(map(self.matcher.fits, self.values, o))]
            if not orders:
                self.matcher.fail(self.term, state, lambda: self._unfit(values))
            for order in orders:
                for after in self._assign(order, 0, state):
                    yield from self._agree(numbers, after)
        room = len(self.values) - len(values)
        for i in range(start, len(values)) if room >= 0 else ():
            tensor, after = self.matcher.through_casts(values[i], state)
            for inner, more, node in self._split(tensor):
                if len(inner) - 1 <= room:
                    grown = [*values[:i], *inner, *values[i + 1 :]]
                    yield from self._grow(grown, numbers + more, i, after.with_nodes([node]))

    def _unfit(self, values: Sequence[Tensor]) -> str:
        found = " and ".join(f"'{t.name}' ({origin(t)})" for t in values)
        wanted = " and ".join(self.matcher.wanted(term) for term in self.values)
        return f"{found} are {'multiplied' if self.product else 'added'}; required {wanted}"

    def _assign(self, values: Sequence[Tensor], i: int, state: State) -> Iterator[State]:
        if i == len(values):
            yield state
            return
        for after in self.matcher.match(self.values[i], values[i], state):
            yield from self._assign(values, i + 1, after)

    def _agree(self, numbers: list[Number], state: State) -> Iterator[State]:
        found = self._total([value for value, _ in numbers])
        required = self._total([]) if self.constant is None else self.constant
        if self.scalar is not None and numbers:
            rest = found / required if self.product else found - required
            yield from self.matcher.value(self.scalar, rest, state)
        elif (self.constant is None) == (not numbers) and (
            not numbers or any(self.matcher.close(found, required, t) for _, t in numbers)
        ):
            yield state
        else:
            where = f" ('{numbers[0][1].name}')" if numbers else ""
            self.matcher.fail(self.term, state, lambda: f"the constant is {found:g}{where}; required {required:g}")

    def _total(self, numbers: Sequence[float]) -> float:
        return math.prod(numbers) if self.product else math.fsum(numbers)

    def _split(self, tensor: Tensor) -> list[tuple[list[Tensor], list[Number], Node]]:
        """The ways to read a node as a sum or product of two: (values, numbers, node)."""
        node = producer(tensor)
        forward, inverse = ("Mul", "Div") if self.product else ("Add", "Sub")
        if node is None or op_of(node) not in (forward, inverse) or self.matcher.widening(node) is not None:
            return []
        left, right = node.inputs
        a, b = self.matcher.number(left), self.matcher.number(right)
        if op_of(node) == inverse:
            if b is None or (self.product and b == 0):
                return []
            return [([left], [(1 / b if self.product else -b, right)], node)]
        ways: list[tuple[list[Tensor], list[Number], Node]] = []
        if b is not None:
            ways.append(([left], [(b, right)], node))
        if a is not None:
            ways.append(([right], [(a, left)], node))
        return [*ways, ([left, right], [], node)]
