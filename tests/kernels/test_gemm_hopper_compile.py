"""The Hopper GEMM without a GPU: its configs compile for sm_90a without spills; what TMA cannot read is copied."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from architectures import H200, check_compiles
from sampling import sampled

from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.problem import Gemm, group
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Launch, Pointer, TensorMap

X, W, BIAS, UP, UP_BIAS, SCALE, RESIDUAL = (Pointer("input", i) for i in range(7))
LINEAR = Gemm(
    4096, 3072, 768, "float16", False, True, X, W, Pointer("output", 0),
    bias=BIAS, column_scale=SCALE, residual=RESIDUAL, activation="gelu",
)  # fmt: skip
GATED = dataclasses.replace(
    LINEAR, dtype="bfloat16", transposed=True, up=UP, up_bias=UP_BIAS, residual=None, activation="silu"
)
PARALLEL = dataclasses.replace(LINEAR, activation="none", column_scale=None, residual=None)
PARALLEL = dataclasses.replace(PARALLEL, grouped=(dataclasses.replace(PARALLEL, bias=None, n=520), PARALLEL))
SLOPES = dataclasses.replace(LINEAR, transposed=True, column_scale=None, slope=SCALE, activation="prelu")
SHIFTED = dataclasses.replace(LINEAR, transposed=True, bias=None, residual=None, column_shift=BIAS)
PRODUCTS = {"linear": LINEAR, "gated": GATED, "parallel": PARALLEL}
OTHERS = {"slopes": SLOPES, "shifted": SHIFTED}
ODD = {f"odd {name}": dataclasses.replace(gemm, n=gemm.n + 1) for name, gemm in PRODUCTS.items()}


def launch(way: Implementation) -> Launch:
    """Return the launch of the product, which may follow one that copies."""
    step = way.steps[-1]
    assert isinstance(step, Launch)
    return step


EVERY_PRODUCT = {**PRODUCTS, **ODD, **OTHERS}


CONFIGS = (*hopper.CONFIGS, *hopper.HALF_CONFIGS)
TF32 = dataclasses.replace(LINEAR, dtype="float32", tf32=True)
TF32_PRODUCTS = {"linear": TF32, "shifted": dataclasses.replace(TF32, residual=None, column_shift=UP),
                 "parallel": dataclasses.replace(PARALLEL, dtype="float32", tf32=True)}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "gemm"),
    sampled(itertools.product(CONFIGS, EVERY_PRODUCT.values()), 7),  # of 8 products, so that each config takes another
    ids=[f"{config.name}-{name}" for config in CONFIGS for name in EVERY_PRODUCT],
)
def test_compiles_without_spills(config: hopper.HopperConfig, gemm: Gemm) -> None:
    if config.split_k > 1:
        gemm = dataclasses.replace(gemm, m=128, n=768 + gemm.n % 8, k=3072)
    if not hopper.fits(gemm, config, H200):
        pytest.skip("not for this product")
    kernel = launch(hopper.implementation(gemm, config, H200)).kernel
    log = check_compiles(kernel, H200, stack=0).log
    assert "C75" not in log, "the assembler serialises wgmma, or ignores setmaxnreg"


@pytest.mark.parametrize(
    ("config", "gemm"),
    sampled(itertools.product(hopper.TF32_CONFIGS, TF32_PRODUCTS.values()), 2),  # each config, and each product
    ids=[f"{config.name}-{name}" for config in hopper.TF32_CONFIGS for name in TF32_PRODUCTS],
)
def test_products_in_tf32_compile(config: hopper.HopperConfig, gemm: Gemm) -> None:
    assert hopper.fits(gemm, config, H200)
    step = launch(hopper.implementation(gemm, config, H200))
    assert step.kernel.source == "gemm_hopper_tf32"
    assert step.shared <= H200.shared_per_block
    log = check_compiles(step.kernel, H200, spills=20).log  # a word with two atoms and a residual
    assert "C75" not in log, "the assembler serialises wgmma, or ignores setmaxnreg"


def test_only_sessions_that_allow_tf32_round_products_to_it() -> None:
    shared = dataclasses.replace(H200, shared=True)
    found = [*hopper.implementations(TF32, H200), *hopper.implementations(TF32, shared)]
    assert {launch(way).kernel.source for way in found} == {"gemm_hopper_tf32"}
    assert all(launch(way).kernel.defines["CONSUMERS"] > 1 for way in found)
    for exact in (dataclasses.replace(TF32, tf32=False), dataclasses.replace(TF32, n=770)):
        assert not hopper.implementations(exact, H200)


@pytest.mark.parametrize("config", hopper.HALF_CONFIGS, ids=lambda config: config.name)
def test_two_blocks_of_half_a_multiprocessor_fit_on_it(config: hopper.HopperConfig) -> None:
    step = launch(hopper.implementation(LINEAR, config, H200))
    assert 2 * (step.shared + 1024) <= H200.shared_per_block + 1024
    assert 2 * step.block[0] * check_compiles(step.kernel, H200, stack=0).registers <= 1 << 16
    assert step.grid[0] <= 2 * H200.multiprocessors


@pytest.mark.parametrize("m", [100, 1080])
def test_only_shared_gpus_have_blocks_of_half_a_multiprocessor(m: int) -> None:
    gemm = dataclasses.replace(LINEAR, m=m, n=768, weights_constant=True)
    shared = hopper.implementations(gemm, dataclasses.replace(H200, shared=True))
    assert all(launch(way).kernel.defines["CONSUMERS"] == 1 for way in shared)
    assert all(launch(way).kernel.defines["CONSUMERS"] > 1 for way in hopper.implementations(gemm, H200))


@pytest.mark.parametrize("n, k", [(769, 768), (3073, 768), (769, 3072)])
def test_products_read_less_of_a_shared_gpu(n: int, k: int) -> None:
    """All runs share the L2 cache, and of blocks of a whole multiprocessor, larger tiles are read less often."""

    def elements_read(m: int, shared: bool) -> int:
        device = dataclasses.replace(H200, shared=shared)
        way = hopper.implementations(dataclasses.replace(LINEAR, m=m, n=n, k=k), device)[0]
        rows, columns = map(int, way.name.split()[1].split("x"))
        return -(-m // rows) * -(-n // columns) * (rows + columns) * k

    alone, shared = ([elements_read(m, each) for m in (200, 600, 1080, 2000, 4096)] for each in (False, True))
    assert all(less <= more for less, more in zip(shared, alone, strict=True))
    assert sum(shared) < 0.95 * sum(alone)


@pytest.mark.parametrize("m", [1, 17, 128, 1000, 4096, 8192])
@pytest.mark.parametrize("gemm", [*PRODUCTS.values(), *ODD.values()], ids=[*PRODUCTS, *ODD])
def test_launches_fit_the_device(gemm: Gemm, m: int) -> None:
    found = hopper.implementations(dataclasses.replace(gemm, m=m), H200)
    assert found
    assert len({way.name for way in found}) == len(found)
    for step in map(launch, found):
        assert step.shared <= H200.shared_per_block
        assert step.grid[0] <= H200.multiprocessors
        assert step.grid[0] % step.cluster == 0
        for argument in step.arguments:
            if isinstance(argument, TensorMap):
                assert max(argument.box) <= 256
                assert argument.box[0] * 2 == argument.swizzle
                assert all(stride % 16 == 0 for stride in argument.strides)


def test_products_of_one_launch_have_a_map_of_each_weight_and_result() -> None:
    for step in map(launch, hopper.implementations(PARALLEL, H200)):
        maps = [argument for argument in step.arguments if isinstance(argument, TensorMap)]
        assert [each.sizes for each in maps[1:4]] == [(3072, 768), (520, 768), (3072, 768)]
        assert [each.sizes for each in maps[4:]] == [(3072, 4096), (520, 4096), (3072, 4096)]


def test_products_of_one_launch_have_weights_of_one_layout() -> None:
    other = dataclasses.replace(LINEAR, transposed=True)
    assert group([LINEAR, other]) is None
    assert group([LINEAR, LINEAR]) == dataclasses.replace(LINEAR, grouped=(LINEAR,))


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(
    ("change", "copied", "direct"),
    [
        ({"n": 776}, set(), False),
        ({"n": 772}, {W, UP, RESIDUAL}, True),
        ({"n": 772, "transposed": True}, {RESIDUAL}, True),
        ({"k": 764}, {X}, False),
        ({"k": 764, "transposed": True}, {X, W, UP}, False),
        ({"n": 1, "k": 1}, {X, W, UP, RESIDUAL}, True),
        ({"aligned": False}, {X, W, UP, RESIDUAL}, True),
    ],
    ids=lambda value: None if isinstance(value, set) else str(value),  # whose order differs
)  # fmt: skip
def test_what_tma_cannot_read_is_copied(
    change: dict[str, object], copied: set[Pointer], direct: bool, split: int
) -> None:
    """What TMA cannot write, threads store; with split_k threads load the residual too."""
    gemm = dataclasses.replace(LINEAR, m=100, n=768, up=UP, weights_constant=True)
    gemm = dataclasses.replace(gemm, **change)  # type: ignore[arg-type]
    way = hopper.implementation(gemm, hopper.HopperConfig(128, 128, split_k=split), H200)
    copied = copied - ({RESIDUAL} if split > 1 else set())
    assert len(way.steps) == 1 + bool(copied) and len(way.scratch) == len(copied)
    first, product = way.steps[0], launch(way)
    assert isinstance(first, Launch)
    copies = [value for value in first.values if isinstance(value, Pointer)] if copied else []
    assert set(copies[::2]) == copied and copies[1::2] == [Pointer("scratch", i) for i in range(len(copied))]
    maps = {argument.pointer: argument for argument in product.arguments if isinstance(argument, TensorMap)}
    for source, target, size in zip(copies[::2], copies[1::2], way.scratch, strict=True):
        assert source not in product.values and source not in maps
        columns, rows = maps[target].sizes
        assert 2 * columns <= maps[target].strides[0] < 2 * columns + 16 and maps[target].strides[0] * rows == size
    assert all(each.strides[0] % 16 == 0 for each in maps.values())
    assert (gemm.y in maps) == (not direct and split == 1) and product.kernel.defines["STORE_BY_THREADS"] == int(direct)
    assert product.kernel.defines["WEIGHTS_CONSTANT"] == int(W not in copied), "copies are read once they are made"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"}, {"m": 0}, {"n": 0}, {"k": 0}, {"m": 2**31 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_wgmma_cannot_take_has_no_candidate(change: dict[str, object]) -> None:
    assert not hopper.implementations(dataclasses.replace(LINEAR, **change), H200)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_only_hopper_has_candidates(arch: int) -> None:
    assert not hopper.implementations(LINEAR, dataclasses.replace(H200, arch=arch))
