"""Time each operator of a model alone, and a copy of as many bytes.

A fused node is timed as a kernel and as its body, the ONNX function that it calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper

from onnxfuse.analysis.flops import model_flops
from onnxfuse.analysis.gathered_tables import gathered_tables
from onnxfuse.errors import OnnxfuseError, first_line
from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.protos import copy_without
from onnxfuse.ir.validate import size_of
from onnxfuse.runtime.target import PlanChoice
from onnxfuse.tuning.bound_session import BoundSession, Provider, TimedModel, Value, size_of_value
from onnxfuse.tuning.dispatch import NodeDispatch, SessionSettings, all_kernels, explain_session
from onnxfuse.tuning.memory_rate import cache_eviction, copy_rate
from onnxfuse.tuning.product_rate import product_rate
from onnxfuse.tuning.timing import interleaved, runs_within

UNFUSED: Final = "onnxruntime"  # the value of `OpTime.how` for unfused nodes
COPIES: Final = 9  # copies of an operator in the larger graph: 8 more than in the other, so a node takes 1/8 more time
SECONDS_PER_OPERATOR: Final = {"kernel": 0.3, "body": 0.3, UNFUSED: 0.1}
# Copies of an operator share weights larger than this. Each has its own smaller weights, because shared ones would stay
# in the L2 cache (60 MiB on an H200).
MIN_SHARED_WEIGHT_BYTES: Final = 64 * 2**20
# Operators that are not timed, because they do no work on a device, or not on tensors.
UNTIMED: Final = re.compile("Constant|If|Loop|Random.*|Scan|Shape|Size|.*(Optional|Sequence|String).*")
DESCRIPTIONS: Final = {"fusion", "operands", "output_types", "output_ranks", "attributes"}  # metadata of fused nodes
Attribute = int | float | str | list[int] | list[float] | list[str]


@dataclass(frozen=True)
class OpTime:
    """The time of an operator at one combination of input shapes, in seconds per node, its bytes and its arithmetic."""

    fusion: str  # the fusion; for an unfused node, its ONNX operator
    nodes: tuple[str, ...]
    shapes: tuple[str, ...]  # shapes of the inputs, such as "4096x768 float16"
    attributes: Mapping[str, Attribute]
    how: str  # kernel, body, or UNFUSED; the time of an unfused node is in `body`
    why: str
    bytes: int
    flops: int | None = None  # floating-point operations of products, convolutions and attentions; None: not known
    kernel: float | None = None
    body: float | None = None
    share: float | None = None  # the time of a copy of as many bytes, as a share of the operator's time
    roofline: float | None = None  # the longer of that time and of a large product's for as many FLOPs, as such a share
    cuda_graph: bool = False  # whether it was timed in a CUDA graph
    error: str = ""  # why it was not timed

    @property
    def faster(self) -> str | None:
        """The faster of "kernel" and "body"; None if one of them was not timed."""
        if self.kernel is None or self.body is None:
            return None
        return "kernel" if self.kernel <= self.body else "body"

    @property
    def dtype(self) -> str:
        """The dtype of the first input, in which products are computed, such as "float16"; "" without inputs."""
        return self.shapes[0].rpartition(" ")[2] if self.shapes else ""

    @property
    def seconds(self) -> float | None:
        """Return the time of a node as the session runs it."""
        return self.kernel if self.how == "kernel" else self.body

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the times in microseconds."""
        result = asdict(self)
        for name in "kernel", "body":
            value = result.pop(name)
            result[f"{name}_us"] = None if value is None else round(1e6 * value, 3)
        for name in "share", "roofline":
            result[name] = None if result[name] is None else round(result[name], 4)
        return {**result, "nodes": list(self.nodes), "shapes": list(self.shapes)}


@dataclass(frozen=True)
class _Operator:
    """Nodes that compute the same on tensors of the same shapes; the first of them is timed."""

    whole: TimedModel
    nodes: tuple[onnx.NodeProto, ...]
    values: Mapping[str, Value]
    choice: PlanChoice

    @property
    def model(self) -> onnx.ModelProto:
        return self.whole.model


