"""The host side of nbits_hopper.cu: many rows of x by quantized weights, which become numbers in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.matmul_nbits.problem import TYPED_ZEROS, Product
from onnxfuse.kernels.multiprocessor import bytes_of_block
from onnxfuse.kernels.selection import selects
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer, TensorMap
from onnxfuse.runtime.symint import best_first, maximum, minimum

ARCH: Final = 90
ROW_BYTES: Final = 128  # bytes of a row of weights or of x in a buffer
PART_K: Final = 64  # elements along k in a buffer of x
MAX_STAGES: Final = 12  # buffers of weights; there are at most twice as many of x
BARRIER_BYTES: Final = 16 * 3 * MAX_STAGES  # each buffer has two mbarriers of 8 bytes
MAX_CONFIGS: Final = 3
CONVERT_CYCLES: Final = {4: 270, 8: 327}  # to convert 64 rows of a part, by the bits of a weight


@dataclass(frozen=True)
class HopperConfig:
    """The macros of nbits_hopper.cu that this module chooses; `rows` are the rows of weights in a tile."""

    tile_m: int
    rows: int
    consumers: int
    k_groups: int
    split_k: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        split = f" k/{self.split_k}" if self.split_k > 1 else ""
        return f"nbits_hopper {self.tile_m}x{self.rows}/{self.consumers}x{self.k_groups}{split}"

    @property
    def atoms(self) -> int:
        """How many times 64 rows a consumer multiplies."""
        return self.rows * self.k_groups // (64 * self.consumers)

    @property
    def resident(self) -> int:
        """The blocks that a multiprocessor holds."""
        return 2 if self.consumers == 1 else 1

    def columns(self, product: Product) -> int:
        """Return the columns of y in a tile; a gated product has two rows of weights for each."""
        return self.rows // (2 if product.is_gated else 1)

    def stages(self, device: Device) -> tuple[int, int]:
        """Return the buffers of weights and of x."""
        room = bytes_of_block(self.resident, device) - BARRIER_BYTES
        of_weights, of_x = self.rows * ROW_BYTES, self.tile_m * ROW_BYTES
        # Weights get about a third of the memory, and at least two buffers: one is read while TMA fills the other.
        for_weights = max(2, self.k_groups, min(MAX_STAGES, room // 3 // of_weights))
        for_x = min(2 * MAX_STAGES, (room - for_weights * of_weights) // of_x)
        return for_weights, for_x

    def shared(self, device: Device) -> int:
        """Return a block's bytes of shared memory."""
        of_weights, of_x = self.stages(device)
        return (of_weights * self.rows + of_x * self.tile_m) * ROW_BYTES + BARRIER_BYTES


CONFIGS: Final = tuple(
    HopperConfig(tile_m, rows, consumers, k_groups, split_k)
    for rows, consumers, k_groups, tiles_m in (
        (64, 2, 2, (16, 32, 64, 128)), (64, 1, 1, (64, 128)), (128, 2, 1, (128, 256)), (256, 2, 1, (16, 32, 64)),
    )
    for tile_m in tiles_m
    for split_k in (1, 2)
)  # fmt: skip


def implementations(product: Product, device: Device) -> list[Implementation]:
    """Return the implementations, the expected fastest first.

    The list is empty for other GPUs, zero points of type T, a norm, or an ArgMax of each row.
    """
    is_taken = device.arch == ARCH and not product.norm and not selects(product)
    if not is_taken or any(each.zeros == TYPED_ZEROS for each in product.weights):
        return []
    fitting = [config for config in CONFIGS if _fits(product, config, device)]
    ordered = best_first(fitting, lambda config: cycles(product, config, device))
    return [implementation(product, config, device) for config in ordered[:MAX_CONFIGS]]


def _fits(product: Product, config: HopperConfig, device: Device) -> bool:
    """Return whether each consumer has a stage, and shared memory holds the rings, and the sums in their place."""
    stages = -(-product.row_bits // (8 * ROW_BYTES))
    sums = config.k_groups * config.tile_m * (config.rows + 4) * 4
    _, of_x = config.stages(device)
    parts = 8 * ROW_BYTES // (product.bits * PART_K)
    are_few = stages < config.split_k * config.k_groups or of_x < config.k_groups * parts
    return not are_few and sums <= config.shared(device) - BARRIER_BYTES


def cycles(product: Product, config: HopperConfig, device: Device) -> float:
    """Estimate a product's clock cycles without its launch.

    The constants fit 59 measurements on an H200: configs for nine products with m from 16 to 1024.  For each of these
    products, the config with the lowest estimate took at most 3 % longer than the fastest.
    """
    blocks = product.tiles(config.columns(product)) * -(-product.m // config.tile_m) * config.split_k
    rounds = -(-blocks // (device.multiprocessors * config.resident))
    at_once = minimum(config.resident, -(-blocks // device.multiprocessors)) * config.consumers
    convert = CONVERT_CYCLES[product.bits] + 1.1 * config.tile_m
    alone = 70 + config.atoms * convert  # of a consumer that waits for its own instructions
    shared = at_once * (config.atoms * (92 + 2.1 * config.tile_m))  # of units that all consumers use
    parts = product.k / (PART_K * config.split_k * config.k_groups)
    adding = 0.06 * config.k_groups * config.tile_m * config.rows
    cost: float = rounds * (parts * maximum(alone, shared) + 5150 + adding) + 1030 * (config.split_k - 1)
    return cost


def implementation(product: Product, config: HopperConfig, device: Device) -> Implementation:
    """Return one launch of the kernel."""
    columns = config.columns(product)
    of_weights, of_x = config.stages(device)
    defines = {
        **product.defines(), "TILE_M": config.tile_m, "CONSUMERS": config.consumers,
        "ATOMS": config.atoms, "K_GROUPS": config.k_groups,
        "SPLIT_K": config.split_k, "W_STAGES": of_weights, "X_STAGES": of_x,
        "WIDTH": product.width(columns),
    }  # fmt: skip
    dtype: Literal["float16", "bfloat16"] = "float16" if product.dtype == "float16" else "bfloat16"

    def tensor_map(pointer: Pointer, row_bytes: int, rows: int, box: int) -> TensorMap:
        return TensorMap(pointer, dtype, (row_bytes // 2, rows), (row_bytes,), (ROW_BYTES // 2, box), ROW_BYTES)

    maps = [tensor_map(product.x, product.k * product.item, product.m, config.tile_m)]
    maps += [tensor_map(each.w, product.row_bits // 8, each.n, columns) for each in product.weights]
    _, products, residual, m = product.arguments()
    kernel, given = with_program(
        Kernel("nbits_hopper", "nbits_hopper", defines, arch_specific=True), (*maps, products, residual, m),
        product.program,
    )  # fmt: skip
    grid = (product.tiles(columns) * config.split_k, 1, -(-product.m // config.tile_m))
    launch = Launch(
        kernel, grid, (128 * (1 + config.consumers), 1, 1), given, config.shared(device), config.split_k, pdl=True
    )
    return Implementation(config.name, (launch,))
