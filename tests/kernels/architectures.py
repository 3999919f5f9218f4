"""The GPUs for which the tests plan and compile kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnxfuse.runtime.plan import Device, Kernel

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
# What the sources tell apart: instructions from sm_80 on, and griddepcontrol, which takes no registers, from sm_90 on.
TOLD_APART = ("__CUDA_ARCH__ >= 800", "__CUDA_ARCH__ >= 900")


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
