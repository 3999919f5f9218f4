"""Attention on Hopper against float64: head sizes, lengths, layouts, masks, biases, extremes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_runs import NUMPY, launch, normal, result, rounded, upload

from onnxfuse.kernels.attention import hopper
from onnxfuse.kernels.attention.problem import Attention, HeadNumbers, ScoreTensor
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Plan, Pointer, TensorSpec

cupy: Any = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

# Half an ulp: weights are rounded to the dtype before they multiply values, and so is the result.
# In TF32, the operands of the reference are rounded first.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-11}
SMALLEST_WEIGHT = 2.0**-25  # relative to the largest weight of a row: smaller ones round to 0 in fp16
SCORE = 4e-6  # relative to the largest score: the loss of fp32 sums of 256 products and of the exponent's argument
# Relative to the largest score of a row once the mask is added: a mask's -65504 in other units, the sum and its
# exponent are rounded to fp32, which shows in fully masked rows.
MASKED_SCORE = 3 * 2.0**-24
CAP = hopper.TANH_ERROR  # relative to the cap

LOWEST = float(np.finfo(np.float32).min)
LOWEST_HALF = float(np.finfo(np.float16).min)
MINUS_INFINITY = float("-inf")

# A single query or key; less than, exactly and more than a tile of queries or keys; tails of both; more keys than
# queries and the reverse; odd rows, in which the elements of a mask cannot be read in pairs.
LENGTHS = [(1, 1), (1, 300), (5, 64), (64, 48), (65, 63), (128, 129), (197, 197), (200, 334), (513, 1000), (1000, 257)]
HEADS = [(1, 1, 1), (2, 3, 3), (2, 4, 2), (1, 6, 1)]  # batch, heads, heads of keys and values
LAYOUTS = ["bshd", "bhsd", "sbhd", "packed"]
MASK_DIMENSIONS = ["bhqk", "b1qk", "11qk", "b11k", "1hqk", "111k", "bhq1"]
PATTERNS = ["random", "padding", "window", "causal", "packed", "dead rows", "all", "none"]


@dataclasses.dataclass(frozen=True)
class Case:
    """The choices that are compiled into a kernel; lengths, layouts, strides and patterns vary independently."""

    size: int
    value_size: int = 0
    dtype: str = "float16"
    causal: bool = False
    mask_kind: Any = "none"
    mask_dtype: str = "bool"
    masked_score: float = MINUS_INFINITY
    added: bool = False
    bias_dtype: str = ""
    sloped: bool = False  # the bias is the same for all heads, and each head has a multiple of it
    softcap: float = 0.0
    zero_rows: bool = False
    amplitude: float = 1.0
    scale: float = 0.0

    def __str__(self) -> str:
        default = {field.name: field.default for field in dataclasses.fields(self)}
        given = {name: value for name, value in dataclasses.asdict(self).items() if value != default[name]}
        return " ".join(f"{name}={value}" for name, value in given.items())


CASES = [
    *(Case(size) for size in (8, 32, 64, 80, 128, 256)),
    *(Case(size, dtype="bfloat16", causal=True) for size in (64, 96, 128, 160, 192, 256)),
    *(Case(*sizes, causal=True) for sizes in ((192, 128), (64, 128), (72, 40))),
    *(Case(*sizes) for sizes in ((96, 64), (128, 64), (192, 64), (192, 128), (256, 128))),
    Case(64, causal=True, zero_rows=True),
    *(Case(size, amplitude=12.0) for size in (64, 128)),
    *(Case(64, scale=scale) for scale in (-0.2, 2.0)),
    *(Case(size, mask_kind="boolean") for size in (64, 128)),
    Case(64, mask_kind="inverted", zero_rows=True, causal=True),
    *(Case(64, mask_kind="boolean", masked_score=score) for score in (-20.0, -1e4, -1e9, LOWEST)),
    Case(128, mask_kind="inverted", masked_score=LOWEST, dtype="bfloat16"),
    *(Case(64, mask_kind="additive", mask_dtype=dtype) for dtype in ("float32", "float16")),
    *(Case(size, mask_kind="additive", mask_dtype="float16", masked_score=LOWEST_HALF) for size in (64, 128)),
    Case(64, mask_kind="additive", mask_dtype="float16", masked_score=-1e4, scale=2.0),
    Case(64, mask_kind="additive", mask_dtype="float32", masked_score=-1e9, scale=-0.2),
    *(Case(size, mask_kind="additive", mask_dtype="bfloat16", dtype="bfloat16") for size in (64, 128, 256)),
    Case(64, mask_kind="additive", mask_dtype="float32", masked_score=LOWEST, causal=True),
    *(Case(64, bias_dtype=dtype) for dtype in ("float16", "float32")),
    *(Case(size, bias_dtype="bfloat16", dtype="bfloat16", causal=True) for size in (128, 256)),
    *(Case(size, bias_dtype="float32", sloped=True) for size in (64, 128)),
    *(
        Case(size, bias_dtype="float32", sloped=True, causal=True, added=True, masked_score=LOWEST_HALF)
        for size in (64, 128, 256)
    ),
    Case(128, bias_dtype="float32", sloped=True, mask_kind="boolean", dtype="bfloat16"),
    Case(64, bias_dtype="float16", sloped=True, softcap=5.0, mask_kind="additive", mask_dtype="float16"),
    Case(64, softcap=5.0, amplitude=3.0),
    Case(128, softcap=20.0, bias_dtype="float16", mask_kind="boolean", causal=True),
    Case(64, softcap=20.0, bias_dtype="float32", mask_kind="additive", mask_dtype="float32"),
    # Caps that are applied late: small scores, some beyond the polynomial's range, and most at the cap.
    *(Case(size, softcap=50.0, amplitude=amplitude) for size in (64, 128) for amplitude in (1.0, 4.0, 12.0)),
    *(Case(size, softcap=30.0, dtype="bfloat16", causal=True, amplitude=3.0) for size in (64, 128, 256)),
    *(Case(64, softcap=50.0, scale=scale, amplitude=3.0) for scale in (-0.2, 1e-3, 40.0)),
    *(
        Case(size, softcap=50.0, causal=True, added=True, masked_score=LOWEST_HALF, amplitude=amplitude)
        for size, amplitude in ((64, 1.0), (128, 4.0))
    ),
    *(Case(64, softcap=50.0, mask_kind="boolean", masked_score=score) for score in (MINUS_INFINITY, -1e4, LOWEST)),
    Case(64, softcap=50.0, mask_kind="additive", mask_dtype="float16", masked_score=LOWEST_HALF, amplitude=4.0),
    Case(128, softcap=50.0, mask_kind="additive", mask_dtype="float32"),
    *(Case(size, causal=True, added=True, masked_score=LOWEST_HALF, mask_kind="boolean") for size in (64, 128, 256)),
    *(Case(64, causal=True, added=True, masked_score=LOWEST_HALF, **more) for more in ({}, {"amplitude": 50.0})),
    Case(64, added=True, masked_score=LOWEST_HALF, mask_kind="boolean"),
    Case(64, causal=True, added=True, masked_score=-1e9, mask_kind="boolean", dtype="bfloat16"),
    Case(64, causal=True, added=True, masked_score=LOWEST, mask_kind="boolean", scale=2.0),
    Case(64, causal=True, added=True, masked_score=LOWEST_HALF, mask_kind="boolean", bias_dtype="float16"),
    *(Case(size, dtype="float32") for size in (8, 32, 64, 80, 128)),
    *(Case(*sizes, dtype="float32", causal=True) for sizes in ((64, 128), (72, 40), (128, 64), (128,))),
    *(Case(64, dtype="float32", mask_kind="boolean", masked_score=score) for score in (MINUS_INFINITY, -1e4, LOWEST)),
    *(
        Case(size, dtype="float32", mask_kind="additive", mask_dtype="float32", masked_score=LOWEST)
        for size in (64, 128)
    ),
    Case(64, dtype="float32", bias_dtype="float32", softcap=50.0, amplitude=4.0),
    Case(128, dtype="float32", bias_dtype="float32", sloped=True, causal=True, added=True, masked_score=LOWEST),
]


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int

    def dimensions(self, names: str) -> tuple[int, ...]:
        full = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self.keys}
        return tuple(full.get(name, 1) for name in names)


@pytest.fixture(scope="module")
def device() -> Device:
    found = cuda_driver.gpu(0)
    if found.arch != 90:
        pytest.skip(f"needs a GPU of compute capability 9.0, found {found.name}")
    return found


# ---- inputs ------------------------------------------------------------------------------------------------------


def laid_out(values: np.ndarray, layout: str) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the tensor (batch, heads, rows, size) in that layout, and the strides of batch, head and row."""
    b, h, s, d = values.shape
    if layout == "bhsd":
        return values, (h * s * d, s * d, d)
    if layout == "sbhd":
        return values.transpose(2, 0, 1, 3), (h * d, d, b * h * d)
    wide = 3 * h * d if layout == "packed" else h * d  # packed: the first third of each row
    rows = np.full((b, s, wide), np.nan, np.float32).astype(values.dtype)
    rows[:, :, : h * d] = values.transpose(0, 2, 1, 3).reshape(b, s, h * d)
    return rows, (s * wide, d, wide)


