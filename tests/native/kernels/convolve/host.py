"""y = conv(x, w) + bias by the first engine that cuDNN proposes, for channels first, without padding."""

import dataclasses

from onnxfuse.runtime import run_plan
from onnxfuse.runtime.plan import Convolution, Device, FusedNode, Plan, Pointer, TensorSpec

devices: list[Device] = []


def supports(node: FusedNode, input_dtypes: tuple[str, ...], device: Device) -> str | None:
    return None


def candidates(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> list[Plan]:
    devices.append(device)
    x, w, _ = inputs
    (n, c, *sizes), (m, _, *kernel) = x.shape, w.shape
    y_sizes = tuple(size - tap + 1 for size, tap in zip(sizes, kernel, strict=True))
    one, zero = (1,) * len(sizes), (0,) * len(sizes)
    step = Convolution(
        n, c, m, tuple(sizes), y_sizes, tuple(kernel), one, one, zero, zero, 1, x.dtype,
        Pointer("input", 0), Pointer("input", 1), Pointer("output", 0), Pointer("input", 2),
        channels_last=False, w_channels_last=False, tf32=device.tf32, aligned=all(each.aligned for each in inputs),
        workspace=Pointer("scratch", 0), workspace_bytes=4096,
    )  # fmt: skip
    engine = run_plan.convolution_engines(step, device.ordinal, 1)[0]
    step = dataclasses.replace(step, engine=engine.words)
    return [Plan((TensorSpec((n, m, *y_sizes), node.output_dtypes[0]),), (step,), (4096,))]
