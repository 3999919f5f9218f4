"""Shape inference: what it tells of a tensor holds when the model runs, and it knows all tensors of exported models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from exported_models import load_exported, read_index
from onnx import TensorProto
from runtimes import open_on_cpu

from onnxfuse import optimize
from onnxfuse.algebra.size_parser import parse_size
from onnxfuse.algebra.sizes import Size, evaluate, is_known, symbol, symbols
from onnxfuse.analysis.shape_inference import infer_node, infer_shapes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor
from onnxfuse.ir.serde import read_graph, write_model
from onnxfuse.pipeline import PIPELINE

INDEX = read_index()
# A Reshape to [..., -1, 4, 4] divides a padded sequence into chunks, whose number is not known to be whole.
DIVIDED = {"mamba2_dynamo_fp32.onnx"}


def inferred(model: onnx.ModelProto) -> tuple[Graph, ShapeInfo]:
    graph = read_graph(model)
    graph.sort()
    return graph, infer_shapes(graph, strict=True)


def computed(graph: Graph) -> list[Tensor]:
    return [tensor for node in graph.nodes for tensor in node.outputs if tensor.name]


def feeds(inputs: list[dict[str, Any]], sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Return random inputs as the index of the exported models describes them."""
    random = np.random.default_rng(seed)
    result = {}
    for each in inputs:
        shape = [evaluate(parse_size(str(dim)), sizes) for dim in each["dims"]]
        if np.issubdtype(np.dtype(each["dtype"]), np.integer):
            low, high = each["range"]
            array = random.integers(low, high + 1, shape)
            array = np.sort(array, axis=-1)[..., ::-1] if each.get("prefix_mask") else array
        else:
            array = random.normal(size=shape)
        result[each["name"]] = np.ascontiguousarray(array.astype(each["dtype"]))
    return result


