"""Time products and convolutions of integers of 8 bits, and of float8, beside those of float16.

    python benchmarks/eight_bits.py --out results/eight_bits.json [--only conv]

A time is the cost of one more node in a CUDA graph, in microseconds: with bias, Relu and, for 8 bits, a quantizer.
`zeros` is the time if x has a zero point, which is multiplied by sums of the weights.  Rows of attention have a shape
of batch, heads, queries, keys and size: two products of integers, with zero points and quantizers, and the softmax of
integers between them, next to an attention of float16.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compiling import compile_all
from replays import Calls, captured, in_turns
from rows import Rows

from onnxfuse.algebra.filter_edges import most_taps_beyond, row_count
from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.attention.host import candidates as attention_candidates
from onnxfuse.kernels.conv.host import candidates as conv_candidates
from onnxfuse.kernels.gemm.host import candidates as gemm_candidates
from onnxfuse.kernels.quantized.host import candidates
from onnxfuse.kernels.region.host import candidates as region_candidates
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, Launch, Plan, TensorSpec

CALLS = 24  # of a node in a CUDA graph
SETS_BYTES = 200 << 20  # of operands that calls take in turns, so that L2 does not hold all
PRODUCTS = [(4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (4096, 4096, 4096), (4096, 7168, 16384),
            (4096, 16384, 7168), (128, 768, 768), (128, 4096, 4096), (8192, 8192, 8192)]  # fmt: skip
# n, c, m, size, taps, stride: the convolutions of a ResNet-50
CONVS = [(n, *one) for n in (32, 128) for one in (
    (64, 64, 56, 3, 1), (128, 128, 28, 3, 1), (256, 256, 14, 3, 1), (512, 512, 7, 3, 1), (128, 128, 56, 3, 2),
    (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (512, 128, 28, 1, 1), (1024, 256, 14, 1, 1), (256, 1024, 14, 1, 1),
    (2048, 512, 7, 1, 1), (512, 2048, 7, 1, 1),
)]  # fmt: skip
# batch, heads, queries, keys, size
ATTENTIONS = [(8, 12, 512, 512, 64), (1, 12, 128, 128, 64), (32, 12, 197, 197, 64), (1, 16, 2048, 2048, 64)]


def problem(
    shape: tuple[int, ...], zeros: bool, stored: tuple[str, str] = ("uint8", "int8")
) -> tuple[FusedNode, FusedNode, list[TensorSpec], list[TensorSpec]]:
    """Return the node whose x and w have the dtypes `stored`, the node of float16, and the operands of both."""
    attributes: dict[str, Any] = {"weight_layout": "nk"}
    if len(shape) == 3:
        m, n, k = shape
        x, w, rows = (m, k), (n, k), 1
    else:
        batch, c, n, size, taps, stride = shape
        pad = taps // 2
        x, w = (batch, size, size, c), (n, taps, taps, c)
        rows = row_count(most_taps_beyond([taps] * 2, [1] * 2, [pad] * 2, [pad] * 2))
        attributes = {"layout": "nhwc", "strides": [stride] * 2, "pads": [pad] * 4}
    kind = "gemm" if len(shape) == 3 else "conv"
    names = [
        "x",
        "x_scale",
        *(["x_zero_point"] if zeros else []),
        "w",
        "w_scale",
        *(["w_sums"] if zeros else []),
        "bias",
    ]
    constants = [["Constant", [], ["v2"], {"value": 0}], ["Constant", [], ["v3"], {"value": 0.02}]]
    ops = [*constants, ["Relu", ["x0"], ["v0"], {}], ["QuantizeLinear", ["v0", "v3", "v2"], ["v1"], {}]]
    program = json.dumps({"ops": ops, "outputs": ["v1"], "dtypes": {
        "x0": "float32", "v0": "float32", "v1": stored[0], "v2": stored[0], "v3": "float32",
    }})  # fmt: skip
    node = FusedNode(f"quantized_{kind}", "y", tuple(names), {**attributes, "program": program}, stored[:1])
    specs = {"x": TensorSpec(x, stored[0]), "w": TensorSpec(w, stored[1], constant=True),
             "x_zero_point": TensorSpec((), "uint8", constant=True), "bias": TensorSpec((n,), "float32", constant=True),
             "w_scale": TensorSpec((n,), "float32", constant=True),
             "w_sums": TensorSpec((rows, n), "int32", constant=True)}  # fmt: skip
    scalar = TensorSpec((), "float32", constant=True)
    plain = FusedNode(f"{kind}_bias_activation", "y", ("x", "w", "bias"), {**attributes, "activation": "relu"},
                      ("float16",))  # fmt: skip
    halves = [TensorSpec(x, "float16"), TensorSpec(w, "float16", constant=True),
              TensorSpec((n,), "float16", constant=True)]  # fmt: skip
    return node, plain, [specs.get(name, scalar) for name in names], halves


def calls(plan: Plan, specs: list[TensorSpec]) -> Calls:
    """Return calls of a plan, on operands that take turns."""
    types = {
        "float16": torch.float16,
        "float32": torch.float32,
        "uint8": torch.uint8,
        "int8": torch.int8,
        "int32": torch.int32,
        FLOAT8: torch.float8_e4m3fn,
    }
    moved = sum(math.prod(spec.shape) * types[spec.dtype].itemsize for spec in (*specs, *plan.outputs))
    count = min(CALLS, max(1, SETS_BYTES // moved))

    def made(spec: TensorSpec) -> torch.Tensor:
        if "int" in spec.dtype:
            return torch.randint(0, 100, spec.shape, device="cuda").to(types[spec.dtype])
        drawn = torch.rand(spec.shape, device="cuda")
        return (drawn * 64 - 32 if spec.dtype == FLOAT8 else drawn / 64).to(types[spec.dtype])

    sets = [[made(spec) for spec in specs] for _ in range(count)]
    outs = [torch.empty(spec.shape, dtype=types[spec.dtype], device="cuda") for spec in plan.outputs for _ in sets]
    ready = ready_plan(plan, [replace(spec, constant=False) for spec in specs])
    scratch = torch.empty(max(1, ready.scratch_bytes), dtype=torch.uint8, device="cuda")

    def call(i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ready.run([t.data_ptr() for t in sets[i]], [outs[i].data_ptr()], scratch.data_ptr(), stream)

    return [functools.partial(call, i % count) for i in range(CALLS)]


def plans(shape: tuple[int, ...], most: int) -> dict[str, tuple[Plan, list[TensorSpec]]]:
    """Return the plans to time, by name, with their operands."""
    device, found = gpu(0), dict[str, tuple[Plan, list[TensorSpec]]]()
    for zeros in (False, True):
        node, plain, specs, halves = problem(shape, zeros)
        for i, plan in enumerate(candidates(node, specs, device)[: 1 if zeros else most]):
            found["zeros" if zeros else f"integers {i}"] = plan, specs
    node, _, specs, _ = problem(shape, False, (FLOAT8, FLOAT8))
    for i, plan in enumerate(candidates(node, specs, device)[:most]):
        found[f"float8 {i}"] = plan, specs
    host = gemm_candidates if len(shape) == 3 else conv_candidates
    for i, plan in enumerate(host(plain, halves, device)[:most]):
        found[f"float16 {i}"] = plan, halves
    return found


def attention_plans(shape: tuple[int, ...]) -> dict[str, tuple[Plan, list[TensorSpec]]]:
    """Return the plans of the parts of an attention of integers, and of an attention of float16, by name."""
    batch, heads, queries, keys, size = shape
    scalar, zero = TensorSpec((), "float32", constant=True), TensorSpec((), "uint8", constant=True)
    rows = [TensorSpec((batch, count, heads, size), "uint8") for count in (queries, keys)]
    scores = TensorSpec((batch, heads, queries, keys), "uint8")
    constants = [["Constant", [], ["v0"], {"value": 0.02}], ["Constant", [], ["v1"], {"value": 128}]]
    quantizer = {
        "ops": [*constants, ["QuantizeLinear", ["x0", "v0", "v1"], ["v2"], {"precision": "float32"}]],
        "outputs": ["v2"], "dtypes": {"x0": "float32", "v0": "float32", "v1": "uint8", "v2": "uint8"},
    }  # fmt: skip
    of_w = ["w", "w_scale", "w_zero_point"]
    common = {"x_layout": "bshd", "w_layout": "bshd", "program": json.dumps(quantizer)}
    products = {
        "scores": (["x", "x_scale", "x_zero_point", *of_w], {"w_order": "nk", "out_layout": "bhsd"},
                   [rows[0], scalar, zero, rows[1], scalar, zero]),
        "values": (["x", "x_scale", *of_w], {"w_order": "kn", "x_layout": "bhsd", "out_layout": "packed"},
                   [scores, scalar, rows[1], scalar, zero]),
    }  # fmt: skip
    device, found = gpu(0), dict[str, tuple[Plan, list[TensorSpec]]]()
    for name, (operands, attributes, specs) in products.items():
        node = FusedNode("quantized_matmul", "y", tuple(operands), {**common, **attributes}, ("uint8",))
        found[name] = candidates(node, specs, device)[0], specs
    softmax = {
        "ops": [*constants, ["DequantizeLinear", ["x0", "v0", "v1"], ["v2"], {}],
                ["Softmax", ["v2"], ["v3"], {"axis": 3}], ["Constant", [], ["v4"], {"value": 0}],
                ["Constant", [], ["v5"], {"value": 1 / 255}],
                ["QuantizeLinear", ["v3", "v5", "v4"], ["v6"], {"precision": "float32"}]],
        "outputs": ["v6"], "dtypes": dict.fromkeys(("v0", "v5", "v2", "v3"), "float32")
        | dict.fromkeys(("x0", "v1", "v4", "v6"), "uint8"),
    }  # fmt: skip
    region = FusedNode("region", "y", ("x0",), {"program": json.dumps(softmax)}, ("uint8",))
    found["softmax"] = region_candidates(region, [scores], device)[0], [scores]
    halves = [TensorSpec((batch, count, heads, size), "float16") for count in (queries, keys, keys)]
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), "bshd")
    given = {**layouts, "heads": heads, "kv_heads": heads, "repeats": 1, "size": size, "value_size": size}
    plain = FusedNode("attention", "y", ("q", "k", "v"), {**given, "scale": 0.125}, ("float16",))
    found["float16"] = attention_candidates(plain, halves, device)[0], halves
    return found


def time_attentions(out: Path) -> None:
    """Time the attentions, and write a row for each."""
    every = {shape: attention_plans(shape) for shape in ATTENTIONS}
    compile_plans(every)
    rows = Rows(out.with_stem(f"{out.stem}_attention"), ["shape"])
    for shape, found in every.items():
        times = in_turns({name: captured(calls(plan, specs)) for name, (plan, specs) in found.items()})
        row = {"shape": list(shape), **times, "ratio": (sum(times.values()) / times["float16"]) - 1}
        rows.put(row)
        print(line_of(row), flush=True)


def compile_plans(every: Mapping[Any, Mapping[str, tuple[Plan, list[TensorSpec]]]]) -> None:
    """Compile all kernels, side by side."""
    compile_all(
        step.kernel for found in every.values() for plan, _ in found.values() for step in plan.steps
        if isinstance(step, Launch)
    )  # fmt: skip


def line_of(row: Mapping[str, Any]) -> str:
    return " ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())


def name_of(plan: Plan) -> str:
    """Return the last kernel of a plan and its tile."""
    step = plan.steps[-1]
    if not isinstance(step, Launch):
        return type(step).__name__
    defines = step.kernel.defines
    return (
        f"{step.kernel.source} {defines.get('TILE_M')}x{defines.get('TILE_N')}{'p' * int(defines.get('PINGPONG', 0))}"
    )


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("gemm", "conv", "attention"))
    parser.add_argument("--most", type=int, default=4, help="plans of each kind to time")
    given = parser.parse_args()
    if given.only in (None, "attention"):
        time_attentions(given.out)
    shapes = [shape for shape in (*PRODUCTS, *CONVS) if given.only in (None, "gemm" if len(shape) == 3 else "conv")]
    every = {shape: plans(shape, given.most) for shape in shapes}
    compile_plans(every)
    rows = Rows(given.out, ["shape"])
    for shape, found in every.items():
        times = in_turns({name: captured(calls(plan, specs)) for name, (plan, specs) in found.items()})
        best = {kind: min((name for name in times if name.startswith(kind)), key=times.__getitem__)
                for kind in ("integers", "float16", "float8")}  # fmt: skip
        row = {
            "shape": list(shape), "us": times["integers 0"], "zeros": times["zeros"], "float16": times["float16 0"],
            "best": times[best["integers"]], "best_float16": times[best["float16"]],
            "ratio": times[best["integers"]] / times[best["float16"]],
            "plan": name_of(found["integers 0"][0]), "best_plan": name_of(found[best["integers"]][0]),
            "float8": times["float8 0"], "best_float8": times[best["float8"]],
            "float8_plan": name_of(found["float8 0"][0]), "best_float8_plan": name_of(found[best["float8"]][0]),
        }  # fmt: skip
        rows.put(row)
        print(line_of(row), flush=True)


if __name__ == "__main__":
    main()
