"""The pattern language on small fusions: what each word matches, and which error a wrong declaration gets."""

from __future__ import annotations

import linecache
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from runtimes import assert_close, run

import onnxfuse
from onnxfuse import (
    Fusion,
    PatternError,
    UsageError,
    attribute,
    causal,
    choose,
    contrib,
    either,
    full,
    fusion,
    op,
    optimize,
    or_zeros,
    rearrange,
    require,
    results,
    scalar,
    scaled,
    shared,
    size,
    tensor,
    weight,
    when,
)
from onnxfuse.dsl import catalogue, words
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.spans import Span, here
from onnxfuse.dsl.terms import Apply, Either, Product, Sum, Term, walk
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.rewrite.function_body import BodyBuilder
from onnxfuse.rewrite.select import FusionResult
from onnxfuse.rewrite.variant import Variant

NUMBERS = {"half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "six": 6.0}
INPUTS = {name: np.random.default_rng(len(name)).standard_normal((3, 8)).astype(np.float32) for name in "abcd"}


def model(nodes: str, opset: int = 20, outputs: str = "y", **weights: Any) -> onnx.ModelProto:
    """Return a model with inputs a, b, c, d of shape [3, 8], in which the NUMBERS are constants."""
    inputs = ", ".join(f"float[3,8] {name}" for name in INPUTS)
    result = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    )
    arrays: Mapping[str, Any] = {**NUMBERS, **weights}
    for name, value in arrays.items():
        array = np.array(value, np.float32) if not isinstance(value, np.ndarray) else value
        result.graph.initializer.append(numpy_helper.from_array(array, name))
    typed = onnx.shape_inference.infer_shapes(result, strict_mode=True)
    for made, known in zip(result.graph.output, typed.graph.output, strict=True):
        made.CopyFrom(known)
    return result


def fuse(declared: Fusion, nodes: str, **rest: Any) -> tuple[onnx.ModelProto, FusionResult]:
    """Optimize with one fusion, and assert that the results are those of the original model."""
    original = model(nodes, **rest)
    found = fuse_model(original, None, Settings([declared]))
    onnx.checker.check_model(found.model, full_check=True)
    before, _ = run(original, INPUTS)
    after, reason = run(found.model, INPUTS)
    assert before is not None
    assert after is not None, reason
    assert_close(before, after, onnx.TensorProto.FLOAT)
    return found.model, found.fusing


def call(declared: Fusion, nodes: str, **rest: Any) -> dict[str, Any]:
    """Return the attributes of the only fused node, and the names of its inputs as `reads`."""
    optimized, fusing = fuse(declared, nodes, **rest)
    calls = [n for n in optimized.graph.node if n.domain == DOMAIN]
    assert len(calls) == 1, reasons(fusing)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in calls[0].attribute}
    texts = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    return {**texts, "reads": list(calls[0].input)}


def is_fused(declared: Fusion, nodes: str, **rest: Any) -> bool:
    """Return whether any node is fused."""
    optimized, _ = fuse(declared, nodes, **rest)
    return any(n.domain == DOMAIN for n in optimized.graph.node)


def why_not(declared: Fusion, nodes: str, **rest: Any) -> str:
    """Assert that nothing is fused, and return the reasons."""
    optimized, fusing = fuse(declared, nodes, **rest)
    assert not any(n.domain == DOMAIN for n in optimized.graph.node)
    return reasons(fusing)


def reasons(fusing: FusionResult) -> str:
    """Return the reason of every miss, each on a line."""
    return "\n".join(miss.reason for miss in fusing.missed)


# --- sums and products -------------------------------------------------------------------------------------------


@fusion(out="n d")
def sum_of_three(x=tensor("n d"), y=tensor("n d"), z=tensor("n d")):
    """x + y + |z|"""
    return x + y + op.Abs(z)


@fusion(out="n d")
def tripled(x=tensor("n d"), y=tensor("n d")):
    """3 * x * |y|"""
    return 3 * x * op.Abs(y)


@fusion(out="n d")
def shifted(x=tensor("n d"), by=scalar()):
    """|x| + by"""
    return op.Abs(x) + by


@fusion(out="n d")
def ratio(x=tensor("n d"), y=tensor("n d")):
    """|x| / exp(y)"""
    return op.Abs(x) / op.Exp(y)


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Abs(c) u = Add(a, b) y = Add(u, t)",
        "t = Abs(c) u = Add(a, b) y = Add(t, u)",
        "t = Abs(c) u = Add(t, b) y = Add(u, a)",
        "t = Abs(c) u = Add(b, t) y = Add(a, u)",
    ],
)
def test_a_sum_matches_in_any_order_and_grouping(nodes: str) -> None:
    assert sorted(call(sum_of_three, nodes)["reads"]) == ["a", "b", "c"]


