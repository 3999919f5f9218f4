"""Test that models are compared at sizes of 0 and 1 of each dynamic dim, where the original runs there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from exported_models import load_exported

from onnxfuse import VerificationError, optimize
from onnxfuse.verify import own_process, reference
from onnxfuse.verify.compare import compare
from onnxfuse.verify.inputs import MAX_DIMS_AT_EDGES
from onnxfuse.verify.reference import run_original


@pytest.fixture(autouse=True)
def models_run_in_their_own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only there are models run at sizes of 0."""
    monkeypatch.setattr(own_process, "enabled", True)
    with own_process.own_process(120.0):
        yield


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')


def sizes_at_edges(source: onnx.ModelProto, **options: object) -> list[dict[str, int]]:
    given = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    shapes = options.get("shapes", ())
    return [each.sizes for each in run_original(source, None, given, lambda line: None, shapes).edges]  # type: ignore[arg-type]


def test_each_dim_alone_and_all_together() -> None:
    assert sizes_at_edges(model("(float[b, s, 3] x) => (float[b, s, 3] y) { y = Neg (x) }")) == [
        {"b": 1, "s": 1}, {"b": 0, "s": 0}, {"b": 1, "s": 5}, {"b": 0, "s": 5}, {"b": 2, "s": 1}, {"b": 2, "s": 0},
    ]  # fmt: skip
    assert sizes_at_edges(model("(float[b, 3] x) => (float[b, 3] y) { y = Neg (x) }")) == [{"b": 1}, {"b": 0}]
    assert not sizes_at_edges(model("(float[2, 3] x) => (float[2, 3] y) { y = Neg (x) }"))


def test_sizes_that_are_given_stay() -> None:
    source = model("(float[b, s] x, float[b, t] z) => (float[b, s] y, float[b, t] w) { y = Neg (x)  w = Neg (z) }")
    assert sizes_at_edges(source, shapes=["x:4x6"]) == [{"b": 4, "s": 6, "t": 1}, {"b": 4, "s": 6, "t": 0}]
    assert not sizes_at_edges(source, shapes=["x:4x6", "z:4x2"])
    assert sizes_at_edges(source, z=np.ones((3, 2), np.float32)) == [{"b": 3, "t": 2, "s": 1}, {"b": 3, "t": 2, "s": 0}]


def test_where_the_original_does_not_run_nothing_is_compared() -> None:
    """The Reshape needs an even number of rows."""
    even = model("(float[b, 2] x) => (float[n, 4] y) <int64[2] t = {-1, 4}> { y = Reshape (x, t) }")
    assert {"b": 1} not in sizes_at_edges(even) and {"b": 0} in sizes_at_edges(even)
    assert compare(even, even).passed is True


def test_an_empty_output_is_not_compared_where_the_original_does_not_give_its_own_sizes() -> None:
    """The last Reshape of TensorFlow's Tensordot copies axes of the rows where batch and length are 0."""
    head = "(float[b, s, 2] x) => (float[n, m, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}"
    ends = "int64[2] flat = {-1, 2}, int64[2] first = {0, 1}, int64[1] columns = {3}"
    flattened = model(f"""{head}, {ends}> {{
        rows = Reshape (x, flat)  product = MatMul (rows, w)  sizes = Shape (x)  leading = Gather (sizes, first)
        target = Concat <axis = 0> (leading, columns)  y = Reshape (product, target)
    }}""")
    whole = model(f"{head}> {{ y = MatMul (x, w) }}")
    assert compare(flattened, whole).passed
    assert "b=0, s=0" in compare(whole, flattened).reason


def test_many_dims_take_few_runs() -> None:
    inputs = ", ".join(f"float[a{i}, b{i}] x{i}" for i in range(12))
    nodes = " ".join(f"y{i} = Neg (x{i})" for i in range(12))
    outputs = ", ".join(f"float[a{i}, b{i}] y{i}" for i in range(12))
    assert len(sizes_at_edges(model(f"({inputs}) => ({outputs}) {{ {nodes} }}"))) == 2 + 2 * MAX_DIMS_AT_EDGES


def test_in_this_process_no_size_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "current_worker", lambda: None)
    assert sizes_at_edges(model("(float[b, 3] x) => (float[b, 3] y) { y = Neg (x) }")) == [{"b": 1}]


def test_a_crash_at_a_size_of_0_ends_such_runs() -> None:
    """The lowest integer is divided by -1 where x is empty."""
    source = model("""(float[b, s] x) => (float[b, s] y, int64 z)
        <int64 low = {-9223372036854775808}, int64 one = {1}, int64 zero = {0}>
        { y = Neg (x)  n = Size (x)  e = Equal (n, zero)  m = Neg (one)  d = Where (e, m, one)  z = Div (low, d) }""")
    assert sizes_at_edges(source) == [{"b": 1, "s": 1}]
    assert compare(source, source).passed is True


