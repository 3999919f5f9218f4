"""The kernels of many regions as one text, whose headers are parsed once; and what NVRTC says of its syntax."""

from __future__ import annotations

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
        found |= _refused(joined(group), [f"-arch=compute_{arch}", *flags])
    return found


def _refused(text: str, flags: Iterable[str]) -> dict[str, str]:
    library: Any = __import__("cuda.bindings.nvrtc", fromlist=["nvrtc"])
    all_flags = [*flags, *nvrtc.COMMON_FLAGS, *nvrtc._cuda_include_flags(), "-fdevice-syntax-only"]
    program = library.nvrtcCreateProgram(text.encode(), b"regions", 0, [], [])[1]
    (code,) = library.nvrtcCompileProgram(program, len(all_flags), [flag.encode() for flag in all_flags])
    log = bytes(library.nvrtcGetProgramLogSize(program)[1])
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(program)
    if code == library.nvrtcResult.NVRTC_SUCCESS:
        return {}
    messages = log.rstrip(b"\0").decode()
    begins = [found.start() for found in MESSAGE.finditer(messages)]
    assert begins, messages
    ends = [*begins[1:], len(messages)]
    each = [messages[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return {found[1]: text for text in reversed(each) if (found := MESSAGE.match(text))}
