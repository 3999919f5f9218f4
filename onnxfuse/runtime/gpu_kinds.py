"""Kinds of GPUs: the properties that plans depend on, which GPUs can run plans made for others, and known GPUs.

A plan is correct on every GPU of its compute capability that allows the shared memory per block and the cluster sizes
of its launches, because no kernel waits for blocks of other clusters.  The number of multiprocessors decides grids and
choices between plans: on a GPU with another number, the plan that was chosen is still correct, but maybe not the
fastest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Final

from onnxfuse.errors import UsageError
from onnxfuse.runtime.plan import NO_GPU, Device
from onnxfuse.runtime.plan_file import KernelCode

PORTABLE_CLUSTER: Final = 8  # blocks in the largest cluster that every GPU with clusters can run
# Name, compute capability, multiprocessors, bytes of shared memory that a block may opt in to.  The first GPU of each
# compute capability is the default if only the capability is given.
_KNOWN: Final = (
    ("Tesla T4", 75, 40, 65536),
    ("NVIDIA GeForce RTX 2080 Ti", 75, 68, 65536),
    ("NVIDIA A100-SXM4-80GB", 80, 108, 166912),
    ("NVIDIA A100-SXM4-40GB", 80, 108, 166912),
    ("NVIDIA A100 80GB PCIe", 80, 108, 166912),
    ("NVIDIA A100-PCIE-40GB", 80, 108, 166912),
    ("NVIDIA A30", 80, 56, 166912),
    ("NVIDIA A10", 86, 72, 101376),
    ("NVIDIA A10G", 86, 80, 101376),
    ("NVIDIA A40", 86, 84, 101376),
    ("NVIDIA RTX A6000", 86, 84, 101376),
    ("NVIDIA GeForce RTX 3090", 86, 82, 101376),
    ("NVIDIA L4", 89, 58, 101376),
    ("NVIDIA L40", 89, 142, 101376),
    ("NVIDIA L40S", 89, 142, 101376),
    ("NVIDIA GeForce RTX 4090", 89, 128, 101376),
    ("NVIDIA H200", 90, 132, 232448),
    ("NVIDIA H100 80GB HBM3", 90, 132, 232448),
    ("NVIDIA H100 NVL", 90, 132, 232448),
    ("NVIDIA H100 PCIe", 90, 114, 232448),
    ("NVIDIA GH200 480GB", 90, 132, 232448),
    ("NVIDIA B200", 100, 148, 232448),
    ("NVIDIA GeForce RTX 5090", 120, 170, 101376),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 188, 101376),
)
KNOWN_GPUS: Final = tuple(Device(*row, ordinal=NO_GPU) for row in _KNOWN)


def gpu_kind(device: Device) -> Device:
    """Return a GPU without its ordinal and the session's settings."""
    return Device(device.name, device.arch, device.multiprocessors, device.shared_per_block)


def describe(device: Device) -> str:
    """Return text such as "NVIDIA H200 (sm_90, 132 multiprocessors)"."""
    return f"{device.name} (sm_{device.arch}, {device.multiprocessors} multiprocessors)"


def nearest_kinds(kinds: Iterable[Device], here: Device) -> list[Device]:
    """Return the kinds of GPUs whose code this GPU runs: `here` first, if it is listed, then the most similar ones."""
    same = [kind for kind in kinds if kind.arch == here.arch]
    return sorted(same, key=lambda kind: (kind != here, abs(kind.multiprocessors - here.multiprocessors)))


def plans_alike(kind: Device, here: Device) -> bool:
    """Return whether two kinds of GPUs get the same plans: whether they are equal except for their names."""
    return replace(kind, name=here.name) == here


def why_too_large(kernels: Iterable[KernelCode], kind: Device, here: Device) -> str | None:
    """Return why this GPU cannot run kernels that were made for another kind; None if it can."""
    for each in kernels:
        if each.shared > here.shared_per_block:
            return f"blocks need {each.shared} bytes of shared memory, this GPU allows {here.shared_per_block}"
        if each.cluster > PORTABLE_CLUSTER and kind != here:
            return f"clusters have {each.cluster} blocks, other kinds of GPUs may allow {PORTABLE_CLUSTER} only"
    return None


# --- GPUs by name -----------------------------------------------------------------------------------------------------


def named_gpus(archs: Sequence[str], names: Sequence[str], present: Sequence[Device]) -> list[Device]:
    """Return the GPUs with these names, and a GPU for each further compute capability in `archs`.

    A GPU that is present is preferred to one that is only known.  Raises UsageError for a compute capability that no
    GPU has, and for a name that matches no GPU or several different ones.
    """
    known = [*present, *(device for device in KNOWN_GPUS if device not in present)]
    found = [_by_name(name, known) for name in names]
    for arch in map(_arch_of, archs):
        if not any(device.arch == arch for device in found):
            found.append(_usual(arch, known))
    return list(dict.fromkeys(found))


def _arch_of(text: str) -> int:
    found = re.fullmatch(r"sm_(\d+)", text)
    if not found:
        raise UsageError(f"'{text}' is not a compute capability; give it as in --arch sm_90")
    return int(found[1])


def _usual(arch: int, known: Sequence[Device]) -> Device:
    found = next((device for device in known if device.arch == arch), None)
    if found is None:
        archs = ", ".join(f"sm_{each}" for each in sorted({device.arch for device in known}))
        raise UsageError(f"no GPU of compute capability sm_{arch} is known; known are {archs}")
    return found


def _by_name(name: str, known: Sequence[Device]) -> Device:
    """Return the GPU with a name; an abbreviation is accepted if all GPUs that it matches get the same plans."""
    exact = [device for device in known if device.name.casefold() == name.casefold()]
    found = exact or [device for device in known if _words(name) <= _words(device.name)]
    if not (found and (exact or all(plans_alike(device, found[0]) for device in found))):
        names = [device.name for device in known]
        near = [device.name for device in found] or get_close_matches(name, names, 3, 0.3) or names
        what = "there are several GPUs" if found else "no GPU is known"
        raise UsageError(f"{what} of the name '{name}'; known are {', '.join(near)}")
    return found[0]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))
