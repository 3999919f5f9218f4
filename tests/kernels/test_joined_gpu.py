"""Every plan of fused nodes with elementwise operators in their epilogue, on a GPU, against float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_cases import Case
from conv_cases import ConvCase
from conv_transpose_cases import SAME, ConvTransposeCase, depthwise, shuffled
from joined_cases import (
    KINDS,
    KINDS_OF_PRODUCTS,
    GroupNormCase,
    JoinedCase,
    NormCase,
    attention_case,
    case,
    conv_case,
    group_norm_case,
    norm_case,
)
from kernel_hosts import host_of, require_support
from kernel_runs import compile_all, launch, normal, upload
from region_drafts import NUMPY
from template_checks import concrete_plan, template_of, with_dynamic_dims

import onnxfuse
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Kernel, Launch, Plan

pytestmark = pytest.mark.gpu

# One row; few rows; rows that no vector divides; one tile and more; many tiles with a short and a long k.
SIZES = [((1,), 1, 1), ((1,), 1536, 1024), ((2, 8), 768, 3072), ((5,), 3, 7), ((3, 11), 96, 200), ((7, 43), 257, 129),
         ((4, 250), 1001, 1003), ((2, 64), 3072, 768), ((8, 512), 768, 768)]  # fmt: skip


# Convolutions by wgmma, in clusters too, by mma.sync, pointwise, depthwise, grouped, and of a stem; transposed ones by
# mma.sync, of one product, depthwise, and by wgmma.
CONVS = [
    ConvCase(2, 64, 128, (14, 13), (3, 3), (), (1,) * 4), ConvCase(1, 512, 64, (7, 7), (3, 3), (), (1,) * 4),
    ConvCase(2, 30, 34, (9, 9), (3, 3), (2, 1), (0, 1, 2, 1)), ConvCase(2, 96, 200, (7, 9), (1, 1)),
    ConvCase(2, 32, 32, (9, 7), (3, 3), (), (1,) * 4, group=32), ConvCase(1, 64, 64, (9, 7), (3, 3), group=4),
    ConvCase(2, 3, 32, (30, 30), (3, 3), (2, 2), (1,) * 4, x_nchw=True),
    ConvCase(2, 64, 72, (40,), (3,), extra=("bias", "residual")),
    ConvCase(1, 16, 24, (6, 7), (3, 3), dtype="float32"), ConvCase(1, 64, 40, (6, 7), (3, 3), dtype="bfloat16"),
    ConvTransposeCase(2, 64, 128, (7, 9), (4, 4), (2, 2), SAME), shuffled(1, 24, 7, (7, 9), (2, 2)),
    depthwise(2, 40, (7, 9), (4, 4), (2, 2), SAME), shuffled(2, 64, 64, (8, 8), (2, 2), extra=("bias", "residual")),
]  # fmt: skip


# Rows of a warp, of a block, of a cluster, in shared memory, and read twice; a grid that is persistent.
NORMS = [
    NormCase("layer_norm", (2, 7), 40), NormCase("rms_norm", (3, 11), 768), NormCase("layer_norm", (2, 150), 1152),
    NormCase("add_layer_norm", (4, 33), 768, has_sum=True), NormCase("add_rms_norm", (3, 50), 4096, has_sum=True),
    NormCase("rms_norm", (2, 80), 8192, "bfloat16", scale_dtype="float32"), NormCase("layer_norm", (2, 3), 20480),
    NormCase("add_rms_norm", (2, 600), 16, "float32"), NormCase("layer_norm", (300,), 65536),
    NormCase("layer_norm", (64, 256), 256, "bfloat16"),
]  # fmt: skip

# By wgmma and mma.sync, in clusters and splits, in every layout of the result, with heads of odd sizes.
ATTENTIONS = [
    Case(batch=2, queries=200, keys=300), Case(queries=300, keys=300, size=128, value_size=128, out_layout="bshd"),
    Case(heads=8, kv_heads=8, queries=1, keys=2048),
    Case(batch=2, heads=4, kv_heads=2, queries=70, keys=33, out_layout="seq_first"),
    Case(queries=513, keys=513, size=256, value_size=256, dtype="bfloat16", operator=True, causal=True),
    Case(batch=3, queries=37, keys=50, size=24, value_size=24, dtype="float32", out_layout="bhsd"),
    Case(queries=20, keys=33, size=12, value_size=12, out_layout="rows"),
    Case(batch=2, heads=6, kv_heads=3, queries=3, keys=1500, size=80, value_size=80, out_layout="seq_first_rows"),
    Case(batch=2, queries=200, keys=300, dtype="float32", scale=0.125),
]  # fmt: skip

GROUP_NORMS = [
    GroupNormCase((2, 31, 33, 80), 8), GroupNormCase((1, 128, 128, 64), 8),
    GroupNormCase((2, 9, 7, 96), 4, dtype="bfloat16"),
    GroupNormCase((2, 64, 33, 36), 8, "nchw"), GroupNormCase((1, 320, 16, 24), 32, "nchw", "float32"),
]  # fmt: skip


def cases() -> Iterator[JoinedCase]:
    for i, kind in enumerate((*KINDS, "modulated")):
        yield from (attention_case(kind, each) for each in ATTENTIONS[i % 2 :: 2])
        yield attention_case("quantized", ATTENTIONS[i])
        yield from (group_norm_case(kind, each) for each in GROUP_NORMS[i % 2 :: 2])
        yield from (norm_case(kind, norm) for norm in NORMS[i % 2 :: 2] if norm.n < 65536 or kind == "modulated")
    for i, kind in enumerate(KINDS_OF_PRODUCTS):  # of all sizes and convolutions, every second one
        for lead, n, k in SIZES[i % 2 :: 2]:
            yield case(kind, lead=lead, n=n if kind != "modulated" else -(-n // 4) * 4, k=k)
        yield case(kind, lead=(3, 50), n=264, k=136, dtype="bfloat16", layout="nk")
        yield case(kind, lead=(2, 33), n=72, k=96, dtype="float32")
        yield case(kind, lead=(3, 70), n=136, k=200, operands=("x", "w", "up"))
        yield case(kind, lead=(2, 40), n=200, k=128, operands=("x", "w", "bias", "residual"))
        yield from (conv_case(kind, conv) for conv in CONVS[i % 2 :: 2] if kind != "modulated" or conv.m % 4 == 0)


@functools.cache
def plans(each: JoinedCase, aligned: bool) -> list[Plan]:
    made, gpu = each.made(), cuda_driver.gpu(0)
    node, specs = made.node(), made.specs(aligned)
    require_support(host_of(node.fusion), node, [spec.dtype for spec in specs], gpu)
    return host_of(node.fusion).candidates(node, specs, gpu)


def kernels_of(plan: Plan) -> Iterator[Kernel]:
    yield from (step.kernel for step in plan.steps if isinstance(step, Launch))


def run(plan: Plan, arrays: list[np.ndarray], aligned: bool) -> list[np.ndarray]:
    """Launch a plan; return its outputs, behind which nothing is written."""
    read = [upload(array, aligned) for array in arrays]
    written = [upload(np.ones(spec.shape, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    launch(plan, read, written)
    for buffer in written:
        whole = buffer.base if buffer.base is not None else buffer
        start = buffer.data.ptr - whole.data.ptr
        assert bool((whole[start + buffer.nbytes :] == 0xFF).all()), "written beyond the end"
    return [b.get().view(NUMPY[s.dtype]).reshape(s.shape) for b, s in zip(written, plan.outputs, strict=True)]


ALIGNED = [pytest.param(each, True, id=f"{each}") for each in cases()]
MISALIGNED = [pytest.param(each, False, id=f"{each} misaligned") for each in [*cases()][::4]]


@pytest.mark.parametrize(("each", "aligned"), [*ALIGNED, *MISALIGNED])
def test_every_plan(each: JoinedCase, aligned: bool) -> None:
    made, found = each.made(), plans(each, aligned)
    compile_all((kernel for plan in found for kernel in kernels_of(plan)), cuda_driver.gpu(0))
    for plan in found:
        last = list(kernels_of(plan))[-1]
        on_matrix_units = any("mma" in kernel.source or "hopper" in kernel.source for kernel in kernels_of(plan))
        tf32 = each.dtype == "float32" and on_matrix_units
        is_library = len(list(kernels_of(plan))) < len(plan.steps)
        made.check(run(plan, made.arrays, aligned), last.source == "region", tf32=tf32 or is_library)


@pytest.mark.parametrize("kind", KINDS_OF_PRODUCTS[:-1])
def test_dynamic_rows(kind: str) -> None:
    """The kernels of a template run at other sizes than those that it was made for."""
    made = case(kind, lead=(5, 13), n=72, k=96).made()
    template = template_of(made.node(), with_dynamic_dims(made.specs(), 5, 13), cuda_driver.gpu(0))
    for lead in ((1, 1), (2, 3), (5, 13), (4, 77), (16, 130)):
        there = case(kind, lead=lead, n=72, k=96).made()
        variant = template.chosen(lead)
        assert variant is not None
        plan = concrete_plan(template, variant, lead)
        there.check(run(plan, there.arrays, True), list(kernels_of(plan))[-1].source == "region")


MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float16[rows, 96] x, float16[rows, 72] added, float16[rows, 1] scale) => (float16[rows, 72] z, float16[rows, 72] y)
{ a = MatMul (x, w) b = Add (a, bias) y = Relu (b) c = Tanh (y) d = Mul (c, added) z = Mul (d, scale) }"""


