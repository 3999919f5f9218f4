"""The plans of group_norm for channels-last tensors: group_norm_nhwc.cu, or two launches for large images."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.epilogue_node import Joined
from onnxfuse.kernels.epilogue_program import WORD, EpilogueProgram, epilogue_program
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    Defines,
    all_constant,
    check_element_count,
    macro,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.symint import best_first, estimate, is_symbolic, maximum, minimum

CLUSTER_ARCH: Final = 90  # the lowest compute capability with thread block clusters
CLUSTERS: Final = (1, 2, 4, 8)
THREADS: Final = 512  # largest number of threads per block, unless a pixel has more vectors
MAX_THREADS: Final = 1024
SECTOR_BYTES: Final = 32  # smallest unit of a memory access
LINE_BYTES: Final = 128  # bytes per L2 cache line
MAX_MERGED: Final = 32  # largest number of groups per block of a plan with two launches, unless a cache line has more
STATIC_BYTES: Final = 48 << 10  # bytes of shared memory per block without opt-in
MAX_CHUNKS: Final = 256  # largest number of chunks per image, in two launches
CHUNK_PIXELS: Final = 2  # least number of pixels per thread of a chunk
MAX_CANDIDATES: Final = 2  # largest number of candidates with one launch
USUAL_IMAGES: Final = (1, 2, 8, 32)  # batch sizes for which tilings are chosen if the batch is symbolic
USUAL_PIXELS: Final = (64, 256, 1024, 4096, 16384)
MAX_USUAL_TILINGS: Final = 4  # tilings for symbolic sizes; each is a kernel to compile
LEAST_ROOM: Final = 24 << 10  # `_room` does not halve a reservation of at most this many bytes of shared memory

# Launch times in microseconds, fitted on an H200 to 21 shapes in fp16, from 1x32x32x512 to 1x512x512x128, each with one
# launch (up to three tilings) and with two. Two launches take 0.8 to 1.3 times their estimate. For 18 shapes the plan
# with the lowest estimate was measured: it is the fastest for 17, and takes 1.03 times as long as the fastest for one.
WAVE_US: Final = 3.2  # fixed time per wave of blocks
MULTIPROCESSOR_BYTES_PER_US: Final = 30e3  # bytes that a multiprocessor moves per microsecond
MEMORY_BYTES_PER_US: Final = 4.2e6  # bytes that the GPU's memory moves per microsecond
BARRIER_US: Final = 0.1  # added per block of a cluster: of two equally fast cluster sizes, the smaller one ranks first
TWO_LAUNCHES_US: Final = 5.7  # fixed time of two launches
TWO_LAUNCHES_BYTES_PER_US: Final = 3.4e6  # bytes of x and y that two launches move per microsecond after the fixed time
FULL_CLUSTER: Final = 2  # largest cluster that fills the GPU: in clusters of four, 128 blocks take two waves
ROOM_OF_CLUSTERS: Final = 0.75  # share of multiprocessors that larger clusters can occupy


@dataclass(frozen=True)
class Images:
    """The sizes of channels-last images, whose channels form groups and are accessed in vectors."""

    images: int
    pixels: int
    channels: int
    group: int  # channels per group
    width: int  # elements per vector access
    item_bytes: int


@dataclass(frozen=True)
class GroupTiling:
    """How blocks divide an image among them.

    A block has `subset` channels, accessed in vectors of `width`, and `lanes_p` rows of threads. The `cluster` blocks
    of a cluster share the pixels.
    """

    subset: int
    width: int
    lanes_p: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Return the threads per block, including idle ones that fill the last warp."""
        return math.ceil(self.subset // self.width * self.lanes_p / 32) * 32

    def group_floats(self, group: int) -> int:
        """Return the number of floats in GroupMemory of group_norm_nhwc.cuh."""
        return 2 * self.lanes_p * self.subset // math.gcd(group, self.width) + 2 * (self.subset // group)

    def memory_bytes(self, group: int) -> int:
        """Return the bytes of shared memory besides the pixels, a multiple of 16."""
        floats = self.group_floats(group) + (2 * self.cluster + 2) * (self.subset // group)
        return math.ceil(floats / 4) * 16

    def pixel_bytes(self, pixels: int, item_bytes: int) -> int:
        """Return the bytes of shared memory for the block's share of an image's pixels."""
        slots = math.ceil(math.ceil(pixels / self.cluster) / self.lanes_p)
        return slots * self.threads * max(4, self.width * item_bytes)

    def block_bytes(self, x: Images) -> int:
        """Return the bytes of shared memory of a block that keeps its share of an image's pixels."""
        return self.memory_bytes(x.group) + self.pixel_bytes(x.pixels, x.item_bytes)


@dataclass(frozen=True)
class GroupNorm:
    """The description of a non-empty channels-last group_norm, from which the plans of all its kernels are made."""

    x: Images
    y: TensorSpec
    defines: Defines
    operands: tuple[Argument, ...]
    epsilon: Scalar
    outputs: tuple[TensorSpec, ...]
    program: EpilogueProgram | None = None  # elementwise operators applied to y before it is stored

    @property
    def target(self) -> Pointer:
        """The pointer to the output y."""
        return self.program.y if self.program else Pointer("output", 0)

    def with_program(self, launch: Launch) -> Launch:
        """Return `launch`, which stores y, extended by `program`."""
        return self.program.launch(launch) if self.program else launch


def group_norm_nhwc_plans(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device, both: Joined | None = None
) -> list[Plan]:
    """Return the plans for x (n, *spatial, channels), the expected fastest first.

    `both` has the node and the elementwise operators that were fused into it. The list is empty if no kernel can run
    these operators in its epilogue. Raises ValueError if shapes do not fit together.
    """
    x, scale, bias = (required_spec(node, inputs, name) for name in ("x", "scale", "bias"))
    images, channels, pixels = x.shape[0], x.shape[-1], math.prod(x.shape[1:-1])
    groups = node.integer("groups")
    if channels % groups:
        raise ValueError(f"group_norm: {channels} channels do not make {groups} groups")
    check_element_count(node, "scale", scale, channels)
    check_element_count(node, "bias", bias, channels)
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    outputs: tuple[TensorSpec, ...] = (y,)
    program = None
    if both is not None:
        made = epilogue_program(both, y, inputs, False, tuple(STORAGE))
        if made is None or images * pixels >= WORD:
            return []
        program, outputs = made
        y = replace(y, dtype=program.dtype)
    if not images * channels * pixels:
        return [Plan(outputs, ())]
    width = vector_width([x, y], channels, weights=inputs)
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "SCALE_T": STORAGE[scale.dtype], "BIAS_T": STORAGE[bias.dtype],
        "Y_T": STORAGE[y.dtype], "CHANNELS": channels, "GROUP": channels // groups,
        "WEIGHTS_CONSTANT": all_constant([scale, bias]), "ACTIVATION": node.text("activation", "none"),
        "PRECISE": int(y.dtype == "float32"),
    }  # fmt: skip
    sizes = Images(images, pixels, channels, channels // groups, width, ITEM_BYTES[x.dtype])
    norm = GroupNorm(
        sizes, y, defines, tuple(operand_pointer(node, name) for name in ("x", "scale", "bias")),
        Scalar(node.number("epsilon", 1e-5), "float32"), outputs, program,
    )  # fmt: skip
    find = tilings_of_any_size if is_symbolic(images, pixels) else one_launch_tilings
    tilings = find(sizes, device)
    plans = [_one_launch_plan(norm, tiling, device) for tiling in tilings]
    halved = two_launch_tiling(sizes)
    chunks = _chunks(norm, halved, device) if halved is not None else 0
    if halved is not None and (not plans or is_symbolic(chunks) or chunks > 1):
        moved = estimate(images) * estimate(pixels) * (channels * (norm.x.item_bytes + ITEM_BYTES[y.dtype]))
        first = not plans or bool(
            TWO_LAUNCHES_US + moved / TWO_LAUNCHES_BYTES_PER_US
            < _time(tilings[0], replace(sizes, images=estimate(images), pixels=estimate(pixels)), device)
        )
        plans.insert(0 if first else len(plans), _two_launch_plan(norm, halved, chunks, device))
    if not plans:
        raise ValueError(f"group_norm: a group has {norm.x.group} channels, which are too many for a block")
    return plans


def _one_launch_plan(norm: GroupNorm, tiling: GroupTiling, device: Device) -> Plan:
    memory = tiling.memory_bytes(norm.x.group)
    kernel = Kernel("group_norm_nhwc", "group_norm_nhwc", {
        **norm.defines, **_constants(tiling), "CLUSTER": tiling.cluster, "MEMORY_BYTES": memory,
        "STREAMED": _streamed(norm, "SUBSETS * CLUSTER"),
    })  # fmt: skip
    grid = (norm.x.images * (norm.x.channels // tiling.subset) * tiling.cluster, 1, 1)
    arguments = (*norm.operands, norm.target, norm.epsilon, Scalar(norm.x.pixels, "int32"))
    kept = tiling.pixel_bytes(norm.x.pixels, norm.x.item_bytes)
    if is_symbolic(kept):
        kept = _room(tiling, kept, norm.x.item_bytes, device.shared_per_block - memory)
    pdl = device.has_pdl
    launch = Launch(kernel, grid, (tiling.threads, 1, 1), arguments, memory + kept, tiling.cluster, pdl)
    return Plan(norm.outputs, (norm.with_program(launch),))


def _room(tiling: GroupTiling, kept: int, item_bytes: int, most: int) -> int:
    """Return the bytes of shared memory to reserve for an image of symbolic size, at most `most`.

    `most` is halved as long as the image is expected to fit into the half and more than LEAST_ROOM is reserved.
    Reserving more than an image needs is correct too. So only the upper bound on the size is a hard guard, a condition
    without which the plan would be wrong.
    """
    one = tiling.pixel_bytes(tiling.lanes_p * tiling.cluster, item_bytes)  # bytes if each row of threads has one pixel
    room = most // one
    while room * one > LEAST_ROOM and estimate(kept) <= room // 2 * one:
        room //= 2
    if kept > room * one:
        raise ValueError(f"group_norm: {kept} bytes of an image are more than a block's shared memory")
    return room * one


def _streamed(norm: GroupNorm, blocks_of_image: str) -> int | str:
    """Return the macro STREAMED; for symbolic sizes, an expression over the kernel's pixels and blocks."""
    pixel_bytes = norm.x.channels * (norm.x.item_bytes + ITEM_BYTES[norm.y.dtype])
    moved = norm.x.images * norm.x.pixels * pixel_bytes
    expression = f"u64(gridDim.x / ({blocks_of_image})) * pixels > {STREAMED_FROM_BYTES // pixel_bytes}"
    return macro(lambda: moved > STREAMED_FROM_BYTES, expression, moved)


def _chunks(norm: GroupNorm, tiling: GroupTiling, device: Device) -> int:
    """Return the number of chunks per image; in the first of two launches, each chunk has its own blocks."""
    wanted = math.ceil(2 * device.multiprocessors / (norm.x.images * (norm.x.channels // tiling.subset)))
    each = maximum(CHUNK_PIXELS, math.ceil(norm.x.pixels / (tiling.lanes_p * minimum(MAX_CHUNKS, wanted))))
    chunks: int = math.ceil(
        norm.x.pixels / (tiling.lanes_p * each)
    )  # a chunk has at least the pixels that the rows of threads take at a time
    return chunks


def _two_launch_plan(norm: GroupNorm, tiling: GroupTiling, chunks: int, device: Device) -> Plan:
    streamed = _streamed(norm, "SUBSETS * chunks")
    constants: Defines = {**norm.defines, **_constants(tiling), "CLUSTER": 1, "STREAMED": streamed}
    partials, sizes = Pointer("scratch", 0), (Scalar(norm.x.pixels, "int32"), Scalar(chunks, "int32"))
    grid = (norm.x.images * (norm.x.channels // tiling.subset) * chunks, 1, 1)
    block, pdl = (tiling.threads, 1, 1), device.has_pdl
    passed = {
        "group_norm_nhwc_statistics": (norm.operands[0], partials, *sizes),
        "group_norm_nhwc_apply": (*norm.operands, partials, norm.target, norm.epsilon, *sizes),
    }
    first, last = (Launch(Kernel(k, k, constants), grid, block, each, pdl=pdl) for k, each in passed.items())
    groups = norm.x.images * (norm.x.channels // norm.x.group)
    return Plan(norm.outputs, (first, norm.with_program(last)), (groups * chunks * 8,))


def one_launch_tilings(x: Images, device: Device) -> list[GroupTiling]:
    """Return the tilings whose blocks keep their part of an image in shared memory, fastest expected first."""
    found: dict[GroupTiling, float] = {}
    for subset in _subsets(x):
        vectors = subset // x.width
        if vectors > MAX_THREADS:
            continue
        for cluster in CLUSTERS if device.arch >= CLUSTER_ARCH else (1,):
            rows = math.ceil(x.pixels / cluster)
            tiling = GroupTiling(subset, x.width, min(rows, max(1, THREADS // vectors)), cluster)
            if (cluster == 1 or rows > 1) and tiling.block_bytes(x) <= device.shared_per_block:
                found[tiling] = _time(tiling, x, device)
    return sorted(found, key=found.__getitem__)[:MAX_CANDIDATES]


def _time(tiling: GroupTiling, x: Images, device: Device) -> float:
    """Return the expected time of one launch, in microseconds."""
    rows, bytes_of_pixel = math.ceil(x.pixels / tiling.cluster), tiling.subset * x.item_bytes
    sectors = bytes_of_pixel + (0 if bytes_of_pixel % SECTOR_BYTES == 0 else SECTOR_BYTES // 2)
    blocks = x.images * (x.channels // tiling.subset) * tiling.cluster
    share = 1 if tiling.cluster <= FULL_CLUSTER else ROOM_OF_CLUSTERS
    room = int(device.multiprocessors * share) * max(1, THREADS // tiling.threads)
    busy: float = maximum(
        math.ceil(blocks / room) * (WAVE_US + 2 * rows * sectors / MULTIPROCESSOR_BYTES_PER_US),
        # If two blocks use the halves of a sector, memory still moves the sector once, because L2 keeps it.
        blocks * 2 * rows * bytes_of_pixel / MEMORY_BYTES_PER_US,
    )
    return busy + BARRIER_US * tiling.cluster


def tilings_of_any_size(x: Images, device: Device) -> list[GroupTiling]:
    """Return a list of one tiling, the expected fastest of a few for symbolic sizes; an empty list if none fits."""
    images, pixels = (0 if is_symbolic(size) else size for size in (x.images, x.pixels))
    usual = _usual_tilings(replace(x, images=images, pixels=pixels), device)
    fitting = [tiling for tiling in usual if estimate(tiling.block_bytes(x)) <= device.shared_per_block]
    return best_first(fitting, lambda tiling: _time(tiling, x, device))[:1]


@functools.lru_cache(maxsize=1024)
def _usual_tilings(x: Images, device: Device) -> tuple[GroupTiling, ...]:
    """Return the tilings that are most often the best at the usual sizes; a size of 0 in `x` means "unknown".

    If the number of pixels is unknown, blocks have as many rows of threads as for large images.
    """
    counts = Counter[GroupTiling]()
    usual = (x.images,) if x.images else USUAL_IMAGES, (x.pixels,) if x.pixels else USUAL_PIXELS
    for images, pixels in itertools.product(*usual):
        for tiling in one_launch_tilings(replace(x, images=images, pixels=pixels), device)[:1]:
            lanes = tiling.lanes_p if x.pixels else max(1, THREADS // (tiling.subset // x.width))
            counts[replace(tiling, lanes_p=lanes)] += 1
    return tuple(tiling for tiling, _ in counts.most_common(MAX_USUAL_TILINGS))


def two_launch_tiling(x: Images) -> GroupTiling | None:
    """Return the tiling of the two launches; None if a group has more channels than a block has threads for.

    A block has as many channels as its threads allow, but at most MAX_MERGED groups of them, because it must read and
    merge the partials of all chunks for each of its groups. If a cache line has more channels than that, a block has
    at least the channels of a cache line. With fewer channels per block, there are fewer chunks as well.
    """
    fitting = [
        tiling
        for subset in _subsets(x)
        for tiling in [GroupTiling(subset, x.width, max(1, THREADS // (subset // x.width)))]
        if subset // x.width <= MAX_THREADS and tiling.group_floats(x.group) * 4 <= STATIC_BYTES
    ]
    few = [tiling for tiling in fitting if tiling.subset // x.group <= MAX_MERGED]
    lines = [tiling for tiling in fitting if tiling.subset * x.item_bytes >= LINE_BYTES]
    if few and few[-1].subset * x.item_bytes >= LINE_BYTES:
        return few[-1]
    return lines[0] if lines else fitting[-1] if fitting else None


def _subsets(x: Images) -> Iterator[int]:
    """Yield, in ascending order, the divisors of the channels that are multiples of a group and of a vector."""
    least = math.lcm(x.group, x.width)
    for count in range(1, x.channels // least + 1):
        if (x.channels // least) % count == 0 and x.channels % least == 0:
            yield least * count


def _constants(tiling: GroupTiling) -> Defines:
    return {
        "SUBSET": tiling.subset, "WIDTH": tiling.width, "LANES_P": tiling.lanes_p, "BLOCK": tiling.threads,
    }  # fmt: skip
