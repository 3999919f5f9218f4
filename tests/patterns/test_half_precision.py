"""What computes in float32 between half precisions is fused into bodies that do so too, and run where it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from conftest import EachCase
from onnx import TensorProto, helper
from runtimes import TOLERANCE, run
from spellings import GENERATED, Spelling, Unfused, Unwritable, build, longest, richest

from onnxfuse import Fusion
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.ir.domain import DOMAIN

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
DTYPES = [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT16), (FLOAT16, BFLOAT16), (BFLOAT16, FLOAT), (FLOAT16, FLOAT16),
          (FLOAT16, FLOAT), (FLOAT, BFLOAT16), (FLOAT, FLOAT16)]  # fmt: skip
OPSETS = {13: longest, 21: richest}
ABSORBING = [fusion for fusion in GENERATED if fusion.casts]

# onnxruntime 1.31 makes a LayerNormalization of bfloat16, which the CPU provider lacks, of a Cast of bfloat16 to
# float32 and the usual nodes behind it, in models that were never optimized too; the mutants are in other spellings.
BFLOAT16_LAYER_NORM = "Failed to find kernel for LayerNormalization(1) (node:'/LayerNormFusion/'"


@dataclass(frozen=True)
class MixedModel:
    """A model that computes in float32, between inputs in one dtype and outputs in another."""

    id: str
    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    out: int


def mixed_models(fusion: Fusion) -> Iterator[MixedModel]:
    """Yield the unfused model of a fusion in float32, with its inputs cast from a dtype and its outputs cast to one."""
    for opset, pick in OPSETS.items():
        unfused = build(pick(fusion, opset))
        for given, out in DTYPES:
            names = "-to-".join(TensorProto.DataType.Name(dtype).lower() for dtype in (given, out))
            yield MixedModel(f"{names}-opset{opset}", _between(unfused, given, out), dict(unfused.inputs), out)


def _between(unfused: Unfused, given: int, out: int) -> onnx.ModelProto:
    """Return the model with Casts around it; inputs and outputs stay float32, because numpy arrays are passed."""
    model = onnx.ModelProto()
    model.CopyFrom(unfused.model)
    before, after, renamed = [], [], {}
    for info in model.graph.input:
        if info.type.tensor_type.elem_type == FLOAT and given != FLOAT:
            name = renamed[info.name] = f"{info.name}_wide"
            before.append(helper.make_node("Cast", [info.name], [f"{info.name}_half"], f"round_{info.name}", to=given))
            before.append(helper.make_node("Cast", [f"{info.name}_half"], [name], f"widen_{info.name}", to=FLOAT))
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for info in model.graph.output:
        if out != FLOAT:
            after.append(helper.make_node("Cast", [info.name], [f"{info.name}_half"], f"round_{info.name}", to=out))
            after.append(helper.make_node("Identity", [f"{info.name}_half"], [f"{info.name}_read"], f"{info.name}_id"))
            after.append(helper.make_node("Cast", [f"{info.name}_read"], [f"{info.name}_wide"], to=FLOAT))
            info.name = f"{info.name}_wide"
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*before, *nodes, *after])
    return model


@pytest.mark.parametrize("fusion", ABSORBING, ids=lambda fusion: fusion.name)
def test_the_body_runs_on_the_cpu_and_is_as_precise(fusion: Fusion, each_case: EachCase) -> None:
    fused = 0
    for case, subtest in each_case(mixed_models(fusion)):
        with subtest:
            optimized = fuse_model(case.model, None, Settings([fusion])).model
            fused += any(node.domain == DOMAIN for node in optimized.graph.node)
            expected, reason = run(case.model, case.inputs)
            assert expected is not None, reason
            actual, reason = run(optimized, case.inputs)
            assert actual is not None or BFLOAT16_LAYER_NORM in reason, reason
            for left, right in zip(expected, actual or expected, strict=True):
                largest = max(np.abs(left[np.isfinite(left)]).max(initial=0), 1e-6)
                np.testing.assert_allclose(right, left, rtol=0, atol=TOLERANCE[case.out] * largest, equal_nan=True)
    assert fused


@pytest.mark.parametrize("fusion", GENERATED, ids=lambda fusion: fusion.name)
def test_bodies_of_bfloat16_have_operators_that_take_it(fusion: Fusion) -> None:
    """Many operators, such as InstanceNormalization and HardSigmoid, have had bfloat16 since opset 22 alone."""
    for opset in (13, 17, 21, 22):
        with contextlib.suppress(Unwritable):
            unfused = build(Spelling(fusion, f"bfloat16-opset{opset}", opset=opset, dtype=BFLOAT16))
            onnx.checker.check_model(unfused.model, full_check=True)
