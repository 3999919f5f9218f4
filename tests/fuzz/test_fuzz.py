"""The first cases of the fuzzer: graphs near the catalogue, random graphs and damaged bytes.

`python tests/fuzz/run.py` runs as many more as wanted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import fuzz_cases
import numpy as np
import onnx
import pytest
import run as fuzzer
from changes import duplicate
from drafts import inferred, names_odd_size, shape_at, types
from draws import draws
from fuzz_cases import FuzzCase, case_of, draw_case
from hostile import wrong_versions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inner_graphs import into_branch, into_loop
from judge import (
    LOST_VALUE,
    SECONDS,
    Hang,
    Inputs,
    Options,
    Original,
    Verdict,
    compare,
    compare_on,
    judge,
    limited,
)
from mutants import MUTATIONS, differs, mutant_of
from overflow import allow_exact, in_float64, largest_inside
from random_graphs import random_graph
from reduction import reduced
from roundings import ULP, nudged, rounded_otherwise
from sessions import Session, outputs_of
from special_constants import put_special_values
from spelled_graphs import spelled_graph
from undetermined import (
    adds_zero,
    confuses_optimizations,
    copies_sizes_of_empty_axes,
    has_huge_scales,
    has_windows_beyond_data,
    joins_unequal_sizes,
    normalizes_few_elements,
    normalizes_other_channels,
    overflows_int32,
    pools_nothing,
    relies_on_empty_slices,
    reuses_memory_of_a_slice,
    scales_zero_by_infinity,
    sums_infinity,
    takes_other_steps,
    without_false_shapes,
)

from onnxfuse import optimize
from onnxfuse.ir.protos import OneNode, nodes
from onnxfuse.verify import own_process

CASES, SHARES, MUTANTS = 120, 6, 15
EXAMPLES = 12
HEADER = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (float[n,3] y)'
CHAIN = f"{HEADER} {{ a = Abs(x) b = Neg(a) c = Exp(b) d = Tanh(c) y = Sin(d) }}"


@pytest.fixture(scope="module", autouse=True)
def models_run_in_a_process_of_their_own() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_process, "enabled", True)
        with own_process.own_process(SECONDS):
            yield


@pytest.mark.parametrize("share", range(SHARES))
def test_cases_of_the_first_seeds(share: int) -> None:
    for seed in range(share, CASES, SHARES):
        verdict = case_of(seed).verdict()
        assert not verdict.is_failure, f"{verdict.kind}: {verdict.sentence}; python tests/fuzz/run.py --case {seed}"


@given(st.randoms(use_true_random=False), st.integers(0, 1000))
@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_cases_that_hypothesis_draws(random: Random, seed: int) -> None:
    verdict = draw_case(random, seed).verdict()
    assert not verdict.is_failure, verdict


# What the fuzzer found, made smaller, and whether onnxruntime runs it; in opset 21 if no other is named.
FOUND = {
    "equal nodes in both branches, which read a value in a Loop": (
        """(bool c, float[3] x, float[3] w) => (float[] y) <int64 n = {2}, bool go = {1}> {
             y = If (c) <
               then_branch = yes () => (float[] a) {
                 l = Loop (n, go, x) <body = one (int64 i, bool p, float[] s) => (bool q, float[] e) {
                   t = Tanh (s) u = Add (t, w) q = Identity (p) e = Identity (u) }>
                 v = Neg (l) a = Identity (v) },
               else_branch = no () => (float[] b) {
                 l = Loop (n, go, x) <body = one (int64 i, bool p, float[] s) => (bool q, float[] e) {
                   t = Tanh (s) u = Add (t, w) q = Identity (p) e = Identity (u) }>
                 v = Neg (l) b = Identity (v) }> }""",
        True,
    ),
    "an Expand to a target of four axes": (
        """(float[n,2,5,6] x) => (float[n,2,10,5,6] y)
           <int64[1] axis = {2}, int64[1,1,1,5] target = {1, 1, 10, 1, 1}> {
             u = Unsqueeze (x, axis) y = Expand (u, target) }""",
        True,
    ),
    "a Reshape to a target of floats": (
        """(int64[0] x, int64[2] z) => (bool[2] y) <float[1] target = {0.25}> {
             r = Reshape (x, target) y = Less (z, r) }""",
        False,
    ),
    "an output that is declared as a scalar, of a value that others read": (
        """(float[n,4] x, float[4,4] w) => (float y, float z) {
             m = MatMul (x, w) z = Identity (m) s = Softmax <axis = -1> (m) y = MatMul (s, w) }""",
        True,
    ),
    "a fused output that is declared as a scalar, and reshaped to what was computed": (
        """<ir_version: 8, opset_import: ["" : 7]> g (float[n,4,3,5] x) => (float[n,2,1] y, float h)
           <double[3] groups = {0, 2, -1}, float[2] ones = {1, 1}, float[2] zeros = {0, 0},
            float[4,1,1] scale = {1, 2, 3, 4}, float[4,1,1] bias = {5, 6, 7, 8}> {
             t = Cast <to = 7> (groups) a = Reshape (x, t) b = InstanceNormalization (a, ones, zeros)
             s = Shape (x) c = Reshape (b, s) m = Mul (c, scale) h = Add (m, bias)
             p = Reshape (h, t) y = ReduceMax <axes = [-1]> (p) }""",
        True,
    ),
    "a GroupNormalization of no groups": (
        """(float[2,6,2,3] x) => (float[] y) <float[6] s = {1, 1, 1, 1, 1, 1}, float[6] b = {0, 0, 0, 0, 0, 0}> {
             y = GroupNormalization <num_groups = 0> (x, s, b) }""",
        False,
    ),
    "a rotation of a part whose Slice has three ends": (
        """(float[9,8,14,20] x, float[1,1,14,2] cos, float[1,1,14,2] sin, float[9,8,14,2] t) => (float[] y)
           <int64[1] zero = {0}, int64[1] two = {2}, int64[1] last = {-1}, int64[1] step = {1},
            int64[1] far = {9223372036854775807}, int64[3] ends = {2, 3, 20}> {
             a = Slice (x, zero, ends, last, step) b = Mul (a, cos) c = Mul (t, sin) d = Add (b, c)
             e = Slice (x, two, far, last, step) y = Concat <axis = -1> (d, e) }""",
        False,
    ),
    "a rotation whose Slice has no such axis": (
        """(float[14,1,20,12] x, float[14,1,20,12] cos, float[14,1,20,12] sin) => (float[] y)
           <int64[1] zero = {0}, int64[1] half = {6}, int64[1] last = {-1},
            int64[1] step = {1}, int64[1] far = {9223372036854775807}> {
             a = Mul (x, cos) b = Slice (x, half, far, last, step) n = Neg (b)
             f = Slice (x, zero, half, far, step)
             r = Concat <axis = -1> (n, f) m = Mul (r, sin) y = Add (a, m) }""",
        False,
    ),
    "a reduction whose keepdims is 2": (
        """(float[n,2,3] x) => (int64[2] y) <int64[1] axis = {0}> {
             m = ReduceMax <keepdims = 2> (x, axis) s = Shape (m) y = Neg (s) }""",
        True,
    ),
    "a constant product that float16 cannot hold": (
        """(bool[n] x) => (float16[2] y) <float a = {300.0}, float[2] b = {400.0, 500.0}, float c = {7.0}> {
             p = Cast <to = 10> (a) q = Cast <to = 10> (b) r = Cast <to = 10> (c)
             m = Mul (p, q) w = Where (x, m, r) y = Softmax <axis = -1> (w) }""",
        True,
    ),
    "bfloat16 in an opset whose operators do not take it": (
        """<ir_version: 8, opset_import: ["" : 12]> g (float[n,3] x) => (bfloat16[n,3] y)
           { s = Softmax <axis = 1> (x) y = Cast <to = 16> (s) }""",
        True,
    ),
    "a Range of more numbers than int64 can count": (
        """(float[1,n] x) => (float[] y)
           <int64 one = {1}, int64 lowest = {-9223372036854775808}, float least = {-inf}> {
             s = Shape (x) i = Constant <value_int = 0> () b = Gather (s, i) r = Range (lowest, b, one)
             w = Where (r, x, least) y = Softmax <axis = -1> (w) }""",
        False,
    ),
    "outputs that are declared empty, behind a backward Slice to the largest integer": (
        """(float[n,1] x) => (float[n,0] v, float[m,0] y)
           <int64[1] start = {1}, int64[1] far = {9223372036854775807}, int64[1] last = {-1}, int64[1] step = {-2}> {
             s = Slice (x, start, far, last, step) t = Shape (s) v = Expand (x, t) y = Concat <axis = 0> (s, v) }""",
        True,
    ),
    "the shape of the last row, of which there may be none": (
        """(float[n,4,3] x) => (float[] y)
           <int64[1] zero = {0}, int64[1] last = {-1}, int64[1] far = {2147483647}, int64[1] columns = {12}> {
             r = Slice (x, last, far, zero) s = Shape (r) rows = Gather (s, zero)
             t = Concat <axis = 0> (rows, columns) y = Reshape (r, t) }""",
        True,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_fuzzer_found(name: str) -> None:
    text, runs = FOUND[name]
    header = "" if text.startswith("<") else '<ir_version: 10, opset_import: ["" : 21]> g '
    model = onnx.parser.parse_model(header + text)
    verdict = judge(model, {"n": 2}, 0)
    assert verdict.kind == ("same" if runs else "idle"), verdict


# --- the fuzzer itself -----------------------------------------------------------------------------------------------


def require_verdict(original: str, other: str, sizes: dict[str, int], said: str) -> None:
    """Fail unless the judge finds two models the same, or, where `said` is not empty, wrong with these words."""
    verdict = compare(onnx.parser.parse_model(original), onnx.parser.parse_model(other), sizes, 0)
    kind = "unrunnable" if said == "does not run" else "wrong" if said else "same"
    assert (verdict.kind, said in verdict.sentence) == (kind, True), verdict


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("c = Exp(b)", "c = Softplus(b)", "output y is "),
        ("y = Sin(d)", "e = Sin(d) s = Shape(x) y = Reshape(e, s)", ""),
        ("y = Sin(d)", "i = Constant<value_ints=[2, 3]>() e = Sin(d) y = Reshape(e, i)", "does not run"),
        ("y = Sin(d)", "e = Sin(d) f = Cast<to=10>(e) y = Cast<to=1>(f)", "output y is "),
        ("y = Sin(d)", "e = Sin(d) s = Log(e) t = Exp(s) y = Identity(t)", ""),
        ("y = Sin(d)", "e = Sin(d) f = Constant<value_float=1.001>() y = Mul(e, f)", "output y is "),
    ],
)
def test_a_model_that_computes_something_else_is_found(right: str, wrong: str, said: str) -> None:
    require_verdict(CHAIN, CHAIN.replace(right, wrong), {"n": 2}, said)


ODD = """<ir_version: 9, opset_import: ["" : 19]> g (float[n,3] x) => (float[n,3] y, float[n,3] z)
    <float[3] c = {2, 3, 4}, float big = {100}> {
      a = Mul (x, c) y = Log (a) b = Mul (a, big) z = Exp (b) }"""


@pytest.mark.parametrize("how", MUTATIONS)
def test_a_broken_model_is_found(how: str) -> None:
    """Logarithms of negative numbers are NaN, and exponentials of large ones infinite."""
    original, broken = onnx.parser.parse_model(ODD), 0
    for seed in range(8):
        changed = onnx.parser.parse_model(ODD)
        assert MUTATIONS[how](Random(seed), changed)
        before, after = ([outputs_of(Session(m), feeds) for feeds in draws(original, {"n": 2}, seed)] for m in (
            original, changed))  # fmt: skip
        if any(there and here and any(differs(there[k], here[k], 0.01) for k in there) for there, here in zip(
                before, after, strict=True)):  # fmt: skip
            broken += 1
            verdict = compare(original, changed, {"n": 2}, seed)
            assert verdict.is_failure, verdict
    assert broken


def test_broken_results_of_the_first_seeds_are_found() -> None:
    missed, found = [], 0
    for seed in range(MUTANTS):
        mutant = mutant_of(case_of(seed), Random(f"mutant {seed}"))
        missed += [(seed, mutant.how)] if mutant and not mutant.is_found else []
        found += bool(mutant and mutant.is_found)
    assert not missed and found > MUTANTS / 4


SEVERAL_AXES = """<ir_version: 8, opset_import: ["" : 8]> g (float[4,6] x, bool c) => (float[] y) {
    s = Constant <value = double[2] {4, 6}> () t = Cast <to = 7> (s) r = Reshape (x, t)
    y = If (c) <then_branch = a () => (float[] p) {
        e = Constant <value = double[1,1,3] {5, 1, 1}> () f = Cast <to = 7> (e) p = Expand (r, f) },
      else_branch = b () => (float[] q) { q = Exp (r) }> }"""


def test_sizes_of_several_axes_count_for_no_difference() -> None:
    """onnxruntime runs the model, and refuses it once a constant takes the place of the Cast."""
    folded = SEVERAL_AXES.replace("double[2]", "int64[2]").replace("t = Cast <to = 7> (s)", "t = Identity (s)")
    require_verdict(SEVERAL_AXES, folded, {}, "")
    require_verdict(SEVERAL_AXES, folded.replace("Exp (r)", "Erf (r)"), {}, "does not run")  # opset 8 has no Erf


NORM = """m = ReduceMean <axes = [-1]> (x) c = Sub (x, m) q = Pow (c, p) a = ReduceMean <axes = [-1]> (q)
    v = Add (a, e) r = Sqrt (v) f = Div (c, r) w = Mul (f, s) y = Add (w, t)"""
SWAPPED_NORM = NORM.replace("(c, r)", "(r, c)")
FALSE_RANK = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[m] y, float z)
    <int64[1] first = {0}, int64 zero = {0}, bool go = {1}> {
      a = Abs (first) u = Unsqueeze (x, a) r = Squeeze (u, a)
      z = Loop (zero, go, x) <body = b (int64 i, bool c, float[] a) => (bool d, float[] f) {
          d = Identity (c) f = Abs (a) }>
      y = Concat <axis = 0> (r, z) }"""


