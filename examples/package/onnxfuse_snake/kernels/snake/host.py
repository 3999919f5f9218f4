"""The plan of snake: snake.cu."""

from collections.abc import Sequence

from onnxfuse.kernels.elementwise.elements import element_plan
from onnxfuse.kernels.tensors import (
    STORAGE,
    Defines,
    check_element_count,
    operand_pointer,
    required_spec,
    unsupported_choice,
    unsupported_dtype,
)
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec


def supports(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node; None if one does."""
    return unsupported_dtype(node, dtypes) or unsupported_choice(node, "form", ("product", "quotient"), "product")


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan, for x (batch, channels, length), or (batch, length, channels) with layout="nhwc".

    Raises ValueError if alpha or gain has not one value for each channel.
    """
    x, alpha, gain = (required_spec(node, inputs, name) for name in ("x", "alpha", "gain"))
    last = node.text("layout", "nchw") == "nhwc"
    channels, length = (x.shape[2], 1) if last else x.shape[1:]  # and the elements from one channel to the next
    check_element_count(node, "alpha", alpha, channels)
    check_element_count(node, "gain", gain, channels)
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    defines: Defines = {
        "X_T": STORAGE[x.dtype],
        "ALPHA_T": STORAGE[alpha.dtype],
        "GAIN_T": STORAGE[gain.dtype],
        "Y_T": STORAGE[y.dtype],
        "CHANNELS": channels,
        "CHANNELS_LAST": int(last),
        "QUOTIENT": int(node.text("form", "product") == "quotient"),
    }
    pointers = [operand_pointer(node, name) for name in ("x", "alpha", "gain")]
    arguments = [*pointers, Pointer("output", 0), Scalar(length, "int64")]
    return [element_plan(node, inputs, y, defines, arguments, device)]
