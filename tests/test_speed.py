"""10,000 nodes: the whole run without verification takes less than 5 seconds on 2 cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import Report, optimize

NODES, LIMIT = 10_000, 5.0  # seconds
LOOP = 0.105  # seconds of `loop` on a core that is free
HIDDEN, HEADS, WIDE = 16, 2, 32
BLOCK = 50  # nodes


class Builder:
    """Nodes, each named after its output, and their initializers."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self._random.standard_normal(shape).astype(np.float32))

    def constant(self, value: object) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def model(self, output: str) -> onnx.ModelProto:
        shape = ["batch", "seq", HIDDEN]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1, "seq", "seq"]))
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "speed", inputs, outputs, self.weights)
        return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def linear(b: Builder, x: str, inputs: int, outputs: int) -> str:
    return b.add("Add", b.weight(outputs), b.add("MatMul", x, b.weight(inputs, outputs)))


def layer_norm(b: Builder, x: str) -> str:
    centred = b.add("Sub", x, b.add("ReduceMean", x, axes=[-1]))
    variance = b.add("ReduceMean", b.add("Pow", centred, b.constant(np.float32(2))), axes=[-1])
    deviation = b.add("Sqrt", b.add("Add", variance, b.constant(np.float32(1e-5))))
    return b.add("Add", b.add("Mul", b.add("Div", centred, deviation), b.weight(HIDDEN)), b.weight(HIDDEN))


def attention(b: Builder, x: str) -> str:
    split, join = b.constant([0, 0, HEADS, HIDDEN // HEADS]), b.constant([0, 0, HIDDEN])
    q, k, v = (b.add("Reshape", linear(b, x, HIDDEN, HIDDEN), split) for _ in range(3))
    columns = b.add("Transpose", k, perm=[0, 2, 3, 1])
    scores = b.add("MatMul", b.add("Transpose", q, perm=[0, 2, 1, 3]), columns)
    masked = b.add("Add", b.add("Mul", scores, b.constant(np.float32(0.35))), "mask")
    context = b.add("MatMul", b.add("Softmax", masked, axis=-1), b.add("Transpose", v, perm=[0, 2, 1, 3]))
    return linear(b, b.add("Reshape", b.add("Transpose", context, perm=[0, 2, 1, 3]), join), HIDDEN, HIDDEN)


def feed_forward(b: Builder, x: str) -> str:
    h = linear(b, x, HIDDEN, WIDE)
    erf = b.add("Erf", b.add("Div", h, b.constant(np.float32(2**0.5))))
    gated = b.add("Mul", h, b.add("Add", erf, b.constant(np.float32(1))))
    return linear(b, b.add("Mul", gated, b.constant(np.float32(0.5))), WIDE, HIDDEN)


def transformer() -> onnx.ModelProto:
    """Pre-norm blocks, everything written out as before opset 17."""
    b, x = Builder(), "x"
    for _ in range(NODES // BLOCK):
        x = b.add("Add", x, attention(b, layer_norm(b, x)))
        x = b.add("Add", x, feed_forward(b, layer_norm(b, x)))
    return b.model(x)


def elementwise() -> onnx.ModelProto:
    """Nodes that begin every pattern and end none: random operators on the latest values."""
    b, random, values = Builder(), np.random.default_rng(0), ["x", "x"]
    ops = "Add", "Sub", "Mul", "Div", "Relu", "Sigmoid", "Tanh", "Erf", "Sqrt", "Exp", "Neg", "Abs"
    while len(b.nodes) < NODES - 1:
        op = str(random.choice(ops))
        one, two = values[-1], values[-int(random.integers(1, min(len(values), 20) + 1))]
        values.append(b.add(op, one, two) if op in ops[:4] else b.add(op, one))
    return b.model(b.add("Abs", values[-1]))


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    """Loading the patterns and schemas once is no part of the work."""
    optimize(parse_small(), verify=False)
    yield


def parse_small() -> onnx.ModelProto:
    b = Builder()
    return b.model(feed_forward(b, layer_norm(b, "x")))


def timed(model: onnx.ModelProto) -> tuple[Report, float, float]:
    """The report, the seconds from a serialized model to a serialized model, and what is allowed: the best of three.

    They are seconds of the processor: the work has one thread.  LIMIT is for a core that is free.  A loop before and
    after each run shows how much other work slows the core just then (it was seen to take 0.10 s alone and 0.19 s
    minutes later); large graphs suffer more from shared caches than the loop does, so half as much again is allowed.
    """
    content, runs = model.SerializeToString(), []
    for _ in range(3):
        before, start = loop(), time.process_time()
        result, report = optimize(content, verify=False)
        result.SerializeToString()
        seconds = time.process_time() - start
        slowness = (before + loop()) / 2 / LOOP
        runs.append((report, seconds, LIMIT if slowness < 1.1 else LIMIT * slowness * 1.5))
    return min(runs, key=lambda run: run[1] / run[2])


def loop() -> float:
    times = []
    for _ in range(3):
        start, table = time.process_time(), {}
        for i in range(400_000):
            table[i % 1000] = i, str(i)
        times.append(time.process_time() - start)
    return statistics.median(times)


def test_a_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    model = transformer()
    assert len(model.graph.node) == NODES
    report, seconds, allowed = timed(model)
    show(capsys, "transformer blocks", report, seconds)
    blocks = NODES // BLOCK
    assert report.counts == {
        "attention": blocks, "gemm_bias_activation": 3 * blocks, "layer_norm": 2 * blocks, "parallel_gemm": blocks,
    }  # fmt: skip
    assert seconds < allowed, report.seconds


def test_unrelated_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    model = elementwise()
    assert len(model.graph.node) == NODES
    report, seconds, allowed = timed(model)
    show(capsys, "elementwise nodes", report, seconds)
    assert seconds < allowed, report.seconds


def show(capsys: pytest.CaptureFixture[str], what: str, report: Report, seconds: float) -> None:
    stages = ", ".join(f"{name} {value:.2f}" for name, value in report.seconds.items())
    with capsys.disabled():
        print(f"\n{NODES} {what}: {seconds:.2f} s ({stages})")
