"""The GPUs for which the tests plan and compile kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.nvrtc import Cubin, compile_cubin, compile_flags
from onnxfuse.runtime.plan import Device, Kernel, Launch

# Compute capability, multiprocessors and shared memory of a block on a GPU that has it.
T4 = Device("T4", 75, 40, 65536)
A100 = Device("A100", 80, 108, 166912)
H200 = Device("H200", 90, 132, 232448)
DEVICES = [
    T4,
    H200,
    A100,
    Device("A10", 86, 72, 101376),
    Device("L4", 89, 58, 101376),
    Device("B200", 100, 148, 232448),
    Device("RTX 5090", 120, 170, 101376),
]
OF_ARCH = {device.arch: device for device in DEVICES}
# What the sources tell apart: instructions from sm_80 on, conversions to float8 from sm_89 on, whose test compiles them
# for every GPU, and griddepcontrol, which takes no registers, from sm_90 on.
TOLD_APART = ("__CUDA_ARCH__ >= 800", "__CUDA_ARCH__ >= 890", "__CUDA_ARCH__ >= 900")
CHOICES = 8  # a macro that has more values among kernels of one source is a number, such as a size


def to_compile(
    device: Device, kernels_of: Callable[[Device], Iterable[Kernel]], part: int = 0, of: int = 1
) -> list[Kernel]:
    """Return the kernels of a device that no device before it with the same instructions has, and one of each source.

    So every source is compiled for every architecture, and every kernel for sm_75 and one of the later ones.  `part`
    is one of as many parts as `of` says, which a test takes by itself; part 0 has the one kernel of each source.
    """
    earlier = [
        each for each in DEVICES[: DEVICES.index(OF_ARCH[device.arch])] if (each.arch < 80) == (device.arch < 80)
    ]
    seen = {repr(kernel) for each in earlier for kernel in kernels_of(each)}
    own = list({repr(kernel): kernel for kernel in kernels_of(device)}.values())
    firsts = {kernel.source: repr(kernel) for kernel in reversed(own)}
    new = [kernel for kernel in own if repr(kernel) not in seen][part::of]
    if part:
        return new
    taken = {repr(kernel) for kernel in new}
    return [*new, *(each for each in own if firsts[each.source] == repr(each) and repr(each) not in taken)]


def covering(kernels: Iterable[Kernel], part: int, of: int) -> list[Kernel]:
    """Return part 0 of the kernels: few in which each source, value of a macro and line of a generated text occurs.

    Parts 1 to `of` - 1 share the others.  A macro of more than CHOICES values counts as a number, not as a choice.
    """
    named = {repr(kernel): kernel for kernel in kernels}
    values = defaultdict[tuple[str, str], set[str]](set)
    for kernel in named.values():
        for flag in compile_flags(kernel):
            values[kernel.source, flag.partition("=")[0]].add(flag)
    choices = {(source, flag) for (source, _), flags in values.items() if len(flags) <= CHOICES for flag in flags}
    has = {
        name: choices & {(kernel.source, flag) for flag in compile_flags(kernel)}
        | {(kernel.source, line) for line in kernel.text.splitlines()}
        for name, kernel in named.items()
    }
    lacking, chosen = set[tuple[str, str]]().union(*has.values()), list[str]()
    while lacking:
        chosen.append(max(has, key=lambda name: len(has[name] & lacking)))
        lacking -= has[chosen[-1]]
    others = [name for name in named if name not in chosen]
    return [named[name] for name in (others[part - 1 :: of - 1] if part else chosen)]


def check_compiles(kernel: Kernel, device: Device, spills: int | None = 0, stack: int | None = None) -> Cubin:
    """Check that a kernel compiles for a device without warnings.  Return what the compiler says of it.

    spills  bytes of registers that it may store and load; any number if None
    stack   bytes of local memory that a thread may have; any number if None
    """
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")
    compiled = compile_cubin(kernel, device.arch)
    spilled = compiled.spill_stores + compiled.spill_loads
    assert spills is None or spilled <= spills, f"{kernel} spills {spilled} bytes on sm_{device.arch}"
    assert stack is None or compiled.stack <= stack, f"{kernel} has {compiled.stack} bytes of local memory on {device}"
    assert "warning" not in compiled.log.lower(), compiled.log
    return compiled


def check_attention_compiles(kernel: Kernel, device: Device) -> None:
    """Check that a kernel of attention compiles for a device, and that the assembler does not serialize wgmma."""
    compiled = check_compiles(kernel, device, spills=None)
    # Beside masks, biases and wide results, values that are used once a tile may be spilled: up to twelve words.
    defines = kernel.defines
    crowded = defines.get("MASK") or defines.get("BIAS") or int(defines.get("HEAD_DIM_V", 0)) > 128
    allowed = 48 if crowded else 0
    assert compiled.spill_stores <= allowed, f"{kernel} spills {compiled.spill_stores} bytes on sm_{device.arch}"
    assert "wgmma" not in compiled.log, compiled.log  # "… are serialized due to …"


def check_sliced_launches(way: Implementation, device: Device, sums: int) -> Launch:
    """Check the launches of a product that may divide k into slices, each of so many sums; return the first launch."""
    first = way.steps[0]
    assert isinstance(first, Launch)
    assert first.shared <= device.shared_per_block and first.block[0] <= 1024
    assert first.pdl == (device.arch >= 90)
    assert len(way.steps) == (2 if first.grid[2] > 1 else 1)
    assert list(way.scratch) == [4 * first.grid[2] * sums] * (len(way.steps) - 1)
    return first