def op_times(
    whole: TimedModel,
    dispatches: Sequence[NodeDispatch],
    cuda_graph: bool,
    *,
    only_kernels: bool = False,
    unfused: bool = False,
    choice: PlanChoice = "measured",
) -> list[OpTime]:
    """Time the fused nodes of a model's main graph, on operands from a run of the model; return the slowest first.

    dispatches    how the nodes run in a session of the model
    cuda_graph    time in a CUDA graph, where the operator can be captured
    only_kernels  leave out the nodes that run as ONNX functions
    unfused       also time the unfused nodes
    choice        which of a kernel's candidate plans runs
    """
    model, how = whole.model, {each.node: each for each in dispatches}
    chosen = [n for n in model.graph.node if is_fused(n) or (unfused and not UNTIMED.fullmatch(n.op_type))]
    values = _values(whole, chosen)
    ops = [_Operator(whole, nodes, values, choice) for nodes in _equal_nodes(model, chosen, values)]
    if only_kernels:
        ops = [op for op in ops if (one := how.get(node_name(op.nodes[0]))) and one.how == "kernel"]
    result = []
    for done, op in enumerate(ops):
        whole.progress("time the operators", done, len(ops))
        dispatch = how.get(node_name(op.nodes[0]))
        unknown = "body" if is_fused(op.nodes[0]) else UNFUSED
        row = _untimed(op, dispatch.how if dispatch else unknown, dispatch.why if dispatch else "")
        try:
            result.append(_timed(op, row, cuda_graph))
        except Exception as error:  # any error of onnxruntime is shown in the table
            result.append(replace(row, error=first_line(error)))
    return sorted(result, key=lambda row: -(row.seconds or 0.0) * len(row.nodes))


def node_name(node: onnx.NodeProto) -> str:
    """Return the name of a node, or of its first output if it has none."""
    return node.name or node.output[0]


def timeline(model: onnx.ModelProto, ops: Sequence[OpTime]) -> tuple[tuple[str, OpTime], ...]:
    """Return the names and times of the nodes of a model's main graph that were timed, in the order of the graph."""
    by_node = {name: op for op in ops for name in op.nodes if op.seconds is not None}
    names = map(node_name, model.graph.node)
    return tuple((name, by_node[name]) for name in names if name in by_node)


# --- operators -------------------------------------------------------------------------------------------------------


def _values(whole: TimedModel, nodes: Sequence[onnx.NodeProto]) -> dict[str, Value]:
    """Run the model; return its inputs, and the tensors that the nodes read and write, as values on the device."""
    model = whole.model
    weights = _weights(model).keys() | {i.name for i in model.graph.input}
    wanted = {name for node in nodes for name in (*node.input, *node.output) if name and name not in weights}
    open_model = copy_without(model, "graph")
    open_model.graph.CopyFrom(model.graph)
    present = {o.name for o in model.graph.output}
    open_model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted - present))
    opened = replace(whole, model=open_model)
    bound = opened.bind(opened.start())
    bound.run()
    return {**whole.feeds, **bound.values()}


def _equal_nodes(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], values: Mapping[str, Value]
) -> list[tuple[onnx.NodeProto, ...]]:
    """Group the nodes that compute the same on tensors of the same shapes."""
    weights = _weights(model)
    groups: dict[object, list[onnx.NodeProto]] = {}
    for node in nodes:
        shapes = tuple(_shape(name, weights, values) for name in node.input)
        attributes = sorted(a.SerializeToString() for a in node.attribute)
        groups.setdefault((node.op_type, shapes, tuple(attributes)), []).append(node)
    return list(map(tuple, groups.values()))


