"""The plans of templates of pools and resizes on a GPU, at many sizes, against onnxruntime on the CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_runs import NUMPY, compile_all, compile_native, launch, result, upload
from template_checks import concrete_plan, template_of
from test_pooling_emulated import onnxruntime as pooled
from test_resize_emulated import onnxruntime as resized
from test_templates_pooling import CASES, described

from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Launch

pytestmark = pytest.mark.gpu

MAX_IMAGES, MAX_SIDE, SMALLEST_SIDE, SEEDS = 6, 90, 5, 8
SLACK = {"float32": 2e-5, "float16": 2e-3}


def reference(fusion: str, attributes: dict[str, Any], x: np.ndarray) -> np.ndarray:
    if fusion == "global_max_pool":
        return x.astype(np.float32).max(tuple(range(1, x.ndim - 1)), keepdims=True)
    given = dict(attributes)
    scales = {name: given.pop(name) for name in ("scales", "sizes") if name in given}
    return resized(x, scales, given) if fusion == "resize" else pooled(fusion, x, given)


@pytest.mark.parametrize("dtype", sorted(SLACK))
@pytest.mark.parametrize(("fusion", "attributes", "dims", "channels"), CASES)
def test_matches_onnxruntime_at_any_size(
    fusion: str, attributes: dict[str, Any], dims: Sequence[int], channels: int, dtype: str
) -> None:
    compile_native()
    node, inputs = described(fusion, attributes, dims, channels, dtype)
    for device in (gpu(0), replace(gpu(0), multiprocessors=2)):
        template = template_of(node, inputs, device)
        compile_all((kernel for variant in template.variants for kernel in variant.kernels), gpu(0))
        for seed in range(SEEDS):
            chance = random.Random(seed)
            limits = [(1, MAX_IMAGES) if dim == dims[0] else (SMALLEST_SIDE, MAX_SIDE) for dim in dims]
            drawn = [int(least * (most / least) ** chance.random()) for least, most in limits]
            shape = [size if dim < 0 else dim for size, dim in zip(drawn, dims, strict=True)]
            sizes = [size for size, dim in zip(shape, dims, strict=True) if dim < 0]
            variant = template.chosen(sizes)
            assert variant, f"no variant for {sizes}"
            plan = concrete_plan(template, variant, sizes)
            assert all(isinstance(step, Launch) for step in plan.steps)
            x = np.random.default_rng(seed).standard_normal((*shape, channels)).astype(NUMPY[dtype])
            expected = reference(fusion, attributes, x)
            (spec,) = plan.outputs
            assert spec.shape == expected.shape
            written = upload(np.full(spec.shape, np.nan, NUMPY[dtype]))
            launch(plan, [upload(x)], [written])
            y = result(written, spec, True).astype(np.float32)
            np.testing.assert_allclose(y, expected, rtol=SLACK[dtype] / 2, atol=SLACK[dtype], err_msg=str(sizes))
