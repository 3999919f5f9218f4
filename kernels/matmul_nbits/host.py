"""The plans of matrix products with quantized weights.

Most kernels read the quantized weights as they are stored.  If none of them takes the weights and all rows of x, a
first launch writes the weights as numbers of x's dtype, and a Gemm follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.epilogue import epilogue_defines
from onnxfuse.kernels.epilogue_node import also_joined, is_joined, moved
from onnxfuse.kernels.epilogue_program import joined_plans, with_program
from onnxfuse.kernels.gemm.implementations import implementations_if_any as gemm_implementations
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation, one_after_the_other
from onnxfuse.kernels.matmul_nbits import hopper
from onnxfuse.kernels.matmul_nbits.problem import (
    PACKED_ZEROS,
    Product,
    Weight,
    product_of,
    products_of,
    unsupported,
)
from onnxfuse.kernels.multiprocessor import MMA_ARCH, fitting_blocks
from onnxfuse.kernels.prologue_node import after_norm, also_normalized, norm_before, norm_vectors
from onnxfuse.kernels.selection import by_rows, selects
from onnxfuse.kernels.tensors import VECTOR_BYTES
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, TensorSpec
from onnxfuse.runtime.symint import for_later_plans

MAX_ROWS: Final = 64  # maximum rows of x for nbits_mma.cu
FASTEST_ROWS: Final = 32  # up to this many rows of x, nbits_mma.cu is faster than nbits_hopper.cu
MUCH_FASTER_ROWS: Final = 16  # up to this many rows, it is faster by a quarter or more
MAX_DOT_ROWS: Final = 8
DOT_WARPS: Final = 8
STAGE_BITS: Final = 1024  # bits of a row of weights in a stage of nbits_mma.cu
STAGED_ROWS: Final = 8  # maximum rows of x that nbits_mma.cu copies to shared memory; with more, it reads x from L1
MAX_WARPS: Final = 16  # maximum warps per block of nbits_mma.cu
WIDE_ROWS: Final = 4  # from this many rows of x on, tiles of 32 columns are faster
SMALL_TILES: Final = 4  # tiles of 16 columns per multiprocessor: with fewer, a product is small
MIN_MMA_BLOCK: Final = 32  # minimum block size for nbits_mma.cu, where four lanes share 32 weights with one scale
MAX_NORM_VECTORS: Final = 4  # maximum vectors of x that a thread keeps in registers for a norm
DEQUANTIZE_THREADS: Final = 256  # THREADS of nbits_dequantize.cu
MAX_IMPLEMENTATIONS: Final = 8


@dataclass(frozen=True)
class MmaConfig:
    """The macros of nbits_mma.cu that this module chooses."""

    tile_m: int
    tile_n: int
    warps: int
    depth: int
    resident: int  # blocks that run on a multiprocessor at once

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"nbits_mma_{self.tile_m}x{self.tile_n}_{self.warps}_{self.depth}_{self.resident}"

    @property
    def is_staged(self) -> bool:
        """Whether shared memory holds the elements of x that a block multiplies."""
        return self.tile_m <= STAGED_ROWS

    def normalizes(self, product: Product) -> bool:
        """Return whether a block's threads can keep its rows of x in registers, which the norm of x requires."""
        return norm_vectors(self.tile_m, product.k, self.warps) <= MAX_NORM_VECTORS

    def shared(self, product: Product) -> int:
        """Return a block's bytes of shared memory: its warps' stages, two buffers of their sums, and normalized x."""
        rows, stage_k = self.tile_n * (2 if product.is_gated else 1), STAGE_BITS // product.bits
        blocks = max(1, stage_k // product.block_size)
        zeros = (0, max(1, blocks * product.bits // 8), 2 * blocks)[product.weights[0].zeros]
        stages = -(-product.k // stage_k) if product.norm else 1  # stages whose x is in shared memory
        x = self.tile_m * (2 * stage_k * stages + (0 if self.tile_m == 1 else 64)) if self.is_staged else 0
        of_warp, of_block = (0, _whole(x)) if product.norm else (_whole(x), 0)
        stage = _whole(rows * (STAGE_BITS // 8 + 2 * blocks + zeros)) + of_warp
        sums = 4 * (rows + 4) * (1 if _has_one_row(product, self.tile_m) else max(8, self.tile_m))
        return self.warps * (self.depth * stage + 2 * sums) + of_block


def _whole(count: int) -> int:
    """Round up to a multiple of 128 bytes, at which each part of a stage begins."""
    return -(-count // 128) * 128


supports = also_normalized(also_joined(unsupported))


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if is_joined(node):
        norm = norm_before(node, inputs, 1)
        others = norm.sums if norm else ()
        return joined_plans(node, inputs, device, product_of, implementations, candidates, selects=True, others=others)
    product, outputs = products_of(node, inputs)
    if not product.m * sum(weight.n for weight in product.weights):
        return [Plan(outputs, ())]
    return [Plan(outputs, each.steps, each.scratch) for each in implementations(product, device)]


def implementations(product: Product, device: Device) -> list[Implementation]:
    """Return the implementations of a product with at least one element, the expected fastest first.

    Only this function decides which kernels run which numbers of rows, and in which order they are tried.  If no kernel
    runs a product with fused operators (`program`), the result is empty; without them, ValueError is raised.
    """
    has_one_form = len({(weight.zeros, weight.has_one_scale) for weight in product.weights}) == 1
    few = _of_few_rows(product, device) if has_one_form else []
    is_tiled = has_one_form and _takes_mma(product, device) and not (few and product.m <= MUCH_FASTER_ROWS)
    with for_later_plans(product.m if few else 0):
        tiled = hopper.implementations(product, device) if is_tiled else []
        if product.norm:
            ways = implementations(replace(product, norm=None), device)
            return [*few, *after_norm(product.norm, ways, device)][:MAX_IMPLEMENTATIONS]
        of_parts = [_dequantized(each, device) for each in product.parts if each.weights[0].n]
        many = one_after_the_other(of_parts) if all(of_parts) else []
    if not few and not many and product.program is None:
        raise ValueError(f"no kernel multiplies {product.m}x{product.k} {product.dtype} on {device.name}")
    if selects(product) and device.arch == hopper.ARCH and product.m > FASTEST_ROWS:
        return []  # nbits_hopper.cu is expected to be faster, although it stores all of y
    if few and tiled and product.m > FASTEST_ROWS:
        few, tiled = tiled, few
    return [*few, *tiled, *many][:MAX_IMPLEMENTATIONS]


def _of_few_rows(product: Product, device: Device) -> list[Implementation]:
    """Return the implementations that read the quantized weights in one launch; none if x has too many rows."""
    if product.row_bits % 8 or (product.layout == "kn" and any(each.n * product.bits % 8 for each in product.weights)):
        return []
    if _takes_mma(product, device) and product.m <= (STAGED_ROWS if product.norm else MAX_ROWS):
        configs = [each for each in _mma_configs(product, device) if not product.norm or each.normalizes(product)]
        return [_mma(product, config, device) for config in configs]
    if product.norm or product.m > MAX_DOT_ROWS:
        return []
    return [_columns(product, device) if product.layout == "kn" else _dot(product, device)]


def _takes_mma(product: Product, device: Device) -> bool:
    """Return whether the kernels for tensor cores take the weights, whose rows must consist of whole accesses."""
    are_whole = product.layout != "kn" and product.k % 8 == 0 and product.row_bits // 8 % VECTOR_BYTES == 0
    are_whole = are_whole and (product.weights[0].zeros != PACKED_ZEROS or product.zero_bits % 8 == 0)
    are_integers = not product.is_float8 and product.bits in (4, 8)
    takes = device.arch >= MMA_ARCH and product.item == 2 and product.aligned
    return takes and are_whole and are_integers and product.block_size >= MIN_MMA_BLOCK


def _mma_configs(product: Product, device: Device) -> list[MmaConfig]:
    """Return configs of nbits_mma.cu, the expected fastest first.  If none fits a block, try with fewer warps."""
    tile_m = next((count for count in (1, 2, 4, 8, 16) if product.m <= count), 32)
    stages, shapes = -(-product.k * product.bits // STAGE_BITS), _shapes(product, tile_m, device)
    for limit in (MAX_WARPS, 8, 4, 2, 1):
        found = dict[MmaConfig, None]()
        for tile_n, most, depth, resident in shapes:
            warps = next((count for count in (MAX_WARPS, 8, 4, 2) if count <= min(most, stages, limit)), 1)
            found[_fitted(MmaConfig(tile_m, tile_n, warps, depth, resident), product, device)] = None
        if fitting := [each for each in found if each.shared(product) <= device.shared_per_block]:
            return fitting
    return []


def _fitted(config: MmaConfig, product: Product, device: Device) -> MmaConfig:
    """Return the config with no more stages in flight than a warp uses, and no more blocks than a multiprocessor holds.

    The shared memory that this saves is free for blocks of the next kernel.
    """
    for depth in range(1, config.depth + 1):
        own = replace(config, depth=depth)
        own = replace(own, resident=max(1, min(config.resident, fitting_blocks(own.shared(product), device))))
        if depth >= _stages(own, product, device):
            break
    return own


def _stages(config: MmaConfig, product: Product, device: Device) -> int:
    """Return how many stages a warp multiplies, in all tiles of its block."""
    return -(-product.k * product.bits // (STAGE_BITS * config.warps)) * _rounds(config, product, device)


def _rounds(config: MmaConfig, product: Product, device: Device) -> int:
    """Return how many tiles a block computes one after the other."""
    return -(-product.tiles(config.tile_n) // (config.resident * device.multiprocessors))


def _shapes(product: Product, tile_m: int, device: Device) -> list[tuple[int, int, int, int]]:
    """Return (tile_n, most warps, depth, resident) of configs, the expected fastest first.

    With few tiles per multiprocessor, many warps divide a tile's k among them.  With many tiles, more blocks of fewer
    warps hide more of each other's latency.  On an H200, a product of 1x4096x4096 with weights of 4 bits took 4.9 us in
    the first way and 6.6 us in the second; a product of 1x28672x4096 took 22.0 us in the first way and 18.8 us in the
    second.  In the first way, a multiprocessor holds four blocks of eight warps, so two blocks of the next product can
    already fetch their weights.  Weights of 8 bits take half as many instructions per byte as 4 bits, so copies in
    flight matter more than the number of blocks.  From four rows of x on, tiles of 32 columns read x less often.  For
    one row and 4 bits, gated products have tiles of 16 columns: ten layers of Llama-8B took 0.528 ms; 0.547 with 32.
    Where a block then has two tiles of one stage, one of 32 is faster: Llama-1B took 0.404 ms, and 0.421 with 16.  If
    each of eight warps has two stages of a tile, other products of one row have tiles of 16 columns, too: 1x11008x4096
    took 8.3 us in place of 8.8, and 1x28672x4096 18.5 in place of 19.0, but 1x128256x2048 40.0 in place of 38.2.
    """
    is_small = product.tiles(16) < SMALL_TILES * device.multiprocessors
    if tile_m > STAGED_ROWS:
        few, many = [(32, 8, 2, 1), (16, 8, 2, 2)], [(32, 4, 2, 3), (32, 8, 2, 1)]
        if product.bits == 8 and tile_m == STAGED_ROWS * 2:
            return [few[1], *many]
        return [*few, *many] if is_small and product.m <= tile_m else [*many, *few]
    few, many = [(16, 8, 3, 4), (16, 8, 4, 2), (32, 8, 2, 2)], [(32, 4, 2, 4), (16, 8, 2, 4), (16, 4, 2, 6)]
    one_row = _has_one_row(product, tile_m)
    if one_row:  # for which 64 registers do not suffice
        few, many = [(16, 8, 2, 2), *few[1:]], [(32, 4, 2, 4), (16, 8, 2, 3), (16, 4, 2, 5)]
    is_deep = product.k * product.bits >= MAX_WARPS * STAGE_BITS and tile_m < WIDE_ROWS  # eight warps have two stages
    # If each multiprocessor gets at most one tile, its block has as many warps as two blocks of other configs.
    is_alone = is_deep and product.tiles(16) <= device.multiprocessors
    alone = [(16, MAX_WARPS, 2, 1 if one_row else 2)] if is_alone else []
    if product.bits == 8:
        return [*alone, few[1], few[0], *many]
    # Blocks of eight warps have two tiles of 16 columns, and a warp has one stage of each: one tile of 32 is the same.
    has_pairs = product.tiles(16) > 2 * device.multiprocessors and product.k * product.bits <= 8 * STAGE_BITS
    if is_small and (tile_m >= WIDE_ROWS or (one_row and product.is_gated and has_pairs)):
        few = few[::-1]
    return [*alone, *few, *many] if is_small or (one_row and (product.is_gated or is_deep)) else [*many, *few]


def _has_one_row(product: Product, tile_m: int) -> bool:
    """Return whether nbits_one_row.cuh computes the sums, as ONE_ROW of nbits_mma.cu says."""
    return tile_m == 1 and product.bits == 4


def _columns_per_thread(tile_m: int) -> int:
    """Return how many neighbouring columns of y a thread of nbits_mma.cu adds up and stores."""
    return 1 if tile_m == 1 else max(2, tile_m // 4)


def _ahead(product: Product, config: MmaConfig) -> int:
    """Return for how many of a warp's first stages the weights are read before x.

    These are on their way before the previous kernel ends.  If all were, x would wait for them: for 3,800 cycles in the
    gated product of Llama-1B on an H200, where 1,300 suffice if nothing else is on its way.
    """
    return -(-config.depth // 2) if _has_one_row(product, config.tile_m) else config.depth


def _mma(product: Product, config: MmaConfig, device: Device) -> Implementation:
    staged = config.is_staged and product.norm is None
    defines = {
        "NORM": 0, **product.defines(), "TILE_M": config.tile_m, "TILE_N": config.tile_n, "WARPS": config.warps,
        "DEPTH": config.depth, "AHEAD": _ahead(product, config), "STAGED_X": int(staged), "MIN_BLOCKS": config.resident,
        "ONE_ROUND": int(_rounds(config, product, device) == 1 and config.depth >= _stages(config, product, device)),
        "SHARED_BYTES": config.shared(product),
        "WIDTH": math.gcd(product.width(config.tile_n), _columns_per_thread(config.tile_m)),
    }  # fmt: skip
    kernel, given = with_program(Kernel("nbits_mma", "nbits_mma", defines), product.arguments(), product.program)
    blocks = -(-product.tiles(config.tile_n) // _rounds(config, product, device))
    grid, threads = (blocks, -(-product.m // config.tile_m), 1), (32 * config.warps, 1, 1)
    launch = Launch(kernel, grid, threads, given, config.shared(product), pdl=device.has_pdl)
    return by_rows(config.name, launch, product, product.weights[0].n, config.tile_n)


def _dot(product: Product, device: Device) -> Implementation:
    rows = next(count for count in (1, 2, 4, MAX_DOT_ROWS) if product.m <= count)
    word = 4 if product.aligned and product.row_bits % 32 == 0 else 1
    x_vector = math.gcd(word * 8 // product.bits, product.k, VECTOR_BYTES // product.item) if product.aligned else 1
    defines = {
        **product.defines(), "ROWS": rows, "WARPS": DOT_WARPS, "WORD": word, "X_VECTOR": x_vector,
        "WIDTH": product.width(DOT_WARPS),
    }  # fmt: skip
    kernel, given = with_program(Kernel("nbits_dot", "nbits_dot", defines), product.arguments(), product.program)
    grid = (product.tiles(DOT_WARPS), -(-product.m // rows), 1)
    launch = Launch(kernel, grid, (32 * DOT_WARPS, 1, 1), given, pdl=device.has_pdl)
    return by_rows(f"nbits_dot_{rows}", launch, product, product.weights[0].n, DOT_WARPS)


def _columns(product: Product, device: Device) -> Implementation:
    rows = next(count for count in (1, 2, 4, MAX_DOT_ROWS) if product.m <= count)
    is_whole = product.aligned and all(weight.n * product.bits % 32 == 0 for weight in product.weights)
    word = 4 if is_whole else 1
    each = word * 8 // product.bits
    # Eight lanes read 32 bytes of a row of w, a whole sector.  Four lanes per row give small products more blocks.
    lanes = 8 if product.tiles(8 * each) >= device.multiprocessors else 4
    x_vector = math.gcd(8, product.k, VECTOR_BYTES // product.item) if product.aligned else 1
    defines = {
        **product.defines(), "ROWS": rows, "LANES": lanes, "WARPS": DOT_WARPS, "WORD": word, "X_VECTOR": x_vector,
        "WIDTH": product.width(lanes * each),
    }  # fmt: skip
    kernel, given = with_program(
        Kernel("nbits_columns", "nbits_columns", defines), product.arguments(), product.program
    )
    grid = (product.tiles(lanes * each), -(-product.m // rows), 1)
    launch = Launch(kernel, grid, (32 * DOT_WARPS, 1, 1), given, pdl=device.has_pdl)
    return by_rows(f"nbits_columns_{rows}x{lanes}", launch, product, product.weights[0].n, lanes * each)


def _dequantized(product: Product, device: Device) -> list[Implementation]:
    """Return implementations that write each weight to scratch memory as numbers, and then run a Gemm."""
    numbers = {weight.w: Pointer("scratch", i) for i, weight in enumerate(product.weights)}
    before = tuple(_dequantize(product, weight, numbers[weight.w], device) for weight in product.weights)

    def after_numbers(pointer: Pointer) -> Pointer:
        if pointer.kind == "scratch":
            return replace(pointer, index=pointer.index + len(numbers))
        stored = numbers.get(replace(pointer, offset=0))
        return replace(stored, offset=pointer.offset) if stored else pointer

    first, *others = product.weights
    up = others[0] if others else None
    plain = Gemm(
        product.m, first.n, product.k, product.dtype, product.layout != "kn", product.aligned, x=product.x, w=first.w,
        y=product.y, bias=first.bias, up=up.w if up else None, up_bias=up.bias if up else None,
        residual=product.residual, residual_first=product.residual_first, activation=product.activation,
        tf32=device.tf32, program=product.program,
    )  # fmt: skip
    scratch = tuple(weight.n * product.k * product.item for weight in product.weights)
    return [
        Implementation(
            f"dequantized, {each.name}",
            (*before, *(moved(step, after_numbers) for step in each.steps)),
            (*scratch, *each.scratch),
        )
        for each in gemm_implementations(plain, device)
    ]


def _dequantize(product: Product, weight: Weight, numbers: Pointer, device: Device) -> Launch:
    """Return the launch that writes a weight as numbers, in the order in which it is stored."""
    is_kn = product.layout == "kn"
    rows, columns = (product.k, weight.n) if is_kn else (weight.n, product.k)
    width = math.gcd(columns, VECTOR_BYTES // product.item) if product.aligned else 1
    defines = {
        **epilogue_defines(product.dtype, "none"), **product.weight_defines(weight), "PRODUCTS": 1,
        "COLUMNS_FIRST": int(is_kn),
        "ROW_BITS": weight.n * product.bits if is_kn else product.row_bits, "WIDTH": width,
        "WORD": 4 if product.aligned and width * product.bits % 32 == 0 else 1,
    }  # fmt: skip
    given = (weight.w, weight.scales, weight.zero_points, numbers)
    grid = (-(-rows * (columns // width) // DEQUANTIZE_THREADS), 1, 1)
    kernel = Kernel("nbits_dequantize", "nbits_dequantize", defines)
    return Launch(kernel, grid, (DEQUANTIZE_THREADS, 1, 1), given, pdl=device.has_pdl)
