"""Products with quantized weights on a CPU, by the kernels' own sources: dot products, and weights as numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import H200, T4
from emulated_build import load
from emulated_launches import as_c_plus_plus, emulate, launcher
from nbits_cases import CASES, Case, check_within, stored_arrays
from sampling import sampled

from onnxfuse.kernels.matmul_nbits.host import candidates
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, TensorSpec

EVERY = 25  # of the cases, in a plain run of the tests
SMALL = [replace(case, k=min(case.k, 1000), n=min(case.n, 160)) for case in CASES if case.m]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled([case for case in SMALL if case.m <= 8], EVERY), ids=str)
def test_few_rows(case: Case, aligned: bool, tmp_path: Path) -> None:
    """On a GPU without mma of 16 elements of k, the first plan of few rows reads the weights as they are."""
    device = replace(H200, arch=T4.arch) if case.dtype == "float16" else H200
    plans = candidates(case.node(), case.specs(aligned), device)
    ways = [plan for plan in plans if _sources(plan) <= {"nbits_dot", "nbits_columns"}]
    for plan in ways[:1]:
        stored = stored_arrays(case)
        found = emulate(plan, list(stored.values()), tmp_path, aligned, _library)
        check_within(case, stored, found)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled(SMALL, EVERY), ids=str)
def test_weights_as_numbers(case: Case, aligned: bool, tmp_path: Path) -> None:
    """The launches before the float product write each weight in the order in which it is stored."""
    steps = candidates(case.node(), case.specs(aligned), H200)[-1].steps
    stored = stored_arrays(case)
    launches = [s for s in steps if isinstance(s, Launch) and s.kernel.source == "nbits_dequantize"]
    for launch, name in zip(launches, case.weights, strict=True):
        (written,) = (each for each in launch.arguments if isinstance(each, Pointer) and each.kind == "scratch")
        numbers = case.numbers(stored, name)
        expected = numbers.T if case.layout == "kn" else numbers
        to = Pointer("output", 0)
        moved = replace(launch, arguments=tuple(to if each == written else each for each in launch.arguments))
        plan = Plan((TensorSpec(expected.shape, case.dtype, aligned),), (moved,))
        (found,) = emulate(plan, list(stored.values()), tmp_path, aligned)
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}[case.dtype]
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=unit, atol=0)


def _sources(plan: Plan) -> set[str]:
    return {step.kernel.source if isinstance(step, Launch) else "" for step in plan.steps}


def _library(kernel: Kernel, folder: Path) -> Any:
    """Compile a kernel, with its parameters written out for each weight."""
    count = 2 if kernel.defines["GATED"] else int(kernel.defines["PRODUCTS"])
    text = as_c_plus_plus(kernel_text(kernel))
    (one,) = re.findall(r"#define PRODUCT_PARAMETERS\(number\)((?:.*\\\n)*.*)\n", text)
    each = " ".join(one.replace("\\", "").split())
    written = ", ".join(each.replace("##number", f"_{i}" if i > 1 else "") for i in range(1, count + 1))
    text = re.sub(rf"{kernel.entry}\(const T\* x, ALL_PARAMETERS", f"{kernel.entry}(const T* x, {written}", text)
    text = re.sub(r"\b(T|void|char) \*", r"\1* ", text)
    whole = f'#include "blocks_emulated.h"\n{text}\n{launcher(kernel.entry, text, "launch")}'
    stem = f"{kernel.source}_{abs(hash(repr(kernel)))}"
    return load(whole, kernel.defines, ["-ffp-contract=off"], folder / f"{stem}.cc").launch
