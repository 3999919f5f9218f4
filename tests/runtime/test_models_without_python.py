"""The exported models run by plan files in the native library alone; the kernels are stand-ins that compute nothing.

So this is about all that decides which kernel runs, and how: nodes are known by their attributes, templates are read,
plans are made for each shape, and outputs have the shapes that bodies give them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort
import pytest
from exported_models import load_exported, read_index

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from sampling import sampled
from stand_in import CPU, Stage, stage
from stored_plans import native_session
from test_models_gpu import feeds

import onnxfuse
from onnxfuse.compile.compile_file import compile_file
from onnxfuse.ir.save import save

INDEX = read_index()
EVERY = 5  # of the models, one is in a plain run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    result.cuda.fake_have_all_functions(1)
    yield result
    result.cuda.fake_have_all_functions(0)


def steps(gpu: Stage) -> int:
    """Return how many kernels were launched, and products and convolutions started."""
    return gpu.launches() + gpu.products() + int(gpu.cudnn.fake_runs())


@pytest.mark.parametrize("name", sampled(INDEX, EVERY))
def test_a_model_runs_at_every_shape(gpu: Stage, tmp_path: Path, name: str) -> None:
    fused, report = onnxfuse.optimize(load_exported(name), verify=False)
    path, plans = tmp_path / "fused.onnx", tmp_path / "fused.plans"
    save(fused, path)
    compiled = compile_file(path, plans, archs=["sm_90"], provider=CPU)
    run, bodies = native_session(path.read_bytes(), plans), ort.InferenceSession(str(path), providers=[CPU])
    kernels = sum(each.fusion not in compiled.bodies for each in report.fused)
    for sizes in INDEX[name]["verified_sizes"]:
        given, before = feeds(INDEX[name], sizes, seed=1), steps(gpu)
        assert [each.shape for each in run.run(None, given)] == [each.shape for each in bodies.run(None, given)]
        assert steps(gpu) - before >= kernels
