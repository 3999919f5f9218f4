"""Calls of a model's own functions are inlined, but for those that runtimes have kernels for, and too many."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from runtimes import open_on_cpu

from onnxfuse import ModelError, optimize
from onnxfuse.ir import inline_functions as inlining
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.load import load
from onnxfuse.runtime.fused_calls import read_calls

HEAD = '<ir_version: 10, opset_import: ["" : 17, "my" : 1, "com.microsoft" : 1]> '


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return open_on_cpu(model).run(None, feeds)


def test_attributes_and_their_defaults() -> None:
    """onnx's inliner takes an attribute that a call leaves to its default for absent."""
    model = parse("""g (float[3] x) => (float[3] y) { a = my.leaky <slope = 0.5> (x)  y = my.leaky (a) }
        <domain: "my", opset_import: ["" : 17]>
        leaky <slope: float = 0.25> (x) => (y) { y = LeakyRelu <alpha: float = @slope> (x) }""")
    before = model.SerializeToString(deterministic=True)
    found = inline_functions(model)
    assert [node.attribute[0].f for node in found.model.graph.node] == [0.5, 0.25]
    assert (found.calls, found.kept, len(found.model.functions)) == (2, (), 0)
    assert model.SerializeToString(deterministic=True) == before
    x = np.array([-8, 0, 8], np.float32)
    np.testing.assert_array_equal(run(found.model, {"x": x}), run(model, {"x": x}))
    onnx.checker.check_model(found.model, full_check=True)


def test_names_of_initializers_are_not_given_to_values() -> None:
    model = parse("""g (float[2] x) => (float[2] y) <float[2] t__1 = {1, 2}> { a = my.twice (x)  y = Add (a, t__1) }
        <domain: "my", opset_import: ["" : 17]> twice (v) => (u) { t = Neg (v)  u = Sub (v, t) }""")
    found = inline_functions(model).model
    assert [node.op_type for node in found.graph.node] == ["Neg", "Sub", "Add"]
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(run(found, {"x": x})[0], [3, 6])


def test_overloads() -> None:
    model = parse("""g (float[2] x) => (float[2] y) { a = my.f (x)  y = my.f (a) }
        <domain: "my", opset_import: ["" : 17]> f (v) => (u) { u = Neg (v) }
        <domain: "my", opset_import: ["" : 17]> h (v) => (u) { u = Abs (v) }""")
    model.functions[1].name, model.functions[1].overload, model.graph.node[1].overload = "f", "second", "second"
    assert [node.op_type for node in inline_functions(model).model.graph.node] == ["Neg", "Abs"]


def test_functions_named_as_operators_of_onnx_are_not_called() -> None:
    """onnxruntime runs its own operator of that name."""
    model = parse("""g (float[2] x) => (float[2] y) { a = my.f (x)  y = Relu (a) }
        <domain: "my", opset_import: ["" : 17]> f (v) => (u) { u = Sigmoid (v) }
        <domain: "", opset_import: ["" : 17]> Relu (v) => (u) { u = Neg (v) }
        <domain: "", opset_import: ["" : 17]> Sigmoid (v) => (u) { u = Neg (v) }""")
    x = np.array([-1, 2], np.float32)
    np.testing.assert_allclose(run(optimize(model, verify=False)[0], {"x": x})[0], 1 / (1 + np.exp(-x)), rtol=1e-6)


def test_functions_that_stay_keep_those_that_they_call() -> None:
    model = parse("""g (float[2] x) => (float[2] y) { a = com.microsoft.kernel (x)  y = my.inner (a) }
        <domain: "com.microsoft", opset_import: ["" : 17, "my" : 1]> kernel (v) => (u) { u = my.inner (v) }
        <domain: "my", opset_import: ["" : 17]> inner (v) => (u) { u = Abs (v) }""")
    found = inline_functions(model)
    assert [node.op_type for node in found.model.graph.node] == ["kernel", "Abs"]
    assert [f.name for f in found.model.functions] == ["kernel", "inner"] and found.kept == ()
    onnx.checker.check_model(found.model)