def _shape(name: str, weights: Mapping[str, onnx.TensorProto], values: Mapping[str, Value]) -> str:
    if not name:
        return "-"
    dims = _dims(name, weights, values)
    element = weights[name].data_type if name in weights else _type(values[name])[1]
    return _described(dims, element)


def _described(dims: Sequence[int], element: int) -> str:
    return f"{'x'.join(map(str, dims)) or '()'} {onnx.TensorProto.DataType.Name(element).lower()}"


def _dims(name: str, weights: Mapping[str, onnx.TensorProto], values: Mapping[str, Value]) -> tuple[int, ...]:
    return tuple(weights[name].dims) if name in weights else _type(values[name])[0]


def _type(value: Value) -> tuple[tuple[int, ...], int]:
    """Return the dims and the ONNX dtype of a value."""
    if isinstance(value, np.ndarray):
        return value.shape, int(helper.np_dtype_to_tensor_dtype(value.dtype))
    return tuple(value.shape()), int(value.element_type())


def _untimed(op: _Operator, how: str, why: str) -> OpTime:
    """Return the OpTime of an operator that is not timed yet; `why` is the reason for `how`."""
    node = op.nodes[0]
    weights = _weights(op.model)
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    plain = {name: _plain(value) for name, value in attributes.items() if name not in DESCRIPTIONS}
    shapes = tuple(_shape(name, weights, op.values) for name in node.input)
    fusion = attributes["fusion"].decode() if "fusion" in attributes else node.op_type
    names, flops = tuple(map(node_name, op.nodes)), model_flops(_repeated(op, 1)[0], op.whole.folder)
    return OpTime(fusion, names, shapes, plain, how, why, _bytes_moved(op, weights), flops)


def _plain(value: Any) -> Any:
    """Return the value of an attribute as JSON can hold it; of a tensor its shape and dtype."""
    if isinstance(value, onnx.TensorProto):
        return _described(value.dims, value.data_type)
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, int | float) else list(map(_plain, value))


