"""Attention on Hopper compiles for sm_90a without spills, and what it does not take gets no plan: no GPU needed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from onnxfuse.kernels._attention import Attention, Heads, Scores
from onnxfuse.kernels._attention_hopper import plans
from onnxfuse.kernels.attention import ways
from onnxfuse.provider.plan import Device, Launch, Pointer, Scalar, TensorMap

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")

from onnxfuse.provider.cubin import compile_cubin

H200 = Device("H200", 90, 132, 232448)
LENGTH = 1000


def heads(kind: Any, place: int, count: int, size: int) -> Heads:
    return Heads(Pointer(kind, place), LENGTH * count * size, size, count * size)


def scores(dtype: str, query: int = LENGTH, key: int = 1) -> Scores:
    return Scores(Pointer("input", 3), dtype, 0, 0, query, key, True)


def problem(size: int, value_size: int = 0, dtype: str = "float16", **changes: Any) -> Attention:
    value_size = value_size or size
    tensors = {
        "q": heads("input", 0, 4, size),
        "k": heads("input", 1, 2, size),
        "v": heads("input", 2, 2, value_size),
        "out": heads("output", 0, 4, value_size),
    }
    whole = Attention(2, 4, 2, LENGTH, LENGTH, size, value_size, dtype, True, **tensors, scale=size**-0.5)
    return dataclasses.replace(whole, **changes)


def additive(dtype: str) -> dict[str, Any]:
    return {"mask_kind": "additive", "mask": scores(dtype)}


BOOLEAN: dict[str, Any] = {"mask_kind": "boolean", "mask": scores("bool")}
FINITE: dict[str, Any] = {"mask_kind": "inverted", "mask": scores("bool", query=0), "masked_score": -1e9}
CAUSAL: dict[str, Any] = {"causal": 0, "added": True, "masked_score": -65504.0}
PROBLEMS = [
    *(problem(size) for size in (8, 32, 64, 128)),
    *(problem(size, dtype="bfloat16", causal=0) for size in (64, 80, 96, 128, 160, 192, 256)),
    *(problem(*sizes, causal=5) for sizes in ((192, 128), (64, 128), (128, 256), (256, 64))),
    *(problem(size, **mask) for size in (64, 128, 256) for mask in (BOOLEAN, FINITE, additive("float32"))),
    *(problem(size, bias=scores("float16"), causal=0) for size in (64, 128, 192, 256)),
    *(problem(size, bias=scores("float32"), softcap=30.0, **additive("float32")) for size in (64, 128, 192, 256)),
    *(problem(size, **CAUSAL, mask_kind="boolean", mask=scores("bool", query=0)) for size in (64, 128, 192, 256)),
    *(problem(size, **CAUSAL) for size in (64, 128)),
    problem(64, **CAUSAL, **BOOLEAN, bias=scores("float16")),
    *(problem(64, bias=scores("float16", query, key)) for query, key in ((0, 1), (LENGTH, 0), (LENGTH + 1, 1))),
]


def describe(case: Attention) -> str:
    added = [case.mask_kind, *(f"{x.dtype} {x.query} {x.key}" for x in (case.mask, case.bias) if x)]
    return f"{case.dtype} {case.size}x{case.value_size} {' '.join(added)}{' causal' * (case.causal is not None)}"


@pytest.mark.parametrize("case", PROBLEMS, ids=describe)
def test_compiles_without_spills(case: Attention) -> None:
    candidates = plans(case, H200)
    assert candidates
    assert len({candidate.name for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        for step in candidate.steps:
            assert isinstance(step, Launch)
            compiled = compile_cubin(step.kernel, 90)
            # LATE: numbers that only tiles need whose mask is read may lie in memory.
            allowed = 32 if step.kernel.defines.get("LATE") else 0
            assert compiled.spill_stores <= allowed, f"{candidate.name} spills for {describe(case)}"
            assert "warning" not in compiled.log, compiled.log
            assert "wgmma" not in compiled.log, compiled.log  # "… are serialized due to …"


@pytest.mark.parametrize("case", PROBLEMS, ids=describe)
def test_blocks_fit_and_boxes_are_as_the_kernel_has_them(case: Attention) -> None:
    for candidate in plans(case, H200):
        *blocks, launch = candidate.steps
        assert isinstance(launch, Launch)
        tile, groups = int(launch.kernel.defines["KEYS_TILE"]), int(launch.kernel.defines["GROUPS"])
        assert launch.shared <= H200.shared_per_block
        assert launch.block[0] <= 1024
        assert tile % 16 == 0
        assert launch.grid[0] * 64 * groups >= case.batch * case.heads * case.queries
        boxes = [argument.box for argument in launch.arguments if isinstance(argument, TensorMap)]
        assert boxes == [(64, 64, 1, 1), (64, tile, 1, 1), (64, tile, 1, 1), (64, 64, 1, 1)]
        assert len(blocks) == (case.mask is not None and case.mask.query != 0)
        for step in blocks:
            assert isinstance(step, Launch)
            assert step.grid[0] == candidate.scratch[0], "a flag for each tile"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"aligned": False},
        {"size": 264},
        {"value_size": 20},
        {"k": Heads(Pointer("input", 1), LENGTH * 128, 64, 132)},
        {"q": Heads(Pointer("input", 0, 8), LENGTH * 256, 64, 256)},
        {"v": Heads(Pointer("input", 2), 0, 64, 128)},
        {"queries": 0},
        {"keys": 0},
    ],
    ids=str,
)
def test_what_tensor_maps_cannot_describe_has_no_plan(changes: dict[str, Any]) -> None:
    assert plans(dataclasses.replace(problem(64), **changes), H200) == []


@pytest.mark.parametrize("changes", [{}, {"bias": scores("float16")}, {"softcap": 30.0}, {"scale": -0.5}], ids=str)
def test_what_a_mask_leaves_out_is_infinitely_low(changes: dict[str, Any]) -> None:
    """Also beside terms that leave scores in natural units: a row of nothing else must not become a mean."""
    for candidate in plans(problem(64, **BOOLEAN, **changes), H200):
        launch = candidate.steps[-1]
        assert isinstance(launch, Launch)
        numbers = [x.value for x in launch.arguments if isinstance(x, Scalar) and x.type == "float32"]
        assert numbers[2] == -math.inf


def test_a_mask_of_all_heads_is_not_judged_by_random_values() -> None:
    """They leave no tile out, as masks of models do; what differs between heads is a bias, and timed."""
    assert [way.name for way in ways(problem(64, **additive("float16")), H200)] == ["hopper 64x64, 2 stages, 3 blocks"]
    every_head = dataclasses.replace(scores("float16"), head=LENGTH * LENGTH)
    timed = ways(problem(64, mask_kind="additive", mask=every_head), H200)
    assert len(timed) > 3
    assert all(len(way.steps) == 1 for way in timed), "no pass over a bias"


@pytest.mark.parametrize("masked", [-1e4, -3.4028234663852886e38])
@pytest.mark.parametrize("scale", [1e-9, 1e-5, 0.125, 3.0, 1e5])
def test_finite_masked_scores_stay_finite_in_every_unit(masked: float, scale: float) -> None:
    for candidate in plans(problem(64, **{**BOOLEAN, "masked_score": masked, "scale": scale}), H200):
        launch = candidate.steps[-1]
        assert isinstance(launch, Launch)
        _, _, score, unit, lowest, wanted = (
            float(np.float32(x.value)) for x in launch.arguments if isinstance(x, Scalar) and x.type == "float32"
        )
        times = scale * 1.4426951 if launch.kernel.defines["RAW"] else 1.0
        assert all(math.isfinite(np.float32(x * times)) for x in (score, lowest, wanted))
        assert lowest <= score <= wanted and unit == pytest.approx(1 / scale if times != 1.0 else 1.0)


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_other_architectures_have_no_plan(arch: int) -> None:
    assert plans(problem(64), dataclasses.replace(H200, arch=arch)) == []


def test_a_dimension_of_one_may_have_any_stride() -> None:
    changed = problem(64, batch=1, queries=1, q=Heads(Pointer("input", 0), 3, 64, 7))
    assert plans(changed, H200)