def not_halfway(values: np.ndarray) -> np.ndarray:
    """Return float32 numbers that are not halfway between two TF32 numbers, from where TMA does not round up."""
    return (values.view(np.uint32) | 1).view(np.float32) if values.dtype == np.float32 else values


def in_tf32(values: np.ndarray) -> np.ndarray:
    """Return float32 numbers rounded to TF32, and others unchanged."""
    if values.dtype != np.float32:
        return values
    return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def kept(pattern: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return which scores count."""
    b, _, q, k = shape
    rows, columns = np.arange(q).reshape(1, 1, q, 1), np.arange(k).reshape(1, 1, 1, k)
    random = np.random.default_rng(seed)
    found = {
        "random": random.random(shape) < 0.7,
        "padding": columns < random.integers(1, k + 1, (b, 1, 1, 1)),
        "window": (columns <= rows) & (columns > rows - 100),
        "causal": columns <= rows,
        "packed": columns // 150 == rows // 150,
        "dead rows": (columns <= rows) & (rows % 5 != 0) & (rows < max(1, q // 2)),
        "all": np.ones(shape, bool),
        "none": np.zeros(shape, bool),
    }[pattern]
    return np.ascontiguousarray(np.broadcast_to(found, shape))


def mask_values(case: Case, pattern: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    keep = kept(pattern, shape, seed)
    if case.mask_dtype == "bool":
        return keep if case.mask_kind == "boolean" else ~keep
    kept_scores = np.random.default_rng(seed).standard_normal(shape) if pattern == "random" else np.zeros(shape)
    return rounded(np.where(keep, kept_scores, case.masked_score).astype(np.float32), case.mask_dtype)


def scores(place: int, values: np.ndarray) -> ScoreTensor:
    strides = [0 if n == 1 else s // values.itemsize for n, s in zip(values.shape, values.strides, strict=True)]
    b, h, q, k = strides
    return ScoreTensor(Pointer("input", place), values.dtype.name, b, h, q, k, True)


def slopes_of(heads: int) -> Any:
    """Return the slopes of the heads."""
    return 2.0 ** -cupy.arange(heads)


# ---- reference ---------------------------------------------------------------------------------------------------


def attention(case: Case, problem: Attention, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> tuple[Any, Any]:
    """Return the result in float64, and how far from it a correct one may be."""
    repeats = problem.heads // problem.kv_heads
    k, v = (cupy.repeat(x, repeats, axis=1) for x in (k, v))
    s = problem.scale * (q @ k.transpose(0, 1, 3, 2))
    s = problem.softcap * cupy.tanh(s / problem.softcap) if problem.softcap else s
    if bias is not None:
        s = s + (bias * slopes_of(problem.heads)[:, None, None] if problem.slopes else bias)
    lost = SCORE * float(cupy.abs(s).max()) + CAP * problem.softcap
    sees = cupy.ones((), bool) if mask is None or mask.dtype != bool else mask != (problem.mask_kind == "inverted")
    if problem.causal is not None:
        sees = sees & (cupy.arange(problem.keys) <= cupy.arange(problem.queries)[:, None] + problem.causal)
    if problem.add_masked_score:
        s = cupy.where(sees, s, s + problem.masked_score)
    elif mask is not None:
        s = {
            "boolean": lambda: cupy.where(mask, s, problem.masked_score),
            "inverted": lambda: cupy.where(mask, problem.masked_score, s),
            "additive": lambda: (s.astype("f4") + mask.astype("f4")).astype("f8"),  # -3.4e38 absorbs a score
        }[problem.mask_kind]()
    if problem.causal is not None and not problem.add_masked_score:
        sees = cupy.arange(problem.keys) <= cupy.arange(problem.queries)[:, None] + problem.causal
        s = cupy.where(sees, s, MINUS_INFINITY)
    top = s.max(-1, keepdims=True)
    powers = cupy.exp(s - top)  # NaN if all are -inf
    powers = cupy.nan_to_num(powers) if problem.zero_masked_rows else powers
    total = powers.sum(-1, keepdims=True)
    p = powers / (cupy.where(total == 0, 1, total) if problem.zero_masked_rows else total)
    lost = lost + MASKED_SCORE * cupy.abs(cupy.where(cupy.isinf(top), 0.0, top))
    expected, spread = p @ v, p @ cupy.abs(v)
    rounding = ROUNDING[problem.dtype]
    return expected, rounding * (cupy.abs(expected) + spread) + lost * spread + SMALLEST_WEIGHT * cupy.abs(v).sum(2)[
        :, :, None
    ]


# ---- runs --------------------------------------------------------------------------------------------------------


def run(case: Case, sizes: Sizes, variant: int, device: Device, which: slice) -> int:
    """Check the implementations `which` and return how many; `variant` chooses layouts, patterns and broadcasts."""
    value_size = case.value_size or case.size
    shapes = {
        "q": (sizes.batch, sizes.heads, sizes.queries, case.size),
        "k": (sizes.batch, sizes.kv_heads, sizes.keys, case.size),
        "v": (sizes.batch, sizes.kv_heads, sizes.keys, value_size),
    }
    values = {n: normal(shape, case.dtype, variant + i, case.amplitude) for i, (n, shape) in enumerate(shapes.items())}
    values = {name: not_halfway(each) for name, each in values.items()}
    layout = LAYOUTS[variant % 4]
    inputs, heads = [], {}
    for place, (name, array) in enumerate(values.items()):
        memory, strides = laid_out(array, layout)
        inputs.append(memory)
        heads[name] = HeadTensor(Pointer("input", place), *strides)
    out = np.zeros((sizes.batch, sizes.heads, sizes.queries, value_size), NUMPY[case.dtype])
    out_layout = LAYOUTS[(variant + variant // 4) % 3]
    memory, strides = laid_out(out, out_layout)
    written = TensorSpec(memory.shape, case.dtype)
    mask = bias = None
    if case.mask_kind != "none":
        shape = sizes.dimensions(MASK_DIMENSIONS[variant % 7])
        mask = mask_values(case, PATTERNS[variant % 8], shape, variant)
        inputs.append(mask)
    if case.bias_dtype:
        dimensions = MASK_DIMENSIONS[(variant + 2) % 7]
        dimensions = dimensions.replace("h", "1") if case.sloped else dimensions
        bias = normal(sizes.dimensions(dimensions), case.bias_dtype, variant, 2.0)
        inputs.append(bias)
    if case.sloped:
        inputs.append(slopes_of(sizes.heads).get().astype(np.float32))
    problem = Attention(
        *(sizes.batch, sizes.heads, sizes.kv_heads, sizes.queries, sizes.keys, case.size, value_size, case.dtype),
        aligned=True,
        **heads,
        out=HeadTensor(Pointer("output", 0), *strides),
        scale=case.scale or case.size**-0.5,
        mask_kind=case.mask_kind,
        mask=None if mask is None else scores(3, mask),
        masked_score=case.masked_score,
        bias=None if bias is None else scores(len(inputs) - 1 - case.sloped, bias),
        slopes=HeadNumbers(Pointer("input", len(inputs) - 1), "float32") if case.sloped else None,
        causal=(sizes.keys - sizes.queries, 0)[variant % 2] if case.causal else None,
        add_masked_score=case.added,
        softcap=case.softcap,
        zero_masked_rows=case.zero_rows,
        tf32=True,
    )
    arrays = [cupy.asarray(in_tf32(x).astype(np.float64)) for x in values.values()]
    added = [None if x is None else cupy.asarray(x if x.dtype == bool else x.astype(np.float64)) for x in (mask, bias)]
    expected, allowed = attention(case, problem, *arrays, *added)
    candidates = hopper.implementations(problem, device)[which]
    read = [upload(x) for x in inputs]
    for candidate in candidates:
        buffer = upload(np.full(written.shape, np.nan, NUMPY[case.dtype]))
        launch(Plan((written,), candidate.steps, candidate.scratch), read, [buffer])
        axes = {"bhsd": (0, 1, 2, 3), "sbhd": (1, 2, 0, 3)}.get(out_layout)
        found = result(buffer, written, True)
        found = found.transpose(axes) if axes else found.reshape(out.transpose(0, 2, 1, 3).shape).transpose(0, 2, 1, 3)
        compare(found, expected.get(), allowed.get(), f"{candidate.name} at {problem}")
    return len(candidates)


def compare(found: np.ndarray, expected: np.ndarray, allowed: np.ndarray, what: str) -> None:
    values = found.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected), what)
    excess = np.nan_to_num(np.abs(values - expected) - allowed, nan=-1.0)
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess[worst] <= 0, f"{values[worst]} at {worst}, expected {expected[worst]} +- {allowed[worst]}: {what}"


def variants() -> Iterator[tuple[int, Sizes]]:
    """Yield every length with some heads, layouts and masks."""
    for variant, (queries, keys) in enumerate(LENGTHS):
        batch, heads, kv_heads = HEADS[(variant + variant // 4) % 4]
        yield variant, Sizes(batch, heads, kv_heads, queries, keys)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case, device: Device) -> None:
    for variant, sizes in variants():
        assert run(case, sizes, variant, device, slice(0, 1)), "no plan"


@pytest.mark.parametrize(
    "case",
    [
        *(Case(64), Case(128, causal=True), Case(64, mask_kind="boolean"), Case(64, bias_dtype="float16")),
        *(Case(64, dtype="float32"), Case(128, dtype="float32", causal=True)),
        *(Case(size, mask_kind="additive", mask_dtype="float16", masked_score=LOWEST_HALF) for size in (64, 128)),
        Case(64, mask_kind="additive", mask_dtype="float32", masked_score=LOWEST),
        *(Case(size, softcap=50.0, amplitude=3.0) for size in (64, 128)),
        Case(64, bias_dtype="float16", sloped=True),
        *(Case(size, mask_kind="boolean", masked_score=LOWEST_HALF, causal=True, added=True) for size in (64, 128)),
    ],
    ids=str,
)
def test_every_tiling(case: Case, device: Device) -> None:
    for variant in (0, 2, 37) if case.mask_kind != "none" else (5,):
        assert run(case, Sizes(2, 4, 2, 333, 410), variant, device, slice(None)) > 1


@pytest.mark.parametrize("pattern", range(8), ids=PATTERNS.__getitem__)
@pytest.mark.parametrize(
    "case",
    [
        Case(64, mask_kind="boolean"),
        Case(64, mask_kind="inverted", masked_score=-1e9),
        Case(64, mask_kind="additive", mask_dtype="float32"),
        Case(64, mask_kind="additive", mask_dtype="float16", masked_score=LOWEST_HALF),
        Case(64, mask_kind="boolean", masked_score=LOWEST_HALF, causal=True, added=True),
    ],
    ids=str,
)
def test_skipped_tiles(case: Case, pattern: int, device: Device) -> None:
    """The sequences are long enough for tiles of which the mask leaves nothing, some scores, and all."""
    for broadcast in range(7):
        variant = next(n for n in itertools.count() if n % 8 == pattern and n % 7 == broadcast)
        run(case, Sizes(2, 2, 2, 700, 700), variant, device, slice(0, 1))


def test_long(device: Device) -> None:
    run(Case(128, causal=True), Sizes(1, 2, 1, 4097, 4097), 0, device, slice(0, 1))
    run(Case(64, mask_kind="boolean"), Sizes(1, 1, 1, 2049, 4097), 2, device, slice(0, 1))
