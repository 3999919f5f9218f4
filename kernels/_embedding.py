"""What the hosts of embedding_layer_norm and embedding_rms_norm have in common: see embedding.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._norms import norm_tilings, present, weight_item_bytes
from onnxfuse.kernels._rows import USUAL_THREADS, Tiling, row_launch, tiling
from onnxfuse.kernels._types import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    Defines,
    constant,
    operand,
    product,
    refuse_dtypes,
    require_size,
    required,
    spec,
    streamed,
    width,
)
from onnxfuse.provider.plan import Argument, Device, FusedNode, Plan, Pointer, Scalar, TensorSpec

IDS: Final = {"int32": "int32_t", "int64": "int64_t"}  # embedding.cuh's names
TABLES: Final = (("table", "ids"), ("table_2", "ids_2"), ("table_3", "ids_3"))
TENSORS: Final = ("added", "row")
OF_ROW, OF_POSITION, OF_BATCH, OF_ALL = range(4)  # embedding.cuh's Place


@dataclass(frozen=True)
class Source:
    """Rows of a table by ids of shape `lead`, or rows of a tensor, which has `lead` of them itself."""

    name: str
    values: TensorSpec
    lead: tuple[int, ...]
    ids: str = ""
    ids_dtype: str = "int64"


def refuse(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Why there is no kernel for these dtypes; None where there is."""
    names = {ids for _, ids in TABLES}
    for name, dtype in zip(node.operands, input_dtypes, strict=True):
        if name in names and dtype not in IDS:
            return f"{node.fusion}: {name} is {dtype}; the kernel takes {', '.join(IDS)}"
    floats = [(n, dtype) for n, dtype in zip(node.operands, input_dtypes, strict=True) if n not in names]
    rest = FusedNode(node.fusion, node.name, tuple(n for n, _ in floats), node.attributes, node.output_dtypes)
    return refuse_dtypes(rest, [dtype for _, dtype in floats])


def embedding_candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit together.

    Kernels take table, ids and the table's rows, the same of two addends (embedding_layer_norm only), scale, bias (the
    same), y, the sum, the factor (embedding_rms_norm only), epsilon, seq (embedding_layer_norm only) and the number of
    rows.
    """
    ids, (tokens, *addends) = required(node, inputs, "ids"), _sources(node, inputs)
    length, rows = tokens.values.shape[-1], product(ids.shape)
    _check(node, inputs, [tokens, *addends], length)
    floats = [tensor for tensor in inputs if tensor.dtype in STORAGE]
    aligned = all(tensor.aligned for tensor in floats)
    outputs = tuple(TensorSpec((*ids.shape, length), dtype, aligned) for dtype in node.output_dtypes)
    if rows * length == 0:
        return [Plan(outputs, ())]
    read = [source.values for source in (tokens, *addends)]
    item_bytes = [ITEM_BYTES[tensor.dtype] for tensor in read]
    defines = {
        **_types(node, inputs, outputs), **_addends(node, tokens, addends, ids.shape), "ROW": length,
        "STREAMED": streamed([*outputs, TensorSpec(outputs[0].shape, tokens.values.dtype)]),
        "WEIGHTS_CONSTANT": constant(present(node, inputs, "scale", "bias")),
        "INDEX_T": "uint32_t" if rows < 2**32 else "uint64_t",
    }  # fmt: skip
    arguments = _arguments(node, [tokens, *addends], len(outputs), ids.shape)
    wide, weight_bytes = width([*read, *outputs], length, weights=floats), weight_item_bytes(node, inputs)
    return [
        Plan(outputs, (row_launch(node.fusion, tiles, rows, defines, arguments, item_bytes, device),))
        for tiles in _tilings(rows, length, wide, item_bytes, weight_bytes, device)
    ]


def _tilings(
    rows: int, length: int, wide: int, item_bytes: Sequence[int], weight_bytes: int, device: Device
) -> list[Tiling]:
    """As of other norms; of three inputs one, without a loop, whose next row does not fit into registers beside this.

    Three vectors are never all in registers as numbers: a warp's row needs no more of these than with two. In large
    blocks, of which two are resident with fewer inputs, threads get twice the registers.
    """
    if len(item_bytes) < 3:
        return norm_tilings(rows, length, wide, item_bytes, weight_bytes, USUAL_THREADS, device)
    usual = tiling(rows, length, wide, device, item_bytes, weight_bytes)
    if usual.threads <= 32:
        return [tiling(rows, length, wide, device, item_bytes[:2], weight_bytes)]
    return [usual if usual.held else replace(usual, min_blocks=1)]


def _sources(node: FusedNode, inputs: Sequence[TensorSpec]) -> list[Source]:
    """Those that are there, the tokens' table first."""
    found = []
    for name, ids_name in TABLES:
        if (table := spec(node, inputs, name)) is not None:
            ids = required(node, inputs, ids_name)
            found.append(Source(name, table, ids.shape, ids_name, ids.dtype))
    tensors = ((name, spec(node, inputs, name)) for name in TENSORS)
    return found + [Source(name, tensor, tensor.shape[:-1]) for name, tensor in tensors if tensor is not None]


