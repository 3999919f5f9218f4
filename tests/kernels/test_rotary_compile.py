"""Rotary embedding of queries and keys in one launch: it compiles for every architecture, and covers all elements."""

from __future__ import annotations

import math

import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from template_checks import concrete_plan, template_of

from onnxfuse.kernels.attention import host
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.rotary import host as rotary_host
from onnxfuse.kernels.rotary.rotary import Rotary, RotatedHeads, launch
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Pointer, Scalar, Struct, TensorSpec
from onnxfuse.runtime.template import candidates_at

CASES = {
    "llama": (32, 8, 64, 64, "float16", False),
    "qwen3": (16, 8, 128, 128, "float16", True),
    "qwen3 in fp32": (16, 8, 128, 128, "float32", True),
    "gpt_neox": (64, 64, 96, 24, "bfloat16", False),
    "a norm of heads of 80": (7, 3, 80, 80, "float16", True),
}


def problem(name: str, aligned: bool = True, length: int = 512) -> Rotary:
    heads, kv_heads, size, rotated, dtype, norm = CASES[name]
    tables = TensorSpec((1, 1, length, rotated), dtype)

    def rows(kind: str, index: int, count: int) -> HeadTensor:
        return HeadTensor(Pointer(kind, index), length * count * size, size, count * size)  # type: ignore[arg-type]

    tensors = tuple(
        RotatedHeads(count, rows("input", i, count), rows("scratch", i, count), Pointer("input", 4 + i))
        for i, count in enumerate((heads, kv_heads))
    )
    cos, sin = Pointer("input", 2), Pointer("input", 3)
    return Rotary(
        2, length, size, rotated, tensors, cos, sin, tables, dtype, dtype, dtype, aligned, whole_table=True,
        scale_dtype=dtype if norm else "", epsilon=1e-6,
    )  # fmt: skip


def kernels(device: Device) -> list[Kernel]:
    return [launch(problem(name, aligned), device).kernel for name in CASES for aligned in (True, False)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device) -> None:
    for kernel in to_compile(device, kernels):
        check_compiles(kernel, device)


def by_heads(heads: int = 6) -> tuple[FusedNode, list[TensorSpec]]:
    """Return a node of six heads, and its inputs: x and tables of so many heads."""
    specs = [TensorSpec((2, 6, 300, 64), "float16"), *[TensorSpec((heads, 300, 64), "float16")] * 2]
    attributes = {"layout": "bhsd", "table": "hsd", "form": "rotate_pairs", "size": 64}
    return FusedNode("rotary_embedding", "n", ("x", "cos", "sin"), attributes, ("float16",)), specs


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_tables_of_heads_compile_without_spills(device: Device) -> None:
    (plan,) = rotary_host.candidates(*by_heads(), device)
    (step,) = (step for step in plan.steps if isinstance(step, Launch))
    assert step.kernel.defines["TABLE_BY_HEADS"] == 1
    check_compiles(step.kernel, device)


def test_tables_of_other_heads_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"cos has shape \[1, 4, 300, 64\]; required \(1 or 2, 6, 1 or 300, 64\)"):
        rotary_host.candidates(*by_heads(4), DEVICES[0])


def attention(size: int = 64, **shapes: tuple[int, ...]) -> tuple[FusedNode, list[TensorSpec]]:
    """Return a node with 8 query heads and 2 key heads of `size`, and its inputs, some with other `shapes`."""
    usual = {"q": (2, 300, 8 * size), **dict.fromkeys("kv", (2, 300, 2 * size))}
    usual |= dict.fromkeys(("cos", "sin"), (1, 300, size))
    given = {**usual, "mask": (2, 1, 300, 300), **shapes}
    attributes = {
        "heads": 8, "kv_heads": 2, "repeats": 4, "size": size, "value_size": size, "scale": 0.125,
        "mask_kind": "boolean", "masked_score": -math.inf, "rotary": "rotate_half", "norm": "none",
    }  # fmt: skip
    dtypes = {"mask": "bool"}
    specs = [TensorSpec(shape, dtypes.get(name, "float16")) for name, shape in given.items()]
    return FusedNode("attention_with_rotary_embedding", "n", tuple(given), attributes, ("float16",)), specs


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_attention_reads_what_was_rotated(device: Device, size: int) -> None:
    """Rotated tensors are the first scratch buffers, the attention kernels' own come after them."""
    node, specs = attention(size)
    for plan in host.candidates(node, specs, device):
        first, *steps = (step for step in plan.steps if isinstance(step, Launch))
        assert first.kernel.source == "rotary_embedding"
        keys_alone = size > 64 and steps[-1].kernel.source == "attention_hopper"  # which rotates the queries
        sizes = [2 * 300 * count * size * 2 for count in ((2,) if keys_alone else (8, 2))]
        assert scratch(first) == set(range(len(sizes)))
        assert set().union(*map(scratch, steps)) == set(range(len(plan.scratch)))
        assert scratch(first) <= scratch(steps[-1]) | scratch(steps[0])
        assert list(plan.scratch[: len(sizes)]) == sizes
        check_compiles(first.kernel, device)


