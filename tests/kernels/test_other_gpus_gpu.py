"""Plans as chosen for a T4, an A100, an L40S and an RTX 5090, launched on the GPU at hand, against float64.

    pytest -m other_gpus

The checks are those of the other GPU tests, with some of their cases, spread evenly; a `Device` that pretends to be
another GPU takes the place of the real one when a node is planned for.  Code is compiled for the real one, so that what
is checked are tilings, grids, shared memory, and the choice of kernels; tests/kernels/test_*_compile.py compile them
for their own GPUs.  A plan with instructions that the real GPU lacks is skipped, and the reason names them.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kernel_runs
import pytest
import test_attention_gpu as attention
import test_attention_with_cache_gpu as cache
import test_attention_with_rotary_gpu as rotary
import test_channels_last_gpu as channels_last
import test_concat_gpu as concat
import test_conv_transpose_gpu as transposed
import test_embedding_gpu as embedding
import test_gemm_gpu as gemm
import test_kernels_elements_gpu as elements
import test_kernels_gpu as norms
from other_gpus import OTHER_GPUS, nodes, plans, sources

from onnxfuse.kernels.tensors import BF16_ARCH
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device

pytestmark = [pytest.mark.gpu, pytest.mark.other_gpus]

# Tests that plan with the device that they are given, and how many of their cases each of the GPUs gets: more where its
# plans differ from those of an H200, whose own tests run all cases, and one where they never do.
ONE = (1, 1, 1, 1)  # elementwise kernels depend on nothing but whether launches are dependent
TESTS: dict[Callable[..., None], tuple[int, int, int, int]] = {
    norms.test_layer_norm: (14, 8, 8, 4), norms.test_rms_norm: (14, 8, 8, 4), norms.test_softmax: (14, 8, 8, 2),
    norms.test_add_norm: (14, 8, 8, 8), norms.test_every_candidate: (6, 1, 1, 1),
    norms.test_dtypes_may_differ: (3, 1, 1, 1), norms.test_group_norm: (10, 8, 8, 4),
    norms.test_group_norm_misaligned: (4, 3, 3, 1), elements.test_activation_over_its_range: ONE,
    elements.test_elements_of_any_size: ONE, elements.test_gates: ONE,
    elements.test_gates_that_are_slices_of_a_product: ONE, elements.test_rotary_embedding: ONE,
    elements.test_rotary_embedding_of_a_slice: ONE, elements.test_rotary_embedding_operator: ONE,
    elements.test_rotary_table: ONE, embedding.test_sizes: (10, 6, 6, 3),
    embedding.test_what_is_added_broadcasts: (8, 1, 1, 1), embedding.test_every_candidate: (4, 1, 1, 1),
    gemm.test_sizes: (16, 16, 16, 16), gemm.test_pointers_between_vectors: (5, 5, 5, 5),
    gemm.test_epilogues: (12, 12, 12, 12), gemm.test_parallel_products: (5, 5, 5, 5),
    attention.test_generated: (6, 6, 6, 6), attention.test_lengths: (5, 2, 3, 2),
    attention.test_head_sizes: (4, 2, 2, 2), attention.test_the_operator_under_a_triangle: (2, 1, 1, 1),
    attention.test_parts_of_one_product: (3, 1, 1, 1), attention.test_rows_without_a_key: (4, 1, 3, 3),
    attention.test_causal_masks: (3, 1, 3, 3), cache.test_lengths: (6, 4, 4, 4),
    cache.test_dtypes_and_layouts: (3, 1, 3, 3), cache.test_head_sizes: (4, 2, 4, 4),
    cache.test_groups_of_query_heads: (3, 1, 3, 3), cache.test_misaligned: (3, 1, 3, 3),
    cache.test_in_place: (3, 3, 3, 3), rotary.test_forms: (4, 4, 4, 4), rotary.test_head_sizes: (3, 1, 1, 1),
    rotary.test_parts_of_one_product: (3, 1, 1, 1), channels_last.test_small_tensors: (9, 9, 9, 9),
    channels_last.test_resize: ONE, concat.test_small_tensors: ONE, transposed.test_shapes: (6, 4, 4, 4),
    transposed.test_products: (4, 3, 3, 3), transposed.test_depthwise: ONE,
}  # fmt: skip
LONG = 4096  # elements of a row: of shorter ones, GPUs since sm_80 have nearly all plans of an H200
FEW_MULTIPROCESSORS = (norms, elements, embedding)  # whose sizes are chosen for a GPU with two, as small_gpu() is
FIXTURES = {"grid": None}  # which only compile beforehand
LAUNCHED: dict[str, set[str]] = defaultdict(set)  # the sources that ran as planned for each GPU
BEGUN: dict[str, int] = defaultdict(int)  # tests of each GPU that began


@dataclass(frozen=True)
class OtherTest:
    """One case of a test, for one GPU."""

    device: Device
    test: Callable[..., None]
    arguments: dict[str, Any]

    @property
    def id(self) -> str:
        values = "-".join(str(value) for value in self.arguments.values())
        return f"{self.device.name}-{self.test.__module__}-{self.test.__name__}-{values}"


def cases_of(test: Callable[..., None]) -> list[dict[str, Any]]:
    """Return the arguments of every case of a test, as its marks give them."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    choices: list[list[dict[str, Any]]] = []
    for mark in marks:
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
        values = [each if len(names) > 1 else (each,) for each in mark.args[1]]
        choices.append([dict(zip(names, each, strict=True)) for each in values])
    return [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*choices)]


