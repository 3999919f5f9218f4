"""Recognizes the mLSTM of xLSTM in chunks of tokens by what it computes, and replaces it by a scan.

    m' = max(log f + m, i);  (C', n') = exp(log f + m - m') (C, n) + exp(i - m') k (v^T, 1)
    y = C'^T q / (max(|n' q|, exp(-m')) + epsilon)

f is the sigmoid of a gate, i another gate, and q is scaled (Beck et al. 2024, arXiv:2405.04517); states begin as 0.
As in linear_attention.py, results in float64 are compared with these steps.  The nodes are analytic functions of their
operands except where two sides of a maximum are equal.  The compared rows have either side of the denominator's; the
other maxima cancel out.  A maximum with a number is refused, because no row may have that side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import helper

from onnxfuse.algebra.operators import MOVES
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import FLOATS, Array, dtype_name
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.match.diagnostics import node_name
from onnxfuse.passes.emit import integers, write
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences import SCAN
from onnxfuse.recurrences.chunks import ANALYTIC, SPREADING, Chunks, read_chunks
from onnxfuse.recurrences.form import NoScan
from onnxfuse.recurrences.linear_attention import (
    BATCHES,
    SCREENED,
    TOLERANCE,
    Opener,
    Operand,
    Runner,
    body_of,
    in_double,
    operand_of,
)
from onnxfuse.recurrences.program import Program
from onnxfuse.rewrite.replace import FunctionCall, Fused, LocalFunctions, attributes_of, put_call

DOC: Final = "An mLSTM in chunks, as the model computes it."
GATES: Final = frozenset({"Log", "Neg", "Sigmoid", "Softplus"})  # between a gate and the CumSum of its logarithms
MAXIMA: Final = frozenset({"Max", "ReduceMax"})
STABILIZED: Final = ANALYTIC | GATES | MAXIMA | {"Abs", "Div"}
MAX_EPSILON: Final = 1e-2
ROLES: Final = ("query", "key", "value", "input_gate", "forget_gate")
MASKED: Final = -1e9  # at most this, a number in a maximum is a mask
MIN_SIDE: Final = 0.02  # of the compared rows that have each side of the denominator's maximum


@dataclass(frozen=True)
class Mlstm:
    """The operand of each role, the numbers of heads and of rows and columns of a state, and two constants."""

    names: Mapping[str, str]
    heads: int
    size: int
    columns: int
    scale: float = 1.0
    epsilon: float = 0.0

    def split(self, role: str) -> tuple[int, ...]:
        """Return the sizes of a token of an operand, the heads first."""
        own = {"query": (self.size,), "key": (self.size,), "value": (self.columns,)}
        return self.heads, *own.get(role, ())

    def steps(self, given: Mapping[str, Array]) -> tuple[Array, Array, Array]:
        """Return C'^T q, |n' q| and m' of all tokens, (batch, length, heads, ...), where q is not scaled."""
        rows = {role: given[name] for role, name in self.names.items()}
        q, k, v, i, f = (rows[role].reshape(*rows[role].shape[:2], *self.split(role)) for role in ROLES)
        logs, batch = -np.logaddexp(0, -f), len(q)
        c, n = np.zeros((batch, self.heads, self.size, self.columns)), np.zeros((batch, self.heads, self.size))
        m, found = np.zeros((batch, self.heads)), []
        for t in range(q.shape[1]):
            before, m = logs[:, t] + m, np.maximum(logs[:, t] + m, i[:, t])
            kept, added = np.exp(before - m), np.exp(i[:, t] - m)[..., None] * k[:, t]
            c = kept[..., None, None] * c + added[..., None] * v[:, t, :, None]
            n = kept[..., None] * n + added
            found.append((np.einsum("bhk,bhkv->bhv", q[:, t], c), np.abs((q[:, t] * n).sum(-1)), m))
        results, sums, maxima = (np.stack(each, 1) for each in zip(*found, strict=True))
        return results, sums, maxima

    def program(self, shapes: ShapeInfo, given: Mapping[str, Tensor], output: Tensor, length: Size) -> Program:
        """Return the program of a step; operands have heads as axis 2, and `length` tokens along axis 1."""
        made = Program()
        made.add_steps(length)
        heads, size, columns = made.axis(self.heads), made.axis(self.size), made.axis(self.columns)
        of = {"query": (heads, size), "key": (heads, size), "value": (heads, columns)}
        values, batch = dict[str, str](), made.axis((shapes.shape(given["query"]) or ())[0])
        for role in ROLES:
            name = made.operand(shapes, given[role])
            wanted = (batch, 0, *of.get(role, (heads,)))
            for a, b in zip(made.axes[name], wanted, strict=True):
                if made.unite(a, b) != made.find(b):
                    raise NoScan(f"'{given[role].name}' has one element along an axis")
            values[role] = made.view(name, (batch, *wanted[2:]))
        return self._write(made, shapes, values, (batch, heads, size, columns), output)

    def _write(
        self,
        made: Program,
        shapes: ShapeInfo,
        values: Mapping[str, str],
        axes: tuple[int, int, int, int],
        output: Tensor,
    ) -> Program:
        batch, heads, size, columns = axes
        row, vector, matrix = (batch, heads), (batch, heads, size), (batch, heads, size, columns)
        dtype = dtype_name(shapes.dtype(output))
        zero = np.zeros((), helper.tensor_dtype_to_np_dtype(shapes.dtype(output)))
        starts = {"m": row, "n": vector, "c": matrix}
        states = {
            name: made.view(made.operand(shapes, shapes.graph.constant(f"{output.name}_{name}", zero)), of)
            for name, of in starts.items()
        }

        def put(op: str, *inputs: str) -> str:
            return made.emit(op, inputs, made.aligned([made.axes[each] for each in inputs]), dtype)

        def number(value: float) -> str:
            return made.emit("Constant", [], (), dtype, value=value)

        def wide(value: str) -> str:
            return made.view(value, (*made.axes[value], -1))

        def summed(value: str) -> str:
            axes = made.axes[value]
            made.reduced.append(size)
            return made.emit("ReduceSum", [value], (*axes[:2], *axes[3:]), dtype)

        q, k, v, i, f = (values[role] for role in ROLES)
        before = put("Add", put("Neg", put("Softplus", put("Neg", f))), states["m"])
        m = put("Max", before, i)
        kept, taken = wide(put("Exp", put("Sub", before, m))), wide(put("Exp", put("Sub", i, m)))
        added = put("Mul", taken, k)
        n = put("Add", put("Mul", kept, states["n"]), added)
        rows = made.view(v, (batch, heads, -1, columns))
        c = put("Add", put("Mul", wide(kept), states["c"]), put("Mul", wide(added), rows))
        scaled = put("Mul", q, number(self.scale))
        results, sums = summed(put("Mul", wide(scaled), c)), summed(put("Mul", scaled, n))
        below = put("Max", put("Abs", sums), put("Exp", put("Neg", m)))
        below = put("Add", below, number(self.epsilon)) if self.epsilon else below
        y = put("Div", results, wide(below))
        for (name, of), end in zip(starts.items(), (m, n, c), strict=True):
            made.state_axes.append(of)
            made.states.append((made.source(states[name]), made.source(end)))
        made.outputs.append((y, (batch, 0, heads, columns), output))
        return made


