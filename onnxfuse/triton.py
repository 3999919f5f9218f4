"""Write model repositories for Triton Inference Server: its onnxruntime backend runs fused nodes as kernels.

A repository has a folder for each model:

    <model>/config.pbtxt
    <model>/1/model.onnx                the fused model
    <model>/1/model.onnx.<digest>.data  its weights, if they are in separate files
    <model>/1/libonnxfuse.so            the native library, which config.pbtxt names
    <model>/1/libonnxfuse.so.plans      its plan file, which the library finds next to itself

No file name comes from the model, which can be untrusted: weights are copied to a file with a name from this module.
config.pbtxt has the fields of ModelConfig in triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import onnx
from onnx import TensorProto

from onnxfuse.compile.coverage import without_plans
from onnxfuse.errors import ModelError, OnnxfuseError, UsageError
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.plain_files import new_folder
from onnxfuse.ir.protos import has_external_data
from onnxfuse.ir.read import read
from onnxfuse.ir.save import save
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.fused_calls import Call, inferred, read_calls, read_model
from onnxfuse.runtime.plan_file import PLANS_SUFFIX, PlanFile, node_identity, read_plan_file

MODEL_NAME: Final = "model.onnx"  # the default name of a model file in Triton
VERSION: Final = "1"
DEFAULT_MAX_BATCH_SIZE: Final = 32  # the default for models with a batch dim
MAX_CHECKED: Final = 1024  # if the largest batch exceeds this, only powers of two and the largest batch are checked
DATA_TYPES: Final[dict[int, str]] = {
    TensorProto.BOOL: "TYPE_BOOL", TensorProto.STRING: "TYPE_STRING",
    TensorProto.UINT8: "TYPE_UINT8", TensorProto.UINT16: "TYPE_UINT16",
    TensorProto.UINT32: "TYPE_UINT32", TensorProto.UINT64: "TYPE_UINT64",
    TensorProto.INT8: "TYPE_INT8", TensorProto.INT16: "TYPE_INT16",
    TensorProto.INT32: "TYPE_INT32", TensorProto.INT64: "TYPE_INT64",
    TensorProto.FLOAT16: "TYPE_FP16", TensorProto.FLOAT: "TYPE_FP32", TensorProto.DOUBLE: "TYPE_FP64",
}  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """An input or output of a model."""

    name: str
    data_type: str
    dims: tuple[int, ...]  # -1 for dynamic dims
    batch: str | None  # the name of the first dim ("" if unnamed) if it is dynamic, else None


@dataclass(frozen=True)
class TritonSettings:
    """How a model is written to a repository.

    Triton passes the library's path to the system's loader, which resolves relative paths from the working directory.
    The path in config.pbtxt is therefore absolute: it begins with the repository's path on the server.
    """

    name: str | None = None  # the model's name; by default its file's name without suffix
    served_from: str | None = None  # the repository's path on the server; by default the path to which it is written
    # The largest batch that the server makes from requests; 0 for none.  If None, it is DEFAULT_MAX_BATCH_SIZE if all
    # inputs and outputs have the same dynamic first dim, else 0.
    max_batch_size: int | None = None
    overwrite: bool = False  # whether an existing model of that name is replaced, with its whole folder


def export_triton(
    source: Path, repository: Path, plans: Path | None = None, settings: TritonSettings = TritonSettings()
) -> Path:
    """Write a fused model into a model repository, and return its folder there.

    plans  the model's plan file; by default the model's path with .plans appended

    Raises UsageError if the model has no fused nodes, is already in the repository, or cannot have batches; if Triton
    does not accept its name or place; and if the plan file is missing, or lacks plans of a node or of a batch size.
    Raises ModelError if config.pbtxt cannot describe the model, or the model's weights are missing or not in its
    folder; PlanFileError if the plan file cannot be read; NativeError if onnxfuse's library is missing; OnnxfuseError
    if writing to the repository fails.
    """
    model = read_model(source)
    if not (calls := read_calls(model)):
        raise UsageError(f"'{source}' has no fused nodes; run `onnxfuse optimize` first")
    name = _checked_name(source.stem if settings.name is None else settings.name)
    served = _served_from(settings.served_from, repository)
    plans = plans or Path(f"{source}{PLANS_SUFFIX}")
    if not plans.is_file():
        what = f"'{plans}' is a directory" if plans.is_dir() else f"there is no plan file '{plans}'"
        raise UsageError(f"{what}; make the file with `onnxfuse compile`, or name it with --plans")
    library = native.library_path()
    if library is None:
        raise native.NativeError(f"the native library of onnxfuse is missing; {native.HINT}")
    file = read_plan_file(plans)
    _check_plans(calls, file, plans)
    inputs, outputs = list(_inputs(model)), list(_outputs(model))
    batch = _batch_size([*inputs, *outputs], settings.max_batch_size)
    _check_batches(calls, file, plans, {each.batch or f"{each.name}[0]" for each in inputs}, batch)
    config = config_text(model, name, str(served / name / VERSION / native.LIBRARY_NAME), settings.max_batch_size)
    copies = {library: native.LIBRARY_NAME, plans: native.LIBRARY_NAME + PLANS_SUFFIX}
    if has_external_data(model):
        return _write(copies, config, repository / name, settings.overwrite, source)
    return _write(copies | {source: MODEL_NAME}, config, repository / name, settings.overwrite)


def _checked_name(name: str) -> str:
    """Return `name`.  Raises UsageError if it cannot be both the name of a folder and a part of a URL."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        what = "Triton takes the name of its folder, which clients write into URLs"
        raise UsageError(
            f"'{name}' cannot be the model's name: {what}; give --name of letters, digits, '_', '-' and '.'"
        )
    return name


