"""Plan templates of matrix products: for every number of rows a plan that its host would choose, or nearly so."""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
import pytest
from architectures import A100, H200, T4, check_compiles, to_compile
from sampling import by_parts, sampled
from template_checks import check_template, concrete_plan, right_variants, template_of

from onnxfuse.kernels.gemm import cublaslt, hopper, mma, stream
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.implementations import implementations
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Matmul, Pointer, TensorSpec
from onnxfuse.runtime.template import Template

pytestmark = pytest.mark.usefixtures("no_cublaslt")
PARTS = 36  # of the kernels, of which one is compiled in a plain run
MAX_KERNELS = 12  # four for up to 64 rows, and one for each tiling that is the best one somewhere


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A fused product whose rows are dynamic: `lead` are the dims of x in front of k, -1 and so on."""

    name: str
    k: int
    n: int
    operands: str = "x w bias"
    dtype: str = "float16"
    activation: str = "none"
    layout: str = "kn"
    lead: tuple[int, ...] = (-1, -2)
    aligned: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def node(self) -> FusedNode:
        names = tuple(self.operands.split())
        fusion = "gated_gemm" if "up" in names else "parallel_gemm" if "w_2" in names else "gemm_bias_activation"
        layouts = {f"weight_layout{name[1:]}": self.layout for name in names if name[0] == "w"}
        outputs = (self.dtype,) * len(layouts)
        return FusedNode(fusion, self.name, names, {"activation": self.activation, **layouts}, outputs)

    def inputs(self) -> list[TensorSpec]:
        weight = (self.k, self.n) if self.layout == "kn" else (self.n, self.k)
        shapes = {"x": (*self.lead, self.k), "w": weight, "w_2": weight, "w_3": weight, "up": weight,
                  "residual": (*self.lead, self.n)}  # fmt: skip
        constant = {"x": False, "residual": False}
        return [
            TensorSpec(shapes.get(name, (self.n,)), self.dtype, self.aligned, constant.get(name, self.aligned))
            for name in self.operands.split()
        ]


# The products of a BERT and of a Llama; rows that no vector divides, of x, of w and y, and of everything; a residual of
# its own dim; one row after the other; float32; a classifier of few columns.
PATTERNS = (
    Pattern("bert output", 768, 768, "x w bias residual"),
    Pattern("bert up", 768, 3072, activation="gelu"),
    Pattern("bert down", 3072, 768, "x w bias residual"),
    Pattern("bert qkv", 768, 768, "x w w_2 w_3 bias bias_2 bias_3"),
    Pattern("rows alone", 1024, 4096, dtype="bfloat16", activation="relu", lead=(-1,)),
    Pattern("llama output", 4096, 4096, "x w", "bfloat16", layout="nk"),
    Pattern("llama gated", 4096, 14336, "x w up", activation="silu", layout="nk"),
    Pattern("gated with biases", 768, 2048, "x w up bias up_bias", activation="gelu"),
    Pattern("batch of images", 320, 320, "x w bias column_scale residual", lead=(-1, -2, -3)),
    Pattern("odd", 769, 1001, "x w bias residual", activation="gelu"),
    Pattern("odd k n x k", 767, 768, layout="nk"),
    Pattern("odd n", 768, 30522, "x w bias"),
    Pattern("odd gated", 769, 1001, "x w up", activation="silu", layout="nk"),
    Pattern("misaligned", 768, 768, "x w bias residual", aligned=False),
    Pattern("float32", 768, 768, "x w bias residual", "float32"),
    Pattern("float32 gated", 768, 2048, "x w up", "float32", activation="silu"),
    Pattern("prelu", 512, 512, "x w bias slope", activation="prelu"),
    Pattern("classifier", 768, 2, lead=(-1,)),
)


@pytest.mark.parametrize("device", [T4, A100, H200], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("pattern", sampled(PATTERNS, 4), ids=str)
def test_a_template_says_what_its_host_says(pattern: Pattern, device: Device) -> None:
    if device.arch < mma.MMA_ARCH and pattern.dtype == "bfloat16":
        pytest.skip("no GPU before sm_80 has bfloat16 products")

    def sizes(seed: int) -> list[int]:
        """Return sizes whose product is a number of rows, few and many alike."""
        chance = random.Random(seed)
        rows = 2 ** (16 * chance.random())
        shares = [chance.random() for _ in pattern.lead]
        return [max(1, round(rows ** (share / sum(shares)))) for share in shares]

    template = check_template(pattern.node, pattern.inputs(), device, max_kernels=MAX_KERNELS, sizes=sizes)
    assert len(template.variants) <= 20


def tiling_of(launch: Launch) -> HopperConfig:
    """Return the config that a launch of the Hopper GEMM has."""
    defines = launch.kernel.defines
    names = ("TILE_M", "TILE_N", "PINGPONG", "SPLIT_K")
    tile_m, columns, pingpong, split_k = (int(defines[name]) for name in names)
    return HopperConfig(tile_m, columns * (2 if defines["GATED"] else 1), bool(pingpong), split_k)


HOPPER = [pattern for pattern in PATTERNS if pattern.dtype != "float32" and len(pattern.operands.split("w_")) == 1]


@pytest.mark.parametrize("pattern", sampled(HOPPER, 4), ids=str)
def test_the_tiling_is_nearly_the_best_one_for_every_number_of_rows(pattern: Pattern) -> None:
    """The loss by the host's own estimate, at numbers of rows of which hardly one is a sample of the template."""
    pattern = dataclasses.replace(pattern, lead=(-1,))
    template, losses = template_of(pattern.node, pattern.inputs(), H200), []
    for m in [*range(65, 700, 7), *(int(700 * 1.02**i) for i in range(230))]:
        variant = template.chosen([m])
        assert variant
        launch = concrete_plan(template, variant, [m]).steps[-1]
        assert isinstance(launch, Launch)
        shapes = [dataclasses.replace(each, shape=tuple(m if dim < 0 else dim for dim in each.shape))
                  for each in pattern.inputs()]  # fmt: skip
        gemm, _ = gemm_of(pattern.node, shapes, H200)
        fitting = [config for config in hopper.CONFIGS if hopper.fits(gemm, config, H200)]
        least = min(hopper.cycles(gemm, config, H200) for config in fitting)
        losses.append(hopper.cycles(gemm, tiling_of(launch), H200) / least - 1)
    assert np.mean(losses) <= 0.015 and max(losses) <= 0.2
    assert np.mean(np.array(losses) > 0.05) <= 0.1


