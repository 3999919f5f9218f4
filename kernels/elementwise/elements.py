"""The host side of elementwise.cuh: divides elements among threads, and passes the parameters of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STREAMED_FROM_BYTES,
    Defines,
    element_count,
    is_released,
    is_streamed,
    known_equal,
    macro,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Scalar, TensorSpec
from onnxfuse.runtime.symint import always, estimate, is_symbolic, maximum, minimum

THREADS: Final = 128  # threads per block
SMALL_THREADS: Final = 256  # threads per block, if a tensor has few vectors
SMALL_VECTORS: Final = 128  # vectors per multiprocessor below which narrower vectors are 5-10 % faster
SMALL_WIDTH: Final = 2  # least number of elements per vector of a small tensor; 1 if it has an odd number of elements
RESIDENT_THREADS: Final = 2048  # threads that fit on a multiprocessor


@dataclass(frozen=True)
class VectorTiling:
    """The macros of elementwise.cuh: elements per vector, threads per block, vectors per thread."""

    width: int
    threads: int
    chunks: int


def vector_tiling(count: int, max_width: int, device: Device) -> VectorTiling:
    """Return the tiling for `count` elements, with at most `max_width` elements per load.

    For a symbolic count, the tiling is one of three: one narrow, one wide, or two wide vectors per thread.
    """
    small = SMALL_VECTORS * device.multiprocessors
    if is_symbolic(count):
        return _vector_tiling_of_any_count(count, max_width, device)
    chosen = max_width
    while chosen > 1 and count // chosen < small and (chosen > SMALL_WIDTH or count % chosen):
        chosen //= 2
    vectors = count // chosen
    if vectors < 4 * small:
        return VectorTiling(chosen, SMALL_THREADS, 1)
    resident = RESIDENT_THREADS * device.multiprocessors
    two_make_all_resident = resident < vectors <= 2 * resident
    return VectorTiling(chosen, THREADS, 2 if two_make_all_resident else 1)


def _vector_tiling_of_any_count(count: int, max_width: int, device: Device) -> VectorTiling:
    """Return one of three divisions among threads, chosen by the estimated count; each is correct for every count."""
    vectors, resident = estimate(count // max_width), RESIDENT_THREADS * device.multiprocessors
    if vectors < SMALL_VECTORS * device.multiprocessors:
        return VectorTiling(min(max_width, SMALL_WIDTH), SMALL_THREADS, 1)
    return VectorTiling(max_width, THREADS, 2 if vectors > resident and vectors <= 2 * resident else 1)


def activation_parameters(node: FusedNode) -> tuple[float, float]:
    """Return alpha and beta of the node's activation; without such attributes, the activation's defaults."""
    name = node.text("activation", "none")
    activation = ACTIVATIONS["leaky_relu" if name == PRELU else name]
    return node.number("alpha", activation.alpha), node.number("beta", activation.beta)


def activation_arguments(node: FusedNode) -> list[Argument]:
    """Return alpha and beta of the node's activation as kernel arguments."""
    return [Scalar(value, "float32") for value in activation_parameters(node)]


def element_plan(
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    output: TensorSpec,
    defines: Defines,
    arguments: Sequence[Argument],
    device: Device,
    multiples: Sequence[int] = (),
) -> Plan:
    """Return a plan of one launch over all elements of `output`.

    The vector width divides each of `multiples`; alignment and dtypes may require a narrower one.
    """
    count = element_count(output)
    if not count:
        return Plan((output,), ())
    read = [tensor for tensor in inputs if known_equal(tensor.shape, output.shape)]
    max_width = vector_width([*read, output], *multiples, weights=inputs)
    count_bytes = sum(ITEM_BYTES[tensor.dtype] for tensor in (*read, output))
    stream = is_streamed([*read, output], f"count > {STREAMED_FROM_BYTES // count_bytes}")
    tiling = vector_tiling(count, max_width, device)
    largest = maximum(*map(element_count, (*inputs, output)))
    return Plan((output,), (element_launch(node, tiling, output, stream, defines, arguments, device, largest),))


def element_launch(
    node: FusedNode,
    tiling: VectorTiling,
    output: TensorSpec,
    stream: int | str,
    defines: Defines,
    arguments: Sequence[Argument],
    device: Device,
    largest: int = 0,
) -> Launch:
    """Return the launch of a kernel of elementwise.cuh.

    `stream` is 1 if the output is to be evicted from L2 first. `largest` is the element count of the largest tensor, if
    that is not the output.
    """
    count = element_count(output)
    vectors, block = count // tiling.width, tiling.threads * tiling.chunks
    rest = minimum(1, count % tiling.width)
    whole = vectors % block
    constants: Defines = {
        "WHOLE": int(always(lambda: whole == 0, whole)),
        "REST": macro(lambda: rest, f"count % {tiling.width} > 0", rest),
        "WIDTH": tiling.width, "THREADS": tiling.threads, "CHUNKS": tiling.chunks, "STREAMED": stream,
        "INDEX": "u32" if maximum(count, largest) < 2**31 else "u64", "PRECISE": int(output.dtype == "float32"),
        "ACTIVATION": node.text("activation", "none"),
    }  # fmt: skip
    blocks = -(-vectors // block) + rest
    constants["RELEASE"] = is_released(blocks, device)
    kernel = Kernel(node.fusion, node.fusion, {**defines, **constants})
    threads, pdl = (tiling.threads, 1, 1), device.has_pdl
    return Launch(kernel, (blocks, 1, 1), threads, (*arguments, Scalar(count, "int64")), pdl=pdl)
