"""What each operator of a model takes: a fused one as a kernel and as its body, beside a copy of the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from onnxfuse.bench.timing import (
    WARM_UP,
    Bound,
    Provider,
    bind,
    bytes_of,
    cache_eviction,
    copy_rate,
    interleaved,
    runs_within,
    start,
)
from onnxfuse.errors import OnnxfuseError
from onnxfuse.model.files import size_of
from onnxfuse.model.graph import DOMAIN
from onnxfuse.model.lookups import lookups
from onnxfuse.model.protos import without
from onnxfuse.provider.preferences import Tune
from onnxfuse.verify.session import first_line

OTHER = "onnxruntime"  # runs a node that nothing fused
COPIES = 9  # of an operator in one graph: the time of a node is that of eight more
SECONDS = {"kernel": 0.3, "body": 0.3, OTHER: 0.1}  # for one operator
CACHE = 64 * 2**20  # bytes of weights that may stay in a cache from one node to the next: an H200's L2 has 60 MiB
# What is no work on a device, or is no operator of tensors.
UNTIMED = re.compile("Constant|If|Loop|Random.*|Scan|Shape|Size|.*(Optional|Sequence|String).*")
NOT_A_SIZE = {"fusion", "operands", "output_types", "output_ranks", "attributes"}


@dataclass(frozen=True)
class OpTime:
    """One operator at one combination of shapes: seconds of a node, and the bytes it has to move.

    `how` is kernel, body, or OTHER, where the time is in `body`.
    """

    fusion: str  # or the ONNX operator
    nodes: tuple[str, ...]
    shapes: tuple[str, ...]
    attributes: Mapping[str, Any]
    how: str
    why: str
    bytes: int
    kernel: float | None = None
    body: float | None = None
    share: float | None = None  # of the rate of a copy that moves the same bytes
    cuda_graph: bool = False
    error: str = ""

    @property
    def faster(self) -> str | None:
        """Kernel or body; None where one of them was not timed."""
        if self.kernel is None or self.body is None:
            return None
        return "kernel" if self.kernel <= self.body else "body"

    @property
    def seconds(self) -> float | None:
        """Of a node as the session runs it."""
        return self.kernel if self.how == "kernel" else self.body

    def to_json(self) -> dict[str, Any]:
        """Times in microseconds."""
        result = asdict(self)
        for name in "kernel", "body":
            value = result.pop(name)
            result[f"{name}_us"] = None if value is None else round(1e6 * value, 3)
        result["share"] = None if self.share is None else round(self.share, 4)
        return {**result, "nodes": list(self.nodes), "shapes": list(self.shapes)}


@dataclass(frozen=True)
class _Op:
    """Nodes that do the same on tensors of the same shapes; the first of them is timed."""

    model: onnx.ModelProto
    folder: Path | None
    nodes: tuple[onnx.NodeProto, ...]
    values: Mapping[str, Any]
    options: Mapping[str, Any]
    tune: Tune


def op_times(
    model: onnx.ModelProto,
    folder: Path | None,
    feeds: Mapping[str, Any],
    provider: Provider,
    runs: Sequence[Any],
    cuda_graph: bool,
    progress: Callable[[str, int, int], None],
    *,
    options: Mapping[str, Any] | None = None,
    only_kernels: bool = False,
    others: bool = False,
    tune: Tune = "cached",
) -> list[OpTime]:
    """The fused nodes of the main graph, on the values that they meet in a run with `feeds`; slowest first.

    runs          what `explain_session` says of the session whose nodes they are
    options       of the provider
    only_kernels  leave out what runs as its body
    others        also the nodes that no fusion took
    tune          "never": of a kernel's candidates the first runs, unmeasured
    """
    how = {run.node: run for run in runs}
    chosen = [n for n in model.graph.node if n.domain == DOMAIN or (others and not UNTIMED.fullmatch(n.op_type))]
    values = _values(model, chosen, folder, feeds, provider, options or {})
    ops = [_Op(model, folder, nodes, values, options or {}, tune) for nodes in _alike(model, chosen, values)]
    if only_kernels:
        ops = [op for op in ops if (run := how.get(name_of(op.nodes[0]))) and run.how == "kernel"]
    result = []
    for done, op in enumerate(ops):
        progress("time the operators", done, len(ops))
        run = how.get(name_of(op.nodes[0]))
        unknown = "body" if op.nodes[0].domain == DOMAIN else OTHER
        row = _described(op, run.how if run else unknown, run.why if run else "")
        try:
            result.append(_timed(op, row, provider, cuda_graph))
        except Exception as error:  # whatever onnxruntime raises belongs in the table
            result.append(replace(row, error=first_line(error)))
    return sorted(result, key=lambda row: -(row.seconds or 0.0) * len(row.nodes))


def name_of(node: onnx.NodeProto) -> str:
    """Of a node; one without a name is called by its output."""
    return node.name or node.output[0]


# --- what they are ---------------------------------------------------------------------------------------------------


def _values(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    folder: Path | None,
    feeds: Mapping[str, Any],
    provider: Provider,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """What the nodes read and write in one run, as OrtValues on the device."""
    weights = {t.name for t in (*model.graph.initializer, *_constants(model))} | {i.name for i in model.graph.input}
    wanted = {name for node in nodes for name in (*node.input, *node.output) if name and name not in weights}
    open_model = without(model, "graph")
    open_model.graph.CopyFrom(model.graph)
    present = {o.name for o in model.graph.output}
    open_model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted - present))
    session = start(open_model, folder, provider, options=options)
    bound = bind(session, feeds, provider, None, int(options.get("device_id", 0)))
    bound.run()
    return {**feeds, **bound.values()}


def _alike(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], values: Mapping[str, Any]
) -> list[tuple[onnx.NodeProto, ...]]:
    """The nodes, those together that do the same on tensors of the same shapes."""
    weights = {t.name: t for t in (*model.graph.initializer, *_constants(model))}
    groups: dict[object, list[onnx.NodeProto]] = {}
    for node in nodes:
        shapes = tuple(_shape(name, weights, values) for name in node.input)
        attributes = sorted(a.SerializeToString() for a in node.attribute)
        groups.setdefault((node.op_type, shapes, tuple(attributes)), []).append(node)
    return list(map(tuple, groups.values()))


def _shape(name: str, weights: Mapping[str, onnx.TensorProto], values: Mapping[str, Any]) -> str:
    if not name:
        return "-"
    dims = _dims(name, weights, values)
    element = weights[name].data_type if name in weights else _type(values[name])[1]
    dtype = onnx.TensorProto.DataType.Name(element).lower()
    return f"{'x'.join(map(str, dims)) or '()'} {dtype}"


def _dims(name: str, weights: Mapping[str, onnx.TensorProto], values: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(weights[name].dims) if name in weights else _type(values[name])[0]


def _type(value: Any) -> tuple[tuple[int, ...], int]:
    """Dims and ONNX dtype of an array or an OrtValue."""
    if hasattr(value, "element_type"):
        return tuple(value.shape()), int(value.element_type())
    return value.shape, int(helper.np_dtype_to_tensor_dtype(value.dtype))


def _described(op: _Op, how: str, why: str) -> OpTime:
    node = op.nodes[0]
    weights = {t.name: t for t in (*op.model.graph.initializer, *_constants(op.model))}
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    numbers = {name: value for name, value in attributes.items() if name not in NOT_A_SIZE}
    plain = {k: v.decode() if isinstance(v, bytes) else v if isinstance(v, int | float) else list(v)
             for k, v in numbers.items()}  # fmt: skip
    shapes = tuple(_shape(name, weights, op.values) for name in node.input)
    fusion = attributes["fusion"].decode() if "fusion" in attributes else node.op_type
    return OpTime(fusion, tuple(map(name_of, op.nodes)), shapes, plain, how, why, _moved(op, weights))


def _moved(op: _Op, weights: Mapping[str, onnx.TensorProto]) -> int:
    """Bytes that a node reads and writes; of a table in which rows are looked up, those of the rows."""
    node = op.nodes[0]
    names = dict.fromkeys(name for name in (*node.input, *node.output) if name)
    moved = {n: size_of(weights[n]) if n in weights else _bytes(op.values[n]) for n in names}
    body = next((f for f in op.model.functions if (f.domain, f.name) == (node.domain, node.op_type)), None)
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    kind = node.op_type if node.domain in ("", "ai.onnx") else ""
    for place, ids in lookups(kind, axis, node.input, body).items():
        table, rows = node.input[place], node.input[ids]
        if moved.get(table):
            (length, *_), count = _dims(table, weights, op.values), math.prod(_dims(rows, weights, op.values))
            moved[table] = min(moved[table], count * (moved[table] // length))
    return sum(moved.values())


def _bytes(value: Any) -> int:
    return bytes_of(value) if hasattr(value, "element_type") else int(value.nbytes)


# --- timing ----------------------------------------------------------------------------------------------------------


def _timed(op: _Op, row: OpTime, provider: Provider, cuda_graph: bool) -> OpTime:
    """Kernel and body in turns, each once and COPIES times in a graph, with nothing in the cache when it starts.

    So weights come from memory, as in a model whose weights exceed the cache, and of all nodes but the first, which
    the single one counts for, activations come from where a chain of nodes leaves them.
    """
    kinds = ("kernel", "body") if row.how == "kernel" else ("body",)
    counts = [(kind, copies) for kind in kinds for copies in (1, COPIES)]
    try:
        bound = [_bound(op, copies, kind == "kernel", provider, cuda_graph) for kind, copies in counts]
    except Exception:  # a body with a node on the CPU cannot be captured; for a single node the transfer would count
        if not cuda_graph or row.how == OTHER:
            raise
        return _timed(op, row, provider, False)
    count = runs_within(SECONDS[row.how] / sum(copies for _, copies in counts), bound[0].run)
    evict = cache_eviction(provider, int(op.options.get("device_id", 0)))
    medians = [each.median for each in interleaved([b.run for b in bound], count, evict)]
    times = {kind: max(medians[2 * i + 1] - medians[2 * i], 0.0) / (COPIES - 1) for i, kind in enumerate(kinds)}
    row = replace(row, kernel=times.get("kernel"), body=times["body"], cuda_graph=cuda_graph)
    rate = copy_rate(provider, row.bytes)
    share = row.bytes / row.seconds / rate if rate and row.seconds else None
    return replace(row, share=share)


def _bound(op: _Op, copies: int, kernels: bool, provider: Provider, cuda_graph: bool) -> Bound:
    from onnxfuse.provider.preferences import all_kernels
    from onnxfuse.provider.session import explain_session

    options = {**op.options, **({"enable_cuda_graph": 1} if cuda_graph else {})}
    model, feeds, shapes = _repeated(op, copies)
    prefer = all_kernels if kernels else None
    session = start(model, op.folder, provider, tune=op.tune, prefer=prefer, options=options)
    for run in explain_session(session) if kernels else ():
        if run.how != "kernel":
            raise OnnxfuseError(f"alone it runs as its body: {run.why}")
    places = {name: name.rpartition("@")[0] for name in shapes}
    bound = bind(session, feeds, provider, shapes, int(op.options.get("device_id", 0)), places)
    for _ in range(WARM_UP):
        bound.run()
    return bound


def _repeated(op: _Op, copies: int) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, tuple[int, ...]]]:
    """A model of so many copies of the operator, its inputs, and the shapes of its outputs.

    The copies read inputs of different names: onnxruntime would merge them otherwise. Weights that fit into a cache are
    copied too: in a model each node finds its own in memory.
    """
    node, model = op.nodes[0], without(op.model, "graph")
    weights = {t.name: t for t in (*op.model.graph.initializer, *_constants(op.model)) if t.name in node.input}
    shared = sum(map(size_of, weights.values())) > CACHE
    feeds, shapes = dict[str, Any](), dict[str, tuple[int, ...]]()
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


def _constants(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors in Constant nodes, under the names of their outputs."""
    for node in model.graph.node:
        tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and tensor is not None:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = node.output[0]
            yield copy
