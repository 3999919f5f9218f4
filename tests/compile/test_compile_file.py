"""`onnxfuse compile`: templates, machine code and measured variants in one file, without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import stand_in
from stand_in import CPU, SHIFT, Stage, model, node, stage
from stored_plans import native_session

import onnxfuse
from onnxfuse.cli import main, terminal
from onnxfuse.compile.compile_file import Compiled, CompileSettings, LeftOut, compile_file
from onnxfuse.compile.samples import samples_within
from onnxfuse.compile.summary import summary
from onnxfuse.errors import KernelError, OnnxfuseError, UsageError
from onnxfuse.runtime import nvrtc, saved_plans
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.plan import Device, Kernel, Plan, TensorSpec
from onnxfuse.runtime.plan_file import PlanFile, PlanFileError, read_plan_file, write_plan_file
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.tuning.dispatch import model_subject

ELF = b"\x7fELF"
RELU = """<ir_version: 8, opset_import: ["" : 17]>
g (float16[batch, tokens, 64] x) => (float16[batch, tokens, 64] y) <float16[64] b = {ONES}> {
  s = Add (x, b)
  y = Relu (s)
}""".replace("ONES", ", ".join(["1"] * 64))


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    """Return a model of one bias_activation, whose real kernels NVRTC compiles."""
    optimized, report = onnxfuse.optimize(onnx.parser.parse_model(RELU), verify=False)
    assert report.counts == {"bias_activation": 1}
    onnx.save(optimized, tmp_path / "fused.onnx")
    return tmp_path / "fused.onnx"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield stage(monkeypatch)


def compiled(path: Path, **arguments: Any) -> tuple[Compiled, PlanFile]:
    """Compile a model, and return what is said and what is in the file."""
    target = path.with_name(f"{path.name}.plans")
    result = compile_file(path, target, CompileSettings(**arguments))
    assert result.size == target.stat().st_size and result.seconds > 0
    return result, read_plan_file(target)


def write(path: Path, graph: str, **bodies: str) -> Path:
    path.write_bytes(model(graph, **bodies))
    return path


def product(path: Path) -> Path:
    """Write a fused model of one product of 768 x 768, whose kernels come from several sources."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float16[n, 768] x) => (float16[n, 768] y) { '
    proto = onnx.parser.parse_model(text + "m = MatMul(x, w) a = Add(m, b) y = Relu(a) }")
    for name, *shape in ("w", 768, 768), ("b", 768):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float16), name))
    onnx.save(onnxfuse.optimize(proto, verify=False)[0], path)
    return path


# --- real kernels -----------------------------------------------------------------------------------------------------


def test_a_model_is_compiled_for_gpus_that_are_not_here(fused: Path) -> None:
    result, file = compiled(fused, archs=["sm_90", "sm_80"])
    assert [(each.device.name, each.templates, each.tuned) for each in result.gpus] == [
        ("NVIDIA H200", 2, 0),
        ("NVIDIA A100-SXM4-80GB", 2, 0),
    ]
    assert [each.device for each in result.gpus] == file.devices
    codes = []
    for gpu in result.gpus:
        own = [each for each in file.templates if each.device == gpu.device]
        assert gpu.variants == sum(len(each.words.variants) for each in own)
        kernels = [kernel for each in own for kernel in each.kernels]
        assert all(kernel.cubin.startswith(ELF) and kernel.entry for kernel in kernels)
        assert gpu.kernels == len({(kernel.cubin, kernel.entry) for kernel in kernels})
        codes.append({kernel.cubin for kernel in kernels})
        assert [[spec.shape for spec in each.words.inputs] for each in own] == [[(-1, -2, 64), (64,)]] * 2
        assert [[spec.constant for spec in each.words.inputs] for each in own] == [[False, True]] * 2
    assert not codes[0] & codes[1], "each architecture has its own code"
    assert file.versions["model"] == model_subject(onnx.load(fused))["model"]
    assert file.versions["cublaslt"] is file.versions["cudnn"] is None
    (line,) = file.operators
    assert line.startswith("bias_activation ") and " operands:s" in line and " output_types:I" in line
    assert not result.left_out and not result.bodies