def test_a_false_shape_of_an_output_counts_for_no_difference() -> None:
    """A loop of no iterations gives what enters it, of one axis; the graph declares a number."""
    inferred = FALSE_RANK.replace("(r, z)", "(x, z)")
    require_verdict(FALSE_RANK, inferred, {"n": 2}, "")
    changed = inferred.replace("y = Concat <axis = 0> (x, z)", "w = Concat <axis = 0> (x, z) y = Exp (w)")
    require_verdict(FALSE_RANK, changed, {"n": 2}, "output y")
    twice = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float z, int64[m] y) {
        z = Neg (x) w = Neg (x) y = Shape (READ) }"""
    require_verdict(twice.replace("READ", "w"), twice.replace("READ", "z"), {"n": 2}, "")
    require_verdict(
        twice.replace("READ", "w"), twice.replace("READ", "s").replace("y =", "s = Size (w) y ="), {"n": 2}, "output y"
    )
    untyped = onnx.parser.parse_model(twice.replace("READ", "w"))
    untyped.graph.output[1].ClearField("type")
    assert compare(untyped, untyped, {"n": 2}, 0).kind == "same"


def test_a_false_shape_of_an_output_is_removed_before_bfloat16_is_widened() -> None:
    """The original's v is a number by its declaration, and onnxruntime has no Conv of bfloat16."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> g (float[n,1,8] x) => (bfloat16[1] v, float[n,1,8] y)
           <float[1,1,1] w = {-0.5}> { v = Cast <to = 16> (x) y = Conv <kernel_shape = [1]> (x, w) }"""
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    verdict = judge(model, {"n": 2}, 0, Options(dtype="bfloat16"))
    assert verdict.kind == "same", verdict


@pytest.mark.parametrize(("rows", "said"), [("x", ""), ("w", "output y is ")])
def test_shapes_that_were_inferred_from_a_false_one_count_for_no_difference(rows: str, said: str) -> None:
    """A branch that is not run gives y three axes, or one, as v has none by its declaration (seed 1050010752)."""
    text = """<ir_version: 4, opset_import: ["" : 8]> g (float[n,2] x) => (VALUE v, float[k] y)
        <int64 one = {1}, bool go = {1}, bool no = {0}, int64[1] all = {-1}> {
          v = Loop (one, go, x) <body = b (int64 i, bool p, TYPE s) => (bool q, TYPE t) {
            q = Identity (p) t = Identity (s) }>
          w = Abs (x)
          y = If (no) < then_branch = yes () => (float[] a) { a = Unsqueeze <axes = [0]> (v) },
                        else_branch = no () => (float[] b) { b = Reshape (READ, all) }> }"""
    other = text.replace("VALUE", "float[n,2]").replace("TYPE", "float[n,2]").replace("READ", rows)
    text = text.replace("VALUE", "float").replace("TYPE", "float[]").replace("READ", "x")
    require_verdict(text, other, {"n": 2}, said)
    model = onnx.parser.parse_model(text)
    settled = without_false_shapes(model, model, {"v": np.ones((2, 2)), "y": np.ones(4)})
    given, left = ([o.type.tensor_type.HasField("shape") for o in each.graph.output] for each in (model, settled))
    assert (given, left) == ([True, True], [False, False])


def test_a_false_shape_of_an_output_stays_where_a_scan_needs_it() -> None:
    """The body's row has the shape of v, which nothing but the declaration tells (seed 1030009586)."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, float[3,1] z) => (float v, float[3] y)
        <int64 three = {3}, bool yes = {1}> {
          v = Loop (three, yes, x) <body = again (int64 i, bool go, float[] s) => (bool on, float[] t) {
              on = Identity (go) t = Neg (s) }>
          y = Scan <num_scan_inputs = 1, body = rows (float[] r) => (float[] e) { e = OP (v) }> (z) }"""
    require_verdict(text.replace("OP", "Exp"), text.replace("OP", "Exp"), {"n": 1}, "")
    require_verdict(text.replace("OP", "Exp"), text.replace("OP", "Tanh"), {"n": 1}, "output y is ")
    right = text.replace("float v, float[3] y", "float[n] v, float[3,n] y").replace("float[] e", "float[n] e")
    right = right.replace("float[] s", "float[n] s").replace("float[] t", "float[n] t")
    require_verdict(text.replace("OP", "Exp"), right.replace("OP", "Exp"), {"n": 1}, "")  # seed 1050046254
    require_verdict(text.replace("OP", "Exp"), right.replace("OP", "Tanh"), {"n": 1}, "output y is ")
    require_verdict(right.replace("OP", "Exp"), text.replace("OP", "Exp"), {"n": 1}, "output y is float32[3], not ")


TWO_SIZES = """<ir_version: 8, opset_import: ["" : 15]> g (float[n,1,m] x) => (float[n,m] y) <int64[1] axis = {1}> {
    s = Shape <start = 0, end = 1> (x) t = Shape <start = 2, end = 3> (x)
    u = Concat <axis = 0> (s, t) y = Reshape (x, u) }"""


def test_the_shape_of_a_reshape_to_two_sizes_of_0_counts_for_no_difference() -> None:
    """The Reshape gives [0, 1], since its second 0 copies the size of the second axis, and the Squeeze [0, 0]."""
    squeezed = TWO_SIZES.replace("y = Reshape (x, u)", "y = Squeeze (x, axis)")
    require_verdict(TWO_SIZES, squeezed, {"n": 0, "m": 0}, "")
    require_verdict(TWO_SIZES, squeezed.replace("y = Sq", "z = Neg (x) y = Sq").replace("(x, axis)", "(z, axis)"),
                    {"n": 2, "m": 3}, "output y is ")  # fmt: skip
    model = onnx.parser.parse_model(TWO_SIZES)
    nothing, row = np.zeros((0, 0), np.float32), np.zeros((0, 1), np.float32)
    for zeros, found, is_excused in (((0, 1, 0), nothing, True), ((0, 1, 3), nothing, False), ((0, 1, 0), row, False)):
        assert copies_sizes_of_empty_axes(model, {"x": np.zeros(zeros, np.float32)}, row, found) is is_excused


def test_a_crash_of_products_of_moved_axes_counts_for_no_difference() -> None:
    """onnxruntime ends with SIGSEGV where it fuses a Transpose of float16 into the MatMul."""
    text = """<ir_version: 8, opset_import: ["" : 14]> g (float[2,n,4] x) => (float[n,4,8] y)
        { t = Transpose <perm = [1, 2, 0]> (x) y = MatMul (t, w) }"""
    model = onnx.parser.parse_model(text)
    weight = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    optimized, _ = optimize(model, dtype="float16", verify=False)
    assert "SIGSEGV" in Session(optimized, optimize=True).error
    assert judge(model, {"n": 3}, 0, Options(dtype="float16")).kind == "same"
    assert not confuses_optimizations(optimized, {}, "it ended onnxruntime with SIGABRT")


def test_unequal_sizes_are_found_after_operators_of_onnxruntime() -> None:
    """The evaluator of onnx has no Gelu of com.microsoft, which gives the Concat one of its operands."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[n,2] x) => (float[n,4] y)
           <int64[1] zero = {0}, int64[1] one = {1}> {
             a = com.microsoft.Gelu (x) b = Slice (x, zero, one) y = Concat <axis = 1> (a, b) }"""
    )
    for rows, is_unequal in ((1, False), (2, True)):
        assert joins_unequal_sizes(model, ["y"], {"x": np.ones((rows, 2), np.float32)}) is is_unequal
    quantized = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> g (uint8[n,2] x) => (float[n,4] y)
           <float s = {0.5}, uint8 z = {0}, int64[1] zero = {0}, int64[1] one = {1}> {
             a = DequantizeLinear (x, s, z) b = Slice (a, zero, one) y = Concat <axis = 1> (a, b) }"""
    )
    for rows, is_unequal in ((1, False), (2, True)):  # seed 1060003256
        assert joins_unequal_sizes(quantized, ["y"], {"x": np.ones((rows, 2), np.uint8)}) is is_unequal
    scan = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n,2] x, float[a] k) => (float z, float[n,2] w, float[n,2] y) <int64 zero = {0}> {
          z = Neg (k) s = SequenceConstruct (x) w = SequenceAt (s, zero)
          y = Scan <body = b (float[] row) => (float[] end) { end = Identity (row) }, num_scan_inputs = 1> (w) }"""
    require_verdict(scan, scan, {"n": 2, "a": 1}, "")


UNEQUAL = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float[n,6] y, float[n,2] z)
    <int64[1] zero = {0}, int64[1] last = {START}, int64[1] far = {2147483647}, int64[1] back = {-2}> {
      s = Slice (x, last, far, zero, back) e = Slice (x, zero, zero, zero)
      y = Concat <axis = 1> (s, e, e) z = Concat <axis = 0> (s, e) }"""