def test_fused_nodes_stay_and_nothing_is_copied_where_nothing_is_inlined() -> None:
    model = parse("""g (float[b,8] x) => (float[b,8] y) { h = Neg (x)  y = Softmax (h) }""")
    once, _ = optimize(model)
    assert inline_functions(once).model is once
    twice, report = optimize(once)
    assert twice == once and report.inlined is not None and report.inlined.calls == 0


CALLS = "\n".join(f"x{i + 1} = my.outer (x{i})" for i in range(5))
NESTED = f"""g (float[2] x0) => (float[2] y) {{ {CALLS}  s = my.small (x5)  y = my.small (s) }}
    <domain: "my", opset_import: ["" : 17, "my" : 1]> outer (v) => (u) {{
        a = my.inner (v)  b = my.inner (a)  u = Neg (b) }}
    <domain: "my", opset_import: ["" : 17]> inner (v) => (u) {{ a = Abs (v)  b = Neg (a)  u = Exp (b) }}
    <domain: "my", opset_import: ["" : 17]> small (v) => (u) {{ u = Exp (v) }}"""


@pytest.mark.parametrize(
    ("limit", "nodes", "kept"),
    [
        (37, 37, []),  # 5 calls of outer, of 2 * 3 + 1 nodes, and 2 of small
        (36, 7, ["the function my.outer stays: its calls would become 35 nodes"]),
        (1, 7, ["the function my.outer stays: its calls would become 35 nodes",
                "the function my.small stays: its calls would become 2 nodes"]),
    ],
)  # fmt: skip
def test_a_function_that_would_bring_too_many_nodes_stays(
    monkeypatch: pytest.MonkeyPatch, limit: int, nodes: int, kept: list[str]
) -> None:
    monkeypatch.setattr(inlining, "MAX_NODES_INLINED", limit)
    model = parse(NESTED)
    found = inline_functions(model)
    assert (len(found.model.graph.node), list(found.kept)) == (nodes, kept)
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(run(found.model, {"x0": x}), run(model, {"x0": x}))
    _, report = optimize(model)
    assert report.verified.passed and report.to_json()["functions"]["kept"] == kept


def test_functions_that_call_each_other_in_a_circle_stay() -> None:
    model = parse("""g (float[2] x) => (float[2] y) { y = my.one (x) }
        <domain: "my", opset_import: ["" : 17, "my" : 1]> one (v) => (u) { u = my.other (v) }
        <domain: "my", opset_import: ["" : 17, "my" : 1]> other (v) => (u) { u = my.one (v) }""")
    found = inline_functions(model)
    assert found.model is model
    assert found.kept in (
        ("the function my.one stays: it calls itself",), ("the function my.other stays: it calls itself",),
    )  # fmt: skip


def test_functions_that_double_at_each_level_are_counted_in_time() -> None:
    """Each of 60 functions calls the next two, so that there are 10^12 ways down to the last."""
    bodies = "".join(
        f"""<domain: "my", opset_import: ["" : 17, "my" : 1]> f{i} (v) => (u) {{
            a = my.f{i + 1} (v)  u = my.f{i + 2} (a) }}
        """
        for i in range(60)
    )
    last = "".join(f'<domain: "my", opset_import: ["" : 17]> f{i} (v) => (u) {{ u = Neg (v) }}\n' for i in (60, 61))
    found = inline_functions(parse(f"g (float[2] x) => (float[2] y) {{ y = my.f0 (x) }} {bodies} {last}"))
    assert found.kept == ("the function my.f0 stays: its calls would become 4,052,739,537,881 nodes",)


