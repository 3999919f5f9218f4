"""y = (x - mean(x)) · scale for each row: in one launch, or with `steps = 2` in two, through scratch memory.

The second launch is in clusters. With `steps = 0` the mean is left out, which shows what a launch costs.
"""

import math

from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, TensorSpec

BLOCK = 128


def supports(node: FusedNode, input_dtypes: tuple[str, ...], device: Device) -> str | None:
    return None if set(input_dtypes) == {"float32"} else "row_center takes float32 only"


def candidates(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> list[Plan]:
    x = inputs[0]
    rows = math.prod(x.shape[:-1])
    source, scale = Pointer("input", 0), Pointer("input", 1)
    target, means = Pointer("output", 0), Pointer("scratch", 0)

    def launch(entry: str, *arguments: Pointer, columns: int = 1, cluster: int = 1, shared: int = 0) -> Launch:
        kernel = Kernel("row_center", entry, {"D": x.shape[-1], "BLOCK": BLOCK})
        return Launch(kernel, (rows, columns, 1), (BLOCK, 1, 1), arguments, shared, cluster)

    steps = node.attributes["steps"]
    if steps == 0:
        return [Plan((x,), (launch("row_scale", source, scale, target, columns=-(-x.shape[-1] // BLOCK)),))]
    if steps == 1:
        return [Plan((x,), (launch("row_center", source, scale, target),))]
    cluster = 2 if device.arch >= 90 and rows % 2 == 0 else 1
    first = launch("row_means", source, means, shared=64 * 1024)
    second = launch("row_center_by", source, scale, means, target, cluster=cluster)
    return [Plan((x,), (first, second), (4 * rows,))]
