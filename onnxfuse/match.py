"""A fusion's terms against a model's tensors: a Match, or the Miss that came nearest.

Matching backtracks: every way of reading a term yields a State, the first complete one wins.  A State is what has been
captured so far.  Nodes are of two kinds: `nodes` are replaced by the fused node, `kept` ones (views and scalings of an
operand, Casts of an input, shared values) are only seen through, and die later if nothing else reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from onnx import TensorProto

from onnxfuse import layout as layouts
from onnxfuse.dims import Size as DimSize
from onnxfuse.dsl import (
    Apply,
    Capture,
    Choose,
    Constant,
    Either,
    Fusion,
    Given,
    Guard,
    Precision,
    Product,
    Rearrange,
    Scaled,
    Shared,
    Size,
    Sizes,
    Span,
    Stored,
    Sum,
    Term,
    core,
    parts,
)
from onnxfuse.graph import (
    Graph,
    Node,
    Tensor,
    attribute,
    constant_value,
    default,
    is_constant,
    op_of,
    producer,
    schema,
)
from onnxfuse.legality import refusal
from onnxfuse.shapes import Shapes

FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}
COMMUTATIVE = {"Add", "Mul", "Min", "Max", "And", "Or", "Equal"}
VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity"}
# By how much a constant may differ from the pattern's number, by the dtype that it is stored in: one rounding.
TOLERANCE: dict[int, float] = {TensorProto.FLOAT16: 2e-3, TensorProto.BFLOAT16: 1e-2}
Number: TypeAlias = tuple[float, Tensor]  # what a constant adds or multiplies, and where it is stored
STEPS = 20_000  # per anchor: a bound on backtracking, far above what the patterns need


@dataclass(frozen=True)
class State:
    """What is captured so far."""

    terms: Mapping[int, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    operands: Mapping[str, Tensor] = field(default_factory=dict)
    dims: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[int, Node] = field(default_factory=dict)
    kept: Mapping[int, Node] = field(default_factory=dict)
    factor: float | None = None  # the scalars met so far, while inside scaled()

    def with_nodes(self, nodes: Sequence[Node], *, keep: bool = False) -> State:
        if not nodes:
            return self
        new = {id(n): n for n in nodes}
        return replace(self, kept={**self.kept, **new}) if keep else replace(self, nodes={**self.nodes, **new})


@dataclass(frozen=True)
class Match:
    """A subgraph that the fusion may replace, if rewriting finds it legal."""

    fusion: Fusion
    outputs: tuple[Tensor, ...]
    operands: Mapping[str, Tensor]
    values: Mapping[str, Any]
    dims: Mapping[str, Any]
    choices: Mapping[str, str]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Miss:
    """Why a fusion does not apply at a tensor: `matched` of about `of` nodes agreed."""

    fusion: Fusion
    node: str
    matched: int
    size: Callable[[], int]
    sentence: Callable[[], str]
    span: Span
    around: tuple[str, ...] = ()  # names of the nodes that agreed
    hint: str = ""  # what the user can change

    @property
    def of(self) -> int:
        """About how many nodes the pattern has, in the variant that came nearest."""
        return max(self.size(), self.matched)

    @property
    def reason(self) -> str:
        """The sentence: subject, required, found."""
        return self.sentence()


class Matcher:
    """Matches one fusion against one graph."""

    def __init__(self, graph: Graph, shapes: Shapes, fusion: Fusion) -> None:
        self.graph, self.shapes, self.fusion = graph, shapes, fusion
        self.roots = root_ops(fusion.outputs[0]) | ({"Cast"} if fusion.casts else set())
        self._best: tuple[int, Callable[[], str], Span, State, str] | None = None
        self._sizes_known: dict[tuple[tuple[str, str], ...], int] = {}
        self._root: Tensor = None
        self._steps = 0

    def at(self, tensor: Tensor) -> Match | Miss:
        """The first complete way to read `tensor` as the fusion's first output, or the nearest miss."""
        self._best, self._root, self._steps = None, tensor, 0
        dtype = self.shapes.dtype(tensor)
        if dtype not in FLOATS:
            name = TensorProto.DataType.Name(dtype).lower() if dtype else "of unknown dtype"
            hint = "convert the model to float32 or float16"
            return self._miss_now(f"'{tensor.name}' is {name}; required float32, float16 or bfloat16", tensor, hint)
        for state in self.match(self.fusion.outputs[0], tensor, self._start(tensor)):
            complete = self._complete(state)
            if complete is not None:
                return complete
        return self._nearest(tensor)

    def _start(self, tensor: Tensor) -> State:
        """Names of the output's dimensions are bound first, so that operands are held against them."""
        shape, spec = self.shapes.shape(tensor), self.fusion.out[0]
        dims = unify(spec, shape, {}) if shape is not None and "(" not in spec else None
        return State(dims=dims or {})

    # --- the walk ------------------------------------------------------------------------------------------------

    def match(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        self._steps += 1
        if self._steps > STEPS:
            return
        match term:
            case Precision(inner=inner) | Stored(inner=inner):
                yield from self.match(inner, tensor, state)
                return
            case Given(inner=inner, guard=guard):
                for after in self.match(inner, tensor, state):
                    if self._holds(guard, after, term):
                        yield after
                return
            case Shared(inner=inner):
                for after in self.match(inner, tensor, state):
                    seen = [n for i, n in after.nodes.items() if i not in state.nodes]
                    yield replace(after, nodes=state.nodes).with_nodes(seen, keep=True)
                return
        known = state.terms.get(id(term))
        if known is not None:
            if self._stem(known, term) is self._stem(tensor, term):
                yield state
            else:
                self.fail(term, state, lambda: f"'{tensor.name}' stands where '{known.name}' is required again")
            return
        if not isinstance(term, Capture | Constant):
            tensor, state = self.through_casts(tensor, state)
        for after in self._kinds(term, tensor, state):
            yield replace(after, terms={**after.terms, id(term): tensor})

    def _kinds(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        match term:
            case Capture():
                yield from self._capture(term, tensor, state)
            case Constant():
                yield from self._constant(term, tensor, state)
            case Apply():
                yield from self._apply(term, tensor, state)
            case Sum() | Product():
                yield from Terms(self, term).match(tensor, state)
            case Either(options=options):
                for option in options:
                    yield from self.match(option, tensor, state)
            case Choose(name=name, options=options):
                yield from self._choose(name, options, tensor, state)
            case Rearrange():
                yield from self._rearrange(term, tensor, state)
            case Scaled():
                yield from self._scaled(term, tensor, state)
            case Sizes():
                yield from self._sizes(term, tensor, state)

    def _choose(self, name: str, options: Mapping[str, Term], tensor: Tensor, state: State) -> Iterator[State]:
        """Variants exclude each other, so the first that fits is not taken back."""
        for label, option in options.items():
            if state.choices.get(name, label) != label:
                continue
            fits = False
            for after in self.match(option, tensor, replace(state, choices={**state.choices, name: label})):
                fits = True
                yield after
            if fits:
                return

    # --- captures and constants ----------------------------------------------------------------------------------

    def _capture(self, term: Capture, tensor: Tensor, state: State) -> Iterator[State]:
        if term.kind == "scalar":
            value = self.number(tensor)
            if value is None:
                self.fail(term, state, lambda: f"'{tensor.name}' is not a constant number, as {term.name} must be")
            else:
                yield from self.value(term, value, state)
            return
        if not tensor.name:
            return
        casts = []
        while self.fusion.casts and (node := self._float_cast(tensor)) and self._widens(node):
            casts.append(node)
            tensor = node.inputs[0]
        if term.kind == "weight" and not is_constant(tensor):
            hint = "export with constant folding, so that weights are initializers"
            computed = f"'{tensor.name}' is {origin(tensor)}; required a constant for {term.name}"
            self.fail(term, state, lambda: computed, hint=hint)
            return
        state = state.with_nodes(casts, keep=True)
        if term.dims is not None:
            dims = self._unify(term, tensor, state)
            if dims is None:
                return
            state = replace(state, dims=dims)
        yield replace(state, operands={**state.operands, term.name: tensor})

    def value(self, term: Capture, value: Any, state: State) -> Iterator[State]:
        if term.name in state.values and state.values[term.name] != value:
            known = state.values[term.name]
            self.fail(term, state, lambda: f"{term.name} is {value!r} here and {known!r} elsewhere")
            return
        yield replace(state, values={**state.values, term.name: value})

    def _constant(self, term: Constant, tensor: Tensor, state: State) -> Iterator[State]:
        value = self.number(tensor)
        if value is None:
            self.fail(term, state, lambda: f"'{tensor.name}' is not a constant number; required {term.value:g}")
        elif not self.close(value, term.value, tensor):
            self.fail(term, state, lambda: f"'{tensor.name}' is {value:g}; required {term.value:g}")
        else:
            yield state

    def number(self, tensor: Tensor) -> float | None:
        """The value of a constant of one element."""
        if not is_constant(tensor) or math.prod(tensor.shape) != 1:
            return None
        value = constant_value(self.graph, tensor)
        return float(value.reshape(())) if value.dtype != object else None

    def close(self, found: float, required: float, tensor: Tensor) -> bool:
        """Whether a stored constant is the required number, rounded to the dtype it is stored in."""
        tolerance = TOLERANCE.get(self.shapes.dtype(tensor), 2e-5)
        return found == required or math.isclose(found, required, rel_tol=tolerance)

    def _unify(self, term: Capture, tensor: Tensor, state: State) -> Mapping[str, Any] | None:
        shape = self.shapes.shape(tensor)
        if shape is None:
            unknown = f"the rank of '{tensor.name}' is unknown; required ({term.dims})"
            self.fail(term, state, lambda: unknown, hint="give the graph inputs shapes; named dimensions will do")
            return None
        dims = unify(term.dims or "", shape, state.dims)
        if dims is None:
            wanted = _shown(term.dims or "", state.dims)
            self.fail(term, state, lambda: f"'{tensor.name}' has shape ({_text(shape)}); required ({wanted})")
        return dims

    # --- operators -----------------------------------------------------------------------------------------------

    def _apply(self, term: Apply, tensor: Tensor, state: State) -> Iterator[State]:
        node = producer(tensor)
        if node is None or op_of(node) != term.op:
            self.fail(term, state, lambda: f"'{tensor.name}' is {origin(tensor)}; required {term.op}")
            return
        if node.outputs[0] is not tensor:
            self.fail(term, state, lambda: f"'{tensor.name}' is not the first output of its {term.op}")
            return
        state = state.with_nodes([node])
        inputs = [t for i, t in enumerate(node.inputs) if self._formal(term.op, i) not in term.attributes]
        orders = [inputs]
        if term.op in COMMUTATIVE and len(inputs) == 2:
            orders.append(inputs[::-1])
        for order in orders:
            for after in self._inputs(term, order, 0, state):
                yield from self._attributes(term, node, after)

    def _inputs(self, term: Apply, tensors: Sequence[Tensor], i: int, state: State) -> Iterator[State]:
        if i == len(term.inputs):
            extra = next((t for t in tensors[i:] if t.name), None)
            if extra is None:
                yield state
            else:
                self.fail(term, state, lambda: f"{term.op} reads '{extra.name}' besides what is required")
            return
        wanted = term.inputs[i]
        present = i < len(tensors) and bool(tensors[i].name)
        if present:
            for after in self.match(wanted, tensors[i], state):
                yield from self._inputs(term, tensors, i + 1, after)
        elif isinstance(inner := core(wanted), Capture) and inner.optional:
            yield from self._inputs(term, tensors, i + 1, state)
        else:
            self.fail(wanted, state, lambda: f"{term.op} has no input {i}; required one")

    def _formal(self, op: str, place: int) -> str | None:
        found = schema(op, self.graph.opset)
        return found.inputs[place].name if found and place < len(found.inputs) else None

    def _attributes(self, term: Apply, node: Node, state: State) -> Iterator[State]:
        for name in node.attrs:
            if name not in term.attributes and not self._is_default(node, name):
                value = node.attrs[name]
                self.fail(term, state, lambda name=name, value=value:  # type: ignore[misc]
                           f"{term.op} has {name}={_short(value)}; required its default")
                return
        states = [state]
        for name, wanted in term.attributes.items():
            states = [after for s in states for after in self._attribute(term, node, name, wanted, s)]
        yield from states

    def _is_default(self, node: Node, name: str) -> bool:
        value, usual = node.attrs[name], default(op_of(node), name, self.graph.opset)
        return bool(value == usual) or (usual is not None and self._same_axis(node, name, value, usual))

    def _attribute(self, term: Apply, node: Node, name: str, wanted: Any, state: State) -> Iterator[State]:
        value = attribute(self.graph, node, name)
        if isinstance(wanted, Capture):
            if value is None and wanted.optional:
                yield state
            elif wanted.kind == "scalar" and not isinstance(value, int | float):
                self.fail(term, state, lambda: f"{name} of {term.op} is not a constant number")
            else:
                yield from self.value(wanted, value, state)
            return
        required = _computed(wanted, state.dims)
        if self._same(node, name, value, required):
            yield state
        else:
            shown = f"'{value.name}'" if hasattr(value, "name") else _short(value)
            self.fail(term, state, lambda: f"{term.op} has {name}={shown}; required {_short(required)}")

    def _same(self, node: Node, name: str, found: Any, required: Any) -> bool:
        if name == "steps" and found is None:
            found = [1] * len(required)
        if isinstance(found, float) and isinstance(required, int | float):
            return math.isclose(found, required, rel_tol=1e-6)
        if op_of(node) == "Slice" and name == "ends" and isinstance(found, list):
            return self._ends(node, found) == self._ends(node, required)
        if hasattr(found, "name"):
            return False  # computed at run time
        return bool(found == required) or self._same_axis(node, name, found, required)

    def _ends(self, node: Node, ends: Sequence[int]) -> list[Any]:
        """The ends of a Slice, those beyond the axis brought back to its size."""
        shape, axes = self.shapes.shape(node.inputs[0]), attribute(self.graph, node, "axes")
        if shape is None or not isinstance(axes, list):
            return list(ends)
        sizes = [shape[axis] for axis in axes]
        return [n if isinstance(end, int) and end > (n if isinstance(n, int) else 2**62) else end
                for end, n in zip(ends, sizes, strict=True)]

    def _same_axis(self, node: Node, name: str, found: Any, required: Any) -> bool:
        if name not in ("axis", "axes") or not node.inputs:
            return False
        rank = self.shapes.rank(node.inputs[0])
        if rank is None or isinstance(found, bool) or found is None or required is None:
            return False
        try:
            return bool(np.array_equal(np.mod(found, rank), np.mod(required, rank)))
        except TypeError:
            return False

    # --- views and scalings --------------------------------------------------------------------------------------

    def _rearrange(self, term: Rearrange, tensor: Tensor, state: State) -> Iterator[State]:
        keep = isinstance(core(term.inner), Capture)
        found = False
        for source, nodes, factor in reversed(list(self._sources(tensor, state.factor is not None))):
            dims = self._arrangement(term.pattern, source, nodes, tensor, state)
            if dims is None:
                continue
            found = True
            after = replace(state, dims=dims, factor=None if state.factor is None else state.factor * factor)
            fits = False
            for inside in self.match(term.inner, source, after.with_nodes(nodes, keep=keep)):
                fits = True
                yield inside
            if fits:
                return  # the farthest source is the one to read; a nearer one would only keep the views
        if not found:
            shape = self.shapes.shape(tensor)
            self.fail(term, state, lambda: f"'{tensor.name}' ({_text(shape)}) is not made by {term.pattern}")

    def _sources(self, tensor: Tensor, scaling: bool) -> Iterator[tuple[Tensor, list[Node], float]]:
        """The tensor itself and what it is a view of, nearest first: (source, nodes from it, factor on the way)."""
        nodes: list[Node] = []
        factor = 1.0
        while True:
            yield tensor, nodes[::-1], factor
            node = producer(tensor)
            if node is None:
                return
            if op_of(node) in VIEWS or (self.fusion.casts and self._float_cast(tensor)):
                tensor = node.inputs[0]
            elif scaling and (step := self.scaling(node)) is not None:
                tensor, factor = step[0], factor * step[1]
            else:
                return
            nodes.append(node)

    def scaling(self, node: Node) -> tuple[Tensor, float] | None:
        """(x, c) where the node computes x * c or x / (1/c) for a constant number c."""
        if op_of(node) not in ("Mul", "Div"):
            return None
        left, right = node.inputs
        value = self.number(right)
        if value is not None:
            if op_of(node) == "Mul":
                return left, value
            return (left, 1 / value) if value else None
        value = self.number(left)
        return (right, value) if value is not None and op_of(node) == "Mul" else None

    def _arrangement(
        self, pattern: str, source: Tensor, nodes: Sequence[Node], tensor: Tensor, state: State
    ) -> Mapping[str, Any] | None:
        start, end = self.shapes.shape(source), self.shapes.shape(tensor)
        if start is None or end is None:
            return None
        arrangement = fitted(pattern, len(start), len(end))
        if arrangement is None:
            return None
        found = self._layout(start, nodes)
        known = {name: size for name, size in state.dims.items() if name != "..."}
        leading = {f"...{i}": size for i, size in enumerate(state.dims.get("...", ()))}
        sizes = layouts.solve(arrangement, start, end, {**known, **leading})
        if sizes is None or found is None or layouts.arranged(arrangement, sizes) != layouts.merged(found):
            return None
        extra = sum(name.startswith("...") for axis in arrangement.source for name in axis)
        dims = {name: size for name, size in sizes.items() if not name.startswith("...")}
        if "..." in pattern:
            dims_leading = tuple(sizes[f"...{i}"] for i in range(extra))
            if state.dims.get("...", dims_leading) != dims_leading:
                return None
            return {**dims, "...": dims_leading}
        return {**dims, **({"...": state.dims["..."]} if "..." in state.dims else {})}

    def _layout(self, shape: Sequence[DimSize], nodes: Sequence[Node]) -> layouts.Layout | None:
        found: layouts.Layout | None = layouts.identity(shape)
        for node in nodes:
            after = self.shapes.shape(node.outputs[0])
            if found is None or after is None:
                return None
            match op_of(node):
                case "Transpose":
                    perm = node.attrs.get("perm") or range(len(after))[::-1]
                    found = layouts.transpose(found, perm)
                case "Expand":
                    found = layouts.expand(found, after)
                case "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten":
                    found = layouts.reshape(found, after)
        return found

    def _scaled(self, term: Scaled, tensor: Tensor, state: State) -> Iterator[State]:
        nodes, factor = [], 1.0
        while (node := producer(tensor)) is not None:
            if (step := self.scaling(node)) is not None:
                tensor, factor = step[0], factor * step[1]
            elif self.fusion.casts and self._float_cast(tensor):
                tensor = node.inputs[0]
            else:
                break
            nodes.append(node)
        inside = replace(state.with_nodes(nodes), factor=factor)
        for after in self.match(term.inner, tensor, inside):
            yield from self.value(term.scale, after.factor, replace(after, factor=state.factor))

    def _sizes(self, term: Sizes, tensor: Tensor, state: State) -> Iterator[State]:
        value = self.shapes.value(tensor)
        wanted = [state.dims.get(name) for name in term.names]
        if value is not None and value.ndim == 1 and list(value) == wanted and None not in wanted:
            yield state
        else:
            self.fail(term, state, lambda: f"'{tensor.name}' is not the shape ({' '.join(term.names)})")

    # --- casts ---------------------------------------------------------------------------------------------------

    def _float_cast(self, tensor: Tensor) -> Node | None:
        node = producer(tensor)
        if node is None or op_of(node) != "Cast":
            return None
        return node if {self.shapes.dtype(tensor), self.shapes.dtype(node.inputs[0])} <= FLOATS.keys() else None

    def _widens(self, node: Node) -> bool:
        return self.shapes.dtype(node.outputs[0]) == TensorProto.FLOAT

    def through_casts(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        nodes = []
        while self.fusion.casts and (node := self._float_cast(tensor)):
            nodes.append(node)
            tensor = node.inputs[0]
        return tensor, state.with_nodes(nodes)

    def _stem(self, tensor: Tensor, term: Term) -> Tensor:
        """What a value is, Casts aside."""
        while self.fusion.casts and (node := self._float_cast(tensor)):
            if isinstance(term, Capture) and not self._widens(node):
                break
            tensor = node.inputs[0]
        return tensor

    # --- ending --------------------------------------------------------------------------------------------------

    def _complete(self, state: State) -> Match | None:
        values = dict(state.values)
        for capture in self.fusion.captures:
            if capture.kind in ("tensor", "weight"):
                if capture.name not in state.operands and not capture.optional:
                    self.fail(capture, state, lambda c=capture: f"nothing was found for {c.name}")  # type: ignore[misc]
                    return None
            elif capture.default is not None:
                values.setdefault(capture.name, capture.default)
        state = replace(state, values=values)
        if not all(self._holds(guard, state, self.fusion.outputs[0]) for guard in self.fusion.guards):
            return None
        others = [state.terms.get(id(core(term))) for term in self.fusion.outputs[1:]]
        if any(t is None for t in others):
            return None
        nodes, outputs = tuple(state.nodes.values()), (self._root, *others)
        refused = refusal(self.graph, nodes, outputs, state.operands)
        if refused:
            self.fail(self.fusion.outputs[0], state, lambda: refused.sentence, hint=refused.hint)
            return None
        return Match(self.fusion, outputs, state.operands, values, state.dims, state.choices, nodes)

    def _holds(self, guard: Guard, state: State, term: Term) -> bool:
        known = {**state.dims, **state.values, **state.operands, **state.choices}
        known["dtype"] = FLOATS[self.shapes.dtype(self._root)]
        known["rank"] = self.shapes.rank(self._root)
        asked = {name: known.get(name) for name in guard.names}
        if guard.holds(**asked):
            return True
        shown = {name: getattr(value, "name", value) for name, value in asked.items()}
        self.fail(term, state, lambda: guard.sentence.format(**shown), guard.span)
        return False

    def fail(
        self, term: Term, state: State, sentence: Callable[[], str], span: Span | None = None, hint: str = ""
    ) -> None:
        """Remember why `term` does not fit, if more agreed than at any failure before."""
        reached = len(state.nodes) + len(state.kept)
        if self._best is None or reached > self._best[0]:
            self._best = (reached, sentence, span or term.span, state, hint)

    def _nearest(self, tensor: Tensor) -> Miss:
        if self._best is None:
            return self._miss_now(f"no reading of '{tensor.name}' fits", tensor)
        _, sentence, span, state, hint = self._best
        names = tuple(str(n.name) for n in (*state.nodes.values(), *state.kept.values()))
        size = self._size(state.choices)
        return Miss(self.fusion, node_name(tensor), len(names), size, sentence, span, names, hint)

    def _miss_now(self, sentence: str, tensor: Tensor, hint: str = "") -> Miss:
        size = self._size({})
        return Miss(self.fusion, node_name(tensor), 0, size, lambda: sentence, self.fusion.span, (), hint)

    def _size(self, choices: Mapping[str, str]) -> Callable[[], int]:
        def size() -> int:
            key = tuple(sorted(choices.items()))
            if key not in self._sizes_known:
                self._sizes_known[key] = count(self.fusion.outputs[0], choices)
            return self._sizes_known[key]

        return size


class Terms:
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
            for order in itertools.permutations(values):
                for after in self._assign(order, 0, state):
                    yield from self._agree(numbers, after)
        if len(values) > len(self.values):
            return
        for i in range(start, len(values)):
            tensor, after = self.matcher.through_casts(values[i], state)
            for inner, more, node in self._split(tensor):
                grown = [*values[:i], *inner, *values[i + 1 :]]
                yield from self._grow(grown, numbers + more, i, after.with_nodes([node]))

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
        if node is None or op_of(node) not in (forward, inverse):
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


# --- dimensions --------------------------------------------------------------------------------------------------


def unify(spec: str, shape: Sequence[DimSize], known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`known` with the names of `spec` bound to the sizes of `shape`; None where they contradict."""
    before, dots, after = spec.partition("...")
    head, tail, dims = before.split(), after.split(), dict(known)
    if not dots:
        return dims if _bind_from_right(head, list(shape), dims) else None
    if len(shape) < len(head) + len(tail):
        return None
    middle = tuple(shape[len(head) : len(shape) - len(tail)])
    fits = _bind_from_right(head, list(shape[: len(head)]), dims) and _bind_from_right(
        tail, list(shape[len(shape) - len(tail) :]), dims
    )
    return dims if fits and dims.setdefault("...", middle) == middle else None


def _bind_from_right(tokens: Sequence[str], sizes: list[DimSize], dims: dict[str, Any]) -> bool:
    for token in reversed(tokens):
        name, may_broadcast = token.rstrip("?"), token.endswith("?")
        if not sizes:
            if not may_broadcast:
                return False
            continue
        found = sizes.pop()
        if name.isdecimal():
            if found != int(name):
                return False
        elif not (may_broadcast and found == 1) and dims.setdefault(name, found) != found:
            return False
    return not sizes


def fitted(pattern: str, source_rank: int, result_rank: int) -> layouts.Arrangement | None:
    """The arrangement with as many axes for "..." as make it fit both ranks; None where none does."""
    for extra in range(max(source_rank, result_rank) + 1) if "..." in pattern else (0,):
        arrangement = layouts.parse_arrangement(pattern, extra)
        if (len(arrangement.source), len(arrangement.result)) == (source_rank, result_rank):
            return arrangement
    return None


# --- words -------------------------------------------------------------------------------------------------------


def root_ops(term: Term) -> set[str]:
    """The operators that can compute a term."""
    match term:
        case Apply(op=op):
            return {op}
        case Product():
            return {"Mul", "Div"}
        case Sum():
            return {"Add", "Sub"}
        case Rearrange(inner=inner):
            return VIEWS | root_ops(inner)
        case Scaled(inner=inner):
            return {"Mul", "Div"} | root_ops(inner)
        case _:
            return set().union(*map(root_ops, parts(term)))


def count(term: Term, choices: Mapping[str, str], seen: set[int] | None = None) -> int:
    """About how many nodes a term stands for: of its longest spelling, and of the chosen variant or the longest."""
    seen = set() if seen is None else seen
    if id(term) in seen:
        return 0
    seen.add(id(term))
    match term:
        case Choose(name=name, options=options) if name in choices:
            return count(options[choices[name]], choices, seen)
        case Either() | Choose():
            return max(count(option, choices, set(seen)) for option in parts(term))
        case Sum(terms=terms) | Product(terms=terms):
            own = len(terms) - 1
        case Rearrange():
            own = 2
        case Apply():
            own = 1
        case _:
            own = 0
    return own + sum(count(part, choices, seen) for part in parts(term))


def origin(tensor: Tensor) -> str:
    """What computes a tensor, in words."""
    node = producer(tensor)
    if node is None:
        return "a constant" if is_constant(tensor) else "a graph input"
    return f"the output of {op_of(node)} '{node.name}'" if node.name else f"the output of {op_of(node)}"


def node_name(tensor: Tensor) -> str:
    """The name of the node that computes a tensor; the tensor's own where it has none."""
    node = producer(tensor)
    return str((node.name if node is not None else "") or tensor.name)


def _computed(wanted: Any, dims: Mapping[str, Any]) -> Any:
    if isinstance(wanted, Size):
        return wanted.compute(dims)
    return [_computed(item, dims) for item in wanted] if isinstance(wanted, list) else wanted


def _text(shape: Sequence[DimSize] | None) -> str:
    return "unknown rank" if shape is None else ", ".join(map(str, shape))


def _shown(spec: str, dims: Mapping[str, Any]) -> str:
    known = (f"{token}={dims[token.rstrip('?')]}" if token.rstrip("?") in dims and token != "..." else token
             for token in spec.split())
    return ", ".join(known)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
