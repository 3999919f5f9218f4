"""A kernel in Triton, the one of docs/tutorials/triton_kernel.md: interpreted, compiled ahead, and run on a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from architectures import DEVICES, H200
from click.testing import CliRunner
from documents import ROOT, blocks
from kernel_hosts import host_of
from outside import site
from template_checks import template_of

import onnxfuse
from onnxfuse.cli import main
from onnxfuse.runtime.kernel_folders import add_kernels
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.testing import check_kernels

triton = pytest.importorskip("triton", reason="needs Triton: pip install triton")

__all__ = ["site"]
CUDA = "CUDAExecutionProvider"
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture
def page(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the page, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(ROOT / "docs" / "tutorials" / "triton_kernel.md"):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
    add_kernels("kernels")
    return tmp_path


def fused() -> str:
    """Write the model of the page and fuse it."""
    subprocess.run([sys.executable, "pairs.py"], check=True)
    model, report = onnxfuse.optimize("pairs.onnx", patterns=["patterns"])
    assert report.counts["cosine_similarity"] == 1
    onnx.save(model, "pairs_fused.onnx")
    return "pairs_fused.onnx"


def interpreted(script: str = "check.py") -> subprocess.CompletedProcess[str]:
    """Run a check of the page in a process of its own, as Triton decides at its import."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)


def plan(dtype: str, shape: tuple[int, ...], device: Device = H200) -> Plan:
    node = FusedNode("cosine_similarity", "n", ("a", "b"), {"epsilon": 1e-8}, (dtype,))
    assert host_of("cosine_similarity").supports(node, [dtype] * 2, device) is None
    (found,) = host_of("cosine_similarity").candidates(node, [TensorSpec(shape, dtype)] * 2, device)
    return found


@pytest.mark.usefixtures("page")
def test_the_interpreter_agrees_with_the_body_and_finds_a_wrong_kernel() -> None:
    fused()
    good = interpreted()
    assert good.returncode == 0 and "fusion='cosine_similarity', plans=1" in good.stdout, good.stderr
    kernel = Path("kernels/cosine_similarity/kernel.py")
    kernel.write_text(kernel.read_text().replace("squares_b += right * right", "squares_b += left * right"))
    wrong = interpreted()
    assert wrong.returncode and "plan 0 differs from the body" in wrong.stderr


@pytest.mark.usefixtures("page")
def test_the_kernel_in_cuda_agrees_with_the_body() -> None:
    fused()
    text = Path("check.py").read_text(encoding="utf-8")
    Path("check_cuda.py").write_text(text.replace('"kernels"', '"kernels_cuda"'), encoding="utf-8")
    made = interpreted("check_cuda.py")
    assert made.returncode == 0 and float(made.stdout.split("error=")[1].split(")")[0]) < 1e-6, made.stderr


@pytest.mark.usefixtures("page")
def test_a_compiled_function_is_not_interpreted() -> None:
    with pytest.raises(onnxfuse.UsageError, match="set TRITON_INTERPRET=1"):
        check_kernels(fused(), {name: np.ones((2, 384), np.float32) for name in ("a", "b")})


@pytest.mark.usefixtures("page")
def test_it_compiles_for_every_gpu() -> None:
    """A newer Triton takes pointers to memory of its own, too."""
    for device in DEVICES:
        (step,) = plan("float16", (4, 384), device).steps
        assert isinstance(step, Launch) and step.kernel.code.startswith(b"\x7fELF")
        assert step.block == (128, 1, 1) and step.arguments[4:] in ((), (Scalar(0, "int64"),) * 2)


@pytest.mark.usefixtures("page")
def test_one_plan_takes_every_batch() -> None:
    node = FusedNode("cosine_similarity", "n", ("a", "b"), {"epsilon": 1e-8}, ("float32",))
    template = template_of(node, [TensorSpec((-1, 384), "float32")] * 2, H200)
    assert len(template.kernels) == 1
    assert template.chosen((1,)) is not None and template.chosen((100000,)) is not None


@pytest.mark.usefixtures("page")
def test_plan_files_hold_the_machine_code() -> None:
    command = ["compile", fused(), "--kernels", "kernels", "--arch", "sm_75", "--arch", "sm_90"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert b"cosine_of_rows" in Path("pairs_fused.onnx.plans").read_bytes()


@pytest.mark.usefixtures("page")
def test_what_a_launch_refuses() -> None:
    from onnxfuse.runtime.triton_kernels import triton_launch

    kernel = importlib.import_module(".kernel", host_of("cosine_similarity").__package__).cosine_of_rows
    spec, pointers = TensorSpec((4, 8), "float32"), [Pointer("input", 0), Pointer("input", 1), Pointer("output", 0)]
    constants, tensors = {"COLUMNS": 8, "BLOCK": 8}, {"inputs": [spec, spec], "outputs": [spec], "device": H200}
    with pytest.raises(ValueError, match="found 3 arguments and the constants COLUMNS, BLOCK"):
        triton_launch(kernel, (4, 1, 1), pointers, constants, **tensors)
    scratch = [Pointer("scratch", 0), *pointers[1:], Scalar(1e-8, "float32")]
    with pytest.raises(ValueError, match="found a pointer to scratch"):
        triton_launch(kernel, (4, 1, 1), scratch, constants, **tensors)
    with pytest.raises(onnxfuse.KernelError, match="Triton does not compile cosine_of_rows"):
        number = [*pointers, Scalar(1e-8, "float32")]
        triton_launch(kernel, (4, 1, 1), number, {"COLUMNS": 8, "BLOCK": 7}, **tensors)


@pytest.mark.gpu
@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernel_on_a_gpu(dtype: str, aligned: bool) -> None:
    from kernel_runs import NUMPY, run, small_gpu

    for shape in (5, 384), (2, 3, 77), (1, 1), (70000, 33), (3, 2500):
        a, b = (np.random.default_rng(i).standard_normal(shape).astype(NUMPY[dtype]) for i in range(2))
        (y,) = run("cosine_similarity", {"a": a, "b": b}, [dtype], small_gpu(), aligned, epsilon=1e-8)
        left, right = a.astype(np.float64), b.astype(np.float64)
        exact = (left * right).sum(-1) / (np.sqrt((left**2).sum(-1)) * np.sqrt((right**2).sum(-1)))
        assert np.abs(y.astype(np.float64).reshape(exact.shape) - exact).max() <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("page")
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
def test_a_session_runs_the_kernel() -> None:
    path, random = fused(), np.random.default_rng(0)
    session = onnxfuse.InferenceSession(path, providers=[CUDA], wait=True)
    assert [each.how for each in onnxfuse.explain_session(session)] == ["kernel"]
    plain = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    for rows in 1, 7, 4096:
        feeds = {name: random.standard_normal((rows, 384), np.float32) for name in ("a", "b")}
        np.testing.assert_allclose(session.run(None, feeds)[0], plain.run(None, feeds)[0], atol=1e-6)