def test_a_sum_matches_exactly_its_terms() -> None:
    assert not is_fused(sum_of_three, "t = Abs(c) y = Add(a, t)")
    optimized, _ = fuse(sum_of_three, "t = Abs(c) u = Add(a, b) v = Add(u, t) y = Add(v, d)")
    assert sorted(n.op_type for n in optimized.graph.node) == ["Add", "sum_of_three"]


def test_a_partial_sum_that_is_read_outside_is_not_fused() -> None:
    found = why_not(sum_of_three, "t = Abs(c) u = Add(a, b) y = Add(u, t) z = Relu(u)", outputs="y, z")
    assert "'u' (Add" in found
    assert "is also read by Relu" in found


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Abs(b) u = Mul(a, t) y = Mul(u, three)",
        "t = Abs(b) u = Mul(three, a) y = Mul(u, t)",
        "t = Abs(b) u = Mul(t, six) v = Mul(u, half) y = Mul(v, a)",
        "t = Abs(b) u = Div(t, half) v = Mul(a, u) w = Mul(v, three) y = Div(w, two)",
    ],
)
def test_the_constants_of_a_product_are_collected(nodes: str) -> None:
    assert sorted(call(tripled, nodes)["reads"]) == ["a", "b"]


def test_the_sentence_shows_the_constant_that_was_found() -> None:
    found = why_not(tripled, "t = Abs(b) u = Mul(a, t) y = Mul(u, six)")
    assert "the constant is 6 ('six'); required 3" in found


@pytest.mark.parametrize(
    ("nodes", "value"),
    [
        ("t = Abs(a) y = Add(t, half)", 0.5),
        ("t = Abs(a) y = Add(six, t)", 6.0),
        ("t = Abs(a) y = Sub(t, half)", -0.5),
        ("t = Abs(a) u = Add(t, one) y = Add(u, half)", 1.5),
    ],
)
def test_a_scalar_is_the_sum_of_the_constants(nodes: str, value: float) -> None:
    assert call(shifted, nodes)["by"] == value


def test_a_tensor_is_not_a_scalar() -> None:
    assert not is_fused(shifted, "t = Abs(a) y = Add(t, row)", row=np.ones(8, np.float32))


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Abs(a) e = Exp(b) y = Div(t, e)",
        "t = Abs(a) e = Exp(b) r = Reciprocal(e) y = Mul(r, t)",
        "t = Abs(a) e = Exp(b) r = Div(one, e) y = Mul(t, r)",
    ],
)
def test_a_quotient_may_be_a_product_with_the_reciprocal(nodes: str) -> None:
    assert call(ratio, nodes)["reads"] == ["a", "b"]


def test_a_quotient_is_not_commutative() -> None:
    assert call(ratio, "t = Abs(b) e = Exp(a) y = Div(t, e)")["reads"] == ["b", "a"]
    assert not is_fused(ratio, "t = Abs(a) e = Exp(b) y = Div(e, t)")


# --- alternatives ------------------------------------------------------------------------------------------------


@fusion(out="n d")
def square_root_of_square(x=tensor("n d")):
    """sqrt(x^2)"""
    return op.Sqrt(x**2)


@fusion(out="n d")
def softened(x=tensor("n d"), slope=scalar(optional=True)):
    """A choice of two activations, each in two spellings."""
    return choose(
        "kind",
        plus=either(op.Softplus(x), op.Log(op.Exp(x) + 1)),
        leaky=either(op.LeakyRelu(x, alpha=slope), op.Max(x, x * slope)),
    )


@fusion(out="n d")
def twice_the_same(x=tensor("n d"), y=tensor("n d")):
    """The same activation of both operands."""

    def curve(value: Term) -> Term:
        return choose("kind", relu=op.Relu(value), tanh=op.Tanh(value))

    return curve(x) + op.Neg(curve(y))


def test_either_matches_each_spelling() -> None:
    assert call(square_root_of_square, "s = Pow(a, two) y = Sqrt(s)")["reads"] == ["a"]
    assert call(square_root_of_square, "s = Mul(a, a) y = Sqrt(s)")["reads"] == ["a"]
    assert not is_fused(square_root_of_square, "s = Mul(a, b) y = Sqrt(s)")
    assert "'three' is 3; required 2" in why_not(square_root_of_square, "s = Pow(a, three) y = Sqrt(s)")


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ("y = Softplus(a)", "plus"),
        ("e = Exp(a) f = Add(e, one) y = Log(f)", "plus"),
        ("y = LeakyRelu<alpha=0.25>(a)", "leaky"),
        ("m = Mul(a, half) y = Max(m, a)", "leaky"),
    ],
)
def test_choose_records_the_variant(nodes: str, kind: str) -> None:
    assert call(softened, nodes)["kind"] == kind