def run_everything(model: onnx.ModelProto, names: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return each named tensor as onnxruntime computes it without optimizing the model."""
    open_model = onnx.ModelProto()
    open_model.CopyFrom(model)
    stated = {info.name for info in model.graph.output}
    open_model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in stated)
    return dict(zip(names, open_on_cpu(open_model, optimize=False).run(names, inputs), strict=True))


def check(shapes: ShapeInfo, tensor: Tensor, real: np.ndarray, sizes: dict[str, int]) -> None:
    """Assert that what is known of a tensor holds for its value; an unknown symbol takes the first size that it has."""
    shape = shapes.shape(tensor)
    if shape is not None:
        assert len(shape) == real.ndim, tensor.name
        for size, actual in zip(shape, real.shape, strict=True):
            if size == symbol(str(size)) and str(size) not in sizes and not is_known(size):
                sizes[str(size)] = actual
            assert evaluate(size, sizes) == actual, f"{tensor.name}: {shape} is {real.shape}"
    assert shapes.dtype(tensor) in (0, onnx.helper.np_dtype_to_tensor_dtype(real.dtype)), tensor.name
    value = shapes.value(tensor)
    if value is not None:
        assert value.shape == real.shape, tensor.name
        found = [evaluate(element, sizes) for element in value.reshape(-1)]
        assert found == real.reshape(-1).tolist(), f"{tensor.name}: {value}"


@pytest.mark.parametrize("name", sorted(INDEX))
def test_exported_model_runs_as_inferred(name: str) -> None:
    model = load_exported(name)
    graph, shapes = inferred(model)
    names = [tensor.name for tensor in computed(graph)]
    for seed, sizes in enumerate(INDEX[name]["verified_sizes"]):
        inputs = feeds(INDEX[name]["inputs"], sizes, seed)
        real = run_everything(model, names, inputs)
        bound = dict(sizes)
        for tensor in computed(graph):
            check(shapes, tensor, real[tensor.name], bound)


@pytest.mark.parametrize("name", sorted({*INDEX} - DIVIDED))
def test_exported_model_keeps_no_unknown_tensor(name: str) -> None:
    """Every dimension is a number or follows from the sizes of the graph inputs."""
    graph, shapes = inferred(load_exported(name))
    given = {name for tensor in graph.linked.inputs for size in shapes.shape(tensor) or () for name in symbols(size)}
    for tensor in computed(graph):
        shape = shapes.shape(tensor)
        assert shape is not None and shapes.dtype(tensor), tensor.name
        assert given.issuperset(name for size in shape for name in symbols(size)), f"{tensor.name}: {shape}"


def parsed(inputs: str, body: str, opset: int = 17, constants: str = "") -> tuple[Graph, ShapeInfo]:
    """Return a graph in ONNX text whose output is `y`, and what is inferred of it."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g ({inputs}) => (y) {f"<{constants}>" if constants else ""} {{ {body} }}"""
    return inferred(onnx.parser.parse_model(text))


def named(graph: Graph, name: str) -> Tensor:
    return graph.linked.tensors()[name]


def shown(shape: tuple[Size, ...] | None) -> str:
    return "unknown" if shape is None else " ".join("?" if not is_known(size) else str(size) for size in shape)


X3, X4 = "float[batch,seq,64] x", "float[batch,3,h,w] x"

SHAPES = [
    # elementwise and broadcasting
    (17, "float[batch,1,seq] x, float[heads,1] z", "y = Add(x, z)", "batch heads seq"),
    (17, "float[a] x, float[b] z", "y = Add(x, z)", "?"),
    (17, "float[a] x, float[8] z", "y = Add(x, z)", "8"),
    (17, "float[a] x, float[b] z", "u = Concat <axis = 0> (x, x) y = Add(u, z)", "2*a"),  # which is never 1
    (17, "float[a] x, float[b] z", "u = Concat <axis = 0> (x, x, x) y = Add(z, u)", "3*a"),
    (17, f"{X3}, float[64] z", "c = Less(x, z) y = Where(c, x, z)", "batch seq 64"),
    (6, f"{X3}, float[seq] z", "y = Add <broadcast = 1, axis = 1> (x, z)", "batch seq 64"),
    (17, "float[1024,64] x, int64[batch,seq] z",
     "l = Shape <start = 1> (z) zero = Constant <value = int64[1] {0}> () s = Slice(x, zero, l) e = Gather(s, z) "
     "u = Slice(x, zero, l) y = Add(e, u)", "batch seq 64"),
    # shape arithmetic into Reshape and Expand
    (17, X3, "s = Shape(x) i = Constant <value_int = 1> () d = Gather(s, i) o = Constant <value_ints = [-1]> () "
             "q = Unsqueeze(d, a0) k = Constant <value_ints = [4, 16]> () t = Concat <axis = 0> (o, q, k) "
             "y = Reshape(x, t)", "batch seq 4 16"),
    (17, X3, "t = Constant <value_ints = [0, -1]> () y = Reshape(x, t)", "batch 64*seq"),
    (17, X3, "t = Constant <value_ints = [0, 0, 4, -1]> () y = Reshape(x, t)", "batch seq 4 16"),
    (17, X3, "t = Constant <value_ints = [-1, 3]> () y = Reshape(x, t)", "? 3"),
    (17, f"{X3}, int64[2] t", "y = Reshape(x, t)", "? ?"),
    (17, f"{X3}, int64[n] t", "y = Reshape(x, t)", "unknown"),
    (14, "float[0,5] x", "t = Constant <value_ints = [7, 0]> () y = Reshape <allowzero = 1> (x, t)", "7 0"),
    (17, "float[batch,past_seq,8] x, float[batch,seq,8] z",
     "c = Concat <axis = 1> (x, z) f = Flatten <axis = 2> (c) s = Shape(c) t = Slice(s, a0, a2) "
     "m = Constant <value_ints = [-1]> () r = Concat <axis = 0> (t, m) y = Reshape(f, r)",
     "batch past_seq + seq 8"),
    (17, "float[1,1,seq] x, int64[batch] z", "b = Shape(z) one = Constant <value_ints = [1]> () "
     "m = Constant <value_ints = [-1]> () t = Concat <axis = 0> (b, one, m) e = Equal(t, m) "
     "o = ConstantOfShape <value = int64[1] {1}> (a3) w = Where(e, o, t) y = Expand(x, w)", "batch 1 seq"),
    # Slice, with attributes and with inputs
    (9, X3, "y = Slice <axes = [1], starts = [0], ends = [9223372036854775807]> (x)", "batch seq 64"),
    (9, X3, "y = Slice <axes = [1, 2], starts = [1, -8], ends = [2147483647, 64]> (x)", "batch seq - 1 8"),
    (17, X3, "m = Constant <value_ints = [-1]> () e = Constant <value_ints = [9223372036854775807]> () "
             "y = Slice(x, m, e, a1)", "batch Min(1, seq) 64"),  # nothing where seq is 0
    (17, X3, "z = Constant <value_ints = [0]> () e = Constant <value_ints = [1]> () y = Slice(x, z, e, z)",
     "Min(1, batch) seq 64"),
    (17, "float[batch,8,64] x", "m = Constant <value_ints = [-1]> () e = Constant <value_ints = [2147483647]> () "
                                "y = Slice(x, m, e, a1)", "batch 1 64"),
    (17, X3, "m = Constant <value_ints = [-1]> () y = Slice(x, a0, m, a1)", "batch seq - 1 64"),
    (17, X3, "t = Constant <value_ints = [32]> () y = Slice(x, a0, t, a1)", "batch Min(32, seq) 64"),
    (17, X3, "m = Constant <value_ints = [-1]> () e = Constant <value_ints = [-9223372036854775808]> () "
             "y = Slice(x, m, e, a1, m)", "batch seq 64"),
    (17, "float[3,n] x", "m = Constant <value_ints = [-1]> () e = Constant <value_ints = [-9]> () "
                          "y = Slice(x, e, e, a0, m)", "1 n"),
    (17, X3, "e = Constant <value_ints = [9223372036854775807]> () y = Slice(x, a0, e, a1, a2)",
     "batch (seq + 1)//2 64"),
    (17, f"{X3}, int64[1] z", "y = Slice(x, a0, z, a1)", "batch ? 64"),
    # Split, Squeeze, Unsqueeze and Reduce, with an attribute and with an input
    (11, X3, "y, z = Split <axis = 2, split = [16, 48]> (x)", "batch seq 16"),
    (13, X3, "t = Constant <value_ints = [16, 48]> () y, z = Split <axis = 2> (x, t)", "batch seq 16"),
    (17, X3, "y, z = Split <axis = -1> (x)", "batch seq 32"),
    (18, "float[batch,7] x", "z, y = Split <axis = 1, num_outputs = 2> (x)", "batch 3"),
    (11, "float[batch,1,seq,1] x", "y = Squeeze <axes = [1, -1]> (x)", "batch seq"),
    (13, "float[batch,1,seq] x", "y = Squeeze(x, a1)", "batch seq"),
    (13, "float[2,1,3] x", "y = Squeeze(x)", "2 3"),
    (13, "float[2,s,3] x", "y = Squeeze(x)", "unknown"),
    (11, X3, "y = Unsqueeze <axes = [0, -1]> (x)", "1 batch seq 64 1"),
    (13, X3, "y = Unsqueeze(x, a1)", "batch 1 seq 64"),
    (17, X3, "y = ReduceMean <axes = [-1]> (x)", "batch seq 1"),
    (18, X3, "y = ReduceMean <keepdims = 0> (x, a1)", "batch 64"),
    (18, X3, "y = ReduceMean <noop_with_empty_axes = 1> (x)", "batch seq 64"),
    (17, X3, "y = ReduceMean <keepdims = 0> (x)", ""),
    (17, X3, "y = ArgMax <axis = -1, keepdims = 0> (x)", "batch seq"),
    (9, X3, "y, i = TopK <k = 5> (x)", "batch seq 5"),
    (17, X3, "k = Constant <value_ints = [5]> () y, i = TopK <axis = 1> (x, k)", "batch 5 64"),
    # a flag that is neither 0 nor 1 is 0 in onnxruntime
    (17, X3, "y = ReduceMean <axes = [1], keepdims = 2> (x)", "batch 64"),
    (17, X3, "y = ArgMax <axis = -1, keepdims = -1> (x)", "batch seq"),
    (18, X3, "y = ReduceMean <noop_with_empty_axes = 2> (x)", "1 1 1"),
    (17, X3, "t = Constant <value_ints = [0, 0, 64]> () y = Reshape <allowzero = 2> (x, t)", "batch seq 64"),
    # the target copies the size of an axis that does not exist, in a node that no run may reach
    (17, "float x", "t = Constant <value_ints = [0]> () y = Reshape(x, t)", "unknown"),
    # products
    (17, "float[batch,heads,seq,16] x, float[batch,heads,16,keys] z", "y = MatMul(x, z)", "batch heads seq keys"),
    (17, "float[seq,16] x, float[16] z", "y = MatMul(x, z)", "seq"),
    (17, "float[16] x, float[batch,16,8] z", "y = MatMul(x, z)", "batch 8"),
    (17, "float[16,n] x, float[8,16] z", "y = Gemm <transA = 1, transB = 1> (x, z)", "n 8"),
    (17, "float[16,n] x, float[8,16] z", "y = Gemm <transA = 3, transB = 2> (x, z)", "n 8"),
    (17, "float[b,i,d] x, float[b,j,d] z", 'y = Einsum <equation = "bid,bjd->bij"> (x, z)', "b i j"),
    # views, gathers and fills
    (17, X3, "y = Transpose(x)", "64 seq batch"),
    (17, X3, "y = Transpose <perm = [0, 2, 1]> (x)", "batch 64 seq"),
    (17, X3, "y = Flatten(x)", "batch 64*seq"),
    (17, X3, "y = Flatten <axis = -1> (x)", "batch*seq 64"),
    (17, "float[batch,seq,64] x, int64[n,2] z", "y = GatherND(x, z)", "n 64"),
    (17, X3, "r = Constant <value_ints = [1, 2, 3]> () y = Tile(x, r)", "batch 2*seq 192"),
    (17, X3, "i = Constant <value_ints = [-1]> () d = Constant <value_int = 3> () n = Constant <value_ints = [1, 4]> ()"
             "h = OneHot(i, d, n) r = Reshape(h, i) y = Tile(x, r)", "batch seq 256"),
    (17, X4, "p = Constant <value_ints = [0, 0, 1, 1, 0, 0, 1, 2]> () y = Pad(x, p)", "batch 3 h + 2 w + 3"),
    (9, X4, "y = Pad <pads = [0, 0, 1, 1, 0, 0, 1, 2]> (x)", "batch 3 h + 2 w + 3"),
    (17, X3, "s = Shape(x) i = Constant <value_int = 1> () d = Gather(s, i) z = Constant <value_int = 0> () "
             "y = Range(z, d, i)", "seq"),
    # sizes that are not int64
    (17, X3, "r = Constant <value_ints = [1, 2, 1152921504606846976]> () y = Tile(x, r)", "batch 2*seq ?"),
    (17, X3, "a = Constant <value_int = -9223372036854775808> () b = Constant <value_int = 1> () "
             "y = Range(a, b, b)", "?"),
    (17, X3, "s = Shape(x) o = ConstantOfShape <value = int64[1] {1}> (s) y = NonZero(o)", "3 64*batch*seq"),
    (17, X3, "y = NonZero(x)", "3 ?"),
    # targets of as many elements as no shape has: an axis for each would fill the memory
    *[(opset, "float[1] x, int64[1000000000] z", f"y = {op}", "unknown") for opset in (9, 12, 13, 21)
      for op in ("ConstantOfShape(z)", "Expand(x, z)", "Reshape(x, z)")],
    *[(opset, "float[1] x, int64[1000000000] z", "y = Tile(x, z)", "?") for opset in (9, 13)],
    (17, "int64[n] x", "d = Constant <value_ints = [10]> () v = Constant <value_floats = [0.0, 1.0]> () "
     "y = OneHot(x, d, v)", "n 10"),
    # images
    (17, f"{X4}, float[8,3,3,3] z", "y = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, z)",
     "batch 8 (h + 1)//2 (w + 1)//2"),
    (17, f"{X4}, float[8,3,3,3] z", 'y = Conv <auto_pad = "SAME_UPPER"> (x, z)', "batch 8 h w"),
    (17, f"{X4}, float[3,4,2,2] z", "y = ConvTranspose <strides = [2, 2], group = 2> (x, z)", "batch 8 2*h 2*w"),
    (17, f"{X4}, float[3,4,2,3] z", 'y = ConvTranspose <strides = [3, 3], auto_pad = "SAME_UPPER"> (x, z)',
     "batch 4 3*h - 1 3*w"),
    (17, X4, "y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)", "batch 3 h//2 w//2"),
    (17, f"{X4}, int64[2] z", "t = Concat <axis = 0> (a0, a1, z, a0, a1, z) y = Pad(x, t)", "batch 5 ? ?"),
    (17, f"{X4}, int64[2] z", "s = Shape <end = 2> (x) t = Concat <axis = 0> (s, z) y = Resize(x, , , t)",
     "batch 3 ? ?"),
    (18, f"{X4}, int64[1] z", "t = Concat <axis = 0> (z, a3) y = Resize <axes = [3, 2]> (x, , , t)", "batch 3 3 ?"),
    (17, "float[1,1,5,5] x", "y = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (x)", "1 1 3 3"),
    (17, "float[1,1,2,2] x", "y = MaxPool <kernel_shape = [3, 3], strides = [3, 1]> (x)", "1 1 1 0"),
    (17, X4, "y = GlobalAveragePool(x)", "batch 3 1 1"),
    (9, X4, "s = Constant <value = float[4] {1.0, 1.0, 2.0, 0.5}> () y = Upsample(x, s)", "batch 3 2*h w//2"),
    (7, X4, "y = Upsample <scales = [1.0, 1.0, 2.0, 0.5]> (x)", "batch 3 2*h w//2"),
    (8, X4, "y = Upsample <scales = [1.0, 1.0, 2.0, 0.5]> (x)", "batch 3 2*h w//2"),
    (17, "float[batch,8,h,w] x", "y = DepthToSpace <blocksize = 2> (x)", "batch 2 2*h 2*w"),
    # normalizations, attention, and one operator left to onnx
    (17, f"{X3}, float[64] z", "y, m = LayerNormalization(x, z)", "batch seq 64"),
    (17, f"{X3}, float[64] z", "q, y = LayerNormalization(x, z)", "batch seq 1"),
    (12, f"{X3}, float[64] z", "y = LayerNormalization(x, z)", "batch seq 64"),  # onnxruntime has it at any opset
    (12, f"{X3}, float[64] z", "y = SimplifiedLayerNormalization(x, z)", "batch seq 64"),
    (12, f"{X3}, float[64] z", "y = SkipLayerNormalization(x, x, z)", "batch seq 64"),
    (23, "float[b,s,32] x, float[b,t,16] k, float[b,t,24] v",
     "y = Attention <q_num_heads = 4, kv_num_heads = 2> (x, k, v)", "b s 48"),
    (23, "float[b,4,s,8] x, float[b,2,t,8] k, float[b,2,t,8] v, float[b,2,p,8] pk, float[b,2,p,8] pv",
     "q, y, w = Attention(x, k, v, , pk, pv)", "b 2 p + t 8"),
    (17, f"{X3}, float[64] z", "y = com.microsoft.BiasGelu(x, z)", "batch seq 64"),
    (17, f"{X3}, float[64] z", "y = com.microsoft.BiasSplitGelu(x, z)", "batch seq 32"),
    (17, f"{X3}, float[64,8] z", "y = com.microsoft.GemmFastGelu(x, z)", "batch seq 8"),
    (17, "float[2,3,n,8] x, float[3,n,2,4] z", "y = com.microsoft.FusedMatMul <transBatchA = 1, transA = 1> (x, z)",
     "3 n 8 4"),
    (17, "float[n,8,9,4] x, float[5,3,3,4] z", "y = com.microsoft.NhwcConv <strides = [2, 2]> (x, z)", "n 3 4 5"),
    (17, "float[n,8,9,4] x, float[5,4,3,3] z", "y = com.microsoft.NhwcFusedConv(x, z)", "n 6 7 5"),
    (17, "int32[n,6] x, float[9,8] z", "y = com.microsoft.EmbedLayerNormalization(x, , z, z)", "n 6 8"),
    (21, "int64[b,s] i, uint8[9,16] x, float[9,2] z",
     "y = com.microsoft.GatherBlockQuantized <gather_axis = 0, quantize_axis = 1, block_size = 16> (x, i, z)",
     "b s 32"),
    (21, "int64[b,s] i, uint8[9,16] x, float[9,1] z",
     "y = com.microsoft.GatherBlockQuantized <quantize_axis = -1, block_size = 16, bits = 8> (x, i, z)", "b s 16"),
    (21, "int64[b] i, int4[9,6,32] x, float[9,6,2] z",
     "y = com.microsoft.GatherBlockQuantized <gather_axis = 1, quantize_axis = 2, block_size = 16> (x, i, z)",
     "9 b 32"),
    (21, "float[b,s,64] x, uint8[8,2,16] w, float[8,2] z",
     "y = com.microsoft.MatMulNBits <K = 64, N = 8, block_size = 32> (x, w, z)", "b s 8"),
    (17, "uint8[n,3,8,9] x, int8[5,3,3,3] w, float z, uint8 u, int8 v",
     "y = QLinearConv <strides = [2, 2]> (x, z, u, w, z, v, z, u)", "n 5 3 4"),
    (17, "int8[b,s,8] x, int8[8,6] w, float z, int8 v", "y = QLinearMatMul(x, z, v, w, z, v, z, v)", "b s 6"),
    (17, "int8[b,8] x, int8[6,8] w, float z, int8 v", "y = com.microsoft.QGemm <transB = 1> (x, z, v, w, z, v)", "b 6"),
    (17, "uint8[b,1,8] x, uint8[s,8] w, float z", "y = com.microsoft.QLinearAdd(x, z, , w, z, , z)", "b s 8"),
    (17, "uint8[b,8] x, uint8[8] w, float z", "y = com.microsoft.QLinearMul(x, z, , w, z, , z)", "b 8"),
    (17, "bool[b,1] i, uint8[8] x, uint8 w, float z, uint8 u",
     "y = com.microsoft.QLinearWhere(i, x, z, u, w, z, u, z, u)", "b 8"),
    (17, "uint8[b,8] x, float z, uint8 u", "y = com.microsoft.QLinearSoftmax <axis = -1, opset = 17> (x, z, , z, u)",
     "b 8"),
    (17, "uint8[b,8] x, uint8[b,6] w, float z, uint8 u",
     "y = com.microsoft.QLinearConcat <axis = 1> (z, u, x, z, u, w, z, u)", "b 14"),
    (17, "uint8[n,4,6,7] x, float z", "y = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2]> (x, z, , z)",
     "n 4 5 6"),
    (17, "uint8[n,6,7,4] x, float z",
     "y = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2], channels_last = 1> (x, z, , z)", "n 5 6 4"),
    (17, "uint8[n,4,6,7] x, float z, uint8 u", "y = com.microsoft.QLinearGlobalAveragePool(x, z, u, z, u)", "n 4 1 1"),
    (17, "uint8[n,6,7,4] x, float z, uint8 u",
     "y = com.microsoft.QLinearGlobalAveragePool <channels_last = 1> (x, z, u, z, u)", "n 1 1 4"),
    (21, "float[b,s,64] x, uint8[256] w, float[8] z",
     "y = com.microsoft.MatMulBnb4 <K = 64, N = 8, block_size = 64> (x, w, z)", "b s 8"),
    (21, "float[b,s,64] x, float[64,4] r, uint8[4,8,8] w",
     "y = com.microsoft.QMoE <expert_weight_bits = 4, k = 2> (x, r, w)", "b s 64"),
    (21, "float16[b,s,128] x, float16[b,2,p,16] k, float16[b,2,p,16] v, int32[b] n, int32 t",
     "y = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, , , k, v, n, t)", "b s 64"),
    (21, "float16[b,s,128] x, float16[b,h,p,d] k, float16[b,h,p,d] v, int32[b] n, int32 t",
     "o = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, , , k, v, n, t) y = Neg(v)",
     "b 2 p 16"),
    (21, "float16[b,s,128] x, uint8[b,h,p,d] k, uint8[b,h,p,d] v, int32[b] n, int32 t",
     "o = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, kv_cache_bit_width = 4> "
     "(x, , , k, v, n, t) y = Identity(v)", "b h p d"),
    (21, "int4[n,32] x, float16[n,2] z", "y = DequantizeLinear <axis = -1, block_size = 16> (x, z)", "n 32"),
    (27, "float[b,t,8] q, float[b,t,4] k, float[b,t,6] v",
     'y, s = LinearAttention <q_num_heads = 4, kv_num_heads = 2, update_rule = "linear"> (q, k, v)', "b t 12"),
    (21, "float[b,t,4] q, float[b,t,4] k, float[b,t,12] v",
     'o, s = com.microsoft.LinearAttention <q_num_heads = 2, kv_num_heads = 4, update_rule = "linear"> (q, k, v) '
     "y = Neg(s)", "b 4 2 3"),
    (27, "float[b,6,t] x, float[6,1,4] w", "o, y = CausalConvWithState (x, w)", "b 6 3"),
    (21, "float[b,6,t] x, float[6,1,4] w", "y, s = com.microsoft.CausalConvWithState (x, w)", "b 6 t"),
    (17, "float[seq,batch,8] x, float[1,16,8] w, float[1,16,4] r", "y = LSTM <hidden_size = 4> (x, w, r)",
     "seq 1 batch 4"),
    (17, "float[seq,batch,8] x, uint8[2,8,16] w, uint8[2,4,16] r, float[2] ws, uint8[2] wz, float[2] rs, uint8[2] rz",
     'y = com.microsoft.DynamicQuantizeLSTM <direction = "bidirectional", hidden_size = 4> '
     "(x, w, r, , , , , , ws, wz, rs, rz)", "seq 2 batch 4"),
]  # fmt: skip
AXES = "int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, int64[1] a3 = {3}"
LIMITS = "float low = {-1e9}, float high = {1e9}, float half = {0.5}"


@pytest.mark.parametrize(("opset", "inputs", "body", "expected"), SHAPES)
def test_shape_of(opset: int, inputs: str, body: str, expected: str) -> None:
    graph, shapes = parsed(inputs, body, opset, AXES)
    assert shown(shapes.shape(named(graph, "y"))) == expected


SEQ = "s = Shape(x) i = Constant <value_int = 1> () d = Gather(s, i) two = Constant <value_int = 2> () "
NUMBERS = "zero = Constant <value_int = 0> () m = Constant <value_int = -1> () "
LIMIT = "f = Cast <to = 1> (d) "

VALUES = [
    (17, X3, "y = Shape(x)", "[batch, seq, 64]"),
    (17, X3, "y = Shape <start = -2, end = -1> (x)", "[seq]"),
    (17, X3, "y = Size(x)", "64*batch*seq"),
    (17, X3, SEQ + "y = Mul(d, two)", "2*seq"),
    (17, X3, SEQ + "e = Mul(d, two) y = Div(e, two)", "seq"),
    (17, X3, SEQ + "y = Div(d, two)", "seq//2"),
    (17, X3, SEQ + "y = Mod(d, two)", "seq%2"),
    (17, X3, SEQ + "n = Neg(d) y = Div(n, two)", "unknown"),
    (17, X3, SEQ + "n = Neg(d) y = Abs(n)", "seq"),
    (17, X3, SEQ + "y = Max(d, two)", "Max(2, seq)"),
    (17, X3, SEQ + NUMBERS + "y = Max(d, zero)", "seq"),
    (17, X3, SEQ + NUMBERS + "y = Equal(d, m)", "False"),
    (17, X3, SEQ + "y = Equal(d, d)", "True"),
    (17, X3, SEQ + "y = Equal(d, two)", "unknown"),
    (17, X3, SEQ + NUMBERS + "y = Less(d, zero)", "False"),
    (17, X3, SEQ + NUMBERS + "l = Greater(d, m) n = Not(l) y = Or(l, n)", "True"),
    (17, X3, SEQ + "f = Cast <to = 1> (d) t = Constant <value_float = 2.0> () g = Mul(f, t) h = Floor(g) "
                   "y = Cast <to = 7> (h)", "2*seq"),
    (17, X3, SEQ + "f = Cast <to = 1> (d) t = Constant <value_float = 0.5> () g = Mul(f, t) y = Cast <to = 7> (g)",
     "unknown"),
    (17, X3, SEQ + LIMIT + "g = Max(f, low) y = Cast <to = 7> (g)", "seq"),
    (17, X3, SEQ + LIMIT + "g = Min(f, high) y = Cast <to = 7> (g)", "Min(1000000000, seq)"),
    (17, X3, SEQ + LIMIT + "g = Max(f, half) y = Cast <to = 7> (g)", "unknown"),
    (17, X3, SEQ + NUMBERS + "e = Equal(d, two) l = Less(d, zero) y = And(e, l)", "False"),
    (17, X3, SEQ + NUMBERS + "e = Equal(d, two) l = Greater(d, m) y = Or(e, l)", "True"),
    (17, X3, SEQ + NUMBERS + "e = Equal(d, two) l = Greater(d, m) y = And(e, l)", "unknown"),
    (17, X3, "s = Shape(x) y = ReduceProd <keepdims = 0> (s)", "64*batch*seq"),
    (13, X3, "s = Shape(x) y = ReduceSum(s)", "[batch + seq + 64]"),
    (13, X3, "s = Shape(x) y = ReduceSum <keepdims = 2> (s)", "batch + seq + 64"),
    (17, X3, "s = Shape(x) t = Constant <value_ints = [0]> () y = Reshape <allowzero = 2> (s, t)",
     "[batch, seq, 64]"),
    (18, X3, "s = Shape(x) y, z = Split <num_outputs = 2> (s)", "[batch, seq]"),
    (11, X3, "s = Shape(x) z, y = Split <split = [1, 2]> (s)", "[seq, 64]"),
    (17, X3, "s = Shape(x) m = Constant <value_ints = [-1]> () e = Constant <value_ints = [-100]> () "
             "y = Slice(s, m, e, a0, m)", "[64, seq, batch]"),
    (17, X3, "s = Shape(x) m = Constant <value_ints = [-1]> () e = Constant <value_ints = [-100]> () "
             "y = Slice(s, e, e, a0, m)", "[batch]"),
    (9, X3, "s = Shape(x) u = Slice <starts = [1], ends = [2]> (s) y = Squeeze <axes = [0]> (u)", "seq"),
    (17, X3, "t = Constant <value_ints = [3]> () y = ConstantOfShape(t)", "not an integer"),
    (17, X3, "s = Shape(x) t = Constant <value_ints = [-1, 1]> () r = Reshape(s, t) y = Transpose(r)",
     "[batch, seq, 64]"),
    (17, X3, "a = Constant <value_int = 3> () b = Constant <value_int = 0> () d = Constant <value_int = -1> () "
             "y = Range(a, b, d)", "[3, 2, 1]"),
    (17, X3, "a = Constant <value_int = 65> () b = Constant <value_int = 0> () d = Constant <value_int = 1> () "
             "y = Range(b, a, d)", "unknown"),
    (17, "int64[3] x", "y = Add(x, x)", "unknown"),
    # values that their dtype cannot hold
    (17, X3, "a = Constant <value_int = 4294967296> () y = Cast <to = 6> (a)", "unknown"),
    (17, X3, "a = Constant <value_int = 4294967296> () y = Mul(a, a)", "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("opset", "inputs", "body", "expected"), VALUES)
def test_value_of(opset: int, inputs: str, body: str, expected: str) -> None:
    graph, shapes = parsed(inputs, body, opset, f"{AXES}, {LIMITS}")
    tensor = named(graph, "y")
    value = shapes.value(tensor)
    if expected == "not an integer":
        assert value is None and shapes.dtype(tensor) == TensorProto.FLOAT
        return
    text = "unknown" if value is None else ", ".join(map(str, value.reshape(-1)))
    assert (f"[{text}]" if value is not None and value.ndim else text) == expected


DTYPES = [
    (17, "float16[n] x", "y = Cast <to = 1> (x)", TensorProto.FLOAT),
    (17, "float16[n] x", "y = Equal(x, x)", TensorProto.BOOL),
    (17, "float16[n] x", "y = Shape(x)", TensorProto.INT64),
    (17, "float16[n] x, int32[n] z", "c = Equal(z, z) y = Where(c, x, x)", TensorProto.FLOAT16),
    (17, "bfloat16[n] x", "y = Relu(x)", TensorProto.BFLOAT16),
    (17, "float[n] x", "y, s, z = DynamicQuantizeLinear(x)", TensorProto.UINT8),
    (17, "float16[n] x", "y = com.microsoft.FastGelu(x)", TensorProto.FLOAT16),
    (17, "float16[n] x", "v, y = TopK(x, a1)", TensorProto.INT64),
    (17, "int64[2] x", "y = ConstantOfShape(x)", TensorProto.FLOAT),
    (12, "float16[n,4] x, float16[4] z", "y = LayerNormalization(x, z)", TensorProto.FLOAT16),
    (12, "float16[n,4] x, float16[4] z", "y = SimplifiedLayerNormalization(x, z)", TensorProto.FLOAT16),
    (17, "uint8[n] x, float16 z", "y = com.microsoft.DequantizeLinear(x, z)", TensorProto.FLOAT16),
    (17, "float16[n,4] x, float16[4] z", "s, , , y = com.microsoft.SkipLayerNormalization(x, x, z)",
     TensorProto.FLOAT16),
    (17, "int32[n,4] x, float16[9,4] z", "y = com.microsoft.EmbedLayerNormalization(x, , z, z)", TensorProto.FLOAT16),
    (17, "float[n] x, float z, int8 d", "y = com.microsoft.QuantizeLinear(x, z, d)", TensorProto.INT8),
    (21, "int64[b] i, uint8[9,16] x, float16[9,2] z", "y = com.microsoft.GatherBlockQuantized(x, i, z)",
     TensorProto.FLOAT16),
    (21, "int4[n,32] x, float16[n,2] z", "y = DequantizeLinear <axis = 1, block_size = 16> (x, z)",
     TensorProto.FLOAT16),
    (21, "float16[b,s,128] x, int8[b,2,p,16] k, int8[b,2,p,16] v, int32[b] n, int32 t",
     "o, y = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (x, , , k, v, n, t)",
     TensorProto.INT8),
    (27, "float16[b,t,4] q, float[b,2,2,2] p",
     'o, y = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (q, q, q, p)',
     TensorProto.FLOAT),
    (27, "float16[b,t,4] q",
     'o, y = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (q, q, q)',
     TensorProto.FLOAT16),
    (21, "bfloat16[b,6,t] x, bfloat16[6,1,4] w", "o, y = com.microsoft.CausalConvWithState (x, w)",
     TensorProto.BFLOAT16),
    (17, "uint8[n,4] x, uint8[4,4] w, float z", "y = com.microsoft.MatMulIntegerToFloat(x, w, z, z)",
     TensorProto.FLOAT),
    (17, "uint8[n,4] x, uint8[4] w, float z", "y = com.microsoft.QLinearAdd(x, z, , w, z, , z)", TensorProto.UINT8),
    (17, "uint8[n,8] x, int8[8,6] w, float z, uint8 u, int8 v", "y = com.microsoft.QGemm(x, z, u, w, z, v, , z, v)",
     TensorProto.INT8),
    (17, "uint8[n,8] x, int8[8,6] w, float z, uint8 u, int8 v", "y = com.microsoft.QGemm(x, z, u, w, z, v)",
     TensorProto.FLOAT),
    (17, "int8[n,8] x, float z, int8 u", "y = com.microsoft.QLinearConcat <axis = 1> (z, u, x, z, u)",
     TensorProto.INT8),
    (17, "bool i, int8[n,8] x, float z, int8 u", "y = com.microsoft.QLinearWhere(i, x, z, u, x, z, u, z, u)",
     TensorProto.INT8),
]  # fmt: skip


@pytest.mark.parametrize(("opset", "inputs", "body", "expected"), DTYPES)
def test_dtype_of(opset: int, inputs: str, body: str, expected: int) -> None:
    graph, shapes = parsed(inputs, body, opset, AXES)
    assert shapes.dtype(named(graph, "y")) == expected


def test_a_symbol_that_onnx_invents_differs_from_a_user_s_of_the_same_name() -> None:
    """onnx calls an unknown dimension unk__0; so may a user."""
    graph, shapes = parsed("float[unk__0,unk__1] x", "z = NonZero(x) y = Transpose(z)")
    assert shown(shapes.shape(named(graph, "x"))) == "unk__0 unk__1"
    assert shown(shapes.shape(named(graph, "y"))) == "? 2"


@pytest.mark.parametrize(
    ("body", "is_same"),
    [
        ("y = Add(u, x)", True),  # x is 1, or what x and z broadcast to
        ("v = Add(z, u) y = Add(x, v)", True),
        ("y = Add(z, x)", True),
        ("y = Add(u, w)", False),
    ],
)
def test_sizes_that_broadcast_again(body: str, is_same: bool) -> None:
    graph, shapes = parsed("float[a] x, float[b] z, float[c] w", f"u = Add(x, z) {body}")
    assert (shapes.shape(named(graph, "y")) == shapes.shape(named(graph, "u"))) is is_same


def test_a_product_makes_sizes_equal() -> None:
    """Both operands have more than one matrix, so as many; x and z then broadcast to the size of x."""
    graph, shapes = parsed(
        "float[a,3,3] x, float[b,3,3] z",
        "u = Add(x, z) p = Concat <axis = 0> (u, u) q = Concat <axis = 0> (x, x) y = MatMul(p, q)",
    )
    assert shown(shapes.shape(named(graph, "u"))) == "a 3 3"
    a, b = (size for name in "xz" for size in (shapes.shape(named(graph, name)) or ())[:1])
    assert shapes.is_part(b, a)
    assert not shapes.is_part(a, b)


@pytest.mark.parametrize("text", ["-1", "0", "1", "?", "None"])
def test_a_dim_param_that_is_a_number_names_no_size(text: str) -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (y) { y = Relu(x) }')
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
    graph, shapes = inferred(model)
    assert shown(shapes.shape(named(graph, "y"))) == "? 4"


@pytest.mark.parametrize(("ir_version", "expected"), [(3, "2*n 3"), (4, "? ?")])
def test_a_default_that_a_caller_may_override_is_not_a_known_value(ir_version: int, expected: str) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["" : 17]> g (float[n,6] x, int64[2] target) => (y) '
        "<int64[2] target = {-1, 3}> { y = Reshape(x, target) }"
    )
    graph, shapes = inferred(model)
    assert shown(shapes.shape(named(graph, "y"))) == expected


def test_unknown_dimensions_equal_only_themselves() -> None:
    graph, shapes = parsed("float[?,4] x, float[?,4] z", "a = Relu(x) b = Relu(z) y = Add(a, b)")
    x, z, a, b, y = (shapes.shape(named(graph, name)) for name in "xzaby")
    assert x and z and y and x == a and z == b and x != z
    assert y[0] not in (x[0], z[0])
    infer_node(shapes, named(graph, "y").inputs[0])
    assert shapes.shape(named(graph, "y")) == y, "inferring again gives the same symbols"


def test_a_node_that_a_pass_adds_is_inferred_by_itself() -> None:
    graph, shapes = parsed("float[batch,64] x", "y = Relu(x)")
    product = graph.variable("product")
    node = graph.add_node("MatMul", [named(graph, "x"), graph.constant("w", np.ones((64, 8), np.float32))], [product])
    infer_node(shapes, node)
    assert shown(shapes.shape(product)) == "batch 8" and shapes.dtype(product) == TensorProto.FLOAT
    made = graph.variable("made")
    assert shapes.shape(made) is None and shapes.rank(made) is None and shapes.dtype(made) == 0
    shapes.record(made, (symbol("batch"), 3), TensorProto.FLOAT16)
    assert shapes.rank(made) == 2 and shapes.dtype(made) == TensorProto.FLOAT16


FUNCTION = """
    <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
    g (float[batch,seq] x) => (y) { y = local.twice(x) }
    <domain: "local", opset_import: ["" : 17]> twice (a) => (b) { b = Add(a, a) }
"""


def test_calls_of_model_local_functions_are_inferred_by_onnx() -> None:
    graph, shapes = inferred(onnx.parser.parse_model(FUNCTION))
    assert shown(shapes.shape(named(graph, "y"))) == "batch seq" and shapes.dtype(named(graph, "y")) == 1


def test_a_malformed_node_leaves_its_shape_unknown() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[a,b] x) => (y) { y = Transpose <perm = [0, 7]> (x) }'
    graph = read_graph(onnx.parser.parse_model(text))
    assert infer_shapes(graph).shape(named(graph, "y")) is None
    with pytest.raises(IndexError):
        infer_shapes(graph, strict=True)


REQUIRED = [
    (17, "float[n,c,h,w] x, float[8,3,3,3] z", "y = Conv(x, z)", "n 3 h w"),
    (17, "float[n,c,h,w] x, float[8,2,3,3] z", "y = Conv <group = 4> (x, z)", "n 8 h w"),
    (17, "float[n,c,h,w] x, float[8,3,3,3] z", "y = ConvTranspose(x, z)", "n 8 h w"),
    (17, "float[n,c,h,w] x, float[8,4,3,3] z", "u = Concat <axis = 1> (x, x) y = Conv(u, z)", "n 2 h w"),
    (17, "float[n,c,h,w] x, float[8,4,3,3] z", "u = DepthToSpace <blocksize = 2> (x) y = Conv(u, z)", "n c h w"),
    (17, "float[n,c,h,w] x, float[6] z", "y = BatchNormalization(x, z, z, z, z)", "n 6 h w"),
    (17, "float[n,c,h,w] x, float[6] z", "y = InstanceNormalization(x, z, z)", "n 6 h w"),
    (21, "float[n,c,h,w] x, float[6] z", "y = GroupNormalization <num_groups = 2> (x, z, z)", "n 6 h w"),
    (18, "float[n,c,h,w] x, float[2] z", "y = GroupNormalization <num_groups = 2> (x, z, z)", "n c h w"),
    (17, "float[n,s,d] x, float[6,4] z", "y = MatMul(x, z)", "n s 6"),
    (17, "float[d,n] x, float[4,6] z", "y = Gemm <transA = 1, transB = 1> (x, z)", "6 n"),
    (21, "float[n,s,d] x, uint8[8,2,16] w, float[8,2] z",
     "y = com.microsoft.MatMulNBits <K = 64, N = 8, block_size = 32> (x, w, z)", "n s 64"),
    (17, "float[n,c,h,w] x, float[8,3,3,3] z, float[8,4,3,3] v", "u = Conv(x, z) y = Conv(x, v)", "n c h w"),
    (17, "float[n,c,h,w] x, float[8,k,3,3] z", "y = Conv(x, z)", "n c h w"),
]  # fmt: skip


@pytest.mark.parametrize(("opset", "inputs", "body", "expected"), REQUIRED)
def test_a_size_that_an_operator_requires_is_that_number(opset: int, inputs: str, body: str, expected: str) -> None:
    """Where two operators require different numbers, the model does not run, and nothing is known."""
    graph, shapes = parsed(inputs, body, opset)
    assert shown(shapes.shape(graph.linked.inputs[0])) == expected


def test_reshapes_of_equal_tensors_to_one_target_have_equal_unknown_sizes() -> None:
    """A target's batch may be 0, which copies the size of the source: the shape is unknown, but the same."""
    n = "s = Shape <end = 1> (z) m = Constant <value_ints = [-1]> () t = Concat <axis = 0> (s, m, m8) u = Neg(x)"
    body = f"{n} a = Reshape(x, t) b = Reshape(u, t) c = Reshape(w, t) d = Reshape <allowzero = 1> (x, t) y = Add(a, b)"
    graph, shapes = parsed("float[n,8] x, float[k,8] w, float[b,4] z", body, constants="int64[1] m8 = {8}")
    a, b, c, d = (shapes.shape(named(graph, name)) for name in "abcd")
    assert shown(a) == "? ? 8" and a == b
    assert a != c and a != d


def test_a_size_that_is_lost_and_required_is_known_everywhere() -> None:
    """A computed Pad may pad any axis; the Conv behind it tells the channels, which are then declared in the file."""
    body = """u = Pad(x, p) r = Relu(u) z = Conv(r, k) f = Shape(u) c = Gather(f, a1) s = Div(c, a2)
        q = Concat <axis = 0> (s, c) v = ConstantOfShape(q) y = Add(z, r)"""
    inputs = "float[n,c,h,w] x, int64[8] p, float[8,8,1,1] k"
    graph, shapes = parsed(inputs, body, constants="int64[1] a1 = {1}, int64[1] a2 = {2}")
    assert shown(shapes.shape(named(graph, "u"))) == "? 8 ? ?"
    assert shown(shapes.shape(named(graph, "v"))) == "4 8"
    infer_node(shapes, named(graph, "u").inputs[0])
    assert shown(shapes.shape(named(graph, "u"))) == "? 8 ? ?", "inferring again gives the same sizes"
    types = {value.name: value.type.tensor_type.shape.dim for value in write_model(graph).graph.value_info}
    assert types["u"][1].dim_value == 8


def test_an_input_is_declared_with_the_size_that_is_required() -> None:
    """So is what the model records with the name of that size."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,c,h,w] x, float[8,3,1,1] z) => (y)
        <float[n,c,h,w] r> { r = Relu(x) y = Conv(r, z) }"""
    graph, _ = inferred(onnx.parser.parse_model(text))
    model = write_model(graph)
    for value in (model.graph.input[0], *(each for each in model.graph.value_info if each.name == "r")):
        assert [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] == ["n", 3, "h", "w"]


def test_recorded_shapes_that_contradict_the_inputs_are_not_used() -> None:
    """The model was exported for a batch of 1, and its input was made dynamic afterwards; LSTM has no rule here."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[seq,batch,8] x, float[1,16,8] w, float[1,16,4] r) => (y) <float[1,1,4] h, float[1,4] y>
        { s, h = LSTM <hidden_size = 4> (x, w, r) y = Squeeze(h, a0) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "a0"))
    graph, shapes = inferred(model)
    assert [shown(shapes.shape(named(graph, name))) for name in "hy"] == ["1 batch 4", "batch 4"]


def test_a_record_behind_a_computed_parameter_is_not_used() -> None:
    """The axis of Unsqueeze is a size, so that only the rank is known, and what was recorded held for one size."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch,2,seq,8] x) => (y) <float[batch,2,1,seq,8] u>
        { s = Shape <start = 2, end = 3> (x) u = Unsqueeze(x, s) y = Relu(u) }"""
    graph, shapes = inferred(onnx.parser.parse_model(text))
    assert shapes.rank(named(graph, "y")) == 5
    assert not any(is_known(size) for size in shapes.shape(named(graph, "y")) or ())


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ("float[n,7] o", "n 7"),
        ("float[n,7] o, float[n,4] r", "n 7"),
        ("float[n,7] o, float[0,0] r", "n 7"),  # PyTorch's 0 for a size that it does not know
        ("float[0,7] o", "? 7"),  # which may stand here, too
        ("float[1,7] o, float[1,4] r", None),  # the batch was made dynamic after the export
        ("float[n,7] o, float[n,5] r", None),
    ],
)
def test_records_count_behind_other_domains_if_none_is_stale(records: str, expected: str | None) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[n,4] x) => (y) <{records}> {{ r = Relu(x) o = acme.Thing(r) y = Relu(o) }}"""
    graph, shapes = inferred(onnx.parser.parse_model(text))
    found = shapes.shape(named(graph, "y"))
    assert (found and shown(found)) == expected


def test_a_recorded_size_of_0_is_corrected() -> None:
    """A runtime that cannot infer what a fused node computes would believe it."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n,4] x) => (float[0,4] y) <float[0,0] r> { r = Relu(x) y = Neg(r) }"""
    graph, _ = inferred(onnx.parser.parse_model(text))
    model = write_model(graph)
    found = {v.name: v.type.tensor_type.shape.dim for v in (*model.graph.value_info, *model.graph.output)}
    assert {name: [dim.dim_param or dim.dim_value for dim in dims] for name, dims in found.items()} == {
        "r": ["n", 4], "y": ["n", 4],
    }  # fmt: skip


def test_the_dtypes_of_a_loops_outputs_are_their_own() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (int64 trips, bool go, float[2] x, int64[2] k) => (y, z) {
            a, b = Loop (trips, go, x, k) <body = inner (int64 i, bool t, float[2] u, int64[2] v)
                => (bool d, float[2] p, int64[2] q) { d = Identity(t) p = Add(u, u) q = Add(v, v) }>
            c = Cast <to = 1> (b) y = Add(a, c) z = Cast <to = 7> (a) }"""
    graph, shapes = inferred(onnx.parser.parse_model(text))
    assert [shapes.dtype(named(graph, name)) for name in "abc"] == [1, 7, 1]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("f = Cast <to = 1> (a) g = Mul(f, f) y = Cast <to = 7> (g)", [9, 4096**2, None]),
        ("f = Cast <to = 11> (a) g = Mul(f, f) y = Cast <to = 7> (g)", [9, 4096**2, 4097**2]),
        ("f = Cast <to = 1> (a) g = Div(f, f) y = Cast <to = 7> (g)", [1, 1, 1]),
        ("f = Cast <to = 10> (a) g = Mul(f, f) y = Cast <to = 7> (g)", [None, None, None]),
        ("f = Cast <to = 6> (a) g = Mul(f, f) h = Mul(g, g) y = Cast <to = 7> (h)", [81, None, None]),
    ],
)
def test_values_are_known_as_far_as_their_dtype_holds_them(nodes: str, expected: list[int | None]) -> None:
    found = []
    for number in (3, 4096, 4097):
        graph, shapes = parsed(f"float[{number},2] x", f"a = Shape <end = 1> (x) {nodes}")
        value = shapes.value(named(graph, "y"))
        found.append(None if value is None else value.item())
    assert found == expected


def test_sums_in_float32_are_known_if_no_order_of_them_is_rounded() -> None:
    graph, shapes = parsed("float[16777215,3] x", "a = Shape(x) f = Cast <to = 1> (a) n = Neg(f) c = Concat <axis = 0> "
                           "(f, n) y = ReduceSum <keepdims = 0> (c)")  # fmt: skip
    assert shapes.exact_value(named(graph, "c")) is not None and shapes.exact_value(named(graph, "y")) is None


def test_a_sparse_constant_is_inferred_by_onnx() -> None:
    """graphsurgeon drops the attribute of a sparse constant."""
    values, indices = (onnx.numpy_helper.from_array(np.array(v)) for v in ([1.5], [3]))
    sparse = onnx.helper.make_sparse_tensor(values, indices, [2, 4])
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (double[4,n] x) => (y) { y = MatMul(c, x) }'
    )
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse))
    graph = read_graph(model)
    c = named(graph, "c")
    shapes = infer_shapes(graph)
    assert shown(shapes.shape(c)) == "2 4" and shapes.dtype(c) == TensorProto.DOUBLE


def test_large_constants_are_not_copied_for_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    infer = onnx.shape_inference.infer_shapes
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda m: (sizes.append(m.ByteSize()), infer(m))[1])
    graph = read_graph(onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n,512] x) => (y) { y = MatMul(x, w) }'
    ))  # fmt: skip
    weight = onnx.numpy_helper.from_array(np.zeros((512, 8), np.float32), "w")
    graph.model.graph.initializer.append(weight)
    graph = read_graph(graph.model)
    assert shown(infer_shapes(graph, strict=True).shape(named(graph, "y"))) == "n 8"
    assert sizes[0] < 1024


@pytest.mark.parametrize("opset", [7, 8])
@pytest.mark.parametrize(
    "nodes",
    [
        "a = Upsample <scales = [1.0, 1.0, 2.0, 1.7]> (x) y = Relu(a)",
        "a = BatchNormalization <spatial = 1> (x, c, c, c, c) y = Relu(a)",
        "a, m = Dropout <ratio = 0.5> (x) y = Relu(a)",
        "a = Slice <axes = [2, 3], starts = [1, -4], ends = [2147483647, -1]> (x) y = Relu(a)",
        "a, i = TopK <k = 2, axis = 1> (x) y = Relu(a)",
        "a = Clip <min = -1.0, max = 1.0> (x) y = Relu(a)",
        "a = Pad <pads = [0, 0, 1, 2, 0, 0, 0, 1]> (x) y = Relu(a)",
        "a = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x) y = Relu(a)",
        "a = ReduceSum <axes = [2, 3], keepdims = 0> (x) y = Relu(a)",
        "a = Squeeze <axes = [0]> (x) b = Unsqueeze <axes = [0, 2]> (a) y = Relu(b)",
        "a, b = Split <axis = 3, split = [4, 6]> (x) y = Relu(b)",
        "a = Flatten(x) y = Softmax <axis = 1> (a)",
        "s = Shape(x) f = Cast <to = 1> (s) g = Mul(f, f) i = Cast <to = 7> (g) y = Cast <to = 1> (i)",
        "a = Sum(x, x, x) y = Max(a, x)",
    ],
)
def test_the_forms_of_opsets_7_and_8_run_as_inferred(nodes: str, opset: int) -> None:
    text = f"""<ir_version: 4, opset_import: ["" : {opset}]>
        g (float[1,3,h,w] x) => (float[...] y) <float[3] c = {{1.0, 2.0, 3.0}}> {{ {nodes} }}"""
    model = onnx.parser.parse_model(text.replace("float[...]", "float"))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph, shapes = inferred(model)
    names = [tensor.name for tensor in computed(graph)]
    real = run_everything(model, names, {"x": np.random.default_rng(0).normal(size=(1, 3, 6, 10)).astype(np.float32)})
    for tensor in computed(graph):
        check(shapes, tensor, real[tensor.name], {"h": 6, "w": 10})


@pytest.mark.parametrize("scale", [0.7, 1.1, 0.3, 2.3, 1 / 3])
def test_scaled_sizes_are_rounded_as_runtimes_round(scale: float) -> None:
    """The product is a float32: 10 * 0.7 is 7, although the float32 next to 0.7 is smaller."""
    for size in range(1, 40):
        text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[1,{size}] x) => (float[a,b] y)
            <float[2] s = {{1.0, {scale}}}> {{ y = Resize(x, , s) }}"""
        model = onnx.parser.parse_model(text)
        if int(np.float32(size) * np.float32(scale)):
            graph, shapes = inferred(model)
            found = (shapes.shape(named(graph, "y")) or ())[-1]
            assert found == run_everything(model, ["y"], {"x": np.ones((1, size), np.float32)})["y"].shape[1]


INVALID = [
    ("float[2,4] x", "y = Reshape(x, t)", "int64[1,2] t = {2, 4}"),
    ("float[2,4] x", "y = Slice(x, t, t, t)", "int64[2] t = {0, 7}"),
    ("float[2,4] x", "y = Slice(x, one, t)", "int64[2] t = {0, 7}, int64[1] one = {1}"),
    ("float[2,4] x", "y = Concat <axis = 5> (x, x)", ""),
    ("float[2,4] x", "y = Transpose <perm = [1, 4]> (x)", ""),
    ("float[2,4] x", "a, y = Split <axis = 9> (x)", ""),
    ("float[2,4] x", "a, b = Split <num_outputs = 0> (x) y = Mul(a, b)", ""),
    ("float[2,4] x", "y = Gather <axis = -7> (x, t)", "int64[2] t = {0, 7}"),
    ("float[2,4] x", "y = Unsqueeze(x, t)", "int64[2] t = {0, 7}"),
    ("float[2,4] x", "y = Expand(x, t)", "float[2] t = {0.5, 7.5}"),
    ("float[2,3,4,4] x, float[2,3,4] w", "y = Conv(x, w)", ""),
    ("float[2,3,4,4] x", "y = Conv(x, w)", "float[1,1,1] w = {1.0}"),
    ("float[2,3,4,4] x", "y = MaxPool <kernel_shape = [9, 9]> (x)", ""),
    ("int64[2] x", "a = Range(x, x, x) b = Range(t, t, t) y = Add(a, b)", "int64[2] t = {1, 1}"),
    ("float[2,4] x", "y = BatchNormalization(x, t, t, t, t)", "float t = {1.0}"),
    (
        "int64[2] x",
        "a = OneHot(t, t, t) b = OneHot(t, u, v) y = Add(a, b)",
        "int64[3] t = {1, 2, 3}, int64 u = {-2}, int64[2] v = {0, 1}",
    ),
]


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Constant <value = float[1,2] {1.0, 2.0}> () y = Resize(x, , t)",
        "t = Constant <value = int64[1,2] {1, 2}> () y = Tile(x, t)",
        "t = Constant <value = int64[1,2] {2, 4}> () y = ConstantOfShape(t)",
    ],
)
@pytest.mark.parametrize("is_initializer", [False, True])
def test_a_matrix_where_a_vector_is_expected_raises_nothing(nodes: str, is_initializer: bool) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (y) {{ {nodes} }}')
    if is_initializer:
        constant = model.graph.node.pop(0)
        model.graph.initializer.add().CopyFrom(constant.attribute[0].t)
        model.graph.initializer[0].name = "t"
    infer_shapes(read_graph(model), strict=True)