@pytest.mark.parametrize(("start", "rows"), [("-1", 3), ("-2", 1), ("0", 2), ("-1", 0)])
def test_what_onnxruntime_does_not_write_counts_for_no_difference(start: str, rows: int) -> None:
    """The operands of y are [1, 2] or [2, 2] and twice [0, 2], and its last four columns are never written."""
    model = onnx.parser.parse_model(UNEQUAL.replace("START", start))
    feeds = {"x": np.ones((rows, 2), np.float32)}
    assert joins_unequal_sizes(model, ["y"], feeds) is bool(rows)
    assert joins_unequal_sizes(model, ["z"], feeds) is False
    other = onnx.parser.parse_model(UNEQUAL.replace("START", start).replace("(s, e, e)", "(e, e, s)"))
    assert compare(model, other, {"n": 3}, 0).kind == "same"
    wrong = onnx.parser.parse_model(UNEQUAL.replace("START", start).replace("z = Concat", "q = Neg (s) z = Concat")
                                    .replace("(s, e) }", "(q, e) }"))  # fmt: skip
    assert "output z is " in compare(model, wrong, {"n": 3}, 0).sentence


@pytest.mark.parametrize(
    ("end", "rows", "runs", "relies"),
    [(2**63 - 1, 0, True, True), (2**63 - 1, 1, True, False), (-(2**63), 1, True, False), (-(2**63), 0, False, False)],
)
def test_what_onnxruntime_accepts_for_a_size_that_a_slice_has_not_is_no_difference(
    end: int, rows: int, runs: bool, relies: bool
) -> None:
    """onnxruntime infers no rows for s, which has two, so it accepts the sum without rows in the branch not run."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[8,n] x) => (float[] y)
        <int64[1] start = {3}, int64[1] end = {END}, int64[1] axis = {0}, int64[1] back = {-2}, bool c = {1}> {
          s = Slice (x, start, end, axis, back)  shape = Constant <value = int64[2] {ROWS, 1}> ()
          y = If (c) < then_branch = yes () => (float[] a) { a = Neg (s) },
                       else_branch = no () => (float[] b) { w = ConstantOfShape (shape)  b = Add (s, w) }> }"""
    model = onnx.parser.parse_model(text.replace("END", str(end)).replace("ROWS", str(rows)))
    assert relies_on_empty_slices(model, {"x": np.ones((8, 2), np.float32)}) is relies
    assert judge(model, {"n": 2}, 0).kind == ("same" if runs else "idle")


@pytest.mark.parametrize(("value", "kind"), [("0.5", "same"), ("0.25", "wrong")])
def test_a_value_that_onnxruntime_loses_without_its_optimizations_counts_with_them(value: str, kind: str) -> None:
    """onnxruntime loses a value that a branch reads after two Casts of an initializer (seed 111009850)."""
    text = """<ir_version: 9, opset_import: ["" : 20]> g () => (float y) <float a = {1.0}, float half = {VALUE}> {
          c = Constant <value = bool {1}> () START b = Cast <to = 1> (s) d = Cast <to = 1> (b)
          y = If (c) < then_branch = yes () => (float e) { e = Identity (d) },
                       else_branch = no () => (float f) { f = Neg (b) }> }"""
    original = onnx.parser.parse_model(text.replace("VALUE", "0.5").replace("START", "s = Mul (a, half)"))
    folded = onnx.parser.parse_model(text.replace("VALUE", value).replace("START", "").replace("(s)", "(half)"))
    for model in original, folded:
        for attribute in model.graph.node[-1].attribute:
            attribute.g.output[0].type.tensor_type.ClearField("shape")
    session = Session(folded)
    assert outputs_of(session, {}) is None and LOST_VALUE in session.error
    assert compare(original, folded, {}, 0).kind == kind


@pytest.mark.parametrize(("size", "is_excused"), [(2, True), (1, False), (0, False)])
def test_a_norm_of_groups_of_one_element_excuses_no_other_shape(size: int, is_excused: bool) -> None:
    """Seeds 1110046637 and 1110048870."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 14]> g (float[1,2,1] x) => (float[1,2,1] y)
          <float[2] one = {1, 1}> { y = InstanceNormalization (x, one, one) }""")
    feeds = {"x": np.ones((1, 2, 1), np.float32)}
    assert normalizes_few_elements(model, model, feeds, np.ones(2), np.ones(size)) is is_excused


@pytest.mark.parametrize(("found", "is_excused"), [([-np.inf, 1.0], True), ([np.nan, 2.0], False), ([0.0, 1.0], False)])
def test_an_element_that_equals_its_mean_may_be_infinite_with_an_infinite_scale(
    found: list[float], is_excused: bool
) -> None:
    """Seed 900028116."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y)
          <float[2] s = {inf, 1.0}> { NODES }"""
    spelled = onnx.parser.parse_model(text.replace("NODES", "m = ReduceMean (x) c = Sub (x, m) y = Mul (c, s)"))
    operator = onnx.parser.parse_model(text.replace("NODES", "y = LayerNormalization (x, s)"))
    want = np.array([np.nan, 1.0], np.float32)
    assert scales_zero_by_infinity(spelled, operator, want, np.array(found, np.float32)) is is_excused
    assert not scales_zero_by_infinity(operator, operator, want, np.array(found, np.float32))


def test_a_norm_of_groups_with_an_infinite_scale_may_be_nan() -> None:
    """Seed 1000031412."""
    text = """<ir_version: 8, opset_import: ["" : 15]> g (float[n,2,3] x) => (float[n,2,3] y)
          <float[2] one = {1, 1}, float[2] zero = {0, 0}, float[2] inf = {inf, inf}, float[2,1] wide = {inf, inf}> {
            NODES }"""
    apart = text.replace("NODES", "a = InstanceNormalization (x, one, zero)  y = Mul (a, wide)")
    folded = text.replace("NODES", "y = InstanceNormalization (x, inf, zero)")
    require_verdict(apart, folded, {"n": 2}, "")
    require_verdict(
        apart, apart.replace("Mul (a, wide)", "Div (wide, a)").replace("{inf, inf}", "{1, inf}"), {"n": 2}, "output y"
    )
    require_verdict(folded, folded.replace("(x, inf, zero)", "(x, one, zero)"), {"n": 2}, "output y")


