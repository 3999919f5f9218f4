"""Attention with caches without a GPU: kernels compile without spills, plans fit the GPU, bad nodes are refused."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from architectures import DEVICES, H200, T4, check_compiles, to_compile
from attention_cases import formula
from cache_cases import CachedCase, cached
from kernel_hosts import first_plan
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from sampling import by_parts, sampled
from test_attention_compile import ARGUMENTS

from onnxfuse.dsl.catalogue import builtin
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.kernels.attention import host
from onnxfuse.kernels.attention.with_cache import cached_attention
from onnxfuse.rewrite.function_body import function
from onnxfuse.rewrite.variant import Variant
from onnxfuse.runtime.plan import Device, Kernel, Launch, TensorSpec

HALF = "float16"
OWN = "attention_with_cache", "attention_append"
PARTS = 18  # of the kernels, of which one is compiled in a plain run


def cases(dtype: str) -> Iterator[CachedCase]:
    """Yield steps of models for every kernel, with head sizes up to the largest, and short, long and empty caches."""
    for size in 64, 128, 256:
        yield cached(4096, 1, heads=8, kv_heads=2, size=size, value_size=size, dtype=dtype)
        yield cached(33, 1, heads=8, kv_heads=2, size=size, value_size=size, dtype=dtype, mask="boolean")
    yield cached(2000, 8, heads=8, kv_heads=2, dtype=dtype, mask="additive", mask_dtype=dtype)
    yield cached(100, 200, "bshd", ("packed", "bshd"), heads=4, kv_heads=2, dtype=dtype)
    yield cached(600, 1, heads=2, kv_heads=2, size=33, value_size=17, dtype=dtype)
    yield cached(0, 5, heads=2, kv_heads=1, dtype=dtype, aligned=False)
    yield cached(4000, 1, "bshd", heads=16, kv_heads=8, batch=8, dtype=dtype)
    yield cached(4000, 1, heads=16, kv_heads=2, dtype=dtype, sinks=True)
    yield cached(4000, 1, heads=8, kv_heads=8, dtype=dtype, bias_axes=(1, 0, 0, 1), sloped=True)


def launches(each: CachedCase, device: Device) -> list[Launch]:
    plans = host.candidates(each.node(), each.specs(), device)
    return [step for plan in plans for step in plan.steps if isinstance(step, Launch)]


@functools.cache
def kernels(dtype: str, device: Device) -> list[Kernel]:
    exact = dataclasses.replace(device, tf32=False)
    found = [step.kernel for each in cases(dtype) for step in launches(each, exact)]
    return [kernel for kernel in found if kernel.source in OWN]


@by_parts(PARTS)
@pytest.mark.parametrize("dtype", sampled([HALF, "float32"], 2))
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, dtype: str, part: int) -> None:
    assert {kernel.source for kernel in kernels(dtype, device)} == {*(OWN if device is not T4 else OWN[1:])}
    for kernel in to_compile(device, functools.partial(kernels, dtype), part, PARTS):
        check_compiles(kernel, device)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_plans_fit_the_device(device: Device) -> None:
    for each in (case for dtype in ("float32", HALF) for case in cases(dtype)):
        node, inputs = each.node(), each.specs()
        assert host.supports(node, [tensor.dtype for tensor in inputs], device) is None
        for plan in host.candidates(node, inputs, device):
            assert plan.outputs[1:] == each.present_specs()
            for step in plan.steps:
                assert isinstance(step, Launch)
                assert step.shared <= device.shared_per_block
                assert len(step.arguments) <= ARGUMENTS
                assert step.cluster <= (8 if device.arch >= 90 else 1)


def test_lengths_are_no_constants_of_the_kernels() -> None:
    kernels = {
        repr(step.kernel)
        for past in range(1000, 1016)
        for step in launches(cached(past, 1, heads=8, kv_heads=2, size=128, value_size=128), H200)
        if step.kernel.source in ("attention_with_cache", "attention_append") and step.cluster == 1
    }
    assert len(kernels) == 2


def test_steps_of_one_token_are_one_launch() -> None:
    for past, batch in (1, 1), (100, 1), (4096, 8):
        each = cached(past, 1, heads=32, kv_heads=8, size=128, value_size=128, batch=batch)
        (step,) = first_plan(each.node(), each.specs(), H200).steps
        assert isinstance(step, Launch) and step.kernel.source == "attention_with_cache"


@pytest.mark.parametrize("size", [64, 128])
def test_blocks_of_a_short_cache_have_two_tiles(size: int) -> None:
    for past, warps in (1151, 8), (2047, 4):
        each = cached(past, 1, heads=32, kv_heads=8, size=size, value_size=size)
        first = first_plan(each.node(), each.specs(), H200).steps[0]
        assert isinstance(first, Launch) and first.kernel.defines["WARPS_N"] == warps
        tiles = -(-(past + 1) // int(first.kernel.defines["BLOCK_N"]))
        assert warps == 4 or -(-tiles // first.cluster) == 2


def test_caches_of_causal_attention_are_copied_first() -> None:
    """Attention then skips tiles, so that it cannot write them to the present cache."""
    causal = cached(4096, 1, heads=8, kv_heads=2, operator=True, causal=True)
    assert launches(causal, H200)[0].kernel.source == "attention_append"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_when_rows_keep_their_offset(layout: str, batch: int, kv_heads: int) -> None:
    each = cached(20, 3, layout, batch=batch, heads=2, kv_heads=kv_heads, size=8, value_size=8)
    problem, cache, _ = cached_attention(each.node(), each.specs(), H200)
    past, present = (np.arange(x.size).reshape(x.shape) for x in (each.inputs()["past_key"], each.presents()[0]))
    both = np.array_equal(past, present[tuple(map(slice, past.shape))])
    assert cache.same_offsets == both
    assert problem.k.strides == strides(present, layout)
    assert cache.past_k.strides == strides(past, layout)


def strides(x: np.ndarray, layout: str) -> tuple[int, int, int]:
    heads_first = x if layout == "bhsd" else x.transpose(0, 2, 1, 3)
    batch, head, row, _ = (stride // x.itemsize for stride in heads_first.strides)
    return batch, head, row


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("past", "new"), [(600, 1), (100, 80), (0, 5)])
def test_caches_that_are_no_outputs_lie_in_scratch_memory(past: int, new: int, outputs: int) -> None:
    """These are nodes of a decoder whose present caches nothing reads."""
    whole = cached(past, new, heads=4, kv_heads=2, batch=3)
    each = dataclasses.replace(whole, outputs=outputs)
    assert host.supports(each.node(), [spec.dtype for spec in each.specs()], H200) is None
    plans = host.candidates(each.node(), each.specs(), H200)
    for plan, other in zip(plans, host.candidates(whole.node(), whole.specs(), H200), strict=True):
        hidden = other.outputs[outputs:]
        assert plan.outputs == other.outputs[:outputs]
        assert plan.scratch == (*other.scratch, *(2 * math.prod(spec.shape) for spec in hidden))
        assert {alias.output for alias in plan.no_alias} == set(range(1, outputs))
        text = repr(plan.steps)
        for i in range(3):
            assert (f"kind='output', index={i}" in text) == (i < outputs)
        for step, own in zip(plan.steps, other.steps, strict=True):
            assert isinstance(step, Launch) and isinstance(own, Launch) and step.kernel == own.kernel


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_refusals_say_what_is_required_and_found() -> None:
    node, inputs = (each := cached(20, 1)).node(), each.specs()
    dtypes = [tensor.dtype for tensor in inputs]
    assert host.supports(node, dtypes, H200) is None
    dtypes[3] = "float32"
    told = (
        "attention_with_cache: past_key is float32, k is float16 and the present cache is float16; required one dtype"
    )
    assert host.supports(node, dtypes, H200) == told
    turned = dataclasses.replace(node, attributes={**node.attributes, "cache_layout": "bhds"})
    assert "cache_layout is bhds; the kernel has bhsd, bshd" in str(host.supports(turned, dtypes, H200))


def test_a_past_of_other_sizes_is_named() -> None:
    each = cached(20, 1, heads=2, kv_heads=2, size=8, value_size=8)
    inputs = list(each.specs())
    for place in 3, 4:
        inputs[place] = TensorSpec((2, 2, 20, 8), HALF)
    with pytest.raises(ValueError, match=r"attention_with_cache 'n': .*\[\[2, 2, 20, 8\].*batches of 1|batches of"):
        first_plan(each.node(), inputs, H200)


def test_kernels_read_every_operand_of_scores() -> None:
    for given in ({"bias_axes": (0, 0, 0, 1), "sloped": True}, {"mask": "additive", "sinks": True}):
        each = cached(100, 1, heads=4, **given)
        problem, _, _ = cached_attention(each.node(), each.specs(), H200)
        tensors = (problem.mask, problem.bias, problem.slopes, problem.sinks)
        read = {each.node().operands[tensor.pointer.index] for tensor in tensors if tensor}
        assert read == {*each.node().operands} - {"q", "k", "v", "past_key", "past_value"}


# ---- the formula of the GPU tests ----------------------------------------------------------------------------------


def body(each: CachedCase) -> onnx.ModelProto:
    """Return a model of one node that calls the fusion's stored body."""
    fusion = next(known for known in builtin() if known.name == "attention_with_cache")
    case, inputs, attributes = each.case, each.inputs(), each.node().attributes
    names = ("batch", "heads", "kv_heads", "queries", "keys", "size", "value_size")
    dims = {name: getattr(case, name) for name in names} | {"repeats": case.heads // case.kv_heads}
    dims |= {"past": each.past, "new": case.keys - each.past}
    values = {"scale": case.scale, "masked_score": case.masked, "is_causal": 0, "softcap": 0.0}
    choices = {name: value for name, value in attributes.items() if isinstance(value, str)}
    dtypes = {name: TensorProto.BOOL if value.dtype == bool else TensorProto.FLOAT for name, value in inputs.items()}
    stored = function(fusion, Variant(23, dtypes, (TensorProto.FLOAT,) * 3, 3, values, dims, choices), fusion.name, [])
    infos = [helper.make_tensor_value_info(name, dtypes[name], inputs[name].shape) for name in inputs]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "key", "value")]
    call = helper.make_node(fusion.name, list(inputs), ["y", "key", "value"], domain=DOMAIN)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([call], "g", infos, results)
    return helper.make_model(graph, functions=[stored], opset_imports=opsets, ir_version=10)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows without a key are 0/0 in the evaluator
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("new_layouts", [("bhsd", "packed"), ("packed", "bshd"), ("seq_first", "bhsd")])
@pytest.mark.parametrize(("past", "new"), [(5, 1), (3, 4), (0, 2)])
def test_the_formula_is_what_the_body_computes(past: int, new: int, new_layouts: tuple[str, str], layout: str) -> None:
    given = {"heads": 4, "kv_heads": 2, "size": 6, "value_size": 3, "batch": 2, "mask": "boolean", "dtype": "float32"}
    each = cached(past, new, layout, new_layouts, sinks=layout == "bshd", **given)
    inputs, presents = each.inputs(), each.presents()
    found, *grown = ReferenceEvaluator(body(each)).run(None, inputs)
    whole = {**inputs, "k": presents[0], "v": presents[1]}
    np.testing.assert_allclose(found, formula(each.case, whole)[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    for cache, right in zip(grown, presents, strict=True):
        np.testing.assert_array_equal(cache, right)
