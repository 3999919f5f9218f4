"""Read and write models/exported/models.tar.xz, a compressed archive of all models that export.py exports.

`tar -xOf models/exported/models.tar.xz index.json` prints the index: what feeds each model, and what it was made with.
`python models/exported_models.py bert_sdpa_dynamo_fp16.onnx bert.onnx` writes one of the models to a file.
Most parameters are random, and no file holds them: they are drawn when a model is read (`drawn`), so they are not those
with which export.py verified the model. All other floats of all models are in one file for each dtype, which holds each
tensor once, and the models refer to them as ONNX refers to external data, without lengths. A float16 tensor that is a
float32 one rounded is a place in the float32 file. Names that are written short (short_names.py) and offsets that count
from the tensor before make the archive smaller too.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import lzma
import math
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
WIDTHS = {location: DTYPES[dtype].itemsize for dtype, location in LOCATIONS.items()}  # bytes
DRAWN, STEP, MEAN = "drawn", "step", "mean"  # the location of parameters that no file holds, and their two entries
UNIT = 2.0**-24  # of steps: the smallest number of float16
PARAMETERS = {  # operators, and those of their inputs that are random if they are initializers
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "LayerNormalization"), (1, 2)),
    "BatchNormalization": (1, 2, 3, 4), "MatMul": (1,), "Gather": (0,),
}  # fmt: skip
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
    for model in parsed.values():
        leave_out_drawn(model)
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
    files = {location: bytearray() for location in LOCATIONS.values()}
    places: dict[tuple[int, bytes], dict[str, str]] = {}  # a dtype and values: entries of external data
    for dtype, location in LOCATIONS.items():  # float32 first, of which float16 may be rounded
        for tensor in tensors:
            if tensor.data_type == dtype:
                values = tensor.raw_data
                if (dtype, values) not in places:
                    places[dtype, values] = {"location": location, "offset": str(len(files[location]))}
                    files[location] += values
                    places.setdefault((TensorProto.FLOAT16, rounded(values, dtype)), places[dtype, values])
                refer(tensor, places[dtype, values])
    return {location: bytes(data) for location, data in files.items()}


def draw_parameters(model: ModelProto) -> None:
    """Replace parameters, which are random, by those that `drawn` gives.

    They keep their means, rounded to integers, and their standard deviations, within an eighth.
    """
    wanted = {
        name
        for node in model.graph.node
        for slot, name in enumerate(node.input)
        if slot in PARAMETERS.get(node.op_type, ())
    }
    for tensor, number in numbered(model):
        if tensor.name in wanted:
            values = np.frombuffer(tensor.raw_data, DTYPES[tensor.data_type]).astype(np.float64)
            step = values.std() / odd_numbers(tensor.dims, number).std() / UNIT
            power = 2 ** max(math.frexp(step)[1] - 3, 0)  # three bits of the step, so that float16 has all multiples
            tensor.raw_data = drawn(tensor, number, round(values.mean()), round(step / power) * power)


def numbered(model: ModelProto) -> Iterator[tuple[TensorProto, int]]:
    """Yield the initializers that may be drawn, each with the number of those before it that have its dims."""
    seen: Counter[tuple[int, ...]] = Counter()
    for tensor in model.graph.initializer:
        if tensor.data_type in DTYPES and math.prod(tensor.dims) * 2 >= SMALLEST:
            yield tensor, seen[tuple(tensor.dims)]
            seen[tuple(tensor.dims)] += 1


def odd_numbers(dims: Sequence[int], number: int) -> np.ndarray:
    """Return odd numbers from -127 to 127, one for each element: the same on every machine, others for each number."""
    stream = hashlib.shake_128(f"{number} of {list(dims)}".encode())
    return np.frombuffer(stream.digest(math.prod(dims)), np.int8) | 1


def drawn(tensor: TensorProto, number: int, mean: int, step: int) -> bytes:
    """Return the values of a tensor: a mean, and multiples of `step * UNIT` around it."""
    return (mean + odd_numbers(tensor.dims, number) * (step * UNIT)).astype(DTYPES[tensor.data_type]).tobytes()


def leave_out_drawn(model: ModelProto) -> None:
    """Replace the parameters that `drawn` gives by their means and steps."""
    for tensor, number in numbered(model):
        values = np.frombuffer(tensor.raw_data, DTYPES[tensor.data_type]).astype(np.float64)
        if np.abs(values).max() < 256:  # others are masks
            mean = round(values.mean())
            step = round((values[0] - mean) / UNIT / odd_numbers(tensor.dims, number)[0])
            if drawn(tensor, number, mean, step) == tensor.raw_data:
                refer(tensor, {"location": DRAWN, STEP: str(step), **({MEAN: str(mean)} if mean else {})})


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
        if "offset" in place:
            location, offset = place["location"].value, int(place["offset"].value)
            place["offset"].value = str(offset - ends[location])
            ends[location] = offset + math.prod(tensor.dims) * WIDTHS[location]


def restored(name: str, files: Mapping[str, bytes]) -> bytes:
    """Return a model with its names in full, and with the floats that `compress` took out of it."""
    model = onnx.load_from_string(files[name])
    rename(model.graph, short=False)
    for tensor, number in numbered(model):
        place = {each.key: each.value for each in tensor.external_data}
        if STEP in place:
            hold(tensor, drawn(tensor, number, int(place.get(MEAN, 0)), int(place[STEP])))
    ends: Counter[str] = Counter()
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = {each.key: each.value for each in tensor.external_data}
            location = place["location"]
            offset = ends[location] + int(place["offset"])
            ends[location] = offset + math.prod(tensor.dims) * WIDTHS[location]
            stored = files[location][offset : ends[location]]
            hold(tensor, stored if location == LOCATIONS[tensor.data_type] else rounded(stored, TensorProto.FLOAT))
    return model.SerializeToString()


def hold(tensor: TensorProto, values: bytes) -> None:
    """Give a tensor its values in place of a reference."""
    tensor.raw_data = values
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


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
