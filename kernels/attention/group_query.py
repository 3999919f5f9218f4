"""GroupQueryAttention: appends normalized and rotated rows to caches of keys and values, and attends to the caches.

Few queries take one launch, in which the blocks that read the end of a cache also write it.  Otherwise a first launch
prepares the queries and writes the caches, and attention over the present caches follows.  From quantized caches, the
first launch also writes the rows of all sequences to scratch memory, in the dtype of the queries, for the attention.

New rows are quantized first, and attended to as the cache holds them.  onnxruntime's CPU provider does this, too; its
CUDA provider attends to the rows of a first prompt as they are before.

The kernels read the length of each sequence on the device, from seqlens_k.  So grids depend on the sizes of the caches
only, and one CUDA graph of the launches serves sequences that grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final, cast

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.attention import decode, hopper
from onnxfuse.kernels.attention.cache import NO_TURNS, Cache, Turns
from onnxfuse.kernels.attention.implementations import MAX_IMPLEMENTATIONS, implementations
from onnxfuse.kernels.attention.mma import MAX_HEAD_DIM
from onnxfuse.kernels.attention.operands import score_tensor
from onnxfuse.kernels.attention.problem import Attention, HeadNumbers, Quantized
from onnxfuse.kernels.attention.with_cache import of_outputs
from onnxfuse.kernels.epilogue_node import moved
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    check_element_count,
    int32,
    operand_pointer,
    operand_spec,
    required_spec,
)
from onnxfuse.runtime.plan import (
    Device,
    FusedNode,
    Kernel,
    Launch,
    NoAlias,
    Plan,
    Pointer,
    Step,
    Struct,
    TensorSpec,
    Value,
)
from onnxfuse.runtime.symint import expect_equal, for_later_plans, maximum, minimum

INTEGERS: Final = {"seqlens_k": "int32", "total_sequence_length": "int32", "position_ids": "int64"}
SCALES: Final = ("k_scale", "v_scale")  # of quantized caches
CACHES: Final[Sequence[str]] = ("past_key", "past_value", "output 1", "output 2")
QUANTIZED: Final = ("int8", FLOAT8)  # dtypes of quantized caches
THREADS: Final = 128
ACCESSES: Final = 4  # vectors that a thread copies at once
FILLING_BLOCKS: Final = 4  # maximum blocks per multiprocessor that copy the past
EPSILON: Final = 1e-6  # default epsilon of the norms of queries and keys


def unsupported_group_query(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs the node; None if one does."""
    dtypes = dict(zip(node.operands, input_dtypes, strict=True))
    floats = {name: dtype for name, dtype in dtypes.items() if name not in INTEGERS}
    floats |= {f"output {i}": dtype for i, dtype in enumerate(node.output_dtypes)}
    caches = [(name, floats.pop(name)) for name in CACHES if name in floats and _is_quantized(node)]
    for name, dtype in caches:
        if dtype not in QUANTIZED or dtype != dtypes["past_key"]:
            return f"{node.fusion}: {name} is {dtype}; required one dtype of {', '.join(QUANTIZED)}, as it has scales"
    for name, dtype in floats.items():
        if name in SCALES and dtype != "float32":
            return f"{node.fusion}: {name} is {dtype}; required float32"
        if name not in SCALES and (dtype not in STORAGE or dtype != dtypes["query"]):
            return f"{node.fusion}: {name} is {dtype}; required one dtype of {', '.join(STORAGE)}"
    for name, required in INTEGERS.items():
        if name in dtypes and dtypes[name] != required:
            return f"{node.fusion}: {name} is {dtypes[name]}; required {required}"
    if not 0 < (size := node.integer("size", 0)) <= MAX_HEAD_DIM:
        return f"{node.fusion}: size is {size}; the kernels take heads of 1 to {MAX_HEAD_DIM} elements"
    if caches and size % 8:
        return f"{node.fusion}: size is {size}; required a multiple of 8, as of onnxruntime's operator"
    return None


def _is_quantized(node: FusedNode) -> bool:
    return "k_scale" in node.operands


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a node: those of its queries and of its caches, and the strides of packed rows, in elements."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    size: int
    past_rows: int
    total: int  # the largest number of keys of a sequence
    rows: int  # rows of the present caches
    widths: tuple[int, int, int]  # strides between rows of queries, of keys and of values

    def cache(self, index: int) -> HeadTensor:
        """Return the present cache that is output `index`."""
        head = self.rows * self.size
        return HeadTensor(Pointer("output", index), self.kv_heads * head, head, self.size)

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """The shape of a present cache."""
        return self.batch, self.kv_heads, self.rows, self.size


