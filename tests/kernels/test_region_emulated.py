"""Regions on a CPU: their generated kernels, emulated, against onnxruntime's results of the same operators."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from region_cases import all_cases, edges, maps, models, numbers, one
from region_drafts import NUMPY, RegionProgram, check, made
from region_emulation import plan_of, results
from region_norm_cases import cases
from region_random import random_program
from sampling import sampled
from small_tilings import small_tilings

from onnxfuse.kernels.region import host
from onnxfuse.region_operators import REDUCTIONS
from onnxfuse.runtime.plan import Launch
from onnxfuse.testing.emulated_launches import emulate

GPU = dataclasses.replace(H200, multiprocessors=2)  # so that few elements are planned for like many
AT_ONCE = 60  # programs of one compilation
RANDOM = 1200


def check_all(programs: Mapping[str, RegionProgram], folder: Path, aligned: bool = True) -> None:
    """Check programs, which are compiled together; the message of a failure names all that fail."""
    failures = []
    found = results(list(programs.values()), GPU, folder, aligned)
    for (name, program), own in zip(programs.items(), found, strict=True):
        try:
            check(program, own, program.expected())
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, f"{len(failures)} fail: " + "\n".join(failures[:5])


CASES = all_cases()
PARTS = -(-len(CASES) // AT_ONCE)


@pytest.mark.parametrize("part", sampled(range(PARTS), PARTS), ids=lambda part: f"part{part}")
def test_operators_maps_and_reductions(part: int, tmp_path: Path) -> None:
    check_all({name: CASES[name] for name in list(CASES)[part::PARTS]}, tmp_path)


def test_extremes_of_all_elements_are_found_together_and_merged_by_few_blocks(tmp_path: Path) -> None:
    """As for a DynamicQuantizeLinear."""
    program = RegionProgram()
    x = program.operand(np.random.default_rng(0).standard_normal((300, 512)).astype(np.float32))
    low, high = (program.op(f"Reduce{each}", x, axes=[0, 1], keepdims=1) for each in ("Min", "Max"))
    program.outputs = [program.op("Add", program.op("Sub", x, low), high)]
    first, second = plan_of(program, GPU).steps
    assert isinstance(first, Launch) and isinstance(second, Launch)
    assert first.kernel.text.count("float x0_1[4][4]") == 2  # of whole rounds, and of the last one
    assert "38400 - 1 - at" in first.kernel.text  # from the end on
    assert second.grid[0] == 300 * 512 // (4 * 128 * 8) + 1
    loaded, merged = map(second.kernel.text.index, ("x0_1[8][4]", "stored_by_block"))
    assert loaded < merged  # the loads of all rounds come before the merges
    check_all({"": program}, tmp_path)


def test_launches_have_few_arguments_for_the_numbers_of_many_quantizers(tmp_path: Path) -> None:
    """The runtime takes up to 64: here 25 pointers, and some of 48 numbers."""
    program, parts = RegionProgram(), list[str]()
    for i in range(24):
        x = program.operand(np.random.default_rng(i).integers(0, 256, (5, 8)).astype(np.uint8))
        scale = program.op("Constant", dtype="float32", value=0.01 + 0.001 * i)
        zero = program.op("Constant", dtype="uint8", value=i)
        parts.append(program.op("DequantizeLinear", x, scale, zero, dtype="float32"))
    program.outputs = [functools.reduce(lambda a, b: program.op("Add", a, b), parts)]
    (step,) = plan_of(program, GPU).steps
    assert isinstance(step, Launch) and 25 < len(step.arguments) < 64
    check_all({"": program}, tmp_path)


def test_quantizers_of_special_numbers_and_scales(tmp_path: Path) -> None:
    check_all({name: case for name, case in CASES.items() if name.startswith("QuantizeLinear")}, tmp_path)


@pytest.mark.parametrize("part", sampled(range(RANDOM // AT_ONCE), RANDOM), ids=lambda part: f"part{part}")
def test_random_programs(part: int, tmp_path: Path) -> None:
    first = part * AT_ONCE
    check_all({f"seed {seed}": random_program(seed) for seed in range(first, first + AT_ONCE)}, tmp_path, part % 5 != 4)


FOUND = [272]  # rows that an index names, at which vectors would start elsewhere: their heads did not compile


@pytest.mark.parametrize("part", sampled(range(8), 8), ids=lambda part: f"part{part}")
def test_random_programs_whose_reductions_are_stored(part: int, tmp_path: Path) -> None:
    seeds = [seed for seed in range(5000 + 400 * part, 5400 + 400 * part) if reduces(random_program(seed))]
    seeds = [*(FOUND if part == 0 else ()), *seeds[:AT_ONCE]]
    with small_tilings():
        check_all({f"seed {seed}": random_program(seed) for seed in seeds}, tmp_path)


def reduces(program: RegionProgram) -> bool:
    return any(op in REDUCTIONS for op, *_ in program.ops)


def test_indices_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WORD", 0)
    check_all(dict([*maps(), *models()][::4]), tmp_path)


def test_values_of_which_onnx_says_nothing(tmp_path: Path) -> None:
    check_all(dict(edges()), tmp_path)


def test_a_nan_is_the_largest_and_the_least_of_a_row(tmp_path: Path) -> None:
    """As ONNX says, and onnxruntime's CUDA provider does; on CPUs it depends on where the NaN stands."""
    programs = {}
    for op, axis in itertools.product(("ReduceMax", "ReduceMin"), (0, 1)):
        x = numbers((40, 300), "float16")
        x[3, 7] = np.nan
        programs[op, axis] = one("", op, x, axes=[axis], keepdims=1)[1]
    found = results(list(programs.values()), GPU, tmp_path)
    for ((op, axis), program), (own,) in zip(programs.items(), found, strict=True):
        function = np.max if op == "ReduceMax" else np.min
        np.testing.assert_array_equal(own, function(program.operands["x0"], axis, keepdims=True))


