"""Time norms in the region of what precedes them against two launches, and the norm alone, on a GPU.

    python benchmarks/norms_in_regions.py

A time is the cost of one more run in a CUDA graph (onnxfuse/tuning/trial.py).  Results of all plans are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]

import numpy as np  # noqa: E402
from kernel_hosts import host_of  # noqa: E402
from region_drafts import RegionProgram  # noqa: E402

from onnxfuse.kernels.concat_plans import chained  # noqa: E402
from onnxfuse.runtime import cuda_driver  # noqa: E402
from onnxfuse.runtime.plan import FusedNode, Plan, TensorSpec  # noqa: E402
from onnxfuse.tuning.autotune import gpu_trial  # noqa: E402

EPSILON = 1e-5
Front = Callable[[RegionProgram, Callable[..., str]], str]  # of a program and what makes an operand: what is normed


@dataclass(frozen=True)
class Case:
    """What precedes a LayerNorm in float16 of rows of `n` elements, with or without a residual between the two."""

    name: str
    front: Front
    shape: tuple[int, ...]
    residual: bool = False


def product(shape: tuple[int, ...]) -> Front:
    return lambda p, operand: p.op("Mul", operand(*shape), operand(*shape))


def masked(shape: tuple[int, ...]) -> Front:
    zero = {"dtype": "float16", "value": 0}
    return lambda p, operand: p.op("Where", operand(*shape[:-1], 1, dtype="bool"), operand(*shape),
                                   p.op("Constant", **zero), dtype="float16")  # fmt: skip


def tokens(batch: int, count: int, n: int) -> Front:
    """Class tokens, patches and positions, as a ViT begins."""

    def front(p: RegionProgram, operand: Callable[..., str]) -> str:
        joined = p.op("Concat", operand(batch, 1, n), operand(batch, count - 1, n), axis=1)
        return p.op("Add", joined, operand(1, count, n))

    return front


def windows(batch: int, side: int, window: int, n: int) -> Front:
    """Windows that become an image again, as behind the attention of a Swin."""

    def front(p: RegionProgram, operand: Callable[..., str]) -> str:
        count = side // window
        split = p.op("Reshape", operand(batch * count**2, window**2, n),
                     shape=[batch, count, count, window, window, n])  # fmt: skip
        return p.op("Reshape", p.op("Transpose", split, perm=[0, 1, 3, 2, 4, 5]), shape=[batch, side**2, n])

    return front


def merged_patches(batch: int, side: int, n: int) -> Front:
    """Four neighbours of an image side by side, as between the stages of a Swin."""

    def front(p: RegionProgram, operand: Callable[..., str]) -> str:
        image = operand(batch, 2 * side, 2 * side, n // 4)
        parts = [
            p.op("Slice", image, axes=[1, 2], starts=[row, column], ends=[2 * side] * 2, steps=[2, 2])
            for column in (0, 1) for row in (0, 1)
        ]  # fmt: skip
        return p.op("Reshape", p.op("Concat", *parts, axis=3), shape=[batch, side**2, n])

    return front


def rows_of_a_table(batch: int, count: int, n: int) -> Front:
    def front(p: RegionProgram, operand: Callable[..., str]) -> str:
        return p.op("Add", p.op("Gather", operand(30000, n), operand(batch, count, dtype="int64"), axis=0),
                    operand(count, n))  # fmt: skip

    return front


def cases() -> Iterator[Case]:
    for shape in ((8, 512, 768), (8, 1024, 768), (2, 4096, 1536), (1, 4608, 3072), (4, 512, 8192), (1, 1, 4096)):
        yield Case("a factor of elements", product(shape), shape)
    yield Case("a mask of rows", masked((8, 1024, 768)), (8, 1024, 768))
    for batch in (1, 8, 64):
        yield Case("class token and positions", tokens(batch, 197, 768), (batch, 197, 768))
    for batch, side, n in ((8, 56, 96), (8, 28, 192), (8, 14, 384), (64, 56, 96)):
        yield Case("windows put back, a residual", windows(batch, side, 7, n), (batch, side**2, n), residual=True)
        yield Case("moved rows", windows(batch, side, 7, n), (batch, side**2, n))
    yield Case("merged patches", merged_patches(8, 28, 384), (8, 784, 384))
    yield Case("rows of a table and positions", rows_of_a_table(8, 512, 1024), (8, 512, 1024))


def normed(p: RegionProgram, x: str, scale: str, bias: str, axis: int) -> str:
    """Return what onnxfuse/regions/norms.py writes for a LayerNorm."""

    def op(name: str, *inputs: str, **attributes: object) -> str:
        return p.op(name, *inputs, dtype="float32", **attributes)

    wide = [op("Cast", name, to="float32") for name in (x, scale, bias)]
    centred = op("Sub", wide[0], op("ReduceMean", wide[0], axes=[axis], keepdims=1))
    variance = op("ReduceMean", op("Mul", centred, centred), axes=[axis], keepdims=1)
    root = op("Sqrt", op("Add", variance, p.op("Constant", dtype="float32", value=EPSILON)))
    y = op("Add", op("Mul", op("Div", centred, root), wide[1]), wide[2])
    return p.op("Cast", y, dtype="float16", to="float16")


def drafted(case: Case, whole: bool) -> RegionProgram:
    """Return the program of what precedes the norm, or of both."""
    program = RegionProgram()

    def operand(*shape: int, dtype: str = "float16") -> str:  # whose values the trial draws
        return program.operand(np.broadcast_to(np.zeros((), dtype), shape))

    value = case.front(program, operand)
    if whole:
        value = program.op("Add", value, operand(*case.shape)) if case.residual else value
        value = normed(program, value, operand(case.shape[-1]), operand(case.shape[-1]), len(case.shape) - 1)
    program.outputs = [value]
    return program


def plans(case: Case) -> tuple[list[TensorSpec], list[Plan], Plan]:
    """Return the operands of both, the plan of one launch and that of two, and the plan of the norm alone."""
    gpu, whole, front = cuda_driver.gpu(0), drafted(case, True), drafted(case, False)
    specs, count = whole.specs(), len(front.operands)
    names = ("x", *(["residual"] if case.residual else []), "scale", "bias")
    norm = FusedNode(
        "add_layer_norm" if case.residual else "layer_norm", "y", names, {"epsilon": EPSILON}, ("float16",)
    )
    (together,) = host_of("region").candidates(whole.node(), specs, gpu)
    (first,) = host_of("region").candidates(front.node(), front.specs(), gpu)
    alone = host_of(norm.fusion).candidates(norm, [TensorSpec(case.shape, "float16"), *specs[count:]], gpu)[0]
    two = chained(first, alone, range(count), [None, *range(count, len(specs))])
    return specs, [together, two], alone


def times(specs: list[TensorSpec], found: list[Plan]) -> list[float]:
    """Return the microseconds of each plan.  Raises SystemExit if results differ."""
    trial = gpu_trial(specs, found, cuda_driver.gpu(0))
    expected = trial.outputs(found[-1])
    if wrong := [why for plan in found if (why := trial.difference(expected, trial.outputs(plan)))]:
        raise SystemExit(f"plans differ: {wrong}")
    measured = [1e6 * seconds for seconds in trial.seconds(found)]
    trial.close()
    return measured


def main() -> None:
    print(f"{'in front of the norm':32s} {'rows':>16s}  one launch  two  norm alone, us; one / two")
    ratios = []
    for case in cases():
        specs, found, alone = plans(case)
        one, two = times(specs, found)
        norm_specs = [TensorSpec(case.shape, "float16"), *specs[len(drafted(case, False).operands) :]]
        (bare,) = times(norm_specs, [alone])
        ratios.append(one / two)
        rows = "x".join(map(str, case.shape))
        print(f"{case.name:32s} {rows:>16s} {one:11.2f} {two:7.2f} {bare:7.2f} {one / two:9.2f}", flush=True)
    print(f"geometric mean of one / two: {math.prod(ratios) ** (1 / len(ratios)):.3f}")


if __name__ == "__main__":
    main()