def assign_mlstm(
    shapes: ShapeInfo,
    functions: LocalFunctions,
    opened: Opener,
    exclude: Collection[tuple[str, str]] = (),
    keep: Set[str] = frozenset(),
) -> tuple[tuple[Fused, ...], dict[str, str]]:
    """Replace the mLSTMs in chunks of a sorted graph; the arguments are those of `assign_linear_attention`.

    Returns the records of the fused nodes and, by the label of a CumSum with maxima after it, why its nodes stay.
    """
    fused, reasons, known = list[Fused](), dict[str, str](), dict[bytes, Mlstm]()
    leading = _before_maxima(shapes.graph)
    for node in [node for node in shapes.graph.nodes if node.op == "CumSum" == op_of(node) and node in leading]:
        label = node_label(node)
        for chunks in _stabilized(shapes, node, reasons):
            try:
                if (SCAN, chunks.output.name) in exclude or keep & {*map(node_label, chunks.nodes)}:
                    raise NoScan("it belongs to a match that is switched off")
                _require_no_bounds(shapes, chunks.nodes)
                fused.append(_replace(shapes, functions, opened, chunks, known))
                reasons.pop(label, None)
                break
            except NoScan as error:
                shapes.graph.remove_dead()  # views of operands
                reasons.setdefault(label, str(error))
    return tuple(fused), reasons


