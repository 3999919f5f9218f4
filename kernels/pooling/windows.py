"""The windows of a pooling node: its attributes, the sizes of y and the padding, as onnxruntime computes them.

A window may be larger than x with its padding.  onnxruntime rounds quotients towards 0, as C++ does, so that it still
counts one window where the excess is less than the stride.  Where it counts fewer than 0, it raises an error, and so
does `windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.runtime.plan import FusedNode
from onnxfuse.runtime.symint import is_symbolic, maximum, minimum

AXES: Final = (1, 2, 3)  # how many spatial axes a window may have
SAME: Final = ("SAME_UPPER", "SAME_LOWER")
AUTO_PADS: Final = ("NOTSET", "VALID", *SAME)


@dataclass(frozen=True)
class Window:
    """A window along one axis: y has `y_size` elements, and element i is of x[i * stride - pad_begin + k * dilation].

    k goes from 0 to `kernel` - 1; positions outside of x, which has `size` elements, are padding.
    """

    size: int
    y_size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_begin: int = 0
    pad_end: int = 0


UNIT: Final = Window(1, 1, 1)  # for an axis that a node does not have


def unsupported_window(node: FusedNode) -> str | None:
    """Say which attribute the kernels do not have; None if they have all."""
    kernel = _integers(node, "kernel_shape", ())
    axes = len(kernel)
    if axes not in AXES:
        return f"{node.fusion}: the window has {axes} axes; the kernel takes 1 to {max(AXES)}"
    if node.text("auto_pad", "NOTSET") not in AUTO_PADS:
        return f"{node.fusion}: auto_pad is {node.text('auto_pad')}; the kernel has {', '.join(AUTO_PADS)}"
    for name, count in (("strides", axes), ("dilations", axes), ("pads", 2 * axes)):
        found = _integers(node, name, ())
        if found and len(found) != count:
            return f"{node.fusion}: {name} is {list(found)}; required {count} numbers"
    if min(_integers(node, "pads", ()), default=0) < 0:
        return f"{node.fusion}: pads are {list(_integers(node, 'pads', ()))}; required no less than 0"
    return _unsupported_padding(node, kernel)


def _unsupported_padding(node: FusedNode, kernel: Sequence[int]) -> str | None:
    """Return why the kernel cannot take the padding that auto_pad may ask for; None if it can.

    That padding is negative where a stride passes the window.  At the end of x it then leaves elements out of a mean.
    """
    strides, dilations = (_integers(node, name, (1,) * len(kernel)) for name in ("strides", "dilations"))
    is_same = node.fusion == "average_pool" and node.text("auto_pad", "NOTSET") in SAME
    if is_same and any(min(d, k) > 1 and s > k for k, s, d in zip(kernel, strides, dilations, strict=True)):
        return (
            f"{node.fusion}: with auto_pad, strides of {list(strides)} pass the window, whose dilations are "
            f"{list(dilations)}; the kernel takes no negative padding"
        )
    return None


def windows(node: FusedNode, shape: Sequence[int]) -> tuple[Window, ...]:
    """Return the windows along the spatial axes of x, which is (n, *spatial, channels).

    Raises ValueError if x has other axes than the window, or its padded size is so far below that of the window that
    onnxruntime raises an error, too.
    """
    kernel = _integers(node, "kernel_shape", ())
    axes = len(kernel)
    if len(shape) != axes + 2:
        raise ValueError(f"{node.fusion}: x has shape {list(shape)}; required {axes} axes between n and channels")
    strides, dilations = (_integers(node, name, (1,) * axes) for name in ("strides", "dilations"))
    pads = _integers(node, "pads", (0,) * 2 * axes)
    auto_pad, ceil_mode = node.text("auto_pad", "NOTSET"), bool(node.integer("ceil_mode", 0))
    found = []
    for i, size in enumerate(shape[1:-1]):
        padding = _automatic_pads(auto_pad, size, kernel[i], strides[i]) or (pads[i], pads[axes + i])
        y_size = _output_size(size, kernel[i], strides[i], dilations[i], padding, ceil_mode)
        if y_size < 0:
            least = (kernel[i] - 1) * dilations[i] + 2 - 2 * strides[i]
            raise ValueError(
                f"{node.fusion}: x has shape {list(shape)}, and padding of {sum(padding)} on axis {i + 1}; "
                f"required at least {least} elements with it, for a window of {kernel[i]} and a stride of {strides[i]}"
            )
        found.append(Window(size, y_size, kernel[i], strides[i], dilations[i], *padding))
    return tuple(found)


def _integers(node: FusedNode, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return an attribute that is a list of integers; `default` if it is absent or empty."""
    value = node.attributes.get(name) or default
    if not isinstance(value, list | tuple):
        raise TypeError(f"attribute {name} is {value!r}; required a list of integers")
    return tuple(int(each) for each in value)


def _automatic_pads(auto_pad: str, size: int, kernel: int, stride: int) -> tuple[int, int] | None:
    """Return the padding before and after x that auto_pad asks for; None if it leaves that to pads.

    As in onnxruntime, the padding of SAME_UPPER and SAME_LOWER ignores dilations.  It is negative where the stride
    passes the window, and is halved as C++ halves.
    """
    if auto_pad == "NOTSET":
        return None
    if auto_pad == "VALID":
        return 0, 0
    needed = kernel - 1 - (size - 1) % stride
    begin = _divided(needed + (auto_pad == "SAME_LOWER"), 2)
    return begin, needed - begin


def _output_size(size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int], ceil_mode: bool) -> int:
    """Return the number of windows; with ceil_mode the last one may end outside the padding, but begins before it."""
    room = size + sum(padding) - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return _divided(room, stride) + 1
    count = -(-room // stride) + 1
    inside: int = minimum(count, maximum(count - 1, -(-(size + padding[0]) // stride)))
    return inside


def _divided(number: int, divisor: int) -> int:
    """Return a quotient rounded towards 0, as C++ does; of a symbolic number it is one expression for all sizes."""
    if divisor == 1 or (not is_symbolic(number) and number >= 0):
        return number // divisor
    quotient: int = maximum(number, 0) // divisor - maximum(-number, 0) // divisor
    return quotient
