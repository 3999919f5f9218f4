"""y = x + bias, which is added along the last axis; for float32."""

from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

nodes: list[FusedNode] = []
calls: list[tuple[str, tuple[TensorSpec, ...], Device]] = []


def supports(node: FusedNode, input_dtypes: tuple[str, ...], device: Device) -> str | None:
    if set(input_dtypes) != {"float32"}:
        return f"shift is there for float32, the node has {', '.join(input_dtypes)}"
    return None


def candidates(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> list[Plan]:
    nodes.append(node)
    calls.append((node.name, inputs, device))
    x, bias = inputs[node.operands.index("x")], inputs[node.operands.index("bias")]
    size = 1
    for length in x.shape:
        size *= length
    arguments = (
        Pointer("input", 0),
        Pointer("input", 1),
        Pointer("output", 0),
        Scalar(size, "int64"),
        Scalar(bias.shape[-1], "int32"),
    )
    step = Launch(Kernel("shift", "shift", {"D": bias.shape[-1]}), (7, 1, 1), (32, 2, 1), arguments)
    return [Plan((TensorSpec(x.shape, x.dtype),), (step,))]
