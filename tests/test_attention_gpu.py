"""Attention on a GPU: every candidate against the formula in float64, for every layout, mask, length and dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_runs import DTYPES, NUMPY, cupy, launch, result, rounded, upload

from onnxfuse.kernels import _attention_decode, _attention_hopper, _attention_mma, attention
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.provider.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec
from onnxfuse.provider.source import architecture, options, source_text

pytestmark = pytest.mark.gpu
LOWEST = -3.4028234663852886e38
INFINITE = -math.inf
LAYOUTS = ("packed", "seq_first", "bshd", "bhsd")
OUT_LAYOUTS = ("packed", "rows", "bshd", "seq_first", "seq_first_rows", "bhsd")
FLOATS = np.float64

# Half an ulp of the storage type, which probabilities and results are rounded to; fp32 adds what reductions lose.
HALF_ULP = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}
TF32 = 2**-10  # of the operands of a product, each rounded to half of that
SMALLEST = 3e-8  # half of the smallest fp16: what a probability loses at least
EXPONENT = 4e-7  # of a score: three fp32 roundings before the exponential


@dataclass(frozen=True)
class Case:
    """A node and the sizes of its inputs; `mask_axes` and `bias_axes` say which of (b, h, q, k) they have."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 64
    keys: int = 64
    size: int = 64
    value_size: int = 64
    dtype: str = "float16"
    layouts: tuple[str, str, str] = ("packed", "packed", "packed")
    out_layout: str = "packed"
    mask: str = "none"
    mask_axes: tuple[int, ...] = (0, 0, 1, 1)
    mask_dtype: str = "float16"
    masked: float = INFINITE
    bias_axes: tuple[int, ...] | None = None
    zero: bool = True
    operator: bool = False
    causal: bool = False
    softcap: float = 0.0
    scale: float | None = None
    amplitude: float = 1.0
    tf32: bool = False
    aligned: bool = True
    out_dtype: str = ""

    @property
    def full(self) -> tuple[int, int, int, int]:
        """The shape of the scores."""
        return self.batch, self.heads, self.queries, self.keys

    def node(self) -> FusedNode:
        layouts = {f"{name}_layout": layout for name, layout in zip("qkv", self.layouts, strict=True)}
        given: dict[str, Any] = {**layouts, "out_layout": self.out_layout, "heads": self.heads}
        given |= {"kv_heads": self.kv_heads, "repeats": self.heads // self.kv_heads}
        if self.operator:
            given |= {"form": "operator", "is_causal": int(self.causal), "softcap": self.softcap}
        else:
            given |= {"mask_kind": self.mask, "bias_kind": "position" if self.bias_axes else "none"}
            given |= {"form": "softmax", "fully_masked": "zero" if self.zero else "softmax"}
        if self.mask in ("boolean", "inverted"):
            given["masked_score"] = self.masked
        if self.scale is not None:
            given["scale"] = self.scale
        return FusedNode("attention", "n", tuple(self.inputs()), given, (self.out_dtype or self.dtype,))

    def inputs(self) -> dict[str, np.ndarray]:
        """Random operands; of a mask, row 1 leaves nothing."""
        random = np.random.default_rng(self.queries * 4099 + self.keys)

        def normal(shape: Sequence[int], dtype: str, scale: float = 1.0) -> np.ndarray:
            return rounded(random.standard_normal(shape, dtype=np.float32) * scale, dtype)

        def shape(axes: Sequence[int]) -> tuple[int, ...]:
            return tuple(size if axis else 1 for size, axis in zip(self.full, axes, strict=True))

        made = {
            "q": normal(self._shape(0, self.heads, self.queries, self.size), self.dtype, self.amplitude),
            "k": normal(self._shape(1, self.kv_heads, self.keys, self.size), self.dtype),
            "v": normal(self._shape(2, self.kv_heads, self.keys, self.value_size), self.dtype),
        }
        if self.mask != "none":
            kept = random.random(shape(self.mask_axes)) < 0.7
            if kept.shape[2] > 1:
                kept[:, :, 1] = False
            if self.mask == "additive":
                added = np.where(kept, random.standard_normal(kept.shape), self.masked)
                made["mask"] = rounded(added.astype(np.float32), self.mask_dtype)
            else:
                made["mask"] = kept if self.mask == "boolean" else ~kept
        if self.bias_axes:
            made["bias"] = normal(shape(self.bias_axes), self.mask_dtype)
        return made

    def _shape(self, operand: int, heads: int, length: int, size: int) -> tuple[int, ...]:
        layout = self.layouts[operand]
        shapes = {"seq_first": (length, self.batch, heads * size), "bshd": (self.batch, length, heads, size)}
        shapes |= {"packed": (self.batch, length, heads * size), "bhsd": (self.batch, heads, length, size)}
        return shapes[layout]

    def specs(self, inputs: dict[str, np.ndarray]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(value.shape, value.dtype.name, self.aligned) for value in inputs.values())


# ---- the formula ---------------------------------------------------------------------------------------------------


def split(x: np.ndarray, layout: str, heads: int) -> np.ndarray:
    """(batch, heads, length, size) in float64."""
    wide = x.astype(FLOATS)
    if layout in ("packed", "seq_first"):
        wide = wide.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    order = {"packed": (0, 2, 1, 3), "bshd": (0, 2, 1, 3), "seq_first": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
    return wide.transpose(order[layout])


def joined(y: np.ndarray, layout: str) -> np.ndarray:
    """From (batch, heads, length, size) to the layout of an output."""
    batch, heads, length, size = y.shape
    if layout == "bhsd":
        return y
    if layout == "bshd":
        return y.transpose(0, 2, 1, 3)
    if layout.startswith("seq_first"):
        rows = y.transpose(2, 0, 1, 3).reshape(length, batch, heads * size)
    else:
        rows = y.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)
    return rows.reshape(batch * length, heads * size) if layout.endswith("rows") else rows


def formula(case: Case, inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The result, and what each of its elements may be off by."""
    q = split(inputs["q"], case.layouts[0], case.heads)
    k, v = (
        split(inputs[name], layout, case.kv_heads).repeat(case.heads // case.kv_heads, axis=1)
        for name, layout in zip("kv", case.layouts[1:], strict=True)
    )
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.size) if case.operator else 1.0
    scores = q @ k.swapaxes(-1, -2) * scale
    sizes = np.abs(q) @ np.abs(k).swapaxes(-1, -2) * abs(scale)  # what roundings of a score are relative to
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.bias_axes:
        scores = scores + inputs["bias"].astype(FLOATS)
    if case.mask == "additive":
        scores = scores + inputs["mask"].astype(FLOATS)
    elif case.mask != "none":
        scores = np.where(inputs["mask"] == (case.mask == "boolean"), scores, case.masked)
    if case.causal:
        scores = np.where(np.tri(case.queries, case.keys, dtype=bool), scores, INFINITE)
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(-1, keepdims=True, initial=INFINITE))
        probabilities = powers / powers.sum(-1, keepdims=True)
    if case.zero or case.operator:
        probabilities = np.nan_to_num(probabilities, nan=0.0)
    tolerance = allowed(case, scores, sizes, probabilities, v)
    return joined(probabilities @ v, case.out_layout), joined(tolerance, case.out_layout)


def allowed(case: Case, scores: np.ndarray, sizes: np.ndarray, probabilities: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Roundings of probabilities and result to their dtype, and of scores before the exponential."""
    top = np.abs(scores.max(-1, keepdims=True, initial=INFINITE))  # scores far below it have no weight
    largest = np.maximum(np.where(top < 1e30, top, 0.0), sizes.max(-1, keepdims=True, initial=1.0))
    ulps = HALF_ULP[case.dtype] + HALF_ULP[case.out_dtype or case.dtype]
    relative = 1.1 * ulps + 2 * EXPONENT * largest
    if case.tf32 and case.dtype == "float32":
        relative = relative + TF32 * (1 + largest)
    lost = case.keys * SMALLEST * np.abs(v).max(initial=0.0) if case.dtype == "float16" else 0.0
    weights = np.nan_to_num(probabilities, nan=0.0) @ np.abs(v)
    return np.asarray(relative * weights + lost + 1e-7)


# ---- running -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device() -> Device:
    return importlib.import_module("onnxfuse.provider.compile").gpu(0)


def plans(case: Case, device: Device) -> list[tuple[str, Plan]]:
    """Every candidate of every kernel, named."""
    node, inputs, here = case.node(), case.inputs(), dataclasses.replace(device, tf32=case.tf32)
    assert attention.supports(node, [value.dtype.name for value in inputs.values()], here) is None
    problem, y = attention.attention_of(node, case.specs(inputs), here)
    if 0 in y.shape:
        return [("nothing", attention.plan(node, case.specs(inputs), here))]
    found: list[Candidate] = []
    for kernels in _attention_mma, _attention_decode, _attention_hopper:
        found += kernels.plans(problem, here) if not case.out_dtype or kernels is not _attention_hopper else []
    return [(way.name, Plan((y,), way.steps, way.scratch)) for way in found]


def compiled(cases: Sequence[Case], device: Device) -> None:
    """Fill CuPy's disk cache with many compilers at once; what does not compile says so when it is launched."""
    launches = [s for case in cases for _, plan in plans(case, device) for s in plan.steps if isinstance(s, Launch)]
    kernels = {(k.source, k.entry, tuple(sorted(k.defines.items()))): k for k in (step.kernel for step in launches)}

    def compile_one(kernel: Kernel) -> None:
        flags = options(kernel)
        if kernel.arch_specific:
            flags += (f"-arch={architecture(kernel, device.arch)}",)
        with contextlib.suppress(Exception):
            cupy.RawKernel(source_text(kernel.source), kernel.entry, options=flags).compile()

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, kernels.values()))


