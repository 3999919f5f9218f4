"""Attention without a GPU: its kernels compile without spills, plans fit the GPU, bad nodes are refused by name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import attention_cases
import numpy as np
import onnx
import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from kernel_hosts import first_plan
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from sampling import by_parts

from onnxfuse.dsl.catalogue import builtin
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.kernels.attention import decode, host, mma
from onnxfuse.kernels.attention.operands import attention_of
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.rewrite.function_body import function
from onnxfuse.rewrite.variant import Variant
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, TensorSpec

PARTS = 40  # of the kernels, of which one is compiled in a plain run

ARGUMENTS = 64  # the most that the native library takes
HALF, FULL = "float16", "float32"
CAUSAL: dict[str, object] = {"mask_kind": "causal", "masked_score": -65504.0}

Case = tuple[FusedNode, tuple[TensorSpec, ...]]


def case(
    batch: int, heads: tuple[int, int], queries: int, keys: int, sizes: tuple[int, int], dtype: str = HALF,
    mask: tuple[str, tuple[int, ...], str] | None = None, bias: tuple[int, ...] | None = None,
    positions: tuple[int, ...] | None = None, sinks: bool = False, aligned: bool = True, **attributes: object,
) -> Case:  # fmt: skip
    """Return a node with packed operands, and its inputs; `mask` is (kind, shape, dtype)."""
    given: dict[str, object] = {"heads": heads[0], "kv_heads": heads[1], "repeats": heads[0] // heads[1]}
    shapes = {
        "q": (batch, queries, heads[0] * sizes[0]),
        "k": (batch, keys, heads[1] * sizes[0]),
        "v": (batch, keys, heads[1] * sizes[1]),
    }
    tensors = {name: TensorSpec(shape, dtype, aligned) for name, shape in shapes.items()}
    if mask:
        tensors["mask"] = TensorSpec(mask[1], mask[2], aligned)
        given |= {"mask_kind": mask[0], "masked_score": -math.inf}
    if bias:
        tensors["bias"], given["bias_kind"] = TensorSpec(bias, dtype, aligned), "position"
    if positions:
        tensors["slopes"], given["bias_kind"] = TensorSpec((heads[0], 1, 1), FULL, constant=True), "slopes"
        tensors["positions"] = TensorSpec(positions, FULL, aligned)
    if sinks:
        tensors["sinks"], given["fully_masked"] = TensorSpec((1, heads[0], 1, 1), dtype, constant=True), "sinks"
    node = FusedNode("attention", "layer/attention", tuple(tensors), {**given, **attributes}, (dtype,))
    return node, tuple(tensors.values())


# Head sizes of models, the largest, and odd ones that are copied element by element; masks of every kind, access and
# broadcast; many, some and few queries.
def cases() -> Iterator[Case]:
    for size in 64, 128, 256:
        yield case(8, (16, 16), 512, 512, (size, size), mask=("boolean", (8, 1, 1, 512), "bool"))
        yield case(1, (16, 4), 1, 4096, (size, size))
    yield case(2, (4, 2), 70, 300, (33, 17))
    yield case(2, (4, 2), 70, 300, (96, 200), aligned=False)
    yield case(1, (8, 8), 2048, 2048, (64, 64), mask=("additive", (1, 8, 2048, 2048), HALF), bias=(1, 8, 2048, 2048))
    yield case(1, (8, 8), 197, 197, (128, 128), mask=("inverted", (197, 1), "bool"), bias=(8, 197, 197))
    yield case(4, (8, 2), 300, 301, (64, 64), mask=("additive", (4, 1, 300, 301), FULL))
    for size in 64, 128, 256:
        yield case(4, (8, 2), 300, 300, (size, size), mask=("causal", (4, 1, 1, 300), "bool"), masked_score=-65504.0)
    yield case(1, (8, 2), 300, 300, (64, 64), mask_kind="causal", masked_score=-65504.0)
    yield case(1, (8, 2), 4, 3000, (64, 64), mask_kind="causal", masked_score=-65504.0)
    yield case(1, (8, 2), 300, 300, (128, 128), form="operator", is_causal=1, softcap=30.0)
    yield case(8, (32, 8), 2, 8192, (128, 128), mask=("additive", (8, 1, 2, 8192), HALF))
    for size in 64, 128:
        yield case(4, (16, 16), 300, 300, (size, size), positions=(4, 1, 1, 300), **CAUSAL)
    yield case(1, (32, 8), 1, 4096, (128, 128), positions=(1, 1, 4096))
    yield case(1, (8, 2), 197, 197, (80, 80), positions=(197, 197))
    for queries, keys in ((300, 300), (1, 4096)):
        yield case(1, (16, 2), queries, keys, (64, 64), mask=("additive", (1, 1, queries, keys), HALF), sinks=True)


def typed(dtype: str) -> Iterator[Case]:
    """Yield the same cases in another dtype."""
    for node, inputs in cases():
        changed = tuple(dataclasses.replace(t, dtype=dtype if t.dtype == HALF else t.dtype) for t in inputs)
        yield dataclasses.replace(node, output_dtypes=(dtype,)), changed


def found(case: Case, device: Device) -> list[Implementation]:
    node, inputs = case
    problem, _ = attention_of(node, inputs, device)
    return [*mma.implementations(problem, device), *decode.implementations(problem, device)]


@functools.cache
def launches(device: Device) -> list[Launch]:
    """Return a launch of each kernel: on A100 and H200 of all cases in fp16, else of some; of some in other dtypes."""
    chosen = [*cases()] if device.arch in (80, 90) else list(cases())[::3]
    chosen += [*list(typed("bfloat16"))[:1], *list(typed(FULL))[::4]]
    steps = [step for each in chosen for candidate in found(each, device) for step in candidate.steps]
    named = {(s.kernel.entry, tuple(sorted(s.kernel.defines.items()))): s for s in steps if isinstance(s, Launch)}
    return list(named.values())


def kernels(device: Device) -> list[Kernel]:
    return [step.kernel for step in launches(device)]


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


@by_parts(PARTS)
@pytest.mark.parametrize("device", [device for device in DEVICES if device.arch in (80, 90)], ids=str)
def test_compiles_with_tf32(device: Device, part: int) -> None:
    found = kernels(dataclasses.replace(device, tf32=True))
    for kernel in [each for each in found if each.defines.get("MATH_KIND") == "TF32"][part::PARTS]:
        check_compiles(kernel, device)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_plans_fit_the_device(device: Device) -> None:
    for dtype in HALF, FULL:
        for each in typed(dtype):
            node, inputs = each
            assert host.supports(node, [tensor.dtype for tensor in inputs], device) is None
            ways = found(each, device)
            assert ways, f"no kernel for {inputs} on {device.name}"
            assert len({way.name for way in ways}) == len(ways), "names tell candidates apart"
            for step in [step for way in ways for step in way.steps]:
                assert isinstance(step, Launch)
                assert step.shared <= device.shared_per_block
                assert len(step.arguments) <= ARGUMENTS
                assert step.block[0] <= 1024
                assert step.cluster <= (8 if device.arch >= 90 else 1)
                assert step.grid[0] % step.cluster == 0


def test_lengths_are_no_constants_of_the_kernels() -> None:
    """A cache that grows by one key a step must not need a new kernel for each step."""
    kernels = {
        tuple(sorted(candidate.steps[0].kernel.defines.items()))
        for keys in range(1000, 1016, 2)
        for candidate in found(case(1, (8, 2), 1, keys, (128, 128)), H200)
        if "splits" in candidate.name and isinstance(candidate.steps[0], Launch)
    }
    assert len(kernels) == 1


# ---- what a node means -------------------------------------------------------------------------------------------

SHAPES = {"packed": (2, 5, 24), "seq_first": (5, 2, 24), "bshd": (2, 5, 3, 8), "bhsd": (2, 3, 5, 8)}
STRIDES = {"packed": (120, 8, 24), "seq_first": (24, 8, 48), "bshd": (120, 8, 24), "bhsd": (120, 40, 8)}  # b, h, s


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("layout", SHAPES)
def test_layouts_are_strides(layout: str, static: bool) -> None:
    attributes = {f"{name}_layout": layout for name in "qkv"} | {"size": 8, "repeats": 1}
    attributes |= {"heads": 3, "kv_heads": 3} if static else {}
    node = FusedNode("attention", "n", ("q", "k", "v"), attributes, (HALF,))
    problem, y = attention_of(node, (TensorSpec(SHAPES[layout], HALF),) * 3, H200)
    sizes = (problem.batch, problem.heads, problem.kv_heads, problem.queries, problem.keys, problem.head_dim)
    assert sizes == (2, 3, 3, 5, 5, 8)
    assert (problem.q.batch_stride, problem.q.head_stride, problem.q.row_stride) == STRIDES[layout]
    assert y.shape == (2, 5, 24)


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [("packed", (2, 5, 24), (120, 8, 24)), ("rows", (10, 24), (120, 8, 24)), ("bshd", (2, 5, 3, 8), (120, 8, 24)),
     ("seq_first", (5, 2, 24), (24, 8, 48)), ("seq_first_rows", (10, 24), (24, 8, 48)),
     ("bhsd", (2, 3, 5, 8), (120, 40, 8))],
)  # fmt: skip
def test_output_layouts(layout: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    node, inputs = case(2, (3, 3), 5, 7, (8, 8), out_layout=layout)
    problem, y = attention_of(node, inputs, H200)
    assert y.shape == shape
    assert (problem.out.batch_stride, problem.out.head_stride, problem.out.row_stride) == strides


def test_softcap_in_several_operators_has_the_scale_in_front_of_the_cap() -> None:
    node, inputs = case(1, (2, 2), 4, 6, (16, 16), capped="tanh", cap=5.0, scale=0.05)
    problem, _ = attention_of(node, inputs, H200)
    assert (problem.scale, problem.softcap) == (0.25, 5.0)


def test_operator_has_its_own_scale_causality_and_masks() -> None:
    node, inputs = case(1, (2, 2), 4, 6, (16, 16), form="operator", is_causal=1, softcap=5.0)
    problem, _ = attention_of(node, inputs, H200)
    assert (problem.scale, problem.causal, problem.softcap, problem.zero_masked_rows) == (0.25, 0, 5.0, True)
    node, inputs = case(1, (2, 2), 4, 6, (16, 16), mask=("", (4, 6), "bool"), form="operator")
    problem, _ = attention_of(node, inputs, H200)
    assert (problem.mask_kind, problem.masked_score, problem.causal) == ("boolean", -math.inf, None)
    mask = problem.mask
    assert mask and (mask.batch_stride, mask.head_stride, mask.query_stride, mask.key_stride) == (0, 0, 6, 1)


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 5, 2), (5, 5, 0)])
def test_nothing_to_compute_is_no_launch(queries: int, keys: int, batch: int) -> None:
    node, inputs = case(batch, (2, 2), queries, keys, (16, 16))
    assert first_plan(node, inputs, H200).steps == ()


def test_no_keys_give_zeros_by_a_launch() -> None:
    node, inputs = case(1, (2, 2), 5, 0, (16, 16))
    assert attention_of(node, inputs, H200)[0].zero_masked_rows
    assert first_plan(node, inputs, H200).steps


def keys_mask(batch: int, keys: int) -> tuple[str, tuple[int, ...], str]:
    return "boolean", (batch, 1, 1, keys), "bool"


@pytest.mark.parametrize(
    ("source", "shape", "more"),
    [
        ("attention_decode", (8, (32, 8), 1, 4096, (128, 128)), {}),
        ("attention_hopper", (8, (12, 12), 512, 512, (64, 64)), {}),
        ("attention_mma", (1, (12, 12), 128, 128, (64, 64)), {}),  # 3.1 us on an H200, the other 3.2
        ("attention_hopper", (1, (12, 12), 128, 128, (128, 128)), {}),  # 3.7 and 4.5
        ("attention_hopper", (8, (12, 12), 128, 128, (64, 64)), {}),  # 4.0 and 8.1
        ("attention_mma", (8, (12, 12), 16, 16, (64, 64)), {}),  # 2.5 and 2.8
        ("attention_hopper", (8, (12, 12), 128, 128, (64, 64)), {"mask": keys_mask(8, 128)}),  # 4.7 and 9.2
        ("attention_mma", (8, (12, 12), 64, 64, (64, 64)), {"mask": ("boolean", (1, 1, 64, 64), "bool")}),  # 4.0, 4.7
    ],
)
def test_plans_of_the_host_begin_with_the_kernel_for_the_shape(
    source: str, shape: tuple[Any, ...], more: dict[str, Any]
) -> None:
    step = first_plan(*case(*shape, **more), H200).steps[0]
    assert isinstance(step, Launch) and step.kernel.source == source


# ---- what is refused ---------------------------------------------------------------------------------------------


def refusal(changes: Mapping[str, object] | None = None, dtypes: tuple[str, ...] = (HALF,) * 3, out: str = HALF) -> str:
    node = FusedNode("attention", "n", ("q", "k", "v", "mask")[: len(dtypes)], dict(changes or {}), (out,))
    return host.supports(node, dtypes, H200) or ""


def test_refusals_say_what_is_required_and_found() -> None:
    assert refusal() == ""
    assert refusal({"size": 257}) == "attention: size is 257; the kernels take 1 to 256"
    assert refusal({"k_layout": "bdsh"}).startswith("attention: k_layout is bdsh; the kernel has packed, seq_first")
    assert refusal(dtypes=(HALF, HALF, FULL)) == "attention: v is float32, q is float16; required one dtype"
    assert refusal(dtypes=("float64",) * 3, out="float64").startswith("attention: q is float64; the kernels take")
    masked = refusal({"mask_kind": "boolean"}, (HALF, HALF, HALF, HALF))
    assert masked == "attention: mask of kind boolean is float16; the kernels take bool"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5, 24), (2, 7, 24), (2, 6, 24)), r"7 keys and 6 values.*q \[2, 5, 24\], k \[2, 7, 24\], v \[2, 6, 24\]"),
        (((2, 5, 24), (3, 7, 24), (3, 7, 24)), "batches of 2, 3 and 3"),
        (((2, 5, 24), (2, 7, 48), (2, 7, 24)), "heads of 8 and 16 elements in q and k"),
        (((2, 5, 25), (2, 7, 24), (2, 7, 24)), r"q has shape \[2, 5, 25\] in layout packed; required 3 heads"),
        (((2, 5, 3, 8), (2, 7, 24), (2, 7, 24)), "required rank 3 in layout packed"),
        (((1, 5, 900), (1, 5, 900), (1, 5, 24)), "heads of 300 and 8 elements; the kernels take up to 256"),
        (((2, 5, 24), (2, 7, 24), (2, 7, 24), (2, 5, 6)), r"mask has shape \[2, 5, 6\].* broadcasts to \[2, 3, 5, 7\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    attributes = {"heads": 3, "kv_heads": 3, "mask_kind": "additive"}
    node = FusedNode("attention", "layer/0", ("q", "k", "v", "mask")[: len(shapes)], attributes, (HALF,))
    with pytest.raises(ValueError, match=f"attention 'layer/0': .*{message}"):
        first_plan(node, [TensorSpec(shape, HALF) for shape in shapes], H200)


# ---- the formula of the GPU tests ----------------------------------------------------------------------------------

SMALL = (1, 2, 5, 16, 33)


def small(seed: int) -> attention_cases.Case:
    """Return a generated case in float32, small enough for the reference evaluator.

    What is added without a mask beside it is a mask itself, or slopes times positions.
    """
    found = attention_cases.generated(seed)
    lengths = {"queries": SMALL[seed % 5], "keys": SMALL[seed // 5 % 5], "size": found.size % 24 + 1}
    # A score that float32 loses when a large number is added survives in float64.
    masked = -30.0 if found.mask in ("additive", "causal") and found.masked > -1e5 else found.masked
    changes = {**lengths, "value_size": found.value_size % 24 + 1, "dtype": FULL, "mask_dtype": FULL, "masked": masked}
    if found.mask == "none" and found.bias_axes:
        batch, _, query, key = found.bias_axes
        changes |= {"sloped": True, "bias_axes": (batch, 0, query, key)}
    return dataclasses.replace(found, **changes)


def body(chosen: attention_cases.Case, inputs: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return a model of one node that calls the fusion's stored body."""
    fusion = next(each for each in builtin() if each.name == "attention")
    node = chosen.node()
    names = ("batch", "heads", "kv_heads", "queries", "keys", "size", "value_size")
    dims = {**{name: getattr(chosen, name) for name in names}, "repeats": chosen.heads // chosen.kv_heads}
    given = {"scale": node.attributes.get("scale"), "masked_score": chosen.masked}
    if chosen.operator:
        given |= {"is_causal": int(chosen.causal), "softcap": chosen.softcap}
    elif given["scale"] is None:
        given["scale"] = 1.0
    if "cap" in node.attributes:
        given["cap"] = node.attributes["cap"]
    choices = {name: value for name, value in node.attributes.items() if isinstance(value, str)}
    dtypes = {name: TensorProto.BOOL if value.dtype == bool else TensorProto.FLOAT for name, value in inputs.items()}
    rank = {"rows": 2, "seq_first_rows": 2, "bshd": 4, "bhsd": 4}.get(chosen.out_layout, 3)
    variant = Variant(23, dtypes, (TensorProto.FLOAT,), rank, given, dims, choices)
    values = [helper.make_tensor_value_info(name, dtypes[name], inputs[name].shape) for name in inputs]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    call = helper.make_node("attention", list(inputs), ["y"], domain=DOMAIN)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    stored = function(fusion, variant, "attention", [])
    graph = helper.make_graph([call], "g", values, [result])
    return helper.make_model(graph, functions=[stored], opset_imports=opsets, ir_version=10)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows without a key are 0/0 in the evaluator
@pytest.mark.parametrize("seed", range(60))
def test_the_formula_is_what_the_body_computes(seed: int) -> None:
    chosen = small(seed)
    inputs = chosen.inputs()
    (found,) = ReferenceEvaluator(body(chosen, inputs)).run(None, inputs)
    expected, _ = attention_cases.formula(chosen, inputs)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
