"""Plans with tensor maps and with products by cuBLASLt, and the checks of memory that may not overlap."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, HERE, SHIFT, Stage, built, compiled, fails, feed, model, node, session, stage

from onnxfuse import session as session_module
from onnxfuse.errors import UsageError
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import (
    Im2col,
    Kernel,
    Launch,
    Matmul,
    Matrix,
    NoAlias,
    Plan,
    Pointer,
    Scalar,
    Struct,
    TensorMap,
    TensorSpec,
)
from onnxfuse.runtime.run_plan import ReadyPlan


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    yield result
    result.cublaslt.fake_no_algorithm(0)


def replaced(what: Any, **changes: Any) -> Any:
    return dataclasses.replace(what, **changes)


# --- memory that may not overlap --------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_start", [False, True])
def test_inputs_and_outputs_that_overlap_are_refused(gpu: Stage, same_start: bool) -> None:
    """Memory that overlaps in part is refused; the same start address is accepted if the plan allows it."""
    m, n, k = 8, 32, 32
    step = matrices(m, n, k, False, aligned=False)
    x, w, y = (TensorSpec(shape, "float32", False) for shape in ((m, k), (k, n), (m, n)))
    plan = Plan((y,), (step,), no_alias=(NoAlias(0, 0, same_start),))
    ready = ready_plan(plan, [x, w], provider=CPU)
    memory, weights = np.zeros(3 * m * n, np.float32), np.zeros((k, n), np.float32)
    begin, size = memory.ctypes.data, 4 * m * n
    for start in begin, begin + 2 * size:
        ready.run([begin + size, weights.ctypes.data], [start])
    required = "required no overlap" + (", or the same start" if same_start else "")
    for start in begin + 4, begin + size - 4, begin + size + 4, begin + 2 * size - 4:
        with pytest.raises(NativeError, match=f"input 0 and output 0 overlap in memory; {required}$"):
            ready.run([begin + size, weights.ctypes.data], [start])
    if same_start:
        ready.run([begin + size, weights.ctypes.data], [begin + size])
    else:
        with pytest.raises(NativeError, match="overlap"):
            ready.run([begin + size, weights.ctypes.data], [begin + size])


# --- tensor maps and products ----------------------------------------------------------------------------------------

UNMAP = "g (float[n, d] x) => (float[n, d] y) { " + node("unmap", "x", "y", operands="x") + " }"
PRODUCT = "g ({0}[b, m, k] x, {0}[k, n] w, {0}[n] bias) => ({0}[b, m, n] y) {{ {1} }}"


def product_model(name: str = "float", number: int = 1) -> bytes:
    call = node("product", "x, w, bias", "y", operands="x w bias", types=str(number))
    return model(PRODUCT.format(name, call))


def product_feed(m: int, n: int, k: int, dtype: Any = np.float32) -> dict[str, Any]:
    """Return small integers, whose products are exact in every dtype."""
    random = np.random.default_rng(m)
    shapes = {"x": (2, m, k), "w": (k, n), "bias": (n,)}
    return {name: random.integers(-3, 4, shape).astype(dtype) for name, shape in shapes.items()}


def test_a_tensor_map_is_encoded_for_the_address_of_the_run(gpu: Stage) -> None:
    run = session(model(UNMAP))
    for _ in range(3):
        x = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
        np.testing.assert_array_equal(run.run(None, {"x": x})[0], x)
    assert gpu.last_map() == [7, 2, 0, 3, 3, 0], "float32, rank 2, swizzle 128, promotion to 256 bytes, zeros"


def test_a_walk_over_pixels_is_encoded(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    unmap = gpu.kernels("unmap")
    good = unmap.candidates
    monkeypatch.setattr(unmap, "candidates", lambda *a: [with_map(plan, **PIXELS) for plan in good(*a)])
    session(model(UNMAP)).run(None, {"x": np.zeros((8, 64), np.float32)})
    assert gpu.last_walk() == [-1, -2, 0, -3, 2, 1, 32, 16]
    assert gpu.last_map() == [7, 4, 0, 3, 3, 0]


@pytest.mark.parametrize("name, number, dtype", [("float", 1, np.float32), ("float16", 10, np.float16)])
def test_a_product_runs_through_cublaslt(gpu: Stage, name: str, number: int, dtype: Any) -> None:
    run = session(product_model(name, number))
    before, launches = gpu.products(), gpu.launches()
    for m, n, k in [(3, 5, 7), (1, 1, 1), (3, 5, 7)]:
        given = product_feed(m, n, k, dtype)
        exact = given["x"].astype(np.float64) @ given["w"].astype(np.float64) + given["bias"]
        np.testing.assert_array_equal(run.run(None, given)[0], exact.astype(dtype))
    assert gpu.products() - before == 3
    assert gpu.launches() == launches
    assert gpu.cublaslt.fake_handles() == 1
    compute, transpose, epilogue, reductions = gpu.last_product()[:4]
    assert (compute, transpose, epilogue) == (77 if dtype == np.float32 else 68, 0, 4)
    assert reductions == (7 if dtype == np.float32 else 2), "16-bit results are summed up in fp32"


def test_eight_threads_share_a_product_and_a_tensor_map(gpu: Stage) -> None:
    runs, failures = (session(product_model()), session(model(UNMAP))), []

    def work(seed: int) -> None:
        for i in range(100):
            given = product_feed(1 + (seed + i) % 3, 4, 8)
            x = np.full((4, 16), seed * 100 + i, np.float32)
            if not np.array_equal(runs[0].run(None, given)[0], given["x"] @ given["w"] + given["bias"]):
                failures.append(f"product, thread {seed}, run {i}")
            if not np.array_equal(runs[1].run(None, {"x": x})[0], x):
                failures.append(f"tensor map, thread {seed}, run {i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not failures


def matrices(m: int, n: int, k: int, transposed: bool, **more: Any) -> Matmul:
    x = Matrix(Pointer("input", 0), "float32", m, k, k, m * k)
    w = Matrix(Pointer("input", 1), "float32", *((n, k, k) if transposed else (k, n, n)), n * k)
    y = Matrix(Pointer("output", 0), "float32", m, n, n, m * n)
    return Matmul(x, w, y, transposed, **more)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_a_plan_runs_without_onnxruntime(gpu: Stage, transposed: bool, activation: Any) -> None:
    """A batch of 3 with w shared, c added, a gap between the rows of y, and workspace for an algorithm."""
    m, n, k, batch = 4, 5, 6, 3
    random = np.random.default_rng(0)
    x = random.integers(-3, 4, (batch, m, k)).astype(np.float32)
    w = random.integers(-3, 4, (n, k) if transposed else (k, n)).astype(np.float32)
    c, bias = random.integers(-3, 4, (batch, m, n)).astype(np.float32), np.arange(n, dtype=np.float32)
    y = np.full((batch, m, n + 2), -1, np.float32)
    step = matrices(m, n, k, transposed, batch=batch, bias=Pointer("input", 3), activation=activation, aligned=False)
    step = replaced(
        step,
        w=replaced(step.w, batch_stride=0),
        y=replaced(step.y, stride=n + 2, batch_stride=m * (n + 2)),
        c=replaced(step.y, pointer=Pointer("input", 2)),
        workspace=Pointer("scratch", 1),
        workspace_bytes=8192,
    )
    found = run_plan.algorithms(step, 0, 4)
    assert [each.workspace_bytes for each in found] == [0, 1024, 2048, 3072]
    plan = Plan((TensorSpec(y.shape, "float32"),), (replaced(step, algorithm=found[-1].words),), (100, 8192))
    inputs = (x, w, c, bias)
    ready = ready_plan(plan, [TensorSpec(each.shape, "float32", False) for each in inputs], provider=CPU)
    assert ready.scratch_bytes == 256 + 8192
    storage = np.zeros(ready.scratch_bytes + 256, np.uint8)
    scratch = storage.ctypes.data + -storage.ctypes.data % 256
    ready.run([each.ctypes.data for each in inputs], [y.ctypes.data], scratch, times=2)
    exact = x @ (w.T if transposed else w) + c + bias
    np.testing.assert_array_equal(y[..., :n], np.maximum(exact, 0) if activation == "relu" else exact)
    np.testing.assert_array_equal(y[..., n:], -1)
    assert gpu.last_product() == [68, int(transposed), 4 + 2 * (activation == "relu"), 7, 4, 4, 4, 4, 4]
    with pytest.raises(NativeError, match="scratch memory must start at a multiple of 256 bytes"):
        ready.run([each.ctypes.data for each in inputs], [y.ctypes.data], scratch + 1)
    with pytest.raises(NativeError, match="the plan needs 8448 bytes of scratch memory"):
        ready.run([each.ctypes.data for each in inputs], [y.ctypes.data])
    with pytest.raises(NativeError, match="the plan has 4 inputs and 1 outputs, found 0 and 1 addresses"):
        ready.run([], [y.ctypes.data])


def shift_by_struct(rows: int, columns: int) -> Launch:
    fields = (
        Scalar(columns, "int32"), Scalar(-2.0, "float32"), Pointer("input", 0), Scalar(0.5, "float32"),
        Pointer("input", 1), Pointer("output", 0), Scalar(rows * columns, "int64"),
    )  # fmt: skip
    return Launch(Kernel("shift", "shift_by_struct"), (1, 1, 1), (32, 1, 1), (Struct(fields),))


def test_the_fields_of_a_struct_lie_where_c_has_them(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a template are dynamic: its fields are computed for each run."""

    def candidates(_: object, inputs: Sequence[TensorSpec], device: object) -> list[Plan]:
        return [Plan((inputs[0],), (shift_by_struct(*inputs[0].shape),))]

    monkeypatch.setattr(gpu.kernels("shift"), "candidates", candidates)
    run = session(model(SHIFT))
    for rows, columns in ((2, 3), (5, 3), (4, 7)):
        given = feed(rows, columns)
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"] * -2 + given["b"] + 0.5)


