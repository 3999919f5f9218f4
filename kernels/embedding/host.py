"""The plans of embedding_layer_norm and embedding_rms_norm: the host side of embedding.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.norms.norm import norm_tilings, present, weight_item_bytes
from onnxfuse.kernels.norms.rows import USUAL_THREADS, RowTiling, row_launch, row_tiling, streamed_rows
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    Defines,
    all_constant,
    check_element_count,
    int64,
    known_equal,
    operand_pointer,
    operand_spec,
    required_spec,
    unsupported_dtype,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Plan, Pointer, Scalar, Struct, TensorSpec
from onnxfuse.runtime.symint import expect_equal, is_symbolic

IDS: Final = {"int32": "int32_t", "int64": "int64_t"}  # id types in embedding.cuh, by dtype
TABLES: Final = (("table", "ids"), ("table_2", "ids_2"), ("table_3", "ids_3"))
TENSORS: Final = ("added", "row")
PER_ROW, PER_POSITION, PER_BATCH, PER_ALL = range(4)  # values of the enum Broadcast in embedding.cuh


@dataclass(frozen=True)
class RowSource:
    """The source of the rows of one addend: a table with ids, or a tensor.

    `lead` is the shape of the ids, or the tensor's shape without its last axis.
    """

    name: str
    values: TensorSpec
    lead: tuple[int, ...]
    ids: str = ""  # the operand with the ids; "": the source is a tensor
    ids_dtype: str = "int64"


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    names = {ids for _, ids in TABLES}
    for name, dtype in zip(node.operands, input_dtypes, strict=True):
        if name in names and dtype not in IDS:
            return f"{node.fusion}: {name} is {dtype}; the kernel takes {', '.join(IDS)}"
    floats = [(n, dtype) for n, dtype in zip(node.operands, input_dtypes, strict=True) if n not in names]
    rest = FusedNode(node.fusion, node.name, tuple(n for n, _ in floats), node.attributes, node.output_dtypes)
    return unsupported_dtype(rest, [dtype for _, dtype in floats])


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit together.

    Arguments of embedding_layer_norm are the struct RowSource for the tokens and for two addends, then scale, bias, y,
    the sum, epsilon, seq and the number of rows. Arguments of embedding_rms_norm are RowSource for the tokens, then
    scale, y, the sum, the factor, epsilon and the number of rows.
    """
    ids, (tokens, *addends) = required_spec(node, inputs, "ids"), _sources(node, inputs)
    length, rows = tokens.values.shape[-1], math.prod(ids.shape)
    _check(node, inputs, [tokens, *addends], length)
    floats = [tensor for tensor in inputs if tensor.dtype in STORAGE]
    aligned = all(tensor.aligned for tensor in floats)
    outputs = tuple(TensorSpec((*ids.shape, length), dtype, aligned) for dtype in node.output_dtypes)
    if rows * length == 0:
        return [Plan(outputs, ())]
    if is_symbolic(rows) and rows >= 2**32:
        raise ValueError(f"{node.fusion}: {rows} rows are more than a plan for any number of them takes")
    read = [source.values for source in (tokens, *addends)]
    item_bytes = [ITEM_BYTES[tensor.dtype] for tensor in read]
    width, weight_bytes = vector_width([*read, *outputs], length, weights=floats), weight_item_bytes(node, inputs)
    defines = {
        **_types(node, inputs, outputs), **_addends(node, tokens, addends, ids.shape), "ROW": length,
        "STREAMED": streamed_rows(
            [*outputs, TensorSpec(outputs[0].shape, tokens.values.dtype)], length, width
        ),
        "WEIGHTS_CONSTANT": all_constant(present(node, inputs, "scale", "bias")),
        "INDEX_T": "uint32_t" if rows < 2**32 else "uint64_t",
    }  # fmt: skip
    arguments = _arguments(node, [tokens, *addends], len(outputs), ids.shape)
    return [
        Plan(outputs, (row_launch(node.fusion, tiling, rows, defines, arguments, item_bytes, device),))
        for tiling in _tilings(rows, length, width, item_bytes, weight_bytes, device)
    ]


def _tilings(
    rows: int, length: int, width: int, item_bytes: Sequence[int], weight_bytes: int, device: Device
) -> list[RowTiling]:
    """Return the same tilings as other norms; but for three inputs, return only one tiling, without a persistent grid.

    With three inputs, the threads of a persistent grid would have too few registers.

    The three inputs are never all in fp32 registers at once. If one warp computes a row, it therefore needs no more
    registers than with two inputs, except for single-element accesses with a symbolic number of rows. If several warps
    compute a row, only one block per multiprocessor is resident, not two, so that each thread has twice the registers.
    """
    if len(item_bytes) < 3:
        return norm_tilings(rows, length, width, item_bytes, weight_bytes, USUAL_THREADS, device)
    usual = row_tiling(rows, length, width, device, item_bytes, weight_bytes)
    if usual.threads <= 32:
        counted = item_bytes if is_symbolic(rows) and width == 1 else item_bytes[:2]
        return [row_tiling(rows, length, width, device, counted, weight_bytes)]
    return [usual if usual.in_shared else replace(usual, min_blocks=1)]


