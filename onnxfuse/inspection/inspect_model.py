"""Collect the facts about a model, and the problems that it will have if onnxruntime runs it on a GPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.inspection.ort_kernels import ORT_DOMAINS, ort_kernels
from onnxfuse.inspection.placement import Placement, Scope, place, scopes_of
from onnxfuse.inspection.quantized import Quantized, quantized
from onnxfuse.ir.domain import DOMAIN, is_fused
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.file_bytes import file_bytes
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.load import load
from onnxfuse.ir.node import Node, op_of
from onnxfuse.ir.protos import ONNX_DOMAINS, is_constant, is_control_flow, nodes, operator_name, opset_of, tensors
from onnxfuse.ir.validate import element_count, size_of
from onnxfuse.passes.folded import node_label
from onnxfuse.printing import counted
from onnxfuse.report.blocks import Block as Repeated
from onnxfuse.report.blocks import Blocks, Item, find_blocks
from onnxfuse.verify.input_uses import integer_uses

DATA_DEPENDENT: Final = frozenset(
    {"Compress", "NonMaxSuppression", "NonZero", "Unique"}
)  # operators whose output shapes depend on values that the GPU computes
MAX_NAMED: Final = 3  # at most this many nodes are named in a sentence
MIN_COVERED: Final = 16  # a repeated block is reported if its copies have at least this many nodes together
MANY_BYTES: Final = 1 << 20  # half precision is suggested for models with at least this many bytes of float32 weights


@dataclass(frozen=True)
class Value:
    """An input or output of the model."""

    name: str
    dtype: str
    dims: tuple[str, ...] | None


@dataclass(frozen=True)
class Weights:
    """The constants of one dtype: their numbers of elements and bytes."""

    elements: int
    bytes: int


@dataclass(frozen=True)
class Finding:
    """A problem that the model will have on a GPU, and its remedy."""

    what: str
    details: tuple[str, ...]
    advice: str


@dataclass(frozen=True)
class Block:
    """A repeated block: the number of copies, the nodes per copy, and the name of the first node."""

    copies: int
    length: int
    first: str


@dataclass(frozen=True)
class Inspection:
    """The facts and findings that `onnxfuse inspect` prints about a model."""

    name: str
    maker: str
    opset: int
    bytes: int | None  # size of the files
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: Mapping[str, Weights]
    # Number of nodes by operator, the most frequent first.  Nodes in subgraphs and functions count, Constants do not.
    operators: Mapping[str, int]
    functions: int
    blocks: tuple[Block, ...]
    onnxruntime: str  # the version of onnxruntime whose CUDA kernels are known here
    findings: tuple[Finding, ...]
    no_cuda_graph: tuple[str, ...]  # why the model cannot be captured in a CUDA graph
    quantized: tuple[Quantized, ...] = ()  # the quantized operators, and attention with a cache


def inspect_model(path: Path) -> Inspection:
    """Inspect a model file.  Raises ModelError if it cannot be read."""
    model, folder = load(path)
    inlined = inline_functions(model).model
    shapes = read_and_infer(inlined, folder)
    scopes = tuple(scopes_of(shapes))
    kernels = ort_kernels()
    placed = place(scopes, kernels)
    weights = _weights(model)
    constants = {t.name for t in model.graph.initializer}
    inputs = tuple(_value(value) for value in model.graph.input if value.name not in constants)
    operators = Counter(_operator(node) for node in nodes(inlined.graph) if not is_constant(node))
    is_new = not any(map(is_fused, nodes(inlined.graph)))
    findings = (
        *_without_kernel(placed, is_new),
        *_of_libraries(scopes, inlined),
        *_copies(placed, is_new),
        *_precision(scopes, placed, weights),
        *_wide_masks(inlined, inputs),
    )
    return Inspection(
        path.name, " ".join(filter(None, (model.producer_name, model.producer_version))), opset_of(model),
        file_bytes(path, model), inputs, tuple(map(_value, model.graph.output)), weights,
        dict(operators.most_common()), len(model.functions), tuple(_blocks(model)), kernels.version, findings,
        tuple(_no_cuda_graph(inlined, placed)), tuple(quantized(inlined, scopes, placed)),
    )  # fmt: skip


# --- facts ------------------------------------------------------------------------------------------------------------


def _operator(node: onnx.NodeProto) -> str:
    """Return the operator of a node; that of a fused node is its fusion, because fusions have several functions."""
    if not is_fused(node):
        return operator_name(node)
    return f"{DOMAIN}::{next(each.s.decode(errors='replace') for each in node.attribute if each.name == 'fusion')}"


def _value(value: onnx.ValueInfoProto) -> Value:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return Value(value.name, (kind or "unknown").removesuffix("_type"), None)
    tensor = value.type.tensor_type
    dims = tuple(
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") and dim.dim_value >= 0 else "?")
        for dim in tensor.shape.dim
    )  # Paddle writes -1 for a size that is not known
    return Value(value.name, dtype_name(tensor.elem_type), dims if tensor.HasField("shape") else None)


def _weights(model: onnx.ModelProto) -> dict[str, Weights]:
    """Return the constants by dtype, the most bytes first."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors(model.graph, *model.functions):
        count = element_count(tensor.dims, f"tensor '{tensor.name}'")
        found[dtype_name(tensor.data_type)].append((count, size_of(tensor)))
    sums = {dtype: Weights(sum(c for c, _ in each), sum(b for _, b in each)) for dtype, each in found.items()}
    return dict(sorted(sums.items(), key=lambda pair: -pair[1].bytes))


