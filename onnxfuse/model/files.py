"""Reading model files: what is wrong with one is said in a sentence."""

from __future__ import annotations

import graphlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx.checker
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.model.protos import subgraphs, swapped, tensors

OPSETS = range(9, 25)
PROTOBUF_LIMIT = 2**31 - 1
LARGE = 1024  # bytes; smaller tensors stay inside the model file, where they cost less than a page
PACKED_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
SIGNATURES = (  # and where they start
    (0, b"\x89PNG", "a PNG image"),
    (4, b"ORTM", "a model in onnxruntime's own format (.ort), which is not read; give the ONNX file it was made from"),
    (0, b"PK\x03\x04", "a zip archive; a PyTorch checkpoint has to be exported with torch.onnx.export"),
    (0, b"\x89HDF", "an HDF5 file; a Keras model has to be converted with tf2onnx"),
    (0, b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (0, b"<", "an HTML or XML page; the download went wrong"),
)


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Read and check a model; external data stays on disk.

    Returns the model and the folder its external data lies in, None where the model does not come from a file.
    Raises ModelError for whatever keeps it from being read or is not valid ONNX.
    """
    if isinstance(source, onnx.ModelProto):
        model, folder, name = source, None, "the model"
    elif isinstance(source, bytes):
        model, folder, name = read(source), None, "the model"
    else:
        model, folder, name = read(source), Path(source).parent, f"'{Path(source)}'"
    check(model, folder, name)
    return model, folder


def read(source: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """Read a model without its external data, and without checking it.  Raises ModelError for what is no model."""
    if isinstance(source, bytes):
        return _parse(source, "the model")
    path = Path(source)
    return _parse(_read(path), f"'{path}'")


def check(model: onnx.ModelProto, folder: Path | None = None, name: str = "the model") -> None:
    """Raise ModelError unless the model is valid ONNX of a supported opset whose external data lies in `folder`."""
    if not model.graph.node:
        raise ModelError(f"{name} has an empty graph; expected at least one node")
    if not model.graph.output:
        raise ModelError(f"{name} has no graph output, so that nothing in it is needed; expected at least one")
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if not versions:
        raise ModelError(f"{name} imports no opset of the ONNX domain; expected one of {OPSETS[0]} to {OPSETS[-1]}")
    if versions[0] not in OPSETS:
        raise ModelError(
            f"{name} has opset {versions[0]}; supported are {OPSETS[0]} to {OPSETS[-1]}: "
            "export it again, or use onnx.version_converter.convert_version(model, 17)"
        )
    _check_names(model.graph, {}, frozenset(), name)
    for tensor in tensors(model.graph, *model.functions):
        if uses_external_data(tensor):
            external_range(tensor, folder)
    outline = swapped(model, _outline)
    for value in (*outline.graph.input, *outline.graph.output):
        if value.type.HasField("tensor_type"):  # the checker wants a shape; runtimes do without
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(outline)
    except (onnx.checker.ValidationError, ValueError) as error:
        line = " ".join(str(error).strip().split("\n")[0].split())
        raise ModelError(f"{name} is not valid ONNX: {line}") from error


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise ModelError(f"'{path}' is a directory; expected an ONNX file, such as '{path / 'model.onnx'}'")
        if path.exists() and not path.is_file():  # which could be read once only
            raise ModelError(f"'{path}' is a device or a pipe; expected an ONNX file, so write it to one first")
        if path.stat().st_size > PROTOBUF_LIMIT:
            raise ModelError(f"'{path}' is larger than 2 GiB, which no ONNX file can be; export with external data")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"'{path}' does not exist; give the path of an ONNX file") from error
    except PermissionError as error:
        raise ModelError(f"'{path}' cannot be read: no permission; change it with chmod +r") from error
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}; expected an ONNX file") from error


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    """The model in the bytes.  protobuf accepts much that is no model, so a graph is asked for as well."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
        if model.HasField("graph"):
            return model
    except DecodeError:
        pass
    if not data:
        raise ModelError(f"{name} is empty (0 bytes); expected an ONNX file")
    if data[0] == 0x08:  # the tag of ir_version, with which every model begins
        raise ModelError(f"{name} is damaged or cut short at {len(data):,} bytes; export or download it again")
    kind = next((f": it looks like {kind}" for place, text, kind in SIGNATURES if data.startswith(text, place)), "")
    raise ModelError(f"{name} is not an ONNX file{kind}")


def _check_names(graph: onnx.GraphProto, around: dict[str, str], outer: frozenset[str], name: str) -> None:
    """Every name has one writer, and is written before it is read.

    `around` are the writers in the graphs around a subgraph, and `outer` the names that they have written by then.
    """
    weights = [*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer)]
    writers = {i.name: "a graph input" for i in graph.input}
    seen = set(outer) | set(writers) | set(weights)
    made = [(w, "an initializer") for w in weights] + [(o, _label(n)) for n in graph.node for o in n.output if o]
    for tensor, writer in made:
        before = writers.get(tensor)
        if before and (before, writer) != ("a graph input", "an initializer"):
            raise ModelError(f"{name} defines '{tensor}' twice, by {before} and by {writer}; expected one of them")
        writers[tensor] = writer
    for node in graph.node:
        for tensor in node.input:
            if tensor and tensor not in seen:
                raise ModelError(f"{name}: {_unwritten(graph, node, tensor, writers, around)}")
        for inner in subgraphs(node):
            _check_names(inner, around | writers, frozenset(seen), name)
        seen.update(node.output)
    for output in graph.output:
        if output.name not in seen:
            raise ModelError(f"{name} has the graph output '{output.name}', which no node writes; expected a writer")


