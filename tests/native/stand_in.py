"""Run fused nodes without a GPU: the native library on the CPU provider, over stand-ins for CUDA's libraries."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse.kernels
from onnxfuse.runtime import background_compile, body_runs, build_native, kernel_failures, prepare_session
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, Backend
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.plan import Device, Kernel
from onnxfuse.runtime.planner import Planner, planner
from onnxfuse.runtime.target import native_library
from onnxfuse.session import InferenceSession

HERE = Path(__file__).parent
CPU = "CPUExecutionProvider"
DEVICE = Device("stand-in", 90, 132, 227 * 1024)
HEAD = '<ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]>'
BODIES = {
    "shift": "(x, bias) => (y) { y = Add(x, bias) }",
    "copy": "(x) => (y) { y = Identity(x) }",
    "rows": "(x, count, bias) => (y) { zero = Constant <value_ints = [0]>() one = Constant <value_ints = [-1]>() "
    "end = Reshape(count, one) end64 = Cast <to = 7>(end) some = Slice(x, zero, end64) y = Add(some, bias) }",
    "pair": "(x, r) => (a, b) { a = Add(x, r) b = Sub(x, r) }",
    "product": "(x, w, bias) => (y) { m = MatMul(x, w) y = Add(m, bias) }",
    "convolve": "(x, w, bias) => (y) { y = Conv(x, w, bias) }",
    "unmap": "(x) => (y) { y = Identity(x) }",
    "scale": "(x) => (y) { f = Constant <value_float: float = @factor>() y = Mul(x, f) }",
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """The functions of the stand-ins, the native library, and the hosts of the test kernels by name."""

    cuda: Any
    cublaslt: Any
    cudnn: Any
    library: Any
    kernels: Callable[[str], Any]

    def launches(self) -> int:
        return int(self.cuda.fake_launches())

    def last(self) -> list[int]:
        """Return grid, block, shared memory and cluster size of the last launch."""
        words = (ctypes.c_uint * 8)()
        self.cuda.fake_last(words)
        return list(words)

    def last_walk(self) -> list[int]:
        """Return lower and upper corners, steps and box of the last map over pixels that this thread encoded."""
        numbers = (ctypes.c_int * 8)()
        self.cuda.fake_last_walk(numbers)
        return list(numbers)

    def last_map(self) -> list[int]:
        """Return type, rank, interleave, swizzle, promotion and fill of this thread's last tensor map."""
        words = (ctypes.c_uint * 6)()
        self.cuda.fake_last_map(words)
        return list(words)

    def products(self) -> int:
        return int(self.cublaslt.fake_products())

    def last_product(self) -> list[int]:
        """Return compute type, transpose and epilogue of the last product, and what the heuristic was last asked for.

        The latter are reductions, four alignments, and the bias's address modulo 256.
        """
        words = (ctypes.c_int * 9)()
        self.cublaslt.fake_last_product(words)
        return list(words)

    def last_convolution(self) -> str:
        """Return the operations of the last graph of cuDNN that ran, such as "forward, add 4, pointwise 100"."""
        text = ctypes.create_string_buffer(256)
        self.cudnn.fake_last_graph(text, ctypes.c_size_t(256))
        return text.value.decode()