def test_an_attribute_and_a_constant_are_the_same_scalar() -> None:
    assert call(softened, "y = LeakyRelu<alpha=0.5>(a)")["slope"] == 0.5
    assert call(softened, "m = Mul(a, half) y = Max(m, a)")["slope"] == 0.5


def test_an_optional_scalar_that_is_absent_is_no_attribute() -> None:
    assert "slope" not in call(softened, "y = Softplus(a)")


@fusion(out="n d")
def leaky(x=tensor("n d"), slope=scalar(if_absent=0.0)):
    """max(x, slope * x), which is relu(x) for the slope 0"""
    return either(op.Max(x, x * slope), op.Relu(x))


def test_a_scalar_may_have_a_value_where_it_is_absent() -> None:
    assert call(leaky, "m = Mul(a, half) y = Max(m, a)")["slope"] == 0.5
    assert call(leaky, "y = Relu(a)")["slope"] == 0.0


def test_a_choice_has_one_label_throughout() -> None:
    assert call(twice_the_same, "p = Tanh(a) q = Tanh(b) n = Neg(q) y = Add(n, p)")["kind"] == "tanh"
    assert not is_fused(twice_the_same, "p = Tanh(a) q = Relu(b) n = Neg(q) y = Add(n, p)")


# --- outside readers, several outputs ----------------------------------------------------------------------------


@fusion(out="n d")
def with_private(x=tensor("n d")):
    """The exponential must not be read elsewhere."""
    return op.Relu(op.Exp(x))


@fusion(out="n d")
def with_shared(x=tensor("n d")):
    """The exponential may be read elsewhere."""
    return op.Relu(shared(op.Exp(x)))


@fusion(out=("n d", "n d"))
def with_output(x=tensor("n d"), z=tensor("n d")):
    """The exponential is a second output."""
    inner = op.Exp(x)
    return op.Relu(inner) * z, inner


READ_TWICE = "e = Exp(a) y = Relu(e) z = Neg(e)"


def test_a_private_value_with_another_reader_is_not_fused_away() -> None:
    assert "'e' (Exp" in why_not(with_private, READ_TWICE, outputs="y, z")
    assert "output of the graph" in why_not(with_private, "e = Exp(a) y = Relu(e)", outputs="y, e")


def test_a_shared_value_stays_for_its_other_readers() -> None:
    optimized, _ = fuse(with_shared, READ_TWICE, outputs="y, z")
    assert sorted(n.op_type for n in optimized.graph.node) == ["Exp", "Neg", "with_shared"]
    optimized, _ = fuse(with_shared, "e = Exp(a) y = Relu(e)")
    assert [n.op_type for n in optimized.graph.node] == ["with_shared"]


def test_a_second_output_is_there_where_it_is_read() -> None:
    optimized, _ = fuse(with_output, "e = Exp(a) r = Relu(e) y = Mul(r, b) z = Neg(e)", outputs="y, z")
    assert [list(n.output) for n in optimized.graph.node] == [["y", "e"], ["z"]]
    optimized, _ = fuse(with_output, "e = Exp(a) r = Relu(e) y = Mul(r, b)")
    assert [list(n.output) for n in optimized.graph.node] == [["y"]]


def test_an_operand_computed_from_the_second_output_would_make_a_cycle() -> None:
    found = why_not(with_output, "e = Exp(a) r = Relu(e) z = Neg(e) y = Mul(r, z)", outputs="y")
    assert "z ('z') is computed from a value inside; fusing would make a cycle" in found


def test_without_the_second_output_there_is_no_cycle_to_make() -> None:
    found = why_not(with_output, "e = Exp(a) r = Relu(e) n = Neg(r) y = Mul(r, n)")
    assert "'r' (Relu" in found
    assert "is also read by Neg" in found


# --- guards ------------------------------------------------------------------------------------------------------


@fusion(out="n d")
def for_even_rows(x=tensor("n d"), by=scalar(), bias=weight("d", optional=True)):
    """|x| + by, or |x| + bias, for an even number of rows."""
    require("{n} rows are even", lambda n: n % 2 == 0)
    require("by or a bias, but {by} is 1", lambda by, bias: by != 1 or bias is not None)
    return either(op.Abs(x) + bias, op.Abs(x) + by)


@fusion(out="n d")
def small_steps(x=tensor("n d"), by=scalar()):
    """Two spellings, one of them under a condition."""
    return either(
        when(op.Exp(x * by), "the step {by} is at most 1", lambda by: by <= 1),
        when(op.Exp(op.Abs(x) * by), "rank and type are as in the test", lambda rank, dtype: rank == 2 < len(dtype)),
    )