def _blocks(model: onnx.ModelProto) -> Iterator[Block]:
    """Yield the outermost blocks that repeat, in execution order of their first nodes."""
    listed = [node for node in model.graph.node if not is_constant(node)]
    makers = {name: i for i, node in enumerate(listed) for name in node.output}
    reads = [[makers[name] for name in node.input if name in makers] for node in listed]
    found = find_blocks([operator_name(node) for node in listed], reads) if listed else Blocks((), ())
    blocks = [(found.order[_first(one)], one) for one in _repeated(found.items)]
    for index, one in sorted(blocks, key=lambda pair: pair[0]):
        if one.length > 1 and one.copies * one.length >= MIN_COVERED:
            yield Block(one.copies, one.length, listed[index].name or listed[index].output[0])


def _repeated(items: Iterable[Item]) -> Iterator[Repeated]:
    for item in items:
        if isinstance(item, Repeated):
            yield from [item] if item.copies > 1 else _repeated(item.items)


def _first(item: Item) -> int:
    return item if isinstance(item, int) else _first(item.items[0])


# --- problems ---------------------------------------------------------------------------------------------------------


def _without_kernel(placed: Placement, is_new: bool) -> Iterator[Finding]:
    """Yield findings about operators that run on the host because they have no CUDA kernel.

    `is_new` says that the model is not fused yet.
    """
    if not placed.without_kernel:
        return
    by_reason: dict[str, list[Node]] = defaultdict(list)
    for node, why in placed.without_kernel.items():
        by_reason[why].append(node)
    details = tuple(f"{len(each)}x {why}: {_named(each)}" for why, each in by_reason.items())
    advice = "Export with another opset or dtype, for which there is a kernel, or write the operator in others."
    advice += " `onnxfuse optimize` replaces those that it fuses." if is_new else ""
    yield Finding(f"{_nodes(len(placed.without_kernel))} on the CPU, for want of a CUDA kernel", details, advice)


def _of_libraries(scopes: Sequence[Scope], model: onnx.ModelProto) -> Iterator[Finding]:
    """Yield findings about operators that need a library of custom operators, because onnxruntime lacks them."""
    functions = {(f.domain, f.name) for f in model.functions}
    own = (*ONNX_DOMAINS, *ORT_DOMAINS)
    every = [node for scope in scopes for node in scope.shapes.graph.nodes]
    others = [n for n in every if (n.domain or "") not in own and (n.domain, n.op) not in functions]
    if others:
        counts = Counter(map(op_of, others))
        details = (f"{', '.join(f'{count}x {op}' for op, count in counts.items())}: {_named(others)}",)
        advice = (
            "A library that the session registers has them; without CUDA kernels there, tensors are copied for them."
        )
        yield Finding(f"{_nodes(len(others))} of other libraries", details, advice)


