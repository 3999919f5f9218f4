"""Sums and products against trees of Add or Mul, in any order and grouping, constants collected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from onnxfuse.language.terms import Capture, Constant, Product, Sum, Term, bare
from onnxfuse.match.state import State
from onnxfuse.match.words import origin
from onnxfuse.model.graph import Node, Tensor, op_of, producer

if TYPE_CHECKING:
    from onnxfuse.match.matcher import Matcher

Number: TypeAlias = tuple[float, Tensor]  # what a constant adds or multiplies, and where it is stored
Way: TypeAlias = tuple[list[Tensor], list[Number], Node]  # a node as values and numbers


class Chain:
    """A Sum or a Product against a tree of Adds or Muls, in any order and grouping, constants collected."""

    def __init__(self, matcher: Matcher, term: Sum | Product) -> None:
        self.matcher, self.term = matcher, term
        self.product = isinstance(term, Product)
        self.scalar = next((t for t in term.terms if isinstance(t, Capture) and t.kind == "scalar"), None)
        constants = [t.value for t in term.terms if isinstance(t, Constant)]
        self.constant = self._total(constants) if constants else None
        self.values = [t for t in term.terms if not isinstance(t, Constant) and t is not self.scalar]
        self.values.sort(key=lambda value: not self._is_told_by_shape(value))
        self.has_number = self.constant is not None or self.scalar is not None
        self.is_pair = len(self.values) == 2 and not self.has_number
        self.choosy = min(filter(matcher.ending, self.values), key=lambda v: len(matcher.ending(v) or ()), default=None)
        self.ops = ("Mul", "Div") if self.product else ("Add", "Sub")

    def _is_told_by_shape(self, value: Term) -> bool:
        """Whether a value is an operand whose dimensions are known from the start: its shape rules most out."""
        leaf, out = bare(value), self.matcher.fusion.out[0]
        return isinstance(leaf, Capture) and leaf.dims is not None and set(leaf.dims.split()) <= set(out.split())

    def match(self, tensor: Tensor, state: State) -> Iterator[State]:
        """Every way to read the tensor as the term."""
        ways = self._ways(tensor)
        if not ways:
            kind = "a product (Mul or Div)" if self.product else "a sum (Add)"
            self.matcher.fail(self.term, state, lambda: f"'{tensor.name}' is {origin(tensor)}; required {kind}")
            return iter(())
        ways = self._promising(ways)
        # where most readings end: told without the search below
        if self.is_pair and ways and not self._orders(ways[0][0]):
            values, _, node = ways[0]
            self.matcher.fail(self.term, state.with_nodes([node]), lambda: self._unfit(values))
            return iter(())
        return self._all(ways, state)

    def _all(self, ways: Sequence[Way], state: State) -> Iterator[State]:
        for values, numbers, node in ways:
            yield from self._grow(values, numbers, 0, state.with_nodes([node]))

    def _grow(self, values: list[Tensor], numbers: list[Number], start: int, state: State) -> Iterator[State]:
        if len(values) == len(self.values):
            orders = self._orders(values)
            if not orders:
                self.matcher.fail(self.term, state, lambda: self._unfit(values))
            for order in orders:
                for after in self._assign(order, 0, state):
                    yield from self._agree(numbers, after)
        room = len(self.values) - len(values)
        if room < 0 or (room == 0 and not self.has_number):
            return
        for i in range(start, len(values)):
            tensor, after = self.matcher.through_casts(values[i], state)
            for inner, more, node in self._promising(self._ways(tensor)):
                if len(inner) - 1 <= room:
                    grown = [*values[:i], *inner, *values[i + 1 :]]
                    yield from self._grow(grown, numbers + more, i, after.with_nodes([node]))

    def _orders(self, values: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """The orders in which each value is made by an operator that the term at its place can end with."""
        fits = self.matcher.fits
        if self.choosy is not None and not any(fits(self.choosy, tensor) for tensor in values):
            return ()
        return [o for o in itertools.permutations(values) if all(map(fits, self.values, o))]

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

    def _promising(self, ways: Sequence[Way]) -> Sequence[Way]:
        """Without those that take out a number, where the term has none."""
        return ways if self.has_number else [way for way in ways if not way[1]]

    def _ways(self, tensor: Tensor) -> Sequence[Way]:
        """`_split`, once for each tensor while matching at one place."""
        key = id(tensor), self.product
        known = self.matcher.splits.get(key)
        if known is None:
            known = self.matcher.splits[key] = self._split(tensor)
        return known

    def _split(self, tensor: Tensor) -> list[Way]:
        """The ways to read a node as a sum or product of two: (values, numbers, node)."""
        node = producer(tensor)
        if node is None or (op := op_of(node)) not in self.ops or self.matcher.widening(node) is not None:
            return []
        left, right = node.inputs
        a, b = self.matcher.number(left), self.matcher.number(right)
        if op == self.ops[1]:
            if b is None or (self.product and b == 0):
                return []
            return [([left], [(1 / b if self.product else -b, right)], node)]
        ways: list[Way] = []
        if b is not None:
            ways.append(([left], [(b, right)], node))
        if a is not None:
            ways.append(([right], [(a, left)], node))
        return [*ways, ([left, right], [], node)]