def _served_from(text: str | None, repository: Path) -> PurePosixPath | Path:
    """Return the path at which the server sees the repository.  Raises UsageError if it is relative."""
    if text is None:
        return repository.resolve()
    if not PurePosixPath(text).is_absolute():
        what = "the server would look for the library from its own working directory"
        raise UsageError(f"--served-from '{text}' is relative: {what}; give an absolute path")
    return PurePosixPath(text)


# --- the folder -------------------------------------------------------------------------------------------------------


def _write(
    copies: Mapping[Path, str], config: str, folder: Path, overwrite: bool, with_weights: Path | None = None
) -> Path:
    """Write a model's folder under a temporary name, and then rename it; an earlier folder is removed.

    copies        files to copy, each with its name in the folder
    with_weights  a model to copy together with its external weights

    Raises UsageError if `folder` exists and is not a model, or a model that must not be replaced; OnnxfuseError if
    writing fails.
    """
    try:
        if folder.exists():
            _check_replaced(folder, overwrite)
        with new_folder(folder) as part:
            (part / VERSION).mkdir()
            for source, name in copies.items():
                shutil.copyfile(source, part / VERSION / name)
            if with_weights:
                save(read(with_weights), part / VERSION / MODEL_NAME, folder=with_weights.parent)
            (part / "config.pbtxt").write_text(config, encoding="utf-8")
    except OSError as error:
        raise OnnxfuseError(f"cannot write '{folder}': {error.strerror or error}; choose another repository") from error
    return folder


def _check_replaced(folder: Path, overwrite: bool) -> None:
    if not overwrite:
        raise UsageError(f"'{folder}' is there already; give another --name, or --overwrite to replace it")
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "config.pbtxt").is_file()):
        raise UsageError(f"'{folder}' is not a model of a repository, and is not replaced; give another --name")


# --- checks of the plans ----------------------------------------------------------------------------------------------


def _check_batches(calls: Sequence[Call], file: PlanFile, path: Path, dims: Collection[str], batch: int) -> None:
    """Raise UsageError if a node has no plan for one of the batch sizes up to `batch`, the largest on the server."""
    powers = (1 << i for i in range(batch.bit_length()))
    wanted = range(1, batch + 1) if batch <= MAX_CHECKED else sorted({*powers, batch})
    lacking = min(without_plans(calls, file, dims, wanted), key=lambda each: each.size, default=None)
    if lacking:
        what = f"no plan for a batch of {lacking.size} at node '{lacking.node}' on {lacking.device.name}"
        less = f"--max-batch-size {lacking.size - 1}, or " if lacking.size > 1 else ""
        raise UsageError(f"'{path}' has {what}; give {less}`onnxfuse compile` a --shape of such batches")