def test_the_sentence_of_require_is_the_reason() -> None:
    assert "3 rows are even" in why_not(for_even_rows, "t = Abs(a) y = Add(t, half)")


def test_require_sees_dimensions_scalars_and_operands() -> None:
    even = "s = Concat<axis=0>(a, b) t = Abs(s) y = Add(t, {})"
    assert call(for_even_rows, even.format("half"))["by"] == 0.5
    assert "by or a bias, but 1 is 1" in why_not(for_even_rows, even.format("one"))
    assert call(for_even_rows, even.format("row"), row=np.ones(8, np.float32))["operands"] == "x bias"


def test_the_span_of_a_failed_guard_is_its_source() -> None:
    _, fusing = fuse(for_even_rows, "t = Abs(a) y = Add(t, half)")
    assert source(fusing.missed[0].span).startswith('require("{n} rows are even"')


@fusion(out="n d")
def modern(x=tensor("n d"), y=tensor("n d")):
    """|x| * y, in one dtype, from opset 18 on."""
    require("x is {dtypes}, as y is", lambda dtypes: dtypes == {"x": "float32", "y": "float32"})
    return when(op.Abs(x) * y, "opset {opset} is not old", lambda opset: opset >= 18)


def test_a_condition_sees_dtypes_and_the_opset() -> None:
    assert is_fused(modern, "t = Abs(a) y = Mul(t, b)")
    assert not is_fused(modern, "t = Abs(a) y = Mul(t, b)", opset=17)


@fusion(out="n d")
def unrelated(x=tensor("n d"), y=tensor("n d")):
    """|x| * y, where x is not a multiple of y."""
    require("x is not a multiple of {y}", lambda x, y, is_multiple: not is_multiple(x, y))
    return op.Abs(x) * y


def test_a_condition_may_ask_for_relations_of_operands() -> None:
    assert is_fused(unrelated, "t = Abs(a) y = Mul(t, b)")
    assert "required: x is not a multiple of 'b'" in why_not(unrelated, "s = Mul(b, half) t = Abs(s) y = Mul(t, b)")
    assert unrelated.guards[0].names == ("x", "y")
    assert unrelated.guards[0].check({"x": 1, "y": 1}), "without a graph no two values are related"


@pytest.mark.parametrize(
    ("sentence", "text"),
    [
        ("no bias", "required: no bias; found bias 'b', no scale, how relu"),
        ("{how} and tanh", "required: relu and tanh"),
        ("how is {how}; required tanh", "how is relu; required tanh"),
        ("tanh; found {how}", "required: tanh; found relu"),
    ],
)
def test_a_condition_that_does_not_hold_says_what_is_required_and_what_was_found(sentence: str, text: str) -> None:
    guard = Guard(sentence, lambda bias, scale, how: False, here())
    assert guard.reason({"bias": "'b'", "how": "relu"}) == text


@fusion(out="n d")
def products_of_two_kinds(x=tensor("n d"), y=tensor("n d")):
    """|x| e^y, or |x| sin(y)"""
    return op.Abs(x) * either(op.Exp(y), op.Sin(y))


def test_a_tensor_that_is_multiplied_by_itself_is_named_once() -> None:
    found = why_not(products_of_two_kinds, "p = Abs(a) q = Exp(p) e = Cos(q) y = Mul(e, e)")
    assert "'e' (the output of Cos) is multiplied by itself; required Abs, and Exp or Sin" in found
    found = why_not(products_of_two_kinds, "p = Abs(a) q = Exp(p) e = Cos(q) f = Tan(q) y = Mul(e, f)")
    assert "'e' (the output of Cos) and 'f' (the output of Tan) are multiplied; required Abs, and Exp or Sin" in found


def test_when_holds_for_its_spelling_only() -> None:
    assert call(small_steps, "m = Mul(a, half) y = Exp(m)")["by"] == 0.5
    assert "required: the step 6 is at most 1" in why_not(small_steps, "m = Mul(a, six) y = Exp(m)")
    assert call(small_steps, "t = Abs(a) m = Mul(t, six) y = Exp(m)")["reads"] == ["a"]


# --- captures ----------------------------------------------------------------------------------------------------


@fusion(out="n d")
def normal_rows(x=tensor("n d"), scale=weight("d"), axis=attribute()):
    """softmax(x) * scale"""
    return op.Softmax(x, axis=axis) * scale


@fusion(out="n m")
def scores(x=tensor("n d"), y=tensor("m d"), scale=scalar(optional=True)):
    """scale * x y^T"""
    return op.Tanh(scaled(op.MatMul(x, rearrange(y, "m d -> d m")), scale))


