"""Hopper's attention on a CPU: its own source and plans, with emulated instructions; masks of all rows alone.

In TF32, the values are transposed by their kernel's own source, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_emulation import run
from sampling import sampled

from onnxfuse.kernels.attention import hopper
from onnxfuse.kernels.attention.problem import Attention, HeadNumbers, ScoreTensor
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.rotary.rotary import Rotary, RotatedHeads
from onnxfuse.kernels.tensors import ABSENT
from onnxfuse.runtime.plan import Launch, Pointer, TensorSpec
from onnxfuse.testing.emulated_launches import launch, library

SIZE = 64
LOWEST = -65504.0
SLOPE = 0.5
EPSILON = 1e-6


@dataclass(frozen=True)
class Turn:
    """How queries are rotated: all elements or the first of them, in neighbouring pairs or halves, behind a norm."""

    rotated: int = SIZE
    pairs: bool = False
    pairs_after: bool = False
    whole_table: bool = True
    norm: bool = False
    first_rows: int = 0  # that stay as they are
    tables: str = "float16"

    def __str__(self) -> str:
        given = [f"{name} {value}" for name, value in vars(self).items() if value != getattr(Turn, name)]
        return ", ".join(given) or "halves"


@dataclass(frozen=True)
class Case:
    """One head; `kept` is the part of the keys that a mask of all rows keeps, whose masked scores are finite."""

    config: int = 0  # of CONFIGS, or of TF32_CONFIGS
    dtype: str = "float16"
    size: int = SIZE
    value_size: int = SIZE
    length: int = 130
    amplitude: float = 1.0  # of the queries
    growth: float = 1.0  # of the first key, relative to the last one, which the kernel reads first
    cap: float = 0.0
    places: int | None = None  # of the first key, by which a slope is multiplied
    causal: bool = False
    kept: float | None = None
    turn: Turn | None = None

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
    Case(7),
]
IN_TF32 = [
    Case(1, "float32", length=300, amplitude=3, growth=8),
    Case(0, "float32", size=40, value_size=24),
    Case(0, "float32", size=128, value_size=128, length=67, causal=True),
    Case(0, "float32", length=203, places=0, kept=0.6),
    Case(2, "float32", size=32, value_size=64, cap=50.0),
    Case(2, "float32", size=72, value_size=128, kept=0.0),
]
TURNED = [
    Case(turn=Turn()),
    Case(5, 200, turn=Turn(pairs=True, pairs_after=True)),
    Case(5, turn=Turn(32, tables="float32")),
    Case(turn=Turn(pairs=True, whole_table=False)),
    Case(turn=Turn(norm=True, tables="float32")),
    Case(causal=True, turn=Turn(16, norm=True, first_rows=3)),
    Case(kept=0.6, turn=Turn(32, pairs=True, pairs_after=True, whole_table=False, first_rows=70)),
]


@pytest.mark.parametrize("case", [*sampled(CASES, 7), *sampled(IN_TF32, 6), *sampled(TURNED, 3)], ids=str)
def test_matches_float64(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "MAX_ROTATED_BEFORE", 0)
    arrays = operands(case)
    inputs = {name: Pointer("input", i) for i, name in enumerate(arrays)}
    found = np.full((case.length, case.value_size), np.nan, case.dtype)
    table = hopper.CONFIGS if case.dtype == "float16" else hopper.TF32_CONFIGS
    made = hopper.implementation(problem(case, inputs), table[64 if case.value_size <= 64 else 128][case.config])
    addresses = {pointer: arrays[name].ctypes.data for name, pointer in inputs.items()}
    addresses[Pointer("output", 0)] = found.ctypes.data
    scratch = [np.full(size, 255, np.uint8) for size in made.scratch]
    addresses |= {Pointer("scratch", i): each.ctypes.data for i, each in enumerate(scratch)}
    *before, step = made.steps
    for each in before:
        assert isinstance(each, Launch)
        launch(each, library(each.kernel, tmp_path), addresses.__getitem__)
    assert isinstance(step, Launch)
    run(step, addresses, tmp_path)
    if case.dtype == "float32":
        arrays = {name: rounded(each) if name in "qkv" else each for name, each in arrays.items()}
    weights, values = expected_weights(case, arrays), arrays["v"].astype(np.float64)
    # In TF32, half an ulp of the weights, in place of one of the weights and the result.
    allowed = (2**-10 if case.dtype == "float16" else 2**-11 + 2**-16) * (weights @ np.abs(values))
    allowed += 1e-4 if case.dtype == "float16" else 1e-6
    assert np.all(np.abs(found - weights @ values) <= allowed)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the nearest TF32 numbers."""
    return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def operands(case: Case) -> dict[str, np.ndarray]:
    random = np.random.default_rng(case.length)
    q, k, v = (random.standard_normal((case.length, size)) for size in (case.size, case.size, case.value_size))
    growth = np.linspace(case.growth, 1.0 if case.growth == 1 else 0.05, case.length)
    made = {"q": q * case.amplitude, "k": k * growth[:, None], "v": v}
    made = {name: values.astype(case.dtype) for name, values in made.items()}
    if case.places is not None:
        made["positions"] = np.arange(case.places, case.places + case.length, dtype=np.float16)
        made["slopes"] = np.array([SLOPE], np.float32)
    if case.kept is not None:
        made["mask"] = random.random(case.length) < case.kept
    if case.turn:
        shape = case.length - case.turn.first_rows, case.turn.rotated // (1 if case.turn.whole_table else 2)
        angles = random.uniform(-3, 3, shape)
        made |= {"cos": np.cos(angles).astype(case.turn.tables), "sin": np.sin(angles).astype(case.turn.tables)}
        made |= {"q_scale": random.uniform(0.5, 1.5, SIZE).astype(np.float16)} if case.turn.norm else {}
    return made


