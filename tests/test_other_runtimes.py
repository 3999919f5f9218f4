"""Fused files run in onnxruntime alone; those of `--emit standard` also where functions are refused.

    pip install openvino opencv-python-headless && pytest tests/test_other_runtimes.py

Without openvino and opencv, the tests of these are skipped; onnx's reference evaluator is always there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported_models import load_exported
from onnx.reference import ReferenceEvaluator
from runtimes import open_on_cpu
from test_models import INDEX, draw

from onnxfuse import optimize
from onnxfuse.ir.domain import DOMAIN

MODELS = ("bert_sdpa_ts_fp32.onnx", "llama_sdpa_ts_fp32.onnx", "convnext_ts_fp32.onnx", "detector_ts11_bn_fp32.onnx")
TOLERANCE = 1e-4  # of the largest value: another runtime sums in another order, which moves a detector by 3e-5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the path of a model with functions or standard operators, which is written when it is first asked for."""
    folder = tmp_path_factory.mktemp("other_runtimes")

    def written(name: str, emit: Any) -> Path:
        path = folder / f"{emit}_{name}"
        if not path.exists():
            onnx.save(optimize(load_exported(name), verify=False, emit=emit)[0], path)
        return path

    return written


def feeds_and_results(name: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return inputs of a model, and what the original computes from them in onnxruntime."""
    session = open_on_cpu(load_exported(name))
    drawn = draw(INDEX[name]["inputs"], INDEX[name]["verified_sizes"][0])
    feeds = {each.name: drawn[each.name] for each in session.get_inputs()}
    return feeds, session.run(None, feeds)


def assert_alike(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for new, old in zip(found, expected, strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=TOLERANCE * np.abs(old).max())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:onnx")
@pytest.mark.parametrize("emit", ["functions", "standard"])
@pytest.mark.parametrize("name", MODELS)
def test_onnx_s_evaluator_runs_both_kinds(name: str, emit: str, files: Callable[[str, str], Path]) -> None:
    model = onnx.load(files(name, emit))
    assert any(node.domain == DOMAIN for node in model.graph.node) == (emit == "functions")
    feeds, expected = feeds_and_results(name)
    evaluator = ReferenceEvaluator(model)
    assert_alike(evaluator.run(None, {each: feeds[each] for each in evaluator.input_names}), expected)


@pytest.mark.parametrize("name", MODELS)
def test_openvino_runs_standard_operators_and_refuses_functions(name: str, files: Callable[[str, str], Path]) -> None:
    openvino = pytest.importorskip("openvino", reason="needs pip install openvino")
    core = openvino.Core()
    with pytest.raises(RuntimeError, match=f"No conversion rule found for operations: {DOMAIN}"):
        core.read_model(files(name, "functions"))
    model = core.compile_model(core.read_model(files(name, "standard")), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    feeds, expected = feeds_and_results(name)
    names = {each for port in model.inputs for each in port.get_names()}
    found = model({each: value for each, value in feeds.items() if each in names})
    assert_alike([found[i] for i in range(len(expected))], expected)


@pytest.mark.parametrize("name", MODELS)
def test_opencv_reads_standard_operators_and_refuses_functions(name: str, files: Callable[[str, str], Path]) -> None:
    cv2 = pytest.importorskip("cv2", reason="needs pip install opencv-python-headless")
    with pytest.raises(cv2.error):
        cv2.dnn.readNetFromONNX(str(files(name, "functions")))
    assert not cv2.dnn.readNetFromONNX(str(files(name, "standard"))).empty()
