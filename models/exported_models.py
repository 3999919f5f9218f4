"""Read and write models/exported/models.tar.xz, a compressed archive of all models that export.py exports.

`tar -xOf models/exported/models.tar.xz index.json` prints the index: what feeds each model, and what it was made with.
`python models/exported_models.py bert_sdpa_dynamo_fp16.onnx bert.onnx` writes one of the models to a file.
The variants of an architecture share their random weights. So the floats of all models are in one file for each dtype,
which holds each tensor once, and the models refer to them as ONNX refers to external data, without lengths. A float16
tensor that is a float32 one rounded is a place in the float32 file.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import math
import os
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

EXPORTED = Path(__file__).parent / "exported"
ARCHIVE, INDEX = "models.tar.xz", "index.json"
# Most of the content is floats of four bytes: each byte is coded by its position in four, not by the byte before it.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 1, "lp": 2, "pb": 1}]
DTYPES = {TensorProto.FLOAT: np.dtype("<f4"), TensorProto.FLOAT16: np.dtype("<f2")}
LOCATIONS = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}  # of external data, files of the archive
SMALLEST = 16  # bytes of a tensor that is external


def read_index() -> dict[str, dict[str, Any]]:
    """Return what the index says of each model, by its name, such as bert_sdpa_dynamo_fp16.onnx."""
    models: dict[str, dict[str, Any]] = json.loads(archived()[INDEX])["models"]
    return models


def read(name: str) -> bytes:
    """Return the model of this name as export.py wrote it."""
    return restored(name, archived())


@functools.cache
def archived() -> Mapping[str, bytes]:
    """Return the files of the archive by name, 4 MB; a process decompresses them once, in 0.1 s."""
    return files_of((EXPORTED / ARCHIVE).read_bytes())


def load_exported(name: str) -> onnx.ModelProto:
    """Return the model of this name."""
    return onnx.load_from_string(read(name))


def unpack(name: str, folder: Path) -> Path:
    """Return the path of the model in this folder; it is written there, in one step, if it is not there yet."""
    path = folder / name
    if not path.exists():
        draft = folder / f"{name}.{os.getpid()}"
        draft.write_bytes(read(name))
        draft.replace(path)
    return path


def compress(models: Mapping[str, bytes], index: str) -> bytes:
    """Return an archive of models by name and their index: the same bytes for the same ones, without times and owners.

    Raises ValueError if the name of a model does not end in .onnx.
    """
    if wrong := [name for name in models if not name.endswith(".onnx")]:
        raise ValueError(f"names {wrong}, required: names that end in .onnx")
    parsed = {name: onnx.load_from_string(models[name]) for name in sorted(models)}
    files = make_external(parsed.values())
    files |= {INDEX: index.encode()} | {name: model.SerializeToString() for name, model in parsed.items()}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)  # of time 0 and user 0
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return lzma.compress(content.getvalue(), check=lzma.CHECK_CRC32, filters=FILTERS)


def decompress(content: bytes) -> dict[str, bytes]:
    """Return the models of an archive by name."""
    files = files_of(content)
    return {name: restored(name, files) for name in files if name.endswith(".onnx")}


def files_of(content: bytes) -> dict[str, bytes]:
    """Return the files of an archive by name: the index, models without their floats, and the files of floats."""
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content)), mode="r:") as archive:
        members = ((member.name, archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in members if file}


def make_external(models: Iterable[ModelProto]) -> dict[str, bytes]:
    """Replace the floats of these models by places in files.  Returns the files by location."""
    tensors = [each for model in models for each in tensors_of(model) if len(each.raw_data) >= SMALLEST]
    files = {location: bytearray() for location in LOCATIONS.values()}
    places: dict[tuple[int, bytes], tuple[str, int]] = {}  # a dtype and values: location and offset
    for dtype, location in LOCATIONS.items():  # float32 first, of which float16 may be rounded
        for tensor in tensors:
            if tensor.data_type == dtype:
                values = tensor.raw_data
                if (dtype, values) not in places:
                    offset = len(files[location])
                    files[location] += values
                    places[dtype, values] = location, offset
                    places.setdefault((TensorProto.FLOAT16, rounded(values, dtype)), (location, offset))
                refer(tensor, *places[dtype, values])
    return {location: bytes(data) for location, data in files.items()}


def refer(tensor: TensorProto, location: str, offset: int) -> None:
    """Make a place in a file the values of a tensor; their number follows from its dims."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset))):
        tensor.external_data.add(key=key, value=value)


def restored(name: str, files: Mapping[str, bytes]) -> bytes:
    """Return a model with the floats that `make_external` took out of it."""
    model = onnx.load_from_string(files[name])
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {each.key: each.value for each in tensor.external_data}
            (dtype,) = (each for each, location in LOCATIONS.items() if location == place["location"])
            count, offset = math.prod(tensor.dims), int(place["offset"])
            values = files[place["location"]][offset : offset + count * DTYPES[dtype].itemsize]
            tensor.raw_data = values if tensor.data_type == dtype else rounded(values, dtype)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model.SerializeToString()


def rounded(values: bytes, dtype: int) -> bytes:
    """Return values in float16."""
    with np.errstate(over="ignore"):  # a mask of the lowest float32 becomes infinite
        return np.frombuffer(values, DTYPES[dtype]).astype(DTYPES[TensorProto.FLOAT16]).tobytes()


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """Yield the initializers and the constants of a model, those of subgraphs and functions too."""
    yield from graph_tensors(model.graph)
    for function in model.functions:
        yield from node_tensors(function.node)


def graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield the initializers and the constants of a graph."""
    yield from graph.initializer
    yield from node_tensors(graph.node)


def node_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    """Yield the tensors that attributes of these nodes hold."""
    for attribute in (each for node in nodes for each in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        if attribute.HasField("g"):
            yield from graph_tensors(attribute.g)


if __name__ == "__main__":
    _, wanted, target = sys.argv
    Path(target).write_bytes(read(wanted))