@pytest.mark.parametrize(("number", "last", "kind"), [(300.0, "Max", "same"), (100.0, "Add", "wrong")])
def test_bfloat16_has_room_for_numbers_that_float16_has_not(number: float, last: str, kind: str) -> None:
    """Seed 900037802."""
    bits = np.float16(number).view(np.uint16)
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g () => (float y) <float16 a = {{{bits}}}> {{ NODES }}"""
    original = onnx.parser.parse_model(text.replace("NODES", "b = Mul (a, a) y = Cast <to = 1> (b)"))
    other = onnx.parser.parse_model(text.replace("NODES", f"c = Cast <to = 1> (a) b = Mul (c, c) y = {last} (b, b)"))
    assert compare_on(original, other, Inputs({}, 0), Options(dtype="bfloat16")).kind == kind


@pytest.mark.parametrize(("zero", "is_excused"), [(0.0, True), (1.0, False)])
def test_adding_zero_changes_the_sign_of_zero(zero: float, is_excused: bool) -> None:
    """Seed 900041421."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) <float c = {{{zero}}}>
          {{ s = Add (x, c) y = Reciprocal (s) }}"""
    model = onnx.parser.parse_model(text)
    infinite = np.array([np.inf, 1], np.float32)
    assert adds_zero(model, infinite, np.array([-np.inf, 1], np.float32)) is is_excused
    assert not adds_zero(model, infinite, np.array([-np.inf, 2], np.float32))


@pytest.mark.parametrize(
    ("pool", "rows", "is_excused"),
    [
        ("LpPool <kernel_shape = [2], strides = [2]>", 1, True),
        ("LpPool <kernel_shape = [2], strides = [2]>", 2, False),
        ("MaxPool <kernel_shape = [2], dilations = [3]>", 3, True),
        ("MaxPool <kernel_shape = [2], dilations = [3], pads = [0, 1]>", 3, False),
        ('AveragePool <kernel_shape = [2], auto_pad = "SAME_UPPER">', 1, False),
    ],
)
def test_a_window_beyond_its_data_has_no_size(pool: str, rows: int, is_excused: bool) -> None:
    """Seeds 950003337 and 950004606."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2,2,n] x) => (float[2,2,m] y) {{ y = {pool} (x) }}"""
    assert (
        has_windows_beyond_data(onnx.parser.parse_model(text), {"x": np.ones((2, 2, rows), np.float32)}) is is_excused
    )


@pytest.mark.parametrize(("scales", "channels", "is_excused"), [("1, 1, 1, 1, 1, 1", 0, True),
                         ("1, 1, 1, 1, 1, 1", 3, False), ("1", 3, True), ("1", 1, False)])  # fmt: skip
def test_a_norm_of_groups_needs_channels(scales: str, channels: int, is_excused: bool) -> None:
    """Seeds 950004005 and 1010014576."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[2,n,4] x) => (float[2,n,4] y)
          <float[{len(scales.split())}] s = {{{scales}}}> {{ y = GroupNormalization <num_groups = 1> (x, s, s) }}"""
    model, feeds = onnx.parser.parse_model(text), {"x": np.ones((2, channels, 4), np.float32)}
    assert normalizes_other_channels(model, feeds, "Got invalid dimensions for input: x") is is_excused
    assert not normalizes_other_channels(model, feeds, "another error")


@pytest.mark.parametrize("opset", [7, 9, 14])
def test_batch_normalization_in_float64_takes_the_statistics_that_it_is_given(opset: int) -> None:
    """Clip below opset 12 has no kernel for float64, so that onnx's reference computes both (seed 950007165)."""
    text = f"""<ir_version: 4, opset_import: ["" : {opset}]> g (float[2,1] x) => (float[2,1] y)
          <float[1] one = {{1}}, float[1] mean = {{3}}, float low = {{0}}> {{
            n = BatchNormalization <epsilon = 0.0> (x, one, one, mean, one) y = CLIP (n) }}"""
    clip = "y = Clip <min = 0.0> (n)" if opset < 11 else "y = Max (n, low)"
    model = onnx.parser.parse_model(text.replace("y = CLIP (n)", clip))
    found = in_float64(model, {"x": np.array([[5], [1]], np.float32)})
    assert found is not None and found["y"].tolist() == [[3], [0]]


@pytest.mark.parametrize(
    ("quantizers", "moved", "is_excused"),
    [(2, [3, 5], True), (1, [3, 3], True), (1, [3, 5], False), (2, [3] * 5, False)],
)
def test_quantizers_may_move_few_values(quantizers: int, moved: list[int], is_excused: bool) -> None:
    """Two of a hundred values; after several quantizers by any number of steps."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (uint8[n] y) <float s = {1}> { NODES }"""
    spelled = "q = QuantizeLinear (x, s) d = DequantizeLinear (q, s) y = QuantizeLinear (d, s)"
    model = onnx.parser.parse_model(text.replace("NODES", spelled if quantizers > 1 else "y = QuantizeLinear (x, s)"))
    want = np.full(100, 50, np.uint8)
    got = want.copy()
    got[: len(moved)] += np.array(moved, np.uint8)
    assert takes_other_steps(model, want, got, is_optimized=True) is is_excused


QUANTIZED_PRODUCT = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,2] x, float t) => (float[n,2] y, float[n,2] z)
    <float s = {SCALE}, float u = {0.1}, uint8 m = {128}, int8[2,2] k = {1, 2, 3, -4}, int8 o = {0}> {
      q = QuantizeLinear (x, s, m) d = DequantizeLinear (q, READ, m) w = DequantizeLinear (k, u, o)
      p = MatMul (d, w) r = QuantizeLinear (p, u, m) y = DequantizeLinear (r, u, m) z = Neg (x) }"""


@pytest.mark.parametrize(("scale", "read", "fed", "is_excused"), [
    ("3e38", "s", 1.0, True), ("1.0", "t", np.inf, True), ("4e9", "s", 1.0, False), ("1.0", "t", 1e9, False),
    ("1.0", "s", np.inf, False)])  # fmt: skip
def test_products_of_huge_scales_may_be_infinite(scale: str, read: str, fed: float, is_excused: bool) -> None:
    model = onnx.parser.parse_model(QUANTIZED_PRODUCT.replace("SCALE", scale).replace("READ", read))
    assert has_huge_scales(model, {"t": np.array(fed, np.float32)}) is is_excused


def test_huge_scales_excuse_no_output_without_them_and_no_kernel_of_the_original() -> None:
    text = QUANTIZED_PRODUCT.replace("SCALE", "3e38").replace("READ", "s")
    require_verdict(text, text.replace("Neg (x)", "Abs (x)"), {"n": 3}, "output z is ")
    require_verdict(text, text.replace("z = Neg", "v = Exp (p) z = Neg").replace("Linear (p, u", "Linear (v, u"),
                    {"n": 3}, "output y is ")  # fmt: skip


@pytest.mark.parametrize(("opset", "scales"), [(18, "float[2] s = {1, 2}, float[2] b = {3, 4}"),
                         (21, "float[4] s = {1, 1, 2, 2}, float[4] b = {3, 3, 4, 4}")])  # fmt: skip
def test_norms_of_groups_in_float64_do_not_overflow(opset: int, scales: str) -> None:
    """onnxruntime has no Conv of float64, and onnx's reference no GroupNormalization (seed 1050006143)."""
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]> g (float[1,4,1] x) => (float[1,4,1] y)
        <float[4,1,1] one = {{1, 1, 1, 1}}, {scales}> {{
          n = GroupNormalization <num_groups = 2, epsilon = 0.0> (x, s, b) y = Conv <group = 4> (n, one) }}"""
    numbers = np.array([[[1e30], [3e30], [-2e30], [2e30]]], np.float32)
    found = in_float64(onnx.parser.parse_model(text), {"x": numbers})
    assert found is not None
    np.testing.assert_allclose(found["y"].reshape(-1), [2, 4, 2, 6], rtol=1e-6)


def test_branches_in_float64_may_read_what_a_later_node_computes() -> None:
    """A float64 GlobalMaxPool runs only in onnx's reference, and skips NaN as in onnxruntime (seed 1050029967)."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,n] x, bool c) => (float[] y) {
        y = If (c) <then_branch = a () => (float[] s) { s = Mul (m, m) },
                    else_branch = b () => (float[] t) { t = Neg (m) }>
        m = GlobalMaxPool (x) }"""
    found = in_float64(
        onnx.parser.parse_model(text), {"x": np.array([[[1e30, np.nan]]], np.float32), "c": np.array(True)}
    )
    assert found is not None
    np.testing.assert_allclose(found["y"], [[[1e60]]], rtol=1e-6)


@pytest.mark.parametrize(("alpha", "said"), [("0.5", ""), ("0.51", ", not ")])
def test_products_with_dequantized_weights_in_float64_do_not_overflow(alpha: str, said: str) -> None:
    """onnx's reference has a DequantizeLinear from opset 19 on only (seed 1050011910)."""
    text = """<ir_version: 8, opset_import: ["" : 15]> g (float[n,2] x) => (float[n,2] y)
        <int8[2,2] k = {100, 90, 80, 70}, float s = {3e36}, float a = {ALPHA}, int8 o = {0}> {
          p = Abs (x) w = DequantizeLinear (k, s, o) NODES }"""
    scaled = text.replace("NODES", "v = Mul (w, a) y = MatMul (p, v)").replace("ALPHA", alpha)
    require_verdict(text.replace("NODES", "m = MatMul (p, w) y = Mul (m, a)").replace("ALPHA", "0.5"), scaled,
                    {"n": 20}, said)  # fmt: skip


@pytest.mark.parametrize(("weights", "found", "is_excused"), [
    ("inf, 3e38", [np.nan, 1], True), ("inf, 3e38", [0, 1], False), ("inf, 3e38", [np.nan, 2], False),
    ("inf, 3.0", [np.nan, 1], False), ("1.0, 3e38", [np.nan, 1], False)])  # fmt: skip
def test_sums_of_infinite_and_large_terms_may_be_nan(weights: str, found: list[float], is_excused: bool) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float[n,1] y)
        <float[2,1] w = {{{weights}}}> {{ y = MatMul (x, w) }}"""
    want = np.array([np.inf, 1], np.float32)
    assert sums_infinity(onnx.parser.parse_model(text), want, np.array(found, np.float32)) is is_excused


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize(("scale", "is_excused"), [("1e9", True), ("1e4", False)])
def test_sums_of_integers_that_int32_has_no_room_for(op: str, scale: str, is_excused: bool) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (int8[n] x) => (int8[n] y)
        <float a = {{{scale}}}, float b = {{0.02}}, int8 z = {{0}}> {{
          y = com.microsoft.{op} (x, a, z, x, b, z, b, z) }}"""
    model = onnx.parser.parse_model(text)
    assert overflows_int32(model) is is_excused
    found = outputs_of(Session(model), {"x": np.array([127], np.int8)})
    assert found and found["y"].tolist() == [-128 if is_excused else 127]


