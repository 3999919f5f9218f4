"""Recognizes linear attention in chunks by what it computes, and replaces it by the fused node linear_attention.

Exporters write the chunked form in dozens to thousands of operators, in many ways, but all of them are analytic
functions of their operands.  Two analytic functions that agree at a point drawn at random are equal with probability
1.  So onnxruntime runs the nodes in float64 on the CPU, and their results are compared with the recurrence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_inference import infer_behind
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import FLOATS, Array, dtype_name
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, op_of
from onnxfuse.layout.axes import Perm
from onnxfuse.match import Miss
from onnxfuse.match.diagnostics import node_name, shape_text
from onnxfuse.passes.emit import write
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences.chunks import SHAPES, Chunks, read_chunks
from onnxfuse.recurrences.form import NoScan
from onnxfuse.recurrences.write import Written
from onnxfuse.rewrite.replace import FunctionCall, Fused, LocalFunctions, attributes_of, put_call

LINEAR_ATTENTION: Final = "linear_attention"
DOC: Final = "Linear attention in chunks, as the model computes it."
SCREENED: Final = 4  # tokens on which the roles of operands are tried
TOLERANCE: Final = 1e-9  # of results in float64, relative to the largest
BATCHES: Final = (2, 1)  # for a batch whose size is dynamic: at first, and later
OPERANDS: Final = ("query", "key", "value", "decay", "beta")
NO_ROLES: Final = "it computes something else: no roles of its operands make the recurrence have its results"
# Opens a model; the result runs it and returns its outputs by name.  Both raise NoScan if onnxruntime does not run it.
Runner: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, object]]
Opener: TypeAlias = Callable[[onnx.ModelProto], Runner]
Answer: TypeAlias = "tuple[int, float] | str"  # an index of `_roles`, and the scale; or why there are none


@dataclass
class LinearAttentionResult:
    """The records of the fused nodes, and the reasons why sums of other decays do not become such nodes.

    `originals` maps each new tensor to the tensor that it is a Transpose of, and to the perm.
    """

    fused: tuple[Fused, ...] = ()
    missed: tuple[Miss, ...] = ()
    originals: dict[str, tuple[str, Perm]] = field(default_factory=dict)


def assign_linear_attention(
    shapes: ShapeInfo,
    fusion: Fusion,
    functions: LocalFunctions,
    opened: Opener,
    exclude: Collection[tuple[str, str]] = (),
    keep: Set[str] = frozenset(),
) -> LinearAttentionResult:
    """Replace linear attention in chunks in a sorted graph.

    fusion   linear_attention
    opened   opens a model in onnxruntime
    exclude  matches that stay as they are: pairs of a fusion's name and the first output
    keep     labels of nodes that stay as they are
    """
    found = _Replacing(shapes, functions, opened, exclude, keep)
    for node in [node for node in shapes.graph.nodes if op_of(node) == "CumSum"]:
        if node.outputs and shapes.dtype(node.outputs[0]) in FLOATS:  # else already replaced, or a count
            label = node_label(node)
            try:
                found.replace(node)
            except NoScan as error:
                found.result.missed += (_miss(fusion, label, str(error)),)
    return found.result


def _miss(fusion: Fusion, label: str, reason: str) -> Miss:
    sentence = f"'{label}' (CumSum) adds up no decays of linear attention in chunks: {reason}"
    return Miss(fusion, label, 1, lambda: 1, lambda: sentence, fusion.span, (label,))


# --- operands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor of shape (batch, length, ...) or, with `heads_first`, (batch, heads, length, ...), and its dtype."""

    tensor: Tensor
    shape: tuple[Size, ...]
    heads_first: bool
    dtype: int

    @property
    def rows(self) -> tuple[Size, ...]:
        """The shape with the tokens before the heads."""
        return tuple(self.shape[i] for i in self.perm) if self.heads_first else self.shape

    @property
    def perm(self) -> list[int]:
        """The perm of the Transpose that exchanges tokens and heads."""
        return [0, 2, 1, 3][: len(self.shape)]

    @property
    def width(self) -> int:
        """The number of elements of a token.  Raises NoScan if it is dynamic."""
        sizes = [size for size in self.rows[2:] if isinstance(size, int)]
        if len(sizes) + 2 < len(self.shape):
            raise NoScan(f"'{self.tensor.name}' has heads whose number or size is dynamic")
        return math.prod(sizes)

    def heads(self, states: int) -> list[int]:
        """Return the numbers of heads that the tensor can have, each of which divides the number of states."""
        counts = [self.rows[2]] if len(self.shape) == 4 else range(1, states + 1)
        return [n for n in counts if isinstance(n, int) and n and states % n == 0 == self.width % n]