def _stabilized(shapes: ShapeInfo, cumsum: Node, reasons: dict[str, str]) -> Iterator[Chunks]:
    """Yield the nodes around a CumSum of floats that contain maxima, for each length that the sequence can have.

    Adds to `reasons` why nodes with maxima cannot be an mLSTM.
    """
    if cumsum.outputs and shapes.dtype(cumsum.outputs[0]) in FLOATS:
        try:
            for chunks in read_chunks(shapes, cumsum, STABILIZED, SPREADING | GATES):
                if any(op_of(node) in MAXIMA for node in chunks.nodes):
                    yield chunks
        except NoScan as error:
            reasons[node_label(cumsum)] = str(error)


def _before_maxima(graph: Graph) -> set[Node]:
    """Return the nodes on which a maximum depends by operators that an mLSTM has."""
    work, found = [node for node in graph.nodes if op_of(node) in MAXIMA], set[Node]()
    while work:
        read = {node for tensor in work.pop().inputs if (node := producer(tensor)) is not None} - found
        found |= read
        work += (node for node in read if op_of(node) in STABILIZED)
    return found


def _require_no_bounds(shapes: ShapeInfo, nodes: Sequence[Node]) -> None:
    """Raise NoScan if a side of a maximum is a number: rows that are drawn at random may all be above it."""

    def is_bound(tensor: Tensor) -> bool:
        if is_constant(tensor):
            values = constant_value(shapes.graph, tensor)
            return values.dtype.kind == "f" and not bool((values <= MASKED).all())
        node = producer(tensor)
        if node is None or op_of(node) not in MOVES:
            return False
        return op_of(node) == "Pad" or any(map(is_bound, node.inputs if op_of(node) == "Concat" else node.inputs[:1]))

    for node in nodes:
        if op_of(node) in MAXIMA and any(map(is_bound, node.inputs[: None if op_of(node) == "Max" else 1])):
            raise NoScan(f"'{node_label(node)}', {op_of(node)}, is of a number, which no maximum of an mLSTM is")


def _replace(
    shapes: ShapeInfo, functions: LocalFunctions, opened: Opener, chunks: Chunks, known: dict[bytes, Mlstm]
) -> Fused:
    """Replace chunks by a scan whose function has their nodes; `known` holds what equal nodes compute.

    Raises NoScan if they compute something else.
    """
    graph, tensors = shapes.graph, (chunks.decay, *chunks.others)
    given = {f"x{i}": operand_of(shapes, tensor, chunks.length) for i, tensor in enumerate(tensors)}
    output = Operand(chunks.output, chunks.shape, False, shapes.dtype(chunks.output))
    if len(chunks.shape) != 4 or chunks.shape[1] != chunks.length:
        raise NoScan(f"'{chunks.output.name}' has no rows (batch, length, heads, columns)")
    if any(each.dtype != output.dtype or each.rows[0] != output.rows[0] or 0 in each.rows for each in given.values()):
        raise NoScan("its operands and results have several dtypes or batches, or no elements")
    written = body_of(shapes, chunks, given, output)
    key = str([each.shape for each in given.values()]).encode()
    key += b"".join(node.SerializeToString(deterministic=True) for node in written.nodes)
    if key not in known:
        run = opened(in_double(written.nodes, given, graph.opset))
        known[key] = _compared(run, given, chunks, [*_roles(shapes, chunks, given, output)])
    found = known[key]
    order = {found.names[role]: role for role in ROLES}
    operands = {role: _in_heads(shapes, given[name], found.split(role)) for name, role in order.items()}
    program = found.program(shapes, operands, chunks.output, chunks.length)
    text = program.text()
    attributes = attributes_of(shapes, SCAN, program.operands, [chunks.output], {"program": text})
    inner = {name: next(each for each in program.operands if program.operands[each] is operands[role])
             for name, role in order.items()}  # fmt: skip
    function = _function(graph.opset, [*program.operands], inner, given, written.nodes, sorted(attributes))
    name = graph.unique_name(f"{node_name(chunks.output)}/{SCAN}")
    labels = tuple(map(node_label, chunks.nodes))
    call = FunctionCall(functions.add(function), name, [*program.operands.values()], [chunks.output], attributes)
    put_call(shapes, chunks.output.inputs, call)
    graph.remove_dead()
    graph.sort()
    return Fused(SCAN, name, labels, {}, chunks.output.name)


def _in_heads(shapes: ShapeInfo, operand: Operand, split: Sequence[int]) -> Tensor:
    """Return an operand as (batch, length, heads) or (batch, length, heads, size)."""
    tensor, graph = operand.tensor, shapes.graph
    if operand.heads_first:
        tensor = write(shapes, "Transpose", [tensor], f"{tensor.name}_rows", {"perm": operand.perm})
    if len(operand.shape) == 2 + len(split):
        return tensor
    return write(
        shapes, "Reshape", [tensor, integers(graph, f"{tensor.name}_sizes", (0, 0, *split))], f"{tensor.name}_heads"
    )


