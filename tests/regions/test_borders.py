"""Test where one region ends and the next begins: at the tensor with which the regions move the fewest bytes."""

from __future__ import annotations

import onnx
import pytest
from region_models import assert_programs_agree, draw, optimized, parsed, regions

from onnxfuse.fuse_model import Settings, fuse_model

INPUTS = "float[6, 8, 4] x, float[6, 8, 4] y, float[6, 1, 4] r, float[4, 8] w"


def model_of(nodes: str, inputs: str = INPUTS, outputs: str = "z") -> onnx.ModelProto:
    """Return the optimized model, whose regions compute what their functions do."""
    model, _ = optimized(parsed(nodes, inputs=inputs, outputs=outputs), only=["region"])
    assert assert_programs_agree(model, draw(model)) == len(regions(model))
    return model


def ops_of(model: onnx.ModelProto) -> list[list[str]]:
    """Return the operators of each node in order: those of its program, or itself."""
    inside = {region.node.name: region.ops for region in regions(model)}
    return [inside.get(node.name, [node.op_type]) for node in model.graph.node]


def test_a_difference_is_computed_where_other_rows_of_it_are_reduced() -> None:
    """Two passes over x, where the difference would be written and read as well."""
    nodes = "m = ReduceMean <axes = [1]> (x) s = Sub(x, m) z = ReduceMax <axes = [2]> (s)"
    model = model_of(nodes)
    assert ops_of(model) == [["ReduceMean"], ["Sub", "ReduceMax"]]
    assert [list(node.input) for node in model.graph.node] == [["x"], ["x", "m"]]


def test_the_reason_of_what_is_left_names_what_has_gone() -> None:
    nodes = "m = ReduceMean <axes = [1]> (x) s = Sub(x, m) z = ReduceMax <axes = [2]> (s)"
    reasons = fuse_model(parsed(nodes, inputs=INPUTS), None, Settings([], regions=True)).no_region
    assert reasons == {"m": "'s' is computed where its result is read, because that moves fewer bytes"}


def test_several_operators_go_together() -> None:
    nodes = "m = ReduceMean <axes = [1]> (x) s = Sub(x, m) q = Mul(s, s) z = ReduceMean <axes = [2]> (q)"
    assert ops_of(model_of(nodes)) == [["ReduceMean"], ["Sub", "Mul", "ReduceMean"]]


def test_iterations_of_sinkhorn_read_the_scores_once() -> None:
    nodes = (
        "p = Add(x, r) l = ReduceLogSumExp <axes = [2]> (p) u = Neg(l) "
        "q = Add(x, u) k = ReduceLogSumExp <axes = [1]> (q) v = Neg(k) "
        "o = Add(x, v) j = ReduceLogSumExp <axes = [2]> (o) z = Neg(j)"
    )
    model = model_of(nodes)
    assert ops_of(model) == [["Add", "ReduceLogSumExp", "Neg"]] * 3
    assert [list(node.output) for node in model.graph.node] == [["u"], ["v"], ["z"]]


def test_what_several_regions_read_is_computed_in_each() -> None:
    """Of an exponential, two reductions over different axes take two passes over x, and not a third to write it."""
    nodes = "e = Exp(x) a = ReduceMax <axes = [1]> (e) b = ReduceMax <axes = [2]> (e)"
    model = model_of(nodes, outputs="a b")
    assert ops_of(model) == [["Exp", "ReduceMax"], ["Exp", "ReduceMax"]]
    assert [list(node.output) for node in model.graph.node] == [["a"], ["b"]]
    report = optimized(parsed(nodes, inputs=INPUTS, outputs="a b"))[1]
    assert report.regions.nodes == 2 and report.regions.replaced == 3


def test_normalizing_in_turns_reads_one_tensor_many_times() -> None:
    """Of six reductions the first writes it, and the others read it: four regions get copies of a difference."""
    turns = "".join(f"m{i} = ReduceMax <axes = [{1 + i % 2}]> (s{i}) s{i + 1} = Sub(s{i}, m{i}) " for i in range(6))
    model = model_of(f"{turns} z = Neg(s6)".replace("s0", "x"), inputs="float[1, 64, 64] x")
    assert ops_of(model) == [
        ["ReduceMax", "Sub"],
        ["ReduceMax"],
        ["Sub", "ReduceMax"],
        ["Sub", "Sub", "ReduceMax"],
        ["Sub", "Sub", "Sub", "ReduceMax"],
        ["Sub", "Sub", "Sub", "Sub", "ReduceMax", "Sub", "Neg"],
    ]


def test_a_cast_to_a_wider_dtype_goes_to_its_reader() -> None:
    nodes = (
        "m = ReduceMax <axes = [1]> (x) s = Sub(x, m) c = Cast <to = 11> (s) "
        "n = ReduceMax <axes = [2]> (c) z = Sub(c, n)"
    )
    model = model_of(nodes, outputs="s z")
    assert ops_of(model) == [["ReduceMax", "Sub"], ["Cast", "ReduceMax", "Sub"]]


@pytest.mark.parametrize(
    ("nodes", "outputs", "first"),
    [
        ("m = ReduceMean <axes = [1]> (x) s = Sub(x, m) z = ReduceMax <axes = [2]> (s)", "z s", "ReduceMean Sub"),
        (
            "m = ReduceMean <axes = [1]> (x) s = Sub(x, m) z = ReduceMax <axes = [2]> (s) v = MatMul(s, w)",
            "z v",
            "ReduceMean Sub",
        ),
        (
            "p = Mul(x, y) m = ReduceMean <axes = [1]> (p) s = Sub(x, m) t = Mul(s, y) z = ReduceMax <axes = [2]> (t)",
            "z",
            "Mul ReduceMean Sub Mul",
        ),
    ],
    ids=["the model has it as output", "a product reads it", "it is computed from two that are read anyway"],
)
def test_a_tensor_stays_where_recomputing_it_saves_nothing(nodes: str, outputs: str, first: str) -> None:
    assert ops_of(model_of(nodes, outputs=outputs))[0] == first.split()


def test_what_a_slice_leads_to_is_computed_in_a_region_of_a_later_level() -> None:
    """The gate is read after a product, where its columns are sliced once more in place of writing its SiLU."""
    nodes = (
        "a, b = Split <axis = 2> (x) s = Sigmoid(a) g = Mul(a, s) e = Exp(b) f = Neg(e) p = MatMul(f, w) "
        "n = Abs(p) z = Mul(n, g)"
    )
    model = model_of(nodes, inputs="float[6, 64, 64] x, float[32, 32] w")
    assert ops_of(model) == [["Split", "Exp", "Neg"], ["MatMul"], ["Split", "Sigmoid", "Mul", "Abs", "Mul"]]
    assert "x" in model.graph.node[-1].input
