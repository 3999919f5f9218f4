"""Models are read without the values of large weights."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import load_exported, read, read_index
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.ir.without_weights import LARGE, read_without_weights

VALUES = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")


def without_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model in which each large initializer is what `read_without_weights` makes of it."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if tensor.ByteSize() > LARGE:
            for field in VALUES:
                tensor.ClearField(field)
            tensor.data_location = TensorProto.EXTERNAL
    return light


@pytest.mark.parametrize("name", list(read_index())[::7])
def test_all_else_stays(name: str, tmp_path: Path) -> None:
    expected = without_values(load_exported(name))
    assert any(map(uses_external_data, expected.graph.initializer))
    assert read_without_weights(read(name)) == expected
    (tmp_path / name).write_bytes(read(name))
    assert read_without_weights(tmp_path / name) == expected


@pytest.mark.parametrize("raw", [True, False], ids=["raw_data", "its own field"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint64", "bool", "float16"])
def test_every_way_to_store_values(dtype: str, raw: bool) -> None:
    values = np.arange(2 * LARGE).astype(dtype)
    element = helper.np_dtype_to_tensor_dtype(values.dtype)
    given = values.tobytes() if raw else values
    weight = helper.make_tensor("w", element, values.shape, given, raw=raw)
    small = numpy_helper.from_array(values[:4], "small")
    graph = helper.make_graph([], "g", [], [], [weight, small], doc_string="text")
    model = helper.make_model(graph, producer_name="test", opset_imports=[helper.make_opsetid("", 17)])
    found = read_without_weights(model.SerializeToString())
    assert found == without_values(model) and found.ByteSize() < LARGE
    np.testing.assert_array_equal(numpy_helper.to_array(found.graph.initializer[1]), values[:4])


@pytest.mark.parametrize("size", [0, 1, 10, 100, -2000, -100, -1])
def test_a_file_that_is_cut_off_is_refused_as_ever(size: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes(read("bert_sdpa_ts_fp16.onnx")[: size or None] if size else b"")
    with pytest.raises(ModelError, match=r"cut\.onnx"):
        read_without_weights(path)


def test_a_file_that_is_missing_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.onnx"):
        read_without_weights(tmp_path / "missing.onnx")


def test_a_pipe_is_refused_as_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="a device or a pipe"):
        read_without_weights(tmp_path / "pipe")