def row_length(arguments: dict[str, Any]) -> int:
    """Return the elements of a row, or of an image, in a test of norms or embeddings; 0 in others."""
    return math.prod(arguments.get("shape", (1, 0))[1:]) or arguments.get("size", 0)


def cases_for(test: Callable[..., None], device: Device) -> list[dict[str, Any]]:
    """Return the cases of a test in which a GPU may have plans of its own, if it is known which these are."""
    every = cases_of(test)
    if test is channels_last.test_small_tensors:  # the largest image of each fusion
        every = sorted((each for each in every if each["aligned"]), key=lambda each: math.prod(each["case"].shape))
        return list({each["case"].fusion: each for each in every}.values())
    return [each for each in every if device.arch < BF16_ARCH or row_length(each) >= LONG] or every


def other_tests() -> Iterator[OtherTest]:
    """Yield the cases of each GPU: evenly spread over those of a test, others for each GPU."""
    for number, device in enumerate(OTHER_GPUS):
        for test, counts in TESTS.items():
            found, count = cases_for(test, device), counts[number]
            step = len(found) / min(count, len(found))
            first = int(step * number / len(OTHER_GPUS))
            for index in range(min(count, len(found))):
                yield OtherTest(device, test, found[(first + int(index * step)) % len(found)])


@pytest.mark.parametrize("case", list(other_tests()), ids=lambda case: case.id)
def test_as_planned_for_another_gpu(case: OtherTest) -> None:
    BEGUN[case.device.name] += 1
    real = cuda_driver.gpu(0)
    device = dataclasses.replace(case.device, ordinal=real.ordinal)
    if real.arch < BF16_ARCH <= device.arch:
        pytest.skip(f"plans for sm_{device.arch} have instructions that {real.name}, sm_{real.arch}, lacks")
    if case.test is gemm.test_parallel_products and device.arch < BF16_ARCH and case.arguments["dtype"] == "bfloat16":
        pytest.skip(f"products of bfloat16 need sm_{BF16_ARCH}")
    module = inspect.getmodule(case.test)
    if module in FEW_MULTIPROCESSORS:
        device = dataclasses.replace(device, multiprocessors=2)
    wanted = inspect.signature(case.test).parameters
    given = {name: value for name, value in FIXTURES.items() if name in wanted}
    given["gpu" if "gpu" in wanted else "device"] = device
    kernel_runs.launched.clear()
    case.test(**given, **case.arguments)
    LAUNCHED[device.name] |= kernel_runs.launched


@pytest.mark.parametrize("device", OTHER_GPUS, ids=lambda device: device.name)
def test_every_kernel_of_another_gpu_ran(device: Device) -> None:
    """Fail if hosts offer this GPU a kernel that no test above launched; it needs them all to have run."""
    count = sum(case.device is device for case in other_tests())
    if BEGUN[device.name] < count:
        pytest.skip(f"only {BEGUN[device.name]} of {count} tests of {device.name} ran in this process")
    offered = {source for _, node in nodes() for plan in plans(node, device) for source in sources(plan)}
    assert offered <= LAUNCHED[device.name], f"not launched: {', '.join(sorted(offered - LAUNCHED[device.name]))}"
