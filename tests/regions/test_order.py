"""Test that clusters of one level are merged however many they are, and never to a cycle."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from region_models import assert_close, parsed, regions, run

from onnxfuse import optimize
from onnxfuse.fuse_model import Settings, fuse_model

SIDE = 16


def graph_at_random(seed: int, nodes: int = 120) -> onnx.ModelProto:
    """Return a graph of elementwise operators, reductions over either axis and products, which read any value."""
    draw, made, values = random.Random(seed), list[onnx.NodeProto](), ["x"]
    for i in range(nodes):
        op = draw.choice(["Add", "Mul", "Neg", "Exp", "Transpose", "ReduceMean", "ReduceMax", "MatMul"])
        near = values[-draw.choice([3, 30, nodes]) :]
        read = [draw.choice(near) for _ in range(2 if op in ("Add", "Mul", "MatMul") else 1)]
        made.append(helper.make_node(op, read, [f"v{i}"], **({"axes": [draw.randrange(2)]} if "Red" in op else {})))
        values.append(f"v{i}")
        if "Reduce" in op:
            made.append(helper.make_node("Sub", [read[0], f"v{i}"], [f"s{i}"]))
            values[-1] = f"s{i}"
    inner = {name for node in made for name in node.input}
    given, *ends = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIDE, SIDE])
        for name in values if name == "x" or name not in inner
    )  # fmt: skip
    graph = helper.make_graph(made, "random", [given], ends)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("seed", range(20))
def test_regions_of_graphs_at_random(seed: int) -> None:
    """Writing the model puts its nodes in order, which fails where they depend on each other in a circle."""
    source = graph_at_random(seed)
    model = fuse_model(source, None, Settings([], regions=True)).model
    onnx.checker.check_model(model, full_check=True)
    assert len(regions(model)) > 3
    feeds = {"x": np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32) / 4}
    expected, found = run(source, feeds), run(model, feeds)
    for name, value in expected.items():
        assert_close(found[name], value, name)


def test_what_many_regions_of_one_level_lead_to_is_merged() -> None:
    """Each of the reductions in front is a region of its own, since its rows are not those of the one before it."""
    turns = "".join(f"m{i} = ReduceMax <axes = [{i % 2}]> (s{i}) s{i + 1} = Mul(y, m{i}) " for i in range(300))
    inputs = "float[8, 8] s0, float[8, 8] y"
    model, _ = optimize(parsed(f"{turns} z = Exp(s300)", inputs=inputs), verify=False)
    found = [region.ops for region in regions(model)]
    assert found == [["Mul", "ReduceMax"]] * 298 + [["Mul", "ReduceMax", "Mul", "Exp"]]


def ops_of(nodes: str, inputs: str, outputs: str) -> list[list[str]]:
    model, _ = optimize(parsed(nodes, inputs=inputs, outputs=outputs), verify=False)
    return [region.ops for region in regions(model)]


def test_a_small_operator_shares_the_launch_of_the_step_with_which_it_has_most_in_common() -> None:
    """It could run beside any of the reductions; the second reads y as well."""
    chain = "a = ReduceMax <axes = [0]> (x) b = Exp(a) c = ReduceMax <axes = [1]> (b) d = Mul(c, y) e = Neg(c)"
    found = ops_of(f"{chain} z = Abs(y)", "float[8, 8] x, float[1, 1] y", "d e z")
    assert found == [["ReduceMax", "Exp"], ["ReduceMax", "Mul", "Neg", "Abs"]]


def test_what_depends_on_each_other_through_another_region_shares_no_launch() -> None:
    """The Exp and the Tanh are small and depend on each other through the region of the second reduction."""
    nodes = (
        "a = ReduceMax <axes = [0]> (x) e = Exp(a) b = Sub(x, e) c = ReduceMax <axes = [1]> (b) d = Sub(b, c) "
        "f = ReduceMax <axes = [0]> (d) z = Tanh(f)"
    )
    found = ops_of(nodes, "float[8, 8] x", "z")
    assert found == [["ReduceMax", "Exp"], ["Sub", "ReduceMax"], ["Sub", "Sub", "ReduceMax", "Tanh"]]


def test_a_launch_has_at_most_eight_outputs() -> None:
    names = [f"z{i}" for i in range(20)]
    many = " ".join(f"c{i} := float {{{i + 2}}} z{i} = Mul(x, c{i})" for i in range(20))
    assert [len(ops) for ops in ops_of(many, "float[8, 8] x", " ".join(names))] == [8, 8, 4]
