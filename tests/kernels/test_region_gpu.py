"""Regions on a GPU: their generated kernels against onnxruntime's results of the same operators."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping

import numpy as np
import pytest
from region_cases import all_cases
from region_drafts import NUMPY, RegionProgram, check
from region_random import random_program

from onnxfuse.runtime.plan import Device

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu
AT_ONCE = 40  # programs of one compilation
RANDOM = 400
CASES = all_cases()
PARTS = -(-len(CASES) // AT_ONCE)
THROUGH_PLANS = ["windows of Swin", "modulate of DiT", "a loss", "cosine normalisation", "rotary embedding",
                 "outputs of several shapes", "layer norm [1]", "ReduceSum [0, 1, 2] float32", "a clamp of many",
                 "Softmax of two long rows", "mean of gathered rows", "mean of a softmax", "mean pooling",
                 "bias of windows of 49", "bytes of an image", "cosine normalisation of heads",
                 "a sum behind a Transpose", "a transposed clamp",
                 "quantized rows, dynamic", "log-softmax of long odd rows"]  # fmt: skip


def gpu(multiprocessors: int = 0) -> Device:
    found: Device = importlib.import_module("onnxfuse.runtime.cuda_driver").gpu(0)
    return dataclasses.replace(found, multiprocessors=multiprocessors) if multiprocessors else found


def check_all(programs: Mapping[str, RegionProgram], device: Device, aligned: bool = True) -> None:
    from region_on_gpu import results

    for (name, program), found in zip(programs.items(), results(list(programs.values()), device, aligned), strict=True):
        try:
            check(program, found, program.expected())
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_maps_and_reductions(part: int) -> None:
    check_all({name: CASES[name] for name in list(CASES)[part::PARTS]}, gpu(2))


@pytest.mark.parametrize("part", range(RANDOM // AT_ONCE))
def test_random_programs(part: int) -> None:
    seeds = range(part * AT_ONCE, (part + 1) * AT_ONCE)
    check_all({f"seed {seed}": random_program(seed) for seed in seeds}, gpu(2 if part % 2 else 0), part % 5 != 4)


@pytest.mark.parametrize("name", THROUGH_PLANS)
def test_plans_run_as_in_a_session(name: str) -> None:
    program = CASES[name]
    check(program, through_plan(program), program.expected())


def through_plan(program: RegionProgram) -> list[np.ndarray]:
    """Return the outputs of a kernel that is compiled by itself, and launched by the native library."""
    from kernel_runs import launch, upload
    from region_emulation import plan_of

    plan = plan_of(program, gpu())
    read = [upload(each) for each in program.operands.values()]
    written = [upload(np.zeros(spec.shape, NUMPY[spec.dtype])) for spec in plan.outputs]
    launch(plan, read, written)
    return [
        each.get().view(NUMPY[spec.dtype]).reshape(spec.shape) for each, spec in zip(written, plan.outputs, strict=True)
    ]


TINY = (1e-40, 3e-42, 6e-39, 1.17549435e-38, 1e-45)  # but for the fourth, subnormal


@pytest.mark.parametrize("op", ["Exp", "Log", "Sqrt", "Reciprocal", "Div", "Mul", "Sub", "Softmax"])
def test_subnormal_numbers_are_not_flushed(op: str) -> None:
    """Else, the logarithm of a probability below 2^-126, for instance, would be -inf, and an entropy NaN."""
    numbers = {
        "Exp": np.linspace(-103, -87, 50),
        "Reciprocal": np.linspace(1e38, 3.4e38, 50),
        "Softmax": np.stack([np.linspace(start, 0, 30) for start in (-95, -102, -3)]),
    }
    tiny = np.resize(np.asarray(TINY), 50) * np.linspace(1, 1.5, 50)
    program, own = RegionProgram(), numbers.get(op, tiny).astype(np.float32)
    x, wide = program.operand(own), own.astype(np.float64)
    if op == "Softmax":
        y = program.op("Log", program.op("Softmax", x, axis=1))
        exact = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    elif op in ("Div", "Mul", "Sub"):
        other = np.where(np.arange(50) % 2, -3e-42, 1e-20 if op == "Div" else 0.25).astype(np.float32)
        y = program.op(op, x, program.operand(other))
        exact = {"Div": np.divide, "Mul": np.multiply, "Sub": np.subtract}[op](wide, other.astype(np.float64))
    else:
        y = program.op(op, x)
        exact = {"Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt, "Reciprocal": np.reciprocal}[op](wide)
    program.outputs = [y]
    (found,) = through_plan(program)
    np.testing.assert_allclose(found, exact, rtol=0.02 if op == "Softmax" else 2e-5, atol=3e-45)
