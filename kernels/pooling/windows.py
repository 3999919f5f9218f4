"""The windows of a pooling node: read its attributes, and compute sizes of y and padding as onnxruntime does.

A window may be larger than the padded x.  onnxruntime rounds quotients towards 0, as C++ does, so it still counts one
window if the window exceeds the padded x by less than the stride.  If the count is negative, onnxruntime raises an
error, and so does `windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.runtime.plan import FusedNode
from onnxfuse.runtime.symint import is_symbolic, maximum, minimum

AXES: Final = (1, 2, 3)  # supported numbers of spatial axes
SAME: Final = ("SAME_UPPER", "SAME_LOWER")
AUTO_PADS: Final = ("NOTSET", "VALID", *SAME)


@dataclass(frozen=True)
class Window:
    """A window along one axis: element i of y reduces x[i * stride - pad_begin + k * dilation] over k.

    k runs from 0 to `kernel` - 1, and i from 0 to `y_size` - 1; positions outside of the `size` elements of x are
    padding.
    """

    size: int
    y_size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_begin: int = 0
    pad_end: int = 0


UNIT: Final = Window(1, 1, 1)  # the window along an axis that the node lacks


def unsupported_window(node: FusedNode) -> str | None:
    """Return a message that names an unsupported attribute; None if all are supported."""
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
    """Return why the kernel does not support the padding that auto_pad could need; None if it does.

    The padding of auto_pad is negative if the stride exceeds the window.  Negative padding at the end of x would
    exclude elements from a mean, which the kernel does not support.
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

    Raises ValueError if x and the window have different numbers of axes, or if the padded x is so much smaller than the
    window that onnxruntime raises an error, too.
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
    """Return an attribute as a tuple of integers; `default` if it is absent or empty."""
    value = node.attributes.get(name) or default
    if not isinstance(value, list | tuple):
        raise TypeError(f"attribute {name} is {value!r}; required a list of integers")
    return tuple(int(each) for each in value)


def _automatic_pads(auto_pad: str, size: int, kernel: int, stride: int) -> tuple[int, int] | None:
    """Return the padding before and after x by auto_pad; None if auto_pad refers to the attribute pads.

    As in onnxruntime, the padding of SAME_UPPER and SAME_LOWER ignores dilations.  It is negative if the stride exceeds
    the window, and halves are rounded towards 0 as in C++.
    """
    if auto_pad == "NOTSET":
        return None
    if auto_pad == "VALID":
        return 0, 0
    needed = kernel - 1 - (size - 1) % stride
    begin = _divided(needed + (auto_pad == "SAME_LOWER"), 2)
    return begin, needed - begin


def _output_size(size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int], ceil_mode: bool) -> int:
    """Return the number of windows.

    With ceil_mode the last window may end beyond the padding after x, but it begins before that padding.
    """
    room = size + sum(padding) - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return _divided(room, stride) + 1
    count = -(-room // stride) + 1
    inside: int = minimum(count, maximum(count - 1, -(-(size + padding[0]) // stride)))
    return inside


def _divided(number: int, divisor: int) -> int:
    """Return the quotient rounded towards 0, as in C++; for a symbolic number, one expression valid for all sizes."""
    if divisor == 1 or (not is_symbolic(number) and number >= 0):
        return number // divisor
    quotient: int = maximum(number, 0) // divisor - maximum(-number, 0) // divisor
    return quotient