def _function(
    opset: int, inputs: Sequence[str], inner: Mapping[str, str], given: Mapping[str, Operand],
    body: Sequence[onnx.NodeProto], attributes: list[str],
) -> onnx.FunctionProto:  # fmt: skip
    """Return the function of `body`, whose operands `given` get the rows of the inputs that `inner` names."""
    nodes = []
    for name, each in given.items():
        sizes = np.array([0, 0, *each.rows[2:]], np.int64)
        nodes.append(helper.make_node("Constant", [], [f"{name}_sizes"], value=onnx.numpy_helper.from_array(sizes)))
        nodes.append(helper.make_node("Reshape", [f"in_{inner[name]}", f"{name}_sizes"], [f"rows_{name}"]))
    for node in body:
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        nodes[-1].input[:] = [f"rows_{each}" if each in given else each for each in node.input]
    opsets = [helper.make_opsetid("", opset)]
    names = [f"in_{name}" for name in inputs]
    return helper.make_function(DOMAIN, SCAN, names, ["y"], nodes, opsets, attributes, doc_string=DOC)


def _roles(shapes: ShapeInfo, chunks: Chunks, given: Mapping[str, Operand], output: Operand) -> Iterator[Mlstm]:
    """Yield what the operands can be by their shapes; the operand `x0` holds the forget gates."""
    heads, columns = output.rows[2:]
    if not isinstance(heads, int) or not isinstance(columns, int) or given["x0"].width != heads:
        raise NoScan("its heads or columns are dynamic")
    epsilons = sorted({0.0, *_small_numbers(shapes, chunks.nodes)})
    for names in itertools.permutations(list(given)[1:]) if len(given) == len(ROLES) else ():
        named = dict(zip(ROLES, (*names, "x0"), strict=True))
        query, key, value, gate = (given[name] for name in names)
        size, rest = divmod(query.width, heads)
        if rest or size < 2 or key.width != query.width or value.width != heads * columns or gate.width != heads:
            continue
        scales = {1.0, size**-0.5, float(np.float32(size**-0.5))}  # models store the latter
        for scale, epsilon in itertools.product(sorted(scales), epsilons):
            yield Mlstm(named, heads, size, columns, scale, epsilon)


def _small_numbers(shapes: ShapeInfo, nodes: Sequence[Node]) -> Iterator[float]:
    for tensor in (t for node in nodes if op_of(node) == "Add" for t in node.inputs if is_constant(t)):
        value = constant_value(shapes.graph, tensor)
        if value.size == 1 and 0 < float(value.reshape(-1)[0]) <= MAX_EPSILON:
            yield float(value.reshape(-1)[0])


def _compared(run: Runner, given: Mapping[str, Operand], chunks: Chunks, roles: Sequence[Mlstm]) -> Mlstm:
    """Return which of `roles` has the results of the nodes, for two draws of operands.  Raises NoScan if none has."""
    length = chunks.length
    if not isinstance(length, int):
        raise NoScan("its length is dynamic")
    rng, left = np.random.default_rng(0), list(roles)
    for batch in BATCHES:
        feeds = {}
        for name, each in given.items():
            feeds[name] = rng.standard_normal([size if isinstance(size, int) else batch for size in each.rows])
        feeds["x0"] += math.log(length)  # all tokens take part in the last results
        y = np.asarray(run(feeds)["y"])
        first = {name: each[:, :SCREENED] for name, each in feeds.items()}
        left = [each for each in left if _agrees(each, first, y[:, :SCREENED], 0)]
        left = [each for each in left if _agrees(each, feeds, y, MIN_SIDE)]
    if not left:
        raise NoScan("it computes something else: no roles of its operands make the steps of an mLSTM have its results")
    return left[0]


def _agrees(roles: Mlstm, feeds: Mapping[str, Array], y: Array, min_side: float) -> bool:
    """Return whether the steps have these results, and a share of `min_side` or more has each side of the maximum."""
    results, sums, maxima = roles.steps(feeds)
    sums, least = roles.scale * sums, np.exp(-maxima)
    if not min_side <= (sums > least).mean() <= 1 - min_side:
        return False
    expected = roles.scale * results / (np.maximum(sums, least) + roles.epsilon)[..., None]
    return bool(np.abs(y - expected).max() <= TOLERANCE * np.abs(expected).max())