@fusion(out="n d")
def halves_swapped(x=tensor("n d")):
    """The halves of the rows of x, swapped."""
    half = size("d") // 2
    first = op.Slice(x, starts=[0], ends=[half], axes=[-1], steps=[1])
    second = op.Slice(x, starts=[half], ends=[2**63 - 1], axes=[-1], steps=[1])
    return op.Concat(second, first, axis=-1)


def test_named_dimensions_agree() -> None:
    row, wrong = np.arange(8, dtype=np.float32), np.ones((3, 1), np.float32)
    assert call(normal_rows, "t = Softmax(a) y = Mul(t, w)", w=row)["axis"] == -1
    assert call(normal_rows, "t = Softmax<axis=0>(a) y = Mul(t, w)", w=row)["axis"] == 0
    assert "'w' has shape (3, 1); required (d=8)" in why_not(normal_rows, "t = Softmax(a) y = Mul(t, w)", w=wrong)


def test_a_weight_is_constant() -> None:
    found = why_not(normal_rows, "t = Softmax(a) y = Mul(t, b)")
    assert "'b' is a graph input; required a constant for scale" in found


@pytest.mark.parametrize(
    ("nodes", "scale"),
    [
        ("k = Transpose<perm=[1,0]>(b) s = MatMul(a, k) y = Tanh(s)", 1.0),
        ("k = Transpose<perm=[1,0]>(b) s = MatMul(a, k) t = Mul(s, half) y = Tanh(t)", 0.5),
        ("k = Transpose<perm=[1,0]>(b) q = Mul(a, half) s = MatMul(q, k) t = Div(s, two) y = Tanh(t)", 0.25),
        ("u = Mul(half, b) k = Transpose<perm=[1,0]>(u) q = Mul(a, three) s = MatMul(q, k) y = Tanh(s)", 1.5),
    ],
)
def test_scaled_collects_factors_from_both_sides(nodes: str, scale: float) -> None:
    found = call(scores, nodes)
    assert (found["scale"], found["reads"]) == (scale, ["a", "b"])


def test_a_number_with_more_axes_than_what_it_meets_is_no_factor() -> None:
    deep = np.full((1, 1, 1), 0.5, np.float32)
    nodes = "k = Transpose<perm=[1,0]>(b) s = MatMul(a, k) t = Mul(s, deep) y = Tanh(t)"
    assert not is_fused(scores, nodes, deep=deep)
    assert call(scores, nodes, deep=deep[0])["scale"] == 0.5
    assert not is_fused(square_root_of_square, "s = Pow(a, deep) y = Sqrt(s)", deep=deep * 4)
    found = why_not(anything, "s = Pow(a, deep) y = Sqrt(s)", deep=deep * 4)
    assert "'deep' has 3 axes, more than what it meets" in found
    assert not is_fused(shifted_anything, "t = Abs(a) y = Add(t, deep)", deep=deep)


@fusion(out="...")
def anything(x=tensor()):
    """sqrt(x^2) of any rank"""
    return op.Sqrt(op.Pow(x, 2))


@fusion(out="...")
def shifted_anything(x=tensor(), by=scalar()):
    """|x| + by of any rank"""
    return op.Abs(x) + by


def test_a_size_is_used_in_an_attribute() -> None:
    nodes = "p = Slice(a, i0, {0}, axes) q = Slice(a, {0}, i8, axes) y = Concat<axis={1}>(q, p)"
    ints = {name: np.array([int(name[1:])]) for name in ("i0", "i3", "i4", "i8")} | {"axes": np.array([1])}
    assert call(halves_swapped, nodes.format("i4", 1), **ints)["reads"] == ["a"]
    assert call(halves_swapped, nodes.format("i4", -1), **ints)["reads"] == ["a"]
    _, fusing = fuse(halves_swapped, nodes.format("i3", 1), **ints)
    assert "starts=[3]; required [4]" in reasons(fusing)


@fusion(out="n ...")
def in_groups(x=tensor("n ...")):
    """x normalized in groups"""
    return op.LpNormalization(x, p=size("groups"))


def test_a_size_that_is_an_attribute_names_the_dimension() -> None:
    found = call(in_groups, "y = LpNormalization<axis=-1, p=1>(a)")
    assert (found["groups"], found["reads"]) == (1, ["a"])


@fusion(out="n d")
def normal(x=tensor("n d"), epsilon=scalar(if_absent=1e-5)):
    """x normalized in each row, by an operator that requires weights"""
    row = rearrange(x, "n d -> 1 n d")
    rows = op.InstanceNormalization(row, full(1, "n"), full(0, "n"), epsilon=epsilon)
    return rearrange(rows, "1 n d -> n d")


