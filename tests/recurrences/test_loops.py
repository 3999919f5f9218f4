"""Loops and Scans over a sequence become scans; other Loops keep their form, and a sentence says why."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from onnxfuse import optimize, unfuse
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.explain import explanations
from onnxfuse.fuse_model import Settings, fuse_model

HEAD = '<ir_version: 8, opset_import: ["" : 17]> main '
LOOP = """(float[b,6,t,8] a, float[b,6,t,8] x, float[b,t,8] c, float[b,6,8] s, int64 m, bool p)
    => (float[b,6,8] last, float[t,b,6] y) <int64[1] far = {-1}, bool yes = {1}, int64 one = {1}, int64[1] axis = {2}> {
    shape = Shape <start = 2, end = 3> (a)  length = Squeeze (shape)
    last, y = Loop <body = step (int64 i, bool on, float[b,6,8] now) => (bool still, float[b,6,8] next, float[b,6] out)
        { still = Identity (on)
        at = Gather <axis = 2> (a, i)  xt = Gather <axis = 2> (x, i)  ct = Gather <axis = 1> (c, i)
        kept = Mul (at, now)  next = Add (kept, xt)  column = Unsqueeze (ct, far)
        product = MatMul (next, column)  out = Squeeze (product, far) }> (length, yes, s) }"""
SLICES = {
    "an index of one element": "k = Unsqueeze (i, zeroth)  x1 = Gather <axis = 2> (x, k)  xt = Squeeze (x1, axis)",
    "a Slice": "k = Unsqueeze (i, zeroth)  j = Add (i, one)  e = Unsqueeze (j, zeroth)  x1 = Slice (x, k, e, axis)  "
               "xt = Squeeze (x1, axis)",
}  # fmt: skip
SPELLINGS = {
    "a Loop": LOOP,
    "a constant condition": LOOP.replace("still = Identity (on)", "still = Constant <value = bool {1}> ()"),
    "no condition": LOOP.replace("(length, yes, s)", "(length, , s)"),
    **{name: LOOP.replace("xt = Gather <axis = 2> (x, i)", new).replace("int64 one", "int64[1] zeroth = {0}, int64 one")
       for name, new in SLICES.items()},
    "a sum in place of a product": LOOP.replace("column = Unsqueeze (ct, far)", "row = Unsqueeze (ct, one1)")
        .replace("product = MatMul (next, column)  out = Squeeze (product, far)",
                 "product = Mul (next, row)  out = ReduceSum <keepdims = 0> (product, far)")
        .replace("int64 one", "int64[1] one1 = {1}, int64 one"),
    "results that are appended": LOOP.replace("float[b", "float[2").replace("float[t,b,6] y", "float[2,6,t] y")
        .replace("float[2,6,8] now)", "float[2,6,8] now, float[2,6,n] before)")
        .replace("float[2,6] out", "float[2,6,k] out")
        .replace("out = Squeeze (product, far)", "out = Concat <axis = 2> (before, product)")
        .replace("(length, yes, s)", "(length, yes, s, none)")
        .replace("int64 one", "float[2,6,0] none = {}, int64 one"),
}  # fmt: skip
LIST = (
    LOOP.replace("float[t,b,6] y", "float[b,6,t] y")
    .replace("float[b,6,8] now)", "float[b,6,8] now, seq(float[b,6]) list)")
    .replace("float[b,6] out", "seq(float[b,6]) longer")
    .replace("last, y = Loop", "none = SequenceEmpty ()  last, all = Loop")
    .replace("out = Squeeze (product, far)", "out = Squeeze (product, far)  longer = SequenceInsert (list, out)")
    .replace("(length, yes, s) }", "(length, yes, s, none)  y = ConcatFromSequence <axis = -1, new_axis = 1> (all) }")
)  # fmt: skip
SCAN = """(float[b,6,t,8] a, float[b,6,t,8] x, float[b,t,8] c, float[b,6,8] s) => (float[b,6,8] last, float[b,6,t] y)
    <int64[1] far = {-1}> {
    last, y = Scan <num_scan_inputs = 3, scan_input_axes = [2, -2, 1], scan_output_axes = [2], body = step
        (float[b,6,8] now, float[b,6,8] at, float[b,6,8] xt, float[b,8] ct) => (float[b,6,8] next, float[b,6] out) {
        kept = Mul (at, now)  next = Add (kept, xt)  column = Unsqueeze (ct, far)
        product = MatMul (next, column)  out = Squeeze (product, far) }> (s, a, x, c) }"""


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_loops(name: str) -> None:
    _, report = optimize(parsed(SPELLINGS[name]))
    assert report.counts.get("scan") == 1 and report.verified.status == "verified"


def test_a_scan() -> None:
    model, report = optimize(parsed(SCAN), verify=False)
    assert report.counts == {"scan": 1} and len(model.graph.node) == 1


def test_results_in_a_sequence() -> None:
    """As torch.jit.script writes a list of tensors that torch.stack or torch.cat joins."""
    _, report = optimize(parsed(LIST))
    assert report.counts == {"scan": 1} and report.verified.status == "verified"
    joined = LIST.replace("axis = -1, new_axis = 1", "axis = 2").replace(
        "out = Squeeze (product, far)", "out = Identity (product)"
    )
    _, report = optimize(parsed(joined.replace("seq(float[b,6])", "seq(float[b,6,1])")))
    assert report.counts == {"scan": 1} and report.verified.status == "verified"
    two = LIST.replace("(all) }", "(all)  n = SequenceLength (all) }").replace(
        "float[b,6,t] y)", "float[b,6,t] y, int64 n)"
    )
    assert "scan" not in optimize(parsed(two), verify=False)[1].counts


def test_what_a_step_reads_of_the_graph_is_an_operand() -> None:
    text = LOOP.replace("kept = Mul (at, now)", "h = Mul (at, now)  kept = Mul (h, w)").replace(
        "bool yes", "float[6,1] w = {1, 2, 3, 4, 5, 6}, bool yes"
    )
    model, report = optimize(parsed(text))
    assert report.verified.status == "verified"
    (node,) = (node for node in model.graph.node if node.domain == "onnxfuse")
    assert list(node.input) == ["s", "a", "x", "c", "w"]


NEAR_MISSES = {
    "a condition that a step computes": (
        ("still = Identity (on)", "still = And (on, p)"),
        "its condition is computed, so that it may end before its trip count",
    ),
    "a condition from outside": (("(length, yes, s)", "(length, p, s)"), "its condition is computed"),
    "a trip count of its own": (("(length, yes, s)", "(m, yes, s)"), "its trip count is computed, and 'a' has t steps"),
    "half of the steps": (
        ("length = Squeeze (shape)", "full = Squeeze (shape)  length = Div (full, two)"),
        "its trip count is",
    ),
    "a step that counts": (
        ("kept = Mul (at, now)", "f = Cast <to = 1> (i)  h = Mul (at, now)  kept = Mul (h, f)"),
        "a step computes with its number",
    ),
    "the slice before": (
        ("xt = Gather <axis = 2> (x, i)", "j = Sub (i, one)  xt = Gather <axis = 2> (x, j)"),
        "a step computes with its number",
    ),
    "a state that is read in another order": (
        ("kept = Mul (at, now)", "turned = Transpose <perm = [0, 2, 1]> (now)  r = MatMul (turned, now)  "
                                 "h = MatMul (now, r)  kept = Mul (at, h)"),
        "elements of a state depend on all elements of the state before, as in an RNN's product",
    ),
    "a state that is sliced": (
        ("kept = Mul (at, now)", "z = Constant <value = int64[1] {0}> ()  f = Constant <value = int64[1] {4}> ()  "
                                 "part = Slice (now, z, f, axis)  w = Concat <axis = 2> (part, part)  "
                                 "kept = Mul (at, w)"),
        "moves elements",
    ),
    "an operator that regions lack": (
        ("kept = Mul (at, now)", "h = CumSum (now, one)  kept = Mul (at, h)"),
        "CumSum is none of the operators of regions",
    ),
    "no sequence": (
        ("at = Gather <axis = 2> (a, i)  xt = Gather <axis = 2> (x, i)  ct = Gather <axis = 1> (c, i)",
         "ct = ReduceMax <axes = [1], keepdims = 0> (c)  at = Identity (now)  xt = Identity (now)"),
        "it reads no sequence at the number of its step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    (old, new), reason = NEAR_MISSES[name]
    assert old in LOOP
    text = LOOP.replace(old, new).replace("bool yes", "int64 two = {2}, bool yes")
    result = fuse_model(parsed(text), None, Settings(list(builtin()), regions=True, scans=True))
    assert not any(one.fusion == "scan" for one in result.fused)
    (sentence,) = explanations(result, "scan")
    assert sentence.startswith("scan: not at 'last': ") and reason in sentence


def test_a_sum_of_equal_elements() -> None:
    text = """(float[t,6] x, float[6] s, float m) => (float[6] last) <int64[1] five = {5}, int64[1] zero = {0}> {
        last = Scan <num_scan_inputs = 1, body = step (float[6] now, float[6] xt) => (float[6] next) {
            wide = Expand (m, five)  h = ReduceSum <keepdims = 0> (wide, zero)  g = Mul (xt, h)  next = Add (g, now)
        }> (s, x) }"""
    result = fuse_model(parsed(text), None, Settings(list(builtin()), regions=True, scans=True))
    assert "its steps reduce an axis along which all elements are equal" in explanations(result, "scan")[0]


def test_a_state_that_begins_with_the_sequence() -> None:
    """What computes the sequence stays before the scan, though it makes a larger tensor."""
    text = """(float[t,1] x, float[1,4] a) => (float[t,4] last) {
        h = Mul (x, a)  last = Scan <num_scan_inputs = 1, body = step (float[t,4] now, float[4] ht) => (float[t,4] next)
        { sum = Add (now, ht)  next = Tanh (sum) }> (h, h) }"""
    _, report = optimize(parsed(text))
    assert report.counts["scan"] == 1 and report.verified.status == "verified"


def test_what_computes_a_shape_does_not_join() -> None:
    """The dims are those of a tensor that the operator does not read."""
    text = """(float[t] x, float[1,4] a, float[t,4] b, float[4] s) => (float[4] last) <int64[1] four = {4}> {
        shape = Shape (x)  full = Concat <axis = 0> (shape, four)  h = Expand (a, full)
        last = Scan <num_scan_inputs = 2, body = step (float[4] now, float[4] ht, float[4] bt) => (float[4] next)
        { sum = Add (now, ht)  far = Mul (sum, bt)  next = Tanh (far) }> (s, h, b) }"""
    _, report = optimize(parsed(text))
    assert report.counts["scan"] == 1 and not report.left_out and report.verified.status == "verified"


def test_an_expand_of_an_axis_that_may_have_one_element() -> None:
    text = """(float[t,4] x, float[t,k] u, float[4] s) => (float[4] last, float[t,4] y) <int64[1] four = {4}> {
        last, y = Scan <num_scan_inputs = 2, body = step (float[4] now, float[4] xt, float[k] ut)
            => (float[4] next, float[4] out) { next = Add (now, xt)  out = Expand (ut, four) }> (s, x, u) }"""
    assert "scan" not in optimize(parsed(text), verify=False)[1].counts


def test_states_that_have_no_axis_in_common() -> None:
    """One kernel would compute each state for all elements of the other."""
    text = """(float[t,400] x, float[t,300] u, float[400] p, float[300] q) => (float[400] last_p, float[300] last_q) {
        last_p, last_q = Scan <num_scan_inputs = 2, body = step (float[400] p0, float[300] q0, float[400] xt,
            float[300] ut) => (float[400] p1, float[300] q1) { p1 = Add (p0, xt)  q1 = Mul (q0, ut) }> (p, q, x, u) }"""
    result = fuse_model(parsed(text), None, Settings(list(builtin()), regions=True, scans=True))
    assert "have no axis in common, which are several recurrences" in explanations(result, "scan")[0]


def test_what_is_equal_in_all_steps_does_not_join() -> None:
    """Kernels read the number of steps from an operand, and an Expand would leave none that has it."""
    text = """(float[1,4] w, float[4] s) => (float[4] last) <int64[2] shape = {6, 4}> { h = Expand (w, shape)
        last = Scan <num_scan_inputs = 1, body = step (float[4] now, float[4] ht) => (float[4] next)
        { sum = Add (now, ht)  next = Tanh (sum) }> (s, h) }"""
    model, report = optimize(parsed(text))
    assert report.counts == {"scan": 1} and report.verified.status == "verified"
    assert [node.op_type for node in model.graph.node] == ["Expand", "scan"]


def test_backwards() -> None:
    model = parsed(SCAN)
    model.graph.node[0].attribute.append(helper.make_attribute("scan_input_directions", [1, 1, 1]))
    assert "scan" not in optimize(model, verify=False)[1].counts
    model.graph.node[0].attribute.append(helper.make_attribute("scan_output_directions", [1]))
    _, report = optimize(model)
    assert report.counts["scan"] == 1 and report.verified.status == "verified"


def test_states_of_more_elements_than_registers_hold() -> None:
    _, report = optimize(parsed(SCAN.replace("8", "300")), verify=False)
    assert "scan" not in report.counts


def test_scans_are_switched_off() -> None:
    assert "scan" not in optimize(parsed(LOOP), skip=["scan"], verify=False)[1].counts
    assert "scan" not in optimize(parsed(LOOP), regions=False, verify=False)[1].counts
    assert optimize(parsed(LOOP), only=["scan"], verify=False)[1].counts == {"scan": 1}
    _, report = optimize(parsed("(float[2] x) => (float[2] y) { y = Neg (x) }"), only=["scan"], verify=False)
    assert report.unmatched == {"scan": "the model has no Loop, no Scan and no unrolled steps of a recurrence"}


def test_functions_of_scans_are_inlined() -> None:
    model, _ = optimize(parsed(LOOP), verify=False)
    plain = unfuse(model, verify=False)[0]
    assert not plain.functions and any(node.op_type == "Loop" for node in plain.graph.node)
    assert optimize(plain, verify=False)[1].counts["scan"] == 1


def test_verification_knows_how_errors_grow_from_step_to_step() -> None:
    """Steps of the logistic map double an error of float16 until it is as large as the results."""
    errors = []
    for steps in 4, 24:
        model = onnx.parser.parse_model(f"""{HEAD} (float16[b,{steps},6] x, float16[b,6] s) => (float16[{steps},b,6] y)
        <bool yes = {{1}}, int64 n = {{{steps}}}, float one32 = {{1}}, float gain32 = {{3.7}}> {{
            one = Cast <to = 10> (one32)  gain = Cast <to = 10> (gain32)  first = Sigmoid (s)
            last, y = Loop <body = step (int64 i, bool on, float16[b,6] now)
                => (bool still, float16[b,6] next, float16[b,6] out) {{
                still = Identity (on)  xt = Gather <axis = 1> (x, i)  left = Sub (one, now)
                product = Mul (now, left)  next = Mul (product, gain)  out = Add (next, xt) }}> (n, yes, first) }}""")
        _, report = optimize(model)
        assert report.counts == {"scan": 1} and report.verified.status == "verified"
        (output,) = report.verified.outputs
        errors.append(output.original_rel or 0.0)
    assert errors[0] < 0.01 < 0.05 < errors[1]
