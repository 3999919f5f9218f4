"""Attention with rotary embedding on a GPU: every plan against the formula in float64."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from attention_cases import DTYPES, FLOATS, HALF_ULP, NUMPY, Case, formula, joined, split
from kernel_hosts import require_support
from kernel_references import rotate_complex
from kernel_runs import launch, result, upload

from onnxfuse.kernels.attention import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec

pytestmark = pytest.mark.gpu
EPSILON = 1e-6


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


@dataclass(frozen=True)
class Rotation:
    """The norm and the rotation of the queries and keys of a case."""

    form: str = "rotate_half"
    rotated: int = 0  # elements of a head; 0: all of them
    interleaved: int = 0
    norm: bool = False
    tables: int = 1  # 1, or one for each element of the batch
    kept: int = 0  # first rows that stay as they are
    one_row: bool = False  # of the tables, for all rows


def check(case: Case, rotation: Rotation, device: Device) -> None:
    inputs, device = case.inputs(), dataclasses.replace(device, tf32=case.tf32)
    rotated = rotation.rotated or case.size
    more = preparation(case, rotation, rotated)
    turned = {name: prepared(case, rotation, rotated, inputs, more, name) for name in "qk"}
    expected, tolerance = formula(case, {**inputs, **turned})
    node, given = node_of(case, rotation, inputs, more)
    specs = [TensorSpec(value.shape, value.dtype.name, case.aligned) for value in given.values()]
    require_support(host, node, [spec.dtype for spec in specs], device)
    read = [upload(value, case.aligned) for value in given.values()]
    largest = np.abs(inputs["v"].astype(FLOATS)).max(initial=0)
    slack = 4 * HALF_ULP[case.dtype] * largest  # a rotated value may be rounded to either side
    for plan in host.candidates(node, specs, device):
        (spec,) = plan.outputs
        assert spec.shape == expected.shape
        written = upload(np.full(spec.shape, 123.0, NUMPY[spec.dtype]), case.aligned)
        if plan.steps:
            launch(plan, read, [written])
        found = result(written, spec, case.aligned).astype(FLOATS)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert (np.abs(found - expected) - tolerance - slack).max(initial=-1) <= 0


def preparation(case: Case, rotation: Rotation, rotated: int) -> dict[str, np.ndarray]:
    """Return cos and sin, and the scales of the norms if there are any."""
    random = np.random.default_rng(7)
    row = rotated // 2 if rotation.form == "operator" or rotation.form.startswith("complex") else rotated
    angles = random.uniform(-3, 3, (rotation.tables, 1 if rotation.one_row else case.queries - rotation.kept, row))
    made = {"cos": np.cos(angles), "sin": np.sin(angles)}
    if rotation.norm:
        made |= {f"{name}_scale": random.uniform(0.5, 1.5, case.size) for name in "qk"}
    return {name: value.astype(NUMPY[case.dtype]) for name, value in made.items()}


def prepared(
    case: Case, rotation: Rotation, rotated: int, inputs: dict[str, np.ndarray], more: dict[str, np.ndarray], name: str
) -> np.ndarray:
    """Return queries or keys after norm and rotation, rounded, in their own layout."""
    layout, heads = case.layouts["qk".index(name)], case.heads if name == "q" else case.kv_heads
    x = split(inputs[name], layout, heads)
    if rotation.norm:
        mean = (x**2).mean(-1, keepdims=True)
        x = x / np.sqrt(mean + EPSILON) * more[f"{name}_scale"].astype(FLOATS)
    cos, sin = (more[table].astype(FLOATS)[:, None] for table in ("cos", "sin"))
    turned = x.copy()
    turned[..., rotation.kept :, :] = turned_rows(x[..., rotation.kept :, :], cos, sin, rotation, rotated)
    return joined(turned.astype(NUMPY[case.dtype]), layout)


def turned_rows(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rotation: Rotation, rotated: int) -> np.ndarray:
    """Return (batch, heads, rows, size) rotated by tables that broadcast to it."""
    if rotation.form.startswith("complex"):
        return rotate_complex(x, cos, sin, rotation.form)
    half = rotated // 2
    neighbours = rotation.interleaved or rotation.form.endswith("pairs")
    first = np.s_[..., 0:rotated:2] if neighbours else np.s_[..., :half]
    second = np.s_[..., 1:rotated:2] if neighbours else np.s_[..., half:rotated]
    ends = (slice(0, half), slice(half, rotated)) if rotation.form != "operator" else (slice(None), slice(None))
    ends = (slice(0, None, 2), slice(1, None, 2)) if rotation.form.endswith("pairs") else ends
    one, other, turned = x[first], x[second], x.copy()
    turned[first] = one * cos[..., ends[0]] - other * sin[..., ends[0]]
    turned[second] = other * cos[..., ends[1]] + one * sin[..., ends[1]]
    return turned


def node_of(
    case: Case, rotation: Rotation, inputs: dict[str, np.ndarray], more: dict[str, np.ndarray]
) -> tuple[FusedNode, dict[str, np.ndarray]]:
    stored = case.stored(inputs)
    given = {name: stored[name] for name in "qkv"} | more | {n: x for n, x in stored.items() if n not in "qkv"}
    plain = case.node()
    attributes: dict[str, Any] = {
        **plain.attributes, "rotary": rotation.form, "norm": "rms" if rotation.norm else "none", "epsilon": EPSILON,
        "interleaved": rotation.interleaved, "size": case.size, "kept": rotation.kept,
        "first_rows": "kept" if rotation.kept else "rotated",
    }  # fmt: skip
    node = dataclasses.replace(
        plain, fusion="attention_with_rotary_embedding", operands=tuple(given), attributes=attributes
    )
    return node, given


FORMS = {
    "half": Rotation(),
    "half, tables of a batch": Rotation(tables=2),
    "part": Rotation("rotate_part", rotated=16),
    "pairs": Rotation("rotate_pairs"),
    "part of pairs, norm": Rotation("rotate_part_of_pairs", rotated=16, norm=True),
    "complex halves": Rotation("complex_halves", tables=2),
    "complex pairs, norm": Rotation("complex_pairs", norm=True),
    "complex pairs to halves": Rotation("complex_pairs_to_halves"),
    "norm": Rotation(norm=True),
    "half, first row kept": Rotation(kept=1),
    "part of pairs, first rows kept, norm": Rotation("rotate_part_of_pairs", rotated=16, norm=True, kept=5),
    "pairs, first row kept": Rotation("rotate_pairs", kept=1),
    "complex pairs, first row kept, norm": Rotation("complex_pairs", norm=True, tables=2, kept=1),
    "half, first row kept, one row of the tables of a batch": Rotation(kept=1, tables=2, one_row=True),
    "operator": Rotation("operator", tables=2),
    "operator, interleaved": Rotation("operator", interleaved=1, tables=2),
    "operator, part, norm": Rotation("operator", rotated=8, norm=True, tables=2),
}


@pytest.mark.parametrize("layout", ["packed", "seq_first", "bshd", "bhsd"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forms(device: Device, dtype: str, form: str, layout: str) -> None:
    layouts = (layout, layout, "packed")
    for length in 70, 300:
        case = Case(2, 4, 2, length, length, 64, 64, dtype, layouts, scale=0.125, mask="boolean", zero=True)
        check(case, FORMS[form], device)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_forms_of_large_heads(device: Device, dtype: str, form: str) -> None:
    """Hopper's kernel rotates the queries of these itself."""
    for length in 70, 300:
        check(Case(2, 4, 2, length, length, 128, 64, dtype, scale=0.09, mask="boolean", zero=True), FORMS[form], device)
        check(Case(2, 4, 2, length, length, 256, 256, dtype, scale=0.06), FORMS[form], device)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [2, 10, 24, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(device: Device, dtype: str, size: int, norm: bool) -> None:
    for aligned in True, False:
        case = Case(1, 3, 3, 37, 37, size, 40, dtype, scale=size**-0.5, aligned=aligned)
        check(case, Rotation(norm=norm), device)


@pytest.mark.parametrize("product", ["runs", "heads", "odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_one_product(device: Device, dtype: str, product: str) -> None:
    kv_heads = 4 if product == "heads" else 2
    for size, rotation in (64, Rotation("rotate_part", rotated=16)), (64, Rotation(norm=True)), (20, Rotation()):
        check(Case(2, 4, kv_heads, 130, 130, size, size, dtype, scale=0.2, product=product), rotation, device)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (3, 1), (1, 2100)])
def test_lengths(device: Device, batch: int, length: int) -> None:
    for size in 64, 128:
        check(Case(batch, 8, 2, length, length, size, size, scale=0.125), Rotation(norm=True), device)