def _bytes_moved(op: _Operator, weights: Mapping[str, onnx.TensorProto]) -> int:
    """Return the bytes that a node reads and writes; if it gathers rows of a table, only these rows count."""
    node = op.nodes[0]
    names = dict.fromkeys(name for name in (*node.input, *node.output) if name)
    moved = {n: size_of(weights[n]) if n in weights else _bytes(op.values[n]) for n in names}
    body = next((f for f in op.model.functions if (f.domain, f.name) == (node.domain, node.op_type)), None)
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    kind = node.op_type if node.domain in ("", "ai.onnx") else ""
    for operand, indices in gathered_tables(kind, axis, node.input, body).items():
        table, rows = node.input[operand], node.input[indices]
        if moved.get(table):
            (length, *_), count = _dims(table, weights, op.values), math.prod(_dims(rows, weights, op.values))
            moved[table] = min(moved[table], count * (moved[table] // length))
    return sum(moved.values())


def _bytes(value: Value) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else size_of_value(value)


# --- timing ----------------------------------------------------------------------------------------------------------


def _timed(op: _Operator, row: OpTime, cuda_graph: bool) -> OpTime:
    """Time the kernel and the body in turns, each in a graph with one copy of the operator and in one with COPIES.

    The cache is evicted before each graph.  The time of a node is the difference between the two graphs, divided by the
    number of further copies.  The further copies read weights from memory, as in a model whose weights exceed the
    cache, and they find activations where the copy before them left these.
    """
    kinds = ("kernel", "body") if row.how == "kernel" else ("body",)
    counts = [(kind, copies) for kind in kinds for copies in (1, COPIES)]
    try:
        bound = [_bound(op, copies, kind == "kernel", cuda_graph) for kind, copies in counts]
    except Exception:  # CUDA graphs cannot capture an ONNX function with a node on the CPU
        if not cuda_graph or row.how == UNFUSED:  # without a graph, copies to the CPU would count for unfused nodes
            raise
        return _timed(op, row, False)
    count = runs_within(SECONDS_PER_OPERATOR[row.how] / sum(copies for _, copies in counts), bound[0].run)
    evict = cache_eviction(op.whole.provider, op.whole.ordinal)
    medians = [each.median for each in interleaved([b.run for b in bound], count, evict)]
    times = {kind: max(medians[2 * i + 1] - medians[2 * i], 0.0) / (COPIES - 1) for i, kind in enumerate(kinds)}
    row = replace(row, kernel=times.get("kernel"), body=times["body"], cuda_graph=cuda_graph)
    return _with_shares(row, op.whole.provider)


def _with_shares(row: OpTime, provider: Provider) -> OpTime:
    """Return the row with the shares of its time that a copy needs, and that the device's roofline allows."""
    rate, seconds = copy_rate(provider, row.bytes), row.seconds
    if not rate or not seconds:
        return row
    share = row.bytes / seconds / rate
    peak = product_rate(provider, row.dtype) if row.flops else math.inf
    if row.flops is None or peak is None:
        return replace(row, share=share)
    return replace(row, share=share, roofline=max(share, row.flops / seconds / peak))


def _bound(op: _Operator, copies: int, kernels: bool, cuda_graph: bool) -> BoundSession:
    """Start a session with `copies` copies of the operator, and warm it up.

    Raises OnnxfuseError if `kernels` is true and a copy does not run as a kernel.
    """
    model, feeds, shapes = _repeated(op, copies)
    repeated = replace(op.whole, model=model, feeds=feeds)
    session = repeated.start(SessionSettings(all_kernels, op.choice) if kernels else None, cuda_graph=cuda_graph)
    for each in explain_session(session) if kernels else ():
        if each.how != "kernel":
            raise OnnxfuseError(f"alone it runs as its body: {each.why}")
    return repeated.bind(session, shapes, {name: name.rpartition("@")[0] for name in shapes}).warm_up()


def _repeated(op: _Operator, copies: int) -> tuple[onnx.ModelProto, dict[str, Value], dict[str, tuple[int, ...]]]:
    """Return a model with `copies` copies of the operator, its inputs, and the shapes of its outputs.

    The copies read inputs of different names, because onnxruntime would merge equal nodes. Weights that fit into the
    L2 cache are copied, too: in a model, each node reads its own weights from memory.
    """
    node, model = op.nodes[0], copy_without(op.model, "graph")
    weights = {name: tensor for name, tensor in _weights(op.model).items() if name in node.input}
    shared = sum(map(size_of, weights.values())) > MIN_SHARED_WEIGHT_BYTES
    feeds, shapes = dict[str, Value](), dict[str, tuple[int, ...]]()
    for i in range(copies):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{node.name or node.output[0]}@{i}"
        copy.input[:] = [name if (shared and name in weights) or not name else f"{name}@{i}" for name in node.input]
        copy.output[:] = [name and f"{name}@{i}" for name in node.output]
        model.graph.node.append(copy)
        feeds |= {f"{name}@{i}": op.values[name] for name in node.input if name and name not in weights}
        for name in filter(None, node.output):
            dims, dtype = _type(op.values[name])
            shapes[f"{name}@{i}"] = dims
            model.graph.output.append(helper.make_tensor_value_info(f"{name}@{i}", dtype, dims))
    model.graph.name = node.op_type
    model.graph.input.extend(
        helper.make_tensor_value_info(name, dtype, dims) for name, (dims, dtype) in
        ((name, _type(value)) for name, value in feeds.items())
    )  # fmt: skip
    for name in dict.fromkeys(name for name in node.input if name in weights):
        for i in range(1 if shared else copies):
            model.graph.initializer.add().CopyFrom(weights[name])
            model.graph.initializer[-1].name = name if shared else f"{name}@{i}"
    return model, feeds, shapes


def _weights(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers by name, and the tensors of Constant nodes by the names of their outputs."""
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and tensor is not None:
            found[node.output[0]] = copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = node.output[0]
    return found
