"""Every way to run a Gemm on a GPU, the expected fastest first."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxfuse.kernels.gemm import cublaslt, hopper, mma, small
from onnxfuse.kernels.gemm.pad import padded
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.selection import selects
from onnxfuse.runtime.plan import Device, Launch
from onnxfuse.runtime.symint import estimate, for_later_plans, is_symbolic

MAX_IMPLEMENTATIONS: Final = 8  # maximum candidates; tuning compiles and times each one

MAX_OF_GATES: Final = 3  # maximum implementations of each kind if x has a gate

# With many rows and few columns, most of a wgmma tile is empty, and on an H200 cuBLASLt is faster if a single call
# suffices. Times in us by cuBLASLt and in wgmma tiles of 64x64: 401408x16x32 14.8 and 37.7, 100352x24x72 10.4 and 24.9,
# 401408x64x16 24.5 and 62.9; but 100352x64x64 7.8 and 8.0, and 100352x72x24 14.7 and 15.6.
MANY_ROWS: Final = 1 << 14
FEW_COLUMNS: Final = 40
FEW_COLUMNS_OF_GATES: Final = 32
SHORT_K, COLUMNS_OF_SHORT_K = 16, 64
# In TF32, cuBLASLt splits long k of products with few tiles, which wgmma does not. Times on an H200 in us by cuBLASLt
# and by wgmma: 128x768x3072 10.9 and 19.4; but 512x768x3072 22.4 and 20.6, 128x768x768 7.5 and 7.0.
LONG_K: Final = 1024
FEW_TILES: Final = 64 * 32  # elements of y per multiprocessor


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations of a Gemm with at least one element that are worth timing.

    Raises ValueError if there is none.
    """
    found = implementations_if_any(gemm, device)
    if not found:
        raise ValueError(f"no kernel multiplies {gemm.m}x{gemm.k} with {gemm.k}x{gemm.n} {gemm.dtype} on {device.name}")
    return found


def implementations_if_any(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations worth timing; an empty list if there is none."""
    if gemm.gate:
        return _behind_a_gate(gemm, device)
    for_few_rows = small.implementations(gemm, device)
    if selects(gemm):  # only kernels for few rows do, and only where one of them is expected to be the fastest
        fastest = implementations_if_any(replace(gemm, program=None), device)[:1]
        return for_few_rows if {each.name for each in fastest} <= {each.name for each in for_few_rows} else []
    if not for_few_rows and _has_few_tiles(gemm, device) and (library := cublaslt.implementations(gemm, device)):
        with for_later_plans(gemm.m):
            return [*library[:3], *hopper.implementations(gemm, device)[:4], *mma.implementations(gemm, device)[:1]]
    with for_later_plans(gemm.m if for_few_rows and not padded(gemm, residual=True)[1] else 0):
        wgmma = hopper.implementations(gemm, device)
        fast = wgmma or mma.implementations_of_copies(gemm, device)
    with for_later_plans(gemm.m if for_few_rows or fast else 0):
        library = cublaslt.implementations(gemm, device)
    with for_later_plans(gemm.m if for_few_rows or fast or library else 0):
        general = mma.implementations(gemm, device)
    if for_few_rows and wgmma and (_is_copied(gemm, wgmma[0]) or _fills_tiles(gemm, wgmma[0])):
        found = [*wgmma[:2], *library[:2], *for_few_rows[:4]]
    elif for_few_rows:
        found = [*for_few_rows[:4], *library[:2], *fast[:2]]
    elif wgmma and library and len(library[0].steps) == 1 and _has_empty_tiles(gemm):
        found = [*library[:3], *wgmma[:4], *general[:1]]
    else:
        found = [*fast[: 4 if wgmma else 2], *library[:3], *general[: 1 if fast else 3]]
    return (found or general)[:MAX_IMPLEMENTATIONS]


def _behind_a_gate(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations of a product whose x is multiplied by a gate first.

    With few columns, memory limits the speed, and mma.sync comes closer to this limit, because more of its blocks are
    resident. Times on an H200 in us by mma.sync, by wgmma, and as two nodes, channel_scale and product:
    100352x24x144 17.2, 18.6 and 27.7; 25088x40x240 9.8, 8.1 and 13.6.
    """
    few = gemm.n <= FEW_COLUMNS_OF_GATES
    with for_later_plans(gemm.m if few else 0):
        wgmma = hopper.implementations(gemm, device)[:MAX_OF_GATES]
    with for_later_plans(gemm.m if wgmma and not few else 0):
        general = mma.implementations(gemm, device)[:MAX_OF_GATES]
    return [*general, *wgmma] if few else [*wgmma, *general]


def _is_copied(gemm: Gemm, wgmma: Implementation) -> bool:
    """Return whether wgmma copies its operands first, and still beats kernels that load single elements.

    16x4095x4095 takes 109 us without the copy, and 34 with it.  For a single step of k, the copy does not pay:
    32x240x10 takes 2.15 us without it, and 2.99 with it.
    """
    return len(wgmma.steps) > 1 and gemm.k >= hopper.TILE_K


def _fills_tiles(gemm: Gemm, wgmma: Implementation) -> bool:
    """Return whether wgmma in one launch beats gemm_stream for a few rows, though wgmma prefetches no weights.

    On an H200, in us by wgmma and by gemm_stream: 49x2048x512 2.7 and 4.0, 33x768x768 3.1 and 3.7, 64x4096x1024 4.1 and
    4.7, 33x256x256 2.2 and 2.6, 20x512x128 2.0 and 2.1; but 20x768x768 3.1 and 2.6, 20x5120x1024 5.6 and 4.0,
    32x168x672 3.1 and 2.6. For each of eleven products with n >= k and k <= 1024, wgmma is faster from 33 rows on,
    with weights in L2 as well as in memory; with k up to 2048, where n is at least twice k: 64x8192x2048 10.6 and 12.0,
    48x6144x1536 7.5 and 8.5, 48x2560x1280 4.6 and 4.7; but 48x1536x1536 4.8 and 4.5, 40x1280x1280 4.2 and 4.0.
    """
    if gemm.dtype == "float32" or len(wgmma.steps) > 1 or _is_split(wgmma) or gemm.k > 2048:
        return False
    if gemm.n < gemm.k * (2 if gemm.k > 1024 else 1):
        return False
    return bool(estimate(gemm.m) > (16 if gemm.k <= 256 else 32))


def _has_few_tiles(gemm: Gemm, device: Device) -> bool:
    """Return whether a product in TF32 has few tiles and a long k, so that cuBLASLt is expected to be faster."""
    if gemm.dtype != "float32" or not gemm.tf32 or gemm.k <= LONG_K:
        return False
    return bool(estimate(gemm.m) * gemm.n <= FEW_TILES * device.multiprocessors)


def _is_split(wgmma: Implementation) -> bool:
    (launch,) = wgmma.steps
    return isinstance(launch, Launch) and launch.cluster > 1


def _has_empty_tiles(gemm: Gemm) -> bool:
    """Return whether y has so many rows and so few columns that cuBLASLt is expected to be faster than wgmma.

    Tiles of wgmma are then partly empty.  The result is False for a symbolic number of rows: cuBLASLt's plans then come
    after those of wgmma, so that guards (conditions on the sizes) of cuBLASLt's plans do not restrict the plans of
    wgmma.
    """
    few = gemm.n <= FEW_COLUMNS or (gemm.k <= SHORT_K and gemm.n <= COLUMNS_OF_SHORT_K)
    return few and not is_symbolic(gemm.m) and gemm.m >= MANY_ROWS
