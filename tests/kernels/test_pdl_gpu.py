"""Launches that start early: each kernel behind one that releases it at once and writes its inputs long after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from kernel_runs import NUMPY, compile_native, cupy, normal
from pdl_cases import ATTENTION, NODES, D, node_of, specs_of

import onnxfuse.kernels
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.run_plan import ReadyPlan
from onnxfuse.session import InferenceSession, explain_session

WAIT = 100_000  # nanoseconds: longer than a kernel takes to start
BLOCKS = 16  # of the kernel in front, which leaves room for the next one
NAN, UNWRITTEN = 0xFF, 0xA5  # bytes; the first are NaN in every dtype
NUMPY_SIZE = {**{name: dtype.itemsize for name, dtype in NUMPY.items()}, "uint8": 1, "int8": 1, "int64": 8}


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).parents[1] / "native" / "gpu_kernels")
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, folder])
    compile_native()


# --- in front and behind ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """Tensors one after the other in one piece of memory, each from a multiple of 256 bytes on."""

    data: Any
    places: tuple[int, ...]

    @staticmethod
    def of(sizes: Sequence[int]) -> Memory:
        ends = np.cumsum([-(-size // 256) * 256 for size in sizes])
        data = cupy.empty(max(int(ends[-1]), 1), dtype=cupy.uint8)
        return Memory(data, tuple(data.data.ptr + int(end) for end in (0, *ends[:-1])))

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        for array, place in zip(arrays, self.places, strict=True):
            host = np.ascontiguousarray(array)
            cupy.cuda.runtime.memcpy(place, host.ctypes.data, host.nbytes, 1)


def in_front(read: Memory, written: Memory) -> tuple[ReadyPlan, list[int], list[int], Any, Any]:
    """The plan of `late`, its inputs and outputs, the copy that it makes right, and what it saw of the outputs."""
    source, kept = cupy.empty_like(read.data), cupy.empty_like(written.data)
    numbers = [Scalar(value, "int64") for value in (read.data.nbytes, written.data.nbytes, WAIT)]
    pointers = (Pointer("input", 0), Pointer("input", 1), Pointer("output", 0), Pointer("output", 1))
    step = Launch(Kernel("late", "late", {"RACING": 0}), (BLOCKS, 1, 1), (256, 1, 1), (*pointers, *numbers))
    read_spec, written_spec = (TensorSpec((memory.data.nbytes,), "uint8") for memory in (read, written))
    ready = ready_plan(Plan((read_spec, written_spec), (step,)), (read_spec, written_spec))
    inputs, outputs = [source.data.ptr, written.data.data.ptr], [read.data.data.ptr, kept.data.ptr]
    return ready, inputs, outputs, source, kept


def behind(plan: Plan, inputs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> tuple[bytes, bytes, bytes]:
    """The plan's outputs after its inputs, in a stream and in a CUDA graph behind the kernel that writes them late.

    What it does before that kernel ends is refused: to write its outputs, which that one may still read.
    """
    read = Memory.of([array.nbytes for array in arrays])
    written = Memory.of([int(np.prod(o.shape)) * NUMPY_SIZE[o.dtype] for o in plan.outputs])
    own = ready_plan(plan, inputs)
    scratch = cupy.full(max(own.scratch_bytes, 1), 0xFF, dtype=cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)

    def start() -> None:
        own.run(read.places, written.places, scratch.data.ptr, stream.ptr)

    read.fill(arrays)
    written.data.fill(UNWRITTEN)  # the bytes between outputs have to stay so
    cupy.cuda.runtime.deviceSynchronize()
    start()
    stream.synchronize()
    expected = written.data.get().tobytes()
    ready, sources, targets, source, kept = in_front(read, written)
    source[:] = read.data

    def both() -> None:
        ready.run(sources, targets, 0, stream.ptr)
        start()

    found = []
    for graph in (None, captured(stream, both)):
        read.data.fill(NAN)
        written.data.fill(UNWRITTEN)
        keep_constants(read, inputs, arrays)
        kept.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream) if graph else both()
        stream.synchronize()
        assert (kept == UNWRITTEN).all(), "outputs were written while the kernel in front could read them"
        found.append(written.data.get().tobytes())
    return expected, found[0], found[1]


def captured(stream: Any, start: Any) -> Any:
    with stream:
        stream.begin_capture()
        try:
            start()
        finally:
            graph = stream.end_capture()
    return graph


def keep_constants(read: Memory, inputs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> None:
    """Constants are there from the beginning."""
    for place, spec, array in zip(read.places, inputs, arrays, strict=True):
        if spec.constant:
            host = np.ascontiguousarray(array)
            cupy.cuda.runtime.memcpy(place, host.ctypes.data, host.nbytes, 1)


# --- that it is a test -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("racing", [False, True])
def test_a_kernel_that_does_not_wait_is_found(device: Device, racing: bool) -> None:
    if device.arch < 90:
        pytest.skip("launches start early on sm_90 and later")
    x = normal((64, 64), "float32", 1)
    spec = TensorSpec(x.shape, "float32")
    arguments = (Pointer("input", 0), Pointer("output", 0), Scalar(x.nbytes, "int64"))
    step = Launch(Kernel("late", "copy_early", {"RACING": int(racing)}), (4, 1, 1), (256, 1, 1), arguments, pdl=True)
    plan = Plan((spec,), (step,))
    if racing:
        with pytest.raises(AssertionError, match="outputs were written while"):
            behind(plan, [spec], [x])
    else:
        expected, *found = behind(plan, [spec], [x])
        assert found == [expected] * 2


# --- every kernel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("name", NODES)
def test_a_kernel_waits_for_what_is_in_front(device: Device, name: str, constants: bool) -> None:
    node, inputs = node_of(name, constants)
    arrays = [values(spec, i) for i, spec in enumerate(inputs)]
    all_wait(node, inputs, arrays, device)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_waits_for_what_is_in_front(device: Device, name: str) -> None:
    arrays = list(ATTENTION[name].inputs().values())
    all_wait(ATTENTION[name].node(), specs_of(ATTENTION[name]), arrays, device)


def values(spec: TensorSpec, seed: int) -> np.ndarray:
    """Normal values, ids, or bytes of weights."""
    ids = np.random.default_rng(seed).integers(0, 20, spec.shape)
    if spec.dtype in ("uint8", "int8"):
        return ids.astype(spec.dtype)
    return ids if spec.dtype == "int64" else normal(spec.shape, "float16", seed, 0.2)


def all_wait(node: FusedNode, inputs: list[TensorSpec], arrays: list[np.ndarray], device: Device) -> None:
    """Every candidate of a node."""
    host = find_host(node.fusion)
    assert host.supports(node, [spec.dtype for spec in inputs], device) is None
    plans = host.candidates(node, inputs, device)
    for plan in plans:
        expected, *found = behind(plan, inputs, arrays)
        assert found == [expected] * 2, plan.steps[0]


# --- in sessions -----------------------------------------------------------------------------------------------------

BODY = """<domain: "onnxfuse", opset_import: ["" : 17]>
rms_norm <epsilon, fusion, operands, output_types> (x, scale) => (y) {
  square = Mul(x, x)
  mean = ReduceMean<axes = [-1]>(square)
  small = Constant<value_float: float = @epsilon>()
  sum = Add(mean, small)
  root = Sqrt(sum)
  unit = Div(x, root)
  y = Mul(unit, scale)
}"""


def chain(count: int) -> bytes:
    """Fused nodes, two in a row and then one of onnxruntime's, whose results' memory is used again and again."""
    call = 'onnxfuse.rms_norm <fusion = "rms_norm", operands = "x scale", output_types = [1], epsilon = 0.00001>'
    lines = [f"{f'Add(t{i}, x)' if i % 3 == 2 else f'{call} (t{i}, scale)'}" for i in range(count)]
    steps = " ".join(f"t{i + 1} = {line}" for i, line in enumerate(lines))
    text = f"""<ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]>
      g (float[n, d] x, float[d] scale) => (float[n, d] y) {{ t0 = Neg(x) {steps} y = Neg(t{count}) }}\n{BODY}"""
    return bytes(onnx.parser.parse_model(text).SerializeToString())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rows", [8, 4096])
def test_a_session_of_fused_nodes_and_others_is_right_again_and_again(rows: int, graph: bool) -> None:
    ort.preload_dlls()
    source, random = chain(24), np.random.default_rng(rows)
    cuda, given = "CUDAExecutionProvider", dict[str, Any]()
    plain = ort.InferenceSession(source, providers=[cuda])
    run = InferenceSession(source, providers=[(cuda, {"enable_cuda_graph": str(int(graph))})], tune="never")
    assert {each.how for each in explain_session(run)} == {"kernel"}
    binding = run.io_binding()
    for name, shape in (("x", (rows, D)), ("scale", (D,))):
        given[name] = ort.OrtValue.ortvalue_from_numpy(random.standard_normal(shape, dtype=np.float32), "cuda", 0)
        binding.bind_ortvalue_input(name, given[name])
    y = ort.OrtValue.ortvalue_from_shape_and_type((rows, D), np.float32, "cuda", 0)
    binding.bind_ortvalue_output("y", y)
    for _ in range(10):
        x = random.standard_normal((rows, D), dtype=np.float32)
        given["x"].update_inplace(x)
        run.run_with_iobinding(binding)
        (expected,) = plain.run(None, {"x": x, "scale": given["scale"].numpy()})
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4)
