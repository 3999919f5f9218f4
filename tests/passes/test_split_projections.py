"""A convolution that reads columns of a product gets a product of its own, unless that would move more bytes."""

from __future__ import annotations

import numpy as np
import onnx.inliner
import onnx.numpy_helper
import onnx.parser
import pytest

from onnxfuse import optimize

SPLIT = "a, b, c = Split <axis = 2> (p, sizes)"
CONV = "t = Transpose <perm = [0, 2, 1]> (b)  y = Conv <group = 12, pads = [1, 0]> (t, f)"


def model(split: str = SPLIT, more: str = "", width: int = 8, outputs: str = "") -> onnx.ModelProto:
    """Return a product whose columns 5 to 16 are convolved along the sequence."""
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"main (float[n,7,{width}] x) => (float[n,12,7] y, float[n,7,5] r, float[n,7,3] s{outputs}) "
        "<int64[3] sizes = {5, 12, 3}> "
        f"{{ p = MatMul(x, w)  {split}  {CONV}  r = Exp(a)  s = Neg(c) {more} }}"
    )
    for name, shape in {"w": (width, 20), "f": (12, 1, 2)}.items():
        drawn = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(drawn, name))
    return made


def products(made: onnx.ModelProto) -> int:
    """Return the number of MatMuls, after functions of fused nodes are inlined."""
    return sum(node.op_type == "MatMul" for node in onnx.inliner.inline_local_functions(made).graph.node)


def test_columns_of_a_convolution_are_a_product_of_their_own() -> None:
    made, report = optimize(model(), regions=False)
    assert products(made) == 2 and report.verified.passed
    assert not any(node.op_type == "Slice" for node in made.graph.node)
    assert sorted(tuple(each.dims) for each in made.graph.initializer if len(each.dims) == 2) == [(8, 8), (8, 12)]


STAYING = {
    "x is larger than twice the columns": model(width=24),
    "columns have two readers": model(more="u = Relu(b)", outputs=", float[n,7,12] u"),
    "the product has two readers": model(more="u = Relu(p)", outputs=", float[n,7,20] u"),
    "the weight has two readers": model(more="u = MatMul(x, w)", outputs=", float[n,7,20] u"),
    "the weight is an output": model(outputs=", float[8,20] w"),
    "columns are an output": model(outputs=", float[n,7,3] c"),
}


@pytest.mark.parametrize("other", STAYING.values(), ids=STAYING)
def test_other_products_stay(other: onnx.ModelProto) -> None:
    made, report = optimize(other, regions=False)
    weights = {tuple(each.dims) for each in made.graph.initializer if len(each.dims) == 2}
    assert report.verified.passed and weights == {(other.graph.input[0].type.tensor_type.shape.dim[2].dim_value, 20)}
