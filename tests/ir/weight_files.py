"""Build small models whose weights lie in files, for the tests of reading and of writing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from onnx import TensorProto

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
RELU = f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Relu(x) }}"
WEIGHT = np.arange(512, dtype=np.float32)
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write anything")


def model(text: str = RELU) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def external(location: str, count: int = 512, offset: int | None = None, length: int | None = None) -> onnx.ModelProto:
    """Build y = x + w with w in a file."""
    result = model(f"{HEAD} g (float[{count}] x) => (float[{count}] y) {{ y = Add(x, w) }}")
    weight = TensorProto(name="w", data_type=1, dims=[count], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            weight.external_data.add(key=key, value=str(value))
    result.graph.initializer.append(weight)
    return result


def two_weights(folder: Path, blob: str) -> onnx.ModelProto:
    """Build y = x + w + v with w and v in one file, after 100 bytes that belong to neither; w has no length."""
    (folder / blob).write_bytes(b"?" * 100 + WEIGHT.tobytes() + (-WEIGHT).tobytes())
    result = external(blob, offset=100)
    second = external(blob, offset=100 + WEIGHT.nbytes, length=WEIGHT.nbytes).graph.initializer[0]
    second.name = "v"
    result.graph.initializer.append(second)
    result.graph.node[0].output[0] = "z"
    result.graph.node.append(onnx.helper.make_node("Add", ["z", "v"], ["y"]))
    return result


def weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
