"""Names of sizes that a model records between its nodes: which are kept, and that equal ones are equal sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from runtimes import open_on_cpu

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph, write_model

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '


def written(nodes: str, recorded: str, signature: str = "(float[n,4] x, float[m,4] z) => (float y)") -> dict[str, list]:
    """Return the shapes that are written between nodes of a model that records others."""
    graph = read_graph(onnx.parser.parse_model(f"{HEAD} {signature} <{recorded}> {{ {nodes} }}"))
    graph.sort()
    infer_shapes(graph)
    infos = write_model(graph).graph.value_info
    return {each.name: [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim] for each in infos}


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("float[n,4] a, float[n + m,4] b", {"a": ["n", 4], "b": ["n + m", 4]}),
        ("float[m,4] a, float[n,4] b", {"a": [0, 4], "b": [0, 4]}),
        ("float[unk__0,4] a, float[unk__0,4] b", {"a": [0, 4], "b": [0, 4]}),
        ("float[rows,4] a, float[rows,4] b", {"a": [0, 4], "b": [0, 4]}),
        ("float[n,4] a, float[rows,4] b", {"a": ["n", 4], "b": [0, 4]}),
    ],
)
def test_names_that_are_not_proven_are_left_out(recorded: str, expected: dict[str, list]) -> None:
    """A size without a name and a number counts as 0 here."""
    quoted = recorded.replace("[n + m,", '["n + m",')
    assert written("a = Relu (x) b = Concat <axis = 0> (a, z) y = Neg (b)", quoted) == expected


def test_names_of_an_operator_that_nothing_is_known_of() -> None:
    """Those stay that the exporter gave; the second is one that an inference invented."""
    nodes = "a = Custom (x) b = Custom (a) y = Neg (b)"
    assert written(nodes, "float[rows,4] a, float[unk__7,4] b") == {"a": ["rows", 4], "b": [0, 4]}


def test_inputs_keep_the_names_that_a_converter_invented() -> None:
    signature = "(float[unk__3,4] x, float[unk__4,4] z) => (float y)"
    assert written("a = Relu (x) y = Neg (a)", "float[unk__3,4] a", signature) == {"a": ["unk__3", 4]}


def test_a_sequence_that_is_joined() -> None:
    """onnxruntime gave the result the memory of an operand of as many rows, as the names said, and failed."""
    text = f"""{HEAD} (float[n,4] x) => (float y) <float[unk__0,4] b, float[unk__0,4] c> {{
        i = Constant <value = int64[1] {{1}}> () e = Constant <value = int64[1] {{100}}> ()
        o = Constant <value = int64[1] {{0}}> ()
        a = Slice (x, i, e, o) b = CumSum (a, o) s = SequenceConstruct (b, x) c = ConcatFromSequence <axis = 0> (s)
        y = CumSum (c, o) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    after, _ = optimize(model, verify=False)
    for rows in (1, 2, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        session = open_on_cpu(after, optimize=False)
        c = np.concatenate([np.cumsum(x[1:], 0), x])
        np.testing.assert_allclose(session.run(None, {"x": x})[0], np.cumsum(c, 0), rtol=1e-4, atol=1e-4)
