"""Read and write models/exported/genai.tar.xz: graphs of onnxruntime-genai's builder, whose weights are drawn.

`python models/genai_graphs.py int4.onnx llama` writes a folder that onnxruntime_genai loads.  models/genai.py makes the
graphs; index.json in the archive names the configuration and the versions of the packages.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from exported_models import EXPORTED, INDEX, files_of
from onnx import TensorProto, helper, numpy_helper

GRAPHS = EXPORTED / "genai.tar.xz"


def pack(models: Mapping[str, onnx.ModelProto], index: Mapping[str, Any], others: Mapping[str, bytes]) -> bytes:
    """Return an archive of the models without their weights, of the index, and of other files of a folder."""
    files = {INDEX: json.dumps(index, indent=1).encode(), **others}
    for name, model in models.items():
        for tensor in model.graph.initializer:
            kept = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            tensor.CopyFrom(kept)
        files[name] = model.SerializeToString()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def load_genai(name: str) -> onnx.ModelProto:
    """Return a model, int4.onnx or fp16.onnx, with drawn weights: as large as those of a model that was not trained."""
    model = onnx.load_from_string(files_of(GRAPHS.read_bytes())[name])
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(_drawn(tensor), tensor.name))
    return model


def write_folder(name: str, folder: Path) -> None:
    """Write a model beside the configuration and the tokenizer, as genai's builder does."""
    folder.mkdir()
    onnx.save(load_genai(name), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    for other, content in files_of(GRAPHS.read_bytes()).items():
        if other.endswith(".json") and other != INDEX:
            (folder / other).write_bytes(content)


def _drawn(tensor: TensorProto) -> np.ndarray:
    random, dims = np.random.default_rng(zlib.crc32(tensor.name.encode())), tuple(tensor.dims)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if dtype == np.uint8:  # packed weights
        return random.integers(0, 256, dims, np.uint8)
    if tensor.name in ("cos_cache", "sin_cache"):
        angles = np.arange(dims[0])[:, None] * 10000.0 ** (-np.arange(dims[1]) / dims[1])
        return (np.cos if tensor.name == "cos_cache" else np.sin)(angles).astype(dtype)
    if len(dims) == 1:  # of a norm
        return random.uniform(0.5, 1.5, dims).astype(dtype)
    if tensor.name.endswith("scales"):  # of numbers between -8 and 7
        return random.uniform(0.01, 0.03, dims).astype(dtype)
    return random.normal(0, 0.1, dims).astype(dtype)


if __name__ == "__main__":
    write_folder(sys.argv[1], Path(sys.argv[2]))