@pytest.mark.parametrize(("inputs", "nodes", "constants"), INVALID)
def test_of_invalid_nodes_nothing_is_known_and_passes_leave_them(inputs: str, nodes: str, constants: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g ({inputs}) => (y) {f"<{constants}>" if constants else ""} {{ {nodes} }}"""
    graph = read_graph(onnx.parser.parse_model(text))
    shapes = infer_shapes(graph)
    before = [node.op for node in graph.nodes]
    for apply_pass in PIPELINE:
        apply_pass(graph, shapes)
    assert [node.op for node in graph.nodes] == before


def test_a_loop_may_carry_a_sequence_of_other_shapes() -> None:
    """onnx gives the elements of a carried sequence the shape that they have before the first iteration."""
    text = """<ir_version: 8, opset_import: ["" : 15]>
      main (float[1,seq] x, float[3,2] w) => (float[1,2] y)
      <int64 count = {3}, bool go = {1}, int64 last = {-1}, float[1,3] row = {1,2,3}>
      {
        before = SequenceConstruct (x)
        after = Loop (count, go, before) <body = body (int64 i, bool on, seq(float[]) seen)
          => (bool more, seq(float[]) grown) { more = Identity (on) grown = SequenceInsert (seen, row) }>
        one = SequenceAt (after, last)
        y = MatMul (one, w)
      }"""
    graph, shapes = inferred(onnx.parser.parse_model(text))
    assert shapes.shape(graph.linked.inputs[0]) == (1, symbol("seq"))


NEGATIVE_SIZES = {
    "a Pad that cuts off more than there is": (17, "float[2, 3] x", 1, "int64[4] p = {0, -9, 0, 0}", "Pad (x, p)"),
    "an Upsample by -1": (9, "float[2, 3] x", 1, "float[2] p = {1, -1}", "Upsample (x, p)"),
    "a Resize by -1": (19, "float[2, 3] x", 1, "float[2] p = {1, -1}", "Resize (x, , p)"),
    "a ConvTranspose that pads more than there is": (
        17, "float[1, 1, 4, 3] x", 3, "float[1, 1, 1, 2] p = {1, 1}", "ConvTranspose <pads = [0, 9, 0, 9]> (x, p)",
    ),
    "a Conv whose kernel is larger than the image": (
        17, "float[1, 1, 4, 3] x", 3, "float[1, 1, 1, 9] p = {1, 1, 1, 1, 1, 1, 1, 1, 1}", "Conv (x, p)",
    ),
    "an input of negative size": (17, "float[1, 4, -2, 2] x", 2, "float p = {1}", "Mul (x, p)"),
    "the same before opset 10": (9, "float[1, 4, -2, 2] x", 2, "float p = {1}", "Mul (x, p)"),
}  # fmt: skip


@pytest.mark.parametrize("case", NEGATIVE_SIZES)
def test_a_slice_along_an_axis_of_negative_size_does_not_end_the_process(case: str) -> None:
    opset, given, axis, constant, node = NEGATIVE_SIZES[case]
    bounds = "".join(f", int64[1] {name} = {{{value}}}" for name, value in (("s", 3), ("e", 2), ("a", axis), ("t", 1)))
    cut = "Slice (r, s, e, a, t)" if opset >= 10 else f"Slice <starts = [3], ends = [2], axes = [{axis}]> (r)"
    nodes = f"r = {node} z = {cut} y = Relu (z)"
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g ({given}) => (float y) <{constant}{bounds}> {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    _, report = optimize(model, verify=False)
    assert report.to_json()["input"]["nodes"] == 3


def test_an_unknown_size_of_a_later_round_differs_from_those_of_earlier_rounds() -> None:
    """The MatMul tells how many elements are not zero, so that the Add broadcasts other sizes in the second round."""
    body = "i = NonZero(x) a = Constant <value_ints = [0]> () s = Squeeze(i, a) c = Cast <to = 1> (s) d = MatMul(c, y)"
    graph, shapes = parsed("bool[n] x, float[k] y, float[m] z", f"{body} u = Add(c, z)")
    assert shapes.shape(named(graph, "c")) == shapes.shape(named(graph, "y"))
    assert shapes.shape(named(graph, "u")) != shapes.shape(named(graph, "y"))
