"""Test which nodes become one region, and which stay apart."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto
from region_models import assert_programs_agree, draw, optimized, parsed, regions

from onnxfuse import UsageError, optimize
from onnxfuse.fuse_model import Settings, fuse_model

MATRIX = "float[8, 8] x, float[8, 8] y, float[8, 8] w"


def ops_of(nodes: str, *, inputs: str = MATRIX, outputs: str = "z", opset: int = 17) -> list[list[str]]:
    """Return the operators of each region, of which each computes what its body does."""
    model, _ = optimized(parsed(nodes, inputs=inputs, outputs=outputs, opset=opset), only=["region"])
    feeds = draw(model)
    assert assert_programs_agree(model, feeds) == len(regions(model))
    return [region.ops for region in regions(model)]


# --- what is one region -------------------------------------------------------------------------------------------


def test_a_chain_between_products_is_one_region() -> None:
    nodes = "a = MatMul(x, w) b = Neg(a) c = Exp(b) d = MatMul(c, w) z = Identity(d)"
    assert ops_of(nodes) == [["Neg", "Exp"]]


def test_operators_around_a_product_are_two_regions() -> None:
    nodes = "a = Neg(x) b = Exp(a) c = MatMul(b, w) d = Abs(c) e = Tanh(d) z = Sub(e, b)"
    assert ops_of(nodes) == [["Neg", "Exp"], ["Abs", "Tanh", "Sub"]]


def test_no_cycle_through_a_product() -> None:
    """The sum reads what leads to the product and the product: in one region with the rest it would be a cycle."""
    nodes = "a = Neg(x) b = Exp(a) c = MatMul(b, w) z = Add(c, b)"
    assert ops_of(nodes) == [["Neg", "Exp"]]


def test_no_cycle_through_another_region() -> None:
    """Two reductions over other axes cannot be one region; each computes for itself what both read of x."""
    nodes = (
        "a = Neg(x) b = ReduceMean <axes = [0]> (a) c = Sub(a, b) d = Exp(c) e = ReduceMean <axes = [1]> (d) "
        "f = Sub(d, e) g = Tanh(f) z = Add(g, a)"
    )
    assert ops_of(nodes) == [["Neg", "ReduceMean"], ["Neg", "Sub", "Exp", "ReduceMean", "Sub", "Tanh", "Add"]]


def test_several_outputs() -> None:
    model, _ = optimized(parsed("a = Neg(x) b = Exp(a) z = MatMul(b, w) v = Tanh(a)", inputs=MATRIX, outputs="z v"))
    (region,) = regions(model)
    assert region.ops == ["Neg", "Exp", "Tanh"]
    assert set(region.node.output) == {"b", "v"}


def test_outputs_of_the_model_are_computed() -> None:
    model, _ = optimized(parsed("a = Neg(x) b = Exp(a) z = Tanh(b)", inputs=MATRIX, outputs="a z"))
    (region,) = regions(model)
    assert list(region.node.output) == ["a", "z"]
    assert [output.name for output in model.graph.output] == ["a", "z"]


def test_movement_alone_is_a_region() -> None:
    roll = (
        "s := int64[1] {5} o := int64[1] {0} e := int64[1] {8} t := int64[1] {1} "
        "a = Slice(x, s, e, t) b = Slice(x, o, s, t) z = Concat <axis = 1> (a, b)"
    )
    assert ops_of(roll) == [["Slice", "Slice", "Concat"]]


@pytest.mark.parametrize(("dtype", "found"), [("float16", [["Tile", "Neg"]]), ("float", [])])
def test_a_constant_that_onnxruntime_does_not_fold_is_repeated(dtype: str, found: list[list[str]]) -> None:
    nodes = "c := NUMBERS r := int64[2] {20000, 1} a = Tile(c, r) b = Neg(a) z = MatMul(b, w)".replace(
        "NUMBERS", f"{dtype}[2, 3] {{1, 2, 3, 4, 5, 6}}"
    )
    assert ops_of(nodes, inputs=f"{dtype}[3, 4] w") == found


def test_a_window_partition_is_one_region() -> None:
    nodes = (
        "s := int64[6] {1, 2, 4, 2, 4, 3} u := int64[3] {-1, 16, 3} a = Reshape(x, s) "
        "b = Transpose <perm = [0, 1, 3, 2, 4, 5]> (a) c = Reshape(b, u) z = Neg(c)"
    )
    assert ops_of(nodes, inputs="float[1, 8, 8, 3] x") == [["Reshape", "Transpose", "Reshape", "Neg"]]


def test_what_is_needed_later_joins_where_it_is_read() -> None:
    """The mask is computed from an input, and read behind a product alone."""
    nodes = "a = MatMul(x, w) f = Cast <to = 1> (m) c = Mul(a, f) z = Exp(c)"
    assert ops_of(nodes, inputs=f"{MATRIX}, int64[8] m") == [["Cast", "Mul", "Exp"]]


def test_a_clamp_of_float16_is_one_region() -> None:
    """As T5 has it: the largest number, or less where an element is infinite."""
    nodes = (
        "p := float {64504} q := float {65504} big = Cast <to = 10> (p) largest = Cast <to = 10> (q) "
        "i = Cast <to = 1> (x) f = IsInf(i) c = Cast <to = 6> (f) "
        "m = ReduceMax <keepdims = 0> (c) t = Cast <to = 9> (m) limit = Where(t, big, largest) n = Neg(limit) "
        "a = Max(x, n) z = Min(a, limit)"
    )
    (ops,) = ops_of(nodes, inputs="float16[2, 3, 4] x")
    assert ops == ["Cast", "IsInf", "Cast", "ReduceMax", "Cast", "Where", "Neg", "Max", "Min"]


@pytest.mark.parametrize(
    ("nodes", "body"),
    [
        ("a, b = Split <axis = 0> (t) c = Squeeze(a, o) d = Squeeze(b, o)", ["Transpose", "Gather", "Gather"]),
        # Parts of several elements, and axes that stay, are split.
        ("a, b = Split <axis = 1> (t) c = Squeeze(a, o) d = Relu(b)", ["Transpose", "Split", "Squeeze", "Relu"]),
        ("a, b = Split <axis = 0> (t) c = Relu(a) d = Relu(b)", ["Transpose", "Split", "Relu", "Relu"]),
    ],
)
def test_parts_of_one_element_are_gathered_in_the_body(nodes: str, body: list[str]) -> None:
    """After the inlining of bodies, onnxruntime moves a Transpose behind Gathers, where it is fast (XCiT)."""
    text = (
        f"o := int64[1] {{0}} t = Transpose <perm = [2, 0, 3, 1]> (x) {nodes} e = Tanh(c) y = Sigmoid(d) z = Mul(e, y)"
    )
    inputs = "float[1, 3, 2, 4] x" if "axis = 0" in nodes else "float[2, 3, 1, 4] x"
    result, _ = optimized(parsed(text, inputs=inputs))
    (function,) = [each for each in result.functions if each.name.startswith("region")]
    found = [node.op_type for node in function.node if node.op_type != "Constant"]
    assert found == [*body, "Tanh", "Sigmoid", "Mul"]


def test_a_modulated_norm_is_one_region() -> None:
    nodes = (
        "p := int64[1] {1} o := float {1} a, b = Split <axis = -1> (c) s = Unsqueeze(a, p) t = Unsqueeze(b, p) "
        "u = Add(s, o) v = Mul(x, u) z = Add(v, t)"
    )
    (ops,) = ops_of(nodes, inputs="float[2, 5, 8] x, float[2, 16] c")
    assert ops == ["Split", "Unsqueeze", "Unsqueeze", "Add", "Mul", "Add"]


NORMALIZED = (  # as PyTorch's F.normalize is exported
    "em := float {0.000001} n = ReduceL2 <axes = [1], keepdims = 1> (m) c = Clip(n, em) sizes = Shape(m) "
    "e = Expand(c, sizes) z = Div(m, e)"
)


def test_normalized_embeddings_with_pooling_are_two_regions() -> None:
    """The mean is over the tokens, the norm over the features."""
    nodes = (
        "p := int64[1] {-1} one := int64[1] {1} least := float {0.000001} g = Unsqueeze(mask, p) s = Shape(x) "
        "w = Expand(g, s) f = Cast <to = 1> (w) h = Mul(x, f) t = ReduceSum <keepdims = 0> (h, one) "
        "a = ReduceSum <keepdims = 0> (f, one) d = Clip(a, least) m = Div(t, d) "
    )
    found = ops_of(nodes + NORMALIZED, inputs="float[b, t, 8] x, int64[b, t] mask")
    pooled = ["Expand", "Cast", "ReduceSum", "Max", "Min", "Cast", "Mul", "ReduceSum", "Div"]
    assert found == [pooled, ["ReduceL2", "Max", "Min", "Div"]]


def test_normalized_rows_are_one_region() -> None:
    assert ops_of(NORMALIZED, inputs="float[b, 8] m") == [["ReduceL2", "Max", "Min", "Div"]]
    assert ops_of(NORMALIZED.replace("sizes = Shape(m)", "sizes := int64[2] {6, 8}"), inputs="float[6, 8] m") == [
        ["ReduceL2", "Max", "Min", "Div"]
    ]


CENTERED = "m = ReduceMean <axes = [{axis}]> (x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean <axes = [{axis}]> (q) "
IMAGE, ROWS = "float[b, 6, r, c] x, float[6, 1, 1] g, float[6, 1, 1] a", "float[b, r, 6] x, float[6] g, float[6] a"


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [
        (CENTERED.format(axis=1) + "w = Add(v, e) s = Sqrt(w) n = Div(d, s) k = Mul(n, g) z = Add(k, a)", IMAGE),
        ("q = Mul(x, x) v = ReduceMean <axes = [1]> (q) w = Add(v, e) s = Sqrt(w) n = Div(x, s) z = Mul(n, g)", IMAGE),
        (CENTERED.format(axis=-1) + "s = Sqrt(v) w = Add(s, e) n = Div(d, w) k = Mul(n, g) z = Add(k, a)", ROWS),
        ("l = ReduceL2 <axes = [-1]> (x) s = Max(l, e) n = Div(x, s) k = Mul(n, e) z = Mul(k, g)", ROWS),
        ("l = ReduceL2 <axes = [-1]> (x) k = Mul(l, e) s = Max(k, e) n = Div(x, s) z = Mul(n, g)", ROWS),
    ],
    ids=["over channels", "of squares over channels", "by deviation and epsilon", "by length", "by scaled length"],
)
def test_norms_that_no_pattern_names_are_one_region(nodes: str, inputs: str) -> None:
    (ops,) = ops_of("e := float {0.4} " + nodes, inputs=inputs)
    assert len(ops) == nodes.count(" = ") - nodes.count("axes = ")


def test_a_row_is_expanded_where_it_is_reduced() -> None:
    nodes = "s := int64[2] {8, 8} m = ReduceMax <axes = [1], keepdims = 1> (x) e = Expand(m, s) z = Exp(e)"
    assert ops_of(nodes) == [["ReduceMax", "Expand", "Exp"]]


def test_a_row_that_is_expanded_along_another_axis_is_not() -> None:
    """Sixteen rows become 128, of which the second eight have the values of the first."""
    nodes = "s := int64[3] {2, 8, 8} m = ReduceMax <axes = [1], keepdims = 1> (x) e = Expand(m, s) z = Exp(e)"
    assert ops_of(nodes) == [["Expand", "Exp"]]


def test_log_softmax_and_a_loss_by_labels() -> None:
    nodes = "p := int64[1] {-1} a = LogSoftmax(x) b = Mul(a, y) s = ReduceSum <keepdims = 0> (b, p) z = Neg(s)"
    assert ops_of(nodes) == [["LogSoftmax", "Mul", "ReduceSum", "Neg"]]


@pytest.mark.parametrize(
    "loss, found",
    [
        ("SoftmaxCrossEntropyLoss(x, labels)", [["LogSoftmax", "Unsqueeze", "GatherElements", "Squeeze", "Neg"]]),
        (
            'SoftmaxCrossEntropyLoss <reduction = "none", ignore_index = 1> (x, labels)',
            [["LogSoftmax", "Equal", "Where", "Unsqueeze", "GatherElements", "Squeeze", "Neg", "Where"]],
        ),
    ],
)
def test_scores_of_labels_are_taken_where_rows_are_reduced(loss: str, found: list[list[str]]) -> None:
    """So the logarithms of all classes are not written; a mean of the losses is over the other axis."""
    model, _ = optimized(parsed(f"z = {loss}", inputs="float[6, 7] x, int64[6] labels", outputs="z"))
    assert assert_programs_agree(model, draw(model)) == len(found)
    assert [sorted(region.ops) for region in regions(model)] == [sorted(ops) for ops in found]


def test_scores_of_several_labels_are_not_of_one_row() -> None:
    nodes = "l = LogSoftmax(x) g = GatherElements <axis = 1> (l, labels) z = Neg(g)"
    inputs = "float[6, 7] x, int64[6, 2] labels"
    assert ops_of(nodes, inputs=inputs) == [["GatherElements", "Neg"]]


# --- what shares a launch -----------------------------------------------------------------------------------------


def test_small_operators_that_are_independent_share_a_launch() -> None:
    nodes = "a = Neg(x) b = Exp(y) c = MatMul(a, b) d = Abs(w) z = MatMul(c, d)"
    assert ops_of(nodes) == [["Neg", "Exp", "Abs"]]


def test_large_operators_keep_their_launches() -> None:
    nodes = "a = Neg(x) b = Exp(y) z = MatMul(a, b)"
    large = "float[1024, 1024] x, float[1024, 1024] y"
    model, _ = optimized(parsed(nodes, inputs=large, outputs="z"))
    assert not regions(model)


def test_what_depends_on_each_other_through_a_product_does_not_share_a_launch() -> None:
    nodes = "a = Neg(x) b = MatMul(a, w) c = Exp(b) z = MatMul(c, y)"
    assert ops_of(nodes) == []


def test_what_was_taken_back_shares_no_launch() -> None:
    source = parsed("a = Neg(x) b = Exp(y) c = MatMul(a, b) d = Abs(w) z = MatMul(c, d)", inputs=MATRIX, outputs="z")
    fused = fuse_model(source, None, Settings([], regions=True, exclude={("region", "a")}))
    assert [one.replaces for one in fused.fusing.fused] == [("b", "d")]


# --- what stays apart ---------------------------------------------------------------------------------------------


def test_one_operator_is_no_region() -> None:
    assert ops_of("s := int64[1] {64} a = MatMul(x, w) b = Reshape(a, s) z = Exp(b)") == []


def test_rows_are_not_moved() -> None:
    """What follows a reduction is transposed: the rows would no longer be where they are reduced."""
    nodes = "a = Neg(x) m = ReduceMax <axes = [1]> (a) c = Sub(a, m) t = Transpose <perm = [1, 0]> (c) z = Exp(t)"
    assert ops_of(nodes) == [["Neg", "ReduceMax"], ["Neg", "Sub", "Transpose", "Exp"]]


def test_a_second_reduction_of_the_same_rows_joins() -> None:
    nodes = (
        "p := int64[1] {1} m = ReduceMax <axes = [1]> (x) c = Sub(x, m) e = Abs(c) s = ReduceSum(e, p) z = Div(e, s)"
    )
    assert ops_of(nodes) == [["ReduceMax", "Sub", "Abs", "ReduceSum", "Div"]]


def test_rows_that_are_broadcast_along_other_axes_stay_apart() -> None:
    nodes = "a = Neg(x) m = ReduceMax <axes = [1], keepdims = 0> (a) z = Sub(a, m)"
    assert ops_of(nodes) == [["Neg", "ReduceMax"], ["Neg", "Sub"]]


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ("a = Erf(x) b = Exp(a) c = Erf(b) d = Add(c, y) z = Neg(d)", [["Erf", "Exp", "Erf"], ["Add", "Neg"]]),
        ("a = Erf(x) b = Exp(a) d = Add(b, y) z = Neg(d)", [["Erf", "Exp", "Add", "Neg"]]),
    ],
)
def test_operators_are_repeated_for_what_they_are_broadcast_to_while_that_moves(
    nodes: str, found: list[list[str]]
) -> None:
    """Of each element of y four bytes are moved, during which a GPU computes 32 operations; an Erf has 16, an Exp 8."""
    large = "float16[4096] x, float16[4096, 4096] y"
    model, _ = optimize(parsed(nodes, inputs=large), only=["region"], verify=False)
    assert [region.ops for region in regions(model)] == found
    small = "float[8] x, float[8, 8] y"
    assert ops_of(nodes, inputs=small) == [[op for ops in found for op in ops]]


def test_a_gate_is_computed_where_it_is_read() -> None:
    """Also for 8 million elements, because their bytes take longer than a sigmoid of each."""
    nodes = "a = Add(u, v) g = Sigmoid(a) z = Mul(x, g)"
    inputs = "float[8, 64, 128, 128] x, float[8, 64, 1, 1] u, float[8, 64, 1, 1] v"
    model, _ = optimize(parsed(nodes, inputs=inputs), verify=False)
    assert [region.ops for region in regions(model)] == [["Add", "Sigmoid", "Mul"]]


def test_shape_arithmetic_stays_out() -> None:
    nodes = (
        "k := int64[1] {2} s = Shape(x) i := int64 {0} j := int64[1] {0} n = Gather(s, i) t := int64 {5} h = Div(n, t) "
        "u = Unsqueeze(h, j) "
        "m := int64[1] {-1} d = Concat <axis = 0> (u, k, m) r = Reshape(x, d) z = Exp(r)"
    )
    assert ops_of(nodes, inputs="float[n, 6] x") == []


def test_shapes_that_are_computed_stay_out() -> None:
    nodes = "a = Neg(x) b = Exp(a) c = Expand(b, s) d = Neg(c) z = Exp(d)"
    model, _ = optimized(parsed(nodes, inputs="float[4] x, int64[2] s"))
    assert [node.op_type for node in model.graph.node if node.domain == ""] == ["Expand"]


def test_a_softmax_along_an_axis_that_is_not_there_stays_out() -> None:
    """Onnxruntime runs such a model on empty tensors, and does not load a function with it."""
    source = parsed("a = Neg(x) b = Exp(a) z = Softmax <axis = 2> (b)", inputs="float[n, 6] x")
    made = fuse_model(source, None, Settings([], regions=True))
    assert "Softmax" in [node.op_type for node in made.model.graph.node]


@pytest.mark.parametrize("dtype", ["string", "uint16"])
def test_other_dtypes_stay_out(dtype: str) -> None:
    nodes = "e = Equal(x, y) z = Where(e, x, y)"
    model, _ = optimize(parsed(nodes, inputs=f"{dtype}[4] x, {dtype}[4] y", opset=19), verify=False)
    assert regions(model) == []


@pytest.mark.parametrize(("opset", "count"), [(11, 0), (13, 1)])
def test_a_dtype_that_its_opset_does_not_declare_stays_out(opset: int, count: int) -> None:
    """Onnxruntime runs a Cast to bfloat16 before opset 13 in the main graph, and refuses a function with one."""
    source = parsed("a = Div(x, y) z = Cast <to = 16> (a)", inputs="float[4] x, float[4] y", opset=opset)
    assert len(regions(optimize(source)[0])) == count


@pytest.mark.parametrize(
    ("nodes", "dtype", "why"),
    [
        ("a = Neg(x) z = Sigmoid(a)", "double", "its Sigmoid is of float64; kernels are generated for it in float16"),
        ("a = Neg(x) z = ReduceMax(a)", "int8", "its ReduceMax is of int8"),
        ("a = Neg(x) z = ReduceL2(a)", "int64", "its ReduceL2 is of int64"),
    ],
)
def test_operators_of_dtypes_without_a_kernel_stay_out(nodes: str, dtype: str, why: str) -> None:
    """One of them would leave the whole region without a kernel."""
    source = parsed(f"{nodes} v = Abs(a)", inputs=f"{dtype}[4] x", outputs="z v", opset=18)
    made = fuse_model(source, None, Settings([], regions=True)).regions
    assert [set(one.replaces) for one in made.fused] == [{"a", "v"}]
    assert why in made.reasons["z"]


def test_subgraphs_stay_as_they_are() -> None:
    nodes = (
        "a = Neg(x) z = If (c) <then_branch = t () => (float[8, 8] p) { q = Exp(a) p = Neg(q) }, "
        "else_branch = e () => (float[8, 8] r) { r = Abs(a) }>"
    )
    model, _ = optimized(parsed(nodes, inputs=f"{MATRIX}, bool c"))
    assert [node.op_type for node in model.graph.node] == ["Neg", "If"]


def test_what_a_subgraph_reads_is_computed_before_it() -> None:
    nodes = (
        "a = Neg(x) b = Exp(a) d = If (c) <then_branch = t () => (float[8, 8] p) { p = Neg(b) }, "
        "else_branch = e () => (float[8, 8] r) { r = Abs(b) }> e = Tanh(d) z = Sub(e, b)"
    )
    model, _ = optimized(parsed(nodes, inputs=f"{MATRIX}, bool c"))
    assert [region.ops for region in regions(model)] == [["Neg", "Exp"], ["Tanh", "Sub"]]


def test_at_most_64_operators_are_one_region() -> None:
    chain = " ".join(f"a{i + 1} = {('Neg', 'Tanh')[i % 2]}(a{i})" for i in range(200))
    found = ops_of(f"a0 = Abs(x) {chain} z = Identity(a200)")
    assert max(map(len, found)) <= 64
    assert sum(map(len, found)) == 201
    assert len(found) == 4


def test_a_spectrogram_has_the_bins_that_it_has() -> None:
    """What onnx infers for a one-sided STFT is wrong; recorded behind a region it would contradict the product."""
    nodes = (
        "hop := int64 {4} w := float[8] {1, 1, 1, 1, 1, 1, 1, 1} first := int64[1] {0} end := int64[1] {-1} "
        "one := int64[1] {1} f = STFT(x, hop, w) c = Slice(f, first, end, one, one) "
        "s = ReduceSumSquare <axes = [-1], keepdims = 0> (c) "
        "z = MatMul(s, k)"
    )
    source = parsed(nodes, inputs="float[batch, 64, 1] x, float[5, 3] k")
    source.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None, 3]))
    model, _ = optimized(source)
    assert [region.ops for region in regions(model)] == [["Slice", "ReduceSumSquare"]]


# --- how they are written -----------------------------------------------------------------------------------------


def test_equal_bodies_are_one_function() -> None:
    block = "a{n} = Neg({x}) b{n} = Exp(a{n}) c{n} = MatMul(b{n}, w) "
    nodes = block.format(n=0, x="x") + block.format(n=1, x="c0") + "z = Identity(c1)"
    model, report = optimized(parsed(nodes, inputs=MATRIX))
    assert [node.op_type for node in model.graph.node if node.domain] == ["region", "region"]
    assert [function.name for function in model.functions] == ["region"]
    assert [node.name for node in model.graph.node if node.domain] == ["b0/region", "b1/region"]
    assert report.counts == {"region": 2}


def test_it_is_deterministic() -> None:
    source = parsed("a = MatMul(x, w) b = Neg(a) c = Exp(b) d = Tanh(y) z = Add(c, d)", inputs=MATRIX)
    first, second = (optimize(source, verify=False)[0].SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_a_name_and_types_are_recorded() -> None:
    model, _ = optimized(parsed("a = Neg(x) b = Exp(a) z = MatMul(b, w)", inputs=MATRIX))
    (region,) = regions(model)
    assert region.attributes["operands"] == "x0"
    assert region.attributes["attributes"] == "output_ranks program"
    assert region.attributes["output_types"] == [TensorProto.FLOAT]
    assert [info.name for info in model.graph.value_info] == ["b"]


def test_a_large_constant_is_an_operand_and_a_number_is_not() -> None:
    nodes = "o := float[1] {2} k := float[4] {1, 2, 3, 4} a = Mul(x, o) z = Add(a, k)"
    model, _ = optimized(parsed(nodes, inputs="float[2, 4] x"))
    (region,) = regions(model)
    assert region.ops == ["Mul", "Add"]
    assert len(region.node.input) == 2


def test_they_can_be_left_out() -> None:
    source = parsed("a = Neg(x) z = Exp(a)", inputs=MATRIX)
    assert len(regions(optimize(source, verify=False)[0])) == 1
    for options in ({"regions": False}, {"skip": ["region"]}, {"only": ["softmax"]}):
        assert regions(optimize(source, verify=False, **options)[0]) == []  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Did you mean 'region'"):
        optimize(source, skip=["regions"])


def test_a_region_that_was_taken_back_stays_apart() -> None:
    source = parsed("a = Neg(x) b = Exp(a) c = MatMul(b, w) d = Abs(c) z = Tanh(d)", inputs=MATRIX)
    found = fuse_model(source, None, Settings([], regions=True, exclude={("region", "b")})).fusing.fused
    assert [one.output for one in found] == ["z"]


def test_it_optimizes_again_what_was_optimized() -> None:
    model, _ = optimized(parsed("a = Neg(x) b = Exp(a) z = MatMul(b, w)", inputs=MATRIX))
    again, report = optimize(model, regions=True)
    assert [node.op_type for node in again.graph.node] == [node.op_type for node in model.graph.node]
    assert report.counts == {}
    onnx.checker.check_model(again)


# --- what patterns leave to regions -------------------------------------------------------------------------------

CHAIN = "float[4, 8] x, float[4, 8] y, float[4, 8] w"


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Mul(x, y) b = Gelu(a) z = Add(b, w)",
        "a = Sigmoid(x) b = Mul(x, a) c = Neg(b) z = Add(c, w)",
        "a = Add(x, y) z = Softmax(a)",
    ],
)
def test_an_activation_or_softmax_beside_others_is_part_of_their_region(nodes: str) -> None:
    model, report = optimized(parsed(nodes, inputs=CHAIN, outputs="z", opset=20))
    assert report.counts == {"region": 1} and report.verified.status == "verified"
    assert [node.op_type for node in model.graph.node] == ["region"]


def test_one_that_no_region_takes_is_fused_by_its_pattern() -> None:
    """The Transpose of another size beside it would read the row of a softmax in another order."""
    nodes = "a = Softmax(x) b = Transpose(a) z = Sub(b, v)"
    _, report = optimized(parsed(nodes, inputs="float[512, 512] x, float[512, 512] v", outputs="z"))
    assert report.counts == {"region": 1, "softmax": 1}


def test_one_alone_is_fused_by_its_pattern() -> None:
    _, report = optimized(parsed("a = MatMul(x, y) b = Gelu(a) z = MatMul(b, w)", inputs=MATRIX, outputs="z", opset=20))
    assert report.counts == {"activation": 1}
