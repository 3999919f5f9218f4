"""Hopper's attention on a CPU: its own source and plans, with emulated instructions; masks of all rows alone."""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_build import load
from hopper_emulation import KERNELS, NULL_POINTERS, Map, map_of
from sampling import sampled

from onnxfuse.kernels.attention import hopper
from onnxfuse.kernels.attention.problem import Attention, HeadNumbers, ScoreTensor
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.runtime.plan import Kernel, Launch, Pointer, Scalar, TensorMap

SIZE = 64
LOWEST = -65504.0
SLOPE = 0.5
PARTS = ("blocks.cuh", "hopper_shape.cuh", "hopper_copies.cuh", "hopper_scores.cuh", "hopper.cu")
SOURCES = ("located.cuh", "program.cuh", *(f"attention/attention_{part}" for part in PARTS))
MEMORY = "extern __shared__ __align__(1024) unsigned char shared[];"


@dataclass(frozen=True)
class Case:
    """One head; `kept` is the part of the keys that a mask of all rows keeps, whose masked scores are finite."""

    config: int = 0  # of CONFIGS
    length: int = 130
    amplitude: float = 1.0  # of the queries
    growth: float = 1.0  # of the first key, relative to the last one, which the kernel reads first
    cap: float = 0.0
    places: int | None = None  # of the first key, by which a slope is multiplied
    causal: bool = False
    kept: float | None = None

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return " ".join(given) or "plain"


CASES = [
    Case(amplitude=3, growth=8),
    Case(cap=50.0, amplitude=8),
    Case(places=-129, causal=True),
    Case(),
    Case(5, 200),
    Case(causal=True),
    Case(5, 200, places=0),
    Case(places=0, kept=0.6),
    Case(places=0, kept=0.0),
    Case(cap=50.0),
    Case(5, 200, cap=30.0),
    Case(cap=50.0, amplitude=40),
    Case(cap=50.0, amplitude=3, growth=8),
    Case(cap=50.0, amplitude=3, causal=True),
    Case(cap=50.0, kept=0.6),
    Case(cap=50.0, kept=0.0),
]


@pytest.mark.parametrize("case", sampled(CASES, 8), ids=str)
def test_matches_float64(case: Case, tmp_path: Path) -> None:
    arrays = operands(case)
    inputs = {name: Pointer("input", i) for i, name in enumerate(arrays)}
    found = np.full((case.length, SIZE), np.nan, np.float16)
    step = hopper.implementation(problem(case, inputs), hopper.CONFIGS[SIZE][case.config]).steps[-1]
    assert isinstance(step, Launch)
    addresses = {pointer: arrays[name].ctypes.data for name, pointer in inputs.items()}
    addresses[Pointer("output", 0)] = found.ctypes.data
    maps = [map_of(each, addresses[each.pointer]) for each in step.arguments if isinstance(each, TensorMap)]
    integers, numbers = (
        [each.value for each in step.arguments if isinstance(each, Scalar) and each.type == kind]
        for kind in ("int32", "float32")
    )
    library(step.kernel, len(numbers), tmp_path).run(
        (Map * len(maps))(*maps), (ctypes.c_int * len(integers))(*integers), (ctypes.c_float * len(numbers))(*numbers),
        *(ctypes.c_void_p(addresses.get(inputs.get(name))) for name in ("mask", "positions", "slopes")),
        step.grid[0], step.shared,
    )  # fmt: skip
    weights, values = expected_weights(case, arrays), arrays["v"].astype(np.float64)
    allowed = 2**-10 * (weights @ np.abs(values)) + 1e-4
    assert np.all(np.abs(found - weights @ values) <= allowed)


def operands(case: Case) -> dict[str, np.ndarray]:
    random = np.random.default_rng(case.length)
    q, k, v = (random.standard_normal((case.length, SIZE)) for _ in range(3))
    growth = np.linspace(case.growth, 1.0 if case.growth == 1 else 0.05, case.length)
    made = {"q": q * case.amplitude, "k": k * growth[:, None], "v": v}
    made = {name: values.astype(np.float16) for name, values in made.items()}
    if case.places is not None:
        made["positions"] = np.arange(case.places, case.places + case.length, dtype=np.float16)
        made["slopes"] = np.array([SLOPE], np.float32)
    if case.kept is not None:
        made["mask"] = random.random(case.length) < case.kept
    return made


def problem(case: Case, inputs: dict[str, Pointer]) -> Attention:
    def heads(pointer: Pointer) -> HeadTensor:
        return HeadTensor(pointer, case.length * SIZE, SIZE, SIZE)

    def of_keys(name: str, dtype: str) -> ScoreTensor:
        return ScoreTensor(inputs[name], dtype, 0, 0, 0, 1, True)

    more: dict[str, Any] = {"masked_score": LOWEST if case.causal or case.kept is not None else -math.inf}
    if case.places is not None:
        more |= {"bias": of_keys("positions", "float16"), "slopes": HeadNumbers(inputs["slopes"], "float32")}
    if case.kept is not None:
        more |= {"mask_kind": "boolean", "mask": of_keys("mask", "bool")}
    if case.causal:
        more |= {"causal": 0, "add_masked_score": True}
    return Attention(
        1, 1, 1, case.length, case.length, SIZE, SIZE, "float16", True, *(heads(inputs[name]) for name in "qkv"),
        heads(Pointer("output", 0)), scale=SIZE**-0.5, softcap=case.cap, **more,
    )  # fmt: skip


def expected_weights(case: Case, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the weights in float64."""
    wide = {name: values.astype(np.float64) for name, values in arrays.items() if name != "mask"}
    scores = wide["q"] @ wide["k"].T * SIZE**-0.5
    if case.cap:
        scores = case.cap * np.tanh(scores / case.cap)
    if case.places is not None:
        scores = scores + SLOPE * wide["positions"]
    if case.kept is not None:
        scores = np.where(arrays["mask"], scores, LOWEST)
    if case.causal:
        scores = np.where(np.tri(case.length, dtype=bool), scores, scores + LOWEST)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def library(kernel: Kernel, numbers: int, folder: Path) -> ctypes.CDLL:
    """Return the kernel's library, which takes so many numbers."""
    text = "\n".join((KERNELS / name).read_text() for name in SOURCES)
    text = re.sub(r"(?m)^#(include|pragma).*$", "", text)
    assert MEMORY in text
    text = re.sub(r"\bTHREADS\b", "BLOCK_THREADS", text.replace(MEMORY, "char* shared = emulated::here->memory;"))
    text = f'#include "hopper_emulated.h"\n{text}\n#include "attention_hopper_emulated.h"\n'
    return load(text, {**kernel.defines, "NUMBERS": numbers}, ["-pthread", *NULL_POINTERS], folder / "kernel.cc")