def check(case: Case, device: Device) -> None:
    inputs = case.inputs()
    expected, tolerance = formula(case, inputs)
    read = [upload(value, case.aligned) for value in inputs.values()]
    for name, plan in plans(case, device):
        (spec,) = plan.outputs
        assert spec.shape == expected.shape, name
        written = upload(np.full(spec.shape, 123.0, NUMPY[spec.dtype]), case.aligned)
        if plan.steps:
            launch(plan, read, [written])
        found = result(written, spec, case.aligned).astype(FLOATS)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
        excess = np.nan_to_num(np.abs(found - expected) - tolerance, nan=-1.0)
        if excess.size and excess.max() > 0:
            at = np.unravel_index(excess.argmax(), excess.shape)
            wrong = f"{int((excess > 0).sum())} of {excess.size} are wrong"
            raise AssertionError(f"{name}: at {at}: {found[at]}, expected {expected[at]}; {wrong}")


# ---- a generated grid ----------------------------------------------------------------------------------------------


def generated(seed: int) -> Case:
    """Any combination of what a node may have; lengths and head sizes on and off the edges of tiles."""
    choose = random.Random(seed)
    kv_heads, dtype, operator = choose.choice((1, 2, 3)), choose.choice(DTYPES), choose.random() < 0.25
    size = choose.choice((8, 32, 64, 64, 80, 96, 128, 128, 256, choose.randint(1, 256)))
    mask = choose.choice(("none", "boolean", "additive") if operator else ("none", "boolean", "inverted", "additive"))
    masked = (INFINITE, -1e4) if mask == "additive" else (INFINITE, -1e4, -65504.0, LOWEST)

    def axes() -> tuple[int, ...]:
        return tuple(choose.randint(0, 1) for _ in range(4))

    return Case(
        batch=choose.choice((1, 2)), kv_heads=kv_heads, heads=kv_heads * choose.choice((1, 1, 2, 4)),
        queries=choose.choice((1, 2, 5, 16, 33, 64, 100, 197, 300)),
        keys=choose.choice((1, 3, 17, 49, 64, 100, 197, 513, 1030, 4097)),
        size=size, value_size=choose.choice((size, size, size, choose.randint(1, 256))), dtype=dtype,
        layouts=(choose.choice(LAYOUTS), choose.choice(LAYOUTS), choose.choice(LAYOUTS)),
        out_layout=choose.choice(OUT_LAYOUTS), mask=mask, mask_axes=axes(),
        mask_dtype=choose.choice(("float32", dtype)), masked=INFINITE if operator else choose.choice(masked),
        bias_axes=None if operator or choose.random() < 0.6 else axes(), zero=choose.random() < 0.5,
        operator=operator, causal=operator and choose.random() < 0.6,
        softcap=choose.choice((0.0, 5.0)) if operator else 0.0,
        scale=None if operator else choose.choice((1.0, 0.125, -0.2)), tf32=choose.random() < 0.5,
        aligned=choose.random() < 0.8,
    )  # fmt: skip


