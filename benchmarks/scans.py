"""Time a two-layer Mamba, whose scan is a Loop or unrolled, in onnxruntime and after onnxfuse, on a GPU.

    python benchmarks/scans.py --out benchmarks/results/scans-h200-DATE.json
    python benchmarks/scans.py --only loop --steps 512 --batch 1

The layers are those of transformers' slow path in the sizes of mamba-130m, with random weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from result_text import result_text

import onnxfuse
from onnxfuse.bench.machine import device, versions

HIDDEN, INNER, STATES, RANK, WIDTH, LAYERS = 768, 1536, 16, 48, 4, 2
SECONDS = 1.0  # of one contender


@dataclass
class Mamba:
    """A model that is being written: its scans are Loops, or `unrolled`."""

    batch: int
    steps: int
    unrolled: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def put(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node, and return the names of its outputs."""
        names = [f"{op}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def weight(self, value: Any) -> str:
        """Add a constant, and return its name."""
        self.weights[f"w{len(self.weights)}"] = np.asarray(value)
        return f"w{len(self.weights) - 1}"

    def drawn(self, *shape: int) -> str:
        """Add random weights, and return their name."""
        scale = 1 / np.sqrt(shape[0] if len(shape) == 2 else shape[-1])
        return self.weight((self.random.standard_normal(shape) * scale).astype(np.float32))

    def model(self) -> onnx.ModelProto:
        """Return the model of `x` (batch, steps, HIDDEN) and `y` of the same shape."""
        x = "x"
        for _ in range(LAYERS):
            x = self.put("Add", x, self.layer(x))
        self.nodes.append(helper.make_node("Identity", [x], ["y"]))
        shape = [self.batch, self.steps, HIDDEN]
        inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name in "xy")
        stored = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        graph = helper.make_graph(self.nodes, "mamba", inputs, outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def layer(self, x: str) -> str:
        """Add a layer, and return its output."""
        both = self.put("Transpose", self.put("MatMul", x, self.drawn(HIDDEN, 2 * INNER)), perm=[0, 2, 1])
        inner, gate = self.put("Split", both, self.weight([INNER, INNER]), outputs=2, axis=1)
        taps = self.put("Conv", inner, self.drawn(INNER, 1, WIDTH), self.drawn(INNER), group=INNER, pads=[WIDTH - 1, 0])
        u = self.put("Mul", taps, self.put("Sigmoid", taps))
        read = self.put("MatMul", self.put("Transpose", u, perm=[0, 2, 1]), self.drawn(INNER, RANK + 2 * STATES))
        rank, b, c = self.put("Split", read, self.weight([RANK, STATES, STATES]), outputs=3, axis=2)
        rank = self.put("Transpose", rank, perm=[0, 2, 1])
        dt = self.put(
            "Softplus", self.put("Add", self.put("MatMul", self.drawn(INNER, RANK), rank), self.drawn(INNER, 1))
        )
        wide = self.put("Unsqueeze", dt, self.weight([3]))
        decay = self.weight(
            -np.tile(np.arange(1, STATES + 1, dtype=np.float32), (1, INNER, 1, 1)).reshape(1, INNER, 1, STATES)
        )
        a = self.put("Exp", self.put("Mul", decay, wide))
        db = self.put("Mul", wide, self.put("Unsqueeze", b, self.weight([1])))
        dbu = self.put("Mul", db, self.put("Unsqueeze", u, self.weight([3])))
        y = (self.trace if self.unrolled else self.loop)(a, dbu, c)
        y = self.put("Add", y, self.put("Mul", u, self.drawn(INNER, 1)))
        y = self.put("Mul", y, self.put("Mul", gate, self.put("Sigmoid", gate)))
        return str(self.put("MatMul", self.put("Transpose", y, perm=[0, 2, 1]), self.drawn(INNER, HIDDEN)))

    def trace(self, a: str, b: str, c: str) -> str:
        """Add the steps of a scan one by one, and return its output (batch, INNER, steps)."""
        state, last, results = self.weight(np.zeros((self.batch, INNER, STATES), np.float32)), self.weight([-1]), []
        for i in range(self.steps):
            at = self.weight(i)
            kept = self.put("Mul", self.put("Gather", a, at, axis=2), state)
            state = self.put("Add", kept, self.put("Gather", b, at, axis=2))
            results.append(self.put("MatMul", state, self.put("Unsqueeze", self.put("Gather", c, at, axis=1), last)))
        return str(self.put("Concat", *results, axis=2))

    def loop(self, a: str, b: str, c: str) -> str:
        """Add a scan as a Loop, and return its output (batch, INNER, steps)."""
        zeros, last = self.weight(np.zeros((self.batch, INNER, STATES), np.float32)), self.weight([-1])
        outer, self.nodes = self.nodes, [helper.make_node("Identity", ["on"], ["still"])]
        kept = self.put("Mul", self.put("Gather", a, "i", axis=2), "now")
        self.nodes.append(helper.make_node("Add", [kept, self.put("Gather", b, "i", axis=2)], ["next"]))
        column = self.put("Unsqueeze", self.put("Gather", c, "i", axis=1), last)
        out = self.put("Squeeze", self.put("MatMul", "next", column), last)
        shape = [self.batch, INNER, STATES]
        inputs = [helper.make_tensor_value_info("i", TensorProto.INT64, []),
                  helper.make_tensor_value_info("on", TensorProto.BOOL, []),
                  helper.make_tensor_value_info("now", TensorProto.FLOAT, shape)]  # fmt: skip
        outputs = [helper.make_tensor_value_info("still", TensorProto.BOOL, []),
                   helper.make_tensor_value_info("next", TensorProto.FLOAT, shape),
                   helper.make_tensor_value_info(out, TensorProto.FLOAT, shape[:2])]  # fmt: skip
        prefix = f"l{len(outer)}_"
        made = {name for node in self.nodes for name in node.output} | {value.name for value in inputs}
        for node in self.nodes:
            node.input[:] = [prefix + name if name in made else name for name in node.input]
            node.output[:] = [prefix + name for name in node.output]
        for value in (*inputs, *outputs):
            value.name = prefix + value.name
        body, self.nodes = helper.make_graph(self.nodes, "step", inputs, outputs), outer
        given = self.weight(np.array(self.steps)), self.weight(np.array(True)), zeros
        return str(self.put("Transpose", self.put("Loop", *given, outputs=2, body=body)[1], perm=[1, 2, 0]))


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a run."""
    run()
    times, end = list[float](), time.perf_counter() + SECONDS
    while not times or (time.perf_counter() < end and len(times) < 200):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def bound(session: Any, feeds: Mapping[str, np.ndarray]) -> tuple[Callable[[], object], Callable[[], np.ndarray]]:
    """Return a function that runs a session with tensors on the GPU, and one that then returns its output."""
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    binding.bind_output("y", "cuda", 0)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run, lambda: np.asarray(binding.copy_outputs_to_cpu()[0])


def timed(unrolled: bool, batch: int, steps: int) -> dict[str, Any]:
    """Return the times of a model in onnxruntime and after onnxfuse, in ms, and how far the outputs differ."""
    model = Mamba(batch, steps, unrolled).model()
    begin = time.perf_counter()
    fused, report = onnxfuse.optimize(model, verify=False)
    seconds = time.perf_counter() - begin
    x = np.random.default_rng(1).standard_normal((batch, steps, HIDDEN), dtype=np.float32)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    original = ort.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])
    run, output = bound(original, {"x": x})
    before, wanted = milliseconds(run), output()
    run, output = bound(onnxfuse.InferenceSession(fused.SerializeToString(), wait=True), {"x": x})
    after, found = milliseconds(run), output()
    return {
        "form": "unrolled" if unrolled else "loop", "batch": batch, "steps": steps, "nodes": len(model.graph.node),
        "fused_nodes": len(fused.graph.node), "scans": report.counts.get("scan", 0), "optimize_s": seconds,
        "onnxruntime_ms": before, "onnxfuse_ms": after, "times": before / after,
        "difference": float(np.abs(found - wanted).max() / np.abs(wanted).max()),
    }  # fmt: skip


@click.command()
@click.option("--only", type=click.Choice(["loop", "unrolled"]), multiple=True, default=["loop", "unrolled"])
@click.option("--batch", type=int, multiple=True, default=[1, 8])
@click.option("--steps", type=int, multiple=True, default=[512, 2048])
@click.option("--out", type=click.Path(path_type=Path), help="Write the result to this file.")
def main(only: tuple[str, ...], batch: tuple[int, ...], steps: tuple[int, ...], out: Path | None) -> None:
    """Time each form at each batch and number of steps."""
    rows = []
    for form in only:
        for count in steps:
            for images in batch:
                rows.append(timed(form == "unrolled", images, count))
                click.echo(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                                     for name, value in rows[-1].items()))  # fmt: skip
    if out:
        found = {"device": device("cuda"), "versions": versions(), "rows": rows}
        out.write_text(result_text(found), encoding="utf-8")


if __name__ == "__main__":
    main()
