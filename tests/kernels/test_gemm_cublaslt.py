"""Products by cuBLASLt without a GPU: which epilogue is whose, and that epilogue.cu compiles."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import DEVICES, check_compiles, to_compile

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, Stage, stage

from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Device, Kernel, Launch, Matmul, Plan, Pointer, TensorSpec

DEVICE = Device("H200", 90, 132, 232448)
NAMES = ("x", "w", "bias", "up", "up_bias", "column_scale", "residual")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    cublaslt._is_available.cache_clear()
    yield result
    result.cublaslt.fake_no_algorithm(0)
    cublaslt._is_available.cache_clear()


def gemm(has: str = "", *, n: int = 6, dtype: str = "float32", activation: str = "none", **more: Any) -> Gemm:
    pointers = {name: Pointer("input", i) for i, name in enumerate(NAMES) if name in ("x", "w", *has.split())}
    more = {"k": 5, "transposed": False, "aligned": True, "y": Pointer("output", 0), **more}
    return Gemm(m=4, n=n, dtype=dtype, activation=activation, **pointers, **more)


OWN_EPILOGUES = [("", "none"), ("bias", "none"), ("bias residual", "none"), ("bias", "relu"), ("", "gelu_tanh")]
OTHER_EPILOGUES = [("bias", "gelu"), ("bias residual", "relu"), ("up", "silu"), ("column_scale", "none"),
         ("up bias up_bias", "none")]  # fmt: skip


@pytest.mark.parametrize("has, activation", OWN_EPILOGUES)
def test_epilogues_of_cublaslt_are_one_step(gpu: Stage, has: str, activation: str) -> None:
    found = cublaslt.implementations(gemm(has, activation=activation), DEVICE)
    assert [candidate.name for candidate in found] == [f"cublaslt {i}" for i in range(5)]
    assert [candidate.scratch for candidate in found] == [(), (1024,), (2048,), (3072,), (4096,)]
    for candidate in found:
        (step,) = candidate.steps
        assert isinstance(step, Matmul)
        assert (bool(step.bias), bool(step.c), step.activation) == ("bias" in has, "residual" in has, activation)
        assert step.workspace == (Pointer("scratch", 0) if candidate.scratch else None)


ROUNDED = [("bias", "relu"), ("bias residual", "none"), ("bias", "gelu_tanh"), ("", "gelu_tanh")]


@pytest.mark.parametrize("has, activation", ROUNDED)
def test_epilogues_that_cublaslt_would_round_twice_are_not_its_own(gpu: Stage, has: str, activation: str) -> None:
    def steps(**more: Any) -> set[int]:
        made = gemm(has, activation=activation, **{"n": 24, "k": 16, "dtype": "bfloat16", **more})
        return {len(candidate.steps) for candidate in cublaslt.implementations(made, DEVICE)}

    assert steps() == steps(dtype="float32", n=23) == {1}
    assert steps(n=23) == steps(k=15) == steps(aligned=False) == {2}


@pytest.mark.parametrize("has, activation", [("residual", "none"), ("", "relu"), ("", "none")])
def test_epilogues_without_a_second_kernel_are_one_step_at_any_size(gpu: Stage, has: str, activation: str) -> None:
    found = cublaslt.implementations(gemm(has, activation=activation, dtype="float16", aligned=False), DEVICE)
    assert {len(candidate.steps) for candidate in found} == {1}


@pytest.mark.parametrize("has, activation", OTHER_EPILOGUES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_epilogue_follows_the_products_in_fp32(gpu: Stage, dtype: str, has: str, activation: str) -> None:
    found = cublaslt.implementations(gemm(has, dtype=dtype, activation=activation), DEVICE)
    products = 2 if "up " in f"{has} " else 1
    for candidate in found:
        *products_of, last = candidate.steps
        assert len(products_of) == products
        assert isinstance(last, Launch)
        for i, step in enumerate(products_of):
            assert isinstance(step, Matmul)
            assert (step.y.dtype, step.y.pointer) == ("float32", Pointer("scratch", i))
            assert (step.bias, step.c, step.activation) == (None, None, "none")
            assert step.workspace in (None, Pointer("scratch", products))
    assert [candidate.scratch for candidate in found[:2]] == [(96,) * products, (96,) * products + (1024,)]


def test_without_an_algorithm_for_the_epilogue_the_product_alone_is_tried(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = run_plan.algorithms
    monkeypatch.setattr(run_plan, "algorithms", lambda step, *a: [] if step.bias else ask(step, *a))
    found = cublaslt.implementations(gemm("bias"), DEVICE)
    assert found[0].name == "cublaslt 0 and epilogue"
    gpu.cublaslt.fake_no_algorithm(1)
    assert cublaslt.implementations(gemm("bias"), DEVICE) == []


def test_a_missing_cublaslt_is_logged_once(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise NativeError("it is not installed")

    monkeypatch.setattr(run_plan, "cublaslt", missing)
    assert [cublaslt.implementations(gemm(), DEVICE) for _ in range(2)] == [[], []]
    assert [record.message for record in caplog.records] == [
        "matrix products run without cuBLASLt, which some sizes are faster with: it is not installed"
    ]


def test_tf32_and_alignment_are_passed_on(gpu: Stage) -> None:
    for tf32, aligned in itertools.product((False, True), repeat=2):
        (step,) = cublaslt.implementations(gemm(tf32=tf32, aligned=aligned), DEVICE)[0].steps
        assert isinstance(step, Matmul)
        assert (step.tf32, step.aligned) == (tf32, aligned)


def test_an_implementation_computes_the_product(gpu: Stage) -> None:
    random = np.random.default_rng(0)
    x, w, bias, c = (random.integers(-3, 4, s).astype(np.float32) for s in ((4, 5), (6, 5), (6,), (4, 6)))
    y = np.zeros((4, 6), np.float32)
    pointers = [x, w, bias, w, bias, bias, c]
    candidate = cublaslt.implementations(gemm("bias residual", transposed=True, aligned=False), DEVICE)[0]
    specs = [TensorSpec(each.shape, "float32", False) for each in pointers]
    plan = Plan((TensorSpec(y.shape, "float32"),), candidate.steps, candidate.scratch)
    ready_plan(plan, specs, provider=CPU).run([each.ctypes.data for each in pointers], [y.ctypes.data])
    np.testing.assert_array_equal(y, x @ w.T + bias + c)


@functools.cache
def epilogues(device: Device) -> list[Kernel]:
    forms = itertools.product(
        ("float32", "float16", "bfloat16"),
        ("", "bias up up_bias column_scale residual", "up residual"),
        (64, 13),
        (True, False),
    )
    products = (gemm(has, n=n, dtype=dtype, activation="silu", aligned=same) for dtype, has, n, same in forms)
    return [cublaslt.epilogue(each, device).kernel for each in products]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_the_epilogue_kernel_compiles_without_spills(device: Device) -> None:
    for kernel in to_compile(device, epilogues):
        check_compiles(kernel, device, stack=0)
