"""Models of any number of nodes, whose optimization is counted by tests and timed by benchmarks/host_seconds.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, HEADS, WIDE = 16, 2, 32
BLOCK = 50  # nodes of a block of the transformer


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

    def model(self, *results: str) -> onnx.ModelProto:
        shape = ["batch", "seq", HIDDEN]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1, "seq", "seq"]))
        inputs.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"]))
        outputs = [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in results]
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


def transformer(nodes: int) -> onnx.ModelProto:
    """Pre-norm blocks, everything written out as before opset 17."""
    b, x = Builder(), "x"
    for _ in range(nodes // BLOCK):
        x = b.add("Add", x, attention(b, layer_norm(b, x)))
        x = b.add("Add", x, feed_forward(b, layer_norm(b, x)))
    return b.model(x)


def rotated(b: Builder, x: str, cosine: str, sine: str) -> str:
    half, last = b.constant([HIDDEN // HEADS // 2]), b.constant([3])
    low = b.add("Slice", x, b.constant([0]), half, last)
    high = b.add("Slice", x, half, b.constant([2**63 - 1]), last)
    turned = b.add("Concat", b.add("Neg", high), low, axis=-1)
    return b.add("Add", b.add("Mul", x, cosine), b.add("Mul", turned, sine))


def attention_of_decoder(b: Builder, x: str) -> str:
    """Attention with rotary embedding, whose shapes and positions each block computes from the shape of its input."""
    size, first = HIDDEN // HEADS, b.constant([0])
    shape = b.add("Shape", x)
    batch, seq = (b.add("Gather", shape, b.constant(axis), axis=0) for axis in (0, 1))
    leading = [b.add("Unsqueeze", each, first) for each in (batch, seq)]
    split = b.add("Concat", *leading, b.constant([HEADS]), b.constant([size]), axis=0)
    join = b.add("Concat", *leading, b.constant([HIDDEN]), axis=0)
    rows = (b.add("Reshape", linear(b, x, HIDDEN, HIDDEN), split) for _ in range(3))
    q, k, v = (b.add("Transpose", each, perm=[0, 2, 1, 3]) for each in rows)
    positions = b.add("Unsqueeze", b.add("Range", b.constant(0), seq, b.constant(1)), b.constant([1]))
    angles = b.add("Mul", b.add("Cast", positions, to=1), b.weight(size // 2))
    angles = b.add("Concat", angles, angles, axis=-1)
    cosine, sine = b.add("Cos", angles), b.add("Sin", angles)
    q, k = rotated(b, q, cosine, sine), rotated(b, k, cosine, sine)
    scores = b.add("MatMul", q, b.add("Transpose", k, perm=[0, 1, 3, 2]))
    masked = b.add("Add", b.add("Div", scores, b.constant(np.float32(size**0.5))), "mask")
    context = b.add("Transpose", b.add("MatMul", b.add("Softmax", masked, axis=-1), v), perm=[0, 2, 1, 3])
    return linear(b, b.add("Reshape", context, join), HIDDEN, HIDDEN)


def decoder(nodes: int) -> onnx.ModelProto:
    """Blocks of a decoder with about as many nodes, most of which compute shapes, positions and rotations."""
    b, x = Builder(), "x"
    while len(b.nodes) < nodes - BLOCK:
        x = b.add("Add", x, attention_of_decoder(b, layer_norm(b, x)))
        x = b.add("Add", x, feed_forward(b, layer_norm(b, x)))
    while len(b.nodes) < nodes:
        x = b.add("Abs", x)
    return b.model(x)


def elementwise(nodes: int) -> onnx.ModelProto:
    """Nodes that begin every pattern and end none: random operators on the latest values."""
    b, random, values = Builder(), np.random.default_rng(0), ["x", "x"]
    ops = "Add", "Sub", "Mul", "Div", "Relu", "Sigmoid", "Tanh", "Erf", "Sqrt", "Exp", "Neg", "Abs"
    while len(b.nodes) < nodes - 1:
        op = str(random.choice(ops))
        one, two = values[-1], values[-int(random.integers(1, min(len(values), 20) + 1))]
        values.append(b.add(op, one, two) if op in ops[:4] else b.add(op, one))
    return b.model(b.add("Abs", values[-1]))


def normalized_in_turns(nodes: int) -> onnx.ModelProto:
    """Sinkhorn's iterations: no region may hold two reductions that follow each other, and all are of one level."""
    b, x = Builder(), "x"
    for i in range(nodes // 2):
        x = b.add("Sub", x, b.add("ReduceLogSumExp", x, axes=[1 + i % 2]))
    return b.model(x)


def differences_in_turns(nodes: int) -> onnx.ModelProto:
    """The same, but each iteration reads the first tensor as well, which leads to all others."""
    b, y = Builder(), "x"
    x = b.add("Exp", "x")
    for i in range(nodes // 2):
        y = b.add("Sub", x, b.add("ReduceMean", y, axes=[1 + i % 2]))
    return b.model(b.add("Abs", y))


def embeddings(nodes: int) -> onnx.ModelProto:
    """Tables of a recommender, of which one row each becomes a part of one tensor."""
    b = Builder()
    return b.model(b.add("Concat", *(b.add("Gather", b.weight(10, 4), "ids") for _ in range(nodes - 1)), axis=1))


def readers_of_one(nodes: int) -> onnx.ModelProto:
    """Operators that all read one tensor."""
    b = Builder()
    x = b.add("Sqrt", "x")
    return b.model(*(b.add("Mul", x, b.weight(HIDDEN)) for _ in range(nodes - 1)))


def sum_of_readers(nodes: int) -> onnx.ModelProto:
    """A Sum of operators that all read one tensor; half of them are equal."""
    b = Builder()
    x = b.add("Sqrt", "x")
    readers = [b.add("Mul", x, b.weight(HIDDEN)) if i % 2 else b.add("Exp", x) for i in range(nodes - 2)]
    return b.model(b.add("Sum", *readers))


def parts_of_one(nodes: int) -> onnx.ModelProto:
    """A Split into many parts, an operator on each, and a Concat of the results."""
    b = Builder()
    parts = [f"part_{i}" for i in range(nodes - 3)]
    wide, sizes = b.add("MatMul", "x", b.weight(HIDDEN, len(parts))), b.constant([1] * len(parts))
    b.nodes.append(helper.make_node("Split", [wide, sizes], parts, axis=2))
    return b.model(b.add("Concat", *(b.add("Sin", part) for part in parts), axis=2))


def projections_of_one(nodes: int) -> onnx.ModelProto:
    """Products of one tensor with many weights."""
    b = Builder()
    return b.model(*(linear(b, "x", HIDDEN, HIDDEN) for _ in range(nodes // 2)))


def running_sums(nodes: int) -> onnx.ModelProto:
    """A Concat of the results of a chain."""
    b, sums = Builder(), ["x"]
    while len(b.nodes) < nodes - 1:
        sums.append(b.add("Add", sums[-1], b.weight(HIDDEN)))
    return b.model(b.add("Concat", *sums, axis=2))


def scaled_in_turns(nodes: int) -> onnx.ModelProto:
    """Products with numbers, each of the one before: a pattern with a number could collect any of them."""
    b, x = Builder(), "x"
    for _ in range(nodes):
        x = b.add("Mul", x, b.constant(np.float32(1.001)))
    return b.model(x)


def chain_of_constants(nodes: int) -> onnx.ModelProto:
    """Operators that each read the result of the one before, and constants alone."""
    b = Builder()
    x = b.weight(HIDDEN)
    for i in range(nodes - 1):
        x = b.add("Add", x, b.constant(np.float32(i)))
    return b.model(b.add("Mul", "x", x))


def small() -> onnx.ModelProto:
    b = Builder()
    return b.model(feed_forward(b, layer_norm(b, "x")))


MODELS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "transformer": transformer, "decoder": decoder, "elementwise": elementwise,
}  # fmt: skip
# Hard to match or to form regions of: one level's clusters that cannot be merged, many readers, operands or outputs.
OF_REGIONS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "normalized in turns": normalized_in_turns, "differences in turns": differences_in_turns,
    "embeddings": embeddings, "readers of one": readers_of_one,
    "sum of readers": sum_of_readers, "parts of one": parts_of_one, "projections of one": projections_of_one,
    "running sums": running_sums, "scaled in turns": scaled_in_turns,
}  # fmt: skip