def test_kernels_of_long_sources_are_compiled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On many processors, a long one that started last would be waited for alone."""
    begun: list[int] = []

    def machine_code(kernel: Kernel, device: Device) -> bytes:
        begun.append(len(nvrtc.kernel_text(kernel)))
        return ELF

    monkeypatch.setitem(BACKENDS, CUDA, dataclasses.replace(BACKENDS[CUDA], machine_code=machine_code))
    monkeypatch.setattr(saved_plans, "processors", lambda: 1)
    compiled(product(tmp_path / "m.onnx"), archs=["sm_90"])
    assert begun == sorted(begun, reverse=True) and len(set(begun)) > 1


def test_a_gpu_may_be_named(fused: Path) -> None:
    """Its multiprocessors count in what is planned."""
    result, file = compiled(fused, gpus=["H100 PCIe"], archs=["sm_90"])
    assert [each.device for each in result.gpus] == [Device("NVIDIA H100 PCIe", 90, 114, 232448)]
    again, other = compiled(fused, archs=["sm_90"])
    assert other.templates[0].words.data() != file.templates[0].words.data()
    assert again.gpus[0].device.name == "NVIDIA H200"


def test_settings_of_sessions_may_be_given(fused: Path) -> None:
    _, file = compiled(fused, archs=["sm_90"], options={"use_tf32": "0"})
    assert {each.tf32 for each in file.templates} == {False}


def test_without_a_gpu_an_architecture_must_be_named(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_LIBCUDA", "/none")
    with pytest.raises(UsageError, match=r"no GPU to compile for: the CUDA driver cannot be opened: .*; name its comp"):
        compiled(fused)


def test_no_onnxruntime_is_needed(fused: Path) -> None:
    """A build machine has neither a GPU nor onnxruntime."""
    program = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from onnxfuse.compile.compile_file import CompileSettings, compile_file\n"
        f"made = compile_file({str(fused)!r}, {str(fused.with_name('p'))!r}, CompileSettings(archs=['sm_75']))\n"
        "print(made.gpus[0].device.name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Tesla T4\n", "")


# --- what is planned --------------------------------------------------------------------------------------------------


def test_ranges_of_sizes_come_first(gpu: Stage, tmp_path: Path) -> None:
    """The kernels of this host have the second size as a constant."""

    def second_sizes(*shapes: str) -> list[int]:
        _, file = compiled(path, provider=CPU, shapes=shapes)
        return list(dict.fromkeys(each.hints[1] for each in file.templates[0].words.variants))

    path = write(tmp_path / "m.onnx", SHIFT)
    assert second_sizes()[0] == 128
    assert set(second_sizes("x:1..8x3..5", "b:3..5")[:3]) == {3, 4, 5}
    assert second_sizes("x:7x9")[0] == 9


def test_other_sizes_than_those_of_the_ranges_run_without_python(gpu: Stage, tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", SHIFT.replace("d]", "3]"))
    for shapes in [], ["x:8x3"], ["x:1..4x3"]:
        compiled(path, provider=CPU, shapes=shapes)
        run = native_session(path.read_bytes(), Path(f"{path}.plans"))
        for n in 0, 1, 7, 8, 33, 1000:
            x, b = np.ones((n, 3), np.float32), np.arange(3, dtype=np.float32)
            np.testing.assert_array_equal(run.run(None, {"x": x, "b": b})[0], x + b)


@pytest.mark.parametrize(
    "shapes, message",
    [
        (["q:1x2"], "the model has no input 'q'; it has x, b"),
        (["x:1..8"], "input 'x' has 2 dims, --shape gives 1"),
        (["x:1..8x2..4", "b:2..5"], "dim 'd' has two ranges"),
        (["x:8..1x2"], r"has the range 8\.\.1; give the least size first"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(gpu: Stage, tmp_path: Path, shapes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compiled(write(tmp_path / "m.onnx", SHIFT), provider=CPU, shapes=shapes)


def test_sizes_of_a_node_follow_from_those_of_the_model() -> None:
    ranges = {"batch": (1, 2), "past": (0, 4), "tokens": (1, 1)}
    found = samples_within(["batch", "past + tokens", "tokens"], ranges)
    assert sorted(found) == [(n, past + 1, 1) for n in (1, 2) for past in (0, 1, 2, 3, 4)]
    assert samples_within(["other"], ranges) == samples_within([], ranges) == []
    free = samples_within(["batch", "other"], ranges)
    assert {each[0] for each in free} == {1, 2} and max(each[1] for each in free) == 1 << 16
    assert len(samples_within(["a", "b", "c", "d"], dict.fromkeys("abcd", (1, 4096)))) <= 4096
    assert samples_within(["a - b"], {"a": (1, 2), "b": (1, 2)}) == [(0,), (1,)], "there is no negative size"


def test_nodes_without_a_kernel_are_named_with_the_reason(gpu: Stage, tmp_path: Path) -> None:
    graph = (
        "g (float[n] x, float16[n, d] h, float16[d] c, float[k] w) "
        "=> (float[n] y, float[n] z, float16[n, d] v) { "
        + node("scale", "x", "y", operands="x", more=", factor = 2.0")
        + node("scale", "x", "z", operands="x", more=", factor = -2.0")
        + node("shift", "h, c", "v", operands="x bias", types="10")
        + " }"
    )
    path = write(tmp_path / "m.onnx", graph)
    result, file = compiled(path, provider=CPU)
    device = stand_in.DEVICE
    assert result.left_out == (
        LeftOut(device, "scale", "node_1", "the factor must be positive"),
        LeftOut(device, "shift", "node_2", "shift is there for float32, the node has float16, float16"),
    )
    assert (len({each.node for each in file.templates}), file.operators) == (1, [])
    assert result.bodies == {
        "scale": "the factor must be positive",
        "shift": "shift is there for float32, the node has float16, float16",
    }
    text = printed(result)
    assert "   1x scale on sm_90 at 'node_1': the factor must be positive\n" in text
    assert "Run as bodies where there is no Python" in text


def printed(result: Compiled) -> str:
    console = terminal.console()
    with console.capture() as capture:
        console.print(summary(result), soft_wrap=True)
    return capture.get()


def test_a_node_whose_rank_is_unknown_is_left_to_its_first_run(gpu: Stage, tmp_path: Path) -> None:
    text = "g (float[n, d] x, float[d] b, int64[k] s) => (float[n, d] y, float[n, d] z) { t = Reshape(x, s) " + (
        node("shift", "t, b", "y", operands="x bias", more=", output_ranks = [2]")
        + node("copy", "x", "z", operands="x")
        + " }"
    )
    result, file = compiled(write(tmp_path / "m.onnx", text), provider=CPU)
    assert [(each.node, each.why) for each in result.left_out] == [
        ("node_1", "the rank of an operand is not known, so that it is planned when it first runs")
    ]
    assert [each.partition(" ")[0] for each in file.operators] == ["copy"]


def test_a_model_whose_nodes_have_no_kernel_is_an_error(gpu: Stage, tmp_path: Path) -> None:
    graph = "g (float16[n, d] x, float16[d] b) => (float16[n, d] y) { " + (
        node("shift", "x, b", "y", operands="x bias", types="10") + " }"
    )
    with pytest.raises(OnnxfuseError, match=r"no fused node of '.*' has a kernel: shift is there for float32,"):
        compiled(write(tmp_path / "m.onnx", graph), provider=CPU)
    with pytest.raises(UsageError, match=r"m\.onnx' has no fused nodes; run `onnxfuse optimize` first"):
        compiled(write(tmp_path / "m.onnx", "g (float[n] x) => (float[n] y) { y = Relu(x) }"), provider=CPU)


def test_a_node_whose_kernel_does_not_compile_is_left_out(
    gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine_code(kernel: Kernel, device: Device) -> bytes:
        if kernel.source == "shift":
            raise KernelError("shift.cu does not compile: of course\n  ^")
        return b"fake:cubin"

    backend = dataclasses.replace(BACKENDS[CPU], machine_code=machine_code)
    monkeypatch.setitem(BACKENDS, CPU, backend)
    graph = "g (float[n, d] x, float[d] b) => (float[n, d] y) {{ {} {} }}".format(
        node("shift", "x, b", "s", operands="x bias"), node("copy", "s", "y", operands="x")
    )
    result, file = compiled(write(tmp_path / "m.onnx", graph), provider=CPU)
    why = "a kernel of it fails: shift.cu does not compile: of course"
    assert {(each.node, each.why) for each in result.left_out} == {("node_0", why)}
    assert [each.partition(" ")[0] for each in file.operators] == ["copy"] and result.bodies == {"shift": why}
    (tmp_path / "m.onnx").unlink()
    for each in tmp_path.iterdir():
        each.unlink()
    with pytest.raises(OnnxfuseError, match=r"no fused node of '.*' has a kernel: a kernel of it fails: shift\.cu"):
        compiled(write(tmp_path / "m.onnx", SHIFT), provider=CPU)
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]


def test_a_file_that_cannot_be_written_is_an_error(gpu: Stage, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot be written"):
        compile_file(write(tmp_path / "m.onnx", SHIFT), tmp_path / "none" / "p", CompileSettings(provider=CPU))


def test_nodes_at_the_border_of_the_model_take_memory_that_is_not_aligned(gpu: Stage, tmp_path: Path) -> None:
    """A program binds memory to inputs and outputs; what lies between them, onnxruntime allocates."""
    graph = "g (float[n, d] x, float[d] b) => (float[n, d] y) { " + "".join(
        node("copy", before, after, operands="x", more=more)
        for before, after, more in (("x", "s", ""), ("s", "t", ", d = 1"), ("t", "y", ""))
    )
    _, file = compiled(write(tmp_path / "m.onnx", graph + " }"), provider=CPU)
    aligned: dict[bytes, set[bool]] = {}
    for each in file.templates:
        aligned.setdefault(each.node, set()).update(spec.aligned for spec in each.words.inputs)
    assert sorted(map(len, aligned.values())) == [1, 2]
    run = native_session((tmp_path / "m.onnx").read_bytes(), tmp_path / "m.onnx.plans")
    memory = np.arange(13, dtype=np.float32)
    for start in range(4):
        x = memory[start : start + 9].reshape(3, 3)
        np.testing.assert_array_equal(run.run(None, {"x": x, "b": np.ones(3, np.float32)})[0], x)


def test_few_plans_are_made_for_memory_that_is_not_aligned(gpu: Stage, tmp_path: Path) -> None:
    """They are correct for all sizes, and chosen for one."""
    path = product(tmp_path / "m.onnx")
    _, file = compiled(path, provider=CPU, archs=["sm_90"])
    aligned, unaligned = sorted(file.templates, key=lambda each: not each.words.inputs[0].aligned)
    assert (aligned.words.inputs[0].aligned, unaligned.words.inputs[0].aligned) == (True, False)
    assert len(aligned.kernels) > 3 * len(unaligned.kernels) > 0


# --- measurements -----------------------------------------------------------------------------------------------------


class Measured:
    """Says that of two plans the second is the faster one, at these sizes."""

    def inputs_measured(self, *_: Any) -> list[tuple[TensorSpec, ...]]:
        return [(TensorSpec((64, 3), "float32"), TensorSpec((3,), "float32"))]

    def choose(self, plans: list[Plan], *_: Any) -> int:
        return len(plans) - 1


def test_what_was_measured_on_a_gpu_that_is_here_is_in_the_file(
    gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gpu.kernels("shift").candidates

    def two(*arguments: Any) -> list[Plan]:
        (plan,) = one(*arguments)
        (step,) = plan.steps
        return [plan, dataclasses.replace(plan, steps=(dataclasses.replace(step, grid=(9, 1, 1)),))]

    monkeypatch.setattr(gpu.kernels("shift"), "candidates", two)
    monkeypatch.setattr(planner, "verdicts", Measured())
    path = write(tmp_path / "m.onnx", SHIFT)
    result, file = compiled(path, provider=CPU)
    assert (result.gpus[0].tuned, file.templates[0].words.tuned_sizes) == (1, {(64, 3)})
    run = onnxfuse.InferenceSession(path, providers=[CPU])
    for n, grid in (64, 9), (40, 9), (2, 7):
        run.run(None, {"x": np.ones((n, 3), np.float32), "b": np.ones(3, np.float32)})
        assert gpu.last()[0] == grid
    result, _ = compiled(path, provider=CPU, gpus=["H100 PCIe"])
    assert result.gpus[0].tuned == 0, "nothing is known of a GPU that is not here"


# --- sessions that know no Python -------------------------------------------------------------------------------------


def test_a_session_without_python_runs_by_the_file(gpu: Stage, tmp_path: Path) -> None:
    """It registers the functions whose nodes all have a kernel; the body of the other one runs."""
    graph = (
        "g (float[n, d] x, float[d] b, float[k] v) => (float[n, d] y, float[k] z) { "
        + node("shift", "x, b", "y", operands="x bias")
        + node("scale", "v", "z", operands="x", more=", factor = -2.0")
        + " }"
    )
    path = write(tmp_path / "m.onnx", graph)
    compiled(path, provider=CPU)
    gpu.kernels("shift").calls.clear()
    before = gpu.launches()
    run = native_session(path.read_bytes(), Path(f"{path}.plans"))
    x, b, v = np.ones((5, 3), np.float32), np.arange(3, dtype=np.float32), np.ones(2, np.float32)
    y, z = run.run(None, {"x": x, "b": b, "v": v})
    np.testing.assert_array_equal(y, x + b)
    np.testing.assert_array_equal(z, -2 * v)
    assert gpu.launches() == before + 1
    assert not gpu.kernels("shift").calls


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, ["compile", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_prints_a_summary(fused: Path) -> None:
    result = command(fused, "--arch", "sm_90", "--shape", "x:1..8x1..512x64")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"NVIDIA H200 \(sm_90, 132 multiprocessors\) +2 +\d+ +0 +\d+\n", result.stdout)
    assert re.search(r"fused\.onnx\.plans: 2 templates, \d+ kernels, 0\.\d MB, \d+\.\d s\n", result.stdout)
    assert read_plan_file(Path(f"{fused}.plans")).devices[0].name == "NVIDIA H200"
    assert command(fused, "-o", fused.with_name("other"), "--gpu", "L4").exit_code == 0
    assert read_plan_file(fused.with_name("other")).devices[0].arch == 89


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arch", "sm_1"], "error: no GPU of compute capability sm_1 is known"),
        (["--gpu", "none"], "error: no GPU is known of the name 'none'"),
        (["--arch", "sm_90", "--shape", "x:1..q"], "error: --shape 'x:1..q' is not of the form"),
        (["--arch", "sm_90", "--option", "use_tf32"], "error: --option 'use_tf32' is not of the form NAME=VALUE"),
        (["--arch", "sm_90", "--option", "foo=1"], "error: the CUDA provider has no option 'foo'; it has arena_ext"),
        (["--option", "use_tf32=maybe"], "error: option use_tf32 is 'maybe', required 0, 1, True, true, False or"),
        (["--arch", "sm_90", "--shape", "x:1x1x32"], "error: input 'x' has 64 elements along axis 2, --shape gives 32"),
    ],
)
def test_wrong_usage_is_one_line(fused: Path, arguments: list[str], message: str) -> None:
    result = command(fused, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_only_a_plan_file_is_replaced(fused: Path, tmp_path: Path) -> None:
    weights, before = tmp_path / "fused.onnx.0123456789ab.data", fused.read_bytes()
    weights.write_bytes(bytes(64))
    (tmp_path / "link.onnx").symlink_to(fused)
    for target, why in (
        (fused, "is the model to read; give another name for the plan file"),
        (tmp_path / "link.onnx", "is the model to read; give another name for the plan file"),
        (weights, "is there and is not a plan file; give another name, or remove it first"),
    ):
        result = command(fused, "--arch", "sm_90", "-o", target)
        assert (result.exit_code, result.stderr) == (1, f"error: '{target}' {why}\n")
    assert (fused.read_bytes(), weights.read_bytes()) == (before, bytes(64))
    with pytest.raises(PlanFileError, match="is not a plan file; give another name"):
        write_plan_file(weights, PlanFile({}, [], []))
    for _ in range(2):
        assert command(fused, "--arch", "sm_90", "-o", tmp_path / "p").exit_code == 0


def test_a_folder_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(".", "--arch", "sm_90")
    assert (
        result.exit_code == 1
        and result.stderr.startswith("error: '.' is a directory;")
        and not list(tmp_path.iterdir())
    )


def test_a_target_that_cannot_be_written_is_told_before_any_work(tmp_path: Path) -> None:
    result = command(tmp_path / "not_even_read.onnx", "-o", tmp_path / "none" / "p")
    assert result.exit_code == 1 and "does not exist; create it first" in result.stderr


@pytest.fixture
def nvrtc_anew() -> Iterator[None]:
    """Look for NVRTC again in the test, and after it."""
    nvrtc._nvrtc.cache_clear()
    yield
    nvrtc._nvrtc.cache_clear()


class MissingLibrary:
    """Stands for cuda-bindings where the package with libnvrtc is not installed."""

    def nvrtcVersion(self) -> NoReturn:
        raise RuntimeError('Failure finding "libnvrtc.so.13"')


@pytest.mark.parametrize(
    ("bindings", "told"),
    [
        (None, "compiling kernels needs cuda-bindings or CuPy; pip install cuda-bindings nvidia-cuda-nvrtc"),
        (
            MissingLibrary(),
            'NVRTC, which compiles kernels, does not load: RuntimeError: Failure finding "libnvrtc.so.13"; '
            "pip install cuda-bindings nvidia-cuda-nvrtc",
        ),
    ],
)
def test_without_nvrtc_the_command_says_what_to_install(
    bindings: object, told: str, fused: Path, nvrtc_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, nvrtc.BINDINGS, bindings)
    monkeypatch.setattr(importlib, "import_module", _import_of(nvrtc.BINDINGS, bindings))
    done = CliRunner().invoke(main, ["compile", str(fused), "--arch", "sm_90"])
    assert (done.exit_code, done.stderr.strip()) == (1, f"error: {told}")
    assert nvrtc.unavailable() == told


def _import_of(name: str, found: object) -> Callable[[str], object]:
    """Return importlib.import_module, which finds this module where it is not None."""
    real = importlib.import_module
    return lambda wanted: found if wanted == name and found is not None else real(wanted)
