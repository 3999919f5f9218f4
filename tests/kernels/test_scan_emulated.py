"""Scans on a CPU: their generated kernels, emulated, against onnxruntime's Loops and against float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from architectures import H200
from mlstm_text import TEXT
from scan_cases import CASES, GATED_DELTA, SELECTIVE, SIZES, ScanCase, expected, fused, specs_of

from onnxfuse.kernels.scan.host import candidates, supports
from onnxfuse.runtime.expressions import Expressions
from onnxfuse.runtime.plan import FusedNode, Launch, TensorSpec
from onnxfuse.runtime.symint import Trace
from onnxfuse.runtime.template import concrete, with_sizes
from onnxfuse.testing.emulated_launches import emulate

OF_STATES = {"n": SIZES["n"]}  # a size that has to be known


def check(
    case: ScanCase, sizes: Mapping[str, int], folder: Path, plans: slice = slice(1), rounding: float = 2e-6
) -> None:
    """Compare plans of a case with its Loop in float64, or in integers."""
    arrays = case.arrays(sizes)
    call = fused(case.model({"n": sizes["n"]}))
    exact = "int64" if case.dtype == "int64" else "double"
    wanted = expected(case.model(dtype=exact), {name: each.astype(exact) for name, each in arrays.items()})
    inputs = [arrays[name] for name in call.proto.input]
    assert supports(call.node, [each.dtype.name for each in inputs], H200) is None
    for plan in candidates(call.node, specs_of(call, arrays), H200)[plans]:
        for name, own in zip(call.proto.output, emulate(plan, inputs, folder), strict=True):
            reference = wanted[name]
            if sizes["t"] and all(sizes.values()):
                assert own.shape == reference.shape, name
                scale = np.abs(reference).max(initial=1)
                np.testing.assert_allclose(own, reference, rounding, rounding * scale, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, tmp_path: Path) -> None:
    check(CASES[name], SIZES, tmp_path)


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 8, 9, 16, 33])
def test_numbers_of_steps(steps: int, tmp_path: Path) -> None:
    """None, fewer and more than are loaded together, and those that end with them."""
    check(SELECTIVE, {**SIZES, "t": steps}, tmp_path)


@pytest.mark.parametrize("states", [1, 2, 3, 16, 33, 64, 100, 256])
def test_sizes_of_states(states: int, tmp_path: Path) -> None:
    """By all numbers of lanes that can share a state."""
    check(SELECTIVE, {**SIZES, "t": 9, "n": states}, tmp_path, slice(None))


@pytest.mark.parametrize("name", ["b", "c", "n"])
def test_a_dim_of_one_element(name: str, tmp_path: Path) -> None:
    for case in CASES.values():
        if not (case.before and name == "n"):  # what does not grow is computed before the scan
            check(case, {**SIZES, name: 1}, tmp_path)


def test_states_that_are_matrices(tmp_path: Path) -> None:
    check(GATED_DELTA, {**SIZES, "n": 48, "v": 20, "t": 6}, tmp_path, slice(None))


def test_an_mlstm(tmp_path: Path) -> None:
    """All plans for a program that stands for chunks, whose states begin with numbers, and where gates are large."""
    model, random = onnx.parser.parse_model(TEXT), np.random.default_rng(0)
    call = fused(model)
    shapes = {"q": (3, 4, 2, 3), "k": (3, 4, 2, 3), "v": (3, 4, 2, 5), "i": (3, 4, 2), "f": (3, 4, 2)}
    for factor in 1, 4:
        arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        arrays |= {name: factor * arrays[name] for name in "if"}
        numbers = [arrays.get(name, np.zeros((), np.float32)) for name in call.proto.input]
        specs = [TensorSpec(each.shape, each.dtype.name) for each in numbers]
        assert supports(call.node, [each.dtype.name for each in numbers], H200) is None
        for plan in candidates(call.node, specs, H200):
            (y,) = emulate(plan, numbers, tmp_path)
            np.testing.assert_allclose(y, expected(model, arrays)["y"], 2e-5, 2e-5)


def test_no_steps_give_the_first_states(tmp_path: Path) -> None:
    arrays, call = SELECTIVE.arrays({**SIZES, "t": 0}), fused(SELECTIVE.model(OF_STATES))
    plan = candidates(call.node, specs_of(call, arrays), H200)[0]
    found = dict(zip(call.proto.output, emulate(plan, [arrays[n] for n in call.proto.input], tmp_path), strict=True))
    np.testing.assert_array_equal(found["last_s0"], arrays["s"])
    assert found["y"].shape == (0, 2, 6)


def test_no_batch_launches_nothing() -> None:
    arrays, call = SELECTIVE.arrays({**SIZES, "b": 0}), fused(SELECTIVE.model(OF_STATES))
    (plan,) = candidates(call.node, specs_of(call, arrays), H200)
    assert not plan.steps and [spec.shape for spec in plan.outputs] == [(0, 6, 5), (11, 0, 6)]


def test_decays_that_underflow(tmp_path: Path) -> None:
    """States of 0, and subnormal ones, stay what float32 makes of them; nothing becomes NaN."""
    arrays, call = SELECTIVE.arrays(SIZES), fused(SELECTIVE.model(OF_STATES))
    arrays["a"][:, ::2] = 0
    arrays["a"][:, 1::2] = 1e-30
    wanted = expected(SELECTIVE.model(), arrays)
    plan = candidates(call.node, specs_of(call, arrays), H200)[0]
    own = emulate(plan, [arrays[name] for name in call.proto.input], tmp_path)
    for name, found in zip(call.proto.output, own, strict=True):
        np.testing.assert_allclose(found, wanted[name], 1e-5, 1e-6)


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2e-3), ("double", 1e-14)])
def test_dtypes(dtype: str, rounding: float, tmp_path: Path) -> None:
    """Of 16 bits, states are float32 between the steps."""
    first = (
        "selective" if dtype == "double" else "selective with operators around it"
    )  # Sigmoid has no kernel for double
    for case in (CASES[name] for name in (first, "gated delta", "elementwise")):
        given = replace(case, dtype=dtype)
        check(given, SIZES, tmp_path, rounding=rounding)


def test_dynamic_dims_are_planned_once(tmp_path: Path) -> None:
    """One plan of a template serves other sizes, too."""
    call, sizes, order = fused(SELECTIVE.model(OF_STATES)), SIZES, ["b", "t"]
    trace = Trace(Expressions())
    shapes = {"s": "b,6,n", "a": "b,6,t,n", "x": "b,6,t,n", "c": "b,t,n"}
    specs = [
        TensorSpec(tuple(-1 - order.index(dim) if dim in order else int(dim) if dim == "6" else sizes[dim] for dim in
                         shapes[name].split(",")), "float32")
        for name in call.proto.input
    ]  # fmt: skip
    plan = candidates(call.node, with_sizes(specs, [trace.size(i, sizes[dim]) for i, dim in enumerate(order)]), H200)[0]
    assert not trace.fixed
    arrays = SELECTIVE.arrays(sizes)
    own = emulate(concrete(plan), [arrays[name] for name in call.proto.input], tmp_path)
    wanted = expected(SELECTIVE.model(), arrays)
    for name, found in zip(call.proto.output, own, strict=True):
        np.testing.assert_allclose(found, wanted[name], 1e-5, 1e-5)


def scanned(**changes: object) -> tuple[FusedNode, list[TensorSpec]]:
    """Return a node whose program was changed, and the specs of its operands."""
    call = fused(SELECTIVE.model(OF_STATES))
    text = str(call.node.attributes["program"])
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, str(new))
    node = FusedNode("scan", "n", call.node.operands, {"program": text}, call.node.output_dtypes)
    return node, specs_of(call, SELECTIVE.arrays(SIZES))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"Mul"', '"Gather"', "kernels are not generated for the operator Gather"),
        ('["v0"]', '["v 0; "]', "required is one new value such as v0"),
        ('"x0","v1"', '"x0","v9"', "nothing gives v9"),
        ('"x1":"float32"', '"x1":"float16"', "x1 is float32; its program says float16"),
        ('"ops"', '"op"', "its program cannot be read: KeyError"),
        ('["v3",[0,2,3]]', '["v2",[0,2,3]]', "the output v2 lacks an axis of its value"),
        ('["v3",[0,2,3]]', '["v3",[0,2,2]]', "the output v3 has an axis twice"),
        ('["v3",[0,2,3]]', '["v3",[2,3]]', "the output v3 is neither a value of each step nor a state"),
        ('"x0":[2,3,1]', '"x0":[2,0,1]', "the state x0 has the axis of the steps"),
        ('"Mul",["x1","x0"],["v0"],{}', '"BitShift",["x1","x0"],["v0"],{"direction":"x();"}', "BitShift is of float32"),
        ('"Mul",["x1","x0"],["v0"],{}', '"Mul",[],["v0"],{}', "Mul reads nothing"),
    ],
)
def test_programs_of_strangers_are_refused(old: str, new: str, message: str) -> None:
    node, specs = scanned(**{old: new})
    assert message in (supports(node, [spec.dtype for spec in specs], H200) or "")


def test_a_number_of_a_step_that_is_stored_for_all_elements(tmp_path: Path) -> None:
    """Only an operator that one lane computes reads x1, but all lanes store it."""
    program = (
        '{"axes":{"x0":[2,1],"x1":[0,2],"x2":[0,2]},"states":[["x0","v0"]],"ops":[["Add",["x0","x2"],["v0"],{}],'
        '["Exp",["x1"],["v1"],{}]],"outputs":[["x1",[0,2,1]],["v1",[0,2]]],'
        '"dtypes":{"x0":"float32","x1":"float32","x2":"float32","v0":"float32","v1":"float32"}}'
    )
    node = FusedNode("scan", "n", ("x0", "x1", "x2"), {"program": program}, ("float32", "float32"))
    drawn = np.random.default_rng(0).standard_normal((2, 11, 3), np.float32)
    inputs = [np.zeros((3, 16), np.float32), drawn[0], drawn[1]]
    for plan in candidates(node, [TensorSpec(each.shape, "float32") for each in inputs], H200):
        wide, exponentials = emulate(plan, inputs, tmp_path)
        np.testing.assert_array_equal(wide, np.broadcast_to(drawn[0][..., None], (11, 3, 16)))
        np.testing.assert_allclose(exponentials, np.exp(drawn[0]), 1e-6)


def test_a_first_state_that_is_broadcast(tmp_path: Path) -> None:
    """As where a trace begins with a number."""
    node, specs = scanned(**{'"x0":[2,3,1]': '"x0":[]'})
    arrays = SELECTIVE.arrays(SIZES)
    wanted = expected(SELECTIVE.model(), {**arrays, "s": np.full_like(arrays["s"], 0.5)})
    for plan in candidates(node, [TensorSpec((), "float32"), *specs[1:]], H200):
        own = emulate(plan, [np.float32(0.5), *(arrays[name] for name in "axc")], tmp_path)
        for found, reference in zip(own, wanted.values(), strict=True):
            np.testing.assert_allclose(found, reference, 1e-5, 1e-5)


@pytest.mark.parametrize("shape", [(2, 6, 11, 4), (2, 5, 11, 5), (2, 6, 11), (1, 6, 11, 5)])
def test_operands_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    node, specs = scanned()
    with pytest.raises(ValueError, match=r"scan: x1 has"):
        candidates(node, [specs[0], TensorSpec(shape, "float32"), *specs[2:]], H200)


def test_more_lanes_than_32_bits_hold() -> None:
    """All states have fewer than 2^31 elements, but 32 lanes share 17 of them, so that there are more lanes."""
    sizes, batch = {**SIZES, "n": 17, "t": 1}, 12_000_000
    call = fused(SELECTIVE.model({"n": 17}))
    specs = [
        TensorSpec((batch, *spec.shape[1:]), spec.dtype) for spec in specs_of(call, SELECTIVE.arrays({**sizes, "b": 1}))
    ]
    (plan,) = candidates(call.node, specs, H200)
    (step,) = plan.steps
    assert isinstance(step, Launch) and "const long long own" in step.kernel.text


@pytest.mark.parametrize(("states", "lanes"), [(1, [1]), (2, [2, 1]), (5, [8, 4]), (16, [16, 8]), (256, [32, 16])])
def test_lanes_that_share_a_state(states: int, lanes: list[int]) -> None:
    sizes = {**SIZES, "n": states}
    call = fused(SELECTIVE.model({"n": states}))
    plans = candidates(call.node, specs_of(call, SELECTIVE.arrays(sizes)), H200)
    texts = [step.kernel.text for plan in plans for step in plan.steps if isinstance(step, Launch)]
    assert [int(text.split("threadIdx.x % ")[1].split(";")[0]) for text in texts] == lanes


def test_backwards(tmp_path: Path) -> None:
    arrays, call = SELECTIVE.arrays(SIZES), fused(SELECTIVE.model(OF_STATES))
    wanted = expected(SELECTIVE.model(dtype="double"), {name: x.astype(np.float64) for name, x in arrays.items()})
    turned = arrays | {name: np.flip(arrays[name], axis).copy() for name, axis in SELECTIVE.slices.values()}
    program = f'{call.node.text("program")[:-1]},"backwards":true}}'
    node = replace(call.node, attributes={**call.node.attributes, "program": program})
    plan = candidates(node, specs_of(call, turned), H200)[0]
    found = dict(zip(call.proto.output, emulate(plan, [turned[n] for n in call.proto.input], tmp_path), strict=True))
    np.testing.assert_allclose(np.flip(found["y"], 0), wanted["y"], 1e-5, 1e-5)
    np.testing.assert_allclose(found["last_s0"], wanted["last_s0"], 1e-5, 1e-5)
