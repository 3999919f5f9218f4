"""How elements are divided among threads: the host side of elementwise.cuh, and the activations that it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._types import EARLY_ARCH, Defines, size, streamed, width
from onnxfuse.provider.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Scalar, TensorSpec

# Parameters where the node does not give them: ONNX's defaults.
ACTIVATIONS: Final[Mapping[str, tuple[float, float]]] = {
    "none": (0.0, 0.0),
    "relu": (0.0, 0.0),
    "gelu": (0.0, 0.0),
    "gelu_tanh": (0.0, 0.0),
    "silu": (0.0, 0.0),
    "quick_gelu": (0.0, 0.0),
    "hard_swish": (0.0, 0.0),
    "mish": (0.0, 0.0),
    "sigmoid": (0.0, 0.0),
    "tanh": (0.0, 0.0),
    "softplus": (0.0, 0.0),
    "clip": (float("-inf"), float("inf")),
    "leaky_relu": (0.01, 0.0),
    "elu": (1.0, 0.0),
    "hard_sigmoid": (0.2, 0.5),
}

THREADS: Final = 128
SMALL_THREADS: Final = 256
SMALL_VECTORS: Final = 128  # per multiprocessor: with fewer, vectors are narrower, which is 5-10 % faster
SMALL_WIDTH: Final = 2
RESIDENT_THREADS: Final = 2048  # of a multiprocessor


@dataclass(frozen=True)
class Spread:
    """The constants of elementwise.cuh."""

    width: int
    threads: int
    chunks: int


def spread(count: int, wide: int, streams: int, device: Device) -> Spread:
    """For `count` elements of each of `streams` inputs, loaded at most `wide` at a time."""
    small = SMALL_VECTORS * device.multiprocessors
    while wide > 1 and count // wide < small and (wide > SMALL_WIDTH or count % wide):
        wide //= 2
    vectors = count // wide
    if vectors < 4 * small:
        return Spread(wide, SMALL_THREADS, 1)
    resident = RESIDENT_THREADS * device.multiprocessors
    return Spread(wide, THREADS, 2 if resident < vectors <= 2 * resident else 1)  # all at once, if two make it so


def parameters(node: FusedNode) -> list[Argument]:
    """alpha and beta of the node's activation."""
    defaults = ACTIVATIONS[node.attributes.get("activation", "none")]
    values = (node.attributes.get(name, default) for name, default in zip(("alpha", "beta"), defaults, strict=True))
    return [Scalar(float(value), "float32") for value in values]


def element_plan(
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    output: TensorSpec,
    defines: Defines,
    arguments: Sequence[Argument],
    device: Device,
    extents: Sequence[int] = (),
) -> Plan:
    """A launch over all elements of `output`; those inputs that have its shape are read once.

    `extents` are what the places of a vector's elements must be multiples of besides.
    """
    count = size(output)
    if not count:
        return Plan((output,), ())
    read = [tensor for tensor in inputs if tensor.shape == output.shape]
    wide = width([*read, output], *extents, weights=inputs)
    tiles, stream = spread(count, wide, len(inputs), device), streamed([*read, output])
    reach = max(map(size, (*inputs, output)))
    return Plan((output,), (element_launch(node, tiles, output, stream, defines, arguments, device, reach),))


def element_launch(
    node: FusedNode,
    tiles: Spread,
    output: TensorSpec,
    stream: int,
    defines: Defines,
    arguments: Sequence[Argument],
    device: Device,
    reach: int = 0,
) -> Launch:
    """The launch of a kernel of elementwise.cuh; `reach`: elements of the largest tensor, if not the output's."""
    count = size(output)
    vectors, block = count // tiles.width, tiles.threads * tiles.chunks
    rest = int(count % tiles.width > 0)
    constants = {
        "WHOLE": int(vectors % block == 0), "REST": rest,
        "WIDTH": tiles.width, "THREADS": tiles.threads, "CHUNKS": tiles.chunks, "STREAMED": stream,
        "INDEX": "u32" if max(count, reach) < 2**31 else "u64", "PRECISE": int(output.dtype == "float32"),
        "ACTIVATION": node.attributes.get("activation", "none"),
    }  # fmt: skip
    blocks = -(-vectors // block) + rest
    constants["RELEASE"] = int(blocks <= 2 * device.multiprocessors)
    kernel = Kernel(node.fusion, node.fusion, {**defines, **constants})
    threads, early = (tiles.threads, 1, 1), device.arch >= EARLY_ARCH
    return Launch(kernel, (blocks, 1, 1), threads, (*arguments, Scalar(count, "int64")), early=early)
