"""The models that models.py measures, at their sizes: files, inputs, and the modules that were exported."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.ir.dtypes import Array
from onnxfuse.tuning.bound_session import Provider
from onnxfuse.verify.input_uses import integer_uses
from onnxfuse.verify.inputs import generate_inputs, model_inputs, sizes_to_try

QUANTIZED = ("int8", "dynamic8")  # dtypes of models that are exported in float32, and quantized then
MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True)
class Case:
    """A model at one size; `tool` is its name in onnxruntime's transformers tool, '' if that has none.

    `fixed`: onnxruntime is told the sizes, as it has to be for a CUDA graph of a model that computes with them.
    `groups`: the sets of models that it belongs to.
    """

    name: str
    architecture: str
    sizes: Mapping[str, int] = field(hash=False)
    tool: str = ""
    convolutions: bool = False
    fixed: bool = False
    dtype: str = "fp16"
    groups: tuple[str, ...] = ("default",)

    @property
    def file_name(self) -> str:
        return f"{self.architecture}.onnx" if self.dtype == "fp16" else f"{self.architecture}_{self.dtype}.onnx"


@dataclass(frozen=True)
class Work:
    """A case, its exported model, and where it runs."""

    case: Case
    path: Path
    provider: Provider


@functools.lru_cache(maxsize=1)
def _loaded(path: Path) -> onnx.ModelProto:
    return onnx.load(path)


@functools.lru_cache(maxsize=1)
def model_of(work: Work) -> onnx.ModelProto:
    """Return the exported model."""
    model = _loaded(work.path)
    return at_sizes(model, feeds_of(work)) if work.case.fixed else model


def at_sizes(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """Return the model with static shapes for these inputs."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.ClearField("value_info")
    for value in fixed.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
            dim.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    return fixed


def feeds_of(work: Work) -> dict[str, Array]:
    """Return the inputs, which are the same for every peer."""
    model = _loaded(work.path)
    inputs = model_inputs(model)
    sizes = {**next(sizes_to_try(inputs, {})), **work.case.sizes}
    return generate_inputs(inputs, sizes, integer_uses(model), {})


def from_models(name: str) -> Any:
    """Import and return a module of models/, which imports torch.

    Transformers would take benchmarks/kernels.py for a package of that name, which it uses where it can be imported.
    """
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    if str(MODELS) not in sys.path:
        sys.path.insert(0, str(MODELS))
    return importlib.import_module(name)


def job_of(architecture: str, dtype: str = "fp16") -> Any:
    """Return the export job of an architecture in its public size, through dynamo."""
    found = next(each for each in from_models("table").ARCHITECTURES if each.name == architecture and each.full)
    attention = found.variants[0].attention if found.variants else "sdpa"
    variant = from_models("architecture").Variant("dynamo", "dynamo", None, attention, dtype)
    return from_models("exporters").Job(found, variant, found.full)


def export(case: Case, path: Path) -> None:
    """Export the case's architecture in its public size; the file appears when it is complete."""
    job = job_of(case.architecture, "fp32" if case.dtype in QUANTIZED else case.dtype)
    exporters = from_models("exporters")
    proto = exporters.export_graph(job, exporters.build_model(job), job.variant.dtype)
    exporters.strip_traces(proto)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(proto.SerializeToString())
    if case.dtype in QUANTIZED:
        quantize(case, part)
    part.replace(path)


def quantize(case: Case, path: Path) -> None:
    """Quantize the file of a float model: in pairs around operators for int8, or in each run for dynamic8."""
    quantization = importlib.import_module("onnxruntime.quantization")
    if case.dtype == "dynamic8":
        quantization.quantize_dynamic(path, path, weight_type=quantization.QuantType.QInt8)
        return
    model = onnx.load(path)
    inputs = model_inputs(model)
    sizes = {**next(sizes_to_try(inputs, {})), **dict.fromkeys(case.sizes, 1), "seq": 64}
    feeds = iter([generate_inputs(inputs, sizes, integer_uses(model), {})])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, Array] | None:
            return next(feeds, None)

    quantization.quantize_static(path, path, Reader(), activation_type=quantization.QuantType.QUInt8,
                                 weight_type=quantization.QuantType.QInt8, per_channel=True)  # fmt: skip
