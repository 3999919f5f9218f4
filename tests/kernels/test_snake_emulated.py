"""The kernel of examples/package on a CPU: compiled, and run by the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from architectures import H200, T4, check_compiles
from kernel_hosts import host_of
from outside import install_example, site
from sampling import by_parts, part_of, sampled
from snake_cases import TOLERANCE, Snake, cases, check
from template_checks import concrete_plan, template_of

from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorSpec
from onnxfuse.testing.emulated_launches import emulate

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("example")


@pytest.fixture
def example(site: Path) -> None:
    install_example(site)


def plan(case: Snake, device: Device, aligned: bool = True) -> Plan:
    host, specs = host_of("snake"), case.specs(aligned)
    assert host.supports(case.node, [spec.dtype for spec in specs], device) is None
    (found,) = host.candidates(case.node, specs, device)
    return found


def kernels(device: Device) -> Iterator[Kernel]:
    """Yield kernels with the widest vectors and with narrow ones."""
    for shape in (8, 512, 8192), (2, 7, 33):
        for dtype in TOLERANCE:
            for form, layout in ("product", "nchw"), ("quotient", "nhwc"):
                for step in plan(Snake(shape, dtype, form, layout), device).steps:
                    assert isinstance(step, Launch)
                    yield step.kernel


@by_parts(4)
@pytest.mark.parametrize("device", [T4, H200], ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    """The tests of the package itself compile it for every architecture."""
    for kernel in part_of(list(kernels(device)), part, 4):
        check_compiles(kernel, device)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", [(-1, 24, -2), (-1, 7, 33)], ids=["length", "batch"])
def test_kernels_for_sizes_that_are_not_known(shape: tuple[int, int, int], layout: str, tmp_path: Path) -> None:
    n, channels, length = shape
    x = (n, channels, length) if layout == "nchw" else (n, length, channels)
    specs = [TensorSpec(each, "float16") for each in (x, (1, channels, 1), (1, channels, 1))]
    template = template_of(Snake(shape, layout=layout).node, specs, H200)
    for drawn in (3, 50), (1, 1), (2, 1023):
        sizes = drawn[: sum(dim < 0 for dim in shape)]
        known = [sizes[-1 - dim] if dim < 0 else dim for dim in shape]
        case, variant = Snake((known[0], known[1], known[2]), layout=layout), template.chosen(sizes)
        assert variant
        for step in variant.plan.steps:
            assert isinstance(step, Launch)
            check_compiles(step.kernel, H200)
        arrays = case.arrays()
        (y,) = emulate(concrete_plan(template, variant, sizes), list(arrays.values()), tmp_path, True)
        check(case, arrays, y)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled(cases(), 9), ids=str)
def test_the_emulated_kernel(case: Snake, aligned: bool, tmp_path: Path) -> None:
    arrays = case.arrays()
    (y,) = emulate(plan(case, T4 if aligned else H200, aligned), list(arrays.values()), tmp_path, aligned)
    check(case, arrays, y)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_angles_of_thousands_of_periods(dtype: str, tmp_path: Path) -> None:
    case = Snake((2, 8, 100), dtype)
    arrays = case.arrays(factor=4096.0)
    (y,) = emulate(plan(case, H200), list(arrays.values()), tmp_path)
    check(case, arrays, y)


def test_whole_vectors_are_read_where_rows_are_odd() -> None:
    wide = Snake((64, 32, 1023), "float16")
    assert plan(wide, T4).steps[0].kernel.defines["WIDTH"] == 8


def test_shapes_that_do_not_fit_are_an_error() -> None:
    case = Snake((2, 8, 16))
    x, alpha, gain = case.specs()
    with pytest.raises(ValueError, match=r"snake: gain has shape \[1, 9, 1\]; required 8 elements"):
        host_of("snake").candidates(case.node, [x, alpha, TensorSpec((1, 9, 1), gain.dtype)], H200)


def test_dtypes_without_a_kernel_are_refused() -> None:
    case = Snake((2, 8, 16), "float64")
    assert "x is float64" in str(host_of("snake").supports(case.node, ["float64"] * 3, H200))