def test_a_nan_is_selected_only_as_the_first_element(tmp_path: Path) -> None:
    """As onnxruntime's CPU provider selects, however threads and blocks divide a row."""
    programs = {}
    for op, axis, last, size in itertools.product(("ArgMax", "ArgMin"), (0, 1), (0, 1), (40, 5000)):
        x = numbers((40, size), "float16")
        x[[3, 5, 0, 0], [7, 0, 6, 0]] = np.nan  # elsewhere in a row and first, by columns and by rows
        x[9], x[:, 9], x[11] = np.nan, np.nan, np.inf
        given = {"axis": axis, "keepdims": 1, "select_last_index": last}
        programs[f"{op} {given} {size}"] = one("", op, x, dtype="int64", **given)[1]
    check_all(programs, tmp_path)


def test_norms_of_what_precedes_them_against_float64(tmp_path: Path) -> None:
    every = list(cases())
    found = results([case.made()[1] for case in every], GPU, tmp_path)
    for case, outputs in zip(every, found, strict=True):
        for own, expected in zip(outputs, case.expected(), strict=True):
            rounding = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[own.dtype.name]
            np.testing.assert_allclose(own.astype(np.float64), expected, rounding, rounding, err_msg=case.name)


def wide(p: RegionProgram, x: str) -> str:
    return p.op("Cast", x, dtype="float32", to="float32")


def largest_place(p: RegionProgram, x: str, y: str) -> str:
    """Through operators that pass values on: a maximum, a Reshape and a Concat."""
    longer = p.op("Concat", p.op("Reshape", p.op("Max", p.op("Mul", x, y), y), shape=[-1]), y, axis=0)
    return p.op("ArgMax", wide(p, longer), dtype="int64", axis=0, keepdims=0, select_last_index=0)


def rest(p: RegionProgram, x: str, y: str) -> str:
    """Where both readers see the same product, the rest is not negative."""
    whole = p.op("Mul", x, y)
    return p.op("Less", p.op("Sub", whole, p.op("Floor", whole)), p.op("Constant", dtype=p.dtypes[x], value=0))


