"""Write which operators onnxruntime's CUDA provider has kernels for, as onnxruntime's own registry says.

    python benchmarks/ort_kernels.py > onnxfuse/inspection/ort_kernels.json

This needs a wheel of onnxruntime-gpu, whose CUDA and TensorRT providers must load, and runs nothing on a GPU.
`onnxfuse inspect` reads the file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import onnxruntime
from onnx import defs
from onnxruntime.capi import onnxruntime_pybind11_state as state

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
NEWEST = 2**31 - 1  # what the registry says of a kernel that no newer version has replaced


def places(domain: str, op: str, version: int) -> dict[str, str]:
    """Return where an operator has each type of its schema first: at input "0" and so on, or at output "out 0"."""
    schemas = [s for s in state.get_all_operator_schema() if (s.domain, s.name) == (domain, op)]
    found: dict[str, str] = {}
    for schema in [s for s in schemas if s.since_version <= version][-1:]:
        for prefix, listed in (("", schema.inputs), ("out ", schema.outputs)):
            for i, parameter in enumerate(listed):
                found.setdefault(parameter.typeStr, f"{prefix}{i}")
                found.setdefault(parameter.name, f"{prefix}{i}")  # by which some kernels constrain it
    return found


def kernels(provider: str) -> dict[tuple[str, str], dict[tuple[int, int], dict[str, set[str]]]]:
    """Return the dtypes of each type of each kernel, by domain and operator, and by the versions that it is for."""
    found: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == provider and kernel.domain in DOMAINS:
            types = found[kernel.domain, kernel.op_name][tuple(kernel.version_range)]
            for name, dtypes in kernel.type_constraints.items():
                types[name] |= {dtype.removeprefix("tensor(").removesuffix(")") for dtype in dtypes}
    return dict(found)


def cuda_rows(sets: dict[str, int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield for each operator its kernels: first and last version (0 if none is newer), and dtypes of parameters.

    Dtypes are written as the number of a set in `sets`, which grows.
    """
    for (domain, op), versions in sorted(kernels(CUDA).items()):
        rows = []
        for (first, last), types in sorted(versions.items()):
            at = places(domain, op, first)
            known = {at[name]: " ".join(sorted(dtypes)) for name, dtypes in sorted(types.items()) if name in at}
            numbers = {place: sets.setdefault(dtypes, len(sets)) for place, dtypes in known.items()}
            rows.append([first, 0 if last == NEWEST else last, numbers])
        yield f"{domain}::{op}" if domain else op, rows


def cpu_rows() -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the versions of the CPU kernels of operators that ONNX defines by others."""
    defined = {schema.name for schema in defs.get_all_schemas_with_history() if schema.has_function or
               schema.has_context_dependent_function}  # fmt: skip
    for (domain, op), versions in sorted(kernels(CPU).items()):
        if not domain and op in defined:
            yield op, [[first, 0 if last == NEWEST else last] for first, last in sorted(versions)]


def main() -> None:
    """Print the file: one line for each operator."""
    if CUDA not in onnxruntime.get_available_providers():
        sys.exit(f"this onnxruntime has no {CUDA}; install onnxruntime-gpu")
    sets: dict[str, int] = {}
    parts = []
    for name, rows in (("cuda", cuda_rows(sets)), ("cpu", cpu_rows())):
        lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(row)}" for op, row in rows)
        parts.append(f' "{name}": {{\n{lines}\n }}')
    listed = ",\n".join(f"  {json.dumps(dtypes)}" for dtypes in sets)
    head = f' "onnxruntime": "{onnxruntime.__version__}",\n "dtypes": [\n{listed}\n ]'
    print("{\n" + ",\n".join([head, *parts]) + "\n}")


if __name__ == "__main__":
    main()
