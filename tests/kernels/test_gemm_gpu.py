"""Every implementation of a matrix product with its epilogue, against float64; and a session's CUDA graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from kernel_hosts import host_of, require_support
from kernel_references import PARAMETERS
from kernel_runs import (
    DTYPES,
    NUMPY,
    RELATIVE,
    compile_all,
    compile_native,
    cupy,
    in_turns,
    launch,
    normal,
    result,
    rounded,
    upload,
)
from onnx import TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.gemm import host, mma, small
from onnxfuse.kernels.gemm.implementations import implementations
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.gemm.stream import TMA_ARCH
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Matmul, Plan, TensorSpec

pytestmark = pytest.mark.gpu

# A single element; k of one; rows shorter than a vector; a decode step; one more row than a tile; odd in every
# direction and larger than a tile; few rows and much k; whole tiles of every kernel.
SIZES = [(1, 1, 1), (17, 64, 1), (5, 3, 7), (1, 1536, 1024), (16, 768, 3072), (33, 96, 200), (65, 130, 258),
         (8, 4096, 512), (1000, 1001, 1003), (300, 257, 129), (512, 768, 768)]  # fmt: skip
EPILOGUES = [(), ("bias",), ("column_scale",), ("residual",), ("bias", "residual"), ("bias", "column_scale"),
             ("column_scale", "residual"), ("bias", "column_scale", "residual")]  # fmt: skip

# The error of sums in fp32, relative to the sum of their terms' magnitudes: a product of fp16 or bf16 is exact, one of
# TF32 has two rounded operands.
SUMS = {"float32": 1e-6, "float16": 1e-6, "bfloat16": 1e-6, "tf32": 2.0**-10}
ACTIVATION_16 = 2.5e-5  # relative error of gelu_16, an activation for 16-bit results; a residual may cancel it


@dataclass(frozen=True)
class Case:
    """A fused product; `extra` names the operands beside x and the weights."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "kn"
    extra: tuple[str, ...] = ()
    activation: str = "none"
    gated: bool = False
    aligned: bool = True
    tf32: bool = False
    badly_scaled: bool = False

    def __str__(self) -> str:
        marks = [f"{self.m}x{self.n}x{self.k}", "tf32" if self.tf32 else self.dtype, self.layout, self.activation]
        marks += [*self.extra, "gated" * self.gated, "" if self.aligned else "misaligned"]
        return " ".join(mark for mark in [*marks, "scaled" * self.badly_scaled] if mark)

    @property
    def fusion(self) -> str:
        return "gated_gemm" if self.gated else "gemm_bias_activation"

    def arrays(self) -> dict[str, np.ndarray]:
        weight = (self.k, self.n) if self.layout == "kn" else (self.n, self.k)
        shapes = {"x": (self.m, self.k), "w": weight, **({"up": weight} if self.gated else {})}
        shapes |= {name: (self.m, self.n) if name == "residual" else (self.n,) for name in self.extra}
        made = {name: normal(shape, "float32", i) for i, (name, shape) in enumerate(shapes.items())}
        for name in ("w", "up") if self.gated else ("w",):
            made[name] /= math.sqrt(self.k)
        if self.badly_scaled:  # terms from 1e-4 to 1e4, which cancel
            made["x"] *= 10.0 ** np.random.default_rng(9).integers(-4, 3, (1, self.k))
        return {name: rounded(value, self.dtype) for name, value in made.items()}

    def node(self, operands: tuple[str, ...]) -> FusedNode:
        alpha, beta = PARAMETERS.get(self.activation, (0.0, 0.0))
        attributes = {"weight_layout": self.layout, "activation": self.activation}
        if self.activation in PARAMETERS:
            attributes |= {"alpha": alpha, "beta": beta}
        return FusedNode(self.fusion, str(self), operands, attributes, (self.dtype,))

    def product(self, device: Device, arrays: dict[str, np.ndarray]) -> tuple[Gemm, TensorSpec]:
        specs = [TensorSpec(value.shape, self.dtype, self.aligned) for value in arrays.values()]
        node = self.node(tuple(arrays))
        require_support(host_of(self.fusion), node, [self.dtype] * len(specs), device)
        return gemm_of(node, specs, device)


@pytest.fixture(scope="module")
def gpu() -> Device:
    return cuda_driver.gpu(0)