def scratch(step: Launch) -> set[int]:
    return {each.index for each in step.values if isinstance(each, Pointer) and each.kind == "scratch"}


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"k": (2, 200, 128), "v": (2, 200, 128), "mask": (2, 1, 300, 200)}, "300 queries and 200 keys"),
        ({"cos": (1, 200, 64), "sin": (1, 200, 64)}, r"cos has shape \[1, 200, 64\]; required \(1 or 2, 1 or 300,"),
        ({"cos": (3, 300, 64), "sin": (3, 300, 64)}, r"cos has shape \[3, 300, 64\]"),
        ({"sin": (1, 300, 32)}, r"sin has shape \[1, 300, 32\]; required \[1, 300, 64\], as cos"),
        ({"cos": (1, 300, 80), "sin": (1, 300, 80)}, "80 of 64 elements cannot be rotated"),
        ({"q": (2, 300, 500)}, r"q has shape \[2, 300, 500\]"),
    ],
)
def test_what_does_not_fit_is_told(shapes: dict[str, tuple[int, ...]], sentence: str) -> None:
    node, specs = attention(**shapes)
    with pytest.raises(ValueError, match=sentence):
        host.candidates(node, specs, DEVICES[0])


def test_one_scale_alone_has_no_kernel() -> None:
    node, specs = attention(q_scale=(64,))
    why = host.supports(node, [spec.dtype for spec in specs], DEVICES[0])
    assert why == "attention_with_rotary_embedding: q_scale is float16, k_scale is None; required one dtype"


@pytest.mark.parametrize("sizes", [(4, 300, 1), (4, 300, 4), (1, 300, 1)], ids=str)
def test_tables_of_a_dynamic_number_are_those_of_all_or_of_each_element_of_the_batch(sizes: tuple[int, ...]) -> None:
    """Positions that are an input may be one row for the whole batch, or one for each element."""
    batch, length, tables = -1, -2, -3
    node, specs = attention(
        128, q=(batch, length, 1024), k=(batch, length, 256), v=(batch, length, 256), cos=(tables, length, 128),
        sin=(tables, length, 128), mask=(batch, 1, 1, length),
    )  # fmt: skip
    template = template_of(node, specs, H200)
    plan = concrete_plan(template, candidates_at(host, template, sizes)[0], sizes)
    first, *_, last = (step for step in plan.steps if isinstance(step, Launch))
    shared = sizes[0] != sizes[2]
    assert first.kernel.defines["TABLE_BATCHED"] == int(not shared)
    rotation = [each for each in last.arguments if isinstance(each, Struct)][-1]
    stride = next(each.value for each in rotation.fields if isinstance(each, Scalar))
    assert last.kernel.defines["ROTATED"] == 128 and stride == (0 if shared else sizes[1] * 128)
    variant = template.chosen(sizes)
    assert shared == (variant is None)


@pytest.mark.parametrize("length", [1, 77, 4096])
@pytest.mark.parametrize("name", CASES)
def test_every_element_has_a_thread(name: str, length: int) -> None:
    """Every element of both tensors has a thread, for every remainder."""
    heads, kv_heads, size, rotated, _, norm = CASES[name]
    step = launch(problem(name, length=length), DEVICES[0])
    constants = {key: int(value) for key, value in step.kernel.defines.items() if isinstance(value, int)}
    pieces = (rotated // 2 + size - rotated) // constants["WIDTH"]
    groups = math.ceil(heads / constants["THREAD_HEADS"]) + math.ceil(kv_heads / constants["THREAD_HEADS"])
    assert groups % constants["ADJACENT_GROUPS"] == 0
    assert constants["LANES"] == pieces or (norm and constants["LANES"] in (1, 2, 4, 8, 16, 32))
    count = step.arguments[-1]
    assert isinstance(count, Scalar)
    assert count.value == 2 * length * groups * constants["LANES"]
    assert step.grid[0] * step.block[0] >= count.value