@pytest.mark.parametrize("domain", ["my", "onnxfuse", "com.microsoft"])
def test_functions_that_would_become_too_many_nodes_are_refused(domain: str) -> None:
    """onnx's shape inference, and onnxruntime, would look at 2^60 of them, also of those that are not inlined here."""

    def doubling(levels: int) -> onnx.ModelProto:
        bodies = "".join(
            f"""<domain: "{domain}", opset_import: ["" : 17, "{domain}" : 1]> f{i} (v) => (u) {{
                a = {domain}.f{i - 1} (v)  u = {domain}.f{i - 1} (a) }}
            """
            for i in range(1, levels + 1)
        )
        first = f'<domain: "{domain}", opset_import: ["" : 17]> f0 (v) => (u) {{ u = Neg (v) }}'
        return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "{domain}" : 1]>
            g (float[2] x) => (float[2] y) {{ y = {domain}.f{levels} (x) }} {first} {bodies}""")

    why = f"calls functions that would become {2**60:,} nodes; expected at most 1,000,000: export it without these"
    for read in load, read_calls:
        with pytest.raises(ModelError, match=why):
            read(doubling(60))
    load(doubling(19))


def test_functions_whose_subgraphs_would_nest_too_deep_are_refused() -> None:
    """A function nests 16 Ifs, and is called in 16 of them; protobuf writes that and cannot read it again."""

    def nested(levels: int, inside: str) -> str:
        if not levels:
            return f"y0 = {inside} (x, c)"
        inner = nested(levels - 1, inside)
        return f"""y{levels} = If (c) <
            then_branch = t{levels} () => (float[2] y{levels - 1}) {{ {inner} }},
            else_branch = e{levels} () => (float[2] n{levels}) {{ n{levels} = Abs (x) }} >"""

    def called_in(levels: int) -> onnx.ModelProto:
        body = nested(16, "And").replace("And (x, c)", "Neg (x)")
        return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
            g (float[2] x, bool c) => (float[2] y{levels}) {{ {nested(levels, "my.deep")} }}
            <domain: "my", opset_import: ["" : 17]> deep (x, c) => (y16) {{ {body} }}""")

    with pytest.raises(ModelError, match="has subgraphs in subgraphs, 32 deep with its functions inlined; expected at"):
        load(called_in(16))
    assert inline_functions(load(called_in(14))[0]).calls == 1


def test_a_function_that_is_called_a_thousand_times_is_inlined() -> None:
    calls = "\n".join(f"x{i + 1} = my.act (x{i})" for i in range(1000))
    model = parse(f"""g (float[b,8] x0) => (float[b,8] x1000) {{ {calls} }}
        <domain: "my", opset_import: ["" : 17]> act (v) => (u) {{ g = Sigmoid (v)  u = Mul (v, g) }}""")
    optimized, report = optimize(model, verify=False, regions=False)
    assert report.counts == {"activation": 1000} and len(optimized.functions) == 1
    assert optimize(model, verify=False)[1].counts == {"region": 32}  # of at most 64 operators


def test_a_function_with_a_loop_in_both_branches() -> None:
    model = parse("""g (float[b,8] x, int64 m, bool f) => (float[b,8] y) <int64 one = {1}> {
            y = If <then_branch = yes () => (float[b,8] t) { t = my.again (x, m) },
                    else_branch = no () => (float[b,8] e) { n = Neg (x)  e = my.again (n, one) }> (f) }
        <domain: "my", opset_import: ["" : 17]> again (x, m) => (y) {
            go = Constant <value = bool {1}> ()
            y = Loop <body = step (int64 i, bool p, float[b,8] s) => (bool q, float[b,8] t) {
              q = Identity (p)  g = Sigmoid (s)  t = Mul (s, g) }> (m, go, x) }""")
    optimized, report = optimize(model)
    assert report.counts == {"activation": 2} and report.verified.status == "verified"
    assert len({one.where for one in report.fused}) == 2
    onnx.checker.check_model(optimized, full_check=True)