def _sources(node: FusedNode, inputs: Sequence[TensorSpec]) -> list[RowSource]:
    """Return the sources that the node has, the table of the tokens first."""
    found = []
    for name, ids_name in TABLES:
        if (table := operand_spec(node, inputs, name)) is not None:
            ids = required_spec(node, inputs, ids_name)
            found.append(RowSource(name, table, ids.shape, ids_name, ids.dtype))
    tensors = ((name, operand_spec(node, inputs, name)) for name in TENSORS)
    return found + [RowSource(name, tensor, tensor.shape[:-1]) for name, tensor in tensors if tensor is not None]


def _check(node: FusedNode, inputs: Sequence[TensorSpec], sources: Sequence[RowSource], length: int) -> None:
    """Raise ValueError unless rows and weights have `length` elements, and the kernel can add all of the sources."""
    if len(sources) > 1 + 2 * (node.fusion == "embedding_layer_norm"):
        raise ValueError(f"{node.fusion}: {', '.join(source.name for source in sources)} are too many to add")
    for source in sources:
        if source.values.shape[-1] != length:
            found = list(source.values.shape)
            raise ValueError(f"{node.fusion}: {source.name} has shape {found}; required rows of {length} elements")
    for name in ("scale", "bias"):
        weight = operand_spec(node, inputs, name)
        if weight is not None:
            check_element_count(node, name, weight, length)


def _broadcast(node: FusedNode, source: RowSource, ids: tuple[int, ...]) -> int:
    """Return, as a value of the enum Broadcast, how the rows of an addend broadcast to the token ids.

    `ids` is the shape (..., seq) of the token ids.  The addend's number of positions can be another dynamic dim than
    seq; at run time, the two are usually equal.
    """
    lead = (1,) * (len(ids) - len(source.lead)) + source.lead
    if len(lead) == len(ids):
        full = [_is_full(size, of) for size, of in zip(lead, ids, strict=True)]
        single = [not (is_symbolic(size) and whole) and size == 1 for size, whole in zip(lead, full, strict=True)]
        if all(full):
            return PER_ROW
        if all(single):
            return PER_ALL
        if full[-1] and all(single[:-1]):
            return PER_POSITION
        if single[-1] and all(full[:-1]):
            return PER_BATCH
    name = source.ids or source.name
    raise ValueError(f"{node.fusion}: {name} has {list(source.lead)} rows, which do not broadcast over {list(ids)} ids")


def _is_full(size: int, full: int) -> bool:
    """Return whether an addend's axis is as long as the ids' axis; a constant size never equals a dynamic dim."""
    if known_equal((size,), (full,)):
        return True
    return is_symbolic(size) and expect_equal(size, full)


def _types(node: FusedNode, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Defines:
    """Return the macros for storage types of weights and outputs; an absent operand gets any type."""
    scale, bias = required_spec(node, inputs, "scale"), operand_spec(node, inputs, "bias")
    return {
        "SCALE_T": STORAGE[scale.dtype],
        "BIAS_T": STORAGE[(bias or scale).dtype],
        "Y_T": STORAGE[outputs[0].dtype],
        "SUM_T": STORAGE[outputs[-1].dtype],
        "BIAS": int(bias is not None),
        "SUM": int(len(outputs) > 1),
        "FACTOR": int("factor" in node.attributes),
    }


def _addends(node: FusedNode, tokens: RowSource, addends: Sequence[RowSource], ids: tuple[int, ...]) -> Defines:
    """Return the macros that describe tokens and addends; an absent addend gets the types of the tokens."""
    defines: Defines = {"ADDENDS": len(addends), "TABLE_T": STORAGE[tokens.values.dtype]}
    defines["IDS_T"] = IDS[tokens.ids_dtype]
    for number, source in enumerate([*addends, tokens, tokens][:2], 2):
        defines[f"TYPE_{number}"] = STORAGE[source.values.dtype]
        defines[f"IDS_{number}_T"] = IDS[source.ids_dtype]
        defines[f"GATHERED_{number}"] = int(bool(source.ids))
        defines[f"BROADCAST_{number}"] = _broadcast(node, source, ids)
    return defines


def _arguments(node: FusedNode, sources: Sequence[RowSource], outputs: int, ids: tuple[int, ...]) -> list[Argument]:
    """Return the arguments of the kernel, as `candidates` lists them."""
    adds = node.fusion == "embedding_layer_norm"
    read: list[Argument] = []
    for source in sources:
        count = source.values.shape[0] if source.ids else 0
        read.append(Struct((operand_pointer(node, source.name), operand_pointer(node, source.ids), *int64(count))))
    read += [Struct((ABSENT, ABSENT, *int64(0)))] * (3 * adds - len(read))
    weights = [operand_pointer(node, name) for name in (("scale", "bias") if adds else ("scale",))]
    written = [Pointer("output", 0), Pointer("output", 1) if outputs > 1 else ABSENT]
    factor = [] if adds else [Scalar(node.number("factor", 1.0), "float32")]
    epsilon = Scalar(node.number("epsilon", 1e-5), "float32")
    seq = [Scalar(ids[-1], "int64")] if adds else []
    return [*read, *weights, *written, *factor, epsilon, *seq, Scalar(math.prod(ids), "int64")]
