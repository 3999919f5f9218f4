"""Kernels that start early wait for the kernel in front: in what the compiler makes of them, without a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pdl_cases import ATTENTION, NODES, node_of, specs_of
from sampling import sampled
from shared_cubins import shared

from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.nvrtc import COMMON_FLAGS, compile_flags, kernel_text
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, TensorSpec

nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")
STORE = re.compile(r"\b(st\.(global|volatile)|atom|red\.|cp\.async\.bulk\S*\.global\.shared)")
ACCESS = re.compile(rf"{STORE.pattern}|\bld\.(global|volatile|relaxed|acquire)|\bcp\.async")
# A length, which the previous kernel can still write; until the wait, it only says which rows of a cache to prefetch.
LENGTH_AHEAD = re.compile(r"\bld\.volatile\.global\.u32")
HOPPER = Device("Hopper", 90, 132, 227 * 1024)
OLDER = Device("Ampere", 80, 108, 163 * 1024)


def cases(device: Device) -> Iterator[tuple[str, FusedNode, Sequence[TensorSpec]]]:
    for name in NODES:
        for constants in (False, True):
            yield name, *node_of(name, constants)
    for name, case in ATTENTION.items():
        yield name, case.node(), specs_of(case)


@functools.cache
def launches(device: Device) -> dict[str, dict[str, Launch]]:
    """Return the launches of every candidate, by node and by compiled source."""
    found: dict[str, dict[str, Launch]] = {}
    for name, node, inputs in cases(device):
        for plan in find_host(node.fusion).candidates(node, inputs, device):
            for step in plan.steps:
                if isinstance(step, Launch):
                    found.setdefault(name, {})[repr(step.kernel)] = step
    return found


def compile_ptx(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    """Return what NVRTC makes of a source, as PTX for sm_90a, and no log."""
    program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])[1]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    assert code == nvrtc.nvrtcResult.NVRTC_SUCCESS
    buffer = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, buffer)
    nvrtc.nvrtcDestroyProgram(program)
    return buffer, ""


@pytest.fixture(scope="module")
def entry(compiled_folder: Callable[[str], Path]) -> Callable[[Kernel], str]:
    """Return a function that gives the PTX of a kernel's entry alone."""
    compile_once = shared(compile_ptx, compiled_folder("ptx"))

    @functools.cache
    def found(text: str, name: str, flags: tuple[str, ...]) -> str:
        ptx, _ = compile_once(text, "kernel.cu", ["-arch=compute_90a", *flags, *COMMON_FLAGS])
        parts = ptx.decode().split(".entry ")
        return next(part for part in parts[1:] if part.startswith(f"{name}("))

    return lambda kernel: found(kernel_text(kernel), kernel.entry, compile_flags(kernel))


@pytest.mark.parametrize("name", sampled([*NODES, *ATTENTION], 4))
def test_who_starts_early_waits(name: str, entry: Callable[[Kernel], str]) -> None:
    """Before it writes anything, and before it reads anything but constants."""
    for step in launches(HOPPER)[name].values():
        if step.pdl:
            before, wait, _ = entry(step.kernel).partition("griddepcontrol.wait")
            assert wait, step.kernel
            if step.kernel.source in ("attention_with_cache", "attention_one_query"):
                before = LENGTH_AHEAD.sub("", before, count=1)
            constants = step.kernel.defines.get("WEIGHTS_CONSTANT")
            touched = STORE if constants else ACCESS
            assert not touched.search(before), (step.kernel, touched.search(before))
            assert constants or "ld.global.nc" not in entry(step.kernel), "what the kernel in front may still write"


def test_nothing_starts_early_on_older_gpus() -> None:
    found = [step for steps in launches(OLDER).values() for step in steps.values()]
    assert found and not any(step.pdl for step in found)