def _check_plans(calls: Sequence[Call], file: PlanFile, path: Path) -> None:
    """Raise UsageError if a plan file names the operator of a node, but has no template (plans) for that node."""
    operators = {line.split()[0] for line in file.operators}
    if not any(call.op in operators for call in calls):
        raise UsageError(f"'{path}' has plans for no node of the model; make it again with `onnxfuse compile`")
    known = {(template.device, template.node) for template in file.templates}
    for device in file.devices:
        for call in calls:
            if call.op in operators and (device, node_identity(call.node)) not in known:
                raise UsageError(
                    f"'{path}' has no plans for node '{call.node.name}' on {device.name}; the model is not the one "
                    "that it was made for: make it again with `onnxfuse compile`"
                )


# --- config.pbtxt -----------------------------------------------------------------------------------------------------


def config_text(model: onnx.ModelProto, name: str, library: str, max_batch_size: int | None = None) -> str:
    """Return the configuration of a model, in protobuf's text format.

    Raises UsageError if batches are asked for and cannot be made, ModelError if a tensor has no shape, or a dtype that
    Triton does not know.
    """
    inputs, outputs = list(_inputs(model)), list(_outputs(model))
    batch = _batch_size([*inputs, *outputs], max_batch_size)
    lines = [
        f"name: {_quoted(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {batch}",
        *(line for tensor in inputs for line in _lines("input", tensor, batch > 0)),
        *(line for tensor in outputs for line in _lines("output", tensor, batch > 0)),
        "instance_group {",
        "  kind: KIND_GPU",
        "  count: 1",
        "}",
        *(["dynamic_batching {", "}"] if batch > 1 else []),
        "model_operations {",
        f"  op_library_filename: {_quoted(library)}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _lines(field: str, tensor: _Tensor, batches: bool) -> Iterator[str]:
    """Yield the lines for an input or output; its dims omit the batch dim if Triton makes batches."""
    dims = tensor.dims[1:] if batches else tensor.dims
    yield f"{field} {{"
    yield f"  name: {_quoted(tensor.name)}"
    yield f"  data_type: {tensor.data_type}"
    yield f"  dims: [ {', '.join(map(str, dims or (1,)))} ]"  # Triton has no tensors without dims
    if not dims and batches:
        yield "  reshape {"
        yield "    shape: [ ]"
        yield "  }"
    yield "}"


def _inputs(model: onnx.ModelProto) -> Iterator[_Tensor]:
    held = {initializer.name for initializer in model.graph.initializer}
    return _tensors([value for value in model.graph.input if value.name not in held])


def _outputs(model: onnx.ModelProto) -> Iterator[_Tensor]:
    """Yield the outputs of a model; onnx infers the shapes if the model does not declare all of them."""
    is_declared = all(value.type.tensor_type.HasField("shape") for value in model.graph.output)
    return _tensors((model if is_declared else inferred(model)).graph.output)


def _tensors(values: Sequence[onnx.ValueInfoProto]) -> Iterator[_Tensor]:
    for value in values:
        tensor = value.type.tensor_type
        if tensor.elem_type not in DATA_TYPES:  # Triton's onnxruntime backend lacks TYPE_BF16: server issue 8464
            what = f"'{value.name}' is of {dtype_name(tensor.elem_type)}"
            raise ModelError(f"{what}, which Triton's onnxruntime backend does not take; cast it inside the model")
        if not tensor.HasField("shape"):
            raise ModelError(f"the shape of '{value.name}' is not known, which Triton's configuration must name")
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        batch = tensor.shape.dim[0].dim_param if dims and dims[0] < 0 else None
        yield _Tensor(value.name, DATA_TYPES[tensor.elem_type], tuple(max(dim, -1) for dim in dims), batch)


def _batch_size(tensors: Sequence[_Tensor], wanted: int | None) -> int:
    """Return the size of the largest batch that Triton is allowed to make from requests; 0 for no batches.

    Raises UsageError if batches are wanted and the first dim of a tensor is static.
    """
    unfit = next((tensor.name for tensor in tensors if tensor.batch is None), None)
    if wanted is None:
        is_one = len({tensor.batch for tensor in tensors if tensor.batch}) <= 1
        return DEFAULT_MAX_BATCH_SIZE if unfit is None and is_one else 0
    if wanted and unfit is not None:
        raise UsageError(
            f"Triton cannot make batches: the first dim of '{unfit}' is not dynamic; give 0 as the largest"
        )
    return wanted