@pytest.mark.parametrize(("step", "is_excused"), [(0.5, True), (0.6, False), (1.0, False)])
def test_one_value_of_a_few_may_be_at_the_next_step_with_optimizations(step: float, is_excused: bool) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y)
        <float s = {0.5}, uint8 z = {0}> { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }"""
    model, want = onnx.parser.parse_model(text), np.array([1, 2, 3, 4], np.float32)
    for count, may_be in ((1, is_excused), (2, False)):
        got = want + np.float32(step) * (np.arange(4) < count).astype(np.float32)
        assert takes_other_steps(model, want, got, is_optimized=True) is may_be
        assert not takes_other_steps(model, want, got, is_optimized=False)


@pytest.mark.parametrize(("pool", "channels", "is_excused"), [
    ("com.microsoft.QLinearGlobalAveragePool (x, s, z, s, z)", 0, True),
    ("com.microsoft.QLinearGlobalAveragePool (x, s, z, s, z)", 1, False), ("Identity (x)", 0, False)])  # fmt: skip
def test_pools_of_integers_of_no_channels(pool: str, channels: int, is_excused: bool) -> None:
    """Seed 1062003219."""
    text = f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (uint8[1,n,2,2] x) => (uint8[1,n,k,k] y)
        <float s = {{0.5}}, uint8 z = {{0}}> {{ y = {pool} }}"""
    model, feeds = onnx.parser.parse_model(text), {"x": np.ones((1, channels, 2, 2), np.uint8)}
    assert pools_nothing(model, feeds, "pool_attributes.h:124 onnxruntime::PoolAttributes::SetOutputSize") is is_excused
    assert not pools_nothing(model, feeds, "another error")


@pytest.mark.parametrize(
    ("scale", "kind"),
    [("one = Constant <value = float[1,1] {1}> () t = Mul (s, one)", "same"), ("t = Mul (s, k)", "unrunnable")],
)
def test_onnxruntime_refuses_a_matrix_as_constant_scale(scale: str, kind: str) -> None:
    """Seed 1110047551.  With a scale that depends on an input, onnxruntime's optimizations run the original."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (int8[n,8] x, float[1,1] k) => (int8[n,8] y) <float s = {0.125}, float r = {0.3}, int8 z = {0}> {
          SCALE y = com.microsoft.QLinearSoftmax <axis = 1, opset = 17> (x, t, z, r, z) }"""
    folded = "t = Constant <value = float[1,1] {0.125}> ()"
    first, second = (onnx.parser.parse_model(text.replace("SCALE", each)) for each in (scale, folded))
    assert compare(first, second, {"n": 2}, 0).kind == kind


@pytest.mark.parametrize(("how", "is_excused"), [("axis = 0, block_size = 2", True), ("axis = 1", False)])
def test_onnxruntime_takes_scales_of_blocks_for_scales_of_columns(how: str, is_excused: bool) -> None:
    """Seed 1062003722."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]> g (float[n,4] x) => (float[n,2] y)
        <int8[4,2] k = {{1, 2, 3, 4, 5, 6, 7, 8}}, float[2,2] s = {{1, 2, 3, 4}}> {{
          w = DequantizeLinear <{how}> (k, s) y = MatMul (x, w) }}""")
    error = "Non-zero status code returned while running MatMulIntegerToFloat node. Name:'m'"
    assert confuses_optimizations(model, {}, error) is is_excused
    assert not confuses_optimizations(model, {}, "another error")


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_onnxruntime_drops_the_zero_point_of_a_graph_around_a_branch(place: str) -> None:
    """Its optimizations make a MatMulNBits of the Gemm once its factor is in the scale (seed 1063003362)."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n,16] x, bool c) => (float[n,4] y)
        <OUTSIDE float[4] b = {1, 2, 3, 4}, float[16,4] e = {EVEN}> {
          y = If (c) <then_branch = one () => (float[] p) {
              INSIDE w = Constant <value = int8[16,4] {WEIGHT}> () s = Constant <value = float[4] {SCALE}> ()
              d = DequantizeLinear <axis = 1> (w, s, z) p = Gemm <alpha = ALPHA> (x, d, b) },
            else_branch = two () => (float[] q) { q = MatMul (x, e) }> }"""
    zeros = "{-128, -128, -128, -128}"
    is_outside = place == "outside"
    text = text.replace("OUTSIDE", f"int8[4] z = {zeros}," * is_outside)
    text = text.replace("INSIDE", f"z = Constant <value = int8[4] {zeros}> ()" * (not is_outside))
    text = text.replace("WEIGHT", ", ".join(map(str, range(-32, 32)))).replace("EVEN", ", ".join(map(str, range(64))))
    apart = text.replace("SCALE", "2, 4, 6, 8").replace("ALPHA", "0.5")
    folded = text.replace("SCALE", "1, 2, 3, 4").replace("ALPHA", "1.0")
    require_verdict(apart, folded, {"n": 2}, "")
    ones = {"x": np.ones((1, 16), np.float32), "c": np.array(True)}
    plain, usual = (outputs_of(Session(onnx.parser.parse_model(folded), optimize), ones) for optimize in (False, True))
    assert plain and usual and bool(np.allclose(plain["y"], usual["y"])) is (place == "inside")
    require_verdict(apart, folded.replace("1, 2, 3, 4}> ()", "1, 2, 3, 5}> ()"), {"n": 2}, "output y is ")


def test_functions_that_call_each_other_have_no_types() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "f" : 1]> g (float[2] x) => (float[2] y) { y = f.a (x) }
          <domain: "f", opset_import: ["" : 17, "f" : 1]> a (x) => (y) { y = f.b (x) }
          <domain: "f", opset_import: ["" : 17, "f" : 1]> b (x) => (y) { y = f.a (x) }"""
    assert inferred(onnx.parser.parse_model(text)) is None


@pytest.mark.parametrize(("step", "is_inferred"), [(2, True), (2**31, False)])
def test_onnx_is_not_asked_about_slices_of_large_steps(step: int, is_inferred: bool) -> None:
    """onnx's propagation of values would end the process."""
    text = f"""<ir_version: 8, opset_import: ["" : 16]> g () => (float[n] y)
          <float[2] a = {{1, 2}}, int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] step = {{{step}}}> {{
            b = Add (a, a) y = Slice (b, zero, two, zero, step) }}"""
    assert (inferred(onnx.parser.parse_model(text)) is not None) is is_inferred


@pytest.mark.parametrize(("scale", "is_inferred"), [(2.0, True), (-1e-38, False)])
def test_onnx_is_not_asked_about_slices_of_negative_sizes(scale: float, is_inferred: bool) -> None:
    """onnx's shape inference would end the process (seed 1050004084)."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2,8] x) => (float[m,k] y)
          <float[2] scales = {{{scale}, {scale}}}, int64[1] one = {{1}}, int64[1] back = {{-1}}> {{
            r = Resize (x, , scales) y = Slice (r, back, one, one, back) }}"""
    assert (inferred(onnx.parser.parse_model(text)) is not None) is is_inferred


@pytest.mark.parametrize(("opset", "is_excused"), [(10, True), (11, False)])
def test_onnxruntime_takes_a_slice_of_opset_10_for_its_input(opset: int, is_excused: bool) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]> g (float[n, n] x) => (float[n, m] y)
          <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ y = Slice (x, zero, one, one) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    sizes = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape.dim
    assert (sizes[1].dim_param == "n") is is_excused
    error = "onnxruntime::OpKernelContext::OutputMLValue(int, const onnxruntime::TensorShape&)"
    assert reuses_memory_of_a_slice(model, error) is is_excused
    assert not reuses_memory_of_a_slice(model, "another error")


def test_a_symbol_is_the_size_of_a_default_value() -> None:
    """Seed 1110048610."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 14]>
        g (float[n] w, float[m,n] v, float[1] t) => (float[m,n] y) <float[4] w = {1, 2, 3, 4}> {
          a = Mul (v, t) y = Mul (a, w) }""")
    shapes = [tuple(map(np.shape, feeds.values())) for feeds in draws(model, {"n": 3, "m": 3}, 0)]
    assert shapes[0] == ((4,), (3, 4), (1,)) and {rows for _, (rows, _), _ in shapes} > {0, 1}
    assert {v[1] for _, v, _ in shapes} == {4}
    model.graph.input[1].type.tensor_type.shape.dim.pop(0)
    assert judge(model, {"n": 4}, 0, Options(dtype="bfloat16")).kind == "same"


ROUNDED = "o = Div (x, s) r = Round (o) i = Clip (r, low, high) z = Mul (i, s)"  # equals d


@pytest.mark.parametrize(
    ("right", "other", "said"),
    [
        ("z = Abs (x) n = Neg (d)", "z = Abs (x)", ""),
        ("z = Abs (x) n = Neg (d)", "z = Neg (x)", "output z is "),
        ("z = Identity (d)", ROUNDED, "with onnxruntime's optimizations output y is "),
    ],
)
def test_what_onnxruntime_drops_of_the_original_without_unused_nodes_is_no_difference(
    right: str, other: str, said: str
) -> None:
    """onnxruntime merges two quantizers if nothing else reads the result of the first (seed 101012042)."""
    text = """<ir_version: 9, opset_import: ["" : 19]> g (float[n,8] x) => (float[n,8] y, float[n,8] z)
        <float s = {0.4}, float t = {0.3}, uint8 m = {128}, float low = {-128}, float high = {127}> {
          q = QuantizeLinear (x, s, m) d = DequantizeLinear (q, s, m) NODES
          p = QuantizeLinear (d, t, m) y = DequantizeLinear (p, t, m) }"""
    require_verdict(text.replace("NODES", right), text.replace("NODES", other), {"n": 4}, said)


