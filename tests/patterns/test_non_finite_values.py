"""NaN and infinite inputs reach the same elements of a fused model as of the unfused one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from conftest import EachCase
from runtimes import run
from spellings import GENERATED, Unfused, build, longest, richest

from onnxfuse import Fusion, optimize

OPSETS = {13: longest, 21: richest}
READS_INTEGERS = {"embedding_rms_norm", "embedding_layer_norm", "rotary_table"}  # and weights
READS_FLOATS = [fusion for fusion in GENERATED if fusion.name not in READS_INTEGERS]
VALUES = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf}


@dataclass(frozen=True)
class NonFiniteInput:
    """The inputs of an unfused model, of which one has a value in its first element that is not finite."""

    id: str
    unfused: Unfused
    inputs: dict[str, np.ndarray]


def non_finite_inputs(fusion: Fusion, ort: bool) -> Iterator[NonFiniteInput]:
    """Yield the model of a fusion with each of its floating-point inputs not finite in one element.

    With `ort` the model is one whose body for onnxruntime promises the same elements: see the docs of attention.
    """
    for opset, pick in OPSETS.items():
        spelling = pick(fusion, opset)
        if ort and fusion.name.startswith("attention"):
            spelling = replace(spelling, choices={**spelling.choices, "fully_masked": "softmax"})
        unfused = build(spelling)
        for name, array in unfused.inputs.items():
            for what, value in VALUES.items() if array.dtype == np.float32 else ():
                changed = array.copy()
                changed.reshape(-1)[0] = value
                yield NonFiniteInput(f"{name}-{what}-opset{opset}", unfused, {**unfused.inputs, name: changed})


def kinds(array: np.ndarray) -> np.ndarray:
    """Return what each element is: 0 for a finite number, 1 and -1 for an infinite one, 2 for NaN."""
    return np.where(np.isnan(array), 2, np.where(np.isinf(array), np.sign(array), 0))


@pytest.mark.parametrize("fusion", READS_FLOATS, ids=lambda fusion: fusion.name)
@pytest.mark.parametrize("fallback", ["onnx", "ort"])
def test_they_reach_the_same_elements(fusion: Fusion, fallback: str, each_case: EachCase) -> None:
    fused: dict[str, onnx.ModelProto] = {}
    for case, subtest in each_case(non_finite_inputs(fusion, fallback == "ort")):
        with subtest:
            key, model = case.unfused.spelling.id, case.unfused.model
            if key not in fused:
                fused[key], _ = optimize(model, only=[fusion.name], fallback=fallback, verify=False)
            expected, reason = run(model, case.inputs)
            assert expected is not None, reason
            actual, reason = run(fused[key], case.inputs)
            assert actual is not None, reason
            for left, right in zip(expected, actual, strict=True):
                np.testing.assert_array_equal(kinds(right), kinds(left))
