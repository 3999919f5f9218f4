"""A fused model runs on empty tensors wherever the unfused one does, and gives the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from conftest import EachCase
from runtimes import assert_close, run
from spellings import GENERATED, Spelling, Unfused, Unwritable, build, spellings, variants

from onnxfuse import Fusion, optimize
from onnxfuse.ir.domain import DOMAIN

by_name = pytest.mark.parametrize("fusion", GENERATED, ids=lambda fusion: fusion.name)
# docs/decisions/fallback-ort.md: a body for onnxruntime that gives 0 where all keys are masked needs a key.
WITHOUT_KEYS = re.compile(r"attention-.*-keys")
# onnxruntime 1.32 leaves the result of a QLinearMatMul unwritten if its sums are empty.
WITHOUT_SUMS = re.compile(r"quantized_matmul-.*-k")


@dataclass(frozen=True)
class EmptyInputs:
    """A model with dynamic dimensions, and inputs in which one of these is 0."""

    id: str
    unfused: Unfused
    inputs: dict[str, np.ndarray]


def dynamic_variants(fusion: Fusion) -> Iterator[Spelling]:
    """Yield every variant of a fusion that exists with dynamic dimensions."""
    for spelling in variants(fusion):
        dynamic = replace(spelling, dynamic=True, what=f"{spelling.what}-dynamic")
        with contextlib.suppress(Unwritable):
            build(dynamic)
            yield dynamic


def empty_inputs(spellings: Iterable[Spelling]) -> Iterator[EmptyInputs]:
    """Yield each dynamic spelling with each of its dynamic dimensions empty."""
    for spelling in spellings:
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


@by_name
def test_the_fused_model_runs_where_the_unfused_one_does(fusion: Fusion, each_case: EachCase) -> None:
    check(fusion, spellings(fusion).written, each_case)


@pytest.mark.slow
@by_name
def test_every_variant(fusion: Fusion, each_case: EachCase) -> None:
    check(fusion, dynamic_variants(fusion), each_case)


ROTATED = """<ir_version: 8, opset_import: ["" : 17]>
main (float[batch,2,rows,8] x, float[batch,rows,8] cos, float[batch,rows,8] sin) => (float[batch,2,rows,8] y)
<int64[1] axis = {1}, int64[1] first = {0}, int64[1] half = {4}, int64[1] end = {9}, int64[1] last = {-1}>
{
  c = Unsqueeze (cos, axis)
  s = Unsqueeze (sin, axis)
  a = Slice (x, first, half, last)
  b = Slice (x, half, end, last)
  n = Neg (b)
  turned = Concat <axis = -1> (n, a)
  by_cos = Mul (x, c)
  by_sin = Mul (turned, s)
  y = Add (by_cos, by_sin)
}"""


@pytest.mark.parametrize(("batch", "rows"), [(0, 3), (2, 0)])
def test_an_axis_of_size_1_between_dynamic_ones(batch: int, rows: int) -> None:
    """The tables of a rotary embedding get an axis for heads, which a Reshape with two unknown sizes could not give."""
    model = onnx.parser.parse_model(ROTATED)
    optimized, report = optimize(model, only=["rotary_embedding"], verify=False)
    assert report.counts == {"rotary_embedding": 1}
    table = np.ones((batch, rows, 8), np.float32)
    inputs = {"x": np.ones((batch, 2, rows, 8), np.float32), "cos": table, "sin": table}
    expected, reason = run(model, inputs)
    assert expected is not None, reason
    actual, reason = run(optimized, inputs)
    assert actual is not None, reason
    assert_close(expected, actual, onnx.TensorProto.FLOAT)


def check(fusion: Fusion, written: Iterable[Spelling], each_case: EachCase) -> None:
    fused: dict[tuple[str, str], onnx.ModelProto] = {}
    for case, subtest in each_case(empty_inputs(written)):
        with subtest:
            expected, _ = run(case.unfused.model, case.inputs)
            if expected is None or WITHOUT_SUMS.fullmatch(case.id):
                continue
            for fallback in ("onnx",) if WITHOUT_KEYS.fullmatch(case.id) else ("onnx", "ort"):
                key = case.unfused.spelling.id, fallback
                if key not in fused:
                    fused[key], _ = optimize(case.unfused.model, only=[fusion.name], fallback=fallback, verify=False)
                assert any(node.domain == DOMAIN for node in fused[key].graph.node)
                actual, reason = run(fused[key], case.inputs)
                assert actual is not None, f"{fallback}: {reason}"
                assert_close(expected, actual, case.unfused.spelling.dtype)