def test_every_element_of_a_full_constant_is_checked() -> None:
    nodes = "t = Reshape(a, s3) u = InstanceNormalization(t, w, z) y = Reshape(u, s2)"
    rest = {"s3": np.array([1, 3, 8]), "s2": np.array([3, 8]), "z": np.zeros(3, np.float32)}
    assert call(normal, nodes, w=np.ones(3, np.float32), **rest)["reads"] == ["a"]
    found = why_not(normal, nodes, w=np.array([1, 1, 2], np.float32), **rest)
    assert "'w' has an element 2; required 1 everywhere" in found


@fusion(out="n d")
def clipped(x=tensor("n d"), high=tensor()):
    """min(x, high), without a lower bound"""
    return op.Clip(x, None, high)


def test_an_input_that_is_none_must_be_left_out() -> None:
    assert call(clipped, "y = Clip(a, , six)")["operands"] == "x high"
    assert "'half' is given; required to be left out" in why_not(clipped, "y = Clip(a, half, six)")


def test_an_attribute_that_is_not_mentioned_must_have_its_default() -> None:
    assert is_fused(with_axis, "m = ReduceMean<axes=[1]>(a) y = Sub(a, m)", opset=13)
    assert is_fused(with_axis, "m = ReduceMean<axes=[-1], keepdims=1>(a) y = Sub(a, m)", opset=13)
    nodes = "s = Slice(a, i0, i1, i0) m = ReduceMean<axes=[1], keepdims=0>(s) y = Sub(b, m)"
    assert not is_fused(with_axis, nodes, opset=13, i0=np.array([0]), i1=np.array([1]))


@fusion(out="n n")
def with_column(x=tensor("n"), y=tensor("n n")):
    """x as a column, plus y"""
    return op.Add(op.Unsqueeze(x, axes=[1]), y)


def test_axes_of_unsqueeze_are_those_of_its_result() -> None:
    nodes = """r = ReduceMax<axes=[0], keepdims=0>(a) t = Transpose(a) s = MatMul(t, b)
        col = Unsqueeze(r, axes) y = Add(col, s)"""
    for axis, fits in ((1, True), (-1, True), (0, False), (-2, False)):
        assert is_fused(with_column, nodes, opset=13, axes=np.array([axis])) == fits, axis


@fusion(out="n d")
def with_axis(x=tensor("n d")):
    """x - mean(x)"""
    return x - op.ReduceMean(x, axes=[-1])


def test_an_attribute_that_became_an_input_matches_as_either() -> None:
    assert is_fused(with_axis, "m = ReduceMean(a, last) y = Sub(a, m)", opset=18, last=np.array([-1]))


# --- declaration errors ------------------------------------------------------------------------------------------


def no_capture() -> Fusion:
    @fusion(out="n")
    def wrong(x):
        return op.Relu(x)

    return wrong


def other_default() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n"), slope=0.5):
        return op.Relu(x)

    return wrong


def too_many_outputs() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n")):
        return op.Relu(x), op.Abs(x)

    return wrong


def no_term() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n")):
        return op.Relu("x")

    return wrong


def no_operator() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n")):
        return either(op.Sigmod(x), contrib.FastGelu(x))

    return wrong


def no_scalar() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n"), y=tensor("n")):
        return scaled(op.Relu(x), y)

    return wrong


def not_optional() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n"), zero=tensor("n")):
        return op.DequantizeLinear(x, zero, or_zeros(zero, x))

    return wrong


def no_axis() -> Fusion:
    @fusion(out="b h s d")
    def wrong(x=tensor("b s (h d)")):
        return rearrange(x, "b s (h d) -> b h s d")

    return wrong


def no_score() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n"), y=tensor("n")):
        return causal(op.Relu(x), "n n", y + 1)

    return wrong


def no_node() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n")):
        return results(op.Relu(x) + x, 2)[0]

    return wrong


def not_stored() -> Fusion:
    @fusion(out="n")
    def wrong(x=tensor("n")):
        return results(op.Split(x, axis=0), 2)[0]

    return wrong


def no_parameter() -> Fusion:
    @fusion(out="n", example={"z": (1, 2)})
    def wrong(x=tensor("n")):
        return op.Relu(x)

    return wrong


def no_image() -> Fusion:
    @fusion(out="n", channels_last=["x", "w"])
    def wrong(x=tensor("n"), w=weight("n")):
        return x + w

    return wrong


def two_images() -> Fusion:
    @fusion(out=("n", "n"), channels_last=["x"])
    def wrong(x=tensor("n")):
        y = op.Relu(x)
        return op.Sqrt(y), y

    return wrong