MALFORMED_STRUCTS: dict[str, tuple[Any, ...]] = {
    "the number of a struct's fields is 0, required 1 to": (Struct(()),),
    "a plan has a TensorMap where it may have one of Pointer, Scalar": (
        Struct((TensorMap(Pointer("input", 0), "float32", (3,), (), (3,)),)),  # type: ignore[arg-type]
    ),
    "a plan has a Struct where it may have one of Pointer, Scalar": (Struct((Struct((Scalar(1, "int32"),)),)),),  # type: ignore[arg-type]
    "the arguments of a launch take over 4096 bytes": (Struct((Scalar(1, "int64"),) * 512), Scalar(1, "int32")),
    "a pointer's index is 2, required 0 to 1": (Struct((Pointer("input", 2),)),),
}


@pytest.mark.parametrize("message", MALFORMED_STRUCTS)
def test_a_malformed_struct_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    plan = Plan(
        (TensorSpec((2, 3), "float32"),), (replaced(shift_by_struct(2, 3), arguments=MALFORMED_STRUCTS[message]),)
    )
    monkeypatch.setattr(gpu.kernels("shift"), "candidates", lambda *_: [plan])
    assert message in fails(session(model(SHIFT)), feed(2, 3))


def test_shared_memory_is_asked_for_beside_what_kernels_have_statically(gpu: Stage) -> None:
    """Kernels may use 48 KB of static and dynamic memory without an attribute; the stand-in has 1 KB of static."""
    for shared in (100, 47 * 1024, 47 * 1024 + 1, 48 * 1024, 100 * 1024):
        step = Launch(Kernel("none", "noop"), (1, 1, 1), (32, 1, 1), (), shared)
        ready_plan(Plan((TensorSpec((1,), "float32"),), (step,)), (), provider=CPU).run([], [0])
        assert gpu.last()[6] == shared