def launches_at(template: Template, rows: int) -> list[Launch | Matmul]:
    """Return the steps for that number of rows."""
    variant = template.chosen([rows])
    assert variant
    return [step for step in concrete_plan(template, variant, [rows]).steps if isinstance(step, Launch | Matmul)]


def test_a_few_rows_have_a_kernel_for_each_tile() -> None:
    pattern = dataclasses.replace(PATTERNS[0], lead=(-1,))
    template, found = template_of(pattern.node, pattern.inputs(), H200), {}
    for rows in range(1, 66):
        (step,) = launches_at(template, rows)
        assert isinstance(step, Launch)
        found[rows] = (step.kernel.source, step.kernel.defines.get("TILE_M"))
        assert step.grid[1] == 1
    tiles = {rows: next(tile for tile in stream.TILES_M if rows <= tile) for rows in range(2, 33)}
    assert found[1] == ("gemm_small", None)  # dot products
    assert all(found[rows] == ("gemm_stream", tiles[rows]) for rows in tiles)
    assert {found[rows][0] for rows in range(33, 66)} == {"gemm_hopper"}


@pytest.mark.parametrize("device", [T4, A100, H200], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("operands", ["x w bias", "x w bias residual"])
def test_cublaslt_is_asked_once_sizes_are_known(device: Device, operands: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product by cuBLASLt names no algorithm, and has the workspace that any of them may take."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: True)
    monkeypatch.setattr(run_plan, "algorithms", lambda *_: pytest.fail("cuBLASLt was asked"))
    dtype = "float32" if device is H200 else "float16"  # wgmma takes the others on sm_90
    pattern = Pattern("library", 768, 768, operands, dtype, layout="nk", lead=(-1,))
    template = template_of(pattern.node, pattern.inputs(), device)
    assert not any(variant.fixed for variant in template.variants)
    for rows in (65, 1000, 40_001):
        (step,) = launches_at(template, rows)
        assert isinstance(step, Matmul)
        assert (step.x.rows, step.y.rows, step.algorithm) == (rows, rows, ())
        assert (step.workspace, step.workspace_bytes) == (Pointer("scratch", 0), cublaslt.MAX_WORKSPACE_BYTES)
        assert step.c is None or step.c.rows == rows
        variant = template.chosen([rows])
        assert variant and variant.plan.scratch == (cublaslt.MAX_WORKSPACE_BYTES,)


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of all templates on a device, with and without cuBLASLt, each once."""
    found: dict[str, Kernel] = {}
    for library in False, True:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cublaslt, "_is_available", lambda library=library: library)
            for each in PATTERNS:
                if device.arch >= mma.MMA_ARCH or each.dtype != "bfloat16":
                    template = template_of(each.node, each.inputs(), device)
                    found |= {repr(kernel): kernel for kernel in template.kernels}
    return list(found.values())


@pytest.mark.parametrize("device", [T4, A100, H200], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("name", ["bert up", "odd", "odd gated", "gated with biases"])
def test_no_number_of_rows_is_without_a_plan(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where cuBLASLt leaves the epilogue to a kernel, whose tilings follow from the number of elements."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: True)
    pattern = next(each for each in PATTERNS if each.name == name)
    pattern = dataclasses.replace(pattern, lead=(-1,))
    template = template_of(pattern.node, pattern.inputs(), device)
    assert len(template.kernels) <= MAX_KERNELS and len(template.variants) <= 20
    missing = [m for m in (*range(1, 1100), *range(1100, 20_000, 97)) if not right_variants(template, [m])]
    assert not missing


def allowed_to_spill(kernel: Kernel) -> int:
    """Return 0 bytes, but for one tiling, which keeps a register in memory and reads it outside of the main loop."""
    defines = kernel.defines
    widest = kernel.source == "gemm_hopper" and (defines["TILE_M"], defines["TILE_N"]) == (64, 256)
    return 20 if widest and defines["STORE_BY_THREADS"] else 0


@by_parts(PARTS)
@pytest.mark.parametrize("device", sampled([H200, T4, A100], 3), ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, allowed_to_spill(kernel))


@pytest.mark.parametrize(
    ("sizes", "first"),
    [((401408, 16, 32), Matmul), ((401408, 64, 16), Matmul), ((100352, 64, 64), Launch), ((3200, 24, 72), Launch)],
)
def test_many_rows_of_few_columns_are_the_library_s(
    sizes: tuple[int, int, int], first: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a tile of wgmma would be empty; a second launch, which SiLU needs there, is not worth it."""
    call = object.__new__(Matmul)  # what it computes does not matter here

    def library(gemm: Gemm, device: Device) -> list[Implementation]:
        return [Implementation("cublaslt", (call,) if gemm.activation == "relu" else (call, call))]

    monkeypatch.setattr(cublaslt, "implementations", library)
    m, n, k = sizes
    specs = [TensorSpec((m, k), "float16"), TensorSpec((n, k), "float16", constant=True)]
    for activation, expected in (("relu", first), ("silu", Launch)):
        attributes = {"activation": activation, "weight_layout": "nk"}
        node = FusedNode("gemm_bias_activation", "n", ("x", "w"), attributes, ("float16",))
        gemm, _ = gemm_of(node, specs, H200)
        assert isinstance(implementations(gemm, H200)[0].steps[0], expected)
