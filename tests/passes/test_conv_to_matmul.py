"""Convolutions whose windows do not overlap: which become products, with the same values, and which stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse, random

from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.convolutions import IMAGES

PRODUCT = "Reshape Transpose Reshape Transpose Reshape MatMul"
HEADER = "(float[N,3,8,12] x) => (y)"
WEIGHTS = {"w": random(5, 3, 2, 4), "b": random(5), "flat": np.array([0, 5, -1]), "none": np.array([0, 0, 1, 1])}


def check(nodes: str, rest: str, header: str = HEADER, **weights: np.ndarray) -> None:
    """Assert which operators the pass leaves, and that the values stay the same."""
    used = {name: value for name, value in {**WEIGHTS, **weights}.items() if name in nodes}
    before = parse(f"{header} {{ {nodes} }}", **used)
    after, _ = apply(before, rules_pass("conv_to_matmul", IMAGES))
    assert ops(after) == rest
    assert_same(before, after, (2, 3, 8, 12), tol=1e-5)


TRANSPOSED = "f = Reshape(c, flat) y = Transpose<perm=[0,2,1]>(f)"


@pytest.mark.parametrize(
    ("conv", "rest"),
    [
        ("Conv<strides=[2,4]>(x, w, b)", f"{PRODUCT} Add"),
        ("Conv<strides=[2,4]>(x, w)", PRODUCT),
        ("Conv<strides=[2,4], kernel_shape=[2,4], pads=[0,0,0,0], dilations=[1,1], group=1>(x, w)", PRODUCT),
        ('Conv<strides=[2,4], auto_pad="VALID">(x, w)', PRODUCT),
    ],
)
def test_patches_that_are_transposed_become_a_product(conv: str, rest: str) -> None:
    check(f"c = {conv} {TRANSPOSED}", rest)


@pytest.mark.parametrize(
    "conv",
    [
        "Conv<strides=[2,2]>(x, w, b)",  # windows overlap
        "Conv<strides=[2,6]>(x, w, b)",  # gaps between them
        "Conv(x, w)",
        "Conv<strides=[2,4], pads=[0,4,0,0]>(x, w, b)",
        "Conv<strides=[2,4], dilations=[2,1]>(x, w, b)",
        'Conv<strides=[2,4], auto_pad="SAME_UPPER">(x, w)',
    ],
)
def test_windows_that_overlap_or_leave_gaps_stay(conv: str) -> None:
    check(f"c = {conv} {TRANSPOSED}", "Conv Reshape Transpose")


def test_an_image_with_a_remainder_that_no_window_covers_stays() -> None:
    w = random(5, 3, 3, 5)
    check(f"c = Conv<strides=[3,5]>(x, w) {TRANSPOSED}", "Conv Reshape Transpose", w=w)


def test_windows_of_one_pixel_stay() -> None:
    """Channels-last, their result has the form of a product's."""
    check(f"c = Conv(x, w) {TRANSPOSED}", "Conv Reshape Transpose", w=random(5, 3, 1, 1))


def test_groups_stay() -> None:
    check(f"c = Conv<strides=[2,4], group=3>(x, w) {TRANSPOSED}", "Conv Reshape Transpose", w=random(6, 1, 2, 4),
          flat=np.array([0, 6, -1]))  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("y = Conv<strides=[2,4]>(x, w, b)", "Conv"),
        ("c = Conv<strides=[2,4]>(x, w) y = Reshape(c, flat)", "Conv Reshape"),
        ("c = Conv<strides=[2,4]>(x, w) f = Reshape(c, flat) y = Transpose<perm=[1,0,2]>(f)", "Conv Reshape Transpose"),
        (f"c = Conv<strides=[2,4]>(x, w) {TRANSPOSED} z = Relu(c)", "Conv Reshape Transpose Relu"),
        (f"c = Conv<strides=[2,4]>(x, w) {TRANSPOSED} z = Relu(f)", "Conv Reshape Transpose Relu"),
    ],
)
def test_a_result_that_is_read_in_another_form_stays(nodes: str, rest: str) -> None:
    check(nodes, rest, HEADER.replace("(y)", "(y, z)") if "z =" in nodes else HEADER)
