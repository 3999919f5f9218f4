"""Time attention with operators behind it: in its kernel, in a launch behind it, and attention alone, on a GPU.

    python benchmarks/attention_epilogues.py

A time is the cost of one more run in a CUDA graph (onnxfuse/tuning/trial.py).  Results of all plans are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]

from attention_cases import Case  # noqa: E402
from joined_cases import AttentionCase, Build, JoinedCase, attention_case  # noqa: E402
from kernel_hosts import host_of  # noqa: E402
from region_drafts import RegionProgram  # noqa: E402

from onnxfuse.runtime import cuda_driver  # noqa: E402
from onnxfuse.runtime.plan import Launch, Plan, TensorSpec  # noqa: E402
from onnxfuse.tuning.autotune import gpu_trial  # noqa: E402

SMALL = Case(batch=8, heads=12, kv_heads=12, queries=512, keys=512)
CASES = {
    "Qwen3-Next": Case(1, 16, 2, 2048, 2048, 256, 256, operator=True, causal=True),
    "Qwen3-Next, 4 x 512": Case(4, 16, 2, 512, 512, 256, 256, operator=True, causal=True),
    "2 x 16 heads, 2048": Case(2, 16, 16, 2048, 2048),
    "8 x 12 heads, 512": SMALL,
    "16 x 12 heads, 128": replace(SMALL, batch=16, queries=128, keys=128),
    "32 heads, 4096, causal": Case(1, 32, 8, 4096, 4096, 128, 128, operator=True, causal=True),
    "one query, 4096 keys": Case(4, 32, 8, 1, 4096, 128, 128),
    "sequence first, 300": Case(4, 8, 8, 300, 300, 96, 96, out_layout="seq_first"),
}


def gated(lead: tuple[int, ...], n: int, heads: int) -> Build:
    """Return a program of a gate that lies beside queries, as in Qwen3-Next."""

    def build(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
        both = operand(*lead, heads, 2 * n // heads)
        parts = p.ops_of("Split", both, count=2, axis=len(lead) + 1, sizes=[n // heads] * 2)
        return [p.op("Mul", y, p.op("Sigmoid", p.op("Reshape", parts[1], shape=[*lead, n])))]

    return build


def residual(lead: tuple[int, ...], n: int, heads: int) -> Build:
    """Return a program of a residual."""
    return lambda p, y, operand: [p.op("Add", y, operand(*lead, n))]


def problems() -> Iterator[tuple[str, Case, JoinedCase]]:
    for name, each in CASES.items():
        *lead, n = AttentionCase(each).shape()
        yield f"gate, {name}", each, replace(attention_case("chain", each), build=gated(tuple(lead), n, each.heads))
    *lead, n = AttentionCase(SMALL).shape()
    with_residual = replace(attention_case("chain", SMALL), build=residual(tuple(lead), n, SMALL.heads))
    yield "residual, 8 x 12 heads, 512", SMALL, with_residual


def has_region(plan: Plan) -> bool:
    return any(isinstance(step, Launch) and step.kernel.source == "region" for step in plan.steps)


def times(specs: list[TensorSpec], plans: list[Plan]) -> list[float]:
    """Return the microseconds of each plan.  Raises SystemExit if a result differs from that of the last."""
    trial = gpu_trial(specs, plans, cuda_driver.gpu(0))
    expected = trial.outputs(plans[-1])
    if wrong := [why for plan in plans if (why := trial.difference(expected, trial.outputs(plan)))]:
        raise SystemExit(f"plans differ: {wrong}")
    found = [1e6 * seconds for seconds in trial.seconds(plans)]
    trial.close()
    return found


def main() -> None:
    print(f"{'':40s} alone  one launch  two launches: first plans, us; fastest plans, us")
    for name, each, joined in problems():
        made = joined.made()
        specs, host = made.specs(), host_of("attention")
        plans = host.candidates(made.node(), specs, cuda_driver.gpu(0))
        alone = times(specs[:3], host.candidates(each.node(), specs[:3], cuda_driver.gpu(0)))
        found = list(zip(times(specs, plans), plans, strict=True))
        one, two = ([time for time, plan in found if has_region(plan) is apart] for apart in (False, True))
        first, best = ([choose(list(group)) for group in (alone, one, two)] for choose in (lambda g: g[0], min))
        print(f"{name:40s} " + "  ".join(" ".join(f"{time:8.2f}" for time in row) for row in (first, best)), flush=True)


if __name__ == "__main__":
    main()
