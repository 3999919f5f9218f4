"""A converted model is one that onnxruntime takes, and computes what float32 does: each operator, in several opsets."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from operator_models import Case, backend_cases, in_opset, old_forms, run

import onnxfuse
from onnxfuse.half.operators import STAY
from onnxfuse.halving import BFLOAT16_OPSET
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.opset_adapters import LACKING
from onnxfuse.ir.protos import opset_of

OPSETS = (7, 13, 24)
LACKS_KERNEL = "NOT_IMPLEMENTED"  # of onnxruntime's CPU provider, which has few in bfloat16
# Rounding moves what these cut off, count or select.
DISCONTINUOUS = {
    "Cast", "Ceil", "DynamicQuantizeLinear", "Floor", "Hardmax", "Mod", "QuantizeLinear", "Round", "Unique",
}  # fmt: skip
# They draw, or inputs that are not tensors cannot be given.
LEFT_OUT = {
    "Bernoulli", "Multinomial", "Optional", "OptionalGetElement", "OptionalHasElement", "RandomNormalLike",
    "RandomUniformLike", "SequenceConstruct", "SequenceInsert", "SequenceMap",
}  # fmt: skip
NOT_IN_FLOAT32 = {"CumSum", "Einsum", "Equal", "EyeLike", "Loop", "NonZero", "Trilu"}  # their test cases in onnx


def reads_float32(op: str) -> bool:
    found = schema(op, OPSETS[-1])
    return found is not None and any("tensor(float)" in each.types for each in found.inputs)


@functools.cache
def old_models() -> dict[str, list[Case]]:
    """Return the models of old forms by their last operators."""
    found = defaultdict[str, list[Case]](list)
    for each in old_forms():
        found[each.model(each.opsets[0]).graph.node[-1].op_type].append(each)
    return found


@functools.cache
def models(op: str) -> list[tuple[onnx.ModelProto, dict[str, Any], list[Any]]]:
    """Return models of an operator that read float32 and run, at most one of each form in each opset; their results."""
    made = []
    known = set[Any]()
    found = [(opset, in_opset(model, opset), feeds) for model, feeds in backend_cases()[op] for opset in OPSETS]
    old = [(each.opsets[0], each.model(each.opsets[0]), dict(each.feeds)) for each in old_models()[op]]
    for opset, model, feeds in (*found, *old):
        if model is None or not any(getattr(each, "dtype", None) == np.float32 for each in feeds.values()):
            continue
        form = (opset, len(model.graph.node[-1].input), len(model.graph.node[-1].attribute))
        if form not in known and isinstance(results := run(model, feeds), list):
            known.add(form)
            made.append((model, feeds, results))
    return made


def in_half(value: Any) -> Any:
    """Return an array of float32 in float16, and anything else as it is."""
    with np.errstate(over="ignore"):
        return value.astype(np.float16) if getattr(value, "dtype", None) == np.float32 else value


@pytest.mark.parametrize(("dtype", "io"), [("float16", "float32"), ("float16", "half"), ("bfloat16", "float32")])
@pytest.mark.parametrize("op", sorted(filter(reads_float32, {s.name for s in onnx.defs.get_all_schemas()} - LEFT_OUT)))
def test_converted(op: str, dtype: Literal["float16", "bfloat16"], io: Literal["float32", "half"]) -> None:
    found = models(op)
    assert found or op in NOT_IN_FLOAT32
    for model, feeds, old in found:
        if dtype == "bfloat16" and opset_of(model) < BFLOAT16_OPSET and op in LACKING.keys() - STAY.keys():
            with pytest.raises(onnxfuse.UsageError, match=f"onnxruntime has no kernel for {op} from opset 22 on; or a"):
                onnxfuse.optimize(model, dtype=dtype, verify=False)
            continue
        given = {name: in_half(x) if io == "half" else x for name, x in feeds.items()}
        made, _ = onnxfuse.optimize(model, dtype=dtype, io=io, inputs=feeds, verify=False, timeout=None)
        new = run(made, given)
        if isinstance(new, str):
            assert dtype == "bfloat16" and LACKS_KERNEL in new, new
        elif op not in DISCONTINUOUS:
            for one, other in zip(old, new, strict=True):
                if isinstance(one, np.ndarray) and one.dtype == np.float32:
                    one = in_half(one).astype(np.float32) if io == "half" else one
                    largest = np.abs(one[np.isfinite(one)]).max(initial=1e-3)
                    np.testing.assert_allclose(other, one, rtol=0, atol=0.02 * largest)