SEEDS = range(80)


@pytest.mark.parametrize("seed", SEEDS)
def test_generated(device: Device, grid: None, seed: int) -> None:
    check(generated(seed), device)


# ---- lengths, sizes and extremes ----------------------------------------------------------------------------------

# Around the tiles of every kernel: 16 rows of a warp, 64, 112 and 128 of a block, tiles of 64 to 176 keys.
LENGTHS = [(1, 1), (15, 17), (16, 16), (63, 65), (64, 64), (65, 63), (128, 128), (129, 257), (197, 197), (300, 176),
           (1, 4097), (7, 4096), (513, 40)]  # fmt: skip
SIZES = [(1, 1), (7, 9), (8, 8), (16, 16), (40, 40), (64, 64), (72, 80), (96, 96), (128, 128), (160, 160), (192, 128),
         (256, 256), (255, 33)]  # fmt: skip


def sized(dtype: str, size: int, value_size: int) -> Case:
    return Case(queries=70, keys=90, size=size, value_size=value_size, dtype=dtype, scale=size**-0.5)


@pytest.fixture(scope="module")
def grid(device: Device) -> None:
    sizes = [sized(dtype, *pair) for dtype in DTYPES for pair in SIZES]
    compiled([*map(generated, SEEDS), *sizes], device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(device: Device, dtype: str, queries: int, keys: int, causal: bool) -> None:
    check(Case(queries=queries, keys=keys, dtype=dtype, operator=True, causal=causal, heads=4), device)


@pytest.mark.parametrize(("size", "value_size"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(device: Device, grid: None, dtype: str, size: int, value_size: int) -> None:
    check(sized(dtype, size, value_size), device)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_results_of_another_dtype(device: Device, dtype: str, out_dtype: str) -> None:
    for queries, keys in (50, 70), (1, 3000):
        check(Case(queries=queries, keys=keys, dtype=dtype, out_dtype=out_dtype, scale=0.125), device)


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16, 64])
def test_groups_of_query_heads(device: Device, group: int) -> None:
    layouts = ("bhsd", "bhsd", "bhsd")
    for queries in 1, 3:
        case = Case(2, 2 * group, 2, queries, 1500, 128, 128, layouts=layouts, scale=0.1, mask="boolean")
        check(dataclasses.replace(case, mask_axes=(1, 0, 0, 1)), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(device: Device, dtype: str) -> None:
    """Exponentials of ten thousands: one key has all the weight, and nothing overflows."""
    for queries, keys in (100, 100), (1, 3000):
        check(Case(queries=queries, keys=keys, dtype=dtype, amplitude=300.0), device)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("masked", [INFINITE, LOWEST, -65504.0])
@pytest.mark.parametrize("kind", ["boolean", "inverted", "additive"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_key(device: Device, dtype: str, kind: str, masked: float, zero: bool) -> None:
    """-inf leaves nothing: 0 or NaN; a finite score leaves all keys, equally or, where it is added, by their scores."""
    if kind == "additive" and masked == LOWEST:
        masked = -30000.0  # in float64 scores survive an addition that they do not in float32
    scores = "float32" if dtype == "float32" else dtype
    for queries, keys in (65, 130), (4, 2000):
        case = Case(1, 2, 2, queries, keys, dtype=dtype, mask=kind, masked=masked, mask_dtype=scores, zero=zero)
        check(dataclasses.replace(case, scale=0.125, amplitude=0.1), device)


def test_adding_the_lowest_float_to_a_row_averages_it(device: Device) -> None:
    """Sums with it are all that float: the row is the mean of the values, not 0 and not NaN."""
    case = Case(queries=20, keys=50, mask="additive", mask_dtype="float32", dtype="float32", masked=LOWEST)
    inputs = case.inputs()
    inputs["mask"][:] = LOWEST
    expected = joined(split(inputs["v"], "packed", 2).mean(2, keepdims=True).repeat(20, axis=2), "packed")
    for name, plan in plans(case, device):
        written = upload(np.zeros(plan.outputs[0].shape, np.float32))
        launch(plan, [upload(value) for value in inputs.values()], [written])
        np.testing.assert_allclose(result(written, plan.outputs[0], True), expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty(device: Device, batch: int, queries: int, keys: int) -> None:
    for zero in True, False:
        check(Case(batch, queries=queries, keys=keys, zero=zero), device)


def test_nan_and_infinity_stay_in_their_row(device: Device) -> None:
    case = Case(queries=70, keys=70, zero=False)
    inputs = case.inputs()
    inputs["q"][0, 3, :64] = np.nan
    inputs["q"][0, 40, 64:] = np.inf
    for name, plan in plans(case, device):
        written = upload(np.zeros(plan.outputs[0].shape, np.float16))
        launch(plan, [upload(value) for value in inputs.values()], [written])
        lost = np.isnan(result(written, plan.outputs[0], True)[0].reshape(70, 2, 64)).all(-1)
        np.testing.assert_array_equal(np.argwhere(lost), [[3, 0], [40, 1]], err_msg=name)


# ---- in a session --------------------------------------------------------------------------------------------------

MODELS = [
    "bert_sdpa_dynamo_fp16", "bert_eager_ts_fp32", "gpt2_eager_dynamo_fp16", "llama_sdpa_dynamo_fp16",
    "llama_kvcache_sdpa_dynamo_fp16", "llama_kvcache_sdpa_dynamo23_fp32", "t5_encoder_eager_dynamo_fp32",
    "swin_eager_dynamo_fp32", "vit_sdpa_dynamo_fp16", "whisper_encoder_sdpa_dynamo_fp32",
    "transformer_encoder_dynamo_fp32",
]  # fmt: skip


GRAPHS = ["bert_sdpa_dynamo_fp16", "llama_sdpa_dynamo_fp16", "vit_sdpa_dynamo_fp16"]  # nothing in them runs on the CPU
OUTPUTS = {"tensor(float16)": np.float16, "tensor(float)": np.float32}


@pytest.mark.parametrize(("name", "graph"), [*((name, False) for name in MODELS), *((name, True) for name in GRAPHS)])
def test_fused_models(name: str, graph: bool) -> None:
    """A fused model with attention as a kernel against the model as exported, in float32 on the CPU."""
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    models = importlib.import_module("test_models_gpu")
    ort.preload_dlls()
    entry, original = models.INDEX[f"{name}.onnx"], models.onnx.load(models.FOLDER / f"{name}.onnx")
    fused, _ = models.onnxfuse.optimize(original, verify=False)
    chosen = [(models.CUDA, {"use_tf32": "0", "enable_cuda_graph": str(int(graph))})]
    session = models.InferenceSession(fused.SerializeToString(), providers=chosen, tune="never")
    found = [run for run in models.explain_session(session) if run.fusion == "attention"]
    assert found and all(run.how == "kernel" for run in found), found
    exactly = models.session(models.widened(original).SerializeToString(), ["CPUExecutionProvider"])
    # A graph is captured in the third run and replayed from the fourth on.
    sizes = entry["verified_sizes"][:1] * 5 if graph else [*entry["verified_sizes"], entry["verified_sizes"][0]]
    values = [models.feeds(entry, each, seed) for seed, each in enumerate(sizes)]
    exact = [exactly.run(None, widened(models, each)) for each in values]
    results = in_place(ort, session, values, exact) if graph else (session.run(None, each) for each in values)
    for got, wanted in ((g, w) for pair in zip(results, exact, strict=True) for g, w in zip(*pair, strict=True)):
        assert np.isfinite(got.astype(FLOATS)).all()
        assert models.error(got, wanted) <= 4 * models.TOLERANCES[str(got.dtype)]


def widened(models: Any, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(models.WIDE.get(str(value.dtype), value.dtype)) for name, value in values.items()}


def in_place(
    ort: Any, session: Any, values: Sequence[dict[str, np.ndarray]], exact: Sequence[Sequence[np.ndarray]]
) -> Iterator[list[np.ndarray]]:
    """Runs with inputs and outputs that stay where they are on the GPU, as a CUDA graph needs."""
    binding = session.io_binding()
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0) for name, value in values[0].items()}
    for name, place in inputs.items():
        binding.bind_ortvalue_input(name, place)
    placed = []
    for output, sample in zip(session.get_outputs(), exact[0], strict=True):
        placed.append(ort.OrtValue.ortvalue_from_shape_and_type(sample.shape, OUTPUTS[output.type], "cuda", 0))
        binding.bind_ortvalue_output(output.name, placed[-1])
    for each in values:
        for name, value in each.items():
            inputs[name].update_inplace(value)
        session.run_with_iobinding(binding)
        yield [place.numpy() for place in placed]