def turned_queries(turn: Turn, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the queries behind norm and rotation, rounded to float16."""
    wide = {name: values.astype(np.float64) for name, values in arrays.items()}
    q, half = wide["q"], turn.rotated // 2
    if turn.norm:
        q = q / np.sqrt((q**2).mean(-1, keepdims=True) + EPSILON) * wide["q_scale"]

    def places(pairs: bool) -> tuple[slice, slice]:
        return (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if pairs else (slice(half), slice(half, 2 * half))

    first, second = places(turn.pairs)
    at_first, at_second = (first, second) if turn.whole_table else (slice(None), slice(None))
    rows, y = slice(turn.first_rows, None), q.copy()
    one, other = q[rows, first], q[rows, second]
    to_first, to_second = places(turn.pairs_after)
    y[rows, to_first] = one * wide["cos"][:, at_first] - other * wide["sin"][:, at_first]
    y[rows, to_second] = other * wide["cos"][:, at_second] + one * wide["sin"][:, at_second]
    return y.astype(np.float16)


def problem(case: Case, inputs: dict[str, Pointer]) -> Attention:
    def heads(pointer: Pointer, size: int = case.size) -> HeadTensor:
        return HeadTensor(pointer, case.length * size, size, size)

    def of_keys(name: str, dtype: str) -> ScoreTensor:
        return ScoreTensor(inputs[name], dtype, 0, 0, 0, 1, True)

    more: dict[str, Any] = {"masked_score": LOWEST if case.causal or case.kept is not None else -math.inf}
    if case.places is not None:
        more |= {"bias": of_keys("positions", "float16"), "slopes": HeadNumbers(inputs["slopes"], "float32")}
    if case.kept is not None:
        more |= {"mask_kind": "boolean", "mask": of_keys("mask", "bool")}
    if case.causal:
        more |= {"causal": 0, "add_masked_score": True}
    if turn := case.turn:
        row = turn.rotated // (1 if turn.whole_table else 2)
        tables = TensorSpec((1, 1, case.length - turn.first_rows, row), turn.tables)
        unread = heads(Pointer("scratch", 0))
        q = RotatedHeads(1, heads(inputs["q"]), unread, inputs.get("q_scale", ABSENT))
        more["rotation"] = Rotary(
            1, case.length, SIZE, turn.rotated, (q,), inputs["cos"], inputs["sin"],
            tables, turn.tables, "float16", "float16", True, turn.whole_table,
            turn.pairs, turn.pairs_after, turn.first_rows, "float16" if turn.norm else "", EPSILON,
        )  # fmt: skip
    return Attention(
        1, 1, 1, case.length, case.length, case.size, case.value_size, case.dtype, True,
        *(heads(inputs[name]) for name in "qk"),
        *(heads(each, case.value_size) for each in (inputs["v"], Pointer("output", 0))),
        scale=SIZE**-0.5, softcap=case.cap, tf32=True, **more,
    )  # fmt: skip


def expected_weights(case: Case, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the weights in float64."""
    if case.turn:
        arrays = {**arrays, "q": turned_queries(case.turn, arrays)}
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