def _copies(placed: Placement, is_new: bool) -> Iterator[Finding]:
    """Yield findings about tensors that are copied between host and GPU in every run.

    `is_new` says that the model is not fused yet.
    """
    if not placed.copies:
        return
    details = []
    for to_host, text in ((True, "from the GPU to the host, which waits for the GPU"), (False, "to the GPU")):
        copies = [one for one in placed.copies if one.to_host == to_host]
        if copies:
            names = ", ".join(f"'{one.tensor}' for {_reader(one.reader)}" for one in copies[:MAX_NAMED])
            details.append(f"{len(copies)}x {text}: {names}{' ...' if len(copies) > MAX_NAMED else ''}")
    ahead = "`onnxfuse optimize` computes shape arithmetic ahead where it can. " if is_new else ""
    others = "the others" if is_new else "copies"
    advice = f"{ahead}Static sizes, and operators with CUDA kernels, remove {others}."
    yield Finding(f"{_copies_text(placed)} in every run", tuple(details), advice)


def _precision(scopes: Sequence[Scope], placed: Placement, weights: Mapping[str, Weights]) -> Iterator[Finding]:
    """Yield findings about operators that compute in float64, and about weights in float32."""
    double = [
        node
        for shapes in (scope.shapes for scope in scopes)
        for node in shapes.graph.nodes
        if node not in placed.folded and any(shapes.dtype(t) == TensorProto.DOUBLE for t in node.outputs)
    ]
    if double:
        counts = Counter(map(op_of, double)).most_common(MAX_NAMED)
        details = (f"{', '.join(f'{count} {op}' for op, count in counts)}: {_named(double)}",)
        advice = "Export in float32 or float16: an H100 computes float64 at half the rate of float32, an L40S at 1/64."
        yield Finding(f"{_nodes(len(double))} in float64", details, advice)
    wide = weights.get("float32", Weights(0, 0))
    if wide.bytes >= MANY_BYTES and wide.bytes > sum(each.bytes for each in weights.values()) / 2:
        advice = (
            "Tensor cores compute float16 and bfloat16 at twice the rate of TF32, and half as many bytes are read: "
            "`onnxfuse optimize MODEL OUT --dtype float16` converts the model, and measures the error."
        )
        yield Finding("weights in float32", (f"{wide.elements:,} of them",), advice)


def _wide_masks(model: onnx.ModelProto, inputs: Sequence[Value]) -> Iterator[Finding]:
    """Yield findings about inputs that are masks of 64-bit integers; masks whose ones are only counted are left out."""
    names = [one.name for one in inputs if one.dtype == "int64" and "mask" in one.name.lower()]
    uses = integer_uses(model) if names else {}
    names = [name for name in names if name not in uses or uses[name].kind != "ones"]
    if names:
        advice = "Export the model with a bool mask, which has an eighth of the bytes and needs no Cast."
        yield Finding("masks of int64", (", ".join(f"'{name}'" for name in names),), advice)


def _no_cuda_graph(model: onnx.ModelProto, placed: Placement) -> Iterator[str]:
    """Yield why onnxruntime cannot capture the model in a CUDA graph."""
    control = Counter(node.op_type for node in model.graph.node if is_control_flow(node))
    for op, count in control.items():
        what = "branch" if op == "If" else "iterations"
        yield f"{counted(count, op)}, whose {what} the host chooses"
    if placed.without_kernel:
        yield f"{_nodes(len(placed.without_kernel))} on the CPU"
    if placed.copies:
        yield _copies_text(placed)
    data = Counter(n.op_type for n in nodes(model.graph) if n.op_type in DATA_DEPENDENT and not n.domain)
    if data:
        yield f"{', '.join(f'{count} {op}' for op, count in data.items())}, whose sizes are read back from the GPU"
    others = [v.name for v in (*model.graph.input, *model.graph.output) if not v.type.HasField("tensor_type")]
    if others:
        yield f"'{others[0]}', which is not a tensor"


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _copies_text(placed: Placement) -> str:
    count = len(placed.copies)
    return f"{count} {'copy' if count == 1 else 'copies'} between host and GPU"


def _reader(node: Node) -> str:
    """Return the operator of a node; that of a fused node is its fusion, as `_operator` returns it."""
    fusion = node.attrs.get("fusion") if node.domain == DOMAIN else None
    return f"{DOMAIN}::{fusion}" if fusion else op_of(node)


def _named(found: Sequence[Node]) -> str:
    return ", ".join(f"'{node_label(node)}'" for node in found[:MAX_NAMED]) + (" ..." if len(found) > MAX_NAMED else "")
