"""Nodes that depend on constants only: which become initializers, with the same values, and which stay."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import apply, assert_same, ops, parse, random, run, value

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph, write_model
from onnxfuse.passes.fold_constants import fold_constants


def test_constant_nodes_with_each_attribute() -> None:
    text = """(float[2] x) => (y) {
        a = Constant<value=float[2] {1,2}>() b = Constant<value_float=3.0>() c = Constant<value_floats=[4.0, 5.0]>()
        i = Constant<value_int=6>() j = Constant<value_ints=[7, 8]>()
        k = Add(i, j) l = Cast<to=1>(k) m = Add(a, b) n = Add(c, l) o = Mul(m, n) y = Add(x, o) }"""
    model = parse(text)
    after, _ = apply(model, fold_constants)
    assert ops(after) == "Add"
    assert value(after, "o") == [4 * 17, 5 * 19]
    assert_same(model, after, (2,))


def test_weights_behind_identity_and_transpose() -> None:
    text = "(float[n,4] x) => (y) { i = Identity(w) t = Transpose<perm=[1,0]>(i) y = MatMul(x, t) }"
    model = parse(text, w=random(300, 4))
    after, _ = apply(model, fold_constants)
    assert ops(after) == "MatMul"
    assert_same(model, after, (2, 4))


@pytest.mark.parametrize("indices", [[1, 6], [[0, 1], [1, 2]]], ids=["flattened", "by_axis"])
@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("float", np.float32), ("double", np.float64)])
def test_sparse_weights_are_read(indices: list, name: str, dtype: type) -> None:
    text = f"({name}[n,4] x) => (y) {{ t = Transpose<perm=[1,0]>(w) y = MatMul(x, t) }}"
    model = parse(text, w=np.zeros((4, 4), dtype))
    values = numpy_helper.from_array(np.array([3, 5], dtype), "w")
    model.graph.initializer.pop()
    model.graph.sparse_initializer.append(
        onnx.helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(indices), "indices"), [4, 4])
    )
    after, _ = apply(model, fold_constants)
    (stored,) = (numpy_helper.to_array(tensor) for tensor in after.graph.initializer)
    assert stored.dtype == dtype and stored[1, 0] == 3 and stored[2, 1] == 5 and np.count_nonzero(stored) == 2


def test_a_large_weight_with_another_consumer_is_not_stored_twice() -> None:
    text = "(float[n,160] x) => (y) { t = Transpose<perm=[1,0]>(w) a = MatMul(x, t) y = MatMul(a, w) }"
    assert ops(apply(parse(text, w=random(160, 160)), fold_constants)[0]) == "Transpose MatMul MatMul"


STANDARDIZED = (
    "m = ReduceMean<keepdims=1>(w, axes) c = Sub(w, m) s = Mul(c, c) v = ReduceMean<keepdims=1>(s, axes) "
    "d = Sqrt(v) n = Div(c, d) t = Mul(n, gain)"
)


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        (f"{STANDARDIZED} y = Conv(x, t)", "Conv"),
        (f"{STANDARDIZED} a = Conv(x, t) y = Conv(a, t)", "Conv Conv"),
        (f"{STANDARDIZED} a = Conv(x, t) y = Conv(a, w)", None),
        (f"{STANDARDIZED} a = Conv(x, t) y = Conv(a, c)", None),
    ],
    ids=["one convolution", "two of the same filters", "and one of the weight", "and one of a result on the way"],
)
def test_a_weight_with_which_many_nodes_compute_is_replaced(nodes: str, rest: str | None) -> None:
    """NFNet standardizes the filters of each convolution; the weight is not stored beside what is left of it."""
    weights = {"w": random(48, 48, 3, 3), "gain": random(48, 1, 1, 1), "axes": np.array([1, 2, 3])}
    model = parse(f"(float[n,48,8,8] x) => (y) {{ {nodes} }}", **weights)
    after, _ = apply(model, fold_constants)
    if rest:
        assert ops(after) == rest
    else:
        assert len(after.graph.node) > 2
    assert_same(model, after, (1, 48, 8, 8))


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("p = MatMul(t, w) s = Add(p, c) y = MatMul(x, s)", "MatMul"),
        ("p = Gemm<transB = 1>(t, w, c) y = MatMul(x, p)", "MatMul"),
        ("n = LayerNormalization(t, c) p = MatMul(n, w) y = MatMul(x, p)", "LayerNormalization MatMul MatMul"),
    ],
)
@pytest.mark.parametrize("others", [0, 1_000_000])
def test_a_product_of_constants_may_make_the_file_larger_by_a_tenth(nodes: str, rest: str, others: int) -> None:
    """A table that all layers project, each with weights of its own, as in DeBERTa."""
    weights = {"t": random(160, 160), "w": random(160, 160), "c": random(160), "big": random(1, others)}
    text = f"(float[1,160] x) => (y, q, v, u) {{ {nodes} q = Abs(t) v = Neg(w) u = Exp(big) }}"
    model = parse(text, **weights)
    graph = read_graph(model)
    fold_constants(graph, infer_shapes(graph))
    left = [node.op for node in graph.nodes if node.op not in ("Abs", "Neg", "Exp")]
    before = [node.op_type for node in model.graph.node if node.op_type not in ("Abs", "Neg", "Exp")]
    assert left == (rest.split() if others else before)


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Expand(one, big) y = Add(x, a)",
        "a = ConstantOfShape(big) y = Add(x, a)",
        "a = Tile(one, big) y = Add(x, a)",
        "a = RandomNormal<shape=[2]>() y = Add(x, a)",
        "a = DequantizeLinear(q, one0) y = Add(x, a)",
        "y = Reshape(one, big)",
    ],
)
def test_results_that_are_random_quantized_or_large_are_not_folded(nodes: str) -> None:
    weights = {
        "one": np.ones((1, 1), np.float32), "big": np.array([200, 200]), "q": np.ones(2, np.int8),
        "one0": np.float32(1),
    }  # fmt: skip
    model = parse(f"(float[200,200] x) => (y) {{ {nodes} }}", **weights)
    graph = read_graph(model)
    fold_constants(graph, infer_shapes(graph))
    assert [n.op for n in graph.nodes] == [n.op_type for n in model.graph.node]


def test_indices_that_are_gathered_by_stay_small() -> None:
    """A fused attention reads the indices of positions once, not once for each head."""
    weights = {"indices": np.array([[[0, 1]]]), "full": np.array([3, 1, 2]), "ones": np.array([1, 1, 2])}
    nodes = "i = Reshape(indices, ones) e = Expand(i, full) y = GatherElements<axis=2>(x, e) z = Add(e, e)"
    before = parse(f"(float[3,1,2] x) => (y, z) {{ {nodes} }}", **weights)
    after, _ = apply(before, fold_constants)
    assert [node.op_type for node in after.graph.node] == ["Reshape", "Expand", "GatherElements", "Add"]


def test_a_large_external_weight_is_not_read(tmp_path: Path) -> None:
    text = "(float[n,200] x) => (y) { t = Transpose<perm=[1,0]>(w) y = MatMul(x, t) }"
    path = tmp_path / "m.onnx"
    onnx.save(parse(text, w=random(200, 200)), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    (tmp_path / "w.bin").unlink()
    graph = read_graph(model, tmp_path)
    fold_constants(graph, infer_shapes(graph))
    assert [n.op for n in graph.nodes] == ["Transpose", "MatMul"]


def test_a_constant_node_reads_its_file_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse("(float[n,2] x) => (y) { a = Constant<value=float[2] {1,2}>() y = Add(x, a) }")
    stored = model.graph.node[0].attribute[0].t
    stored.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stored)))  # as raw bytes, which may lie in a file
    (tmp_path / "elsewhere").mkdir()
    for folder, numbers in (tmp_path, [3, 4]), (tmp_path / "elsewhere", [5, 6]):
        (folder / "a.bin").write_bytes(np.array(numbers, np.float32).tobytes())
    onnx.external_data_helper.set_external_data(stored, "a.bin")
    stored.ClearField("raw_data")
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = model.SerializeToString(deterministic=True)
    graph = read_graph(model, tmp_path)
    fold_constants(graph, infer_shapes(graph))
    assert ops(after := write_model(graph)) == "Add"
    assert value(after, "a") == [3, 4]
    assert model.SerializeToString(deterministic=True) == before


def test_static_shape_arithmetic() -> None:
    text = """(float[n,4,6] x) => (y) {
        s = Shape(x) i = Gather(s, two) u = Unsqueeze(i, zero) c = Concat<axis=0>(minus, u) y = Reshape(x, c) }"""
    model = parse(text, two=np.array(2), zero=np.array([0]), minus=np.array([-1]))
    after, _ = apply(model, fold_constants)
    assert ops(after) == "Reshape"
    assert value(after, "c") == [-1, 6]


# --- the dtype in which a constant is computed ---------------------------------------------------------------------


def folded_value(nodes: str, opset: int = 20, **constants: np.ndarray) -> list | None:
    """Return what `y` becomes by folding; None if it is not folded.  Where it is, onnxruntime computes the same."""
    model = parse(f"(float[1] x) => (z, y) {{ {nodes} y = Identity(v) z = Identity(x) }}", opset, **constants)
    after, _ = optimize(model, verify=False)
    feeds = {"x": np.ones(1, np.float32)}
    for original, folded in zip(run(model, feeds), run(after, feeds), strict=True):
        assert original.dtype == folded.dtype and original.shape == folded.shape
        np.testing.assert_array_equal(folded.astype(float), original.astype(float))
    return run(after, feeds)[1].tolist() if set(ops(after).split()) == {"Identity"} else None


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floating_point_quotients_are_not_integers(dtype: type) -> None:
    quotient = "q = Div(a, b) p = Mul(q, b) v = Cast<to=7>(p)"
    assert folded_value(quotient, a=np.array([7], dtype), b=np.array([2], dtype)) == [7]
    assert folded_value("v = Div(a, b)", a=np.array([7], dtype), b=np.array([2], dtype)) == [3.5]


def test_quotients_of_bfloat16_are_not_integers() -> None:
    """onnxruntime has no Div of bfloat16 on the CPU, so that the folded model is what it can run."""
    text = "(float[1] x) => (y) { q = Div(a, b) p = Mul(q, b) v = Cast<to=1>(p) y = Add(x, v) }"
    numbers = {name: np.array([number], ml_dtypes.bfloat16) for name, number in (("a", 7), ("b", 2))}
    after, _ = apply(parse(text, **numbers), fold_constants)
    assert ops(after) == "Add" and value(after, "v") == [7]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integer_quotients_are_rounded_toward_zero(dtype: type) -> None:
    numbers = {"a": np.array([7, -7, 7], dtype), "b": np.array([2, 2, -2], dtype)}
    assert folded_value("v = Div(a, b)", **numbers) == [3, -3, -3]


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_a_division_by_zero_stays_with_the_runtime(op: str) -> None:
    """onnxruntime ends the process by a signal there, if it runs the node at all."""
    text = f"(int64[1] x) => (y) {{ q = {op}(a, b) y = Add(x, q) }}"
    model = parse(text, a=np.array([7]), b=np.array([0]))
    assert ops(apply(model, fold_constants)[0]) == f"{op} Add"


@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceL2", "CumSum", "MatMul"])
def test_sums_in_half_precision_are_rounded_once(op: str, name: str, dtype: type) -> None:
    """The sum of 3,000 ones by single additions is 2,048 in float16 and 256 in bfloat16."""
    second = {"MatMul": np.ones((3000, 1), dtype), "CumSum": np.array(1)}.get(op, np.array([1]))
    text = f"({name}[1] x) => (y) {{ s = {op}(a, b) y = Add(x, s) }}"
    after, _ = apply(parse(text, a=np.ones((1, 3000), dtype), b=second), fold_constants)
    stored = next(numpy_helper.to_array(t) for t in after.graph.initializer if t.name == "s")
    expected = {"ReduceMean": 1, "ReduceL2": 3000**0.5}.get(op, 3000)
    assert ops(after) == "Add" and stored.dtype == dtype
    assert stored.reshape(-1)[-1] == dtype(expected)


@pytest.mark.parametrize("op", ["Mul", "MatMul", "ReduceSum", "ReduceProd"])
def test_what_only_half_precision_cannot_hold_stays_with_the_runtime(op: str) -> None:
    """onnxruntime computes it in float32 on the CPU and goes on with that: 120000 times 0.5 is 60000."""
    second = np.array([0]) if op.startswith("Reduce") else np.array([400, 0], np.float16)
    text = f"(float16[1] x) => (y) {{ p = {op}(a, b) m = Mul(p, h) y = Add(x, m) }}"
    half = np.array([0.5], np.float16)
    finite = parse(text, a=np.array([300, 65500 if second.size == 1 else 0], np.float16), b=second, h=half)
    assert ops(apply(finite, fold_constants)[0]) == f"{op} Mul Add"
    infinite = parse(text, a=np.array([np.inf, 1], np.float16), b=second, h=half)
    assert ops(apply(infinite, fold_constants)[0]) == "Add"


@pytest.mark.parametrize("sizes", [(257, 257, 255), (4097, 4097), (2**24 + 1,)])
def test_shape_arithmetic_in_float32_is_rounded(sizes: tuple[int, ...]) -> None:
    text = f"""(int64[1] x, float{list(sizes)} big) => (y) {{
        s = Shape(big) f = Cast<to=1>(s) p = ReduceProd<keepdims=1>(f) v = Cast<to=7>(p) y = Add(x, v) }}"""
    after, _ = apply(parse(text, 17), fold_constants)
    assert ops(after) == "Add"
    assert value(after, "v") == [int(np.prod(np.array(sizes, np.float32)))] != [int(np.prod(sizes))]


@pytest.mark.parametrize("to", ["Cast<to=6>", "Cast<to=2>"])
def test_casts_out_of_range_stay_with_the_runtime(to: str) -> None:
    """C++ leaves such a cast open; processors differ."""
    text = f"(float[1] x) => (y) {{ i = {to}(a) f = Cast<to=1>(i) y = Add(x, f) }}"
    for number in (np.nan, 1e10, -1e10):
        after, _ = apply(parse(text, a=np.array([number], np.float32)), fold_constants)
        assert ops(after) == "Cast Cast Add"
    assert ops(apply(parse(text, a=np.array([3.7], np.float32)), fold_constants)[0]) == "Add"


# --- empty constants, and what runtimes disagree about --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.uint64, np.float16, np.float32])
def test_empty_constants_keep_their_axes(dtype: type) -> None:
    empty = np.zeros((3, 0, 1), dtype)
    assert folded_value("v = Concat<axis=-2>(a, b)", a=empty, b=empty) == [[], [], []]
    assert folded_value("v = Transpose<perm=[1,2,0]>(a)", a=empty) == []
    if dtype is np.bool_:
        assert folded_value("v = Xor(a, b)", a=np.zeros((1, 0, 2), dtype), b=np.zeros((1, 0, 2), dtype)) == [[]]


@pytest.mark.parametrize("end", [2**31 - 1, 2**63 - 1])
def test_a_slice_backward_to_the_largest_integer_is_left(end: int) -> None:
    """It is empty in ONNX, and goes to the first element in onnxruntime."""
    numbers = {"a": np.arange(4, dtype=np.float32), "s": np.array([2]), "e": np.array([end]), "k": np.array([0])}
    assert folded_value("v = Slice(a, s, e, k, m)", m=np.array([-1]), **numbers) is None
    assert folded_value("v = Slice(a, s, e, k, m)", m=np.array([1]), **numbers) == [2, 3]
    sizes = {**numbers, "a": np.array([5, 6, 7, 8])}
    assert folded_value("v = Slice(a, s, e, k, m)", m=np.array([-1]), **sizes) is None


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum", "ReduceMax"])
def test_a_reduction_of_nothing_is_left(op: str) -> None:
    text = f"(float[1] x) => (y) {{ m = {op}<keepdims=0>(a) y = Add(x, m) }}"
    after, _ = apply(parse(text, 17, a=np.zeros((0, 2), np.float32)), fold_constants)
    assert ops(after) == f"{op} Add"


@pytest.mark.parametrize("attributes", ["", "<value_float=1.0, value_int=1>"])
def test_a_constant_without_one_value_is_left(attributes: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x) => (float[4] y) {{ w = Constant {attributes} () y = Add(x, w) }}"""
    graph = read_graph(onnx.parser.parse_model(text))
    assert fold_constants(graph, infer_shapes(graph)) == []
    assert [node.op for node in graph.nodes] == ["Constant", "Add"]