@pytest.mark.parametrize(
    ("declare", "sentence"),
    [
        (no_capture, "parameter 'x' needs a default: tensor(), weight(), scalar() or attribute()"),
        (other_default, "parameter 'slope' needs a default"),
        (too_many_outputs, "'wrong' returns 2 values, out= names 1"),
        (no_term, "a pattern is made of terms and numbers, not str"),
        (no_operator, "ONNX has no operator 'Sigmod'. Did you mean 'Sigmoid'?"),
        (no_scalar, "scaled() needs a scalar parameter as its second argument"),
        (not_optional, "or_zeros() needs an optional parameter as its first argument"),
        (no_axis, "has '(h'; required names of axes, numbers or '...'. Leave the text out where a rearrange() of"),
        (no_score, "causal() needs a scalar parameter as its third argument"),
        (no_node, "results() needs an operator, or a choice of operators, as its first argument"),
        (not_stored, "'wrong' has results() outside another value of stored()"),
        (no_parameter, "example= names 'z', which is not a parameter"),
        (no_image, "channels_last= names 'w', which no parameter declares with tensor()"),
        (two_images, "channels_last= is for fusions of one output; this one has 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_error_of_a_wrong_declaration_names_its_source_line(declare: Callable[[], Fusion], sentence: str) -> None:
    with pytest.raises(PatternError) as caught:
        declare()
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("dsl/test_dsl.py:")


def test_require_outside_a_body_is_an_error() -> None:
    with pytest.raises(PatternError, match=r"require\(\) stands outside a fusion's body"):
        require("n is even", lambda n: n % 2 == 0)


def test_a_fusion_must_have_an_operator() -> None:
    @fusion(out="n d")
    def nothing(x=tensor("n d")):
        return either(op.Relu(x), x)

    with pytest.raises(PatternError, match="'nothing' may be just one of its operands; required an operator"):
        fuse(nothing, "y = Relu(a)")


def test_a_body_that_fails_leaves_no_guards_behind() -> None:
    with pytest.raises(ZeroDivisionError):

        @fusion(out="n")
        def broken(x=tensor("n")):
            require("never seen", lambda n: True)
            return op.Relu(x) * (1 / 0)

    with pytest.raises(PatternError, match="outside"):
        require("n is even", lambda n: n % 2 == 0)


# --- what a declaration knows ------------------------------------------------------------------------------------


def source(span: Span) -> str:
    return linecache.getline(span.file, span.line)[span.column : span.end_column if span.end_column > 0 else None]


def test_spans_point_at_the_expression() -> None:
    texts = {type(t): source(t.span) for t in walk(*with_output.outputs) if isinstance(t, Product | Apply)}
    assert texts[Product] == "op.Relu(inner) * z"
    found = {t.op: source(t.span) for t in walk(*with_output.outputs) if isinstance(t, Apply)}
    assert found == {"Relu": "op.Relu(inner)", "Exp": "op.Exp(x)"}
    assert [source(t.span) for t in walk(*sum_of_three.outputs) if isinstance(t, Sum)] == ["x + y + op.Abs(z)"]
    either_span = next(t.span for t in walk(*square_root_of_square.outputs) if isinstance(t, Either))
    assert source(either_span) == "x**2"
    assert source(scores.captures[2].span) == "scalar(optional=True)"


def test_a_declaration_keeps_names_order_and_documentation() -> None:
    assert [c.name for c in for_even_rows.captures] == ["x", "by", "bias"]
    assert [c.name for c in for_even_rows.operands] == ["x", "bias"]
    assert for_even_rows.doc == "|x| + by, or |x| + bias, for an even number of rows."
    assert for_even_rows.guards[1].names == ("by", "bias")
    assert contrib.Gelu(normal_rows.captures[0]).op == "com.microsoft::Gelu"


def test_every_word_is_exported() -> None:
    assert set(words.__all__) <= set(onnxfuse.__all__)
    assert [name for name in words.__all__ if getattr(onnxfuse, name) is not getattr(words, name)] == []


def test_a_product_of_products_is_one_product() -> None:
    x, y = tensor("n"), tensor("n")
    product = (2 * x) * (y * 3)
    assert isinstance(product, Product)
    assert len(product.terms) == 4
    assert isinstance(x - 1, Apply)
    assert isinstance(x / 4, Product)


def test_a_required_operand_is_never_left_out() -> None:
    """An operand that is optional for the fusion must be present where the operator requires it."""
    variant = Variant(20, {"x": 1}, (1,), {"x": 2}, 2, choices={})
    builder = BodyBuilder(variant)
    x, y = (c for c in optional_pair.captures)
    assert not builder.can_write(op.Pow(x, y))
    assert builder.can_write(op.Clip(x, y))


def test_a_slice_has_steps_from_opset_10_on() -> None:
    """Before, it would read all elements."""
    (x, _) = optional_pair.captures
    for opset, step, expected in ((9, 1, True), (9, 2, False), (10, 2, True)):
        builder = BodyBuilder(Variant(opset, {"x": 1}, (1,), {"x": 2}, 2, choices={}))
        assert builder.can_write(op.Slice(x, starts=[0], ends=[8], axes=[-1], steps=[step])) is expected


@fusion(out="n d")
def optional_pair(x=tensor("n d"), y=tensor(optional=True)):
    return op.Relu(x)


# --- the user's own fusions --------------------------------------------------------------------------------------

SIGMOID_TWICE = '''
from onnxfuse import fusion, op, tensor

@fusion(out="n d")
def sigmoid_twice(x=tensor("n d")):
    """sigmoid(sigmoid(x))"""
    return op.Sigmoid(op.Sigmoid(x))
'''
OTHER_RMS_NORM = '''
from onnxfuse import fusion, op, tensor

@fusion(out="n d")
def rms_norm(x=tensor("n d")):
    """Not what is built in."""
    return op.Tanh(op.Tanh(x))
'''


def test_a_folder_adds_fusions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIGMOID_TWICE)
    (tmp_path / "_hidden.py").write_text("raise SystemExit")
    assert [f.name for f in catalogue.from_folder(tmp_path)] == ["sigmoid_twice"]
    optimized, report = optimize(model("s = Sigmoid(a) y = Sigmoid(s)"), patterns=[tmp_path], verify=False)
    assert [n.op_type for n in optimized.graph.node] == ["sigmoid_twice"]
    assert report.counts == {"sigmoid_twice": 1}


def test_a_folder_replaces_a_fusion_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "rms.py").write_text(OTHER_RMS_NORM)
    fusions = catalogue.with_folders([tmp_path])
    assert [f.doc for f in fusions if f.name == "rms_norm"] == ["Not what is built in."]
    assert len(fusions) == len(catalogue.builtin())
    optimized, _ = optimize(model("s = Tanh(a) y = Tanh(s)"), patterns=[tmp_path], verify=False)
    assert [n.op_type for n in optimized.graph.node] == ["rms_norm"]


def test_the_error_names_the_file_that_fails(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(PatternError, match=r"broken\.py: ModuleNotFoundError: No module named 'nothing_of_this_name'"):
        catalogue.from_folder(tmp_path)
    (tmp_path / "broken.py").write_text("raise SystemExit(0)")
    with pytest.raises(PatternError, match=r"broken\.py: SystemExit: 0"):
        catalogue.from_folder(tmp_path)


def test_a_folder_without_fusions_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(UsageError, match=r"declares no fusion; decorate a function with @onnxfuse\.fusion"):
        catalogue.from_folder(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        catalogue.from_folder(tmp_path / "empty.py")


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"there is no fusion 'layer_nrom'\. Did you mean 'layer_norm'\?"):
        catalogue.select(catalogue.builtin(), only=["layer_nrom"])
    with pytest.raises(UsageError, match="Known: activation"):
        catalogue.select(catalogue.builtin(), skip=["zzz"])


@pytest.mark.parametrize(
    ("holds", "known", "answer"),
    [
        (lambda rank: rank > 2, {"rank": 3}, True),
        (lambda rank: rank > 2, {"rank": 2}, False),
        (lambda rank: rank > 2, {"rank": None}, "rank"),
        (lambda rank: rank != 2, {"rank": None}, "rank"),
        (lambda rows: rows % 2 == 0, {}, "rows"),
        (lambda bias: bias is None, {}, True),
    ],
)
def test_a_condition_is_refused_where_a_fact_is_not_known(
    holds: Callable[..., bool], known: Mapping[str, int | None], answer: bool | str
) -> None:
    guard = Guard("", holds, here())
    assert guard.answer(known) == answer
    assert guard.check(known) is (answer is True)


def test_an_error_of_a_condition_on_known_facts_is_let_out() -> None:
    with pytest.raises(TypeError, match="not supported"):
        Guard("", lambda rank: rank > "2", here()).check({"rank": 3})


def test_declaring_patterns_looks_up_no_source_ranges() -> None:
    """A range takes longer to find than a term to make, and only messages show it."""
    script = """
from onnxfuse.dsl import spans
spans.Span._range = property(lambda self: (1 / 0, 0, 0) if self._instruction is not None else (0, 0, 0))
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.match.fusion_terms import fusion_terms
print(len([fusion_terms(fusion) for fusion in builtin()]) > 20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