def group_query_candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit.

    The shape of the spec of total_sequence_length is (value,), the operand's value: see `numbers_of` in hosts.py.
    """
    sizes = _sizes(node, inputs)
    query = required_spec(node, inputs, "query")
    y = TensorSpec((sizes.batch, sizes.new, sizes.heads * sizes.size), node.output_dtypes[0], query.aligned)
    problem, turns = _attention(node, inputs, sizes, device), _turns(node, inputs, sizes)
    present = TensorSpec(
        sizes.cache_shape, problem.quantized.dtype if problem.quantized else query.dtype, query.aligned
    )
    outputs, no_alias = (y, present, present), _no_alias(node, sizes)
    prepared, own = _prepared(problem, turns)
    append = _append(node, problem, prepared, sizes, turns, device)
    if 0 in y.shape:
        steps = (append,) if 0 not in present.shape else ()
        return [of_outputs(node, Plan(outputs, steps, own, no_alias))]

    def in_two_steps(attention: Implementation) -> Plan:
        after = tuple(moved(step, lambda pointer: _shifted(pointer, len(own))) for step in attention.steps)
        return Plan(outputs, (_cleared(append, after), *after), (*own, *attention.scratch), no_alias)

    cache = _cache(node, sizes, turns, ITEM_BYTES[query.dtype])
    # attention_with_cache.cu reads at least 8 bytes of a quantized cache at once.
    in_one = decode.implementations(problem, device, cache) if problem.aligned or not problem.quantized else []
    plans = [Plan(outputs, each.steps, each.scratch, no_alias) for each in in_one[: MAX_IMPLEMENTATIONS - 1]]
    with for_later_plans(*problem.sizes) if plans else nullcontext():
        plans += map(in_two_steps, implementations(prepared, device))
    if not plans:
        what = f"heads of {sizes.size} elements do not fit into the shared memory of {device.name}"
        raise ValueError(f"{node.label}: {what}")
    return [of_outputs(node, plan) for plan in plans[:MAX_IMPLEMENTATIONS]]


def _prepared(problem: Attention, turns: Turns) -> tuple[Attention, tuple[int, ...]]:
    """Return the attention after group_query_append.cu, and the bytes of the scratch buffers that this kernel writes.

    These buffers come before those of the attention, and so have negative indices, which `_shifted` makes 0, 1, ...
    They are the queries, with `turns`, and the keys and values of a quantized cache.
    """
    prepared, item = problem, ITEM_BYTES[problem.dtype]
    own: tuple[int, ...] = ()
    if problem.quantized:
        k, v = (replace(each, pointer=Pointer("scratch", i)) for i, each in ((-2, problem.k), (-1, problem.v)))
        prepared = replace(problem, k=k, v=v, quantized=None)
        own = (problem.batch * problem.k.batch_stride * item,) * 2
    if turns is not NO_TURNS:
        prepared = replace(prepared, q=replace(problem.out, pointer=Pointer("scratch", -1 - len(own))))
        own = (problem.batch * problem.queries * problem.heads * problem.head_dim * item, *own)
    return prepared, own


def _shifted(pointer: Pointer, by: int) -> Pointer:
    """Return a pointer to scratch memory with its buffer's number increased by `by`; any other pointer is unchanged."""
    return replace(pointer, index=pointer.index + by) if pointer.kind == "scratch" else pointer


def _sizes(node: FusedNode, inputs: Sequence[TensorSpec]) -> _Sizes:
    """Return the sizes.  Raises ValueError if the shapes do not fit."""
    query, past = required_spec(node, inputs, "query"), operand_spec(node, inputs, "past_key")
    heads, kv_heads, size = node.integer("num_heads"), node.integer("kv_num_heads"), node.integer("size")
    batch, new, _ = query.shape
    (total,) = required_spec(node, inputs, "total_sequence_length").shape
    packed = (heads + 2 * kv_heads) * size
    widths = (heads * size, kv_heads * size, kv_heads * size) if "key" in node.operands else (packed,) * 3
    past_rows = past.shape[2] if past else 0
    if total > past_rows + new:  # rows between the past and the new rows would have no value
        longest = f"{past_rows} rows of the past and {new} new ones"
        raise ValueError(f"{node.label}: total_sequence_length is {total}; required at most {longest}")
    found = _Sizes(batch, new, heads, kv_heads, size, past_rows, total, maximum(total, past_rows), widths)
    rows = (batch, new)
    required = {
        "query": (*rows, widths[0]), "key": (*rows, widths[1]), "value": (*rows, widths[2]),
        **dict.fromkeys(("past_key", "past_value"), (batch, kv_heads, past_rows, size)),
        "position_ids": rows, "head_sink": (heads,), "q_norm_weight": (size,), "k_norm_weight": (size,),
    }  # fmt: skip
    lengths = required_spec(node, inputs, "seqlens_k").shape
    required["seqlens_k"] = (batch, *(1,) * (len(lengths) - 1))  # a ReduceSum with keepdims leaves axes of size 1
    for name, shape in required.items():
        spec = operand_spec(node, inputs, name)
        if spec and not (len(spec.shape) == len(shape) and all(map(expect_equal, spec.shape, shape))):
            raise ValueError(f"{node.label}: {name} has shape {list(spec.shape)}; required {list(shape)}")
    return found


