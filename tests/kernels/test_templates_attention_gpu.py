"""Plans of attention templates on a GPU, at lengths of every kind, against float64: all plans that are right there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attention_cases import FLOATS, INFINITE, NUMPY, Case, formula
from cache_cases import CachedCase, cached
from kernel_runs import compile_all, launch, result, upload
from template_checks import concrete_plan, right_variants, template_of, with_dynamic_dims

from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec
from onnxfuse.runtime.template import Template, sizes_of

pytestmark = pytest.mark.gpu

BATCH, QUERIES, KEYS = 11, 101, 103  # the sizes that become dynamic; no static dim of the cases is one of them


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


def plans_at(template: Template, specs: Sequence[TensorSpec]) -> list[Plan]:
    """Return the plans of variants that are right for these inputs, one of those that differ in their grids alone."""
    sizes = sizes_of(template.inputs, specs)
    assert sizes is not None
    assert template.chosen(sizes), f"no variant for {sizes}"
    found: dict[str, Plan] = {}
    for variant in right_variants(template, sizes):
        plan = concrete_plan(template, variant, sizes)
        launches = [step for step in plan.steps if isinstance(step, Launch)]
        found.setdefault(repr([(step.kernel, step.cluster) for step in launches]), plan)
    return list(found.values())


def judge(found: np.ndarray, expected: np.ndarray, tolerance: np.ndarray, where: str) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=where)
    excess = np.nan_to_num(np.abs(found - expected) - tolerance, nan=-1.0)
    assert not excess.size or excess.max() <= 0, f"{where}: {int((excess > 0).sum())} of {excess.size} are wrong"


# ---- attention -----------------------------------------------------------------------------------------------------


def changed(**changes: Any) -> Case:
    return dataclasses.replace(Case(BATCH, 4, 2, QUERIES, QUERIES, 64, 64, scale=0.125), **changes)


ROW, FULL, SHARED = (1, 0, 0, 1), (1, 0, 1, 1), (0, 0, 1, 1)  # axes of masks: of keys; of queries and keys; of no batch
NODES = {
    "no mask": changed(),
    "padding": changed(mask="boolean", mask_axes=ROW),
    "padding, finite": changed(mask="inverted", mask_axes=ROW, masked=-65504.0),
    "padding, additive": changed(mask="additive", mask_axes=ROW, masked=-1e4),
    "mask of queries": changed(mask="additive", mask_axes=FULL),
    "mask of queries, large": changed(mask="additive", mask_axes=FULL, size=128, value_size=128),
    "window": changed(mask="boolean", mask_axes=SHARED, dtype="bfloat16"),
    "bias": changed(bias_axes=(0, 1, 1, 1)),
    "bias and mask": changed(bias_axes=(0, 1, 1, 1), mask="additive", mask_axes=ROW),
    "bias and mask of queries": changed(bias_axes=(0, 1, 1, 1), mask="additive", mask_axes=FULL),
    "slopes": changed(bias_axes=ROW, sloped=True, mask_dtype="float32", mask="causal", mask_axes=(), masked=-65504.0),
    "causal": changed(mask="causal", mask_axes=(), masked=INFINITE, size=128, value_size=128),
    "causal and padding": changed(mask="causal", mask_axes=ROW, masked=-65504.0),
    "causal operator": changed(operator=True, causal=True, softcap=5.0, scale=None),
    "cross": changed(keys=KEYS, mask="boolean", mask_axes=ROW),
    "one query": changed(queries=1, keys=KEYS, mask="additive", mask_axes=ROW),
    "odd sizes": changed(keys=KEYS, size=33, value_size=17),
    "float32": changed(dtype="float32", mask="additive", mask_axes=FULL, mask_dtype="float32"),
    "layouts": changed(layouts=("seq_first", "bshd", "bhsd"), out_layout="seq_first"),
}
# Lengths of one, around tiles of 16 to 128, odd and even for masks read in pairs, divisible by 8 and 16, and long ones.
LENGTHS = [(1, 1), (2, 2), (1, 7), (2, 16), (5, 33), (2, 64), (1, 65), (3, 126), (2, 160), (1, 197), (2, 304), (1, 513)]
CROSSED = [(1, 1, 1), (2, 1, 700), (1, 5, 4097), (3, 16, 1024), (2, 33, 77), (1, 64, 600), (2, 170, 49), (1, 300, 515)]


def at(case: Case, batch: int, queries: int, keys: int) -> Case:
    return dataclasses.replace(case, batch=batch, queries=queries if case.queries > 1 else 1, keys=keys)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("name", NODES)
def test_attention_of_any_length(device: Device, name: str, aligned: bool) -> None:
    case = dataclasses.replace(NODES[name], aligned=aligned)
    dynamic = with_dynamic_dims(case.specs(case.inputs()), BATCH, QUERIES, KEYS)
    template = template_of(case.node(), dynamic, dataclasses.replace(device, tf32=False))
    compile_all(template.kernels, device)
    crossed = case.keys != case.queries
    for sizes in CROSSED if crossed else [(batch, length, length) for batch, length in LENGTHS]:
        run = at(case, *sizes)
        inputs = run.inputs()
        expected, tolerance = formula(run, inputs)
        read = [upload(value, aligned) for value in inputs.values()]
        for plan in plans_at(template, run.specs(inputs)):
            (spec,) = plan.outputs
            assert spec.shape == expected.shape
            written = upload(np.full(spec.shape, 123.0, NUMPY[spec.dtype]), aligned)
            launch(plan, read, [written])
            judge(result(written, spec, aligned).astype(FLOATS), expected, tolerance, f"{name} at {sizes}")


# ---- a cache that grows --------------------------------------------------------------------------------------------

PAST, NEW = 107, 109
STEPS = {
    "step": cached(PAST, 1, heads=8, kv_heads=2, size=128, value_size=128),
    "steps": cached(PAST, 1, heads=4, kv_heads=2, batch=BATCH, mask="additive", mask_axes=(1, 0, 0, 1)),
    "rows keep their offsets": cached(PAST, 1, "bshd", heads=4, kv_heads=4, mask="boolean", mask_axes=(1, 0, 0, 1)),
    "float32": cached(PAST, 1, heads=6, kv_heads=3, batch=BATCH, dtype="float32"),
    "prefill": cached(PAST, NEW, heads=4, kv_heads=2, batch=BATCH, mask="additive", mask_axes=(1, 0, 1, 1)),
    "prefill, large": cached(PAST, NEW, heads=8, kv_heads=2, size=128, value_size=128, batch=BATCH),
    "prefill, causal": cached(PAST, NEW, heads=4, kv_heads=2, batch=BATCH, mask="causal", mask_axes=(1, 0, 0, 1),
                              masked=-65504.0),
    "prefill, causal operator": cached(PAST, NEW, heads=4, kv_heads=2, batch=BATCH, operator=True, causal=True),
}  # fmt: skip
# Past rows around tiles of 64 and 128 keys, none at all, and those from which blocks share keys; then prefill.
PASTS = [
    (1, 0, 1),
    (1, 1, 1),
    (2, 63, 1),
    (1, 64, 1),
    (2, 255, 1),
    (1, 512, 1),
    (1, 1023, 1),
    (5, 2047, 1),
    (1, 4095, 1),
]
PREFILLS = [(1, 0, 9), (2, 300, 4), (1, 1500, 7), (2, 0, 64), (1, 33, 70), (1, 200, 200), (2, 0, 257), *PASTS[:6]]


def grown(each: CachedCase, batch: int, past: int, new: int) -> CachedCase:
    case, fixed = each.case, each.case.batch == 1
    changed = dataclasses.replace(case, batch=1 if fixed else batch, queries=new, keys=past + new)
    return dataclasses.replace(each, case=changed, past=past)


@pytest.mark.parametrize("name", STEPS)
def test_a_cache_of_any_length(device: Device, name: str) -> None:
    each = STEPS[name]
    dynamic = with_dynamic_dims(each.specs(), BATCH, PAST, NEW, PAST + NEW, PAST + 1)
    template = template_of(each.node(), dynamic, dataclasses.replace(device, tf32=False))
    compile_all(template.kernels, device)
    for sizes in PASTS if each.case.queries == 1 else PREFILLS:
        run = grown(each, *sizes)
        inputs, presents = run.inputs(), run.presents()
        whole = {name: value for name, value in inputs.items() if name in ("mask", "bias", "slopes", "positions")}
        whole |= dict(zip("qkv", (inputs["q"], *presents), strict=True))
        expected, tolerance = formula(run.case, whole)
        read = [upload(value) for value in inputs.values()]
        for plan in plans_at(template, run.specs()):
            assert plan.outputs[1:] == run.present_specs()
            written = [upload(np.full(spec.shape, 123.0, NUMPY[spec.dtype])) for spec in plan.outputs]
            launch(plan, read, written)
            found = result(written[0], plan.outputs[0], True).astype(FLOATS)
            judge(found, expected, tolerance, f"{name} at {sizes}")
            for cache, spec, right in zip(written[1:], plan.outputs[1:], presents, strict=True):
                bits = result(cache, spec, True)
                np.testing.assert_array_equal(bits.view(np.uint8), right.view(np.uint8), err_msg=f"{name} at {sizes}")


def test_a_past_and_its_present_in_one_buffer(device: Device) -> None:
    """With a batch of one, rows keep their offsets; with a larger batch they do not, and the plan finds that out."""
    each = STEPS["rows keep their offsets"]
    each = dataclasses.replace(each, case=dataclasses.replace(each.case, batch=BATCH))
    dynamic = with_dynamic_dims(each.specs(), BATCH, PAST, PAST + 1)
    template = template_of(each.node(), dynamic, dataclasses.replace(device, tf32=False))
    for batch, past in (1, 0), (1, 100), (1, 3000), (2, 100):
        case = dataclasses.replace(each.case, batch=batch, keys=past + 1)
        run = dataclasses.replace(each, case=case, past=past)
        inputs, presents = run.inputs(), run.presents()
        for plan in plans_at(template, run.specs()):
            assert [bool(pair.same_start) for pair in plan.no_alias] == [batch == 1, False, False, batch == 1]
            if batch > 1:
                continue
            read = {name: upload(value) for name, value in inputs.items()}
            written = [upload(np.full(spec.shape, 123.0, NUMPY[spec.dtype])) for spec in plan.outputs]
            for name, cache in zip(("past_key", "past_value"), written[1:], strict=True):
                place = cache[: inputs[name].nbytes]
                if inputs[name].nbytes:
                    place.set(np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8))
                read[name] = place
            launch(plan, list(read.values()), written)
            for cache, spec, right in zip(written[1:], plan.outputs[1:], presents, strict=True):
                np.testing.assert_array_equal(result(cache, spec, True).view(np.uint8), right.view(np.uint8))
