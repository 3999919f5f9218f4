"""Convert weights tensor by tensor: external data goes to another file, and is never in memory as a whole."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx.external_data_helper import uses_external_data

from onnxfuse.analysis.shape_info import constant_dtype
from onnxfuse.half.precision import REAL, Precision
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, array_of, constant_value
from onnxfuse.ir.load import EXTERNAL_THRESHOLD
from onnxfuse.ir.node import Constant
from onnxfuse.verify.noise import move_by_rounding

DATA_FILE: Final = "weights.data"
MAX_PARAMETER: Final = 8  # elements; smaller constants can be parameters, such as the scales of a Resize
CHECKED_AT_ONCE: Final = 2**22  # elements of a weight per step: copies of a whole weight would be large


class ScratchFolder:
    """A folder of temporary files, which is removed with this object."""

    def __init__(self) -> None:
        """Make the folder in the system's folder for temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix="onnxfuse-half-"))
        self._removal = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass
class Weights:
    """Converts the weights of a model to half precision; the model's external data lies in `folder`."""

    folder: Path | None
    precision: Precision
    scratch: ScratchFolder | None = None  # the folder of converted external weights
    losses: dict[tuple[str, bool], str] = field(default_factory=dict)  # results of `loss`, by name and `clamp`
    _end: int = 0

    def loss(self, graph: Graph, tensor: Constant, clamp: bool = False) -> str:
        """Return why a weight must stay as it is, as the end of a sentence; "" where half precision holds it.

        In masks and bounds (`clamp`), numbers beyond the range are allowed to become the largest or lowest number of
        the range.
        """
        if constant_dtype(tensor) != onnx.TensorProto.FLOAT:
            return ""
        if (tensor.name, clamp) not in self.losses:
            self.losses[tensor.name, clamp] = describe_loss(constant_value(graph, tensor), self.precision, clamp)
        return self.losses[tensor.name, clamp]

    def converted(self, tensor: onnx.TensorProto, number: int, clamp: bool = False) -> onnx.TensorProto:
        """Return a tensor converted to the dtype `number` (float32 or half precision), if it has another one."""
        if tensor.data_type == number:
            return self.kept(tensor)
        value = array_of(self.folder, tensor)
        if number == onnx.TensorProto.FLOAT:
            value = value.astype(np.float32)
        else:
            value = self.precision.clamped(value) if clamp else self.precision.rounded(value)
        return self._stored(tensor, value)

    def moved(self, tensor: onnx.TensorProto, draw: int) -> onnx.TensorProto:
        """Return a weight with elements perturbed, up or down at random, by one rounding error of half precision."""
        if tensor.data_type not in REAL or math.prod(tensor.dims) <= MAX_PARAMETER:
            return self.kept(tensor)
        value = array_of(self.folder, tensor)
        moved = move_by_rounding(tensor.name, value.astype(np.float32), self.precision.rounding, draw)
        return self._stored(tensor, moved.astype(value.dtype))

    def kept(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return a tensor unchanged; external data is copied to the file of converted tensors."""
        if uses_external_data(tensor) and self.scratch is not None:
            return self._stored(tensor, array_of(self.folder, tensor))
        return tensor

    def _stored(self, tensor: onnx.TensorProto, value: Array) -> onnx.TensorProto:
        """Return a tensor with another value; if its data is external and not small, write it to the scratch file."""
        result = onnx.numpy_helper.from_array(value, tensor.name)
        size = len(result.raw_data)
        if not uses_external_data(tensor) or size < EXTERNAL_THRESHOLD or self.scratch is None:
            return result
        with (self.scratch.path / DATA_FILE).open("ab") as file:
            file.write(result.raw_data)
        result.ClearField("raw_data")
        result.data_location = onnx.TensorProto.EXTERNAL
        for key, number in (("location", DATA_FILE), ("offset", self._end), ("length", size)):
            result.external_data.add(key=key, value=str(number))
        self._end += size
        return result


def describe_loss(value: Array, precision: Precision, clamp: bool = False) -> str:
    """Describe the loss of a weight in half precision, as the end of a sentence; "" if the loss is acceptable."""
    flat = value.reshape(-1)
    lost = norm = 0.0
    for start in range(0, flat.size, CHECKED_AT_ONCE):
        piece = flat[start : start + CHECKED_AT_ONCE]
        half = precision.rounded(piece).astype(np.float32)
        if not np.isfinite(half).all():
            counts = np.isfinite(piece) & ~(clamp & (np.abs(piece) > precision.largest))
            piece = np.where(counts, piece, np.float32(0))
            half = np.where(counts, half, np.float32(0))
            if not np.isfinite(half).all():
                return f"holds {float(np.abs(piece).max()):.3g}, beyond the range of {precision.name}"
        error, size = (float(np.abs(each).max(initial=0.0)) or 1.0 for each in (half - piece, piece))
        lost += error**2 * _squares((half - piece) / np.float32(error))
        norm += size**2 * _squares(piece / np.float32(size))
    if lost > norm * precision.max_loss**2:
        return f"loses {(lost / norm) ** 0.5:.1e} of its norm in {precision.name}"
    return ""


def _squares(value: Array) -> float:
    return float(np.dot(value, value))
