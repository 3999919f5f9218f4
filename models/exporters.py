"""Run an exporter of torch on an architecture whose weights are drawn from a seed."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import torch
from architecture import DTYPES, Architecture, Config, Input, Variant
from torch import nn

SEED = 0
STEPS = 1  # in the power of two below the standard deviation of a tensor


@dataclass(frozen=True)
class Job:
    """One file to write: a variant of an architecture at one size."""

    architecture: Architecture
    variant: Variant
    config: Config

    @property
    def file_name(self) -> str:
        """Return the name of the file, which is also its key in the index."""
        return self.variant.file_name(self.architecture.name)

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Return the graph inputs at this size."""
        return self.architecture.inputs(self.config)

    @property
    def verified_sizes(self) -> tuple[Mapping[str, int], ...]:
        """Return the sizes that onnxruntime runs."""
        only = {"batch": self.variant.only_batch} if self.variant.only_batch else {}
        return tuple({**sizes, **only} for sizes in self.architecture.sizes)

    def arguments(self, sizes: Mapping[str, int], dtype: str) -> dict[str, torch.Tensor]:
        """Return random tensors for forward(), by parameter name."""
        return {each.arg or each.name: each.draw(sizes, DTYPES[dtype]) for each in self.inputs}


def build_model(job: Job) -> nn.Module:
    """Return the torch module in eval mode, every parameter and running statistic drawn from the seed.

    In public sizes they are drawn on the GPU where there is one, which takes a tenth of the time; others are the same
    on every machine.
    """
    full = job.config is job.architecture.full
    drawn_on = "cuda" if full and torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    with torch.device(drawn_on):
        model = job.architecture.build(job.config, job.variant.attention).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            randomise(name.rsplit(".", 1)[-1], value, job.architecture.gain)
    if full and job.architecture.calibrated:
        calibrate(model, {name: x.to(drawn_on) for name, x in job.arguments(job.architecture.sizes[0], "fp32").items()})
    return model.to("cpu", DTYPES[job.variant.dtype])


def calibrate(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Set the running statistics of every BatchNormalization to those of these inputs.

    With others, rounding errors grow from layer to layer: an EfficientNet in float16 was 2 to 5 % off, by every engine.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the average of all batches
        norm.train()
    with torch.no_grad():
        model(**inputs)
    model.eval()


def randomise(name: str, value: torch.Tensor, gain: float) -> None:
    """Draw one tensor in place; untouched ones and zeros would hide errors and be merged into one initializer.

    Values are rounded to steps that float16 has too, so that the archive of models is small: a value takes some 3 bits.
    """
    if name == "running_mean":
        value.normal_(0, 0.2)
    elif name == "running_var":
        value.uniform_(0.5, 1.5)
    elif not isinstance(value, nn.Parameter):
        return  # inverse frequencies, position ids: computed, not learned
    elif value.dim() > 1:
        value.normal_(0, gain * value[0].numel() ** -0.5)
    elif "bias" in name:
        value.normal_(0, 0.1)
    else:
        value.uniform_(0.5, 1.5)
    if value.dtype == torch.float32 and value.numel() > 1:
        step = 2.0 ** math.floor(math.log2(value.std().item())) / STEPS
        value.div_(step).round_().mul_(step)


def export_graph(job: Job, model: nn.Module, dtype: str) -> onnx.ModelProto:
    """Return the model that the variant's exporter writes."""
    exporter = export_dynamo if job.variant.exporter == "dynamo" else export_torchscript
    torch.manual_seed(SEED)
    return exporter(job, model, job.arguments(job.architecture.sizes[0], dtype))


def export_dynamo(job: Job, model: nn.Module, arguments: dict[str, torch.Tensor]) -> onnx.ModelProto:
    """Export with torch.export and onnxscript; unoptimized if BatchNormalization must stay."""
    axes = {each.arg or each.name: named_axes(each.dims) for each in job.inputs}
    program = torch.onnx.export(
        model,
        kwargs=arguments,
        dynamo=True,
        opset_version=job.variant.opset,
        dynamic_shapes=axes,
        input_names=[each.name for each in job.inputs],
        output_names=[name for name, _ in job.architecture.outputs],
        optimize=not job.variant.keep_batch_norm,
        verbose=False,
    )
    return program.model_proto


def export_torchscript(job: Job, model: nn.Module, arguments: dict[str, torch.Tensor]) -> onnx.ModelProto:
    """Export with TorchScript; training=PRESERVE keeps BatchNormalization, and the model is in eval mode."""
    axes = {each.name: named_axes(each.dims) for each in job.inputs}
    axes |= {name: named_axes(dims) for name, dims in job.architecture.outputs}
    keep = job.variant.keep_batch_norm
    forward, buffer, permute = model.forward, io.BytesIO(), torch.Tensor.permute
    # This exporter fills every parameter of forward() by position, which the wrappers of transformers refuse.
    model.forward = lambda *values: as_tuple(forward(**dict(zip(arguments, values, strict=True))))
    # It writes negative axes into a Transpose, which is invalid. Axes are numbers, or one sequence of them.
    torch.Tensor.permute = lambda x, *axes: permute(x, [i % x.dim() for i in (axes if len(axes) > 1 else axes[0])])
    try:
        torch.onnx.export(
            model,
            args=tuple(arguments.values()),
            f=buffer,
            dynamo=False,
            opset_version=job.variant.opset,
            dynamic_axes=axes,
            input_names=[each.name for each in job.inputs],
            output_names=[name for name, _ in job.architecture.outputs],
            training=torch.onnx.TrainingMode.PRESERVE if keep else torch.onnx.TrainingMode.EVAL,
            do_constant_folding=not keep,
        )
    finally:
        model.forward, torch.Tensor.permute = forward, permute
    return onnx.load_from_string(buffer.getvalue())


def named_axes(dims: tuple[str | int, ...]) -> dict[int, str]:
    """Return the symbolic dims by axis."""
    return {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)}


def strip_traces(proto: onnx.ModelProto) -> None:
    """Drop stack traces, per-value notes and repeated shapes, most of a tiny file; the model's own metadata stays."""
    graph = proto.graph
    graph.ClearField("metadata_props")
    known = {each.name for each in graph.initializer}
    shapes = [each for each in graph.value_info if each.name not in known]
    graph.ClearField("value_info")
    graph.value_info.extend(shapes)
    functions = [node for function in proto.functions for node in function.node]
    for item in [*graph.node, *functions, *graph.value_info, *graph.input, *graph.output, *graph.initializer]:
        item.ClearField("doc_string")
        item.ClearField("metadata_props")


def number_values(proto: onnx.ModelProto) -> None:
    """Name nodes and values the way torch wrote them before scopes came into the names: `Add_12` gives `12`."""
    kept = {value.name for value in proto.graph.output}
    names: dict[str, str] = {}
    for position, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{position}"
        for output in node.output:
            names[output] = output if output in kept or not output else str(len(names))
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    if any(attribute.HasField("g") for node in proto.graph.node for attribute in node.attribute):
        raise ValueError("number_values: nodes without subgraphs required")


def as_tuple(outputs: object) -> tuple[torch.Tensor, ...]:
    """Return the outputs of forward() in the order of the graph's."""
    if isinstance(outputs, torch.Tensor):
        return (outputs,)
    return tuple(outputs.values()) if isinstance(outputs, dict) else tuple(outputs)