def _no_alias(node: FusedNode, sizes: _Sizes) -> tuple[NoAlias, ...]:
    """Return the constraints that no caches overlap, except past and present of one cache with equally many rows."""
    # For dynamic sizes, this is an expression with the value 1 or 0, which adds no guard (a condition on sizes).
    same = cast(bool, 1 // (1 + sizes.rows - sizes.past_rows))
    pasts = [(i, node.input_index(name)) for i, name in enumerate(("past_key", "past_value"), 1)]
    return tuple(
        NoAlias(index, present, same_start=same if own == present else False)
        for own, index in pasts if index is not None
        for present in (1, 2)
    )  # fmt: skip


def _new_rows(node: FusedNode, sizes: _Sizes, item: int) -> tuple[HeadTensor, HeadTensor, HeadTensor]:
    """Return the queries, keys and values of this step: slices of packed rows, or operands of their own."""
    before = {"query": 0, "key": sizes.heads, "value": sizes.heads + sizes.kv_heads}  # heads before each in packed rows
    is_packed = "key" not in node.operands
    found = []
    for (name, heads_before), width in zip(before.items(), sizes.widths, strict=True):
        index = node.operands.index("query" if is_packed else name)
        offset = heads_before * sizes.size * item if is_packed else 0
        found.append((Pointer("input", index, offset), sizes.new * width, sizes.size, width))
    q, k, v = (HeadTensor(*each) for each in found)
    return q, k, v


def _attention(node: FusedNode, inputs: Sequence[TensorSpec], sizes: _Sizes, device: Device) -> Attention:
    """Return the attention of the node's own queries, without norm or rotation, over the present caches."""
    query = required_spec(node, inputs, "query")
    width = sizes.heads * sizes.size
    out = HeadTensor(Pointer("output", 0), sizes.new * width, sizes.size, width)
    q, _, _ = _new_rows(node, sizes, ITEM_BYTES[query.dtype])
    aligned = all(spec.aligned for name, spec in zip(node.operands, inputs, strict=True) if name not in INTEGERS)
    window = node.integer("local_window_size", -1)
    bias = operand_spec(node, inputs, "attention_bias")
    keys = sizes.rows if bias is None else sizes.total  # a bias has no columns for the rows of the cache after `total`
    sinks = None
    if "head_sink" in node.operands or node.integer("smooth_softmax", 0) == 1:
        sinks = HeadNumbers(operand_pointer(node, "head_sink"), query.dtype)
    return Attention(
        sizes.batch, sizes.heads, sizes.kv_heads, sizes.new, keys, sizes.size, sizes.size, query.dtype,
        aligned, q, sizes.cache(1), sizes.cache(2), out,
        scale=node.number("scale", 0.0) or 1 / math.sqrt(sizes.size),
        causal=0, lengths=Pointer("input", node.operands.index("seqlens_k")), window=window if window > 0 else None,
        bias=score_tensor(node, "attention_bias", bias, (sizes.batch, sizes.heads, sizes.new, keys)),
        sinks=sinks, softcap=node.number("softcap", 0.0), zero_masked_rows=True, tf32=device.tf32,
        quantized=_quantized(node, inputs, sizes),
    )  # fmt: skip


def _quantized(node: FusedNode, inputs: Sequence[TensorSpec], sizes: _Sizes) -> Quantized | None:
    """Return the numbers of quantized caches.  Raises ValueError if there are not as many scales as required."""
    if not _is_quantized(node):
        return None
    per_channel = node.text("k_quant_type", "NONE") == "PER_CHANNEL"
    count = sizes.kv_heads * sizes.size if per_channel else 1
    for name in SCALES:
        check_element_count(node, name, required_spec(node, inputs, name), count)
    dtype = required_spec(node, inputs, "past_key").dtype
    return Quantized(dtype, per_channel, (operand_pointer(node, "k_scale"), operand_pointer(node, "v_scale")))


def _cleared(append: Launch, after: Sequence[Step]) -> Launch:
    """Return `append`, which also clears the rows after the new ones if attention_hopper follows and reads them."""
    reads = any(isinstance(step, Launch) and step.kernel.source == "attention_hopper" for step in after)
    defines = {**append.kernel.defines, "CLEARED": hopper.MAX_BLOCK_N if reads else 0}
    return replace(append, kernel=replace(append.kernel, defines=defines))


def _append(
    node: FusedNode, problem: Attention, prepared: Attention, sizes: _Sizes, turns: Turns, device: Device
) -> Launch:
    """Return the launch of group_query_append.cu, which writes the present caches and the scratch of `prepared`."""
    q, k, v = _new_rows(node, sizes, ITEM_BYTES[problem.dtype])
    has_queries = prepared.q.pointer.kind == "scratch"
    own = {"HEADS": sizes.heads, "KV_HEADS": sizes.kv_heads, "QUERIES": int(has_queries), "CLEARED": 0}
    keys: tuple[Value, ...] = operand_pointer(node, "past_key"), problem.k.pointer
    values: tuple[Value, ...] = operand_pointer(node, "past_value"), problem.v.pointer
    if problem.quantized:
        read, (k_scales, v_scales) = int(has_queries), problem.quantized.scales
        keys, values = (*keys, Pointer("scratch", read), k_scales), (*values, Pointer("scratch", read + 1), v_scales)
    turned = turns.defines(problem, *sizes.widths, whole_lanes=False)
    width, lanes = int(turned["WIDTH"]), int(turned["LANES"])
    all_heads = (sizes.heads if has_queries else 0) + 2 * sizes.kv_heads
    new_blocks = -(-sizes.batch * sizes.new * all_heads * lanes // THREADS)
    parts = -(-sizes.rows * sizes.size // (width * THREADS * ACCESSES)) * sizes.kv_heads * sizes.batch
    filling = minimum(parts, FILLING_BLOCKS * device.multiprocessors)
    arguments = (
        *(each.argument for each in (q, k, v)), Pointer("scratch", 0) if has_queries else ABSENT,
        Struct(keys), Struct(values),
        operand_pointer(node, "seqlens_k"),
        Struct(int32(sizes.batch, sizes.new, sizes.past_rows, sizes.rows, new_blocks)), turns.argument,
    )  # fmt: skip
    of_numbers = problem.quantized.defines if problem.quantized else {}
    defines = {**turned, **own, "ACCESSES": ACCESSES, "THREADS": THREADS, **of_numbers}
    kernel = Kernel("group_query_append", "group_query_append", defines)
    return Launch(kernel, (new_blocks + filling, 1, 1), (THREADS, 1, 1), arguments, pdl=device.has_pdl)


def _turns(node: FusedNode, inputs: Sequence[TensorSpec], sizes: _Sizes) -> Turns:
    """Return the norm and the rotation of queries and keys.  Raises ValueError if the tables do not fit."""
    rows, half = _table(node, inputs, sizes)
    if not half and "q_norm_weight" not in node.operands:
        return NO_TURNS
    usual = node.number("qk_norm_epsilon", EPSILON)
    return Turns(
        operand_pointer(node, "cos_cache"), operand_pointer(node, "sin_cache"), operand_pointer(node, "position_ids"),
        (operand_pointer(node, "q_norm_weight"), operand_pointer(node, "k_norm_weight")),
        (node.number("q_norm_epsilon", usual), node.number("k_norm_epsilon", usual)),
        rows, half, "q_norm_weight" in node.operands, node.integer("rotary_interleaved", 0),
    )  # fmt: skip


def _cache(node: FusedNode, sizes: _Sizes, turns: Turns, item: int) -> Cache:
    """Return how the decode kernel fills the present caches."""
    _, k, v = _new_rows(node, sizes, item)
    past_k, past_v, head = k, v, sizes.past_rows * sizes.size  # placeholders: no kernel reads an absent past cache
    if "past_key" in node.operands:
        pointers = (Pointer("input", node.operands.index(name)) for name in ("past_key", "past_value"))
        past_k, past_v = (HeadTensor(each, sizes.kv_heads * head, head, sizes.size) for each in pointers)
    same = cast(bool, 1 // (1 + sizes.rows - sizes.past_rows))
    return Cache(past_k, past_v, k, v, sizes.past_rows, sizes.rows, same, turns)


def _table(node: FusedNode, inputs: Sequence[TensorSpec], sizes: _Sizes) -> tuple[int, int]:
    """Return (rows, half of the rotated elements): the shape of both tables; (0, 0) without a rotation.

    Raises ValueError if the tables do not fit.
    """
    if not node.integer("do_rotary", 0):
        return 0, 0
    cos = required_spec(node, inputs, "cos_cache")
    sin = required_spec(node, inputs, "sin_cache")
    rows, half = cos.shape
    if sin.shape != cos.shape or not 0 < 2 * half <= sizes.size:
        found = f"cos_cache has shape {list(cos.shape)}, sin_cache {list(sin.shape)}"
        raise ValueError(f"{node.label}: {found}; required (rows, up to {sizes.size // 2}) of both")
    return rows, half
