"""Write model repositories for Triton Inference Server, whose onnxruntime backend runs fused nodes as kernels.

A repository has a folder for each model:

    <model>/config.pbtxt
    <model>/1/model.onnx                the fused model, and its weights if they are in files of their own
    <model>/1/libonnxfuse.so            the native library, which config.pbtxt names
    <model>/1/libonnxfuse.so.plans      its plan file, which the library finds beside itself

The fields of config.pbtxt are those of ModelConfig in triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from onnxfuse.errors import ModelError, UsageError
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.external_data import external_files, file_outside
from onnxfuse.runtime.fused_calls import inferred, read_calls, read_model
from onnxfuse.runtime.plan_file import PLANS_SUFFIX, PlanFile, node_identity, read_plan_file

LIBRARY_NAME: Final = "libonnxfuse.so"
VERSION: Final = "1"
DEFAULT_MAX_BATCH_SIZE: Final = 32  # for models that take batches
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
    dims: tuple[int, ...]  # -1 for those that are dynamic
    batch: str | None  # the name of the first dim, "" if it has none; None if there is no dynamic first dim


def export_triton(
    source: Path,
    repository: Path,
    *,
    plans: Path | None = None,
    name: str | None = None,
    served_from: str | None = None,
    max_batch_size: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a fused model into a model repository, and return its folder there.

    plans           its plan file; by default the one beside it, which has its name and .plans behind it
    name            of the model in the repository; by default that of the file
    served_from     where the server will see the repository; by default where it is written: Triton passes the path of
                    the library to the system's loader, which takes it from the working directory if it is relative
    max_batch_size  the largest batch that the server makes of requests, 0 for none; by default 0 unless one dynamic dim
                    is the first of all inputs and outputs
    overwrite       whether a model of that name may be replaced

    Raises UsageError if the model is there, or cannot have batches, or its plan file is missing or lacks a node;
    ModelError if the model cannot be described, PlanFileError, NativeError if the library is missing.
    """
    plans = plans or source.with_name(source.name + PLANS_SUFFIX)
    if not plans.is_file():
        raise UsageError(f"there is no plan file '{plans}'; make it with `onnxfuse compile`, or name it with --plans")
    library = native.library_path()
    if library is None:
        raise native.NativeError(f"the native library of onnxfuse is missing; {native.HINT}")
    model = read_model(source)
    _check_plans(model, read_plan_file(plans), plans)
    files = external_files(model)
    if outside := file_outside(source.parent, files):
        raise UsageError(f"weights of '{source}' are in '{outside}', which is not in its folder")
    name = name or source.stem
    folder = repository / name
    if folder.exists() and not overwrite:
        raise UsageError(f"'{folder}' is there already; give another --name, or --overwrite to replace it")
    served = Path(served_from) if served_from else repository.resolve()
    config = config_text(model, name, str(served / name / VERSION / LIBRARY_NAME), max_batch_size)
    copies = {source: "model.onnx", library: LIBRARY_NAME, plans: LIBRARY_NAME + PLANS_SUFFIX}
    _copy(copies | {source.parent / file: file for file in files}, folder / VERSION)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return folder


def _copy(copies: Mapping[Path, str], folder: Path) -> None:
    """Copy files into a folder, which is made, under other names."""
    for source, name in copies.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _check_plans(model: onnx.ModelProto, file: PlanFile, path: Path) -> None:
    """Raise UsageError if a node would have no template where its operator is registered."""
    operators = {line.split()[0] for line in file.operators}
    calls = read_calls(model)
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
    """Yield an input or output; its dims do not show the batch where Triton makes batches."""
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
    """Yield the outputs, with shapes that onnx infers where the model declares none."""
    is_declared = all(value.type.tensor_type.HasField("shape") for value in model.graph.output)
    return _tensors((model if is_declared else inferred(model)).graph.output)


def _tensors(values: Sequence[onnx.ValueInfoProto]) -> Iterator[_Tensor]:
    for value in values:
        tensor = value.type.tensor_type
        if tensor.elem_type not in DATA_TYPES:  # Triton's TYPE_BF16 is one of other backends: issue 8464 of its server
            what = f"'{value.name}' is of {dtype_name(tensor.elem_type)}"
            raise ModelError(f"{what}, which Triton's onnxruntime backend does not take; cast it inside the model")
        if not tensor.HasField("shape"):
            raise ModelError(f"the shape of '{value.name}' is not known, which Triton's configuration must name")
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        batch = tensor.shape.dim[0].dim_param if dims and dims[0] < 0 else None
        yield _Tensor(value.name, DATA_TYPES[tensor.elem_type], tuple(max(dim, -1) for dim in dims), batch)


def _batch_size(tensors: Sequence[_Tensor], wanted: int | None) -> int:
    """Return the largest batch.  Raises UsageError if batches are wanted and a first dim is not dynamic."""
    unfit = next((tensor.name for tensor in tensors if tensor.batch is None), None)
    if wanted is None:
        is_one = len({tensor.batch for tensor in tensors if tensor.batch}) <= 1
        return DEFAULT_MAX_BATCH_SIZE if unfit is None and is_one else 0
    if wanted and unfit is not None:
        raise UsageError(
            f"Triton cannot make batches: the first dim of '{unfit}' is not dynamic; give 0 as the largest"
        )
    return wanted
