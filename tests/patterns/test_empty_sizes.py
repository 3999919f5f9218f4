"""A fused model runs on empty tensors wherever the unfused one does, and gives the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from conftest import EachCase
from runtimes import assert_close, run
from spellings import Unfused, build, spellings

from onnxfuse import Fusion, optimize
from onnxfuse.dsl import catalogue
from onnxfuse.ir.domain import DOMAIN

# docs/design.md: a body for onnxruntime that gives 0 where all keys are masked needs a key.
WITHOUT_KEYS = re.compile(r"attention-.*-keys")


@dataclass(frozen=True)
class EmptyInputs:
    """A model with dynamic dimensions, and inputs in which one of these is 0."""

    id: str
    unfused: Unfused
    inputs: dict[str, np.ndarray]


def empty_inputs(fusion: Fusion) -> Iterator[EmptyInputs]:
    """Yield each dynamic spelling of a fusion with each of its dynamic dimensions empty."""
    for spelling in spellings(fusion).written:
        if spelling.dynamic:
            unfused = build(spelling)
            shapes = {info.name: dims(info) for info in unfused.model.graph.input}
            sizes = {
                dim: size
                for name, shape in shapes.items()
                for dim, size in zip(shape, unfused.inputs[name].shape, strict=True)
                if dim.isidentifier()
            }
            for symbol in sizes:
                inputs = {name: resized(unfused, name, shape, {**sizes, symbol: 0}) for name, shape in shapes.items()}
                yield EmptyInputs(f"{spelling.id}-{symbol}", unfused, inputs)


def dims(info: onnx.ValueInfoProto) -> list[str]:
    """Return the sizes of an input as text: numbers, names, and formulas of names."""
    return [each.dim_param or str(each.dim_value) for each in info.type.tensor_type.shape.dim]


def resized(unfused: Unfused, name: str, shape: list[str], sizes: Mapping[str, int]) -> np.ndarray:
    """Return an input with these sizes of its dimensions, filled with its own elements."""
    new = [int(eval(re.sub(r"\bMin\b", "min", dim), {"min": min}, dict(sizes))) for dim in shape]
    return np.resize(unfused.inputs[name], new)


@pytest.mark.parametrize("fusion", catalogue.builtin(), ids=lambda fusion: fusion.name)
def test_the_fused_model_runs_where_the_unfused_one_does(fusion: Fusion, each_case: EachCase) -> None:
    fused: dict[tuple[str, str], onnx.ModelProto] = {}
    for case, subtest in each_case(empty_inputs(fusion)):
        with subtest:
            expected, _ = run(case.unfused.model, case.inputs)
            if expected is None:
                continue
            for fallback in ("onnx",) if WITHOUT_KEYS.fullmatch(case.id) else ("onnx", "ort"):
                key = case.unfused.spelling.id, fallback
                if key not in fused:
                    fused[key], _ = optimize(case.unfused.model, only=[fusion.name], fallback=fallback, verify=False)
                assert any(node.domain == DOMAIN for node in fused[key].graph.node)
                actual, reason = run(fused[key], case.inputs)
                assert actual is not None, f"{fallback}: {reason}"
                assert_close(expected, actual, case.unfused.spelling.dtype)
