"""The exported models run by plan files in the native library alone; the kernels are stand-ins that compute nothing.

So this is about all that decides which kernel runs, and how: nodes are known by their attributes, templates are read,
plans are made for each shape, and outputs have the shapes that bodies give them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from exported_models import load_exported, read_index

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from sampling import sampled
from stand_in import CPU, Stage, stage
from stored_plans import native_options
from test_models_gpu import feeds

import onnxfuse
from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.ir.save import save

INDEX = read_index()
EVERY = 5  # of the models, one is in a plain run
M_PERTURB = -6  # of mallopt: memory that is allocated has the complement of this byte


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Let kernels of all names write nothing, and all memory be zero: other nodes may take it for indices."""
    result, malloc_option = stage(monkeypatch), ctypes.CDLL(None).mallopt
    result.cuda.fake_have_all_functions(1)
    malloc_option(M_PERTURB, 0xFF)
    yield result
    malloc_option(M_PERTURB, 0)
    result.cuda.fake_have_all_functions(0)


def native_session(path: Path, plans: Path) -> ort.InferenceSession:
    """Return a session without Python, which allocates every tensor."""
    options = native_options(plans)
    options.enable_cpu_mem_arena = options.enable_mem_reuse = False
    return ort.InferenceSession(str(path), options, [CPU])


def steps(gpu: Stage) -> int:
    """Return how many kernels were launched, and products and convolutions started."""
    return gpu.launches() + gpu.products() + int(gpu.cudnn.fake_runs())


def shapes(run: ort.InferenceSession, given: dict[str, Any]) -> list[list[int]]:
    return [each.shape for each in run.run(None, given)]


@pytest.mark.parametrize("name", sampled(INDEX, EVERY))
def test_a_model_runs_at_every_shape(gpu: Stage, tmp_path: Path, name: str) -> None:
    """Also at sizes of 0, where the model and the bodies do."""
    model = load_exported(name)
    fused, report = onnxfuse.optimize(model, verify=False)
    path, plans = tmp_path / "fused.onnx", tmp_path / "fused.plans"
    save(fused, path)
    compiled = compile_file(path, plans, CompileSettings(archs=["sm_90"], provider=CPU))
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    run, bodies = native_session(path, plans), ort.InferenceSession(str(path), quiet, providers=[CPU])
    original = ort.InferenceSession(model.SerializeToString(), quiet, providers=[CPU])
    kernels = sum(each.fusion not in compiled.bodies for each in report.fused)
    usual, *more = INDEX[name]["verified_sizes"]
    for sizes in usual, *more:
        given, before = feeds(INDEX[name], sizes, seed=1), steps(gpu)
        assert shapes(run, given) == shapes(bodies, given)
        assert steps(gpu) - before >= kernels
    for dim in usual:
        given = feeds(INDEX[name], {**usual, dim: 0}, seed=1)
        try:
            shapes(original, given)  # a Mamba-2 divides by 0 then, before an Einsum that ends the process on no rows
            expected = shapes(bodies, given)
        except Exception:  # such as that of ONNX's Attention without a batch; onnxruntime's errors have no common class
            continue
        assert shapes(run, given) == expected
