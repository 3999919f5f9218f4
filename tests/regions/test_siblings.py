"""Test that regions which read one large tensor in the same order become one, whose kernel reads the tensor once."""

from __future__ import annotations

import re

import pytest
from region_models import Region, assert_programs_agree, draw, optimized, parsed, plan_of, regions
from test_joining import PRODUCT, joined_of, model_of

from onnxfuse import optimize
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.runtime.plan import Launch, TensorSpec

ROWS = "float[4096, 4096] x, float[4096, 4096] y"
IMAGE = "float[8, 64, 128, 128] x"
SIBLINGS = {
    "Relu Neg": ("a = Relu(x) b = Neg(x)", ROWS),
    "Relu Mul Neg Tanh": ("c = Relu(x) a = Mul(c, y) d = Neg(x) b = Tanh(d)", ROWS),
    "ArgMax ReduceMax": ("a = ArgMax <axis = 1> (x) b = ReduceMax <axes = [1]> (x)", ROWS),
    "Softmax LogSoftmax": ("a = Softmax(x) b = LogSoftmax(x)", ROWS),
    "ReduceMean ReduceMax": ("a = ReduceMean <axes = [1]> (x) b = ReduceMax <axes = [1]> (x)", IMAGE),
    "ReduceMean ReduceMax of pools": ("a = GlobalAveragePool(x) b = GlobalMaxPool(x)", IMAGE),
    "Relu ReduceMax": ("a = Relu(x) b = ReduceMax <axes = [1], keepdims = 0> (x)", ROWS),
    "ReduceMean Sub Abs ReduceMax": (
        "m = ReduceMean <axes = [1]> (x) a = Sub(x, m) c = Abs(x) b = ReduceMax <axes = [1]> (c)",
        ROWS,
    ),
}


def times_read(region: Region, inputs: str) -> int:
    """Return how often the text of the kernel of a region loads from its first operand."""
    shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"\[([\d, ]+)\]", inputs)]
    plan = plan_of(region, [TensorSpec(shape, "float32") for shape in shapes[: len(region.node.input)]])
    (launch,) = (step for step in plan.steps if isinstance(step, Launch))
    return len(re.findall(r"\bx0\b", str(launch.kernel.text))) - 1  # without its declaration


@pytest.mark.parametrize("name", SIBLINGS)
def test_what_reads_one_tensor_in_order_is_one_region_that_reads_it_once(name: str) -> None:
    nodes, inputs = SIBLINGS[name]
    model, report = optimize(parsed(nodes, inputs=inputs, outputs="a b"), verify=False)
    (region,) = regions(model)
    assert report.counts == {"region": 1}
    assert region.ops == name.removesuffix(" of pools").split()
    assert times_read(region, inputs) == 1


@pytest.mark.parametrize("name", SIBLINGS)
def test_they_compute_what_they_did(name: str) -> None:
    nodes, inputs = SIBLINGS[name]
    for large in ("4096", "128", "64"):
        inputs = inputs.replace(large, "6")
    model, _ = optimized(parsed(nodes, inputs=inputs, outputs="a b"))
    assert assert_programs_agree(model, draw(model)) == 1


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Relu(x) b = Transpose(x)",
        "a = ReduceMax <axes = [0]> (x) b = ReduceMax <axes = [1]> (x)",
        "a = Softmax <axis = 0> (x) b = Softmax <axis = 1> (x)",
        "s := int64[1] {4} e := int64[1] {4000} o := int64[1] {0} a = Slice(x, s, e, o) b = Relu(x)",
        "a = Relu(x) m = MatMul(a, y) c = Add(m, x) b = Tanh(c)",
    ],
    ids=[
        "one moves it",
        "they reduce other rows",
        "they read whole rows of others",
        "one reads a part",
        "one is later",
    ],
)
def test_what_reads_one_tensor_in_other_orders_stays_apart(nodes: str) -> None:
    model, _ = optimize(parsed(nodes, inputs=ROWS, outputs="a b"), verify=False)
    assert not any({"a", "b"} <= set(region.node.output) for region in regions(model))


def test_readers_of_one_product_join_it_together() -> None:
    """Apart from each other neither could, because the other one reads the result of the product as well."""
    _, found = joined_of(model_of(f"{PRODUCT} d = Tanh(c) z = Mul(d, y) q = Sigmoid(c)", outputs="z q"))
    assert found == [("gemm_bias_activation", ["Tanh", "Mul", "Sigmoid"])]


def test_readers_of_one_tensor_join_their_products() -> None:
    """Each of the two operators joins its own product, although both read y."""
    nodes = "a = MatMul(x, w) b = Add(a, bias) c = Relu(b) d = Mul(c, y) z = Tanh(d) "
    nodes += "e = MatMul(y, w2) f = Add(e, bias) g = Relu(f) h = Mul(g, y) q = Exp(h)"
    _, found = joined_of(model_of(nodes, outputs="z q"))
    assert sorted(ops for _, ops in found) == [["Mul", "Exp"], ["Mul", "Tanh"]]


def test_as_many_share_a_region_as_it_may_have_outputs() -> None:
    factors = " ".join(f"c{i} := float {{{i + 2}}} z{i} = Mul(x, c{i})" for i in range(18))
    source = parsed(factors, inputs="float[2048, 2048] x", outputs=" ".join(f"z{i}" for i in range(18)))
    assert [len(region.ops) for region in regions(optimize(source, verify=False)[0])] == [8, 8, 2]


def test_the_reason_of_one_that_stays_apart_names_the_other() -> None:
    nodes = "a = ReduceMax <axes = [0]> (x) b = ReduceMax <axes = [1]> (x)"
    made = fuse_model(parsed(nodes, inputs=ROWS, outputs="a b"), None, Settings([], regions=True))
    assert made.no_region["b"] == "it is not merged with 'a', which reads 'x' as well: they reduce over other axes"
