"""y = the first `count` rows of x + bias, where `count` is a number; for float32."""

from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec


def supports(node: FusedNode, input_dtypes: tuple[str, ...], device: Device) -> str | None:
    return None


def candidates(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> list[Plan]:
    x, number, bias = inputs
    (count,), (width,) = number.shape, bias.shape
    numbers = Scalar(count * width, "int64"), Scalar(width, "int32")
    arguments = (Pointer("input", 0), Pointer("input", 2), Pointer("output", 0), *numbers)
    step = Launch(Kernel("shift", "shift", {"D": width}), (7, 1, 1), (32, 2, 1), arguments)
    return [Plan((TensorSpec((count, width), x.dtype),), (step,))]
