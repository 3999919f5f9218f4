"""The differences that `optimize` accepted between a model and its original, stored in the model's metadata.

By default, the dtype of an output sets its largest allowed error.  A conversion to half precision, a fusion to standard
ONNX operators or a requested tolerance allows more; `onnxfuse verify` and `onnxfuse bench` read this in the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import onnx

from onnxfuse.ir.digest import graph_digest
from onnxfuse.ir.dtypes import FLOAT_NAMES
from onnxfuse.printing import finite
from onnxfuse.verify.noise import ROUNDINGS

T = TypeVar("T")
KEY: Final = "onnxfuse.accepted"
ENDS_COMPARISONS: Final = "changes its shape or makes it infinite"
MAX_BYTES: Final = 1 << 20  # longer metadata is ignored


@dataclass(frozen=True)
class Accepted:
    """Accepted differences: the largest relative error of each output, and the results that need not be compared.

    A tolerance is infinite if rounding inputs and weights to half precision changes the shape of an output or makes it
    infinite.  `set_by` is a text that names the reason for the tolerances.  `precision` is float16 or bfloat16 if the
    model was converted to it, else empty.  Inputs and outputs of a converted model can have other floating-point dtypes
    than the original's, and integers and booleans that are computed from half precision are not compared.  With
    `numbers_for_nan`, any number passes where the original gives NaN.
    """

    tolerances: Mapping[str, float] = field(default_factory=dict)
    set_by: str = ""
    precision: str = ""
    numbers_for_nan: bool = False

    @property
    def is_converted(self) -> bool:
        """Whether the model was converted to half precision."""
        return bool(self.precision)


NOTHING_ACCEPTED: Final = Accepted()


def state_accepted(model: onnx.ModelProto, original: onnx.ModelProto, accepted: Accepted) -> None:
    """Write the accepted differences between a model and `original` into the model's metadata."""
    kept = [each for each in model.metadata_props if each.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    tolerances = {name: finite(value) for name, value in accepted.tolerances.items()}  # JSON has no infinity
    text = json.dumps({"original": graph_digest(original), **asdict(accepted), "tolerances": tolerances})
    model.metadata_props.add(key=KEY, value=text)


def accepted_of(model: onnx.ModelProto, original: onnx.ModelProto) -> Accepted:
    """Return the accepted differences in a model's metadata, or NOTHING_ACCEPTED if it names another original.

    Metadata that `state_accepted` cannot have written is ignored.
    """
    text = next((each.value for each in model.metadata_props if each.key == KEY), "")
    if not text or len(text) > MAX_BYTES:
        return NOTHING_ACCEPTED
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return NOTHING_ACCEPTED
    if not isinstance(data, dict) or data.pop("original", None) != graph_digest(original) or not _is_valid(data):
        return NOTHING_ACCEPTED
    tolerances = {name: math.inf if value is None else value for name, value in data["tolerances"].items()}
    return Accepted(**{**data, "tolerances": tolerances})


def _is_valid(data: dict[str, Any]) -> bool:
    """Return whether `data` has the fields of `Accepted`, with valid values."""
    if data.keys() != asdict(NOTHING_ACCEPTED).keys() or not isinstance(data["tolerances"], dict):
        return False
    numbers = data["tolerances"].values()
    are_numbers = all(
        each is None or (isinstance(each, float) and math.isfinite(each) and each > 0) for each in numbers
    )
    is_known = data["precision"] in ("", *ROUNDINGS) and isinstance(data["numbers_for_nan"], bool)
    return are_numbers and isinstance(data["set_by"], str) and is_known


def with_dtypes(arrays: Mapping[str, T], dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, T]:
    """Return the arrays by name, cast to their dtypes in `dtypes` if both dtypes are floating-point."""

    def cast(name: str, value: Any) -> Any:
        dtype = dtypes.get(name)
        is_float = isinstance(value, np.ndarray) and value.dtype.name in FLOAT_NAMES
        return value.astype(dtype) if is_float and dtype is not None and dtype.name in FLOAT_NAMES else value

    with np.errstate(over="ignore"):  # numbers beyond the range of half precision become infinite
        return {name: cast(name, value) for name, value in arrays.items()}
