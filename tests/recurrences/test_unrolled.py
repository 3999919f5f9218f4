"""Steps that an exporter unrolled become a scan; steps that differ, or that others read, stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from counted_calls import counted_calls
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import optimize
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.explain import explanations
from onnxfuse.fuse_model import Settings, fuse_model

Change = Callable[[int, dict[str, str]], None]


def trace(
    steps: int = 6, spelling: str = "gather", change: Change = lambda i, names: None, kept: str = ""
) -> onnx.ModelProto:
    """Return a selective scan of (2, 6) channels with 8 states, as torch's exporters write transformers' Mamba.

    `change` may rename the tensors that a step reads.
    """
    nodes, constants = list[onnx.NodeProto](), {"far": np.array([-1]), "first": np.zeros((2, 6, 8), np.float32)}

    def put(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=f"n_{output}", **attributes))
        return output

    def number(value: object, name: str) -> str:
        constants[name] = np.array(value)
        return name

    def taken(of: str, i: int, axis: int) -> str:
        name = f"{of}_{i}"
        if spelling == "gather":
            return put("Gather", [of, number(i, f"at_{i}")], name, axis=axis)
        if spelling == "slice":
            bounds = [number([i], f"from_{i}"), number([i + 1], f"to_{i}"), number([axis], f"axis_{axis}")]
            return put("Squeeze", [put("Slice", [of, *bounds], f"{name}_kept"), f"axis_{axis}"], name)
        return put("Squeeze", [f"{of}_part_{i}", number([axis], f"axis_{axis}")], name)

    if spelling == "split":
        for of, axis in (("a", 2), ("x", 2), ("c", 1)):
            nodes.append(helper.make_node("Split", [of], [f"{of}_part_{i}" for i in range(steps)], axis=axis))
    state, results = "first", []
    for i in range(steps):
        names = {"a": taken("a", i, 2), "x": taken("x", i, 2), "c": taken("c", i, 1), "state": state}
        change(i, names)
        state = put("Add", [put("Mul", [names["a"], names["state"]], f"kept_{i}"), names["x"]], f"state_{i}")
        column = put("Unsqueeze", [names["c"], "far"], f"column_{i}")
        results.append(put("MatMul", [state, column], f"result_{i}"))
    put("Concat", results, "y", axis=2)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in (("a", [2, 6, steps, 8]), ("x", [2, 6, steps, 8]), ("c", [2, steps, 8]))]  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", kept) if name]
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("spelling", ["gather", "slice", "split"])
def test_a_trace_is_one_node(spelling: str) -> None:
    model, report = optimize(trace(spelling=spelling))
    assert report.counts == {"scan": 1} and report.verified.status == "verified"
    assert [node.domain for node in model.graph.node] == ["onnxfuse"]


def test_a_trace_that_begins_with_a_number() -> None:
    """The passes of onnxfuse write an Expand of a constant as that constant, which is broadcast."""
    model = trace()
    (first,) = (each for each in model.graph.initializer if each.name == "first")
    first.CopyFrom(numpy_helper.from_array(np.float32(0.25), "first"))
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    _, report = optimize(model)
    assert report.counts == {"scan": 1} and report.verified.status == "verified"


def test_the_last_state_is_an_output() -> None:
    model, report = optimize(trace(kept="state_5"))
    assert report.counts == {"scan": 1} and report.verified.status == "verified"
    assert set(model.graph.node[0].output) == {"state_5", "y"}


def _reads_the_first(i: int, names: dict[str, str]) -> None:
    if i == 3:
        names["state"] = "state_0"


def _swaps(i: int, names: dict[str, str]) -> None:
    if i == 2:
        names["a"], names["x"] = names["x"], names["a"]


def _skips(i: int, names: dict[str, str]) -> None:
    names["x"] = "x_0" if i == 4 else names["x"]


def _reads_the_column_of_the_first(i: int, names: dict[str, str]) -> None:
    names["x"] = "kept_0" if i else "first"


def _reads_the_first_in_one_place(i: int, names: dict[str, str]) -> None:
    names["a"] = names["x"] if i != 3 else "x_0"


def _begins_with_two(i: int, names: dict[str, str]) -> None:
    names["x"] = names["state"] if i else "x_0"


@pytest.mark.parametrize(
    "change",
    [_begins_with_two, _reads_the_first, _swaps, _skips, _reads_the_column_of_the_first, _reads_the_first_in_one_place],
)
def test_steps_that_differ(change: Change) -> None:
    assert "scan" not in optimize(trace(change=change), verify=False)[1].counts


def test_explain_says_where_steps_differ() -> None:
    result = fuse_model(trace(change=_swaps), None, Settings(list(builtin()), regions=True, scans=True))
    (sentence,) = explanations(result, "scan")
    assert "'n_y'" in sentence and "its 6 steps differ: 'x_0' of one step and 'x_1' of the next" in sentence


STABILIZED = """
<ir_version: 8, opset_import: ["" : 17]> main (float[b,5,6] f, float[b,5,6] x) => (float[b,5,6] y)
<int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64 i3 = {3}, int64 i4 = {4}, int64[1] along = {1}, float zero = {0}>
{
"""


def stabilized(first: str) -> onnx.ModelProto:
    """Return m = max(log f + m, x) of five tokens, as xLSTM has it, whose first step reads `first` in place of m."""
    nodes, before = list[str](), first
    for i in range(5):
        nodes.append(f"f{i} = Gather <axis = 1> (f, i{i})  g{i} = Sigmoid (f{i})  l{i} = Log (g{i})")
        nodes.append(f"a{i} = Add (l{i}, {before})" if before else f"a{i} = Identity (l{i})")
        nodes.append(f"x{i} = Gather <axis = 1> (x, i{i})  m{i} = Max (a{i}, x{i})  u{i} = Unsqueeze (m{i}, along)")
        before = f"m{i}"
    joined = ", ".join(f"u{i}" for i in range(5))
    return onnx.parser.parse_model(f"{STABILIZED} {' '.join(nodes)} y = Concat <axis = 1> ({joined}) }}")


@pytest.mark.parametrize("first", ["zero", ""])
def test_explain_names_the_step_that_differs(first: str) -> None:
    model = stabilized(first)
    (last,) = (node for node in model.graph.node if "m4" in node.output)
    last.op_type = "Min"
    result = fuse_model(model, None, Settings(list(builtin()), regions=True, scans=True))
    assert "'m3' of one step and 'm4' of the next" in "".join(explanations(result, "scan"))


@pytest.mark.parametrize("kept", ["", "m4"])
@pytest.mark.parametrize("first", ["zero", ""])
def test_the_first_step_adds_no_state_of_zero(first: str, kept: str) -> None:
    """The sum with a state of 0 is removed, so that the first step has a node less."""
    model = stabilized(first)
    if kept:
        model.graph.output.append(helper.make_tensor_value_info(kept, TensorProto.FLOAT, ["b", 6]))
    _, report = optimize(model)
    assert report.counts == {"scan": 1} and report.verified.status == "verified"


def test_first_steps_of_unknown_dtype() -> None:
    """No zeros of an unknown dtype can be written; such steps must not keep others from becoming scans."""
    model = stabilized("")
    model.opset_import.append(helper.make_opsetid("custom", 1))
    for node in model.graph.node:
        if node.op_type == "Log":
            node.domain = "custom"
    assert optimize(model, verify=False)[1].left_out == ()


@pytest.mark.parametrize("first", ["zeros = Expand (none, sizes)", ""])
def test_the_states_between_chunks_of_a_retnet(first: str) -> None:
    """Each chunk reads the state before it; decays are constants (Sun et al. 2023, arXiv:2307.08621)."""
    nodes, before = list[str](), "zeros"
    for i in range(5):
        nodes.append(f"at{i} = Constant <value_int = {i}> ()  kv{i} = Gather <axis = 1> (kv, at{i})")
        nodes.append(f"u{i} = Unsqueeze ({before}, one)  m{i} = Mul ({before}, cross)  n{i} = Add (m{i}, kv{i})")
        before = f"n{i}"
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    main (float[2,5,2,4,3] q, float[2,5,2,4,3] k, float[2,5,2,4,6] v) => (float[2,5,2,4,6] y)
    <int64[1] one = {{1}}, float none = {{0}}, int64[4] sizes = {{2,2,3,6}}> {{
        {first}  kt = Transpose <perm = [0,1,2,4,3]> (k)  scores = MatMul (q, kt)  masked = Mul (scores, mask)
        inner = MatMul (masked, v)  decayed = Mul (v, after)  kv = MatMul (kt, decayed)  {" ".join(nodes)}
        states = Concat <axis = 1> ({", ".join(f"u{i}" for i in range(5))})  grown = Mul (q, up_to)
        outer = MatMul (grown, states)  y = Add (inner, outer) }}"""
    model, rates, place = onnx.parser.parse_model(text), np.array([0.9, 0.8]).reshape(2, 1, 1), np.arange(4)
    distance = place[:, None] - place
    values = {"mask": np.where(distance < 0, 0, rates**distance), "after": rates ** (3 - place[:, None]),
              "up_to": rates ** (place[:, None] + 1), "cross": rates**4}  # fmt: skip
    values |= {} if first else {"zeros": np.zeros((2, 2, 3, 6))}
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    model.graph.initializer.extend(stored)
    _, report = optimize(model)
    assert report.counts["scan"] == 1 and report.verified.status == "verified"


def test_a_state_that_others_read() -> None:
    assert "scan" not in optimize(trace(kept="state_2"), verify=False)[1].counts


def test_a_trace_that_begins_with_a_slice() -> None:
    """A verification draws the slice and the tensor apart, so that they would not agree."""

    def change(i: int, names: dict[str, str]) -> None:
        names["state"] = names["state"] if i else "x_0"

    assert "scan" not in optimize(trace(change=change), verify=False)[1].counts


def test_slices_that_others_read() -> None:
    """One slice is an output of the graph, and a branch reads another one."""
    model = trace(kept="x_2")
    graph = model.graph
    branches = [
        helper.make_graph([helper.make_node(op, ["a_3"], [op])], op, [], [helper.make_empty_tensor_value_info(op)])
        for op in ("Neg", "Exp")
    ]
    graph.node.append(helper.make_node("If", ["p"], ["z"], then_branch=branches[0], else_branch=branches[1]))
    graph.input.append(helper.make_tensor_value_info("p", TensorProto.BOOL, []))
    graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    _, report = optimize(model)
    assert report.counts["scan"] == 1 and report.verified.status == "verified"


def test_three_steps_are_none() -> None:
    assert "scan" not in optimize(trace(steps=3), verify=False)[1].counts


def test_steps_without_a_state() -> None:
    """Steps that do not depend on each other are not a recurrence."""

    def change(i: int, names: dict[str, str]) -> None:
        names["state"] = "first"

    assert "scan" not in optimize(trace(change=change), verify=False)[1].counts


def test_time_grows_with_the_number_of_nodes() -> None:
    few, many = (counted_calls(lambda steps=steps: optimize(trace(steps), verify=False)) for steps in (64, 256))
    assert many < 4.4 * few


def test_what_one_step_computes_for_all() -> None:
    """It is read by all steps, as a tensor of the graph would be, but would vanish with the steps."""
    model = trace()
    nodes = model.graph.node
    for i in range(6):
        (column,) = (node for node in nodes if node.name == f"n_column_{i}")
        column.output[0] = f"plain_{i}"
        at = list(nodes).index(column) + 1
        nodes.insert(at, helper.make_node("Add", [f"plain_{i}", "plain_0"], [f"column_{i}"]))
    model, report = optimize(model)
    assert "scan" not in report.counts and report.verified.status == "verified"


STEP = """
    k{i} = Gather <axis = 1> (k, i{i})  v{i} = Gather <axis = 1> (v, i{i})
    top{i} = Max (m{i}, k{i})  d{i} = Sub (m{i}, top{i})  e{i} = Exp (d{i})
    o{i} = Sub (k{i}, top{i})  f{i} = Exp (o{i})  fv{i} = Mul (f{i}, v{i})  en{i} = Mul (e{i}, n{i})
    num{i} = Add (en{i}, fv{i})  eq{i} = Mul (e{i}, q{i})  den{i} = Add (eq{i}, f{i})  div{i} = Div (num{i}, den{i})
    r{i} = Unsqueeze (div{i}, one)  slow{i} = Add (m{i}, decay)  m{j} = Max (slow{i}, k{i})  g{i} = Sub (slow{i}, m{j})
    h{i} = Exp (g{i})  s{i} = Sub (k{i}, m{j})  t{i} = Exp (s{i})  tv{i} = Mul (t{i}, v{i})
    hn{i} = Mul (h{i}, n{i})  n{j} = Add (hn{i}, tv{i})  hq{i} = Mul (h{i}, q{i})  q{j} = Add (hq{i}, t{i})"""
ASSIGNED = {
    "": "",
    "ScatterElements": "  y{j} = ScatterElements <axis = 1> (y{i}, at{i}, r{i})",
    "ScatterND": "  y{j} = ScatterND (y{i}, places{i}, r{i})",
}


def rwkv(assigned: str = "", outputs: str = "") -> onnx.ModelProto:
    """Return five steps, as in RWKV: two states begin with one number, and what step 0 adds to another is folded."""
    step, steps = STEP + ASSIGNED[assigned], range(5)
    at = "".join(f", int64[2,1,3] at{i} = {{{','.join(6 * str(i))}}}" for i in steps)
    for i in steps:
        places = [(b, i, c) for b in range(2) for c in range(3)]
        at += f", int64[2,1,3,3] places{i} = {{{','.join(str(each) for place in places for each in place)}}}"
    results = ", ".join(f"float[2,3] {name}" for name in outputs.split())
    text = f"""<ir_version: 8, opset_import: ["" : 17]> main (float[2,5,3] k, float[2,5,3] v)
        => (float[2,5,3] y{", " if results else ""}{results})
        <float[3] decay = {{-1,-2,-3}}, float[3] m0 = {{-1e38,-1e38,-1e38}}, float n0 = {{0}}, float q0 = {{0}},
        int64[1] one = {{1}}, float[2,5,3] y0 = {{{",".join(30 * "0")}}}
        {"".join(f", int64 i{i} = {{{i}}}" for i in steps)} {at}>
        {{ {"".join(step.format(i=i, j=i + 1) for i in steps)}
        y = {"Identity (y5)" if assigned else "Concat <axis = 1> (r0, r1, r2, r3, r4)"} }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("assigned", ASSIGNED)
def test_results_that_depend_on_states_before_a_step(assigned: str) -> None:
    _, report = optimize(rwkv(assigned))
    assert report.counts == {"scan": 1} and report.verified.status == "verified"


@pytest.mark.parametrize("outputs", ["m5 n5 q5", "n5", "m5"])
def test_last_states_on_which_no_result_depends(outputs: str) -> None:
    model, report = optimize(rwkv(outputs=outputs))
    assert report.counts["scan"] == 1 and report.verified.status == "verified"
    (node,) = (each for each in model.graph.node if each.op_type.startswith("scan"))
    assert len(node.output) == 1 + len(outputs.split())


def test_a_state_that_begins_with_two_constants_of_one_value() -> None:
    """TorchScript writes such constants for a state that is an output, too."""
    model = rwkv(outputs="m5 n5 q5")
    graph = model.graph
    (first,) = (each for each in graph.initializer if each.name == "m0")
    for name in "m0", "again":
        graph.initializer.add().CopyFrom(numpy_helper.from_array(np.full((2, 3), -1e38, np.float32), name))
    graph.initializer.remove(first)
    (node,) = (each for each in graph.node if each.output[0] == "d0")
    node.input[0] = "again"
    _, report = optimize(model)
    assert report.counts == {"scan": 1} and report.verified.status == "verified"


def test_states_of_other_steps_that_others_read() -> None:
    _, report = optimize(rwkv(outputs="m5 n4"))
    assert "scan" not in report.counts and report.verified.status == "verified"


def test_backwards() -> None:
    """The first step takes the last slices; the steps' results are joined in the order of the slices."""
    model, last = trace(), 5
    for node in model.graph.node:
        if node.op_type == "Gather":
            node.input[1] = f"at_{last - int(node.input[1][3:])}"
        elif node.op_type == "Concat":
            node.input[:] = reversed(node.input)
    _, report = optimize(model)
    assert report.counts == {"scan": 1} and report.verified.status == "verified"
    del model.graph.node[-1].input[:]
    model.graph.node[-1].input.extend(f"result_{i}" for i in range(last + 1))
    assert "scan" not in optimize(model, verify=False)[1].counts
