"""How elements are divided among threads: the host side of elementwise.cuh, and the parameters of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.tensors import PDL_ARCH, Defines, element_count, is_streamed, vector_width
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Scalar, TensorSpec

THREADS: Final = 128  # of a block
SMALL_THREADS: Final = 256  # of a block, where a tensor has few vectors
SMALL_VECTORS: Final = 128  # per multiprocessor: with fewer vectors, narrower ones are 5-10 % faster
SMALL_WIDTH: Final = 2  # elements; vectors are narrowed down to this
RESIDENT_THREADS: Final = 2048  # of a multiprocessor


@dataclass(frozen=True)
class VectorTiling:
    """The constants of elementwise.cuh: elements of a vector, threads of a block, vectors of a thread."""

    width: int
    threads: int
    chunks: int


def vector_tiling(count: int, max_width: int, device: Device) -> VectorTiling:
    """Return the tiling for `count` elements, of which one load takes at most `max_width`."""
    small = SMALL_VECTORS * device.multiprocessors
    chosen = max_width
    while chosen > 1 and count // chosen < small and (chosen > SMALL_WIDTH or count % chosen):
        chosen //= 2
    vectors = count // chosen
    if vectors < 4 * small:
        return VectorTiling(chosen, SMALL_THREADS, 1)
    resident = RESIDENT_THREADS * device.multiprocessors
    two_make_all_resident = resident < vectors <= 2 * resident
    return VectorTiling(chosen, THREADS, 2 if two_make_all_resident else 1)


def activation_parameters(node: FusedNode) -> tuple[float, float]:
    """Return alpha and beta of the node's activation, which are its defaults where the node has no such attribute."""
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
    """Return a plan of one launch over all elements of `output`; inputs that have its shape are read once.

    The width of a vector divides each of `multiples`; alignment and dtypes may ask for a narrower one.
    """
    count = element_count(output)
    if not count:
        return Plan((output,), ())
    read = [tensor for tensor in inputs if tensor.shape == output.shape]
    max_width = vector_width([*read, output], *multiples, weights=inputs)
    tiling, stream = vector_tiling(count, max_width, device), is_streamed([*read, output])
    largest = max(map(element_count, (*inputs, output)))
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

    `stream` is 1 where the output shall leave the L2 cache first; `largest` counts the elements of the largest tensor,
    if that is not the output.
    """
    count = element_count(output)
    vectors, block = count // tiling.width, tiling.threads * tiling.chunks
    rest = int(count % tiling.width > 0)
    constants = {
        "WHOLE": int(vectors % block == 0), "REST": rest,
        "WIDTH": tiling.width, "THREADS": tiling.threads, "CHUNKS": tiling.chunks, "STREAMED": stream,
        "INDEX": "u32" if max(count, largest) < 2**31 else "u64", "PRECISE": int(output.dtype == "float32"),
        "ACTIVATION": node.text("activation", "none"),
    }  # fmt: skip
    blocks = -(-vectors // block) + rest
    constants["RELEASE"] = int(blocks <= 2 * device.multiprocessors)
    kernel = Kernel(node.fusion, node.fusion, {**defines, **constants})
    threads, pdl = (tiling.threads, 1, 1), device.arch >= PDL_ARCH
    return Launch(kernel, (blocks, 1, 1), threads, (*arguments, Scalar(count, "int64")), pdl=pdl)
