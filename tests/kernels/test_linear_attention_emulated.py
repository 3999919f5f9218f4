"""Linear attention and causal convolutions on a CPU: the launches of their plans against float64, and onnxruntime."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import conv_mma_emulation
import numpy as np
import onnxruntime
import pytest
from architectures import A100, T4
from conv_emulation import ALIGNMENT, placed
from linear_attention_cases import (
    CHUNKS,
    CONVS,
    NUMPY,
    PARTS,
    STEPS,
    TOKENS,
    Arrays,
    Case,
    Conv,
    check,
    check_conv,
)
from onnx import TensorProto, helper
from sampling import sampled

from onnxfuse.kernels.linear_attention import host
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer
from onnxfuse.testing.emulated_launches import emulate, library


def sources(plan: Plan) -> list[str]:
    return [step.kernel.source for step in plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name: str, tmp_path: Path) -> None:
    case = TOKENS[name]
    plan = host.candidates(case.node(), case.specs(), T4)[-1]
    assert sources(plan) == ["linear_attention_tokens"] * bool(case.batch)
    inputs = case.inputs()
    check(case, inputs, plan, *emulate(plan, list(inputs.values()), tmp_path, case.aligned))


@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str, tmp_path: Path) -> None:
    case = PARTS[name]
    plan = next(plan for plan in host.candidates(case.node(), case.specs(), T4) if len(plan.steps) == 3)
    assert sources(plan) == ["linear_attention_tokens", "linear_attention_parts", "linear_attention_tokens"]
    inputs = case.inputs()

    def find(kernel: Kernel, folder: Path) -> Any:
        return library(kernel, folder, *ALIGNMENT)

    check(case, inputs, plan, *emulate(plan, list(inputs.values()), tmp_path, case.aligned, find))


def by_chunks(case: Case, inputs: Arrays, folder: Path) -> list[np.ndarray]:
    """Return the outputs of the last plan that takes chunks."""
    plans = [plan for plan in host.candidates(case.node(), case.specs(), A100) if len(plan.steps) == 2]
    assert {*map(tuple, map(sources, plans))} == {("linear_attention_chunks", "linear_attention_sequence")}
    return on_tensor_cores(plans[-1], inputs, folder)


def on_tensor_cores(plan: Plan, inputs: Arrays, folder: Path, at_once: bool = False) -> list[np.ndarray]:
    """Return the outputs of a plan; copies happen as early as they may if `at_once`, else as late."""
    arrays = {Pointer("input", i): placed(x, True) for i, x in enumerate(inputs.values())}
    for i, size in enumerate(plan.scratch):
        arrays[Pointer("scratch", i)] = placed(np.full(size, 0xFF, np.uint8), True)
    for i, spec in enumerate(plan.outputs):
        arrays[Pointer("output", i)] = placed(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), True)
    for step in plan.steps:
        assert isinstance(step, Launch)
        conv_mma_emulation.launch(step, arrays, A100, at_once, folder)
    return [arrays[Pointer("output", i)] for i in range(len(plan.outputs))]


def in_pairs(names: Iterable[str], ways: tuple[Any, Any]) -> list[tuple[str, Any]]:
    """Return each name with each of two ways; of every second pair, each way has half."""
    return [(name, ways[(i + other) % 2]) for i, name in enumerate(names) for other in (0, 1)]


def is_on_tensor_cores(case: Case) -> bool:
    return case.dtype == "float32" and not case.row_decays and case.value_size % 16 == 0


@pytest.mark.parametrize("name", PARTS)
def test_parts_on_tensor_cores(name: str, tmp_path: Path) -> None:
    case = PARTS[name]
    plans = host.candidates(case.node(), case.specs(), dataclasses.replace(A100, tf32=False))
    assert ("linear_attention_products" in sources(plans[0])) == is_on_tensor_cores(case)
    if is_on_tensor_cores(case):
        inputs = case.inputs()
        check(case, inputs, plans[0], *on_tensor_cores(plans[0], inputs, tmp_path))


@pytest.mark.parametrize(("name", "stages"), sampled(in_pairs({**PARTS, **STEPS}, (1, 2)), 2))
def test_steps_in_tf32(name: str, stages: int, tmp_path: Path) -> None:
    case = {**PARTS, **STEPS}[name]
    device = dataclasses.replace(A100, multiprocessors=1 if stages == 1 else 1000)
    plans = [plan for plan in host.candidates(case.node(), case.specs(), device)
             if sources(plan) == ["linear_attention_tf32"]]  # fmt: skip
    assert bool(plans) == is_on_tensor_cores(case)
    for at_once in (False, True) if plans else ():
        inputs = case.inputs()
        check(case, inputs, plans[0], *on_tensor_cores(plans[0], inputs, tmp_path, at_once))


@pytest.mark.parametrize(("name", "dtype"), sampled(in_pairs(CHUNKS, ("float16", "bfloat16")), 2))
def test_chunks(name: str, dtype: str, tmp_path: Path) -> None:
    case = dataclasses.replace(CHUNKS[name], dtype=dtype)
    inputs = case.inputs()
    check(case, inputs, None, *by_chunks(case, inputs, tmp_path))


def test_a_decay_that_is_nan_reaches_all_later_tokens(tmp_path: Path) -> None:
    case = dataclasses.replace(CHUNKS["two_chunks"], dtype="float16", batch=1)
    inputs = case.inputs()
    inputs["decay"][0, 70] = np.nan
    y, state = by_chunks(case, inputs, tmp_path)
    assert np.isfinite(y[:, :64]).all() and np.isnan(y[:, 70:]).all() and np.isnan(state).all()


@pytest.mark.parametrize("name", CONVS)
def test_causal_conv(name: str, tmp_path: Path) -> None:
    case = CONVS[name]
    (plan,) = host.candidates(case.node(), case.specs(), T4)
    inputs = case.inputs()
    check_conv(case, inputs, *emulate(plan, list(inputs.values()), tmp_path, case.aligned))


def by_the_operator(case: Case | Conv, inputs: dict[str, np.ndarray], domain: str) -> list[np.ndarray]:
    """Return what onnxruntime computes on the CPU."""
    names = ["query", "key", "value", "past_state", "decay", "beta"] if isinstance(case, Case) else list(inputs)
    operator = "LinearAttention" if isinstance(case, Case) else "CausalConvWithState"
    attributes = case.attributes() if isinstance(case, Case) else {"activation": case.activation}
    if isinstance(case, Case) and case.net:
        names, operator = ["query", "key", "value", "", "decay", "beta", "past_state"], "GatedDeltaNet"
        attributes = {name: attributes[name] for name in ("update_rule", "scale")}
    call = helper.make_node(
        operator, [name if name in inputs else "" for name in names], ["y", "state"], domain=domain, **attributes
    )
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "state")]
    opsets = [helper.make_opsetid("", 27), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([call], "g", infos, results), opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, inputs)
    return found


FORMS = {
    name: case
    for name, case in TOKENS.items()
    if case.dtype == "float32" and case.length * case.batch and case.k_heads is None and not case.by_head
}


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("name", FORMS)
def test_the_formula_is_what_the_operator_computes(name: str, domain: str) -> None:
    case = FORMS[name]
    if not domain and (case.net or case.heads < case.state_heads):
        pytest.skip("onnx has no such operator")
    inputs = case.inputs()
    check(case, inputs, None, *by_the_operator(case, inputs, domain))


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("name", ["one_column", "fewer_columns_than_the_state", "long_filter"])
def test_the_formula_is_the_convolution(name: str, domain: str) -> None:
    inputs = CONVS[name].inputs()
    if "bias" not in inputs:
        inputs = {**inputs, "bias": np.zeros(5, np.float32)}
        inputs = {name: inputs[name] for name in ("x", "weight", "bias", "past_state")}
    check_conv(CONVS[name], CONVS[name].inputs(), *by_the_operator(CONVS[name], inputs, domain))
