"""The kernels of many regions as one text, whose headers are parsed once; and what NVRTC says of its syntax."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from onnxfuse.runtime import nvrtc
from onnxfuse.runtime.plan import Kernel

OWN_LINES = re.compile(r'(?m)^#line \d+ "region\.cu"$')
MESSAGE = re.compile(r"(?m)^(?P<entry>\w+)\(\d+\): error")


def headers_and_own(kernel: Kernel, entry: str) -> tuple[str, str]:
    """Return the headers of a region's kernel, and its own lines with another entry, which messages name as a file."""
    *heads, own = OWN_LINES.split(nvrtc.kernel_text(kernel))
    own = own.replace("#define EACH", "#undef EACH\n#define EACH")
    return "".join(heads), f'#line 1 "{entry}"\n' + re.sub(rf"\b{kernel.entry}\(", f"{entry}(", own, count=1)


def joined(kernels: Mapping[str, Kernel]) -> str:
    """Return one text of kernels that have these entries."""
    parts = [headers_and_own(kernel, entry) for entry, kernel in kernels.items()]
    return "\n".join([*(head for head, _ in parts[:1]), *(own for _, own in parts)])


def refused(kernels: Mapping[str, Kernel], arch: int) -> dict[str, str]:
    """Return the kernels that do not compile, by entry, with the compiler's messages; templates are instantiated.

    A kernel takes a millisecond, because no code is generated: 15 ms with PTX, and 27 ms with machine code.
    """
    by_flags: dict[tuple[str, ...], dict[str, Kernel]] = {}
    for entry, kernel in kernels.items():
        by_flags.setdefault(nvrtc.compile_flags(kernel), {})[entry] = kernel
    found: dict[str, str] = {}
    for flags, group in by_flags.items():
        messages = _messages(joined(group), [f"-arch=compute_{arch}", *flags])
        begins = [*(each.start() for each in MESSAGE.finditer(messages)), len(messages)]
        assert begins[1:] or not messages, messages
        parts = [messages[begin:end] for begin, end in itertools.pairwise(begins)]
        found |= {own[1]: part for part in reversed(parts) if (own := MESSAGE.match(part))}
    return found


def refused_alone(kernel: Kernel, arch: int) -> str:
    """Return the compiler's messages on any kernel; nothing if it compiles."""
    flags = f"-arch={nvrtc.arch_name(kernel, arch).replace('sm_', 'compute_')}", *nvrtc.compile_flags(kernel)
    return _messages(nvrtc.kernel_text(kernel), flags)


def _messages(text: str, flags: Iterable[str]) -> str:
    """Return what NVRTC says of a text that it refuses."""
    library: Any = __import__("cuda.bindings.nvrtc", fromlist=["nvrtc"])
    given = [*flags, *nvrtc.COMMON_FLAGS, *nvrtc._cuda_include_flags()]
    for own in ([*given, "-fdevice-syntax-only"], given):  # older versions generate code
        program = library.nvrtcCreateProgram(text.encode(), b"regions", 0, [], [])[1]
        (code,) = library.nvrtcCompileProgram(program, len(own), [flag.encode() for flag in own])
        log = bytes(library.nvrtcGetProgramLogSize(program)[1])
        library.nvrtcGetProgramLog(program, log)
        library.nvrtcDestroyProgram(program)
        if code != library.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            break
    return "" if code == library.nvrtcResult.NVRTC_SUCCESS else log.rstrip(b"\0").decode()
