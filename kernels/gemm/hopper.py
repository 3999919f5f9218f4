"""The host side of gemm_hopper.cu, gemm_hopper_split.cu and gemm_hopper_tf32.cu: tiles of products on a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm.pad import launches, padded, padded_columns, scratch_bytes
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import bytes_of_block
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, Defines, int32
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, Pointer, Struct, TensorMap
from onnxfuse.runtime.symint import always, best_first, maximum, minimum

TILE_K: Final = 64  # 16-bit elements along k per stage: the 128 bytes that TMA swizzles
ROW_BYTES: Final = 128
GATE_IMAGES: Final = 8  # images whose gate factors a stage holds, one row each: TMA's swizzle repeats after 8 rows
SUBTILE: Final = 64  # rows of y per TMA store, and columns if 64 divides a tile's columns
NARROW_SUBTILE: Final = 32  # columns of y per TMA store if SUBTILE does not divide a tile's columns
MIN_STAGES: Final = 3
MAX_STAGES: Final = 12
MAX_CONFIGS: Final = 4
BARRIER_BYTES: Final = 256  # bytes of shared memory reserved for mbarriers
GROUP_ROWS: Final = 2048  # rows of y in a group of tiles; tiles are computed down the columns of a group
CLUSTER_CYCLES: Final = 2700  # extra time if blocks of a cluster share a tile: they start late and wait for each other
TURN_CYCLES: Final = 25  # extra time per step if only one consumer multiplies at a time: its steps do not overlap
SHARED_TILE_CYCLES: Final = 300  # extra time per tile whose consumers begin and end together
# Registers that a thread needs besides its accumulators and the operands of a program; with fewer, registers spill. A
# program is the code of elementwise operators that are fused into the epilogue.
PROGRAM_REGISTERS: Final = 64
ROW_REGISTERS: Final = 2  # registers per thread for a 2-byte operand with one number per row
REGISTERS_OF_LOOP: Final = 32  # registers that a thread needs besides its sums while it multiplies
MAX_ACCUMULATORS_OF_THREADS: Final = 128  # maximum accumulators of a thread that loads operands of the epilogue
GATE_STEP_CYCLES: Final = 80.0  # extra time per stage of k for a gate
HALF_SHARE: Final = 0.85  # with `half`: share of a multiprocessor's time that one block's main loop takes
# Additional instructions per element in the epilogue of a product of float8 numbers: for the scales, and the quantizer
# of a y that is stored in 8 bits.
FLOAT8_INSTRUCTIONS: Final = 12
# The same for integers, and cycles of their epilogue for each column of a tile, whose scale and bias are loaded. A
# stage is multiplied in INTEGER_STEP of the time of one of float16. From its first load to its last store, a tile takes
# TILE_LATENCY longer, which other tiles hide only in part. Fitted to six to nine configs of each of 22 layers of
# BERT-base and ResNet-50 on an H200: the config with the lowest estimate takes 1.1 % longer than the fastest in the
# geometric mean, and 7 % at most.
INTEGER_INSTRUCTIONS: Final = 8
INTEGER_COLUMN_CYCLES: Final = 8
INTEGER_STEP: Final = 0.85
TILE_LATENCY: Final = 3000
INTEGER_TILE_CYCLES: Final = 600  # SHARED_TILE_CYCLES for integers
START_CYCLES: Final = 2000.0  # from a block's start on a multiprocessor to its first products
L2_BYTES: Final = 3950  # bytes per cycle that all multiprocessors together read from L2
ALONE_SHARE: Final = 0.15  # weight of the product's own latency in `shared_cycles`
PENALTY: Final = 1e9  # clock cycles, more than any product takes: excludes configs whose clusters wait for others


@dataclass(frozen=True)
class HopperConfig:
    """The tile of a block, and how its warpgroups share it.

    For a gated product, `tile_n` counts the columns of both products.
    """

    tile_m: int
    tile_n: int
    pingpong: bool = False  # each consumer warpgroup has its own tiles; otherwise consumers share each tile
    split_k: int = 1  # blocks per cluster; they share a tile, and each has a slice of k
    half: bool = False  # two blocks share a multiprocessor; in each, one warpgroup multiplies
    thirds: bool = False  # three warpgroups share each tile, also if it has fewer than 192 rows

    @property
    def consumers(self) -> int:
        """The number of warpgroups that multiply."""
        if self.half:
            return 1
        return 3 if self.thirds or (self.tile_m == 192 and not self.pingpong) else 2

    @property
    def accumulators(self) -> int:
        """The number of accumulators per thread."""
        return self.tile_m * self.tile_n // (128 * (1 if self.pingpong else self.consumers))

    @property
    def registers(self) -> int:
        """The registers per consumer thread: CONSUMER_REGISTERS of gemm_hopper.cuh."""
        return {1: 216, 2: 232, 3: 160}[self.consumers]

    @property
    def name(self) -> str:
        """The config's name in reports."""
        kind = " pingpong" if self.pingpong else f" k/{self.split_k}" if self.split_k > 1 else " half" * self.half
        return f"{self.tile_m}x{self.tile_n}{kind}{' thirds' * self.thirds}"


