"""Recurrent layers on a CPU: the launch of all steps against float64, and float64 against onnxruntime's operators."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from architectures import H200
from attention_cases import NUMPY
from recurrent_cases import CASES, Case
from sampling import by_parts, in_turn

from onnxfuse.kernels.recurrent import host
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Device, Kernel, Pointer
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import PARTS, as_c_plus_plus, launch, launcher

EXACT = dataclasses.replace(H200, tf32=False)
# The text that replaces gemm_multiply.cuh.
PRODUCTS = """#include "blocks_emulated.h"
#include "attention_mma_emulated.h"
#define multiply mma
static u32 nearest_tf32(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }
"""


def library(kernel: Kernel, folder: Path, late: bool) -> Any:
    whole = kernel_text(kernel)
    parts = zip(["", *PARTS.findall(whole)], PARTS.split(whole)[::2], strict=True)
    text = as_c_plus_plus("".join(f'#line 1 "{n}"\n{part}' for n, part in parts if n not in ("", "gemm_multiply.cuh")))
    source = f"{PRODUCTS}{text}\n{launcher(kernel.entry, 'launch')}"
    made = load(source, kernel.defines, ["-ffp-contract=off"], folder / "recurrent.cc")
    ctypes.c_bool.in_dll(made, "late_after_arrival").value = late
    return made.launch


def run(case: Case, config: host.Config, device: Device, folder: Path, late: bool) -> list[np.ndarray]:
    """Return the outputs of the launch of all steps; NumPy multiplies the inputs.

    late  blocks are as late as possible after they arrive at the cluster's barrier
    """
    node, specs, arrays = case.node(), case.specs(), case.arrays()
    layer = host.layer_of(node, specs)
    step = host.steps_of(node, specs, layer, config, device)
    assert step.shared <= device.shared_per_block and step.grid[0] % step.cluster == 0
    products = arrays["x"].astype(np.float64) @ arrays["w"].astype(np.float64).reshape(-1, case.inputs).T
    given = [products.astype(NUMPY[case.dtype]), *(arrays[name] for name in arrays if name not in ("x", "w"))]
    shapes = [(case.steps, *layer.state), layer.state, layer.state]
    written = [np.full((3, *shape), np.nan, NUMPY[case.dtype]) for shape in shapes[: case.count]]

    def address(pointer: Pointer) -> int:
        found = given[pointer.index] if pointer.kind == "input" else written[pointer.index][1]
        return int(found.ctypes.data)

    launch(step, library(step.kernel, folder, late), address)
    for each in written:
        assert np.isnan(each[::2].astype(np.float32)).all(), "written outside of the results"
    return [each[1] for each in written]


def check(case: Case, config: host.Config, device: Device, folder: Path) -> None:
    right = case.expect()
    for late in (False, True) if config.cluster > 1 else (False,):
        case.check(run(case, config, device, folder, late), right, config.mma)


def smallest_and_largest(case: Case, device: Device) -> list[host.Config]:
    """Return the fastest way, and ways in clusters of 2 and 16 blocks with the fewest and most registers."""
    layer = host.layer_of(case.node(), case.specs())
    every = host.configs(layer, device)
    found = [host.ranked(layer, device)[0]]
    for cluster in (1, 2, 16):
        own = [each for each in every if each.cluster == cluster]
        found += [*own[:1], *own[-1:]]
    return list(dict.fromkeys(found))


@by_parts(2)
@pytest.mark.parametrize(("turn", "name"), [*enumerate(CASES)])
def test_matches_float64(turn: int, name: str, part: int, tmp_path: Path) -> None:
    for config in in_turn(smallest_and_largest(CASES[name], EXACT), turn, part, 2):
        check(CASES[name], config, EXACT, tmp_path)


@by_parts(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("turn", "name"), [*enumerate(["both_directions", "gru", "gru_linear", "rnn", "many_sequences"])]
)
def test_products_by_mma(turn: int, name: str, dtype: str, part: int, tmp_path: Path) -> None:
    case = dataclasses.replace(CASES[name], dtype=dtype)
    for config in in_turn(smallest_and_largest(case, H200), turn + [*NUMPY].index(dtype), part, 2):
        check(case, config, H200, tmp_path)


@pytest.mark.parametrize("held", [0, 1, 2])
def test_weights_in_shared_memory(held: int, tmp_path: Path) -> None:
    for dtype, tf32 in ("float16", True), ("float32", False):
        case = Case(hidden=64, batch=3, dtype=dtype)
        device = dataclasses.replace(H200, tf32=tf32)
        config = next(
            each for each in host.configs(host.layer_of(case.node(), case.specs()), device) if each.cluster == 2
        )
        stored = config.warps * config.tiles * config.steps * 1024
        fewer = dataclasses.replace(config, held=min(held, config.steps), shared=config.shared + stored)
        check(case, fewer, device, tmp_path)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.steps])
def test_the_formula_is_what_the_operator_computes(name: str) -> None:
    """Leave out cases without steps: onnxruntime does not write their last states."""
    case = CASES[name]
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(
        case.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for found, right in zip(session.run(None, case.arrays()), case.expect(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
