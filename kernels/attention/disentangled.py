"""The operands of disentangled attention that are its own: vectors of relative positions, and their indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.kernels.attention.operands import unsupported
from onnxfuse.kernels.attention.problem import INDEX_STORAGE, Attention, Positions
from onnxfuse.kernels.tensors import required_pointer, required_spec
from onnxfuse.runtime.plan import FusedNode, TensorSpec
from onnxfuse.runtime.symint import expect_equal


def unsupported_disentangled(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs this node; None if one does."""
    dtypes = dict(zip(node.operands, input_dtypes, strict=True))
    for name in ("key_positions", "query_positions"):
        if dtypes[name] != dtypes["q"]:
            return f"{node.fusion}: {name} is {dtypes[name]}; required {dtypes['q']}, as q"
    if dtypes["key_index"] not in INDEX_STORAGE or dtypes["query_index"] != dtypes["key_index"]:
        found = f"{dtypes['key_index']} and {dtypes['query_index']}"
        return f"{node.fusion}: the indices are {found}; the kernel takes one of {', '.join(INDEX_STORAGE)}"
    return unsupported(node, input_dtypes)


def with_positions(node: FusedNode, inputs: Sequence[TensorSpec], problem: Attention) -> Attention:
    """Return the attention of a node together with its scores of positions.  Raises ValueError if shapes do not fit."""
    positions = _positions(node, inputs, problem, "key"), _positions(node, inputs, problem, "query")
    aligned = all(each.aligned for each in inputs if each.dtype == problem.dtype)
    return replace(problem, aligned=aligned, positions=positions)


def _positions(node: FusedNode, inputs: Sequence[TensorSpec], problem: Attention, of: str) -> Positions:
    """Return the vectors that stand for the positions `of` keys ("key") or queries ("query"), and their indices."""
    vectors, index = (required_spec(node, inputs, f"{of}_{name}") for name in ("positions", "index"))
    wanted = problem.heads, vectors.shape[1] if len(vectors.shape) == 3 else 1, problem.head_dim
    if vectors.shape != wanted or wanted[1] < 1:
        shape = f"({problem.heads}, at least 1, {problem.head_dim})"
        raise ValueError(f"{node.label}: {of}_positions has shape {list(vectors.shape)}; required {shape}")
    rows = (problem.queries, problem.keys) if of == "key" else (problem.keys, problem.queries)
    if not all(expect_equal(found, size) for found, size in zip(index.shape[-2:], rows, strict=True)):
        raise ValueError(f"{node.label}: {of}_index has shape {list(index.shape)}; required {list(rows)} at its end")
    pointers = required_pointer(node, f"{of}_positions"), required_pointer(node, f"{of}_index")
    return Positions(*pointers, index.dtype, vectors.shape[1], node.number(f"{of}_positions_scale"))