def test_slow_runs_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result says so."""
    monkeypatch.setattr(reference, "MAX_SECONDS_AT_EDGES", 0.0)
    source = model("(float[b, s, 3] x) => (float[b, s, 3] y) { y = Neg (x) }")
    assert not sizes_at_edges(source)
    told = ("runs at sizes of 0 and 1 ended after 0 s, before all of them were made",)
    assert compare(source, source).notes == optimize(source)[1].verified.notes == told


FLOATS = "(float[b, 2, 3] x) => (float[m, n] y)"


def test_another_shape_of_an_empty_batch_fails() -> None:
    """A Reshape to [-1, batch] becomes one to [6, -1], which is the same for any batch but an empty one."""
    source = model(f"""{FLOATS} <int64[1] rest = {{-1}}, int64 zero = {{0}}, int64[1] axis = {{0}}>
        {{ s = Shape (x)  b0 = Gather (s, zero)  u = Unsqueeze (b0, axis)  t = Concat <axis = 0> (rest, u)
           y = Reshape (x, t) }}""")
    changed = model(f"{FLOATS} <int64[2] t = {{6, -1}}> {{ y = Reshape (x, t) }}")
    found = compare(source, changed)
    assert found.passed is False
    assert found.reason.startswith("at b=0 output 'y' is float32 of shape 6 x 0; the original has float32 of shape ")
    _, report = optimize(source)
    assert report.verified.status == "verified"


def test_a_model_that_does_not_run_at_size_one_fails() -> None:
    """The changed model takes the two largest elements of each column."""
    source = model("(float[b, 3] x) => (float[b, 3] y) { y = Neg (x) }")
    changed = model("""(float[b, 3] x) => (float[b, 3] y) <int64[1] k = {2}, int64[1] a = {0}>
        { n = Neg (x)  t, i = TopK <axis = 0> (n, k)  z = ReduceSum (t, a)  o = Sub (z, z)  y = Add (n, o) }""")
    found = compare(source, changed)
    assert found.passed is False
    assert found.reason.startswith("the optimized model does not run at b=1, where the original does: ")


def test_rounding_at_size_one_is_relative_to_what_the_output_is_elsewhere() -> None:
    """What is normalized over one element is nothing but rounding."""
    text = """(float[b, s] x) => (float[b, s] y) <int64[1] a = {{-1}}, float k = {{{k}}}>
        {{ i = Mul (x, k)  j = Div (i, k)  m = ReduceMean (x, a)  y = Sub (j, m) }}"""
    found = compare(model(text.format(k=3.0)), model(text.format(k=7.0)))
    assert found.passed is True, found.reason


WRONG_AT_ONE = '''"""A negation whose stored body is another function of a single row."""

from onnxfuse import either, fusion, op, tensor


@fusion(out="...")
def wrong_neg(x=tensor("...")):
    """y = -x"""
    return either(op.Where(op.Less(op.Cast(op.Size(x), to=1), 4.0), x, op.Neg(x)), op.Neg(x))
'''


def test_a_fusion_that_is_wrong_at_size_one_is_taken_back(tmp_path: Path) -> None:
    (tmp_path / "wrong_neg.py").write_text(WRONG_AT_ONE, encoding="utf-8")
    source = model("(float[b, 3] x) => (float[b, 3] y) { y = Neg (x) }")
    _, report = optimize(source, only=["wrong_neg"], patterns=[tmp_path])
    (dropped,) = report.dropped
    assert dropped.fusion == "wrong_neg" and dropped.reason.startswith("at b=1 output 'y' is off by ")
    assert report.verified.status == "verified" and not report.counts


LOOP = """(float[b, 4] x, int32 n) => (float[] y) {
  t = Constant <value = bool {1}> ()  z = Constant <value = int64[1] {0}> ()  m = Cast <to = 7> (n)
  f, r = Loop (m, t, x) <body = g (int64 i, bool c, float[] s) => (bool k, float[] u, ROW o) {
    k = Identity (c)  a = Sigmoid (s)  p = Mul (a, s)  u = Add (p, x)  o = ReduceSum <keepdims = 0> (u, z) }>
  y = Tanh (r) }"""


@pytest.mark.parametrize(("row", "is_kept"), [("float[]", True), ("float[4]", False)])
def test_loops_run_without_iterations(row: str, is_kept: bool) -> None:
    """onnxruntime gives rows of unknown shape one axis then; a body with shapes is not written for such rows."""
    source = model(LOOP.replace("ROW", row))
    found = run_original(source, None, {}, lambda line: None)
    assert found.runs[0].feeds["n"] == 2 and {"b": 2, "n": 0} in [each.sizes for each in found.edges]
    assert all("n" not in sizes for sizes in sizes_at_edges(source, n=np.array(1, np.int32)))
    _, report = optimize(source)
    assert [each.reason for each in report.dropped] == is_kept * [
        "at b=2, n=0 output 'y' is float32 of shape 0 x 4; the original has float32 of shape 0"
    ]
    assert report.verified.status == "verified"


@pytest.mark.parametrize("name", ["deberta_eager_dynamo_fp16.onnx", "llama_kvcache_sdpa_ts_fp32.onnx"])
def test_exported_models_compute_the_same_at_sizes_of_0_and_1(name: str) -> None:
    _, report = optimize(load_exported(name))
    assert not report.dropped and report.verified.status == "verified"


def test_a_run_that_exceeds_the_time_limit_is_the_last_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would take as long: verification of a model with nested Scans took minutes."""
    tried, usual = [], reference.run

    def limited(session: object, feeds: dict[str, np.ndarray]) -> dict[str, object]:
        tried.append(feeds["x"].shape[0])
        if len(tried) > 2:
            raise VerificationError("onnxruntime took more than 20 s")
        return usual(session, feeds)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "run", limited)
    source = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, bool f) => (float[n] y)
        { z = Sub (x, x) y = If (f) <then_branch = g () => (float[n] a) { a = Neg (z) },
                                     else_branch = g () => (float[n] b) { b = Abs (z) }> }""")
    found = run_original(source, None, {}, lambda line: None)
    assert (len(found.runs), len(found.edges)) == (2, 0)
    # Two usual runs, one at a larger size, one at an edge, and one with onnxruntime's optimizations.
    assert tried == [2, 3, max(tried), 1, 2]