def _unwritten(
    graph: onnx.GraphProto, node: onnx.NodeProto, tensor: str, writers: dict[str, str], around: dict[str, str]
) -> str:
    """Why `tensor` does not exist yet where the node reads it."""
    if tensor in around and tensor not in writers:
        later = f"which {around[tensor]} of the graph around it writes only later"
        return f"{_label(node)} in a subgraph reads '{tensor}', {later}; ONNX graphs are acyclic and in execution order"
    if tensor not in writers:
        return f"{_label(node)} reads '{tensor}', which nothing defines; expected an input, initializer or node output"
    maker = {o: i for i, n in enumerate(graph.node) for o in n.output}
    needs = {i: {maker[t] for t in _reads(n) if t in maker} for i, n in enumerate(graph.node)}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(_label(graph.node[i]) for i in error.args[1][:6])
        return f"its graph has a cycle, {cycle}; ONNX graphs must be acyclic"
    return f"{_label(node)} reads '{tensor}' before {writers[tensor]} writes it; sort the nodes in execution order"


def _label(node: onnx.NodeProto) -> str:
    return f"node '{node.name}'" if node.name else f"the {node.op_type} node of '{next(iter(node.output), '')}'"


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for inner in subgraphs(node):
        for child in inner.node:
            yield from _reads(child)


def size_of(tensor: onnx.TensorProto) -> int:
    """Bytes that the tensor's dtype and dims ask for."""
    try:
        packed = PACKED_BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type))
        bits = packed or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError) as error:
        raise ModelError(f"tensor '{tensor.name}' has the unknown data type {tensor.data_type}") from error
    return int(-(-math.prod(tensor.dims) * bits // 8))


def external_range(tensor: onnx.TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """File, offset and length of an external tensor, all of them checked."""
    what = f"the external data of tensor '{tensor.name}'"
    if folder is None:
        raise ModelError(f"{what} lies in a file; give the model as a path, so that the file can be found")
    fields = {e.key: e.value for e in tensor.external_data}
    location = fields.get("location", "")
    path = folder / location
    inside = not Path(location).is_absolute() and ".." not in Path(location).parts
    if not (inside and path.parent.resolve().is_relative_to(folder.resolve())):
        raise ModelError(f"{what} is at '{location}', outside the model's folder; move it beside the model")
    if not path.exists():
        raise ModelError(f"{what} is missing: '{path}' does not exist; copy it there, or export the model again")
    status = path.lstat()
    if path.is_symlink() or not path.is_file() or status.st_nlink > 1:  # onnx refuses to read these
        raise ModelError(f"{what}, '{path}', is a link or no plain file; replace it by a copy (cp --dereference)")
    size = size_of(tensor)
    try:
        offset, length = int(fields.get("offset", 0)), int(fields.get("length", size))
    except ValueError as error:
        raise ModelError(f"{what} has an offset or a length that is no number; export the model again") from error
    if offset < 0 or length != size:
        raise ModelError(f"{what} has offset {offset} and {length} bytes; its dtype and shape ask for {size} bytes")
    if status.st_size < offset + size:
        raise ModelError(
            f"{what} is too short: '{path}' has {status.st_size:,} bytes, {offset + size:,} are needed; "
            "copy or export it again"
        )
    return path, offset, size


def _outline(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """The tensor without its values where they are many or elsewhere, so that the checker reads little."""
    if not uses_external_data(tensor):
        found = len(tensor.raw_data)
        if found < LARGE:
            return tensor
        if found != size_of(tensor):
            raise ModelError(f"initializer '{tensor.name}' holds {found} bytes; its shape asks for {size_of(tensor)}")
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])


