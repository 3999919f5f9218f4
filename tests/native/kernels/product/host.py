"""y = x w + bias by cuBLASLt, for x of any rank."""

import math

from onnxfuse.runtime.plan import Device, FusedNode, Matmul, Matrix, Plan, Pointer, TensorSpec

devices: list[Device] = []


def supports(node: FusedNode, input_dtypes: tuple[str, ...], device: Device) -> str | None:
    return None


def candidates(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> list[Plan]:
    devices.append(device)
    x, w, _ = inputs
    (k, n), m = w.shape, math.prod(x.shape[:-1])
    y = TensorSpec((*x.shape[:-1], n), node.output_dtypes[0])
    step = Matmul(
        Matrix(Pointer("input", 0), x.dtype, m, k, k),
        Matrix(Pointer("input", 1), w.dtype, k, n, n),
        Matrix(Pointer("output", 0), y.dtype, m, n, n),
        False,
        bias=Pointer("input", 2),
        tf32=device.tf32,
        aligned=all(each.aligned for each in inputs),
        workspace=Pointer("scratch", 0),
        workspace_bytes=4096,
    )
    return [Plan((y,), (step,), (4096,))]
