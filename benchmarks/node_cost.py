"""Measure the cost of one more node in a chain of small tensors: a fused node beside an Add of onnxruntime.

    python benchmarks/node_cost.py --out FILE

A chain of 201 nodes and one of a single node differ by 200 nodes; each time is the least of several samples, taken in
turns.  On float32 tensors of 128 elements a node's own work takes no time, so that the launch is all that it costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import click
import numpy as np
import onnx.parser
import onnxruntime as ort
from rows import Rows

import onnxfuse
from onnxfuse.session import InferenceSession, explain_session

ELEMENTS: Final = 128
NODES: Final = (1, 201)
SAMPLES: Final = 9
RUNS: Final = 50  # runs per sample
WARM_RUNS: Final = 20


def chain(step: str, nodes: int) -> onnx.ModelProto:
    """Return a model whose nodes follow each other; `step` is an assignment with {x} and {y} as the ends of a node."""
    names = ["x", *(f"t{i}" for i in range(1, nodes)), "y"]
    steps = "\n".join(step.format(x=x, y=y) for x, y in pairwise(names))
    ones = ", ".join(["1"] * ELEMENTS)
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[1, {ELEMENTS}] x) => (float[1, {ELEMENTS}] y) '
        f"<float[{ELEMENTS}] scale = {{{ones}}}> {{ {steps} }}"
    )


def fused_chain(nodes: int) -> onnx.ModelProto:
    """Return a chain of fused nodes that add a bias and apply Relu."""
    model = chain("s_{y} = Add(scale, {x}) {y} = Relu(s_{y})", nodes)
    fused, report = onnxfuse.optimize(model, verify=False, regions=False)
    assert report.counts == {"bias_activation": nodes}
    return fused


def runner(model: onnx.ModelProto, graph: bool) -> Callable[[], None]:
    """Return a function that runs a model on tensors of the GPU."""
    options = {"enable_cuda_graph": "1"} if graph else {}
    session = InferenceSession(model.SerializeToString(), providers=[("CUDAExecutionProvider", options)], wait=True)
    assert {each.how for each in explain_session(session)} <= {"kernel"}
    binding = session.io_binding()
    zeros = np.zeros((1, ELEMENTS), np.float32)
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(zeros, "cuda", 0))
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(zeros, "cuda", 0))
    for _ in range(WARM_RUNS):
        session.run_with_iobinding(binding)
    return lambda: session.run_with_iobinding(binding)


def microseconds(run: Callable[[], None]) -> float:
    """Return the time of one run, from RUNS of them."""
    start = time.perf_counter()
    for _ in range(RUNS):
        run()
    return (time.perf_counter() - start) / RUNS * 1e6


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
def main(out: Path) -> None:
    """Measure the cost of a node, launched one by one and in a CUDA graph."""
    ort.preload_dlls()
    rows = Rows(out, ("node", "cuda_graph"))
    chains = {"Add": lambda nodes: chain("{y} = Add({x}, scale)", nodes), "bias_activation": fused_chain}
    for graph in (False, True):
        runs = {(name, nodes): runner(made(nodes), graph) for name, made in chains.items() for nodes in NODES}
        least = dict.fromkeys(runs, float("inf"))
        for _ in range(SAMPLES):
            for key, run in runs.items():
                least[key] = min(least[key], microseconds(run))
        few, many = NODES
        for name in chains:
            cost = (least[name, many] - least[name, few]) / (many - few)
            print(f"{name:16} {'in a CUDA graph' if graph else 'launched':16} {cost:6.3f} us a node")
            rows.put({"node": name, "cuda_graph": graph, "us": cost})


if __name__ == "__main__":
    main()
