"""ONNX's numbers for dtypes, by the names that plans use."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto, helper

NAMES: Final = {
    number: str(helper.tensor_dtype_to_np_dtype(number).name)
    for number in TensorProto.DataType.values()
    if number not in (TensorProto.UNDEFINED, TensorProto.STRING)
}
NUMBERS: Final = {name: number for number, name in NAMES.items()}


def dtype_name(number: int) -> str:
    """ "float32" for 1; "dtype 99" for a number without a name."""
    return NAMES.get(number, f"dtype {number}")
