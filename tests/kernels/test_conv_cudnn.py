"""Convolutions by cuDNN without a GPU: which problems it is asked about, and which of its engines are candidates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import Stage, stage

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Convolution, Device, Pointer
from onnxfuse.runtime.run_plan import Engine

DEVICE = Device("H200", 90, 132, 232448)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    cudnn._is_available.cache_clear()
    yield result
    cudnn._is_available.cache_clear()


def conv(**more: Any) -> Conv:
    fields = {
        "n": 2, "c": 6, "m": 4, "sizes": (6, 5), "y_sizes": (6, 5), "kernel": (3, 3), "strides": (1, 1),
        "dilations": (1, 1), "pads_begin": (1, 1), "pads_end": (1, 1), "group": 1, "dtype": "float16", "aligned": True,
        "x": Pointer("input", 0), "w": Pointer("input", 1), "y": Pointer("output", 0), **more,
    }  # fmt: skip
    return Conv(**fields)


def test_engines_are_candidates_with_their_workspace(gpu: Stage) -> None:
    operands = {"bias": Pointer("input", 2), "residual": Pointer("input", 3), "residual_first": False}
    found = cudnn.implementations(conv(**operands, activation="silu", group=2), DEVICE)
    assert [(each.name, each.scratch) for each in found] == [("cudnn 0", (1024,)), ("cudnn 1", ())]
    for each, engine in zip(found, (41, 40), strict=True):
        (step,) = each.steps
        assert isinstance(step, Convolution)
        assert (step.engine[0], step.workspace_bytes) == (engine, 1024 if engine == 41 else 0)
        assert step.workspace == (Pointer("scratch", 0) if engine == 41 else None)
        assert (step.bias, step.residual, step.residual_first) == tuple(operands.values())
        assert (step.activation, step.group, step.channels_last, step.w_channels_last) == ("silu", 2, True, True)


def test_tf32_is_passed_on(gpu: Stage) -> None:
    for tf32, engines in ((True, [41, 40]), (False, [41])):
        found = cudnn.implementations(conv(dtype="float32", tf32=tf32), DEVICE)
        steps = [each.steps[0] for each in found]
        assert [step.engine[0] for step in steps if isinstance(step, Convolution) and step.tf32 == tf32] == engines


def test_engines_that_compile_are_left_out(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [Engine((i,), 0, compiles) for i, compiles in enumerate((True, True, False, True, False, False))]
    monkeypatch.setattr(run_plan, "convolution_engines", lambda *_: offered)
    steps = [each.steps[0] for each in cudnn.implementations(conv(), DEVICE)]
    assert [step.engine for step in steps if isinstance(step, Convolution)] == [(2,), (4,), (5,)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_that_cudnn_lacks_are_left_to_others(gpu: Stage, activation: str) -> None:
    found = cudnn.implementations(conv(activation=activation, alpha=0.1, beta=1.0), DEVICE)
    assert bool(found) == (activation in cudnn.CUDNN_ACTIVATIONS)


def test_layouts_that_cudnn_lacks_are_left_to_others(gpu: Stage) -> None:
    assert cudnn.implementations(conv(x_nchw=True), DEVICE) == []
    assert cudnn.implementations(conv(w_hwio=True, group=6, m=6), DEVICE) == []


def test_transposed_convolutions_are_gradients(gpu: Stage) -> None:
    """One pixel behind the last that the filter reaches is skipped by a stride of 2; two are pixels of their own."""
    given = {"transposed": True, "sizes": (6, 5), "strides": (2, 2)}
    for y_sizes, count in (((11, 9), 2), ((12, 10), 2), ((13, 9), 0)):
        found = cudnn.implementations(conv(**given, y_sizes=y_sizes), DEVICE)
        steps = [each.steps[0] for each in found]
        assert len(steps) == count
        assert all(isinstance(step, Convolution) and step.transposed and step.w_channels_last for step in steps)


def test_a_graph_that_cudnn_refuses_has_no_candidates(gpu: Stage) -> None:
    gpu.cudnn.fake_unsupported(1)
    try:
        assert cudnn.implementations(conv(), DEVICE) == []
    finally:
        gpu.cudnn.fake_unsupported(0)


def test_a_missing_cudnn_is_logged_once(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise NativeError("it is not installed")

    monkeypatch.setattr(run_plan, "cudnn", missing)
    assert [cudnn.implementations(conv(), DEVICE) for _ in range(2)] == [[], []]
    assert [record.message for record in caplog.records] == [
        "convolutions run without cuDNN, which some sizes are faster with: it is not installed"
    ]