CONFIGS: Final = (
    HopperConfig(128, 128, pingpong=True),
    HopperConfig(128, 192, pingpong=True),
    HopperConfig(192, 128, pingpong=True),
    HopperConfig(128, 256),
    HopperConfig(256, 128),
    HopperConfig(128, 192),
    HopperConfig(192, 192),
    HopperConfig(128, 128),
    HopperConfig(64, 256, pingpong=True),
    HopperConfig(64, 192, pingpong=True),
    HopperConfig(64, 128, pingpong=True),
    HopperConfig(64, 64, pingpong=True),
    HopperConfig(128, 64, split_k=2),
    HopperConfig(128, 64, split_k=3),
    HopperConfig(128, 64, split_k=4),
    HopperConfig(128, 64, split_k=6),
    HopperConfig(128, 64, split_k=8),
    HopperConfig(128, 128, split_k=2),
    HopperConfig(128, 128, split_k=4),
)
# Configs for GPUs that concurrent runs share: while one block starts, waits or ends, a block of any stream multiplies.
# An H200 answers requests to one session of BERT-base, from 4 threads and from 8 threads, at these rates per second:
# 1761 and 1712 with CONFIGS, 1832 and 1936 with HALF_CONFIGS, 1793 and 1814 if each product takes the cheapest of both
# lists. A mix is probably slower because a whole-multiprocessor block waits until two half blocks have ended.
HALF_CONFIGS: Final = tuple(HopperConfig(*tile, half=True) for tile in ((128, 128), (64, 128), (128, 64), (64, 64)))
# Configs for TF32, each of whose consumers has one atom of 64 columns; with more atoms, all were slower: on an H200,
# 4096x768x3072 takes 78 us in tiles of 128x128 that two consumers share, and 99 if each has tiles of its own. For 14
# products, the config with the lowest estimate takes 0.7 % longer than the fastest in the geometric mean, and 10 % at
# most.
TF32_CONFIGS: Final = (
    HopperConfig(64, 64, pingpong=True),
    HopperConfig(128, 128),
    HopperConfig(256, 128),
    HopperConfig(128, 192, thirds=True),
    HopperConfig(192, 192),
)


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations of a Gemm, the expected fastest first; none for other GPUs or dtypes."""
    if not all(is_supported(each, device) for each in gemm.products) or (gemm.gate and padded(gemm, residual=True)[1]):
        return []
    halves = [config for config in HALF_CONFIGS if device.shared and fits(gemm, config, device)]
    configs = TF32_CONFIGS if gemm.dtype == "float32" else CONFIGS
    fitting = halves or [config for config in configs if fits(gemm, config, device)]
    cost = shared_cycles if device.shared else cycles
    ordered = best_first(fitting, lambda config: cost(gemm, config, device))
    return [implementation(gemm, config, device) for config in ordered[:MAX_CONFIGS]]


def is_supported(gemm: Gemm, device: Device) -> bool:
    """Return whether the kernels support this product: its dtype suits wgmma, and 32 bits hold TMA's coordinates.

    In TF32, w is k x n, and TMA reads x and w as they are. cuBLASLt has fast kernels for weights that are n x k.
    """
    if gemm.dtype == "float32" and not (
        gemm.tf32 and not gemm.transposed and not gemm.up and not gemm.gate and not padded(gemm, residual=False)[1]
    ):
        return False
    return (
        device.arch == 90
        and gemm.m * gemm.n * gemm.k > 0
        and all(size < 2**31 - 2**16 for size in (gemm.m, gemm.n, gemm.k))
    )


def stage_k(gemm: Gemm) -> int:
    """Return the elements of k in a stage."""
    return ROW_BYTES // gemm.item


def cycles(gemm: Gemm, config: HopperConfig, device: Device, row_cycles: float = 0.0) -> float:
    """Estimate a product's clock cycles without its launch.

    The fastest config is usually among the three configs with the lowest estimates.

    `row_cycles` is the minimum number of cycles that TMA takes per row of x in a stage.

    The constants are of an H200: two to six configs were timed for each of 92 products and convolutions with m from 128
    to 262144 and k from 64 to 8192. The config with the lowest estimate takes 1.0 % longer than the fastest in the
    geometric mean, and 9 % at most.  For twelve other problems in TF32, the mean is 1.1 %. CLUSTER_CYCLES is from 112
    products and convolutions of convolutional networks, with m from 196 to 25088. GATE_STEP_CYCLES is from nine configs
    at each of 13 products with m from 1568 to 25088 and n from 40 to 896; there the config with the lowest estimate
    takes 0.9 % longer than the fastest in the geometric mean, and 5 % at most.
    """
    mainloop, epilogue = _tile_cycles(gemm, config, row_cycles)
    if config.split_k > 1:  # blocks exchange their sums, and large clusters start late
        others = config.split_k - 1
        exchange = 750 * others + config.tile_m * config.tile_n * 4 * others / config.split_k / 16
        waiting: int = maximum(0, blocks_beyond_room(gemm, config, device))
        return mainloop + exchange + CLUSTER_CYCLES + PENALTY * waiting
    rounds = -(-tile_count(gemm, config) // device.multiprocessors)
    if gemm.eight_bits is not None and not gemm.eight_bits.are_float8:
        if not config.pingpong:
            return rounds * (mainloop + epilogue + INTEGER_TILE_CYCLES)
        alternating = (TILE_LATENCY + mainloop + epilogue) / 2  # two consumers have tiles in turns
        each: float = maximum(mainloop + 0.55 * epilogue, alternating)
        return rounds * each + 0.45 * epilogue
    if config.pingpong or config.half:  # another consumer multiplies during a part of the epilogue
        return rounds * (mainloop + 0.45 * epilogue) + 0.55 * epilogue
    return rounds * (mainloop + epilogue + SHARED_TILE_CYCLES)


def least_cycles(gemm: Gemm, device: Device) -> float:
    """Return the minimum of `cycles` over all configs that fit; at least one must fit."""
    every = [cycles(gemm, config, device) for config in CONFIGS if fits(gemm, config, device)]
    least: float = minimum(*every)
    return least


def step_cycles(config: HopperConfig, row_cycles: float = 0.0, share: float = 1.0) -> float:
    """Estimate the clock cycles per stage of k; `row_cycles` is as in `cycles`.

    `share`: how long multiplying a stage takes, as a share of the time of 16-bit elements.
    """
    rows, columns = config.tile_m, config.tile_n
    multiply = rows * columns * TILE_K / 2048  # TF32 takes as long: half the rate for half the elements
    # Number of accesses of 128 bytes to shared memory: TMA writes the rows of x and the columns of w, and each wgmma
    # reads its 64 rows of x and all columns of w.
    shared = 2 * rows + columns + rows * columns / 64
    load = (rows + columns) * ROW_BYTES / 56  # L2 delivers 56 bytes per cycle
    return max(share * (0.95 * multiply + 0.4 * shared), load, row_cycles * rows) + TURN_CYCLES * config.pingpong


def _tile_cycles(gemm: Gemm, config: HopperConfig, row_cycles: float) -> tuple[float, float]:
    """Estimate the clock cycles of a tile: (its main loop over a block's part of k, its epilogue).

    The epilogue is estimated without the exchange of sums that follows the main loop with split_k.
    """
    instructions = 8 + {"none": 0, "gelu": 13}.get(gemm.activation, 10) + 4 * bool(gemm.residual)
    has_integers = gemm.eight_bits is not None and not gemm.eight_bits.are_float8
    instructions += INTEGER_INSTRUCTIONS if has_integers else FLOAT8_INSTRUCTIONS if gemm.eight_bits else 0
    moved = ITEM_BYTES[gemm.dtype] * (1 + bool(gemm.residual)) / 32  # cycles to load the residual and store y
    epilogue = config.tile_m * tile_columns(gemm, config) * max(instructions / 128, moved)
    step = step_cycles(config, row_cycles, INTEGER_STEP if has_integers else 1.0)
    step += GATE_STEP_CYCLES if gemm.gate else 0.0
    epilogue += INTEGER_COLUMN_CYCLES * config.tile_n if has_integers else 0
    return -(-gemm.k // (stage_k(gemm) * config.split_k)) * step, epilogue


def shared_cycles(gemm: Gemm, config: HopperConfig, device: Device) -> float:
    """Estimate how long a product occupies a GPU that other runs use too, in clock cycles of the whole GPU.

    The estimate is the mean of two times: the time for which the product's blocks occupy multiprocessors, and the time
    of its reads from L2, which all runs use.  A part of the product's own latency is added, so that configs with very
    few blocks are not chosen.
    """
    tiles, alone = tile_count(gemm, config), cycles(gemm, config, device)
    if config.split_k > 1:
        busy = tiles * config.split_k * alone
    elif config.half:
        mainloop, epilogue = _tile_cycles(gemm, config, 0.0)
        busy = tiles * (HALF_SHARE * mainloop + 0.5 * (epilogue + START_CYCLES))
    else:
        mainloop, epilogue = _tile_cycles(gemm, config, 0.0)
        tile = mainloop + (0.45 * epilogue if config.pingpong else epilogue + SHARED_TILE_CYCLES)
        busy = tiles * tile + minimum(tiles, device.multiprocessors) * START_CYCLES
    stages = -(-gemm.k // stage_k(gemm))
    reads = tiles * (stages * (stage_bytes(config) / L2_BYTES))
    return 0.5 * (busy * (1.0 / device.multiprocessors) + reads) + ALONE_SHARE * alone


def fits(gemm: Gemm, config: HopperConfig, device: Device) -> bool:
    """Return whether a config fits into registers and shared memory, and whether its split of k is useful."""
    if gemm.eight_bits and (config.split_k > 1 or config.half):
        return False  # blocks of a cluster exchange sums of 16-bit types only; with `half`, only TMA stores y
    has_more_sums = gemm.eight_bits is not None and gemm.eight_bits.are_float8  # a thread has those of a stage, too
    if has_more_sums and 2 * config.accumulators + REGISTERS_OF_LOOP > config.registers:
        return False
    if config.split_k > 1:
        if gemm.grouped or gemm.k <= (config.split_k - 1) * stage_k(gemm):  # some block would have no step of k
            return False
        beyond = blocks_beyond_room(gemm, config, device)
        if always(lambda: beyond > 0, beyond):  # blocks would wait; `cycles` counts the wait at dynamic sizes
            return False
    if not _has_registers(gemm, config) or stages(gemm, config, device) < MIN_STAGES:
        return False
    if gemm.gate and (GATE_IMAGES - 1) * gemm.gate_rows < config.tile_m - 1:  # a tile could span too many images
        return False
    if config.half and (stores_by_threads(gemm) or is_by_fragments(gemm) or gemm.gate):
        return False  # with `half`, only TMA stores y, and gates are untested
    if config.half and config.accumulators == 128 and gemm.column_shift:
        return False  # with a Gelu before the shift, two registers would spill
    if is_by_fragments(gemm):
        return config.accumulators <= MAX_ACCUMULATORS_OF_THREADS
    vectors = column_vectors(gemm) + bool(gemm.residual)
    if config.pingpong and config.tile_m * config.tile_n > 128 * 128 and (vectors > 2 or gemm.gate):
        return False  # loaded vectors, or fragments of x, would not fit into registers with the accumulators
    narrow = tile_columns(gemm, config) % SUBTILE  # columns beyond whole subtiles, which threads cannot store
    if narrow and (gemm.up or not gemm.transposed or stores_by_threads(gemm)):
        return False
    return narrow % NARROW_SUBTILE == 0


def _has_registers(gemm: Gemm, config: HopperConfig, subtiles: int = 1) -> bool:
    """Return whether registers hold the accumulators, and the epilogue program's operands for `subtiles` subtiles.

    A program is the code of operators that are fused into the epilogue.  With at most one column vector, a program
    without operands needs no more registers than the fixed epilogue.  If the product has no residual, the same is true
    for a program that reads one number per row.
    """
    read = gemm.program.registers * subtiles if gemm.program else 0
    is_little = read <= (0 if gemm.residual else ROW_REGISTERS) and column_vectors(gemm) < 2
    return config.accumulators + (0 if is_little else read + PROGRAM_REGISTERS) <= config.registers


def blocks_beyond_room(gemm: Gemm, config: HopperConfig, device: Device) -> int:
    """Return how many blocks of clusters would wait until other blocks end; a result <= 0 means that none waits.

    Clusters of more than two blocks do not fill the GPU.  128x2048x2048 took 13.3 us with 128 blocks in clusters of
    four, and 8.8 with 64 blocks in clusters of two.  A convolution of 512x1280x11520 took 49.6 us with 120 blocks in
    clusters of three, and 35.6 with 80 blocks in clusters of two.
    """
    room = device.multiprocessors if config.split_k == 2 else device.multiprocessors * 3 // 4
    return tile_count(gemm, config) * config.split_k - room


def tile_count(gemm: Gemm, config: HopperConfig) -> int:
    """Return the number of tiles of all products of the launch."""
    return -(-gemm.m // config.tile_m) * sum(-(-each.n // tile_columns(gemm, config)) for each in gemm.products)


def is_by_fragments(gemm: Gemm) -> bool:
    """Return whether threads, not TMA, load the epilogue's operands and store y, as in gemm_hopper_threads.cuh."""
    return gemm.dtype == "float32" or gemm.eight_bits is not None


def stores_by_threads(gemm: Gemm) -> bool:
    """Return whether rows of y are not aligned for TMA or, if `is_by_fragments`, for stores of two elements."""
    if is_by_fragments(gemm):
        return not gemm.aligned or gemm.n % 2 > 0
    return not gemm.aligned or any(each.n < padded_columns(each.n, each.dtype) for each in gemm.products)


def column_vectors(gemm: Gemm) -> int:
    """Return the number of column vectors that the epilogue reads."""
    has_bias = any(each.bias is not None for each in gemm.products)
    return has_bias + (gemm.extra is not None) + (gemm.column_scale is not None)


def tile_columns(gemm: Gemm, config: HopperConfig) -> int:
    """Return the columns of y in a tile."""
    return config.tile_n // 2 if gemm.up else config.tile_n


def fixed_bytes(gemm: Gemm, config: HopperConfig) -> int:
    """Return the bytes of shared memory that a block needs besides its ring of stages."""
    if config.split_k > 1:
        eights = config.tile_m // SUBTILE // config.consumers * tile_columns(gemm, config) // 8  # groups of 8 columns
        sums = (config.split_k - 1) * -(-eights // config.split_k) * gemm.weight_count
        return sums * config.consumers * 128 * 16 + BARRIER_BYTES
    if is_by_fragments(gemm):  # results and column vectors stay in registers
        return BARRIER_BYTES
    results = 0 if config.half else config.tile_m * tile_columns(gemm, config) * 2 * (2 if config.pingpong else 1)
    return results + config.consumers * column_vectors(gemm) * tile_columns(gemm, config) * 4 + BARRIER_BYTES


def stage_bytes(config: HopperConfig, gate: bool = False) -> int:
    """Return the bytes of shared memory of one stage, with or without factors of a gate."""
    return (config.tile_m + config.tile_n + gate * GATE_IMAGES) * ROW_BYTES


def stages(gemm: Gemm, config: HopperConfig, device: Device) -> int:
    """Return how many stages fit into shared memory."""
    room = bytes_of_block(2 if config.half else 1, device)
    each = stage_bytes(config, gemm.gate is not None)
    return min(MAX_STAGES, (room - fixed_bytes(gemm, config)) // each)


def implementation(gemm: Gemm, config: HopperConfig, device: Device) -> Implementation:
    """Return one launch of the kernel, after a launch of gemm_pad.cu if TMA cannot read the operands as they are.

    With split_k, and in TF32, the residual needs no copy, because threads read it, not TMA.
    """
    gemm, copies = padded(gemm, residual=config.split_k == 1 and not is_by_fragments(gemm))
    kind = "gemm_hopper_tf32" if gemm.dtype == "float32" else "gemm_hopper"
    source = "gemm_hopper_split" if config.split_k > 1 else kind
    launch = kernel_launch(source, gemm, config, device, defines(gemm, config, device), arguments(gemm, config))
    several = f", {len(gemm.products)} products" if gemm.grouped else ""
    name = f"{kind} {config.name}{several}{' of copies' if copies else ''}"
    return Implementation(name, (*launches(copies, device), launch), scratch_bytes(copies))


def kernel_launch(
    source: str, gemm: Gemm, config: HopperConfig, device: Device, defines: Defines, arguments: tuple[Argument, ...]
) -> Launch:
    """Return the launch of a kernel of gemm_hopper.cuh.

    Blocks are persistent: there are at most as many blocks as run at once, and each takes tiles until none is left.
    But a cluster whose blocks share a tile computes only this tile.
    """
    tiles = tile_count(gemm, config)
    resident = device.multiprocessors * (2 if config.half else 1)
    blocks = tiles * config.split_k if config.split_k > 1 else minimum(tiles, resident)
    kernel, arguments = with_program(Kernel(source, source, defines, arch_specific=True), arguments, gemm.program)
    return Launch(
        kernel,
        (blocks, 1, 1),
        (128 * (1 + config.consumers), 1, 1),
        arguments,
        shared=stages(gemm, config, device) * stage_bytes(config, gemm.gate is not None) + fixed_bytes(gemm, config),
        cluster=config.split_k,
        pdl=True,
    )


def defines(gemm: Gemm, config: HopperConfig, device: Device) -> Defines:
    """Return the macros of gemm_hopper.cuh."""
    read = gemm.program.registers if gemm.program else 0
    ahead = {"PROGRAM_AHEAD": int(read > 0 and _has_registers(gemm, config, subtiles=2))} if gemm.program else {}
    return {
        **gemm.epilogue_defines(), "TRANSPOSED": int(gemm.transposed),
        "TILE_M": config.tile_m, "TILE_N": tile_columns(gemm, config), "PINGPONG": int(config.pingpong),
        "STORE_BY_THREADS": int(stores_by_threads(gemm)), "STAGES": stages(gemm, config, device),
        "SPLIT_K": config.split_k, "CONSUMERS": config.consumers, "K_BLOCK": stage_k(gemm),
        "PRODUCTS": len(gemm.products), "X_GATE": int(gemm.gate is not None),
        "WEIGHTS_CONSTANT": int(all(each.weights_constant for each in gemm.products)), **ahead,
    }  # fmt: skip


def arguments(gemm: Gemm, config: HopperConfig) -> tuple[Argument, ...]:
    """Return the arguments of gemm_hopper.cu, gemm_hopper_tf32.cu or, with `split_k`, of gemm_hopper_split.cu."""
    maps = [
        tensor_map(gemm, gemm.x, (gemm.k, gemm.m), (stage_k(gemm), config.tile_m)),
        *(weight_map(each, each.w, config) for each in gemm.products),
        *([weight_map(gemm, gemm.up, config)] if gemm.up else []),
    ]
    results, biases = list[Argument](), list[Argument]()
    by_threads = stores_by_threads(gemm) or is_by_fragments(gemm)
    if config.split_k == 1:
        if by_threads:
            results += [each.y for each in gemm.products]
        elif gemm.stores_y:
            results += [result_map(gemm, config, each.y, each.n) for each in gemm.products]
        else:  # any map will do
            results += maps[:1]
        if gemm.residual and not is_by_fragments(gemm):
            results.append(result_map(gemm, config, gemm.residual, gemm.n))
        biases += [Struct(tuple(each.bias or ABSENT for each in gemm.products))]
    gate: list[Argument] = []
    if gemm.gate:
        factors = tensor_map(gemm, gemm.gate, (gemm.k, -(-gemm.m // gemm.gate_rows)), (TILE_K, GATE_IMAGES))
        gate = [factors, *int32(gemm.gate_rows)]
    return (*maps, *results, gemm.epilogue_operands, *biases, product_sizes(gemm, config), *gate)


def product_sizes(gemm: Gemm, config: HopperConfig) -> Struct:
    """Return the struct ProductSizes of gemm_operands.cuh."""
    return Struct(int32(gemm.m, *(each.n for each in gemm.products), gemm.k, group_m(gemm, config)))


def weight_map(gemm: Gemm, pointer: Pointer, config: HopperConfig) -> TensorMap:
    """Return the TMA map of a weight; a box has the k of a stage.

    If the weight is n x k, a box has all columns of a tile.
    """
    if gemm.transposed:
        return tensor_map(gemm, pointer, (gemm.k, gemm.n), (stage_k(gemm), tile_columns(gemm, config)))
    return tensor_map(gemm, pointer, (gemm.n, gemm.k), (stage_k(gemm), stage_k(gemm)))  # rows of ROW_BYTES


def result_map(gemm: Gemm, config: HopperConfig, pointer: Pointer, n: int) -> TensorMap:
    """Return the TMA map of y or of the residual; a box is a subtile."""
    columns = NARROW_SUBTILE if tile_columns(gemm, config) % SUBTILE else SUBTILE
    return tensor_map(gemm, pointer, (n, gemm.m), (columns, SUBTILE))


def tensor_map(gemm: Gemm, pointer: Pointer, sizes: tuple[int, int], box: tuple[int, int]) -> TensorMap:
    """Return the TMA map, with swizzled boxes, of a row-major matrix with padded rows; sizes are (columns, rows)."""
    item = ITEM_BYTES[gemm.dtype]
    dtype = "tfloat32" if gemm.dtype == "float32" else gemm.dtype
    swizzle: Literal[64, 128] = 64 if box[0] * item == 64 else 128
    return TensorMap(pointer, dtype, sizes, (padded_columns(sizes[0], gemm.dtype) * item,), box, swizzle)


def group_m(gemm: Gemm, config: HopperConfig) -> int:
    """Return the rows of tiles in a group; tiles are computed down its columns, so that blocks find w in L2."""
    rows, limit = -(-gemm.m // config.tile_m), max(1, GROUP_ROWS // config.tile_m)
    return -(-rows // -(-rows // limit))
