"""Products with quantized weights: all plans of all cases compile, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, covering
from nbits_cases import CASES, FLOAT8, GATED, PARALLEL, Case
from sampling import by_parts
from template_checks import check_template

from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.kernels.matmul_nbits.host import candidates, supports
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec

ONE_OF_EACH = [Case(4, 64, 512, zeros="packed", bias=True), GATED[0], PARALLEL[1]]
PARTS = 8  # of the kernels of all plans


@by_parts(PARTS)
def test_all_plans_compile(part: int) -> None:
    kernels = [each for case in CASES for aligned in (True, False) for each in kernels_of_case(case, H200, aligned)]
    for kernel in covering(kernels, part, PARTS):
        check_compiles(kernel, H200)


@by_parts(2)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_plans_compile_for_every_gpu(device: Device, part: int) -> None:
    kernels = [kernel for case in ONE_OF_EACH for kernel in kernels_of_case(case, device)]
    for kernel in covering(kernels, part, 2):
        check_compiles(kernel, device)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_few_rows_are_one_launch(case: Case) -> None:
    """All weights of a node are read by one launch; without a zero point kind in common they are not."""
    plans = candidates(case.node(), case.specs(), H200)
    assert len(plans[0].steps) == 1
    assert len(plans[-1].steps) >= 1 + len(case.weights)


@pytest.mark.parametrize(
    ("n", "k", "tile_n", "ahead"), [(8192, 2048, 32, 1), (14336, 4096, 16, 1), (2048, 2048, 16, 1)]
)
def test_a_gate_of_one_row_reads_half_of_its_first_stages_before_x(n: int, k: int, tile_n: int, ahead: int) -> None:
    """Where a block would have two tiles of 16 columns, and a warp one stage of each, it has one tile of 32."""
    case = Case(1, n, k, gate="silu", norm="add_rms_norm")
    (step,) = candidates(case.node(), case.specs(), H200)[0].steps
    assert isinstance(step, Launch)
    assert (step.kernel.defines["TILE_N"], step.kernel.defines["AHEAD"]) == (tile_n, ahead)


@pytest.mark.parametrize(("n", "k", "gate", "rounds"), [(2048, 8192, "", 1), (8192, 2048, "silu", 1),
                                                        (4096, 14336, "", 0), (14336, 4096, "silu", 0)])  # fmt: skip
def test_blocks_whose_first_copies_are_all(n: int, k: int, gate: str, rounds: int) -> None:
    """The blocks of Llama-1B request all of their weights at once; those of Llama-8B have more stages or tiles."""
    case = Case(1, n, k, gate=gate)
    (step,) = candidates(case.node(), case.specs(), H200)[0].steps
    assert isinstance(step, Launch) and step.kernel.defines["ONE_ROUND"] == rounds


@pytest.mark.parametrize("device", [each for each in DEVICES if each is not T4], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("bits", [4, 8])
def test_gates_of_up_to_64_rows_read_weights_as_they_are(bits: int, device: Device) -> None:
    """A gate has twice the weights in shared memory, and some GPUs have 99 KiB of that."""
    for m in (1, 3, 8, 9, 16, 17, 64):
        for zeros in ("none", "packed", "typed"):
            case = Case(m, 2048, 2048, bits=bits, zeros=zeros, gate="silu")
            (step,) = candidates(case.node(), case.specs(), device)[0].steps
            is_tiled = device is H200 and m > 32 and zeros != "typed"
            assert isinstance(step, Launch) and step.kernel.source == ("nbits_hopper" if is_tiled else "nbits_mma")
            assert step.shared <= device.shared_per_block
            if m == 64 and zeros == "typed":
                check_compiles(step.kernel, device, spills=None)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("case", [*ONE_OF_EACH, GATED[-1], Case(1, 96, 512, "float32")], ids=str)
@pytest.mark.usefixtures("no_cublaslt")
def test_a_template_says_what_its_host_says(case: Case, device: Device) -> None:
    x, *others = case.specs()
    check_template(case.node(), [replace(x, shape=(-1, case.k)), *others], device, max_kernels=40)


@pytest.mark.parametrize("m", [1, 4, 20, 100])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_operators_that_joined_compile(m: int, gate: str) -> None:
    """A residual and a scale of columns, which follow the product, are in its epilogue."""
    case = Case(m, 96, 512, zeros="packed", gate=gate)
    program = {
        "ops": [["Add", ["x0", "x1"], ["v0"], {}], ["Mul", ["v0", "x2"], ["v1"], {}]], "outputs": ["v1"],
        "dtypes": dict.fromkeys(("x0", "x1", "x2", "v0", "v1"), "float16"),
    }  # fmt: skip
    node, added = case.node(), [TensorSpec((m, 96), "float16"), TensorSpec((96,), "float16", constant=True)]
    attributes = {**node.attributes, "program": json.dumps(program)}
    joined = replace(node, operands=(*node.operands, "x1", "x2"), attributes=attributes)
    specs = [*case.specs(), *added]
    assert len(check_node(joined, specs, H200)[0].steps) == 1
    if m == 100:
        assert len(check_node(joined, specs, A100)[0].steps) == (3 if gate else 2)


def test_many_rows_without_float_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before sm_80, only cuBLASLt multiplies many rows."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)
    case = Case(100, 64, 512)
    with pytest.raises(ValueError, match="no kernel multiplies 100x512 float16 on T4"):
        candidates(case.node(), case.specs(), T4)


def test_what_no_kernel_runs_is_refused() -> None:
    case = Case(4, 64, 512, zeros="packed")
    node, dtypes = case.node(), [spec.dtype for spec in case.specs()]
    for attributes, given, reason in (
        ({"bits": 5}, dtypes, "have 5 bits"),
        ({"block_size": 8}, dtypes, "blocks have 8 elements"),
        ({}, ["float64", *dtypes[1:]], "x is float64"),
        ({}, [*dtypes[:3], "int8"], "zero points of w are int8"),
        ({"weight_layout": "kn"}, ["float16", "int32", *dtypes[2:]], "w is int32"),
        ({"weight_layout": "kn"}, ["float16", FLOAT8, "float16", FLOAT8], "float8_e4m3fn; required none"),
    ):
        changed = replace(node, attributes={**node.attributes, **attributes})
        assert reason in (supports(changed, given, H200) or "")


def kernels_of_case(case: Case, device: Device, aligned: bool = True) -> list[Kernel]:
    """Return the kernels of this family in all plans of a case, whose outputs have the case's shapes."""
    shapes = [(case.m, n) for name, n in case.weights.items() if name != "up"]
    shapes += [(case.m, case.k)] if case.norm == "add_rms_norm" else []
    plans = plans_of(case.node(), case.specs(aligned), device)
    for plan in plans:
        assert [spec.shape for spec in plan.outputs] == shapes
    return own_kernels(plans)


def check_node(node: FusedNode, specs: list[TensorSpec], device: Device) -> list[Plan]:
    """Compile the kernels of this family in all plans of a node, and return the plans."""
    plans = plans_of(node, specs, device)
    for kernel in own_kernels(plans):
        check_compiles(kernel, device)
    return plans


def plans_of(node: FusedNode, specs: list[TensorSpec], device: Device) -> list[Plan]:
    assert supports(node, [spec.dtype for spec in specs], device) is None
    plans = candidates(node, specs, device)
    assert plans
    return plans


def own_kernels(plans: list[Plan]) -> list[Kernel]:
    kernels = [step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)]
    return [kernel for kernel in kernels if kernel.source.startswith("nbits")]
