"""Read and write models/exported/models.tar.xz, a compressed archive of all models that export.py exports.

`tar -xOf models/exported/models.tar.xz index.json` prints the index: what feeds each model, and what it was made with.
`python models/exported_models.py bert_sdpa_dynamo_fp16.onnx bert.onnx` writes one of the models to a file.
The variants of an architecture share their random weights. So the floats of all models are in one file for each dtype,
which holds each tensor once, and the models refer to them as ONNX refers to external data, without lengths. A float16
tensor that is a float32 one rounded is a place in the float32 file. Most weights are multiples of a power of two, as
export.py draws them, and are stored as int8: this makes the archive a tenth smaller. Rounding weights that an exporter
folded (round_folded) makes it a sixth smaller, and names that are written short (short_names.py) and offsets that count
from the tensor before make it a third smaller.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from short_names import rename

EXPORTED = Path(__file__).parent / "exported"
ARCHIVE, INDEX = "models.tar.xz", "index.json"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]  # the smallest
DTYPES = {TensorProto.FLOAT: np.dtype("<f4"), TensorProto.FLOAT16: np.dtype("<f2")}
LOCATIONS = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}  # of external data, files of the archive
MULTIPLES, STEP = "int8", "step"  # the location of multiples, and the entry with the exponent of their power of two
MINUS_ZERO = -128  # of int8: the zeros that rounding made of negative numbers
WIDTHS = {MULTIPLES: 1, **{location: DTYPES[dtype].itemsize for dtype, location in LOCATIONS.items()}}  # bytes
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

    Raises ValueError if the name of a model does not end in .onnx, and if its names have no short form.
    """
    if wrong := [name for name in models if not name.endswith(".onnx")]:
        raise ValueError(f"names {wrong}, required: names that end in .onnx")
    parsed = {name: onnx.load_from_string(models[name]) for name in sorted(models)}
    files = make_external(parsed.values())
    for model in parsed.values():
        count_from_ends(model)
        rename(model.graph, short=True)
    files |= {INDEX: index.encode()} | {name: model.SerializeToString() for name, model in parsed.items()}
    if wrong := [name for name in parsed if restored(name, files) != models[name]]:
        raise ValueError(f"{wrong} would be read with other names; required: names as exporters write them")
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
    files = {location: bytearray() for location in (*LOCATIONS.values(), MULTIPLES)}
    places: dict[tuple[int, bytes], dict[str, str]] = {}  # a dtype and values: entries of external data
    for dtype, location in LOCATIONS.items():  # float32 first, of which float16 may be rounded
        for tensor in tensors:
            if tensor.data_type == dtype:
                values = tensor.raw_data
                if (dtype, values) not in places:
                    step, stored = as_multiples(values, dtype)
                    file = location if step is None else MULTIPLES
                    place = {"location": file, "offset": str(len(files[file]))}
                    files[file] += stored
                    places[dtype, values] = place if step is None else {**place, STEP: str(step)}
                    places.setdefault((TensorProto.FLOAT16, rounded(values, dtype)), places[dtype, values])
                refer(tensor, places[dtype, values])
    return {location: bytes(data) for location, data in files.items()}


def as_multiples(values: bytes, dtype: int) -> tuple[int | None, bytes]:
    """Return an exponent, and the values as int8 multiples of that power of two; None and the values if they are not.

    If there are such powers, the largest is returned.
    """
    floats = np.frombuffer(values, DTYPES[dtype]).astype(np.float64)
    largest = np.abs(floats).max()
    if 0 < largest < np.inf:
        first = math.frexp(largest)[1] - 7  # so that the largest is between 64 and 128
        for step in range(first + 6, first - 1, -1):
            stored = np.round(floats / 2.0**step).clip(-127, 127).astype(np.int8)
            stored[(floats == 0) & np.signbit(floats)] = MINUS_ZERO
            if of_multiples(stored.tobytes(), step, dtype) == values:
                return step, stored.tobytes()
    return None, values


def round_folded(model: ModelProto) -> None:
    """Round the weights of convolutions into which an exporter folded a BatchNormalization, so that int8 holds them.

    They were drawn at random.  In the archive they then take a third of the bytes.
    """
    weights = {node.input[1] for node in model.graph.node if node.op_type in ("Conv", "ConvTranspose")}
    for tensor in model.graph.initializer:
        if tensor.name in weights and tensor.data_type in DTYPES and len(tensor.raw_data) >= SMALLEST:
            dtype = tensor.data_type
            if as_multiples(tensor.raw_data, dtype)[0] is None:
                floats = np.frombuffer(tensor.raw_data, DTYPES[dtype]).astype(np.float64)
                step = 2.0 ** (math.frexp(np.abs(floats).max())[1] - 4)
                counts = np.round(floats / step)
                tensor.raw_data = (counts * step).astype(DTYPES[dtype]).tobytes()


def of_multiples(stored: bytes, step: int, dtype: int) -> bytes:
    """Return the values of int8 multiples of a power of two; float16 is float32 rounded."""
    counts = np.frombuffer(stored, np.int8).astype(np.float32)
    with np.errstate(over="ignore"):  # where values are not such multiples
        floats = np.ldexp(np.where(counts == MINUS_ZERO, np.float32(-0.0), counts), step).astype("<f4").tobytes()
    return floats if dtype == TensorProto.FLOAT else rounded(floats, TensorProto.FLOAT)


def refer(tensor: TensorProto, place: Mapping[str, str]) -> None:
    """Make a place in a file the values of a tensor; their number follows from its dims."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)


def count_from_ends(model: ModelProto) -> None:
    """Let the offset of each tensor count from the end of the tensor before it that is in the same file."""
    ends: Counter[str] = Counter()
    for tensor in tensors_of(model):
        place = {each.key: each for each in tensor.external_data}
        if place:
            location, offset = place["location"].value, int(place["offset"].value)
            place["offset"].value = str(offset - ends[location])
            ends[location] = offset + math.prod(tensor.dims) * WIDTHS[location]


def restored(name: str, files: Mapping[str, bytes]) -> bytes:
    """Return a model with its names in full, and with the floats that `make_external` took out of it."""
    model = onnx.load_from_string(files[name])
    rename(model.graph, short=False)
    ends: Counter[str] = Counter()
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {each.key: each.value for each in tensor.external_data}
            location = place["location"]
            offset = ends[location] + int(place["offset"])
            ends[location] = offset + math.prod(tensor.dims) * WIDTHS[location]
            tensor.raw_data = stored_values(place, files[location][offset : ends[location]], tensor.data_type)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model.SerializeToString()


def stored_values(place: Mapping[str, str], stored: bytes, dtype: int) -> bytes:
    """Return the values of a dtype that are stored in their place as these bytes."""
    if STEP in place:
        return of_multiples(stored, int(place[STEP]), dtype)
    (kind,) = (each for each, location in LOCATIONS.items() if location == place["location"])
    return stored if dtype == kind else rounded(stored, kind)


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
