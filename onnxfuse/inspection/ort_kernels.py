"""Look up which operators have kernels in onnxruntime's CUDA provider; benchmarks/ort_kernels.py writes the list."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from onnx import TensorProto, defs

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import ORT_DOMAIN
from onnxfuse.ir.node import Node, op_of

OUTPUT: Final = "out "  # prefix of a key that names an output, as in "out 0"
ORT_DOMAINS: Final = (ORT_DOMAIN, "ai.onnx.ml")  # operator domains of onnxruntime, other than ONNX's own


@dataclass(frozen=True)
class OrtKernels:
    """The kernels of one version of onnxruntime.

    `cuda` maps an operator to its kernels.  A kernel has the first and the last operator version that it supports, and
    the dtypes that it accepts at an input ("0") or writes at an output ("out 0").  The last version is 0 if the kernel
    supports only the first.  `cpu` has the (first, last) versions of CPU kernels, but only for operators that ONNX
    defines as functions of other operators.
    """

    version: str
    cuda: Mapping[str, Sequence[tuple[int, int, Mapping[str, frozenset[str]]]]]
    cpu: Mapping[str, Sequence[tuple[int, int]]]

    def why_none(self, node: Node, shapes: ShapeInfo, opset: int) -> str | None:
        """Return a sentence on why the CUDA provider has no kernel for a node; None if it has one.

        Tensors of unknown dtype count as supported.
        """
        op = op_of(node)
        if op not in self.cuda:
            return f"the CUDA provider has no kernel of {op}"
        version = _since(op, opset)
        kernels = [types for first, last, types in self.cuda[op] if _is_for(first, last, version)]
        if not kernels:
            return f"the CUDA provider has no kernel of {op} in version {version}, which opset {opset} has"
        wrong = [_wrong_dtype(node, shapes, types) for types in kernels]
        return next((f"the CUDA provider has no kernel of {op} for {dtype}" for dtype in wrong if all(wrong)), None)

    def is_spelled_out(self, node: Node, opset: int) -> bool:
        """Return whether onnxruntime inlines a node's ONNX function body, because it has no kernel for the operator."""
        op = op_of(node)
        schema = _schema(op, opset)
        if schema is None or not (schema.has_function or schema.has_context_dependent_function):  # type: ignore[attr-defined]
            return False
        return not any(_is_for(first, last, schema.since_version) for first, last in self.cpu.get(op, ()))


@functools.cache
def ort_kernels() -> OrtKernels:
    """Read the file of kernels, and return its contents."""
    data: Any = json.loads(files(__package__).joinpath("ort_kernels.json").read_text(encoding="utf-8"))
    sets = [frozenset(dtypes.split()) for dtypes in data["dtypes"]]
    cuda = {
        op: [(first, last, {place: sets[number] for place, number in types.items()}) for first, last, types in rows]
        for op, rows in data["cuda"].items()
    }
    return OrtKernels(data["onnxruntime"], cuda, data["cpu"])


def _is_for(first: int, last: int, version: int) -> bool:
    """Return whether a kernel supports this operator version; without a last version, it supports only the first."""
    return version == first or first <= version <= last


def _since(op: str, opset: int) -> int:
    """Return the version that an operator has in an opset; 1 if the opset does not have the operator."""
    schema = _schema(op, opset)
    return schema.since_version if schema else 1


@functools.cache
def _schema(op: str, opset: int) -> defs.OpSchema | None:
    try:
        return None if "::" in op else defs.get_schema(op, opset, "")
    except defs.SchemaError:
        return None


def _wrong_dtype(node: Node, shapes: ShapeInfo, types: Mapping[str, frozenset[str]]) -> str | None:
    """Return a dtype of a node's tensors that a kernel does not support; None if it supports all."""
    for place, dtypes in types.items():
        tensors = node.outputs if place.startswith(OUTPUT) else node.inputs
        index = int(place.removeprefix(OUTPUT))
        dtype = shapes.dtype(tensors[index]) if index < len(tensors) and tensors[index].name else 0
        if dtype and _ort_name(dtype) not in dtypes:
            return _ort_name(dtype)
    return None


def _ort_name(dtype: int) -> str:
    """Return onnxruntime's name of an onnx.TensorProto.DataType."""
    return str(TensorProto.DataType.Name(dtype)).lower()