def operand_of(shapes: ShapeInfo, tensor: Tensor, length: Size) -> Operand:
    """Return a tensor as an operand.  Raises NoScan if it does not hold rows of `length` tokens."""
    shape = shapes.shape(tensor)
    if shape is None or not 3 <= len(shape) <= 4 or length not in shape[1:3]:
        raise NoScan(f"'{tensor.name}' does not hold rows of {length} tokens")
    return Operand(tensor, shape, shape[1] != length, shapes.dtype(tensor))


@dataclass(frozen=True)
class Roles:
    """The names of the operands by role, the heads of queries, keys and states, and the rows of a state."""

    names: Mapping[str, str]
    q_heads: int
    k_heads: int
    states: int
    size: int

    @property
    def rule(self) -> str:
        """The update rule of LinearAttention."""
        return "gated_delta" if "beta" in self.names else "gated"

    def recurrence(self, given: Mapping[str, Array], length: int) -> Array:
        """Return the first `length` results (batch, length, states, columns), computed token by token with scale 1."""
        counts = {"query": self.q_heads, "key": self.k_heads, "value": self.states, "decay": self.states}
        rows = {role: given[name][:, :length] for role, name in self.names.items()}
        if "beta" in rows:
            counts["beta"] = self.states if math.prod(rows["beta"].shape[2:]) == self.states else 1
        split = {role: x.reshape(*x.shape[:2], counts[role], -1) for role, x in rows.items()}
        # The state of one head fits into a processor's cache.
        heads = ({role: x[:, :, head * counts[role] // self.states] for role, x in split.items()}
                 for head in range(self.states))  # fmt: skip
        return np.stack([_one_head(**each) for each in heads], axis=2)


def _one_head(query: Array, key: Array, value: Array, decay: Array, beta: Array | None = None) -> Array:
    """Return the results (batch, length, columns) of one head, whose operands are (batch, length, size)."""
    state, y, factors = np.zeros((len(key), key.shape[2], value.shape[2])), np.empty_like(value), np.exp(decay)
    for t in range(key.shape[1]):
        state *= factors[:, t, :, None]
        added = value[:, t, None]
        if beta is not None:
            added = beta[:, t, None] * (added - key[:, t, None] @ state)
        state += key[:, t, :, None] * added
        y[:, t] = (query[:, t, None] @ state)[:, 0]
    return y


def _roles(given: Mapping[str, Operand], output: Operand) -> Iterator[Roles]:
    """Yield the roles that the operands can have by their shapes; the operand `x0` holds the decays."""
    states = given["x0"].rows[2]
    if not isinstance(states, int) or not states:
        raise NoScan("the number of its states is dynamic")
    for names in itertools.permutations(list(given)[1:]) if len(given) >= 4 else ():
        named = dict(zip(("query", "key", "value", "beta"), names, strict=False)) | {"decay": "x0"}
        query, key, value = (given[name] for name in names[:3])
        has_rates = "beta" not in named or given[named["beta"]].width in (1, states)
        if not has_rates or value.width != output.width or value.width % states:
            continue
        for q_heads, k_heads in itertools.product(query.heads(states), key.heads(states)):
            size = query.width // q_heads
            if size == key.width // k_heads and given["x0"].width in (states, states * size):
                yield Roles(named, q_heads, k_heads, states, size)


# --- what the nodes compute ------------------------------------------------------------------------------------------


def body_of(shapes: ShapeInfo, chunks: Chunks, given: Mapping[str, Operand], output: Operand) -> Written:
    """Return the nodes as those of a function of `given`, whose output `y` has tokens before heads."""
    written = Written(shapes, {each.tensor.name: name for name, each in given.items()}, "f", 0)
    for name, each in given.items():
        if each.heads_first:
            written.names[each.tensor.name] = written.put("Transpose", name, perm=each.perm)
    for node in chunks.nodes:
        if op_of(node) in SHAPES and node.inputs[0].name not in written.names:
            _add_sizes(shapes, node, given, written)
        else:
            written.add(node)
    made = written.names[output.tensor.name]
    if output.heads_first:
        written.put("Transpose", made, target="y", perm=output.perm)
    else:
        written.put("Identity", made, target="y")
    return written


def _add_sizes(shapes: ShapeInfo, node: Node, given: Mapping[str, Operand], written: Written) -> None:
    """Write the Shape of a tensor outside the function; each size must be known or be the size of an operand's axis."""
    shape = shapes.shape(node.inputs[0])
    if shape is None or op_of(node) != "Shape":
        raise NoScan(f"it depends on the sizes of '{node.inputs[0].name}'")
    start, end = int_attribute(node, "start", 0), int_attribute(node, "end", len(shape))
    parts = list[str]()
    for size in shape[start:end]:
        if isinstance(size, int):
            parts.append(written.constant(np.array([size])))
            continue
        found = next(((name, each.rows.index(size)) for name, each in given.items() if size in each.rows), None)
        if found is None:
            raise NoScan(f"it depends on the size {size} of '{node.inputs[0].name}', which no operand has")
        name, axis = found
        parts.append(written.put("Gather", written.put("Shape", name), written.constant(np.array([axis]))))
    written.names[node.outputs[0].name] = written.put("Concat", *parts, axis=0)


def in_double(nodes: Sequence[onnx.NodeProto], names: Mapping[str, Operand], opset: int) -> onnx.ModelProto:
    """Return a model of the nodes, all of whose floats are float64."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    for attribute in (attribute for node in copies for attribute in node.attribute):
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in FLOATS:
            value = onnx.numpy_helper.to_array(attribute.t).astype(np.float64)
            attribute.t.CopyFrom(onnx.numpy_helper.from_array(value))
        elif attribute.name in ("to", "dtype") and attribute.i in FLOATS:
            attribute.i = TensorProto.DOUBLE
    inputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, [None] * len(each.shape))
              for name, each in names.items()]  # fmt: skip
    output = helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)
    graph = helper.make_graph(copies, "chunks", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@dataclass
class _Comparison:
    """Results of the nodes for operands drawn at random, next to those of the recurrence."""

    run: Runner
    given: Mapping[str, Operand]
    length: Size
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def drawn(self, length: int, batch: int) -> tuple[dict[str, Array], Array]:
        """Return operands whose decays let all tokens take part in the last results, and the results."""
        feeds = {}
        for name, each in self.given.items():
            sizes = [size if isinstance(size, int) else length if size == self.length else batch for size in each.rows]
            feeds[name] = self.rng.standard_normal(sizes) / math.sqrt(max(1, sizes[-1] if len(sizes) == 4 else 8))
        feeds["x0"] *= 2 / math.sqrt(length)
        return feeds, np.asarray(self.run(feeds)["y"])

    def answer(self, roles: Sequence[Roles], lengths: Sequence[int]) -> tuple[int, float]:
        """Return the number of the roles that agree for all lengths, and the scale.  Raises NoScan if none agree."""
        feeds, y = self.drawn(lengths[0], BATCHES[0])
        screened = min(SCREENED, lengths[0])
        for number, each in enumerate(roles):
            expected = each.recurrence(feeds, screened)
            if y.size * screened != expected.size * lengths[0]:
                continue
            found = y.reshape(len(y), lengths[0], *expected.shape[2:])[:, :screened]
            scale = float((found * expected).sum() / (expected * expected).sum())
            if not _agree(found, scale * expected):
                continue
            drawn = [(feeds, y, lengths[0]), *((*self.drawn(length, BATCHES[1]), length) for length in lengths[1:])]
            if all(_agree(made, scale * each.recurrence(own, length)) for own, made, length in drawn):
                return number, scale
        raise NoScan(NO_ROLES)


def _agree(found: Array, expected: Array) -> bool:
    return found.size == expected.size and bool(
        np.abs(found.reshape(expected.shape) - expected).max() <= TOLERANCE * np.abs(expected).max()
    )


def _compared(
    written: Written, given: Mapping[str, Operand], roles: Sequence[Roles], chunks: Chunks, opened: Opener
) -> tuple[int, float]:
    """Compare the nodes with the recurrence; at lengths around the chunks' size and at two batches if dynamic."""
    size = chunks.size
    if isinstance(chunks.length, int):
        is_fixed = all(isinstance(each.rows[0], int) for each in given.values())
        lengths = [chunks.length] * (1 if is_fixed else len(BATCHES))
    else:
        lengths = [2 * size + 1, 1, size - 1, size, 3 * size]
    model = in_double(written.nodes, given, written.shapes.graph.opset)
    comparison = _Comparison(opened(model), given, chunks.length)
    return comparison.answer(roles, [length for length in lengths if length > 0])


# --- the fused node --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recognized:
    """The operands, the output and the roles of linear attention, and its scale."""

    given: Mapping[str, Operand]
    output: Operand
    roles: Roles
    scale: float

    def attributes(self) -> dict[str, AttributeValue]:
        """Return the attributes of the fused node, as the pattern linear_attention names them."""
        roles = self.roles
        named: dict[str, AttributeValue] = {
            "q_num_heads": roles.q_heads, "kv_num_heads": roles.states, "update_rule": roles.rule, "scale": self.scale,
            "results_by_head": int(len(self.output.shape) == 4),
        }  # fmt: skip
        widths = {"query": "width", "key": "key_width", "value": "value_width", "decay": "decays", "beta": "rates"}
        return named | {widths[role]: self.given[name].width for role, name in roles.names.items()}


@dataclass
class _Replacing:
    """Replaces chunks in a graph; `known` holds what equal nodes compute."""

    shapes: ShapeInfo
    functions: LocalFunctions
    opened: Opener
    exclude: Collection[tuple[str, str]]
    keep: Set[str]
    result: LinearAttentionResult = field(default_factory=LinearAttentionResult)
    known: dict[bytes, Answer] = field(default_factory=dict)

    def replace(self, cumsum: Node) -> None:
        """Replace the chunks around a CumSum.  Raises NoScan, with the first reason, if they stay."""
        reasons = list[NoScan]()
        try:
            for chunks in read_chunks(self.shapes, cumsum):
                try:
                    labels = {*map(node_label, chunks.nodes)}
                    if (LINEAR_ATTENTION, chunks.output.name) in self.exclude or self.keep & labels:
                        raise NoScan("it belongs to a match that is switched off")
                    found, body = self._recognized(chunks)
                except NoScan as error:
                    reasons.append(error)
                    continue
                self._put(chunks, found, body)
                return
        except NoScan as error:  # of the nodes for another length
            reasons.append(error)
        raise reasons[0]

    def _recognized(self, chunks: Chunks) -> tuple[Recognized, Sequence[onnx.NodeProto]]:
        """Return what chunks compute, and their nodes as those of a function; raises NoScan if it is something else."""
        shapes, tensors = self.shapes, (chunks.decay, *chunks.others)
        given = {f"x{i}": operand_of(shapes, tensor, chunks.length) for i, tensor in enumerate(tensors)}
        output = Operand(chunks.output, chunks.shape, chunks.shape[1] != chunks.length, shapes.dtype(chunks.output))
        for each in given.values():
            if each.dtype != output.dtype:
                told = f"'{each.tensor.name}' is {dtype_name(each.dtype)}, its results are {dtype_name(output.dtype)}"
                raise NoScan(f"{told}; required is one dtype")
            if each.rows[0] != output.rows[0] or 0 in each.rows:
                told = (
                    f"'{each.tensor.name}' is [{shape_text(each.shape)}], its results are [{shape_text(output.shape)}]"
                )
                raise NoScan(f"{told}; required are one batch and sizes above 0")
        roles, written = [*_roles(given, output)], body_of(shapes, chunks, given, output)
        key = str([each.shape for each in given.values()]).encode()
        key += b"".join(node.SerializeToString(deterministic=True) for node in written.nodes)
        if key not in self.known:
            try:
                self.known[key] = _compared(written, given, roles, chunks, self.opened)
            except NoScan as error:
                self.known[key] = str(error)
        if isinstance(answer := self.known[key], str):
            raise NoScan(answer)
        return Recognized(given, output, roles[answer[0]], answer[1]), written.nodes

    def _put(self, chunks: Chunks, found: Recognized, body: Sequence[onnx.NodeProto]) -> None:
        """Put a call of a function with the nodes of `body` in place of chunks."""
        shapes, graph, roles, output = self.shapes, self.shapes.graph, found.roles, found.output
        order = {role: roles.names[role] for role in OPERANDS if role in roles.names}
        operands = {role: self._in_rows(found.given[name]) for role, name in order.items()}
        y = output.tensor
        if output.heads_first:
            y = graph.variable(f"{y.name}_rows")
            self.result.originals[y.name] = output.tensor.name, tuple(output.perm)
        shapes.record(output.tensor, output.shape, output.dtype)
        shapes.record(y, output.rows, output.dtype)
        attributes = attributes_of(shapes, LINEAR_ATTENTION, operands, [y], found.attributes())
        function = _function(graph.opset, order, body, sorted(attributes))
        name = graph.unique_name(f"{node_name(output.tensor)}/{LINEAR_ATTENTION}")
        labels = {node: node_label(node) for node in chunks.nodes}
        call = FunctionCall(self.functions.add(function), name, [*operands.values()], [y], attributes)
        put_call(shapes, output.tensor.inputs, call)
        if output.heads_first:
            graph.add_node("Transpose", [y], [output.tensor], {"perm": output.perm})
        graph.remove_dead()
        graph.sort()
        infer_behind(shapes, consumers(output.tensor))
        gone = tuple(label for node, label in labels.items() if not node.outputs)
        self.result.fused += (Fused(LINEAR_ATTENTION, name, gone, {}, y.name),)

    def _in_rows(self, operand: Operand) -> Tensor:
        if not operand.heads_first:
            return operand.tensor
        stem, perm = f"{operand.tensor.name}_rows", operand.perm
        rows = write(self.shapes, "Transpose", [operand.tensor], stem, {"perm": perm})
        self.result.originals[rows.name] = operand.tensor.name, tuple(perm)
        return rows


def _function(
    opset: int, order: Mapping[str, str], body: Sequence[onnx.NodeProto], attributes: list[str]
) -> onnx.FunctionProto:
    """Return the function of `body`, whose inputs are renamed to the roles in `order`."""
    named = {name: role for role, name in order.items()}
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in body]
    for node in nodes:
        node.input[:] = [named.get(name, name) for name in node.input]
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, LINEAR_ATTENTION, list(order), ["y"], nodes, opsets, attributes, doc_string=DOC)
