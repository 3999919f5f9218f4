"""Time linear attention by the gated delta rule: sequences next to onnxruntime and Triton, one token next to a copy.

    python benchmarks/linear_attention.py --out FILE [--dtypes float16,bfloat16] [--operator GatedDeltaNet]

All run in CUDA graphs.  A node's time is the difference between models of several nodes and of one.  Heads have 128
rows and columns.  `triton` are the launches of flash-linear-attention, written again in linear_attention_triton.py, and
autotuned.  `copy` is the time in which device-to-device copies move as many bytes as a token's states.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import onnx
import onnxruntime as ort
import torch
from linear_attention_triton import GatedDelta
from onnx import helper
from rows import Rows

import onnxfuse
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.session import InferenceSession, explain_session

SIZE: Final = 128
SAMPLES: Final = 15
DTYPES: Final = ("float16", "bfloat16")


def model(tokens: int, heads: int, batch: int, dtype: str, nodes: int, operator: str) -> onnx.ModelProto:
    """Return a model of `nodes` nodes with the same operands, where each node has a state of its own.

    GatedDeltaNet has an axis of heads, and states, decays and rates of float32.
    """
    is_net, kind, shape = operator == "GatedDeltaNet", DTYPE_NUMBERS[dtype], [batch, heads, SIZE, SIZE]
    wide, row = (DTYPE_NUMBERS["float32"], [heads, SIZE]) if is_net else (kind, [heads * SIZE])
    inputs = [helper.make_tensor_value_info(name, kind, [batch, tokens, *row]) for name in "qkv"]
    inputs += [helper.make_tensor_value_info(name, wide, [batch, tokens, heads]) for name in "gb"]
    inputs += [helper.make_tensor_value_info(f"s{i}", wide, shape) for i in range(nodes)]
    outputs = [helper.make_tensor_value_info(f"y{i}", kind, [batch, tokens, *row]) for i in range(nodes)]
    outputs += [helper.make_tensor_value_info(f"p{i}", wide, shape) for i in range(nodes)]
    said = {} if is_net else {"q_num_heads": heads, "kv_num_heads": heads}
    calls = [
        helper.make_node(
            operator, [*"qkv", "", "g", "b", f"s{i}"] if is_net else [*"qkv", f"s{i}", "g", "b"], [f"y{i}", f"p{i}"],
            domain="com.microsoft", update_rule="gated_delta", **said,
        )
        for i in range(nodes)
    ]  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(calls, "g", inputs, outputs), opset_imports=opsets, ir_version=10)


def operands(tokens: int, heads: int, batch: int, dtype: str, operator: str) -> dict[str, torch.Tensor]:
    """Return q, k, v, g, b and s0 on the GPU; keys have length 1."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    rows = (batch, tokens)
    q, k, v = (torch.randn(*rows, heads, SIZE, device="cuda") for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    found = {name: x.reshape(*rows, heads * SIZE) for name, x in (("q", q), ("k", k), ("v", v))}
    found["g"] = -0.1 * torch.rand(*rows, heads, device="cuda")
    found["b"] = torch.rand(*rows, heads, device="cuda")
    found["s0"] = torch.randn(batch, heads, SIZE, SIZE, device="cuda")
    if operator == "GatedDeltaNet":
        shaped = {name: x.view(*rows, heads, SIZE).to(kind) for name, x in found.items() if name in "qkv"}
        return found | shaped
    return {name: x.to(kind).contiguous() for name, x in found.items()}


class Bound:
    """A session whose inputs and outputs stay where they are."""

    def __init__(self, made: onnx.ModelProto, given: dict[str, torch.Tensor], fused: bool) -> None:
        """Open a session on the CUDA provider, and bind operands; the other states are copies of the first."""
        options = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
        if fused:
            optimized, report = onnxfuse.optimize(made, verify=False)
            assert report.counts.keys() <= {"linear_attention", "gated_delta_net"}, report.missed
            self.session: Any = InferenceSession(optimized.SerializeToString(), providers=options, wait=True)
            assert {each.how for each in explain_session(self.session)} == {"kernel"}
        else:
            settings = ort.SessionOptions()
            settings.log_severity_level = 3
            self.session = ort.InferenceSession(made.SerializeToString(), settings, providers=options)
        self.binding, self.kept, self.outputs = self.session.io_binding(), [], {}
        for value in made.graph.input:
            own = given.get(value.name)
            self._bind("input", value, given["s0"].clone() if own is None else own)
        for value in made.graph.output:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            dtype = given["q" if value.name[0] == "y" else "s0"].dtype
            self.outputs[value.name] = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
            self._bind("output", value, self.outputs[value.name])
        torch.cuda.synchronize()
        for _ in range(4):
            self.run()

    def _bind(self, side: str, value: onnx.ValueInfoProto, x: torch.Tensor) -> None:
        self.kept.append(x)
        kind = value.type.tensor_type.elem_type
        getattr(self.binding, f"bind_{side}")(value.name, "cuda", 0, kind, list(x.shape), x.data_ptr())

    def run(self) -> None:
        """Run once, and wait."""
        self.session.run_with_iobinding(self.binding)


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays a CUDA graph of the calls, and waits."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def microseconds(one: Callable[[], None], several: Callable[[], None], nodes: int) -> float:
    """Return the time of a node, from runs of several nodes and of one, in turns."""
    times: list[list[float]] = [[], []]
    for _ in range(SAMPLES):
        for run, found in zip((one, several), times, strict=True):
            run()
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    least, most = (statistics.median(found) for found in times)
    return round((most - least) / (nodes - 1) * 1e6, 2)


def of_session(
    given: dict[str, torch.Tensor], sizes: tuple[int, int, int, str], nodes: int, fused: bool, operator: str
) -> Any:
    """Return (microseconds of a node, the outputs of one node); None and the error where it does not run."""
    try:
        one, several = (Bound(model(*sizes, count, operator), given, fused) for count in (1, nodes))
    except Exception as error:
        if fused:
            raise
        return None, str(error)[:200]
    return microseconds(one.run, several.run, nodes), one.outputs


def by_triton(given: dict[str, torch.Tensor], heads: int, nodes: int) -> Any:
    """Return (microseconds of a node, the result)."""
    tokens = given["q"].shape[1]
    q, k, v = (given[name].view(tokens, heads, SIZE) for name in "qkv")
    decay, beta, past = given["g"][0], given["b"][0], given["s0"][0]
    present, memory = torch.empty(heads, SIZE, SIZE, device="cuda"), GatedDelta(q)

    def times(count: int) -> Callable[[], None]:
        return captured(lambda: [memory.run(q, k, v, past, decay, beta, present) for _ in range(count)])

    return microseconds(times(1), times(nodes), nodes), memory.y


def difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    a, b = found.float().reshape(-1), right.float().reshape(-1)
    return float(f"{((a - b).abs().max() / b.abs().max()).item():.2g}")


def sequence(rows: Rows, tokens: int, heads: int, dtype: str, operator: str) -> None:
    """Measure a sequence."""
    given, nodes = operands(tokens, heads, 1, dtype, operator), 5
    row: dict[str, Any] = {"tokens": tokens, "heads": heads, "batch": 1, "dtype": dtype, "operator": operator}
    row["onnxfuse_us"], own = of_session(given, (tokens, heads, 1, dtype), nodes, True, operator)
    row["onnxruntime_us"], ort_outputs = of_session(given, (tokens, heads, 1, dtype), 2, False, operator)
    if operator == "LinearAttention":
        row["triton_us"], y = by_triton(given, heads, nodes)
        row["difference_of_triton"] = difference(own["y0"], y)
        row["faster_than_triton"] = round(row["triton_us"] / row["onnxfuse_us"], 2)
    if row["onnxruntime_us"] is None:
        row["onnxruntime_error"] = ort_outputs
    else:
        row["difference_of_onnxruntime"] = difference(own["y0"], ort_outputs["y0"])
        row["faster_than_onnxruntime"] = round(row["onnxruntime_us"] / row["onnxfuse_us"], 2)
    print(row, flush=True)
    rows.put(row)


def one_token(rows: Rows, heads: int, batch: int, dtype: str, operator: str) -> None:
    """Measure one token after a state, where each node has a state of its own."""
    given, nodes = operands(1, heads, batch, dtype, operator), max(2, 65 // batch)
    row: dict[str, Any] = {"tokens": 1, "heads": heads, "batch": batch, "dtype": dtype, "operator": operator}
    row["onnxfuse_us"], own = of_session(given, (1, heads, batch, dtype), nodes, True, operator)
    row["onnxruntime_us"], ort_outputs = of_session(given, (1, heads, batch, dtype), nodes, False, operator)
    states = [(given["s0"].clone(), torch.empty_like(given["s0"])) for _ in range(nodes)]
    copies = [captured(lambda n=n: [new.copy_(old) for old, new in states[:n]]) for n in (1, nodes)]
    row["copy_us"] = microseconds(copies[0], copies[1], nodes)
    if row["onnxruntime_us"] is None:
        row["onnxruntime_error"] = ort_outputs
    else:
        row["difference_of_onnxruntime"] = difference(own["p0"], ort_outputs["p0"])
    print(row, flush=True)
    rows.put(row)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--dtypes", default=",".join(DTYPES), help="The dtypes of sequences.")
@click.option("--operator", type=click.Choice(["LinearAttention", "GatedDeltaNet"]), default="LinearAttention")
def main(out: Path, dtypes: str, operator: str) -> None:
    """Measure sequences of 1024 and 8192 tokens, and one token of 1, 8 and 64 sequences."""
    ort.preload_dlls()
    rows = Rows(out, ("tokens", "heads", "batch", "dtype", "operator"))
    for dtype in dtypes.split(","):
        for heads in 16, 32:
            for tokens in 1024, 8192:
                sequence(rows, tokens, heads, dtype, operator)
    for batch in 1, 8, 64:
        one_token(rows, 32, batch, "float16", operator)


if __name__ == "__main__":
    main()