@pytest.mark.parametrize(("scale", "said"), [("0.02", ""), ("0.0201", "off by")])
def test_products_with_weights_of_8_bits_are_compared_in_float32(scale: str, said: str) -> None:
    """onnxruntime rounds x to 8 bits by default, in the model without Casts alone (seed 101015599)."""
    text = """<ir_version: 9, opset_import: ["" : 19]> g (float[n,4] x) => (float[n,2] y)
        <uint8[4,2] w = {0, 31, 64, 127, 150, 191, 222, 255}, float s = {SCALE}, uint8 m = {128}> {
          d = DequantizeLinear (w, s, m) READER }"""
    casts = text.replace("READER", "c = Cast <to = 11> (d) f = Cast <to = 1> (c) y = MatMul (x, f)")
    other = text.replace("READER", "y = MatMul (x, d)").replace("SCALE", scale)
    require_verdict(casts.replace("SCALE", "0.02"), other, {"n": 4}, said)


@pytest.mark.parametrize("count", [-1, 2])
def test_a_negative_count_of_columns_is_not_drawn(count: int) -> None:
    """A Slice of what onnxruntime infers for such a MatMulNBits ends the process (1110029878)."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[4,32] x, uint8[2,1,16] w, float[2] s) => (float[4,2] y) {{
          y = com.microsoft.MatMulNBits <K = 32, N = {count}, bits = 4, block_size = 32> (x, w, s) }}""")
    assert names_odd_size(model) is (count < 0)


def test_a_softmax_along_a_missing_axis_runs_without_elements() -> None:
    """onnxruntime does not know the rank of the original's v, and ends before it checks the axis (1110042641)."""
    model = onnx.parser.parse_model("""<ir_version: 7, opset_import: ["" : 13]>
        g (float[3,n,2] x, int64[2] shape, int64[n,1] a, int64[1,n] b) => (float y) <float c = {-10000}> {
          v = Reshape (x, shape)  less = Less (a, b)  w = Where (less, v, c)  y = Softmax <axis = 2> (w) }""")
    assert judge(model, {"n": 0}, 0).kind == "same"