def set_up(case: Case, gpu: Device) -> Device:
    return Device(gpu.name, gpu.arch, gpu.multiprocessors, gpu.shared_per_block, case.tf32, gpu.ordinal)


def implementations_of(gemm: Gemm, device: Device) -> tuple[list[Implementation], list[Implementation]]:
    """Return the implementations, and others by mma.sync on copies, which other GPUs use."""
    found: list[Implementation] = implementations(gemm, device)
    return found, [way for way in mma.implementations_of_copies(gemm, device) if way not in found]


def ways_of(case: Case, gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations and half of those on copies; of epilogues, which come from one header, half of all.

    The halves take turns from case to case.
    """
    found, copies = implementations_of(gemm, device)
    return in_turns([*found, *copies], case, 2) if case in EPILOGUE_CASES else [*found, *in_turns(copies, case, 2)]


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest, gpu: Device) -> None:
    """Compile what the tests launch, by several compilers at once: one at a time, these kernels take minutes."""
    compile_native()
    cases = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    for case in {case for case in cases if isinstance(case, Case)}:
        shapes = {name: np.empty(value.shape, np.uint8) for name, value in case.arrays().items()}
        gemm, _ = case.product(set_up(case, gpu), shapes)
        steps = (step for way in ways_of(case, gemm, set_up(case, gpu)) for step in way.steps)
        compile_all((step.kernel for step in steps if isinstance(step, Launch)), gpu)


# ---- references --------------------------------------------------------------------------------------------------


def multiply(x: np.ndarray, w: np.ndarray, layout: str) -> np.ndarray:
    """Return the product in float64, computed on the GPU."""
    left, right = (cupy.asarray(each.astype(np.float64)) for each in (x, w if layout == "kn" else w.T))
    product: np.ndarray = cupy.asnumpy(left @ right)
    return product


def expect(case: Case, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the result in float64, and how far from it a result may be before it is rounded."""
    wide = {name: value.astype(np.float64) for name, value in arrays.items()}
    share = SUMS["tf32" if case.tf32 else case.dtype]

    def linear(weight: str, bias: str) -> tuple[np.ndarray, np.ndarray]:
        magnitude = multiply(np.abs(arrays["x"]), np.abs(arrays[weight]), case.layout)
        return multiply(arrays["x"], arrays[weight], case.layout) + wide.get(bias, 0.0), share * magnitude

    y, slack = linear("w", "bias")
    if case.activation == PRELU:
        y = np.where(y < 0, wide["slope"] * y, y)
        slack = slack * np.maximum(1, np.abs(wide["slope"]))
    else:
        y, slack = ACTIVATIONS[case.activation].formula(y, *PARAMETERS.get(case.activation, (0.0, 0.0))), 1.7 * slack
    slack = slack + (RELATIVE["float32"] if case.dtype == "float32" else ACTIVATION_16) * np.abs(y)
    if case.gated:
        up, up_slack = linear("up", "up_bias")
        y, slack = y * up, slack * np.abs(up) + np.abs(y) * up_slack
    scale = wide.get("column_scale", 1.0)
    return y * scale + wide.get("residual", 0.0), slack * np.abs(scale)


def run(way: Implementation, y: TensorSpec, arrays: dict[str, np.ndarray], aligned: bool) -> np.ndarray:
    read = [upload(value, aligned) for value in arrays.values()]
    written = upload(np.full(y.shape, np.nan, NUMPY[y.dtype]), aligned)
    launch(Plan((y,), way.steps, way.scratch), read, [written])
    return result(written, y, aligned)


def check_all(case: Case, gpu: Device) -> None:
    arrays, device = case.arrays(), set_up(case, gpu)
    gemm, y = case.product(device, arrays)
    expected, slack = expect(case, arrays)
    found = ways_of(case, gemm, device)
    assert found, "no candidate"
    for way in found:
        values = run(way, y, arrays, case.aligned).astype(np.float64)
        tiny = 1e-7 if case.dtype == "float16" else 1e-30  # fp16 has no smaller number
        excess = np.abs(values - expected) - (slack + RELATIVE[case.dtype] * np.abs(expected) + tiny)
        place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
        told = f"{way.name} at {place}: {values[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
        assert (excess <= 0).all(), told


# ---- cases -------------------------------------------------------------------------------------------------------


def grid() -> Iterator[Case]:
    for (m, n, k), dtype, layout in itertools.product(SIZES, DTYPES, ("kn", "nk")):
        yield Case(m, n, k, dtype, layout, ("bias", "residual"), "gelu")
        if dtype == "float32":
            yield Case(m, n, k, dtype, layout, ("bias",), "relu", tf32=True)
    for (m, n, k), dtype, layout in itertools.product(SIZES[::2], DTYPES, ("kn", "nk")):
        yield Case(m, n, k, dtype, layout, ("bias", "up_bias"), "silu", gated=True)


def misaligned() -> Iterator[Case]:
    for (m, n, k), dtype, layout in itertools.product([(1, 1536, 1024), (33, 96, 200)], DTYPES, ("kn", "nk")):
        yield Case(m, n, k, dtype, layout, ("bias", "residual"), "gelu", aligned=False, tf32=dtype == "float32")
    yield Case(65, 130, 258, "float16", "kn", ("bias", "up_bias"), "silu", gated=True, aligned=False)


def epilogues() -> Iterator[Case]:
    for m, extra in itertools.product((4, 200), EPILOGUES):
        for activation in ("none", "gelu"):
            yield Case(m, 192, 128, "float16", "kn", extra, activation)
    for m, extra in itertools.product((1, 4, 200), (("slope",), ("bias", "slope", "column_scale", "residual"))):
        yield Case(m, 192, 128, "float16", "kn", extra, PRELU)
    for m, activation in itertools.product((4, 200), ACTIVATIONS):
        yield Case(m, 192, 128, "bfloat16", "nk", ("bias",), activation)
    for extra, activation in itertools.product([(), ("bias",), ("up_bias",)], ("silu", "gelu", "sigmoid", "none")):
        yield Case(200, 192, 128, "float16", "nk", extra, activation, gated=True)


EPILOGUE_CASES = list(dict.fromkeys(epilogues()))


@pytest.mark.parametrize("case", list(grid()), ids=str)
def test_sizes(gpu: Device, case: Case) -> None:
    check_all(case, gpu)


@pytest.mark.parametrize("case", list(misaligned()), ids=str)
def test_pointers_between_vectors(gpu: Device, case: Case) -> None:
    check_all(case, gpu)


@pytest.mark.parametrize("case", EPILOGUE_CASES, ids=str)
def test_epilogues(gpu: Device, case: Case) -> None:
    check_all(case, gpu)


@pytest.mark.parametrize("badly_scaled", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("size", [(8, 1024, 4096), (512, 768, 2048)], ids=str)
def test_error_is_that_of_cublas(gpu: Device, size: tuple[int, int, int], dtype: str, badly_scaled: bool) -> None:
    """The norm of the error is at most a tenth above that of cuBLAS."""
    case = Case(*size, "float32" if dtype == "tf32" else dtype, tf32=dtype == "tf32", badly_scaled=badly_scaled)
    arrays, device = case.arrays(), set_up(case, gpu)
    gemm, y = case.product(device, arrays)
    expected = multiply(arrays["x"], arrays["w"], case.layout)

    def error(way: Implementation) -> float:
        return float(np.linalg.norm(run(way, y, arrays, True).astype(np.float64) - expected))

    found = [way for ways in implementations_of(gemm, device) for way in ways]
    library = [error(way) for way in found if len(way.steps) == 1 and isinstance(way.steps[0], Matmul)]
    assert library, "cuBLASLt is not among the candidates"
    for way in found:
        assert error(way) <= 1.1 * max(library), way.name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", [("kn", "kn", "kn"), ("nk", "nk", "nk"), ("kn", "nk", "kn")], ids="-".join)
@pytest.mark.parametrize("m", [1, 33, 300])
def test_parallel_products(gpu: Device, m: int, layouts: tuple[str, ...], dtype: str) -> None:
    """Three products with n of their own, two with a bias, are one launch if kernel and layouts allow it."""
    arrays, expected = {"x": normal((m, 192), dtype, 0)}, []
    for number, n, layout in zip(("", "_2", "_3"), (264, 128, 96), layouts, strict=True):
        w, bias = normal((192, n), dtype, n), normal((n,), dtype, n + 1)
        arrays["w" + number] = w if layout == "kn" else w.T
        if number != "_2":
            arrays["bias" + number] = bias
        y = arrays["x"].astype(np.float64) @ w.astype(np.float64)
        expected.append(y + bias.astype(np.float64) if number != "_2" else y)
    attributes = {f"weight_layout{number}": layout for number, layout in zip(("", "_2", "_3"), layouts, strict=True)}
    node = FusedNode("parallel_gemm", "y", tuple(arrays), attributes, (dtype,) * 3)
    specs = [TensorSpec(value.shape, dtype) for value in arrays.values()]
    plans = host.candidates(node, specs, replace(gpu, tf32=False))
    one_launch = gpu.arch == 90 or (gpu.arch >= TMA_ARCH and m <= small.MAX_ROWS)
    grouped = one_launch and dtype != "float32" and len(set(layouts)) == 1
    assert any(len(plan.steps) == 1 for plan in plans) == grouped
    for plan in plans:
        read = [upload(value) for value in arrays.values()]
        written = [upload(np.full(spec.shape, np.nan, NUMPY[dtype])) for spec in plan.outputs]
        launch(plan, read, written)
        for buffer, spec, values in zip(written, plan.outputs, expected, strict=True):
            error = np.linalg.norm(result(buffer, spec, True).astype(np.float64) - values) / np.linalg.norm(values)
            assert error < RELATIVE[dtype], plan.steps


# ---- in a session ------------------------------------------------------------------------------------------------


def model(weights: dict[str, np.ndarray]) -> bytes:
    """Return an optimized model of gelu(x w + b) + residual and silu(x g) * (x u)."""
    half, rows = TensorProto.FLOAT16, "rows"
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["h"]),
        helper.make_node("Gelu", ["h"], ["a"]),
        helper.make_node("Add", ["a", "residual"], ["y"]),
        helper.make_node("MatMul", ["x", "g"], ["xg"]),
        helper.make_node("MatMul", ["x", "u"], ["xu"]),
        helper.make_node("Sigmoid", ["xg"], ["s"]),
        helper.make_node("Mul", ["xg", "s"], ["silu"]),
        helper.make_node("Mul", ["silu", "xu"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linears",
        [helper.make_tensor_value_info(name, half, [rows, d]) for name, d in (("x", 256), ("residual", 512))],
        [helper.make_tensor_value_info(name, half, [rows, 512]) for name in ("y", "z")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    fused, report = onnxfuse.optimize(whole, verify=False)
    assert {node.op_type for node in fused.graph.node} == {"gemm_bias_activation", "gated_gemm"}, report
    return bytes(fused.SerializeToString())


@pytest.mark.parametrize("tune", ["never", "cached"])
@pytest.mark.parametrize("rows", [1, 40, 512])
def test_a_captured_session_replays_with_new_inputs(rows: int, tune: Any) -> None:
    """Onnxruntime runs twice, captures, and replays on the addresses of the capture."""
    shapes = {"w": (256, 512), "b": (512,), "g": (256, 512), "u": (256, 512)}
    weights = {name: normal(shape, "float16", i, 0.1) for i, (name, shape) in enumerate(shapes.items())}
    ort.preload_dlls()
    options = {"enable_cuda_graph": "1"}
    run = onnxfuse.InferenceSession(model(weights), providers=[("CUDAExecutionProvider", options)], tune=tune)
    assert {each.how for each in onnxfuse.explain_session(run)} == {"kernel"}
    given = {name: ort.OrtValue.ortvalue_from_numpy(normal((rows, d), "float16", 0), "cuda", 0)
             for name, d in (("x", 256), ("residual", 512))}  # fmt: skip
    found = {name: ort.OrtValue.ortvalue_from_shape_and_type((rows, 512), np.float16, "cuda", 0) for name in "yz"}
    binding = run.io_binding()
    for name, value in given.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in found.items():
        binding.bind_ortvalue_output(name, value)
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    for seed in range(5):
        x, residual = normal((rows, 256), "float16", seed), normal((rows, 512), "float16", seed + 100)
        given["x"].update_inplace(x)
        given["residual"].update_inplace(residual)
        run.run_with_iobinding(binding)
        y = ACTIVATIONS["gelu"].formula(x.astype(np.float64) @ wide["w"] + wide["b"], 0, 0) + residual
        z = ACTIVATIONS["silu"].formula(x.astype(np.float64) @ wide["g"], 0, 0) * (x.astype(np.float64) @ wide["u"])
        for name, expected in (("y", y), ("z", z)):
            error = np.abs(found[name].numpy().astype(np.float64) - expected)
            assert (error <= RELATIVE["float16"] * np.abs(expected) + 1e-4).all(), f"{name}: off by {error.max()}"