def _check(node: FusedNode, inputs: Sequence[TensorSpec], sources: Sequence[Source], length: int) -> None:
    if len(sources) > 1 + 2 * (node.fusion == "embedding_layer_norm"):
        raise ValueError(f"{node.fusion}: {', '.join(source.name for source in sources)} are too many to add")
    for source in sources:
        if source.values.shape[-1] != length:
            found = list(source.values.shape)
            raise ValueError(f"{node.fusion}: {source.name} has shape {found}; required rows of {length} elements")
    for name in ("scale", "bias"):
        weight = spec(node, inputs, name)
        if weight is not None:
            require_size(node, name, weight, length)


def _place(node: FusedNode, source: Source, ids: tuple[int, ...]) -> int:
    """How an addend, or its ids, broadcast over the ids of tokens, whose last axis is seq."""
    lead = (1,) * (len(ids) - len(source.lead)) + source.lead
    if len(lead) == len(ids) and all(size in (1, whole) for size, whole in zip(lead, ids, strict=True)):
        if lead == ids:
            return OF_ROW
        if product(lead) == 1:
            return OF_ALL
        if lead[-1] == ids[-1] and product(lead[:-1]) == 1:
            return OF_POSITION
        if lead[:-1] == ids[:-1]:
            return OF_BATCH
    name = source.ids or source.name
    raise ValueError(f"{node.fusion}: {name} has {list(source.lead)} rows, which do not broadcast over {list(ids)} ids")


def _types(node: FusedNode, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Defines:
    """Storage types of weights and outputs; an absent operand gets any."""
    scale, bias = required(node, inputs, "scale"), spec(node, inputs, "bias")
    return {
        "SCALE_T": STORAGE[scale.dtype],
        "BIAS_T": STORAGE[(bias or scale).dtype],
        "Y_T": STORAGE[outputs[0].dtype],
        "SUM_T": STORAGE[outputs[-1].dtype],
        "BIAS": int(bias is not None),
        "SUM": int(len(outputs) > 1),
        "FACTOR": int("factor" in node.attributes),
    }


def _addends(node: FusedNode, tokens: Source, addends: Sequence[Source], ids: tuple[int, ...]) -> Defines:
    defines: Defines = {"ADDENDS": len(addends), "TABLE_T": STORAGE[tokens.values.dtype]}
    defines["IDS_T"] = IDS[tokens.ids_dtype]
    for number, source in enumerate([*addends, tokens, tokens][:2], 2):
        defines[f"TYPE_{number}"] = STORAGE[source.values.dtype]
        defines[f"IDS_{number}_T"] = IDS[source.ids_dtype]
        defines[f"GATHERED_{number}"] = int(bool(source.ids))
        defines[f"PLACE_{number}"] = _place(node, source, ids)
    return defines


def _arguments(node: FusedNode, sources: Sequence[Source], outputs: int, ids: tuple[int, ...]) -> list[Argument]:
    adds = node.fusion == "embedding_layer_norm"
    read: list[Argument] = []
    for source in sources:
        count = Scalar(source.values.shape[0] if source.ids else 0, "int64")
        read += [operand(node, source.name), operand(node, source.ids), count]
    read += [ABSENT] * ((9 if adds else 3) - len(read))
    weights = [operand(node, name) for name in (("scale", "bias") if adds else ("scale",))]
    written = [Pointer("output", 0), Pointer("output", 1) if outputs > 1 else ABSENT]
    factor = [] if adds else [Scalar(float(node.attributes.get("factor", 1.0)), "float32")]
    epsilon = Scalar(float(node.attributes.get("epsilon", 1e-5)), "float32")
    seq = [Scalar(ids[-1], "int64")] if adds else []
    return [*read, *weights, *written, *factor, epsilon, *seq, Scalar(product(ids), "int64")]
