"""Constants, shape targets, and scales folded into weights: each model before, its operators after, the same values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxfuse.model.graph import Graph
from onnxfuse.model.linking import read_graph, write_model
from onnxfuse.passes.batch_norm import fold_batch_norm
from onnxfuse.passes.fold import Folded, fold_constants, fold_shapes
from onnxfuse.passes.normalize import normalize
from onnxfuse.shapes.dim_text import parse_size
from onnxfuse.shapes.dims import evaluate
from onnxfuse.shapes.inference import Shapes, infer_shapes

EXPORTED = Path(__file__).parent.parent / "models" / "exported"
INDEX = json.loads((EXPORTED / "index.json").read_text())["models"]


def parse(text: str, opset: int = 20, **weights: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX text, with initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> main {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    typed = onnx.shape_inference.infer_shapes(model)  # the text leaves the outputs' types out
    model.graph.ClearField("output")
    model.graph.output.extend(typed.graph.output)
    return model


def apply(model: onnx.ModelProto, *steps: Callable[[Graph, Shapes], object]) -> tuple[onnx.ModelProto, list]:
    """The model after the steps, valid, and what they returned."""
    graph = read_graph(model)
    shapes = infer_shapes(graph)
    results = [step(graph, shapes) for step in steps]
    changed = write_model(graph)
    onnx.checker.check_model(changed, full_check=True)
    return changed, results


def ops(model: onnx.ModelProto) -> str:
    """The operators, in order."""
    return " ".join(node.op_type for node in model.graph.node)


def value(model: onnx.ModelProto, name: str) -> list:
    """An initializer as a list."""
    return next(numpy_helper.to_array(t).tolist() for t in model.graph.initializer if t.name == name)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in onnxruntime, which optimizes nothing."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds)


def assert_same(
    before: onnx.ModelProto, after: onnx.ModelProto, shape: tuple[int, ...], dtype: type = np.float32, tol: float = 2e-6
) -> None:
    """Both models give the same outputs for random values of their first input."""
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    feeds = {before.graph.input[0].name: x}
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(b.astype(float), a.astype(float), rtol=0, atol=tol * (np.abs(a).max(initial=0) + 1))


def random(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """Values around one half, away from zero."""
    return np.random.default_rng(seed + sum(shape)).uniform(0.3, 1.5, shape).astype(dtype)


def batch_norm(channels: int, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """The four constants of a BatchNormalization, called g, h, m and v."""
    return {name: random(channels, dtype=dtype, seed=i) for i, name in enumerate("ghmv")}


CONV = "(float[n,4,7,7] x) => (y) {{ c = Conv{attrs}(x, w{bias}) {after} }}"
BN = "y = BatchNormalization(c, g, h, m, v)"


@pytest.mark.parametrize("opset", [9, 11, 13, 14, 17, 20, 24])
@pytest.mark.parametrize("bias", ["", ", b"])
def test_batch_norm_after_conv(opset: int, bias: str) -> None:
    weights = {"w": random(6, 4, 3, 3), **({"b": random(6)} if bias else {}), **batch_norm(6)}
    model = parse(CONV.format(attrs="<pads=[1,1,1,1]>", bias=bias, after=BN), opset, **weights)
    after, (folded,) = apply(model, fold_batch_norm)
    assert ops(after) == "Conv"
    assert folded == [Folded("batch_norm", "y", "c")]
    assert_same(model, after, (2, 4, 7, 7))


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_groups(op: str, group: int) -> None:
    shape = (8, 4 // group, 3, 3) if op == "Conv" else (4, 8 // group, 3, 3)
    text = f"(float[n,4,7,7] x) => (y) {{ c = {op}<group={group}>(x, w) {BN} }}"
    model = parse(text, w=random(*shape), **batch_norm(8))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == op
    assert_same(model, after, (2, 4, 7, 7))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_dtypes_round_once(dtype: type) -> None:
    name = {"float16": "float16", "float64": "double", "bfloat16": "bfloat16"}[np.dtype(dtype).name]
    text = f"({name}[n,2,3,3] x) => (y) {{ c = Conv(x, w) {BN} }}"
    w, norm = random(3, 2, 1, 1, dtype=dtype), batch_norm(3, dtype)
    after, _ = apply(parse(text, 22, w=w, **norm), fold_batch_norm)
    g, h, m, v = (norm[k].astype(float) for k in "ghmv")
    scale = g / np.sqrt(v + np.float64(np.float32(1e-5)))
    weight, bias = (numpy_helper.to_array(t) for t in after.graph.initializer)
    np.testing.assert_array_equal(weight, (w.astype(float) * scale.reshape(3, 1, 1, 1)).astype(dtype))
    np.testing.assert_array_equal(bias, (h - m * scale).astype(dtype))


@pytest.mark.parametrize(
    ("after", "rest"),
    [
        ("d = Mul(c, s) y = Add(t, d)", "Conv"),
        ("d = Div(c, s) y = Sub(t, d)", "Conv"),
        ("d = Sub(c, t) y = Mul(two, d)", "Conv"),
        ("y = Add(c, t3)", "Conv"),
        ("y = Div(two, c)", "Conv Div"),
        ("y = Add(c, row)", "Conv Add"),
        ("y = Add(c, batch)", "Conv Add"),
        ("y = Add(c, five)", "Conv Add"),
        ("d = Mul(c, s) e = Relu(d) y = Add(e, d)", "Conv Relu Add"),
        ("d = Relu(c) e = Mul(c, s) y = Add(d, e)", "Conv Relu Mul Add"),
        ("y = Mul(c, c)", "Conv Mul"),
    ],
)
def test_scale_and_bias_after_conv(after: str, rest: str) -> None:
    weights = {
        "w": random(6, 4, 2, 2), "s": random(1, 6, 1, 1), "t": random(6, 1, 1, seed=3), "t3": random(1, 6, 1, 1),
        "two": np.float32(2), "row": random(6), "batch": random(2, 1, 1, 1),
        "five": np.ones((1, 1, 1, 1, 1), np.float32),
    }  # fmt: skip
    model = parse(CONV.format(attrs="", bias="", after=after), **weights)
    changed, _ = apply(model, fold_batch_norm)
    assert ops(changed) == rest
    assert_same(model, changed, (2, 4, 7, 7))


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("c = MatMul(x, w) y = Mul(c, s)", "MatMul"),
        ("c = MatMul(x, w) d = Add(b, c) y = Mul(d, s)", "MatMul Add"),
        ("c = MatMul(x, w) d = Mul(c, s) e = Add(d, b) y = Div(e, s)", "MatMul Add"),
        ("c = MatMul(x, w) y = Add(c, b)", "MatMul Add"),
        ("c = MatMul(x, w) y = Add(c, table)", "MatMul Add"),
        ("c = MatMul(x, w) y = Mul(c, table)", "MatMul Mul"),
        ("c = MatMul(x, w) y = Mul(c, wide)", "MatMul Mul"),
        ("d = Mul(x, k) y = MatMul(d, w)", "MatMul"),
        ("d = Relu(x) e = Mul(d, k) y = MatMul(e, w)", "Relu Mul MatMul"),
    ],
)
def test_matmul(nodes: str, rest: str) -> None:
    weights = {
        "w": random(5, 4), "s": random(4), "b": random(4, seed=2), "table": random(3, 4), "wide": random(1, 1, 1, 4),
        "k": random(5),
    }  # fmt: skip
    model = parse(f"(float[n,3,5] x) => (y) {{ {nodes} }}", **weights)
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == rest
    assert_same(model, after, (2, 3, 5))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("c", [None, (), (1,), (4,), (1, 4), (2, 4)])
def test_gemm(transposed: int, c: tuple[int, ...] | None) -> None:
    bias = {} if c is None else {"b": random(*c)}
    text = f"""(float[2,5] x) => (y) {{
        p = BatchNormalization(x, g5, h5, m5, v5)
        c = Gemm<transB={transposed}, alpha=0.5, beta=2.0>(p, w{", b" if bias else ""})
        {BN} }}"""
    first = {f"{k}5": v for k, v in batch_norm(5).items()}
    model = parse(text, w=random(4, 5) if transposed else random(5, 4), **bias, **first, **batch_norm(4))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "Gemm"
    assert_same(model, after, (2, 5))


def test_batch_norm_around_matmul() -> None:
    text = "(float[n,5] x) => (y) { p = BatchNormalization(x, g5, h5, m5, v5) c = MatMul(p, w) " + BN + "}"
    model = parse(text, w=random(5, 4), **{f"{k}5": v for k, v in batch_norm(5).items()}, **batch_norm(4))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "MatMul Add"
    assert_same(model, after, (3, 5))


@pytest.mark.parametrize(
    ("op", "attrs", "rest"),
    [
        ("Conv", "", "Relu Conv"),
        ("Conv", '<auto_pad="VALID">', "Relu Conv"),
        ("Conv", "<pads=[1,0,0,0]>", "Relu BatchNormalization Conv"),
        ("Conv", '<auto_pad="SAME_UPPER">', "Relu BatchNormalization Conv"),
        ("ConvTranspose", "", "Relu BatchNormalization ConvTranspose"),
    ],
)
def test_batch_norm_before_conv_needs_no_padding(op: str, attrs: str, rest: str) -> None:
    text = f"""(float[n,4,7,7] x) => (y) {{
        r = Relu(x) p = BatchNormalization(r, g, h, m, v) y = {op}{attrs}(p, w) }}"""
    model = parse(text, w=random(4, 4, 3, 3), **batch_norm(4))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == rest
    assert_same(model, after, (2, 4, 7, 7))


def test_padding_lets_the_scale_of_an_image_through_but_not_its_shift() -> None:
    text = """(float[n,3,7,7] x) => (y) {
        a = Div(x, c255) b = Sub(a, mean) d = Div(b, std) y = Conv<pads=[1,1,1,1]>(d, w) }"""
    model = parse(text, c255=np.float32(255), mean=random(3, 1, 1), std=random(1, 3, 1, 1), w=random(2, 3, 3, 3))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "Div Sub Conv"
    assert_same(model, after, (2, 3, 7, 7))


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("(float[n,4,7,7] x) => (y) {" + "c = Conv(x, w)" + BN + "}", {"v": np.full(6, -1, np.float32)}),
        ("(float[n,4,7,7] x) => (c, y) {" + "c = Conv(x, w)" + BN + "}", {}),
        ("(float[n,4,7,7] x) => (y, z) {" + "c = Conv(x, w)" + BN + "z = Relu(c) }", {}),
        ("(float[n,4,7,7] x, float[6] g) => (y) {" + "c = Conv(x, w)" + BN + "}", {"g": None}),
        ("(float[n,4,7,7] x, float[6,4,1,1] w) => (y) {" + "c = Conv(x, w)" + BN + "}", {"w": None}),
    ],
)
def test_not_folded(text: str, weights: dict[str, np.ndarray | None]) -> None:
    values = {"w": random(6, 4, 1, 1), **batch_norm(6), **weights}
    model = parse(text, **{k: v for k, v in values.items() if v is not None})
    after, (folded,) = apply(model, fold_batch_norm)
    assert ops(after) == ops(model) and folded == []


def test_half_precision_overflow_is_not_folded() -> None:
    text = "(float16[n,4,7,7] x) => (y) { c = Conv(x, w) y = Mul(c, s) }"
    weights = {"w": random(6, 4, 1, 1, dtype=np.float16), "s": np.array(60000, np.float16)}
    assert ops(apply(parse(text, **weights), fold_batch_norm)[0]) == "Conv Mul"
    weights["s"] = np.array(1e-5, np.float16)
    assert ops(apply(parse(text, **weights), fold_batch_norm)[0]) == "Conv Mul"
    weights["s"] = np.array(2, np.float16)
    assert ops(apply(parse(text, **weights), fold_batch_norm)[0]) == "Conv"


def test_a_big_shared_weight_is_not_doubled_a_small_one_is() -> None:
    text = "(float[n,{0},4,4] x) => (y) {{ a = Conv(x, w) b = Mul(a, two) c = Conv(x, w) y = Add(b, c) }}"
    for channels, rest in ((8, "Conv Conv Add"), (256, "Conv Mul Conv Add")):
        model = parse(text.format(channels), w=random(channels, channels, 1, 1), two=np.float32(2))
        after, _ = apply(model, fold_batch_norm)
        assert ops(after) == rest
        assert_same(model, after, (1, channels, 4, 4))


def test_casts_around_batch_norm() -> None:
    text = """(float16[n,4,7,7] x) => (y) {
        c = Conv(x, w) d = Cast<to=1>(c) e = BatchNormalization(d, g, h, m, v) y = Cast<to=10>(e) }"""
    model = parse(text, w=random(6, 4, 1, 1, dtype=np.float16), **batch_norm(6))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "Conv"
    assert_same(model, after, (2, 4, 7, 7), np.float16, 3e-3)
    stays_wide = parse(text.replace("e = Batch", "y = Batch").replace("y = Cast<to=10>(e)", ""), w=random(
        6, 4, 1, 1, dtype=np.float16), **batch_norm(6))  # fmt: skip
    assert ops(apply(stays_wide, fold_batch_norm)[0]) == "Conv Cast BatchNormalization"


def test_training_form_stays() -> None:
    text = """(float[n,4,7,7] x) => (y, a, b) {
        c = Conv(x, w) y, a, b = BatchNormalization<training_mode=1>(c, g, h, m, v) }"""
    model = parse(text, 15, w=random(6, 4, 1, 1), **batch_norm(6))
    assert ops(apply(model, fold_batch_norm)[0]) == "Conv BatchNormalization"


def test_constant_nodes_of_every_form() -> None:
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


@pytest.mark.parametrize("places", [[1, 6], [[0, 1], [1, 2]]], ids=["flattened", "by_axis"])
@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("float", np.float32), ("double", np.float64)])
def test_sparse_weights_are_read(places: list, name: str, dtype: type) -> None:
    text = f"({name}[n,4] x) => (y) {{ t = Transpose<perm=[1,0]>(w) y = MatMul(x, t) }}"
    model = parse(text, w=np.zeros((4, 4), dtype))
    values = numpy_helper.from_array(np.array([3, 5], dtype), "w")
    model.graph.initializer.pop()
    model.graph.sparse_initializer.append(
        onnx.helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places), "places"), [4, 4])
    )
    after, _ = apply(model, fold_constants)
    (stored,) = (numpy_helper.to_array(tensor) for tensor in after.graph.initializer)
    assert stored.dtype == dtype and stored[1, 0] == 3 and stored[2, 1] == 5 and np.count_nonzero(stored) == 2


def test_transposed_weight_with_another_reader_is_not_doubled() -> None:
    text = "(float[n,160] x) => (y) { t = Transpose<perm=[1,0]>(w) a = MatMul(x, t) y = MatMul(a, w) }"
    assert ops(apply(parse(text, w=random(160, 160)), fold_constants)[0]) == "Transpose MatMul MatMul"


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
def test_not_constant(nodes: str) -> None:
    weights = {
        "one": np.ones((1, 1), np.float32), "big": np.array([200, 200]), "q": np.ones(2, np.int8),
        "one0": np.float32(1),
    }  # fmt: skip
    model = parse(f"(float[200,200] x) => (y) {{ {nodes} }}", **weights)
    graph = read_graph(model)
    fold_constants(graph, infer_shapes(graph))
    assert [n.op for n in graph.nodes] == [n.op_type for n in model.graph.node]


def test_big_external_weight_is_not_read(tmp_path: Path) -> None:
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
    stored.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stored)))  # as bytes, which may lie elsewhere
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


def shape_model(target: str, allowzero: int = 0) -> onnx.ModelProto:
    """Reshape of [n,s,8] to entries of its own shape (n, s) and constants."""
    names = ", ".join(e if e in "ns" else f"c{int(e) + 1}" for e in target.split())
    text = f"""(float[N,S,8] x) => (y) {{
        shape = Shape(x) n = Gather<axis=0>(shape, i0) s = Gather<axis=0>(shape, i1)
        t = Concat<axis=0>({names}) y = Reshape<allowzero={allowzero}>(x, t) }}"""
    constants = {f"c{i + 1}": np.array([i]) for i in (-1, 0, 1, 2, 4, 8)}
    return parse(text, i0=np.array([0]), i1=np.array([1]), **constants)


@pytest.mark.parametrize(
    ("target", "allowzero", "known"),
    [
        ("n s 2 4", 0, [0, 0, 2, 4]),
        ("n s 2 4", 1, [0, 0, 2, 4]),
        ("n s -1 4", 0, [0, 0, 2, 4]),
        ("n s -1 4", 1, [0, 0, 2, 4]),
        ("n 2 s 4", 0, [0, 2, -1, 4]),
        ("s n 8", 0, None),
        ("-1 s 8", 0, [-1, 0, 8]),
        ("n -1 s 4", 0, [0, 2, -1, 4]),
    ],
)
def test_reshape_targets(target: str, allowzero: int, known: list[int] | None) -> None:
    model = shape_model(target, allowzero)
    after, _ = apply(model, fold_shapes)
    if known is None:
        assert ops(after) == ops(model)
        return
    assert ops(after) == "Reshape"
    assert value(after, after.graph.node[0].input[1]) == known
    assert_same(model, after, (2, 3, 8))
    if -1 not in known and ("-1" not in target or allowzero):
        assert_same(model, after, (0, 3, 8))


def test_expand_and_slice_targets() -> None:
    text = """(float[N,S,1] x) => (y, z) {
        shape = Shape(x) n = Gather<axis=0>(shape, i0) s = Gather<axis=0>(shape, i1)
        t = Concat<axis=0>(n, s, i4) y = Expand(x, t) z = Slice(x, i1, s, i1) }"""
    model = parse(text, i0=np.array([0]), i1=np.array([1]), i4=np.array([4]))
    after, _ = apply(model, fold_shapes)
    assert ops(after) == "Expand Slice"
    assert_same(model, after, (2, 3, 1))
    near = parse(text.replace("z = Slice(x, i1, s, i1)", "z = Slice(x, i0, n, i1)"), i0=np.array([0]), i1=np.array([1]),
                 i4=np.array([4]))  # fmt: skip
    assert "Gather" in ops(apply(near, fold_shapes)[0])


def feeds_of(entry: dict, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Random inputs as models/exported/index.json describes them."""
    random_state, feeds = np.random.default_rng(0), {}
    for each in entry["inputs"]:
        dims = [evaluate(parse_size(d), sizes) if isinstance(d, str) else d for d in each["dims"]]
        if each.get("prefix_mask"):
            array = np.arange(dims[1])[None] < random_state.integers(1, dims[1] + 1, (dims[0], 1))
        elif "range" in each:
            array = random_state.integers(each["range"][0], each["range"][1] + 1, dims)
        else:
            array = random_state.standard_normal(dims)
        feeds[each["name"]] = array.astype(each["dtype"])
    return feeds


@pytest.mark.parametrize("name", sorted(INDEX))
def test_exported_models(name: str) -> None:
    """Every exported model computes the same at two sizes; no convolution is followed by BatchNormalization."""
    entry, model = INDEX[name], onnx.load(EXPORTED / name)
    steps = (fold_constants, normalize, fold_shapes, fold_constants, fold_batch_norm, normalize)
    after, results = apply(model, *steps)
    assert "BatchNormalization" not in ops(after)
    assert len(after.graph.node) <= len(model.graph.node)
    assert after.ByteSize() < model.ByteSize() * 1.01
    _, more = apply(after, *steps)
    assert not any(more), "a second run must find nothing"
    for sizes in entry["verified_sizes"]:
        feeds = feeds_of(entry, sizes)
        # Weights rounded anew cost what half precision costs anyway, which the index tells.
        tol = max(3e-2, 20 * entry["max_relative_error"]) if entry["dtype"] == "fp16" else 1e-4
        for a, b in zip(run(model, feeds), run(after, feeds), strict=True):
            assert a.shape == b.shape
            assert np.abs(a.astype(float) - b).max() <= (tol if results[4] else tol / 10) * np.abs(a).max()
