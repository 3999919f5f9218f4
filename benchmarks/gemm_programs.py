"""Time the fixed epilogues of products against the same functions as generated programs, in turns, on a GPU.

    python benchmarks/gemm_programs.py --out results [--only 4096x3072x768,…] [--dtypes float16] [--epilogues silu,…]

The shapes and the times are those of gemm.py.  The program has the bias, the activation and the residual, and the
product by itself has none of them.  Of each shape the fastest plans are compared, and those of the kernel and tiles
that are the fastest with the fixed epilogue.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.gemm_programs(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from compiling import compile_all
from gemm import DTYPES, SHAPES, Case, operand_sets, runs
from replays import captured, in_turns
from rows import Rows

from onnxfuse.kernels.gemm import host
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Kernel, Launch, Plan

# By the fixed epilogue: x1, x2 and so on are its operands behind x and w.
PROGRAMS: dict[str, list[list[Any]]] = {
    "bias+gelu": [["Add", ["x0", "x1"], ["v0"], {}], ["Gelu", ["v0"], ["v1"], {"approximate": "none"}]],
    "bias+relu": [["Add", ["x0", "x1"], ["v0"], {}], ["Relu", ["v0"], ["v1"], {}]],
    "bias+residual": [["Add", ["x0", "x1"], ["v0"], {}], ["Add", ["v0", "x2"], ["v1"], {}]],
    "silu": [["Sigmoid", ["x0"], ["v0"], {}], ["Mul", ["x0", "v0"], ["v1"], {}]],
}
CONFIG = ("TILE_M", "TILE_N", "TILE", "ROWS", "PINGPONG", "CONSUMERS", "SPLIT_K", "WARPS_M", "WARPS_N", "CLUSTER")


def plans(case: Case) -> tuple[list[Plan], list[Plan]]:
    """Return the plans of one launch of a product with the fixed epilogue, and with the program."""
    node, specs = case.node()
    operands = [f"x{i + 1}" for i in range(len(case.extra))]
    dtypes = dict.fromkeys(["x0", *operands, "v0", "v1"], case.dtype)
    program = json.dumps({"ops": PROGRAMS[case.epilogue], "outputs": ["v1"], "dtypes": dtypes})
    given = replace(node, operands=("x", "w", *operands), attributes={"activation": "none", "program": program})
    every = (host.candidates(each, specs, gpu(0)) for each in (node, given))
    fixed, generated = ([plan for plan in each if all(map(is_own, plan.steps))] for each in every)
    return fixed, [plan for plan in generated if "region" not in {step.kernel.source for step in launches(plan)}]


def is_own(step: object) -> bool:
    return isinstance(step, Launch)


def launches(plan: Plan) -> Iterator[Launch]:
    yield from (step for step in plan.steps if isinstance(step, Launch))


def name_of(plan: Plan) -> str:
    """Return the kernel of a plan with its tiles."""
    *_, last = launches(plan)
    tiles = [f"{name} {last.kernel.defines[name]}" for name in CONFIG if name in last.kernel.defines]
    return f"{last.kernel.source} {', '.join(tiles)}"


def measure(case: Case) -> dict[str, Any]:
    """Return the times of both, by the names of plans, and the ratios.  Raises ValueError if results differ."""
    (fixed, generated), sets = plans(case), operand_sets(case)
    reference = case.formula(*(t.double() for t in sets[0]))
    torch.cuda.synchronize()  # later work runs on other streams and may reuse the memory of these operands
    graphs = {}
    for kind, found in (("fixed", fixed), ("generated", generated)):
        for plan in found:
            out = torch.full((case.m, case.n), math.nan, device="cuda", dtype=DTYPES[case.dtype])
            way = Implementation(name_of(plan), plan.steps, plan.scratch)
            graphs[kind, way.name] = captured(runs(way, plan.outputs[0], sets, out))
            error = float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))
            if not error < 0.01:
                raise ValueError(f"{kind} {way.name}: the error is {error}")
    times = in_turns({"|".join(key): graph for key, graph in graphs.items()})
    own = {kind: {name.split("|")[1]: us for name, us in times.items() if name.startswith(f"{kind}|")}
           for kind in ("fixed", "generated")}  # fmt: skip
    best = min(own["fixed"], key=lambda name: own["fixed"][name])
    same = own["generated"].get(best)
    row = {"fixed_us": own["fixed"][best], "generated_us": min(own["generated"].values()), "plan": best, "times": own}
    row["ratio"] = row["generated_us"] / row["fixed_us"]
    return row | ({"ratio_of_same_plan": same / row["fixed_us"]} if same else {})


def kernels_of(cases: list[Case]) -> Iterator[Kernel]:
    for case in cases:
        for each in plans(case):
            yield from (step.kernel for plan in each for step in launches(plan))


def main(given: argparse.Namespace) -> None:
    wanted = [tuple(map(int, shape.split("x"))) for shape in given.only.split(",") if shape] or SHAPES
    epilogues = given.epilogues.split(",") if given.epilogues else list(PROGRAMS)
    cases = [Case(m, n, k, dtype, epilogue) for dtype in given.dtypes.split(",") for m, n, k in wanted
             for epilogue in epilogues]  # fmt: skip
    compile_all(kernels_of(cases))
    rows, ratios = Rows(given.out / "gemm_programs.json", ("shape", "dtype", "epilogue")), list[float]()
    for case in cases:
        row = {"shape": [case.m, case.n, case.k], "dtype": case.dtype, "epilogue": case.epilogue} | measure(case)
        rows.put(row)
        ratios.append(row["ratio"])
        same = f"{row['ratio_of_same_plan']:.3f} by the same plan" if "ratio_of_same_plan" in row else "other plans"
        shape = f"{case.m}x{case.n}x{case.k}"
        times = f"{row['fixed_us']:8.2f} us fixed {row['generated_us']:8.2f} us generated"
        print(f"{shape:16}{case.dtype:9}{case.epilogue:14}{times}, ratio {row['ratio']:.3f}, {same}", flush=True)
        torch.cuda.empty_cache()
    print(f"geometric mean {math.prod(ratios) ** (1 / len(ratios)):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main(GIVEN)