@pytest.mark.parametrize("taken", [True, False])
def test_the_largest_number_of_a_branch_is_that_of_the_branch_that_is_taken(taken: bool) -> None:
    """Float16 cannot hold 4e6, the weight in one branch, or its product, so that it is sought in float64."""
    weight = "w = DequantizeLinear (q, scale)  p = Mul (x, w)  y = Identity (p)"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float16[2] x, bool c) => (float16[2] y) <int8[2] q = {{100, 2}}, float16 scale = {{30848}}> {{
          y = If (c) <then_branch = t () => (float16[2] y) {{ {weight} }}, else_branch = e () => (float16[2] z) {{
            z = Identity (x) }}> }}""")
    feeds = {"x": np.array([1, 0.5], np.float16), "c": np.array(taken)}
    scale = float(np.array(30848, np.uint16).view(np.float16))
    assert largest_inside(model, feeds) == (100 * scale if taken else scale)


@pytest.mark.parametrize(
    ("right", "other", "said"),
    [
        ("t = Mul (x, a) y = Mul (t, b)", "t = Mul (a, b) y = Mul (x, t)", ""),
        ("t = Mul (x, a) y = Mul (t, b)", "t = Mul (a, c) y = Mul (x, t)", "off by"),
        ("t = Mul (x, a) y = Mul (t, b)", "t = Mul (a, b) u = Mul (x, t) y = Min (u, cap)", "off by"),
        ("t = Mul (a, b) y = Mul (x, t)", "t = Mul (x, a) y = Mul (t, b)", "inf, not"),
        ("y = Mul (x, a)", "t = Mul (x, a) y = Min (t, top)", ", not inf"),
        ("t = Mul (x, a) u = Mul (t, b) s = Sigmoid (u) y = Neg (s)",
         "t = Mul (a, b) u = Mul (x, t) s = Sigmoid (u) y = Neg (s)", ""),
        ("t = Mul (x, a) u = Mul (t, b) i = ArgMax (u) y = Cast <to = 1> (i)",
         "t = Mul (a, b) u = Mul (x, t) i = ArgMax (u) y = Cast <to = 1> (i)", ""),
        ("t = Mul (x, a) u = Mul (t, a) s = Add (u, b) y = Sub (s, u)", "t = Sub (x, x) y = Add (t, b)", ""),
        ("s = Mul (x, x) q = Add (s, a) t = Mul (q, a) u = Sub (t, t) y = Add (t, u)",
         "s = Mul (x, x) q = Add (s, a) t = Mul (q, a) y = Neg (t)", ""),
        ("s = Mul (x, x) q = Add (s, a) t = Mul (q, a) u = Sub (t, t) y = Relu (u)", "y = Sub (x, x)", ""),
        ("t = Mul (x, b) i = ArgMax (t) y = Cast <to = 1> (i)",
         "t = Mul (x, b) u = Neg (t) i = ArgMax (u) y = Cast <to = 1> (i)", "not"),
    ],
)  # fmt: skip
def test_an_overflow_that_an_order_of_products_avoids_is_no_difference(right: str, other: str, said: str) -> None:
    """The float64 value is right as well, where a value overflows in float32 alone, and nothing else is."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (float[] y)
        <float a = {1e38}, float b = {0.1}, float c = {0.1001}, float cap = {3.4e37}, float top = {3.4e38}> { NODES }"""
    require_verdict(text.replace("NODES", right), text.replace("NODES", other), {"n": 50}, said)


def test_dilated_convolutions_in_float64_pass_over_infinite_elements() -> None:
    """onnx's reference multiplies the elements between by 0, which is NaN (seed 1030011291)."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,n] x) => (float[1,1,m] y)
        <float[1,1,2] w = {1e38, 1e38}> { y = Conv <dilations = [2]> (x, w) }""")
    found = in_float64(model, {"x": np.array([[[4, np.inf, 4, 1]]], np.float32)})
    assert found is not None
    np.testing.assert_allclose(found["y"], [[[8e38, np.inf]]])


@pytest.mark.parametrize(("other", "said"), [("Div (x, six)", ""), ("Div (x, seven)", ", not ")])
def test_products_with_quantized_weights_in_float64_do_not_overflow(other: str, said: str) -> None:
    """onnxruntime has no MatMulNBits of float64, nor has onnx's reference (seed 1040002096)."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[n,4] a) => (float[n,2] y)
        <uint8[2,1,8] w = {153, 153, 0, 0, 0, 0, 0, 0, 170, 170, 0, 0, 0, 0, 0, 0}, float[2,1] s = {1e38, 1},
         float six = {6}, float seven = {7}> {
          p = com.microsoft.MatMulNBits <K = 4, N = 2, bits = 4, block_size = 16> (a, w, s) x = Abs (p) NODES }"""
    right = text.replace("NODES", "t = Mul (x, six) u = Div (t, six) y = Div (u, six)")
    require_verdict(right, text.replace("NODES", f"y = {other}"), {"n": 20}, said)


@pytest.mark.parametrize(("exact", "is_excused"), [(-4e38, True), (-1e38, False), (4e38, False)])
def test_sums_beyond_float32_may_have_the_sign_that_float64_finds(exact: float, is_excused: bool) -> None:
    """Which part of a sum is infinite first depends on its order (seed 1030011291)."""
    want, got = np.array([np.inf], np.float32), np.array([-np.inf], np.float32)
    allowed, _ = allow_exact(want, got, [], np.array([exact]), 1e39)
    assert (allowed == got).all() == is_excused


@pytest.mark.parametrize(("kind", "ulp"), [("float", ULP), ("float16", 2.0**-10)])
@pytest.mark.parametrize("opset", [8, 13, 21, 23])
def test_rounding_otherwise_moves_each_element_by_itself(opset: int, kind: str, ulp: float) -> None:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g ({kind}[n] x) => ({kind}[n] y) {{ y = Neg (x) }}'
    dtype = onnx.TensorProto.DataType.Value(kind.upper())
    model, ones = onnx.parser.parse_model(text), {"x": np.ones(64, onnx.helper.tensor_dtype_to_np_dtype(dtype))}
    for session in rounded_otherwise(model, 1, [dtype]):
        moved = outputs_of(session, ones)
        assert moved, session.error
        assert len(set(moved["y"])) > 1 and np.abs(moved["y"] + 1).max() <= 2 * ulp


@pytest.mark.parametrize(("half", "number", "kind"), [("float16", 2.0**-26, "same"), ("float16", 2.0**-23, "wrong"),
                                                      ("bfloat16", 2.0**-26, "wrong")])  # fmt: skip
def test_float16_rounds_small_numbers_to_zero(half: str, number: float, kind: str) -> None:
    """Seed 1000030264, where the sign of a probability is 1 or 0."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) <float k = {{{number}}}> {{
        z = Sub (x, x) c = Exp (z) s = Mul (c, k) START y = Sign (READ) }}"""
    original = text.replace("START", "").replace("READ", "s")
    other = text.replace("START", "o = Cast <to = 10> (z)  p = Cast <to = 1> (o)").replace("READ", "p")
    models = (onnx.parser.parse_model(each) for each in (original, other))
    assert compare_on(*models, Inputs({"n": 2}, 0), Options(dtype=half)).kind == kind


@pytest.mark.parametrize(("weight", "kind"), [("3e38", "same"), ("3.0", "wrong")])
def test_weights_that_float16_lacks_may_be_multiplied_by_zero(weight: str, kind: str) -> None:
    """Seed 1010019607."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) <float w = {{{weight}}}> {{
        z = Sub (x, x) p = Mul (z, w) OTHER }}"""
    other = onnx.parser.parse_model(text.replace("OTHER", "y = Div (p, p)"))
    verdict = compare_on(onnx.parser.parse_model(text.replace("OTHER", "y = Neg (p)")), other, Inputs({"n": 2}, 0),
                         Options(dtype="float16"))  # fmt: skip
    assert verdict.kind == kind


@pytest.mark.parametrize(("half", "weight", "kind"), [("float16", "1e-45", "same"), ("float16", "1e-7", "wrong"),
                         ("bfloat16", "1e-45", "same"), ("bfloat16", "1e-30", "wrong")])  # fmt: skip
def test_weights_that_a_conversion_rounds_to_zero_may_meet_infinity(half: str, weight: str, kind: str) -> None:
    """Infinity times them is NaN then (seed 1050004301)."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,2] x) => (float[n,2] y)
        <float[2] w = {WEIGHT, 1}, float inf = {inf}> { a = Abs (x) i = Max (a, inf) y = Mul (i, w) }"""
    models = (onnx.parser.parse_model(text.replace("WEIGHT", each)) for each in (weight, "0.0"))
    assert compare_on(*models, Inputs({"n": 2}, 0), Options(dtype=half)).kind == kind


@pytest.mark.parametrize(("iterations", "kind"), [(0, "same"), (1, "idle")])
def test_a_body_that_never_runs_may_have_no_shape(iterations: int, kind: str) -> None:
    """Seed 1011002817, where the product of x and itself shows how large n is."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2,n] x) => (float[] y)
        <int64 count = {{{iterations}}}, bool go = {{1}}, float[1,0] none = {{}}> {{
          p = MatMul (x, x) y = Loop (count, go, p) <body = b (int64 i, bool c, float[] s) => (bool d, float[] t) {{
            d = Identity (c) t = Add (none, x) }}> }}"""
    settled = onnx.parser.parse_model(text.replace("float[2,n] x", "float[2,2] x"))
    assert compare(onnx.parser.parse_model(text), settled, {"n": 2}, 0).kind == kind


def test_roundings_are_drawn_once_for_the_same_inputs() -> None:
    """onnxruntime draws other numbers in each run, which may allow what they did not allow before (seed 101012468)."""
    model = onnx.parser.parse_model(CHAIN)
    original, (feeds, *_) = Original(model, 0, Options()), draws(model, {"n": 2}, 0)
    session = original.shaken[0]
    first = original.outputs_of(session, feeds)
    again, other = original.outputs_of(session, feeds), outputs_of(session, feeds)
    assert first and again and other
    assert (first["y"] == again["y"]).all() and (first["y"] != other["y"]).any()


def test_results_in_bodies_are_moved_too() -> None:
    """A name of a branch may be one of the graph around it."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float16[4] x, bool c) => (float16[4] y) {
      y = If (c) <then_branch = one () => (float16[4] y) { a = Exp(x) y = Log(a) },
                  else_branch = two () => (float16[4] z) { z = Neg(x) }> }"""
    model, feeds = onnx.parser.parse_model(text), {"x": np.ones(4, np.float16), "c": np.array(True)}
    found = [outputs_of(session, feeds) for session in rounded_otherwise(model, 1, [onnx.TensorProto.FLOAT16])]
    assert len({each["y"].tobytes() for each in found if each}) > 1
    assert all(found)


def test_results_of_functions_and_of_nodes_in_another_order_are_moved_too() -> None:
    """onnx infers neither the type of a call, nor that of a node that reads a later one."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "l" : 1]>
        g (float[4000] x) => (float[4000] y, float[4000] z) { y = Identity (e) e = Exp (t) t = Relu (x) z = l.f (x) }
        <domain: "l", opset_import: ["" : 17]> f (x) => (z) { a = Exp (x) b = Neg (a) z = Neg (b) }""")
    moved = [np.zeros(4000, bool), np.zeros(4000, bool)]
    ones = np.ones(4000, np.float32)
    exact = outputs_of(Session(model), {"x": ones})
    for shaken in rounded_otherwise(model, 1, [onnx.TensorProto.FLOAT]):
        found = outputs_of(shaken, {"x": ones})
        assert exact is not None and found is not None
        moved = [each | (found[name] != exact[name]) for each, name in zip(moved, "yz", strict=True)]
        assert all(np.abs(found[name] / exact[name] - 1).max() < 4 * ULP for name in "yz")
    assert all(each.mean() > 0.9 for each in moved)


@pytest.mark.parametrize("quantizer", [
    "q = QuantizeLinear (x, s, z)", "q = com.microsoft.QuantizeLinear (x, s, z)",
    "o = QuantizeLinear (x, s, z) q = com.microsoft.QLinearConcat <axis = 0> (s, z, o, s, z)"])  # fmt: skip
def test_results_beside_and_after_operators_of_onnxruntime_are_moved(quantizer: str) -> None:
    """onnx gives Gelu and what follows it no types, and integers stay (seeds 1040000058 and 1060011991)."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[64] x) => (float[64] y, float[64] d) <float s = {{0.5}}, uint8 z = {{0}}> {{
          a = com.microsoft.Gelu (x) y = Neg (a) {quantizer} d = DequantizeLinear (q, s, z) }}""")
    ones = {"x": np.ones(64, np.float32)}
    exact = outputs_of(Session(model), ones)
    for shaken in rounded_otherwise(model, 1, [onnx.TensorProto.FLOAT]):
        found = outputs_of(shaken, ones)
        assert exact and found, shaken.error
        apart = np.abs(found["y"] / exact["y"] - 1)
        assert len(set(found["y"])) > 3 and ULP < apart.max() < 4 * ULP


@pytest.mark.parametrize(("numbers", "said"), [("0.748, 1, 1, 1, 1", ""), ("0.748, 1, 1, 1, 2.5", "is 2.5, not 1.0"),
                                               ("0.748, 1.5, 1.5, 1.5, 1.5", "is 1.5, not 1.0")])  # fmt: skip
def test_a_quantizer_of_onnxruntime_hides_no_rounding_of_others(numbers: str, said: str) -> None:
    """One value of d is near a tie, which bfloat16 rounds to the other side; o does not depend on it."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[n,5] x) => (float[n,5] d, float[n,5] o) <float[5] c = {NUMBERS}, float s = {0.5}, uint8 z = {0}> {
          a = Sub (x, x) v = Add (a, c) q = QuantizeLinear (v, s, z) d = DequantizeLinear (q, s, z)
          p = com.microsoft.QuantizeLinear (x, s, z) o = DequantizeLinear (p, s, z) }"""
    original, other = (
        onnx.parser.parse_model(text.replace("NUMBERS", each)) for each in ("0.752, 1, 1, 1, 1", numbers)
    )
    verdict = compare_on(original, other, Inputs({"n": 4}, 0), Options(dtype="bfloat16"))
    assert (verdict.kind, said in verdict.sentence) == ("wrong" if said else "same", True), verdict


def test_inputs_without_axes_are_nudged() -> None:
    moved = nudged({"x": np.array(1.5, np.float32), "n": np.array(3)}, ULP)
    assert moved["n"] == 3 and isinstance(moved["x"], np.ndarray) and 0 < abs(moved["x"] - 1.5) < 8 * ULP


@pytest.mark.parametrize(
    ("values", "right", "other"),
    [
        ("float[2,1] x, float[2,3] s", "n = Neg (x) v = PRelu (n, s) y = PRelu (v, s)",
         "n = Neg (x) v = PRelu (n, s) q = PRelu (v, s) r = Neg (q) y = Neg (r)"),
        ("float[n] x, float[4] s", "q = Pow (x, p) m = ReduceMean <axes = [-1]> (q) v = Add (m, e) r = Sqrt (v) "
         "d = Div (x, r) y = Mul (d, s) unused = Exp (d)",
         "q = Pow (x, p) m = ReduceMean <axes = [-1]> (q) v = Add (m, e) r = Sqrt (v) d = Div (x, r) y = Mul (d, s)"),
        ("float[2,n] x, float[4] s, float[4] t", NORM.replace("(q)", "(z) z = Concat <axis = -1> (q)"), NORM),
        ("float[3,4] x, float[4] s, float[4] t", SWAPPED_NORM.replace("Pow (c, p)", "Mul (c, c)"), SWAPPED_NORM),
        ("double[3,4] d, float[4] s, float[4] t", f"x = Cast <to = 1> (d) {NORM.replace('Pow (c, p)', 'Mul (c, c)')}",
         f"x = Cast <to = 1> (d) {NORM}"),
        ("float[1] x", "t = Cast <to = 9> (one) h = Compress <axis = 0> (x, t) b = Slice (h, one, one, zero) "
         "s = Shape (b) n = Neg (x) w = Expand (n, s) y = Neg (w)",
         "b = Slice (x, one, one, zero) s = Shape (b) n = Neg (x) w = Expand (n, s) y = Neg (w)"),
        ("float[3,2] x, float[2,4] w", "t = Div (x, nought) u = Tile (t, tiles) y = MatMul (u, w)",
         "t = Div (x, nought) y = MatMul (t, w)"),
        ("float[0,n,3] x, int64[1] k", "s = Shape (x) i = Slice (s, zero, one) "
         "t = Concat <axis = 0> (two, i, k, three) y = Reshape (x, t)",
         "t = Concat <axis = 0> (two, zero, k, three) y = Reshape (x, t)"),
    ],
)  # fmt: skip
def test_faults_of_onnxruntime_that_the_original_escapes_are_no_difference(values: str, right: str, other: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 12]> g ({values}) => (float[] y)
        <float e = {{1e-5}}, float p = {{2}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
         int64[1] three = {{3}}, float nought = {{0}}, int64[2] tiles = {{1, 1}}> {{ NODES }}"""
    require_verdict(text.replace("NODES", right), text.replace("NODES", other), {"n": 1}, "")