def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Let fused nodes on the CPU provider run the kernels of this folder."""
    if build_native.compiler() is None:
        pytest.skip("no C++ compiler: the native library is not tested")
    libcuda = built("fake_cuda", lambda target: compiled(HERE / "fake_cuda.cc", target))
    libcublaslt = built("fake_cublaslt", lambda target: compiled(HERE / "fake_cublaslt.cc", target))
    libcudnn = built("fake_cudnn", lambda target: compiled(HERE / "fake_cudnn.cc", target))
    library = built("native", lambda target: build_native.build(target, "-O1", "-Wall", "-Wextra", "-Werror"))
    monkeypatch.setenv("ONNXFUSE_LIBCUDA", str(libcuda))
    monkeypatch.setenv("ONNXFUSE_LIBCUBLASLT", str(libcublaslt))
    monkeypatch.setenv("ONNXFUSE_LIBCUDNN", str(libcudnn))
    monkeypatch.setattr(native, "library_path", lambda: library)
    monkeypatch.setitem(BACKENDS, CPU, BACKEND)
    # Sessions of other tests may not be collected yet, and all modules hold the one planner.
    monkeypatch.setattr(planner, "__dict__", {**vars(Planner()), "verdicts": planner.verdicts})
    monkeypatch.setattr(kernel_failures, "_failures", {})
    for name in "_bodies", "_early":
        monkeypatch.setattr(body_runs, name, {})
    at_once = lambda templates, *_: background_compile.load_and_send(templates)  # noqa: E731
    monkeypatch.setattr(prepare_session, "compile_in_background", at_once)
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, str(HERE / "kernels")])
    cuda, cublaslt, cudnn = (ctypes.CDLL(str(path)) for path in (libcuda, libcublaslt, libcudnn))
    cuda.fake_launches.restype = cuda.fake_modules.restype = cuda.fake_streams.restype = ctypes.c_int64
    cublaslt.fake_products.restype = cublaslt.fake_handles.restype = ctypes.c_int64
    for name in "fake_runs", "fake_handles", "fake_plans", "fake_packs", "fake_descriptors":
        getattr(cudnn, name).restype = ctypes.c_int64
    cudnn.fake_last_stream.restype = ctypes.c_void_p
    return Stage(cuda, cublaslt, cudnn, native_library(), host)


def host(family: str) -> Any:
    """Return the host module of a family of test kernels."""
    return importlib.import_module(f"onnxfuse.kernels.{family}.host")


def device(ordinal: int) -> Device:
    return DEVICE


def load(kernel: Kernel, ordinal: int) -> LoadedKernel:
    return _load(kernel.entry, ordinal)


@functools.cache
def _load(entry: str, ordinal: int) -> LoadedKernel:
    module, function = native.load_function(native.load(), ordinal, b"fake:cubin", entry)
    return LoadedKernel(function, module)


BACKEND = Backend(
    lambda: None, lambda: None, lambda: 2, device, load, lambda *_: True, lambda *_: b"fake:cubin", lambda: None
)


@functools.cache
def built(name: str, build: Callable[[Path], Path]) -> Path:
    """Return a library that is compiled from the present sources with the present flags, and kept for later runs."""
    flags = [Path(build_native.__file__), Path(__file__)]
    sources = sorted([*(native.PACKAGE / "native").iterdir(), *HERE.glob("fake_*"), *flags])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"onnxfuse-tests-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{name}-{digest}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the run wait for what one of them compiles
        if not target.exists():
            part = build(folder / f"{name}-{digest}-{os.getpid()}.so")
            part.rename(target)
    return target


def compiled(source: Path, target: Path, *flags: str) -> Path:
    command = [str(build_native.compiler()), *build_native.FLAGS, *flags, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def model(graph: str, **bodies: str) -> bytes:
    """Return a model of a graph in ONNX text, with those functions of BODIES and `bodies` that it calls."""
    functions = [
        f'<domain: "onnxfuse", opset_import: ["" : 17]> {name} '
        f"<{'factor' if name == 'scale' else 'd'}, fusion, operands, output_types> {body}"
        for name, body in (BODIES | bodies).items()
        if f"onnxfuse.{name} " in graph
    ]
    proto = onnx.parser.parse_model("\n".join([HEAD, graph, *functions]))
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"node_{index}"
    return bytes(proto.SerializeToString())


def node(op: str, inputs: str, outputs: str, *, operands: str, types: str = "1", more: str = "") -> str:
    """Return a fused node in ONNX text."""
    attributes = f'fusion = "{op}", operands = "{operands}", output_types = [{types}]{more}'
    return f"{outputs} = onnxfuse.{op} <{attributes}> ({inputs})"


SHIFT = "g (float[n, d] x, float[d] b) => (float[n, d] y) { " + node("shift", "x, b", "y", operands="x bias") + " }"

ROWS = "g (float[n, d] x, int32 count, float[d] b) => (float[m, d] y) { "
ROWS += node("rows", "x, count, b", "y", operands="x count bias") + " }"


def session(source: bytes, **arguments: Any) -> ort.InferenceSession:
    """Return a session of onnxfuse on the CPU provider."""
    return InferenceSession(source, providers=[CPU], **arguments)


def feed(n: int, d: int, dtype: Any = np.float32) -> dict[str, Any]:
    """Return inputs for SHIFT."""
    random = np.random.default_rng(n * 1000 + d)
    return {"x": random.standard_normal((n, d)).astype(dtype), "b": random.standard_normal(d).astype(dtype)}


def fails(run: ort.InferenceSession, given: dict[str, Any]) -> str:
    """Return the message of a run that must fail, because no body is known that could run instead."""
    body_runs._bodies.clear()
    with pytest.raises(Exception) as caught:  # onnxruntime's errors have no common class
        run.run(None, given)
    return str(caught.value)
