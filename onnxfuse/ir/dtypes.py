"""Element types (dtypes): their numbers in ONNX, their names, and the sets of dtypes that fusions and passes use."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

Array: TypeAlias = NDArray[Any]  # an array whose element type is known only at run time

DTYPE_NAMES: Final = {
    number: str(helper.tensor_dtype_to_np_dtype(number).name)
    for number in TensorProto.DataType.values()
    if number not in (TensorProto.UNDEFINED, TensorProto.STRING)
}
DTYPE_NUMBERS: Final = {name: number for number, name in DTYPE_NAMES.items()}

FLOAT8: Final = DTYPE_NAMES[TensorProto.FLOAT8E4M3FN]
FLOAT8_E5M2: Final = DTYPE_NAMES[TensorProto.FLOAT8E5M2]
LARGEST_FLOAT8: Final = {FLOAT8: 448.0, FLOAT8_E5M2: 57344.0}  # the largest finite number, by dtype
HALF_PRECISION: Final[dict[int, str]] = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
FLOATS: Final = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE})
FLOAT_NAMES: Final = frozenset(DTYPE_NAMES[number] for number in FLOATS)
# The dtypes that outputs of fused nodes can have.
FUSIBLE_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
FLOAT_BITS: Final[dict[int, int]] = {TensorProto.FLOAT16: 16, TensorProto.BFLOAT16: 16, TensorProto.FLOAT: 32}

INTEGER_RANGES: Final[dict[int, tuple[int, int]]] = {
    int(TensorProto.BOOL): (0, 1)
} | {  # (smallest, largest) number of each integer dtype
    DTYPE_NUMBERS[name]: (int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}

_T = TensorProto
# For each floating-point dtype, the largest n such that it represents every integer from -n to n exactly.
EXACT_INTEGERS: Final[dict[int, int]] = {_T.FLOAT16: 2**11, _T.BFLOAT16: 2**8, _T.FLOAT: 2**24, _T.DOUBLE: 2**53}
_EXACT_CASTS: Final[dict[int, tuple[int, ...]]] = {  # dtype -> other dtypes that represent all of its values
    _T.FLOAT16: (_T.FLOAT, _T.DOUBLE),
    _T.BFLOAT16: (_T.FLOAT, _T.DOUBLE),
    _T.FLOAT: (_T.DOUBLE,),
    _T.BOOL: (_T.INT8, _T.UINT8, _T.INT32, _T.INT64, _T.FLOAT16, _T.BFLOAT16, _T.FLOAT, _T.DOUBLE),
    _T.INT8: (_T.INT16, _T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE),
    _T.UINT8: (_T.UINT16, _T.INT16, _T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE),
    _T.INT16: (_T.INT32, _T.INT64, _T.FLOAT, _T.DOUBLE),
    _T.INT32: (_T.INT64, _T.DOUBLE),
}


def is_exact_cast(source: int, target: int) -> bool:
    """Return whether a Cast from one dtype to a different one keeps every value."""
    return target in _EXACT_CASTS.get(source, ())


def dtype_name(number: int) -> str:
    """Return the numpy name of an onnx.TensorProto.DataType ("float32" for 1), or "dtype 99" if it has none."""
    return DTYPE_NAMES.get(number, f"dtype {number}")
