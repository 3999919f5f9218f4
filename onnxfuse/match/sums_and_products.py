"""Match sums and products with trees of Add or Mul, in any order and grouping, with their constants collected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from onnxfuse.dsl.terms import Capture, Constant, Product, Sum, Term
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import origin
from onnxfuse.match.state import State

MAX_NUMBERS = 8  # numbers collected for one sum or product; models have one or two, and a chain of 400 took 6 s
StoredNumber: TypeAlias = tuple[float, Tensor]  # an addend or factor, and the constant that stores it or its inverse


class Decomposition(NamedTuple):
    """One way to read a node as a sum or product: of two values, or of a value and a number."""

    values: list[Tensor]
    numbers: list[StoredNumber]
    node: Node


class Decompositions:
    """A cache of the decompositions of tensors, while matching at one tensor."""

    def __init__(self, m: MatchContext) -> None:
        self._m = m
        self._known: dict[tuple[int, bool], Sequence[Decomposition]] = {}

    def forget(self) -> None:
        """Clear the cache, before matching at another tensor."""
        self._known.clear()

    def of(self, tensor: Tensor, product: bool) -> Sequence[Decomposition]:
        """Return the ways to read a tensor as a product or a sum; empty if its node is neither."""
        key = id(tensor), product
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._decompose(tensor, product)
        return known

    def _decompose(self, tensor: Tensor, product: bool) -> list[Decomposition]:
        node = producer(tensor)
        forward, inverse = ("Mul", "Div") if product else ("Add", "Sub")
        if node is None or (op := op_of(node)) not in (forward, inverse):
            return []
        if self._m.rank_raising_constant(node) is not None:
            return []
        left, right = node.inputs
        a, b = self._m.number(left), self._m.number(right)
        if op == inverse:
            if b is None or (product and b == 0):
                return []
            return [Decomposition([left], [(1 / b if product else -b, right)], node)]
        found: list[Decomposition] = []
        if b is not None:
            found.append(Decomposition([left], [(b, right)], node))
        if a is not None:
            found.append(Decomposition([right], [(a, left)], node))
        return [*found, Decomposition([left, right], [], node)]


class AssociativeMatcher:
    """Matches one Sum or Product against trees of Adds or Muls."""

    def __init__(self, m: MatchContext, decompositions: Decompositions, term: Sum | Product) -> None:
        self.m, self.decompositions, self.term = m, decompositions, term
        self.product = isinstance(term, Product)
        self.scalar = next((t for t in term.terms if isinstance(t, Capture) and t.kind == "scalar"), None)
        constants = [t.value for t in term.terms if isinstance(t, Constant)]
        self.constant = self._total(constants) if constants else None
        self.values = [t for t in term.terms if not isinstance(t, Constant) and t is not self.scalar]
        self.values.sort(key=lambda value: not self._has_known_shape(value))
        self.has_number = term.has_number
        self.is_pair = len(self.values) == 2 and not self.has_number
        root_ops = m.prefilter.root_ops
        self.most_selective = min(filter(root_ops, self.values), key=lambda v: len(root_ops(v) or ()), default=None)

    def _has_known_shape(self, value: Term) -> bool:
        """Return whether a value is an operand whose named dimensions all occur in the output, too.

        Their sizes are known when the value is matched, so that few tensors fit it.  Such values are matched first.
        """
        leaf, out = value.unwrapped, self.m.fusion.out[0]
        return isinstance(leaf, Capture) and leaf.dims is not None and set(leaf.dims.split()) <= set(out.split())

    def match(self, tensor: Tensor, state: State) -> Iterator[State]:
        """Yield the state after each way to match the tensor with the term."""
        found = self.decompositions.of(tensor, self.product)
        if not found:
            kind = "a product (Mul or Div)" if self.product else "a sum (Add)"
            self.m.fail(self.term, state, lambda: f"'{tensor.name}' is {origin(self.m.graph, tensor)}; required {kind}")
            return iter(())
        found = self._usable(found)
        # Most attempts fail here, before the search below.
        if self.is_pair and found and not self._orders(found[0].values):
            values, _, node = found[0]
            self.m.fail(self.term, state.with_nodes([node]), lambda: self._misfit(values))
            return iter(())
        return self._match_each(found, state)

    def _match_each(self, decompositions: Sequence[Decomposition], state: State) -> Iterator[State]:
        for values, numbers, node in decompositions:
            yield from self._decompose_further(values, numbers, 0, state.with_nodes([node]))

    def _decompose_further(
        self, values: list[Tensor], numbers: list[StoredNumber], start: int, state: State
    ) -> Iterator[State]:
        """Match the values; then replace one of them, from index `start` on, by its own parts, and match again."""
        if len(values) == len(self.values):
            orders = self._orders(values)
            if not orders:
                self.m.fail(self.term, state, lambda: self._misfit(values))
            for order in orders:
                for after in self._assign(order, 0, state):
                    yield from self._check_numbers(numbers, after)
        room = len(self.values) - len(values)
        if room < 0 or (room == 0 and not self.has_number):
            return
        for i in range(start, len(values)):
            tensor, casts = self.m.without_casts(values[i])
            after = state.with_nodes(casts)
            for inner, more, node in self._usable(self.decompositions.of(tensor, self.product)):
                if len(inner) - 1 <= room and len(numbers) + len(more) <= MAX_NUMBERS:
                    grown = [*values[:i], *inner, *values[i + 1 :]]
                    yield from self._decompose_further(grown, numbers + more, i, after.with_nodes([node]))

    def _orders(self, values: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Return the orders of values in which each value's operator fits the term at its index."""
        fits = self.m.fits
        if self.most_selective is not None and not any(fits(self.most_selective, tensor) for tensor in values):
            return ()
        return [o for o in itertools.permutations(values) if all(map(fits, self.values, o))]

    def _misfit(self, values: Sequence[Tensor]) -> str:
        different = {id(t): t for t in values}.values()
        found = " and ".join(f"'{t.name}' ({origin(self.m.graph, t)})" for t in different)
        kinds = [self.m.wanted(term) for term in self.values]
        wanted = ", and ".join(kinds) if any(" or " in kind for kind in kinds) else " and ".join(kinds)
        how = "multiplied" if self.product else "added"
        if len(values) == 1:
            return f"{found} is {how} {'by' if self.product else 'to'} a number; required {wanted} and a number"
        if len(different) == 1:
            return f"{found} is {how} {'by' if self.product else 'to'} itself; required {wanted}"
        return f"{found} are {how}; required {wanted}"

    def _assign(self, values: Sequence[Tensor], i: int, state: State) -> Iterator[State]:
        """Yield the state after each way to match the values from index `i` on with the terms at their indices."""
        if i == len(values):
            yield state
            return
        for after in self.m.match(self.values[i], values[i], state):
            yield from self._assign(values, i + 1, after)

    def _check_numbers(self, numbers: list[StoredNumber], state: State) -> Iterator[State]:
        """Yield the state if the total of the collected numbers equals the term's constant.

        If the term has a scalar, the scalar is bound to the number by which the total differs from the constant.
        """
        found = self._total([value for value, _ in numbers])
        required = self._total([]) if self.constant is None else self.constant
        if self.scalar is not None and numbers:
            rest = found / required if self.product else found - required
            yield from self.m.bind_value(self.scalar, rest, state)
        elif (self.constant is None) == (not numbers) and (
            not numbers or any(self.m.close(found, required, t) for _, t in numbers)
        ):
            yield state
        else:
            self.m.fail(self.term, state, lambda: self._other_number(numbers, found, required))

    def _other_number(self, numbers: Sequence[StoredNumber], found: float, required: float) -> str:
        if not numbers:
            return f"there is no constant {'factor' if self.product else 'term'}; required {required:g}"
        return f"the constant is {found:g} ('{numbers[0][1].name}'); required {required:g}"

    def _total(self, numbers: Sequence[float]) -> float:
        return math.prod(numbers) if self.product else math.fsum(numbers)

    def _usable(self, decompositions: Sequence[Decomposition]) -> Sequence[Decomposition]:
        """Return the decompositions that the term can match: those with a number only if the term has a number."""
        return decompositions if self.has_number else [one for one in decompositions if not one.numbers]
