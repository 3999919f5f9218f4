"""The kernels of every fusion compile for a node that is generated from its pattern; no GPU needed.

So a new family of kernels is compiled before it has tests of its own, which know what sizes matter to it.
"""

from __future__ import annotations

import functools

import pytest
from architectures import DEVICES, H200, check_compiles
from onnx import TensorProto, numpy_helper
from sampling import sampled
from spellings import GENERATED, NEWEST, OLDEST, Spelling, Unwritable, build

from onnxfuse import Fusion, optimize
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.runtime.fused_calls import read_calls
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import Device, FusedNode, Launch, TensorSpec

# Their kernels take channels-last tensors alone, of which no pattern makes nodes; they have compile tests of their own.
CHANNELS_LAST = ("batch_norm_activation", "conv_bias_activation", "conv_transpose_bias_activation", "quantized_conv")
WITH_KERNELS = [f for f in GENERATED if f.name not in CHANNELS_LAST and find_host(f.name) is not None]
CASES = [(device, TensorProto.FLOAT16) for device in DEVICES]
CASES += [(H200, TensorProto.FLOAT), (H200, TensorProto.BFLOAT16)]

# quantized_matmul needs instructions of sm_80.
FUSIONS = [(f, *case) for f in WITH_KERNELS for case in CASES if f.name != "quantized_matmul" or case[0].arch >= 80]


@pytest.mark.parametrize(
    ("fusion", "device", "dtype"),
    sampled(FUSIONS, 4),
    ids=[f"{f.name}-sm_{d.arch}-{dtype_name(dtype)}" for f, d, dtype in FUSIONS],
)
def test_the_first_plan_of_a_generated_node_compiles(fusion: Fusion, device: Device, dtype: int) -> None:
    host = find_host(fusion.name)
    assert host is not None
    node, inputs = generated_node(fusion, dtype)
    assert host.supports(node, [spec.dtype for spec in inputs], device) is None
    steps = host.candidates(node, inputs, device)[0].steps
    assert steps
    for step in steps:
        if isinstance(step, Launch):
            check_compiles(step.kernel, device, spills=None)


@functools.cache
def generated_node(fusion: Fusion, dtype: int) -> tuple[FusedNode, list[TensorSpec]]:
    """Return the fused node of a pattern's first variant, in the newest opset that can express it, and its inputs."""
    for opset in range(NEWEST, OLDEST - 1, -1):
        try:
            unfused = build(Spelling(fusion, "first", opset, dtype=dtype))
        except Unwritable:
            continue
        model, _ = optimize(unfused.model, only=[fusion.name], verify=False)
        (call,) = read_calls(model)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        arrays = {**unfused.inputs, **constants}
        named = [(name, arrays[name]) for name in call.proto.input]
        return call.node, [TensorSpec(a.shape, a.dtype.name, constant=name in constants) for name, a in named]
    raise AssertionError(f"no opset can express {fusion.name}")
