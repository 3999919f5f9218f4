"""Plan templates of regions: few kernels for all sizes, and what the host refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import H200
from kernel_hosts import host_of
from region_cases import all_cases, numbers
from region_drafts import RegionProgram, check, made
from region_emulation import compile_all, results
from template_checks import check_template, concrete_plan, template_of

from onnxfuse.algebra.sizes import symbol
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.runtime.plan import FusedNode, TensorSpec

CASES = all_cases()
DYNAMIC = {  # cases by name: the dims that are dynamic, and the most kernels of their template
    "windows of Swin, dynamic": ((2,), 2),
    "modulate of DiT, dynamic": ((2, 10), 2),
    "a loss, dynamic": ((6, 90), 14),
    "rotary embedding": ((5,), 2),
    "Softmax of 1000, dynamic": ((4, 1000), 10),
    "Softmax of two long rows, dynamic": ((2, 20011), 10),
    "layer norm of all, dynamic": ((33000,), 12),
    "a clamp of many, dynamic": ((33000,), 9),
    "a masked softmax, dynamic": ((2, 3, 5, 40), 6),
    "a chain of reductions, dynamic": ((2, 3, 40), 6),
    "bias of windows of 49 (5,)": ((5,), 2),
    "patches (5,)": ((5,), 2),
    "mean pooling (3, 40)": ((3, 40), 14),
    "Reshape (4,)": ((4,), 2),
    "Concat (4,)": ((4,), 2),
    "pixels out of channels": ((5, 14), 3),
    "rows of 14 padded to a multiple of 4": ((14,), 4),
    "norm of class tokens and positions, dynamic": ((2,), 1),
}

LONG = {  # more sizes of cases by name, at which reductions are stored
    "Softmax of two long rows, dynamic": ([2, 70001], [1, 90000]),
    "layer norm of all, dynamic": ([65536], [90001]),
    "a clamp of many, dynamic": ([40000],),
}


def with_dynamic(program: RegionProgram, dynamic: Sequence[int]) -> list[TensorSpec]:
    return [
        TensorSpec(tuple(-1 - dynamic.index(dim) if dim in dynamic else dim for dim in each.shape), each.dtype)
        for each in program.specs()
    ]


@pytest.mark.parametrize("name", DYNAMIC)
def test_few_kernels_take_all_sizes(name: str) -> None:
    dynamic, most = DYNAMIC[name]
    program = CASES[name]
    check_template(program.node(), with_dynamic(program, dynamic), H200, max_kernels=most, tries=20, own_tilings=True)


def of_sizes(name: str, sizes: Sequence[int]) -> RegionProgram:
    """Return a case with other operands, whose dynamic dims have these sizes."""
    dynamic, _ = DYNAMIC[name]
    program = CASES[name]
    own = dict(zip(dynamic, sizes, strict=True))
    arrays = {
        key: numbers([own.get(dim, dim) for dim in each.shape], each.dtype.name, i, *((0, 8) if i else (-12, 12)))
        for i, (key, each) in enumerate(program.operands.items())
    }
    return RegionProgram(program.ops, program.outputs, program.dtypes, arrays)


def test_plans_of_templates_at_other_sizes(tmp_path: Path) -> None:
    from onnxfuse.testing.emulated_launches import emulate

    wanted = []
    for name, (dynamic, _) in DYNAMIC.items():
        program = CASES[name]
        template = template_of(program.node(), with_dynamic(program, dynamic), H200)
        for sizes in ([1, 1], [3, 7], [2, 40], [17, 16], *LONG.get(name, ())):
            at = [*sizes, *sizes][: len(dynamic)]
            variant = template.chosen(at)
            assert variant, f"{name} has no variant for {at}"
            wanted.append((of_sizes(name, at), concrete_plan(template, variant, at)))
    compiled = compile_all([plan for _, plan in wanted], tmp_path)
    for program, plan in wanted:
        arrays = list(program.operands.values())
        found = emulate(plan, arrays, tmp_path, True, lambda kernel, _: compiled[repr(kernel)])
        check(program, found, program.expected())


def test_a_divisor_of_a_multiple_of_a_dim() -> None:
    """That 8 divides 2 * n says that 4 divides n."""
    sizes, n = Sizes({"n": 4}), symbol("n")
    sizes.note_divisor(n * 2, 8)
    assert sizes.divisor(n) == 4 and sizes.divisor(n * 6) == 24
    sizes.note_divisor(n * 12, 8)
    assert sizes.divisor(n) == 4


def parts_and_a_sum(p: RegionProgram, x: str) -> list[str]:
    logarithm = p.op("Log", x)
    first, second = p.ops_of("Split", logarithm, count=2, axis=1, sizes=[2, 6])
    return [p.op("Softplus", x), first, p.op("ReduceL1", second, axes=[0, 2], keepdims=0)]


def transposed_padding(p: RegionProgram, x: str) -> list[str]:
    padded = p.op("Pad", p.op("Unsqueeze", x, axes=[1]), pads=[0, 0, 0, 0, 2, 0, 0, 0, 0, 0], mode="reflect")
    turned = p.op("Transpose", padded, perm=[4, 3, 1, 0, 2])
    squeezed = p.op("Squeeze", p.op("HardSwish", turned), axes=[2])
    return [squeezed, p.op("ReduceMin", turned, axes=[4], keepdims=1), p.op("Neg", turned)]


def test_vectors_along_a_multiple_of_a_dynamic_dim(tmp_path: Path) -> None:
    """Vectors of 8 lie along 2 * n elements, where n is 4, but not along n."""
    programs = [
        made("", [numbers((12, 8, 4), "float16", low=1)], parts_and_a_sum, (8, 4))[1],
        made("", [numbers((6, 4, 3, 6), "float16")], transposed_padding, (3, 6))[1],
    ]
    for program, found in zip(programs, results(programs, H200, tmp_path), strict=True):
        check(program, found, program.expected())


def test_empty_outputs_are_not_computed() -> None:
    program = RegionProgram()
    program.outputs = [program.op("Neg", program.operand(np.zeros((0, 3), np.float16)))]
    (plan,) = host_of("region").candidates(program.node(), program.specs(), H200)
    assert plan.steps == () and plan.outputs == (TensorSpec((0, 3), "float16"),)


@pytest.mark.parametrize(
    ("op", "attributes", "taken"),
    [
        ("Gather", {"axis": 0}, 3),
        ("GatherElements", {"axis": 0}, 3),
        ("Pad", {"pads": [1, 0, 0, 0], "mode": "edge"}, 0),
    ],
)
def test_nothing_is_taken_of_an_axis_without_elements(op: str, attributes: dict[str, Any], taken: int) -> None:
    """An index would read in front of the tensor; where the output has no elements either, there is none."""
    indices = TensorSpec((3,) if op == "Gather" else (3, 4), "int64")
    more = [indices] if taken else []
    names = ("x0", "x1")[: 1 + len(more)]
    dtypes = {"x0": "float32", "x1": "int64", "v0": "float32"}
    program = json.dumps({"ops": [[op, list(names), ["v0"], attributes]], "outputs": ["v0"], "dtypes": dtypes})
    node = FusedNode("region", "n", names, {"program": program}, ("float32",))
    with pytest.raises(ValueError, match=f"{op} takes elements of an axis that has none"):
        host_of("region").candidates(node, [TensorSpec((0, 4), "float32"), *more], H200)
    none = [dataclasses.replace(each, shape=(*each.shape[:-1], 0)) for each in more]
    (plan,) = host_of("region").candidates(node, [TensorSpec((0, 0), "float32"), *none], H200)
    assert plan.steps == ()


def refusal(ops: list[Any], dtypes: dict[str, str], outputs: Sequence[str] = ("v0",)) -> str | None:
    content = json.dumps({"ops": ops, "outputs": list(outputs), "dtypes": dtypes})
    names = tuple(name for name in dtypes if name.startswith("x"))
    node = FusedNode("region", "n", names, {"program": content}, tuple(dtypes[name] for name in outputs))
    return host_of("region").supports(node, [dtypes[name] for name in names], H200)


REFUSED = {
    "kernels are not generated for the operator Einsum": ([["Einsum", ["x0"], ["v0"], {}]], "float32", "float32"),
    "x0 is complex64": ([["Neg", ["x0"], ["v0"], {}]], "complex64", "complex64"),
    "Sqrt is of int32": ([["Sqrt", ["x0"], ["v0"], {}]], "int32", "int32"),
    "Gelu is of float64": ([["Gelu", ["x0"], ["v0"], {}]], "float64", "float64"),
    "ReduceSum is of bool": ([["ReduceSum", ["x0"], ["v0"], {"axes": [0], "keepdims": 1}]], "bool", "bool"),
    "reads x7, which nothing before it gives": ([["Add", ["x0", "x7"], ["v0"], {}]], "float32", "float32"),
    "program cannot be read": ([["Neg"]], "float32", "float32"),
    # Texts of a program become parts of a CUDA source, so that models could bring code in them.
    "Neg gives 'v1; asm(\"trap;\")'": (
        [["Neg", ["x0"], ['v1; asm("trap;")'], {}], ["Neg", ["x0"], ["v0"], {}]],
        "float32",
        "float32",
    ),
    "BitShift has the direction left(1); }": (
        [["BitShift", ["x0", "x0"], ["v0"], {"direction": "left(1); }"}]],
        "uint8",
        "uint8",
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_refused_and_why(sentence: str) -> None:
    ops, source, target = REFUSED[sentence]
    assert sentence in str(refusal(ops, {"x0": source, "v0": target}))


def test_shapes_that_do_not_fit_are_an_error() -> None:
    program = RegionProgram()
    names = [program.operand(np.zeros(shape, np.float32)) for shape in ((3, 4), (3, 5))]
    program.outputs = [program.op("Add", *names)]
    with pytest.raises(ValueError, match="region: dims of 4 and 5 elements cannot be broadcast"):
        host_of("region").candidates(program.node(), program.specs(), H200)
