"""Products of two computed tensors of integers on a CPU: the kernel's source and plans, with emulated instructions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from architectures import H200
from matmul_cases import CASES, Case

from onnxfuse.kernels.quantized.host import candidates, supports
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Kernel
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import REPLACED, as_c_plus_plus, emulate, launcher

MULTIPLY = re.compile(r"(?m)^__device__ __forceinline__ void multiply_bytes\(int .*\n(.*\n)*?}\n")
HEADERS = ("blocks_emulated.h", "attention_mma_emulated.h", "quantized_matmul_emulated.h")


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_exact_sums(case: Case, aligned: bool, tmp_path: Path) -> None:
    node, specs, arrays = case.node(), case.specs(aligned), case.arrays()
    assert supports(node, [spec.dtype for spec in specs], H200) is None
    plan = candidates(node, specs, H200)[0]
    assert len(plan.steps) == (1 if case.m else 0)
    (y,) = emulate(plan, list(arrays.values()), tmp_path, aligned, library)
    case.check(arrays, y)


def library(kernel: Kernel, folder: Path) -> Any:
    text = as_c_plus_plus(kernel_text(kernel), (*REPLACED, "gemm_multiply.cuh"))
    text = text if kernel.defines["FLOAT8"] else MULTIPLY.sub("", text)
    included = "".join(f'#include "{name}"\n' for name in HEADERS)
    whole = f"{included}{text}\n{launcher(kernel.entry, 'launch')}"
    return load(whole, kernel.defines, ["-ffp-contract=off"], folder / f"{abs(hash(repr(kernel)))}.cc").launch
