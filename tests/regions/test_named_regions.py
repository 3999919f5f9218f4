"""Test the regions that benchmarks/regions.py times: each graph becomes regions alone, which compute what it does."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from region_models import assert_programs_agree, optimized, regions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from named_regions import NamedRegion, draw, named_regions, of_zeros
from region_problems import Problem, elements_read, generated_problems, named_problem

from onnxfuse import optimize
from onnxfuse.kernels.region.host import candidates
from onnxfuse.kernels.region.program import parse
from onnxfuse.runtime.gpu_kinds import named_gpus
from onnxfuse.runtime.plan import FusedNode, Launch, TensorSpec

NAMED = named_regions()
(H200,) = named_gpus(["sm_90"], [], [])
MAX_CODE_BYTES = 28_000  # of a kernel; NVRTC 13.5 makes up to 20,880


def test_there_are_enough_of_many_networks() -> None:
    assert len(NAMED) >= 30
    assert len({each.model for each in NAMED.values()}) >= 30


@pytest.mark.parametrize("name", NAMED)
def test_a_graph_becomes_regions_alone(name: str) -> None:
    """At the sizes that are timed; drawing values for these would take longer than all else."""
    region = NAMED[name]
    fused, _ = optimize(region.proto(), verify=False)
    assert len(regions(fused)) == len(fused.graph.node) == region.kernels


@pytest.mark.parametrize("name", NAMED)
def test_regions_compute_what_the_graph_does(name: str) -> None:
    model = NAMED[name].smaller().proto()
    fused, _ = optimized(model)
    assert assert_programs_agree(fused, draw(model)) == len(fused.graph.node)


@pytest.mark.parametrize("name", ["alibi", "swin patch merging", "dit gate"])
def test_a_problem_has_a_plan_for_each_part(name: str) -> None:
    problem = named_problem(NAMED[name].smaller())
    shapes = problem.tensors()
    for part in problem.parts:
        (plan,) = candidates(part.node, [TensorSpec(shapes[t], problem.dtype(t)) for t in part.inputs], H200)
        assert [(spec.shape, spec.dtype) for spec in plan.outputs] == [
            (shapes[t], problem.dtype(t)) for t in part.outputs
        ]
    assert {t for part in problem.parts for t in part.outputs} >= set(problem.outputs)


def test_each_has_little_machine_code_and_fits_into_registers() -> None:
    """At the sizes that are timed, for an H200; benchmarks/host_seconds.py times how long such kernels compile."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")
    from onnxfuse.runtime.nvrtc import compile_cubin

    for name, region in NAMED.items():
        for launch in launches(named_problem(region, of_zeros)):
            compiled = compile_cubin(launch.kernel, H200.arch)
            assert compiled.spill_stores == 0, name
            assert len(compiled.code) < MAX_CODE_BYTES, name


def launches(problem: Problem) -> list[Launch]:
    shapes, found = problem.tensors(), []
    for part in problem.parts:
        (plan,) = candidates(part.node, [TensorSpec(shapes[t], problem.dtype(t)) for t in part.inputs], H200)
        found += [step for step in plan.steps if isinstance(step, Launch)]
    return found


def test_bytes_are_those_that_are_needed() -> None:
    problem = named_problem(NAMED["dit gate"].smaller())
    x, c = 256 * 1152, 1152  # of 6912 elements of c the gate alone
    assert problem.moved() == 2 * (x + x + c + x)


def test_elements_of_a_gather_and_of_a_reduction() -> None:
    ops = (
        '["Gather",["x0","x1"],["v0"],{"axis":0}],["ReduceSum",["v0"],["v1"],{"axes":[1],"keepdims":0}],'
        '["Slice",["v1"],["v2"],{"axes":[0],"starts":[0],"ends":[2],"steps":[1]}]'
    )
    dtypes = '{"x0":"float16","x1":"int64","v0":"float16","v1":"float16","v2":"float16"}'
    text = f'{{"ops":[{ops}],"outputs":["v2"],"dtypes":{dtypes}}}'
    program = parse(FusedNode("region", "n", ("x0", "x1"), {"program": text}, ("float16",)))
    shapes = {"x0": (1000, 64), "x1": (8,), "v0": (8, 64), "v1": (8,), "v2": (2,)}
    assert elements_read(program, shapes) == {"x0": 2 * 64, "x1": 8}


def test_programs_at_random_are_large_and_the_same_in_every_run() -> None:
    first, again = (list(generated_problems(12, 1 << 14, 1 << 16)) for _ in range(2))
    assert [each.name for each in first] == [each.name for each in again]
    for one, other in zip(first, again, strict=True):
        assert one.parts == other.parts
        assert all(np.array_equal(a, b) for a, b in zip(one.operands.values(), other.operands.values(), strict=True))
        assert next(iter(one.operands.values())).size >= 1 << 14
        assert all(part.node.output_dtypes for part in one.parts)


def test_a_text_of_another_operator_is_refused() -> None:
    nodes = "a = Exp (x) b = Mul (a, a) y = MatMul (b, w)"
    text = NamedRegion("x", "a product", "float[B,8] x, float[8,8] w", "y", nodes, 2)
    with pytest.raises(ValueError, match="x becomes 1 regions and"):
        named_problem(text)


def test_constants_of_a_text_are_initializers() -> None:
    model = NAMED["soft capping"].proto()
    assert {t.name: onnx.numpy_helper.to_array(t).item() for t in model.graph.initializer} == {
        "cap": 50.0,
        "least": -65504.0,
    }