# Programs of x = 1, 2, ... and y = 1 / x, and what they give in arithmetic that rounds each result to the dtype.
ROUNDED: Mapping[str, tuple[Callable[..., str], Callable[..., np.ndarray]]] = {
    "Floor": (
        lambda p, x, y: p.op("Floor", wide(p, p.op("Mul", x, y))),
        lambda x, y: np.floor((x * y).astype(np.float32)),
    ),
    "Cast": (
        lambda p, x, y: p.op("Cast", wide(p, p.op("Neg", p.op("Mul", x, y))), dtype="int64", to="int64"),
        lambda x, y: (-(x * y)).astype(np.int64),
    ),
    "all operators in front": (
        lambda p, x, y: p.op("Equal", wide(p, p.op("Add", p.op("Mul", x, y), p.op("Mul", y, y))), wide(p, x)),
        lambda x, y: x * y + y * y == x,
    ),
    "IsInf": (
        lambda p, x, y: p.op("IsInf", wide(p, p.op("Mul", x, p.op("Mul", x, x))), dtype="bool"),
        lambda x, y: np.isinf((x * (x * x)).astype(np.float32)),
    ),
    "ArgMax": (largest_place, lambda x, y: np.argmax(np.concatenate([np.maximum(x * y, y), y]).astype(np.float32))),
    "two readers": (rest, lambda x, y: x * y - np.floor((x * y).astype(np.float32)).astype(x.dtype) < 0),
    "a quotient": (
        lambda p, x, y: p.op("Floor", wide(p, p.op("Div", p.op("Add", x, y), y))),
        lambda x, y: np.floor(((x + y) / y).astype(np.float32)),
    ),
    "a maximum of rows": (
        lambda p, x, y: p.op("Ceil", wide(p, p.op("ReduceMax", p.op("Mul", x, y), axes=[0], keepdims=1))),
        lambda x, y: np.ceil((x * y).max(0, keepdims=True).astype(np.float32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_that_are_not_continuous_are_of_rounded_values(dtype: str, tmp_path: Path) -> None:
    """As NumPy has them, which rounds each result; Casts and what passes values on stand in between."""
    x = np.arange(1, 257).astype(NUMPY[dtype])
    y = (np.float32(1) / x.astype(np.float32)).astype(x.dtype)
    programs = [made(name, [x, y], build)[1] for name, (build, _) in ROUNDED.items()]
    for (own,), (name, (_, formula)) in zip(results(programs, GPU, tmp_path), ROUNDED.items(), strict=True):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(own, formula(x, y), err_msg=name)


def test_functions_are_as_accurate_as_their_sources_say(tmp_path: Path) -> None:
    """Tanh of every finite float16, to half a unit and 4e-5; Sin and Cos of float32 to 1.53 units in the last place."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x, angles = x[np.isfinite(x)], np.geomspace(1e-30, 3e38, 4000, dtype=np.float32)
    _, program = made("", [x, angles], lambda p, x, a: [p.op("Tanh", x), p.op("Sin", a), p.op("Cos", a)])
    plan = plan_of(program, GPU)
    (step,) = plan.steps
    assert isinstance(step, Launch)
    step = dataclasses.replace(step, kernel=dataclasses.replace(step.kernel, defines={"PRECISE": 0}))
    tanh, *others = emulate(dataclasses.replace(plan, steps=(step,)), [x, angles], tmp_path)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(tanh.astype(np.float64), np.tanh(wide), 2.0**-11 + 4.5e-5, 2.0**-25)
    for own, function in zip(others, (np.sin, np.cos), strict=True):
        expected = function(angles.astype(np.float64))
        unit = np.ldexp(1.0, np.frexp(expected)[1] - 24)
        assert np.max(np.abs(own - expected) / unit) < 1.53


def test_texts_are_the_same_in_every_process() -> None:
    """So that processes find each other's machine code."""
    names = ["modulate of DiT, dynamic", "windows of Swin", "a loss"]
    code = (
        "from region_cases import all_cases; from region_emulation import plan_of; from architectures import H200\n"
        f"print([plan_of(all_cases()[name], H200) for name in {names}])"
    )
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1 and "region(" in found.pop()
