"""The blocks that fit on a multiprocessor, and the first compute capability with the instructions of most kernels."""

from __future__ import annotations

from typing import Final

from onnxfuse.runtime.plan import Device

MMA_ARCH: Final = 80  # the first compute capability with bf16, TF32, mma with k of 16, and cp.async
REGISTERS: Final = 65536  # registers per multiprocessor
RESERVED_BYTES: Final = 1024  # bytes of shared memory per block that the system reserves


def fitting_blocks(shared: int, device: Device) -> int:
    """Return how many blocks with `shared` bytes of dynamic shared memory fit into a multiprocessor's shared memory."""
    return (device.shared_per_block + RESERVED_BYTES) // (shared + RESERVED_BYTES)


def bytes_of_block(blocks: int, device: Device) -> int:
    """Return the maximum bytes of dynamic shared memory per block if a multiprocessor is to hold `blocks` blocks."""
    return (device.shared_per_block + RESERVED_BYTES) // blocks - RESERVED_BYTES
