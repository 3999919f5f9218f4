"""Test element types: a Cast that is called exact keeps the extremes and the smallest steps of its source."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxfuse.ir.dtypes import DTYPE_NUMBERS, INTEGER_RANGES, dtype_name, is_exact_cast

NUMBERS = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64",
]  # fmt: skip


def hardest_values(dtype: np.dtype) -> np.ndarray:
    """Return values that need the whole range and the whole precision of a dtype."""
    if dtype.kind in "biu":
        low, high = INTEGER_RANGES[int(helper.np_dtype_to_tensor_dtype(dtype))]
        return np.array([low, high, *([high - 1] if high > 1 else [])], dtype)
    info = ml_dtypes.finfo(dtype)
    return np.array([info.max, info.min, info.smallest_subnormal, 1 + float(info.eps)], dtype)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(NUMBERS, 2)))
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_an_exact_cast_keeps_every_value(source: str, target: str) -> None:
    before, after = (helper.tensor_dtype_to_np_dtype(DTYPE_NUMBERS[name]) for name in (source, target))
    values = hardest_values(before)
    if is_exact_cast(DTYPE_NUMBERS[source], DTYPE_NUMBERS[target]):
        assert (values.astype(after).astype(before) == values).all()


def test_casts_that_lose_values_are_not_exact() -> None:
    for source, target in (("float32", "float16"), ("float16", "bfloat16"), ("int32", "float32"), ("int64", "float64")):
        assert not is_exact_cast(DTYPE_NUMBERS[source], DTYPE_NUMBERS[target])


def test_names() -> None:
    assert dtype_name(TensorProto.FLOAT) == "float32" and dtype_name(TensorProto.BFLOAT16) == "bfloat16"
    assert dtype_name(99) == "dtype 99"
