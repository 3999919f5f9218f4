"""Attention on Hopper without a GPU: it compiles for sm_90a without spills, and refuses what it cannot take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from architectures import H200, check_attention_compiles
from sampling import sampled

from onnxfuse.kernels.attention import hopper
from onnxfuse.kernels.attention.implementations import implementations
from onnxfuse.kernels.attention.problem import Attention, HeadNumbers, ScoreTensor
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.rotary.rotary import Rotary, RotatedHeads
from onnxfuse.runtime.plan import Launch, Pointer, Scalar, Struct, TensorMap, TensorSpec

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")


LENGTH = 1000


def heads(kind: Any, place: int, count: int, size: int) -> HeadTensor:
    return HeadTensor(Pointer(kind, place), LENGTH * count * size, size, count * size)


def scores(dtype: str, query: int = LENGTH, key: int = 1) -> ScoreTensor:
    return ScoreTensor(Pointer("input", 3), dtype, 0, 0, query, key, True)


def problem(head_dim: int, head_dim_v: int = 0, dtype: str = "float16", **changes: Any) -> Attention:
    head_dim_v = head_dim_v or head_dim
    tensors = {
        "q": heads("input", 0, 4, head_dim),
        "k": heads("input", 1, 2, head_dim),
        "v": heads("input", 2, 2, head_dim_v),
        "out": heads("output", 0, 4, head_dim_v),
    }
    whole = Attention(2, 4, 2, LENGTH, LENGTH, head_dim, head_dim_v, dtype, True, **tensors, scale=head_dim**-0.5)
    return dataclasses.replace(whole, **changes)


def additive(dtype: str) -> dict[str, Any]:
    return {"mask_kind": "additive", "mask": scores(dtype)}


def in_tf32(head_dim: int, head_dim_v: int = 0, **changes: Any) -> Attention:
    return problem(head_dim, head_dim_v, "float32", tf32=True, **changes)


BOOLEAN: dict[str, Any] = {"mask_kind": "boolean", "mask": scores("bool")}
FINITE: dict[str, Any] = {"mask_kind": "inverted", "mask": scores("bool", query=0), "masked_score": -1e9}
CAUSAL: dict[str, Any] = {"causal": 0, "add_masked_score": True, "masked_score": -65504.0}
SLOPES: dict[str, Any] = {
    "bias": scores("float32", query=0), "slopes": HeadNumbers(Pointer("input", 4), "float32")}  # fmt: skip


def float_arguments(launch: Launch) -> list[float]:
    """Return the numbers of ScoreUnits and Cap."""
    _, units, cap, *_ = (each.fields for each in launch.arguments if isinstance(each, Struct))
    return [float(np.float32(field.value)) for field in (*units, *cap) if isinstance(field, Scalar)]


def turned(head_dim: int, rotated: int, norm: bool = False, tables: str = "float32", **form: Any) -> dict[str, Any]:
    """Return the change to a problem by which its queries come of a rotation."""
    q = RotatedHeads(4, heads("input", 0, 4, head_dim), heads("scratch", 0, 4, head_dim), Pointer("input", 5))
    spec = TensorSpec((2, 1, LENGTH, rotated), tables)
    return {"rotation": Rotary(
        2, LENGTH, head_dim, rotated, (q,), Pointer("input", 3), Pointer("input", 4), spec, tables, "float16",
        "float16", True, **{"whole_table": True, "scale_dtype": "float32" if norm else "", **form},
    )}  # fmt: skip


PROBLEMS = [
    *(problem(size) for size in (8, 32, 64, 128)),
    *(problem(size, dtype="bfloat16", causal=0) for size in (64, 80, 96, 128, 160, 192, 256)),
    *(problem(*sizes, causal=5) for sizes in ((192, 128), (64, 128), (128, 256), (256, 64))),
    *(problem(*sizes) for sizes in ((96, 64), (128, 64), (192, 64), (256, 128))),
    *(problem(size, **mask) for size in (64, 128, 256) for mask in (BOOLEAN, FINITE, additive("float32"))),
    *(problem(size, bias=scores("float16"), causal=0) for size in (64, 128, 192, 256)),
    *(problem(size, bias=scores("float32"), softcap=30.0, **additive("float32")) for size in (64, 128, 192, 256)),
    *(problem(size, **CAUSAL, mask_kind="boolean", mask=scores("bool", query=0)) for size in (64, 128, 192, 256)),
    *(problem(size, **CAUSAL) for size in (64, 128)),
    problem(64, **CAUSAL, **BOOLEAN, bias=scores("float16")),
    *(problem(64, bias=scores("float16", query, key)) for query, key in ((0, 1), (LENGTH, 0), (LENGTH + 1, 1))),
    *(problem(size, **CAUSAL, **SLOPES) for size in (64, 128, 192, 256)),
    *(problem(size, **SLOPES) for size in (64, 128)),
    problem(64, **{**SLOPES, "bias": scores("float32")}, **additive("float16")),
    problem(128, **SLOPES, softcap=30.0, **BOOLEAN),
    *(problem(size, softcap=50.0) for size in (64, 128, 192, 256)),
    *(problem(size, softcap=50.0, **CAUSAL) for size in (64, 128, 192, 256)),
    *(problem(size, softcap=50.0, **additive("float16")) for size in (64, 128)),
    problem(64, softcap=50.0, **FINITE),
    *(problem(size, **turned(size, size, norm)) for size in (80, 128, 192, 256) for norm in (False, True)),
    *(problem(size, **turned(size, 64, True), **CAUSAL, **SLOPES) for size in (96, 128, 192, 256)),
    *(problem(size, **turned(size, size, interleaved=True), **BOOLEAN) for size in (128, 256)),
    *(in_tf32(*sizes, causal=5) for sizes in ((8,), (40,), (64, 128), (128, 64), (128,))),
    *(in_tf32(size, **mask) for size in (64, 128) for mask in (FINITE, BOOLEAN, additive("float32"))),
    *(in_tf32(size, softcap=50.0, bias=scores("float32"), **additive("float32")) for size in (64, 128)),
    *(in_tf32(size, **{**CAUSAL, "masked_score": -1e9}, **SLOPES) for size in (64, 128)),
    in_tf32(128, **turned(128, 64)),
    problem(128, softcap=50.0, **turned(128, 32, tables="float16", kept=5, interleaved=True, y_interleaved=True)),
]


def describe(case: Attention) -> str:
    added = [case.mask_kind, *(f"{x.dtype} {x.query_stride} {x.key_stride}" for x in (case.mask, case.bias) if x)]
    more = f"{' causal' * (case.causal is not None)}{' turned' * (case.rotation is not None)}"
    return f"{case.dtype} {case.head_dim}x{case.head_dim_v} {' '.join(added)}{more}"


@pytest.mark.parametrize("case", sampled(PROBLEMS, 30), ids=describe)
def test_compiles_without_spills(case: Attention) -> None:
    candidates = hopper.implementations(case, H200)
    assert candidates
    assert len({candidate.name for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        for step in candidate.steps:
            assert isinstance(step, Launch)
            check_attention_compiles(step.kernel, H200)


@pytest.mark.parametrize("case", PROBLEMS, ids=describe)
def test_blocks_fit_and_boxes_are_as_the_kernel_has_them(case: Attention) -> None:
    for candidate in hopper.implementations(case, H200):
        *blocks, launch = candidate.steps
        assert isinstance(launch, Launch)
        tile, groups = int(launch.kernel.defines["BLOCK_N"]), int(launch.kernel.defines["WARPGROUPS"])
        assert launch.shared <= H200.shared_per_block
        assert launch.block[0] <= 1024
        assert tile % 16 == 0
        assert launch.grid[0] * 64 * groups >= case.batch * case.heads * case.queries
        boxes = [argument.box for argument in launch.arguments if isinstance(argument, TensorMap)]
        wide, full = (32, True) if case.dtype == "float32" else (64, False)
        values = -(-case.head_dim_v // 16) * 16 if full else tile  # transposed in TF32
        assert boxes == [(wide, rows, 1, 1) for rows in (64, tile, values, 64)]
        names = ["attention_blocks"] * (case.mask is not None and case.mask.query_stride != 0)
        assert [step.kernel.source for step in blocks if isinstance(step, Launch)] == [*names, "attention_values"][
            : len(names) + full
        ]
        for step in blocks[: len(names)]:
            assert isinstance(step, Launch)
            assert step.grid[0] == candidate.scratch[0], "a flag for each tile"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},  # without leave to round to TF32
        {"dtype": "float32", "tf32": True, "head_dim": 136},
        {"aligned": False},
        {"head_dim": 264},
        {"head_dim_v": 20},
        {"k": HeadTensor(Pointer("input", 1), LENGTH * 128, 64, 132)},
        {"q": HeadTensor(Pointer("input", 0, 8), LENGTH * 256, 64, 256)},
        {"v": HeadTensor(Pointer("input", 2), 0, 64, 128)},
        {"queries": 0},
        {"keys": 0},
    ],
    ids=str,
)
def test_what_tensor_maps_cannot_describe_has_no_plan(changes: dict[str, Any]) -> None:
    assert hopper.implementations(dataclasses.replace(problem(64), **changes), H200) == []


MISPLACED = RotatedHeads(4, HeadTensor(Pointer("input", 0, 8), LENGTH * 512, 128, 512), heads("scratch", 0, 4, 128))


@pytest.mark.parametrize("change", [{}, {"rotated": 24}, {"aligned": False}, {"tensors": (MISPLACED,)}], ids=str)
def test_queries_are_rotated_in_the_kernel_if_vectors_fit(change: dict[str, Any]) -> None:
    rotation = dataclasses.replace(turned(128, 64)["rotation"], **change)
    before = heads("scratch", 0, 4, 128)
    for way in hopper.implementations(problem(128, q=before, rotation=rotation), H200):
        launch = way.steps[-1]
        assert isinstance(launch, Launch) and isinstance(launch.arguments[0], TensorMap)
        assert ("ROTATED" in launch.kernel.defines) == (not change)
        assert launch.arguments[0].pointer == (before.pointer if change else Pointer("input", 0))


@pytest.mark.parametrize("changes", [{}, {"bias": scores("float16")}, {"softcap": 30.0}, {"scale": -0.5}], ids=str)
def test_what_a_mask_leaves_out_is_infinitely_low(changes: dict[str, Any]) -> None:
    """This holds with a bias or a cap too, under which scores have natural units: a masked row must not be a mean."""
    for candidate in hopper.implementations(problem(64, **BOOLEAN, **changes), H200):
        launch = candidate.steps[-1]
        assert isinstance(launch, Launch)
        assert float_arguments(launch)[3] == -math.inf


def test_a_mask_of_all_heads_is_not_judged_by_random_values() -> None:
    """Random masks skip no tile, unlike those of models. A mask that differs between heads is timed, as a bias is."""
    found = implementations(problem(64, **additive("float16")), H200)
    assert [each.name for each in found] == ["hopper 64x64, 2 stages, 3 blocks"]
    every_head = dataclasses.replace(scores("float16"), head_stride=LENGTH * LENGTH)
    timed = implementations(problem(64, mask_kind="additive", mask=every_head), H200)
    assert len(timed) > 3
    assert all(len(way.steps) == 1 for way in timed), "no pass over a bias"


@pytest.mark.parametrize("masked", [-1e4, -3.4028234663852886e38])
@pytest.mark.parametrize("scale", [1e-9, 1e-5, 0.125, 3.0, 1e5])
def test_finite_masked_scores_stay_finite_in_every_unit(masked: float, scale: float) -> None:
    for candidate in hopper.implementations(problem(64, **{**BOOLEAN, "masked_score": masked, "scale": scale}), H200):
        launch = candidate.steps[-1]
        assert isinstance(launch, Launch)
        unit, lowest, _, score, wanted, *_ = float_arguments(launch)
        times = scale * 1.4426951 if launch.kernel.defines["SCALE_IN_EXPONENT"] else 1.0
        assert all(math.isfinite(np.float32(x * times)) for x in (score, lowest, wanted))
        assert lowest <= score <= wanted and unit == pytest.approx(1 / scale if times != 1.0 else 1.0)


@pytest.mark.parametrize("cap", [24.0, 50.0, 100.0])
@pytest.mark.parametrize("scale", [0.0125, 0.0625, 1.0, 50.0])
def test_a_late_cap_is_a_tanh_while_scores_are_small_and_negligible_below(cap: float, scale: float) -> None:
    launch = hopper.implementations(problem(64, softcap=cap, scale=scale), H200)[0].steps[-1]
    assert isinstance(launch, Launch) and launch.kernel.defines["LATE_CAP"]
    rate, highest, *numbers = (np.float32(x) for x in float_arguments(launch)[6:])
    assert rate == pytest.approx(2 * math.log2(math.e) * scale / cap)
    for (limit, _), (largest, lowest, *terms) in zip(hopper.CAP_POLYNOMIALS, (numbers[:5], numbers[5:]), strict=True):
        products = np.linspace(-largest, largest, 10001, dtype=np.float32)
        exact = cap * np.tanh(scale / cap * products.astype(np.float64))
        found = capped(products, terms) * math.log(2)
        assert np.abs(found - exact).max() < hopper.TANH_ERROR * cap + 4e-7 * np.abs(exact).max()
        assert largest * scale == pytest.approx(limit * cap)
        with np.errstate(over="ignore"):
            below = capped(-largest * np.geomspace(1, 1e9, 10001, dtype=np.float32), terms)
        assert np.all(np.diff(below[np.isfinite(below)]) < 0), "lower products have lower scores"
        assert np.exp2(below - lowest * math.log2(math.e)).max() < 2.0**-25, "no fp16 weight"
    largest, _, *terms = numbers[:5]
    weight = np.exp2(capped(largest, terms) - highest * math.log2(math.e))
    assert weight == pytest.approx(hopper.KEPT, rel=1e-3), "weights that are kept are of products in the first range"


def capped(products: Any, terms: list[np.float32]) -> Any:
    """Return log2(e) times the capped scores, as CapPolynomial computes them."""
    squares, found = products * products, np.full_like(products, terms[-1])
    for term in terms[-2::-1]:
        found = found * squares + term
    return products * found


def test_a_late_cap_needs_products_that_rise_with_scores_and_nothing_added_before_the_weights() -> None:
    bias = {"bias": scores("float16")}
    for changes in ({"softcap": 5.0}, {"softcap": 50.0, "scale": -0.5}, {"softcap": 50.0, **bias}, {}):
        launch = hopper.implementations(problem(64, **changes), H200)[0].steps[-1]
        assert isinstance(launch, Launch) and not launch.kernel.defines["LATE_CAP"]


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_other_architectures_have_no_plan(arch: int) -> None:
    assert hopper.implementations(problem(64), dataclasses.replace(H200, arch=arch)) == []


def test_a_dimension_of_one_may_have_any_stride() -> None:
    changed = problem(64, batch=1, queries=1, q=HeadTensor(Pointer("input", 0), 3, 64, 7))
    assert hopper.implementations(changed, H200)
