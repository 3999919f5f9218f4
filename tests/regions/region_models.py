"""Small models in ONNX text for the tests of regions, and their regions as the optimized model has them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
from architectures import H200
from kernel_hosts import first_plan, host_of, require_support
from region_drafts import RegionProgram
from runtimes import open_on_cpu

from onnxfuse import Report, optimize
from onnxfuse.ir.dtypes import Array
from onnxfuse.runtime.plan import FusedNode, Plan, TensorSpec
from onnxfuse.verify.ort_session import from_ort_value, to_ort_value

INPUTS = "float[2, 3, 4] x, float[2, 3, 4] y, int64[2, 3, 4] i, bool[2, 3, 4] b, float16[2, 3, 4] h"


def parsed(nodes: str, *, opset: int = 17, inputs: str = INPUTS, outputs: str = "z") -> onnx.ModelProto:
    """Return a model of these nodes; `c := int64[1] {2}` is a constant, and the types of the outputs are inferred."""
    nodes = re.sub(r"(\w+) := ([^}]+})", r"\1 = Constant <value = \2> ()", nodes)
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    declared = ", ".join(f"float[unknown] {name}" for name in outputs.split())
    model = onnx.parser.parse_model(f"{head} g ({inputs}) => ({declared}) {{ {nodes} }}")
    for output in model.graph.output:
        output.ClearField("type")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    del model.graph.output[:]
    model.graph.output.extend(inferred.graph.output)
    return model


@dataclass(frozen=True)
class Region:
    """A fused node that is a region."""

    node: onnx.NodeProto
    attributes: Mapping[str, Any]

    @property
    def program(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.attributes["program"])
        return parsed

    @property
    def ops(self) -> list[str]:
        """The operators of the program, without constants."""
        return [op for op, *_ in self.program["ops"] if op != "Constant"]


def regions(model: onnx.ModelProto) -> list[Region]:
    """Return the regions of an optimized model."""
    named = [(node, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}) for node in model.graph.node]
    texts = [(node, {k: v.decode() if isinstance(v, bytes) else v for k, v in own.items()}) for node, own in named]
    return [Region(node, own) for node, own in texts if own.get("fusion") == "region"]


def optimized(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, Report]:
    """Return the optimized model, which was verified."""
    result, report = optimize(model, **options)
    onnx.checker.check_model(result)
    assert report.verified.passed, report.verified.reason
    assert not report.dropped, report.dropped
    return result, report


def run(model: onnx.ModelProto, feeds: Mapping[str, Array], names: Sequence[str] = ()) -> dict[str, Array]:
    """Return what onnxruntime computes for outputs, or for other tensors, without its graph optimizations."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    known = {output.name for output in shown.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    session = open_on_cpu(shown, optimize=False)
    wanted = list(names) or [output.name for output in session.get_outputs()]
    used = {each.name: to_ort_value(feeds[each.name]) for each in session.get_inputs()}
    values = session.run_with_ort_values(wanted, used)
    return dict(zip(wanted, map(from_ort_value, values), strict=True))


def draw(model: onnx.ModelProto, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Return values for the inputs of a model; names of dims are given by `sizes`."""
    random, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or (sizes or {}).get(d.dim_param, 5) for d in kind.shape.dim]
        drawn = random.standard_normal(shape) * 2
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = (drawn > 0) if dtype.kind == "b" else drawn.astype(dtype)
    return feeds


def drafted(region: Region, operands: Sequence[Array]) -> RegionProgram:
    """Return the program of a region with its operands, as the tests of kernels have it."""
    own, names = region.program, region.attributes["operands"].split()
    return RegionProgram(own["ops"], own["outputs"], own["dtypes"], dict(zip(names, operands, strict=True)))


def plan_of(region: Region, operands: Sequence[TensorSpec]) -> Plan:
    """Return the plan of a region, for which there must be a kernel."""
    node = FusedNode.read(region.node.name, region.attributes)
    require_support(host_of("region"), node, [spec.dtype for spec in operands], H200)
    return first_plan(node, operands, H200)


def assert_programs_agree(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> int:
    """Fail unless each region has a kernel, and its program computes what its function does; return how many there are.

    The program becomes an ONNX model again, with which the tests of kernels compare what kernels compute for it.
    """
    found = regions(model)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    names = [name for region in found for name in (*region.node.input, *region.node.output)]
    wanted = dict.fromkeys(name for name in names if name not in constants and name not in feeds)
    values = {**feeds, **constants, **run(model, feeds, list(wanted))}
    for region in found:
        program = drafted(region, [values[name] for name in region.node.input])
        types, ranks = region.attributes["output_types"], region.attributes["output_ranks"]
        for name, dtype, rank, result in zip(region.node.output, types, ranks, program.expected(), strict=True):
            assert result.dtype == onnx.helper.tensor_dtype_to_np_dtype(dtype)
            assert result.ndim == rank
            assert result.shape == values[name].shape, (region.node.name, name)
            assert_close(result, values[name], f"{region.node.name}: {region.program}")
        plan = plan_of(region, program.specs())
        assert [spec.shape for spec in plan.outputs] == [values[name].shape for name in region.node.output]
    return len(found)


def assert_close(found: Array, wanted: Array, message: str) -> None:
    """Fail unless arrays are equal up to some roundings of their dtype; integers and bools must be equal."""
    if wanted.dtype.kind in "iub":
        np.testing.assert_array_equal(found, wanted, err_msg=message)
        return
    tolerance = {"float64": 1e-12, "float32": 2e-5}.get(wanted.dtype.name, 1e-2)
    largest = np.abs(wanted[np.isfinite(wanted)], dtype=np.float64).max(initial=1e-30)
    np.testing.assert_allclose(
        found.astype(np.float64), wanted.astype(np.float64), rtol=tolerance, atol=tolerance * largest, err_msg=message
    )


def left_by_onnxruntime(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Return the operators of a model after onnxruntime's graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "left.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "left.onnx").graph.node)