def test_a_session_runs_a_joined_node_as_one_kernel() -> None:
    """Rows are dynamic, and the product's own result is an output too."""
    drawn = {"w": normal((96, 72), "float16", 1, 0.1), "bias": normal((72,), "float16", 2)}
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in drawn.items())
    fused, report = onnxfuse.optimize(model, verify=False)
    assert report.counts == {"gemm_bias_activation": 1} and len(fused.graph.node) == 1
    ort.preload_dlls()
    providers = [("CUDAExecutionProvider", {})]
    session = onnxfuse.InferenceSession(fused.SerializeToString(), providers=providers, tune="never")
    assert {each.how for each in onnxfuse.explain_session(session)} == {"kernel"}
    for rows in (1, 7, 64, 1000):
        shapes = {"x": (rows, 96), "added": (rows, 72), "scale": (rows, 1)}
        feeds = {name: normal(shape, "float16", 3 + i) for i, (name, shape) in enumerate(shapes.items())}
        wide = {name: value.astype(np.float64) for name, value in {**drawn, **feeds}.items()}
        y = np.maximum(wide["x"] @ wide["w"] + wide["bias"], 0)
        z = np.tanh(y) * wide["added"] * wide["scale"]
        for found, expected in zip(session.run(["z", "y"], feeds), (z, y), strict=True):
            np.testing.assert_allclose(found.astype(np.float64), expected, rtol=1.1e-3, atol=4e-5)
