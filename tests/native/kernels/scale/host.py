"""y = x · factor, where factor is an attribute."""

import math

from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

nodes: list[FusedNode] = []


def supports(node: FusedNode, input_dtypes: tuple[str, ...], device: Device) -> str | None:
    return None if node.attributes["factor"] > 0 else "the factor must be positive"


def candidates(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> list[Plan]:
    nodes.append(node)
    x = inputs[0]
    arguments = (
        Pointer("input", 0),
        Pointer("output", 0),
        Scalar(math.prod(x.shape), "int64"),
        Scalar(node.attributes["factor"], "float32"),
    )
    return [Plan((x,), (Launch(Kernel("scale", "scale"), (1, 1, 1), (32, 1, 1), arguments),))]