def test_onnxruntime_makes_a_zero_point_uint8_if_the_graph_of_its_nodes_holds_it() -> None:
    """Seeds 1000000017 and 1000003046, where it moves the pair after the Reshape before a Gemm.

    QuantizeLinear has had the attribute `output_dtype`, which stays int8, since opset 21.
    """
    text = """<ir_version: 10, opset_import: ["" : OPSET]> g (float[2,3] x, bool c) => (float[] y)
        <float s = {0.1}, int8 z = {0}, int8[2,4] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
          y = If (c) <then_branch = yes () => (float[] a) {
              HERE q = QuantizeLinear (x, s, zero) d = DequantizeLinear (q, s, zero) t = Transpose (d)
              v = DequantizeLinear (w, s, z) a = MatMul (t, v) },
            else_branch = no () => (float[] b) { b = Neg (x) }> }"""
    outside = text.replace("HERE", "").replace("zero", "z")
    inside = text.replace("HERE", "zero = Constant <value = int8 {0}> ()")
    for opset in "20", "21":
        require_verdict(outside.replace("OPSET", opset), inside.replace("OPSET", opset), {}, "")
    session = Session(onnx.parser.parse_model(inside.replace("OPSET", "21")), optimize=True)
    assert "output_dtype INT8 does not match" in session.error


@pytest.mark.parametrize(
    ("scale", "options"),
    [("0.25", Options(then="unfuse")), ("-0.25", Options(emit="standard")),
     ("-0.25", Options(dtype="bfloat16", then="unfuse"))],
)  # fmt: skip
def test_operators_of_a_fused_attention_leave_out_masked_scores(scale: str, options: Options) -> None:
    """The scores of the first key are infinite; the original adds a mask to them, which gives NaN."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[b,4,n,8] q, float[b,4,8,3] x, float[b,4,3,8] v, bool[b,1,n,3] m) => (float[] y)
        <float[3] c = {inf, 1, 1}, float s = {SCALE}, float z = {0}, float low = {-inf}> {
          k = Mul (x, c) t = Mul (q, s) a = MatMul (t, k) w = Where (m, z, low) d = Add (a, w)
          p = Softmax <axis = -1> (d) y = MatMul (p, v) }"""
    model, finite, other = (
        onnx.parser.parse_model(text.replace("SCALE", scale).replace("inf, 1, 1", first))
        for first in ("inf, 1, 1", "1, 1, 1", "2, 1, 1")
    )
    assert judge(model, {"b": 2, "n": 5}, 0, options).kind == "same"
    assert compare_on(finite, other, Inputs({"b": 2, "n": 5}, 0), options).kind == "wrong"


def test_a_rounding_on_purpose_that_is_lost_is_found() -> None:
    there = CHAIN.replace("a = Abs(x)", "w = Cast<to=10>(x) v = Cast<to=1>(w) a = Abs(v)")
    verdict = compare(onnx.parser.parse_model(there), onnx.parser.parse_model(CHAIN), {"n": 50}, 0)
    assert verdict.kind == "wrong", verdict


def test_the_time_limit_passes_what_catches_exceptions() -> None:
    with pytest.raises(Hang), limited(0.05), suppress(Exception):
        started = time.process_time()
        while time.process_time() < started + 5:
            pass


def test_the_time_limit_does_not_count_waiting() -> None:
    with limited(0.05):
        time.sleep(0.2)


def test_a_node_is_duplicated_with_the_names_in_its_branches() -> None:
    """An If may name the results of a branch as its own, of which ONNX allows one."""
    for seed in range(6):
        draft = spelled_graph(Random(seed))
        into_branch(draft)
        draft.random = Last()
        duplicate(draft)
        assert [node.op_type for node in draft.nodes].count("If") == 2
        onnx.checker.check_model(draft.model())


class Last(Random):
    """Chooses the last of everything."""

    def choice(self, of: Sequence[Any]) -> Any:
        return of[-1]


def test_a_failing_model_is_made_smaller() -> None:
    def fails_with_exp(model: onnx.ModelProto, sizes: dict[str, int], seed: int) -> Verdict:
        return Verdict("wrong" if any(node.op_type == "Exp" for node in model.graph.node) else "same")

    model, _ = reduced(onnx.parser.parse_model(CHAIN), {"n": 2}, 0, Verdict("wrong"), fails_with_exp)
    assert [node.op_type for node in model.graph.node] == ["Exp"]


WORKER = """
import json, os, pathlib, sys, time
mark = pathlib.Path({mark!r})
for seed in json.load(sys.stdin):
    print(json.dumps(dict(begins=seed)), flush=True)
    said = dict(seed=str(seed), kind="random", options="", verdict="same", key="", sentence="", text="", failed=False)
    if seed == 2:
        os.abort()
    if seed == 3 or seed == 4 and not mark.exists():
        mark.write_text("slow once") if seed == 4 else None
        time.sleep(60)
    if seed == 5:
        print(json.dumps(dict(found=dict(said, verdict="wrong", failed=True))), flush=True)
        time.sleep(60)
    print(json.dumps(said))
"""


def test_cases_that_end_their_process_or_do_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process aborts at 2, hangs twice at 3, once at 4, and in the reduction of 5; the others are judged."""
    monkeypatch.setattr(fuzzer, "WORKER", ["-c", WORKER.format(mark=str(tmp_path / "mark"))])
    monkeypatch.setattr(fuzzer, "MAX_SECONDS", 1.0)
    tally = fuzzer.fuzz([1, 2, 3, 4, 5, 6], 1)
    assert tally.counts == {"random": {"same": 3, "wrong": 1}, "ended": {"crash": 1, "hang": 1}}
    assert ([each["seed"] for each in tally.failures], tally.slow) == (["2", "3", "5"], [3, 4])
    row = tally.table()[-1]
    assert (row["cases"], row["wrong"], row["hangs and crashes"], row["same"]) == (6, 1, 2, 3)


@pytest.mark.parametrize(("often", "kind"), [(1, "same"), (2, "unrunnable")])
def test_a_case_that_lacks_memory_is_judged_again_in_a_fresh_process(
    often: int, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a model in a process that had run thousands did (seed 1050026361)."""
    workers = []

    def verdict(case: FuzzCase) -> Verdict:
        workers.append(own_process.current_worker())
        lacks = len(workers) <= often
        return Verdict("unrunnable", "std::bad_alloc (at x float32[3])") if lacks else Verdict("same")

    monkeypatch.setattr(FuzzCase, "verdict", verdict)
    monkeypatch.setattr(fuzzer, "MAX_REDUCED", 0)
    fuzzer._judge_one(7)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["verdict"], said["failed"]) == (kind, kind != "same")
    assert len({id(worker) for worker in workers}) == 2


def test_a_case_whose_drawing_raises_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The case is stored without a model, and the run goes on."""
    monkeypatch.setattr(fuzz_cases, "case_of", lambda seed: [][seed])
    fuzzer._judge_one(7)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    fuzzer.Tally(folder=tmp_path).take(said)
    assert said["sentence"] == "the fuzzer raises IndexError in <lambda>: list index out of range"
    assert [path.name for path in tmp_path.iterdir()] == ["crash_7.txt"]


def test_a_case_whose_drawing_ends_its_process_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The case also ends the process that draws it again in order to store it."""
    monkeypatch.setattr(fuzz_cases, "case_of", lambda seed: os._exit(6))
    said = {"seed": "8", "kind": "ended", "options": "", "verdict": "crash", "sentence": "code -6", "text": ""}
    fuzzer.Tally(folder=tmp_path)._store(said)
    assert [path.name for path in tmp_path.iterdir()] == ["crash_8.txt"]


def test_the_iterations_of_a_loop_in_a_branch_are_no_special_value() -> None:
    """Seed 1050017576, in which both branches would run 2^63 - 1 times."""
    found = []
    for seed in range(40):
        draft = random_graph(Random(seed), 4)
        draft.random = Random(seed)
        into_loop(draft)
        into_branch(draft)
        for _ in range(8):
            put_special_values(draft)
        held = {node.output[0]: node.attribute[0].t for node in draft.nodes if node.op_type == "Constant"}
        held |= {tensor.name: tensor for tensor in draft.weights}  # others lie in the branch
        loops = [node for node in nodes(OneNode(tuple(draft.nodes))) if node.op_type == "Loop"]
        found += [int(onnx.numpy_helper.to_array(held[n.input[0]])) for n in loops if n.input[0] in held]
    assert set(found) == {1, 2}


def test_hostile_versions_of_a_model_without_opsets() -> None:
    model = onnx.parser.parse_model(CHAIN)
    del model.opset_import[:]
    for seed in range(20):
        wrong_versions(Random(seed), model)
    assert model.ir_version != onnx.parser.parse_model(CHAIN).ir_version


@pytest.mark.parametrize(("dim", "size"), [("n", 3), ("2*n + 1", 7), (" ", 5), ("a b", 2), ("()", 2), (None, 2)])
def test_sizes_of_dims(dim: str | None, size: int) -> None:
    assert shape_at([dim], {"n": 3, " ": 5}) == (size,)


def test_huge_sizes_are_not_inferred() -> None:
    """onnx would make 10^7 dimensions of r, which is multiplied, as if it were a shape."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 22]>
        g (float[n,3] x, int64[1] k) => (float[] y) <int64[1] huge = {10000000}> {
          r = Reshape (k, huge) q = Mul (r, k) y = Reshape (x, q) }""")
    assert types(model) == {}
    verdict = judge(model, {"n": 2}, 0)
    assert verdict.kind == "idle", verdict
    called = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 22, "l" : 1]>
        g (int64[1] k) => (int64[] q) <int64[1] huge = {10000000}> { q = l.f (k, huge) }
        <domain: "l", opset_import: ["" : 22]> f (k, huge) => (q) { r = Reshape (k, huge) q = Mul (r, k) }""")
    assert types(called) == {}
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([1]), "huge"))
    assert "q" in types(model)


@pytest.mark.parametrize("seed", [700001058, 700004317])
def test_seeds_that_found_faults(seed: int) -> None:
    """A Transpose of bfloat16 before opset 13, and copies of an Identity that no region takes."""
    assert case_of(seed).verdict().kind == "same"
