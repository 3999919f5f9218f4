"""Sessions that are not tuned run the first plan of a node: here the kernel that was the fastest one on an H200."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import H200
from conv_cases import ConvCase
from template_checks import concrete_plan, template_of

from onnxfuse.kernels.attention import host as attention_host
from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.conv import host as conv_host
from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.kernels.gemm.implementations import implementations
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import FusedNode, Launch, Plan, Step, TensorSpec
from onnxfuse.runtime.template import Template

SAME, WIDE = (1, 1, 1, 1), (2, 2, 2, 2)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave libraries out of plans, also where an earlier test of this process opened a stand-in of one."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)
    monkeypatch.setattr(cudnn, "implementations", lambda conv, device: [])


def kernel_of(step: Step) -> str:
    assert isinstance(step, Launch)
    return step.kernel.source


def product(
    rows: int, columns: int, k: int, activation: str = "relu", dtype: str = "float16", layout: str = "nk"
) -> Gemm:
    """Return a product with a bias; weights are n x k, or k x n in float32."""
    layout = "kn" if dtype == "float32" else layout
    weight = (k, columns) if layout == "kn" else (columns, k)
    specs = [TensorSpec(shape, dtype, constant=True) for shape in (weight, (columns,))]
    attributes = {"activation": activation, "weight_layout": layout}
    node = FusedNode("gemm_bias_activation", "n", ("x", "w", "bias"), attributes, (dtype,))
    return gemm_of(node, [TensorSpec((rows, k), dtype), *specs], H200)[0]


def first_product(rows: int, columns: int, k: int, activation: str = "relu") -> tuple[Step, ...]:
    """Return the first plan of a product with a bias."""
    return implementations(product(rows, columns, k, activation), H200)[0].steps


@pytest.mark.parametrize(
    ("rows", "columns", "k", "expected"),
    [
        (32, 20, 480, "gemm_stream"),  # 2.3 us; gemm_hopper 3.5
        (32, 168, 672, "gemm_stream"),  # 2.6 and 3.1
        (16, 1000, 1024, "gemm_stream"),  # 2.5 and 3.4
        (1, 4096, 4096, "gemm_stream"),
        (32, 672, 168, "gemm_hopper"),  # 2.5; gemm_stream 2.7
        (32, 480, 120, "gemm_hopper"),  # 2.3 and 2.5
        (49, 2048, 512, "gemm_hopper"),  # 2.4 and 3.9
        (49, 512, 2048, "gemm_stream"),  # 4.3; in slices of k 4.3
        (32, 240, 10, "gemm_mma"),  # 2.2; a copy and gemm_hopper 3.0
        (16, 4095, 4095, "gemm_pad"),  # 34; without the copy 109
        (784, 128, 992, "gemm_hopper"),  # 3.7; in slices of k 4.5
        (1568, 512, 2048, "gemm_hopper"),  # 8.4 and 10.3
    ],
)
def test_of_products(rows: int, columns: int, k: int, expected: str) -> None:
    assert kernel_of(first_product(rows, columns, k)[0]) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "k", "expected"),
    [
        (4096, 768, 3072, "gemm_hopper_tf32"),  # 56 us; cuBLASLt 79
        (512, 768, 3072, "gemm_hopper_tf32"),  # 20.6 and 22.4
        (128, 768, 768, "gemm_hopper_tf32"),  # 7.0 and 7.5
        (128, 768, 3072, "cublaslt"),  # 10.9; gemm_hopper_tf32 19.4
        (16, 768, 768, "mma_16x32x128b8"),
    ],
)
def test_of_products_in_tf32(rows: int, columns: int, k: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "implementations", lambda gemm, device: [Implementation("cublaslt 0", ())])
    found = implementations(product(rows, columns, k, dtype="float32"), H200)
    assert found[0].name.split()[0] == expected
    assert len({each.name.split()[0] for each in found}) > 2


@pytest.mark.parametrize(("rows", "columns", "k"), [(2, 1280, 1280), (16, 1000, 1024), (32, 24, 72), (32, 1152, 48)])
def test_few_rows_have_narrow_tiles_where_all_weights_are_in_flight(rows: int, columns: int, k: int) -> None:
    """On an H200, 32x1280x960 takes 2.8 us in tiles of 32 columns and 3.7 in tiles of 64."""
    (step,) = first_product(rows, columns, k)
    assert isinstance(step, Launch)
    assert step.kernel.source == "gemm_hopper" or step.kernel.defines["TILE_N"] == 32


def test_few_rows_take_nearly_the_fastest_plan() -> None:
    results = json.loads((RESULTS / "few_rows-h200-2026-11-30.json").read_text(encoding="utf-8"))
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for *case, plan, us in results["rows"]["rows"]:
        times.setdefault(tuple(case), {})[plan] = us
    ratios = []
    for (rows, columns, k, epilogue), found in times.items():
        activation = next((each for each in ("gelu", "silu") if each in epilogue), "none")
        gemm = product(rows, columns, k, activation, layout="kn")
        ratios.append(found[implementations(gemm, H200)[0].name] / min(found.values()))
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.025 and max(ratios) < 1.2


CONVOLUTIONS = [
    (ConvCase(32, 96, 96, (112, 112), (3, 3), (2, 2), SAME, group=96, w_hwio=True), "conv_depthwise"),  # 31.5; mma 45.5
    (ConvCase(32, 144, 144, (56, 56), (5, 5), (2, 2), WIDE, group=144, w_hwio=True), "conv_depthwise"),  # 20.3 and 24.4
    (ConvCase(32, 240, 240, (28, 28), (5, 5), (), WIDE, group=240, w_hwio=True), "conv_depthwise_sliding"),
    (ConvCase(1, 128, 128, (80, 80), (3, 3), (2, 2), SAME), "conv_hopper"),  # 4.3; in slices of k 5.7
    (ConvCase(1, 256, 256, (14, 14), (3, 3), (), SAME), "conv_hopper_split"),  # 5.5; not in slices 6.5
    (ConvCase(8, 256, 256, (20, 20), (3, 3), (), SAME), "conv_hopper"),  # 10.1 and 11.3
    (ConvCase(2, 1280, 1280, (8, 8), (3, 3), (), SAME), "conv_hopper_split"),  # 14.5; in slices of k 17.6
    (ConvCase(2, 1280, 1280, (16, 16), (3, 3), (), SAME), "conv_hopper_slices"),  # 29.6; in clusters 35.9
    (ConvCase(2, 640, 640, (32, 32), (3, 3), (), SAME), "conv_hopper_split"),
]


@pytest.mark.parametrize(("case", "expected"), CONVOLUTIONS, ids=str)
def test_of_convolutions(case: ConvCase, expected: str) -> None:
    first = conv_host.implementations(case.problem(), H200)[0]
    assert kernel_of(first.steps[0]) == expected


WITH_RESIDUAL = ("bias", "residual")
TILES = [
    (ConvCase(32, 64, 64, (56, 56), (3, 3), (), SAME, extra=WITH_RESIDUAL), (192, 64)),  # 20.5 us; 256x64 20.9
    (ConvCase(32, 128, 128, (28, 28), (3, 3), (), SAME, extra=WITH_RESIDUAL), (192, 128)),  # 14.4; 128x128 16.2
    (ConvCase(32, 256, 256, (14, 14), (3, 3), (), SAME, extra=WITH_RESIDUAL), (128, 128)),  # 14.9; 192x64 16.7
    (ConvCase(2, 320, 320, (64, 64), (3, 3), (), SAME, extra=WITH_RESIDUAL), (128, 160)),  # 22.4; 128x192 28.8
    (ConvCase(2, 1280, 1280, (16, 16), (3, 3), (), SAME, extra=WITH_RESIDUAL), (128, 160, 4)),  # in pairs 35.6
    (ConvCase(8, 64, 64, (80, 80), (3, 3), (), SAME, extra=WITH_RESIDUAL), (64, 64)),  # 12.6; 256x64 14.7
    (ConvCase(1, 128, 128, (512, 512), (3, 3), (), SAME, extra=WITH_RESIDUAL), (128, 128)),  # 139.5; 192x128 157.5
    (ConvCase(1, 256, 256, (512, 512), (3, 3), (), SAME, activation="none"), (128, 256)),  # 419; 192x128 463
]


@pytest.mark.parametrize(("case", "tile"), TILES, ids=str)
def test_tiles_of_convolutions(case: ConvCase, tile: tuple[int, ...]) -> None:
    """A tile is rows, columns, and the slices of k if there are several."""
    launch = conv_host.implementations(case.problem(), H200)[0].steps[0]
    assert isinstance(launch, Launch)
    slices = launch.kernel.defines["SPLIT_K"] * launch.grid[2]
    assert (launch.kernel.defines["TILE_M"], launch.kernel.defines["TILE_N"], slices) == (*tile, 1)[:3]


def test_depthwise_strips_keep_all_quarters_of_a_multiprocessor_busy() -> None:
    case = ConvCase(16, 384, 384, (14, 14), (7, 7), (), (3,) * 4, group=384, w_hwio=True)
    step = conv_host.implementations(case.problem(), H200)[0].steps[0]
    assert isinstance(step, Launch)
    assert (step.kernel.defines["TW"], step.block[0]) == (4, 128)  # 5.5 us; strips of 7 columns in blocks of 64 8.6


def test_convolutions_in_tf32_run_on_wgmma() -> None:
    case = ConvCase(32, 64, 64, (56, 56), (3, 3), (), SAME, dtype="float32", tf32=True)
    assert kernel_of(conv_host.implementations(case.problem(), H200)[0].steps[0]) == "conv_hopper_tf32"
    exact = replace(case, tf32=False)  # a session that forbids TF32
    assert {kernel_of(way.steps[0]) for way in conv_host.implementations(exact.problem(), H200)} == {"conv_mma"}


def timed_attention() -> Iterator[tuple[tuple[Any, ...], dict[str, float]]]:
    """Yield (form, head size, batch, heads, length) and the microseconds of each tiling on an H200."""
    results = json.loads((RESULTS / "attention_choice-h200-2026-11-24.json").read_text(encoding="utf-8"))
    for table in (results["tilings_64"], results["tilings_128"]):
        for row in table["rows"]:
            yield tuple(row[:5]), dict(zip(table["columns"][5:], row[5:], strict=True))


def attention(
    form: str, size: int, batch: int, heads: int, length: int, kv_heads: int = 0, dtype: str = "float16"
) -> tuple[FusedNode, list[TensorSpec]]:
    kv_heads = kv_heads or heads
    given = {"heads": heads, "kv_heads": kv_heads, "repeats": heads // kv_heads, "size": size, "value_size": size}
    masked = {"mask_kind": "causal", "masked_score": -1e9 if dtype == "float32" else -65504.0}
    masked = masked if form == "causal" else {"mask_kind": "none"}
    node = FusedNode("attention", "n", ("q", "k", "v"), {**given, **masked, "scale": size**-0.5}, (dtype,))
    return node, [TensorSpec((batch, length, count * size), dtype) for count in (heads, kv_heads, kv_heads)]


def test_attention_in_tf32() -> None:
    """The first plan is nearly the fastest of attention_mma and the tilings of attention_hopper."""
    results = json.loads((RESULTS / "attention_in_tf32-h200-2026-11-30.json").read_text(encoding="utf-8"))
    for table in (results["tilings_64"], results["tilings_128"]):
        for form, size, batch, heads, kv_heads, length, *found in table["rows"]:
            times = dict(zip(table["columns"][6:-1], found[:-1], strict=True))
            plan = attention_host.candidates(*attention(form, size, batch, heads, length, kv_heads, "float32"), H200)[0]
            is_hopper = kernel_of(plan.steps[-1]) == "attention_hopper"
            assert times[tiling(plan) if is_hopper else "mma"] <= 1.25 * min(times.values()), times


@functools.cache
def attention_template(form: str, size: int, heads: int) -> Template:
    return template_of(*attention(form, size, -1, heads, -2), H200)


def tiling(plan: Plan) -> str:
    launch = plan.steps[-1]
    assert isinstance(launch, Launch)
    macros = (launch.kernel.defines[name] for name in ("WARPGROUPS", "BLOCK_N", "BLOCKS_PER_SM"))
    return "{}x{}*{}".format(*macros)


Case = tuple[str, int, int, int, int]
Taken = dict[Case, tuple[Plan, dict[str, float]]]  # by case: the plan that is taken, and the times of all tilings


def slower(taken: Taken) -> dict[Case, float]:
    """Return the times relative to those of the fastest tiling, where Hopper's kernel runs."""
    here = {case: each for case, each in taken.items() if kernel_of(each[0].steps[-1]) == "attention_hopper"}
    assert len(here) > 40
    return {case: times[tiling(plan)] / min(times.values()) for case, (plan, times) in here.items()}


def assert_fast(ratios: dict[Case, float]) -> None:
    assert math.exp(sum(map(math.log, ratios.values())) / len(ratios)) < 1.007 and max(ratios.values()) < 1.12, ratios


def test_tilings_of_attention_are_fast_ones() -> None:
    taken = {case: (attention_host.candidates(*attention(*case), H200)[0], times) for case, times in timed_attention()}
    assert_fast(slower(taken))


def test_tilings_of_attention_of_any_length_are_fast_ones() -> None:
    """Nodes of dynamic length have few kernels."""
    taken: Taken = {}
    for case, times in timed_attention():
        form, size, batch, heads, length = case
        template = attention_template(form, size, heads)
        variant = template.chosen([batch, length])
        assert variant
        taken[case] = concrete_plan(template, variant, [batch, length]), times
    assert_fast(slower(taken))