def test_alignment_counts_offsets_and_scratch(gpu: Stage) -> None:
    step = matrices(8, 8, 8, False)
    x, y = replaced(step.x, pointer=Pointer("input", 0, 8)), replaced(step.y, pointer=Pointer("scratch", 0, 128))
    for bias, alignment in ((Pointer("input", 1), 16), (Pointer("input", 1, 4), 4), (Pointer("scratch", 0), 0)):
        run_plan.algorithms(replaced(step, x=x, y=y, bias=bias), 0, 1)
        assert gpu.last_product()[4:] == [16, 8, 128, 128, alignment], "of w, x, c, y and the bias"


def test_a_product_that_cublaslt_cannot_do_is_an_error_with_its_sizes(gpu: Stage) -> None:
    gpu.cublaslt.fake_no_algorithm(1)
    assert run_plan.algorithms(matrices(2, 2, 2, False), 0, 4) == []
    assert (
        "product 'node_0' (float32[2,3,7], float32[7,5], float32[5]): cuBLASLt has no algorithm for a product of "
        "float32 6x7 and 7x5 within 4096 bytes of workspace"
    ) in fails(session(product_model()), product_feed(3, 5, 7))


def test_a_missing_cublaslt_is_an_error_that_says_so(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise NativeError("matrix products need cuBLASLt")

    monkeypatch.setattr(run_plan, "cublaslt", missing)
    message = fails(session(product_model()), product_feed(3, 5, 7))
    assert "product 'node_0'" in message and "NativeError: matrix products need cuBLASLt" in message


def test_tf32_is_what_each_session_was_told(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU provider refuses CUDA's options, so the test passes them to the targets."""
    target = session_module.find_target
    found = {}
    for tf32 in (True, False, True):
        monkeypatch.setattr(session_module, "find_target", lambda *a, tf32=tf32: replaced(target(*a), tf32=tf32))
        found[tf32] = found.get(tf32) or session(product_model())
    for _ in range(2):
        for tf32, run in found.items():
            run.run(None, product_feed(3, 5, 7))
            assert gpu.last_product()[0] == (77 if tf32 else 68)
    options = ort.SessionOptions()
    session(product_model(), sess_options=options)
    monkeypatch.setattr(session_module, "find_target", lambda *a: replaced(target(*a), tf32=False))
    with pytest.raises(UsageError, match="use_tf32 = 1, here it is 0; make new SessionOptions"):
        session(product_model(), sess_options=options)


OPTIONS = [({}, True), ({"use_tf32": "0"}, False), ({"use_tf32": 0}, False), ({"use_tf32": False}, False),
           ({"use_tf32": "1"}, True), ({"use_tf32": "true"}, True), ({"use_tf32": "false"}, False)]  # fmt: skip


@pytest.mark.parametrize("given, tf32", OPTIONS)
def test_use_tf32_is_read_as_onnxruntime_reads_it(gpu: Stage, given: dict[str, Any], tf32: bool) -> None:
    for providers, options in (([(CPU, given)], None), ([CPU], [given])):
        target = session_module.find_target(ort.SessionOptions(), providers, options)
        assert target == session_module.Target(CPU, 0, tf32)


# --- other libraries, each in a process of its own -------------------------------------------------------------------

ALONE = """
import sys
from onnxfuse.runtime import run_plan
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.plan import *
native.library_path = lambda: {library!r}
source = TensorMap(Pointer("input", 0), "float32", (32, 8), (128,), (32, 8))
x = Matrix(Pointer("input", 0), "float32", 8, 8, 8)
step = Launch(Kernel("k", "k"), (1, 1, 1), (1, 1, 1), (source,)) if {tensor_map} else Matmul(x, x, x, False)
spec = TensorSpec((8, 32), "float32")
functions = [LoadedKernel(1, None)] if {tensor_map} else []
try:
    run_plan.ReadyPlan(Plan((spec,), (step,)), functions, [spec], 0)
except native.NativeError as error:
    print(error)
"""


def alone(libcuda: Path, libcublaslt: str, library: str, tensor_map: bool) -> str:
    """Return the message of a process that loads a plan with these libraries."""
    environment = {**os.environ, "ONNXFUSE_LIBCUDA": str(libcuda), "ONNXFUSE_LIBCUBLASLT": libcublaslt}
    script = ALONE.format(library=library, tensor_map=tensor_map)
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout


def test_an_old_driver_has_no_tensor_maps(gpu: Stage) -> None:
    old = built("old_cuda", lambda target: compiled(HERE / "fake_cuda.cc", target, "-DWITHOUT_TENSOR_MAPS"))
    message = alone(old, "", gpu.library._name, tensor_map=True)
    assert message == "the CUDA driver is too old for tensor maps; CUDA 12.0 or newer is required\n"


@pytest.mark.parametrize("cluster", [1, 4])
def test_a_launch_may_start_before_the_one_in_front_of_it_ends(gpu: Stage, cluster: int) -> None:
    for pdl in (True, False):
        ready_plan(noop(cluster, pdl), (), provider=CPU).run([], [0])
        assert (gpu.last()[7], gpu.cuda.fake_last_pdl()) == (cluster, pdl)


def test_no_launch_starts_early_while_another_stream_has_work(gpu: Stage) -> None:
    here, elsewhere = (ready_plan(noop(1, True), (), i, provider=CPU) for i in (0, 1))

    def starts_early(plan: ReadyPlan, stream: int) -> bool:
        plan.run([], [0], stream=stream)
        return bool(gpu.cuda.fake_last_pdl())

    time.sleep(LONG_AGO)
    assert all(starts_early(here, 1) for _ in range(3))
    in_turn = [starts_early(here, 1 + i % 2) for i in range(100)]
    assert in_turn.count(True) < 50, "two launches of other streams are rarely so far apart"
    assert starts_early(elsewhere, 3), "streams of another GPU do not count"
    time.sleep(LONG_AGO)
    assert starts_early(here, 2)
    gpu.cuda.fake_capture(1)
    assert starts_early(here, 3), "a captured graph may run alone"
    gpu.cuda.fake_capture(0)


PDL = """
import ctypes
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.plan import *
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.run_plan import ReadyPlan
native.library_path = lambda: {library!r}
library = native.driver()
function = LoadedKernel(*reversed(native.load_function(library, 0, b"fake:cubin", "noop")))
{plan}
ReadyPlan(plan, [function], (), 0).run([], [0])
print(ctypes.CDLL(native.libcuda()).fake_last_pdl())
"""


@pytest.mark.parametrize("flags, pdl", [((), 1), (("-DWITHOUT_TENSOR_MAPS",), 0)])
def test_an_old_driver_starts_launches_one_after_the_other(gpu: Stage, flags: tuple[str, ...], pdl: int) -> None:
    libcuda = built(f"cuda_{pdl}", lambda target: compiled(HERE / "fake_cuda.cc", target, *flags))
    script = PDL.format(library=gpu.library._name, plan=f"plan = {noop(1, True)!r}")
    environment = {**os.environ, "ONNXFUSE_LIBCUDA": str(libcuda)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{pdl}\n", "")


LONG_AGO = 2e-3  # seconds; ten times of kLately in native/stream_use.cc


def noop(cluster: int, pdl: bool) -> Plan:
    step = Launch(Kernel("none", "noop"), (cluster, 1, 1), (32, 1, 1), (), cluster=cluster, pdl=pdl)
    return Plan((TensorSpec((1,), "float32"),), (step,))


def test_a_cublaslt_that_is_missing_or_too_old_is_named(gpu: Stage) -> None:
    old = built("old_cublaslt", lambda target: compiled(HERE / "fake_cublaslt.cc", target, "-DVERSION=110500"))
    message = alone(Path(gpu.cuda._name), str(old), gpu.library._name, tensor_map=False)
    assert f"cuBLASLt 12 or 13 is required, found version 110500 ({old})" in message
    message = alone(Path(gpu.cuda._name), "/none/libcublasLt.so", gpu.library._name, tensor_map=False)
    assert "or name it in ONNXFUSE_LIBCUBLASLT: cannot open cuBLASLt:" in message


# --- malformed -------------------------------------------------------------------------------------------------------


def with_map(plan: Plan, **changes: Any) -> Plan:
    step = plan.steps[0]
    assert isinstance(step, Launch)
    arguments = (replaced(step.arguments[0], **changes), *step.arguments[1:])
    return replaced(plan, steps=(replaced(step, arguments=arguments),))


WALK = Im2col(lower=(-1, -2), upper=(0, -3), steps=(2, 1))
PIXELS = {"sizes": (64, 2, 4, 1), "strides": (256, 512, 2048), "box": (32, 16), "im2col": WALK}  # of 8 rows of 64
MALFORMED_MAPS = {
    "a tensor map's lower corner is -129, required -128 to 127": {**PIXELS, "im2col": replaced(WALK, lower=(-129, 0))},
    "a tensor map's upper corner is 128, required -128 to 127": {**PIXELS, "im2col": replaced(WALK, upper=(0, 128))},
    "a tensor map's step is 9, required 1 to 8": {**PIXELS, "im2col": replaced(WALK, steps=(9, 1))},
    "a tensor map over pixels has 2 dimensions, required 3": {"im2col": Im2col((), (), ())},
    "a tensor map of 4 dimensions walks over 2 spatial axes": {**PIXELS, "im2col": replaced(WALK, steps=(1,))},
    "a tensor map's rank is 6, required 1 to 5": {"sizes": (4,) * 6, "box": (4,) * 6, "strides": (16,) * 5},
    "a tensor map's size is 0, required 1 to": {"sizes": (0, 8)},
    "a tensor map's stride is 24 bytes, required a multiple of 16": {"strides": (24,)},
    "a tensor map's box is 257, required 1 to 256": {"box": (32, 257)},
    "a tensor map's box is 12 bytes wide, required a multiple of 16": {"box": (3, 8)},
    "a tensor map's box is 256 bytes wide, its swizzle covers 128": {"box": (64, 8)},
    "a tensor map's swizzle is 48, required 0, 32, 64 or 128": {"swizzle": 48},
    "a tensor map is of int64, required float32, float16, bfloat16, uint8 or tfloat32": {"dtype": "int64"},
    "a tensor map ends beyond its tensor's 2048 bytes": {"sizes": (64, 9)},
    "a tensor map's memory does not start at a multiple of 16 bytes": {"pointer": Pointer("input", 0, 8)},
    "a pointer's index is 1, required 0 to 0": {"pointer": Pointer("input", 1)},
    "a tensor map of 2 dimensions has 1 strides, found 2": {"strides": (256, 256)},
    "a tensor map of 2 dimensions has a box of 2, found 1": {"box": (32,)},
}


@pytest.mark.parametrize("message", MALFORMED_MAPS)
def test_a_malformed_tensor_map_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    unmap = gpu.kernels("unmap")
    good, changes = unmap.candidates, MALFORMED_MAPS[message]
    monkeypatch.setattr(unmap, "candidates", lambda *a: [with_map(plan, **changes) for plan in good(*a)])
    assert message in fails(session(model(UNMAP)), {"x": np.zeros((8, 64), np.float32)})


def test_an_unaligned_tensor_has_no_map(gpu: Stage) -> None:
    storage = np.zeros(8 * 64 + 8, np.float32)
    start = (-storage.ctypes.data % 16) // 4 + 1
    message = fails(session(model(UNMAP)), {"x": storage[start : start + 8 * 64].reshape(8, 64)})
    assert "a tensor map's memory does not start at a multiple of 16 bytes" in message


MALFORMED_PRODUCTS = {
    "the matrix w is 6x5, required 7x5": lambda p: {"w": replaced(p.w, rows=6)},
    "the matrix y is 6x4, required 6x5": lambda p: {"y": replaced(p.y, columns=4)},
    "the matrix x ends beyond its tensor's 168 bytes": lambda p: {"x": replaced(p.x, stride=8)},
    "a matrix's stride is 6, required 7 to": lambda p: {"x": replaced(p.x, stride=6)},
    "the matrix w starts at byte 2, required a multiple of 4": lambda p: {
        "w": replaced(p.w, pointer=Pointer("input", 1, 2))
    },
    "the matrices x and w are of different dtypes": lambda p: {"w": replaced(p.w, dtype="float16")},
    "a matrix is of int32, required float32, float16 or bfloat16": lambda p: {"x": replaced(p.x, dtype="int32")},
    "the matrix y is an input": lambda p: {"y": replaced(p.y, pointer=Pointer("input", 0))},
    "the products of a batch are written to one address": lambda p: {"batch": 2},
    "the bias ends beyond its tensor's 20 bytes": lambda p: {"bias": Pointer("input", 2, 4)},
    "a workspace must be scratch memory from a multiple of 256 bytes on": lambda p: {
        "workspace": Pointer("scratch", 0, 16)
    },
    "the workspace ends beyond its tensor's 4096 bytes": lambda p: {"workspace_bytes": 4097},
    "a workspace has a size, but no pointer": lambda p: {"workspace": None},
    "a matmul's algorithm has 8 words or none, found 3": lambda p: {"algorithm": (1, 2, 3)},
    "cublasLtMatmulAlgoCheck of a product of float32 6x7 and 7x5 failed: CUBLAS_STATUS_INVALID_VALUE (said the": (
        lambda p: {"algorithm": (1,) * 8}
    ),
    "needs 5000 bytes of workspace, the plan has 4096": lambda p: {"algorithm": (0xA160, 5000, *[0] * 6)},
}


@pytest.mark.parametrize("message", MALFORMED_PRODUCTS)
def test_a_malformed_product_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    product = gpu.kernels("product")
    good = product.candidates

    def candidates(*arguments: Any) -> list[Plan]:
        (made,) = good(*arguments)
        return [replaced(made, steps=(replaced(made.steps[0], **MALFORMED_PRODUCTS[message](made.steps[0])),))]

    monkeypatch.setattr(product, "candidates", candidates)
    before = gpu.products()
    assert message in fails(session(product_model()), product_feed(3, 5, 7))
    assert gpu.products() == before
