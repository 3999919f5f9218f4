"""Every activation that a pattern names has a kernel, and every activation of the table a CUDA function."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from kernel_hosts import host_of
from onnx import TensorProto, numpy_helper
from runtimes import assert_close, evaluate
from spellings import Spelling, build

import onnxfuse.kernels
from onnxfuse.activations import ACTIVATIONS, PRELU, Activation
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.documentation import variants
from onnxfuse.kernels.gemm.cublaslt import CUBLASLT_ACTIVATIONS
from onnxfuse.patterns._activations import SPELLINGS
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import Device, FusedNode

GPU = Device("a GPU", arch=90, multiprocessors=132, shared_per_block=227 << 10)
FUNCTION = re.compile(r"^__device__ __forceinline__ float (\w+)\(float x, float(?: alpha)?, float(?: beta)?\)", re.M)

WITH_KERNEL = [f for f in builtin() if "activation" in variants(f) and find_host(f.name) is not None]


def fused(fusion: Fusion, activation: str) -> FusedNode:
    operands = tuple(c.name for c in fusion.captures if c.kind in ("tensor", "weight"))
    attributes = {"activation": activation, "layout": "nhwc", "block_size": 32}
    return FusedNode(fusion.name, "n", operands, attributes, ("float16",))


def dtypes(node: FusedNode) -> list[str]:
    packed = ("w", "up", "zero_points", "up_zero_points") if "nbits" in node.fusion else ()
    return ["uint8" if name in packed else "float16" for name in node.operands]


def test_which_fusions_have_activations() -> None:
    names = {f.name for f in WITH_KERNEL}
    assert names == {
        "activation", "batch_norm_activation", "bias_activation", "conv_bias_activation",
        "conv_transpose_bias_activation", "gated_activation", "gated_gemm", "gated_matmul_nbits",
        "gemm_bias_activation", "group_norm",
    }  # fmt: skip


@pytest.mark.parametrize("fusion", WITH_KERNEL, ids=lambda fusion: fusion.name)
def test_a_kernel_knows_every_activation_of_its_pattern(fusion: Fusion) -> None:
    """A node whose activation no kernel knows runs its body, with nothing but a line of the log to show it."""
    host = host_of(fusion.name)
    for activation in variants(fusion)["activation"]:
        node = fused(fusion, activation)
        assert host.supports(node, dtypes(node), GPU) is None
        assert activation in {*ACTIVATIONS, PRELU}
    unknown = fused(fusion, "cube")
    refusal = host.supports(unknown, dtypes(unknown), GPU)
    assert refusal is not None and "activation is cube" in refusal


def test_patterns_spell_every_activation() -> None:
    assert_all_named({"none", *SPELLINGS}, "SPELLINGS in patterns/_activations.py")


def test_activations_cuh_defines_every_activation() -> None:
    source = Path(onnxfuse.kernels.__path__[0], "elementwise", "activations.cuh").read_text(encoding="utf-8")
    assert_all_named(set(FUNCTION.findall(source)), "kernels/elementwise/activations.cuh")


def assert_all_named(found: set[str], where: str) -> None:
    """Fail unless a file has exactly the activations of the table."""
    assert not (lacking := set(ACTIVATIONS) - found), f"{where} lacks {lacking}"
    assert not (more := found - set(ACTIVATIONS)), f"{where} has {more}, and the table in onnxfuse/activations.py not"


def test_epilogues_of_cublaslt_are_activations() -> None:
    assert set(CUBLASLT_ACTIVATIONS) <= set(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=lambda activation: activation.name)
def test_formulas_keep_shapes_and_nan(activation: Activation) -> None:
    x = np.array([[-2.0, -0.25, 0.0, 0.25, 2.0, np.nan]])
    with np.errstate(invalid="ignore"):
        y = activation.formula(x, activation.alpha, activation.beta)
    assert y.shape == x.shape
    assert np.isnan(y[0, -1]) and np.isfinite(y[0, :-1]).all()
    assert {"alpha", "beta"} >= set(activation.parameters)


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_formula_is_what_the_spelling_computes(name: str) -> None:
    fusion = next(f for f in builtin() if f.name == "bias_activation")
    unfused = build(Spelling(fusion, name, choices={"activation": name}))
    (bias,) = (numpy_helper.to_array(tensor) for tensor in unfused.model.graph.initializer if tensor.name == "bias")
    numbers = {"alpha": 0.0, "beta": 0.0, **unfused.variant.values}
    y = ACTIVATIONS[name].formula(unfused.inputs["x"] + bias, numbers["alpha"], numbers["beta"])
    assert_close(evaluate(unfused.model, unfused.inputs), [y.astype(np.float32)], TensorProto.FLOAT)
