"""Measure the memory that `onnxfuse optimize` takes for a large model whose weights lie in a file beside it.

    python benchmarks/memory.py [--gigabytes 2.8] [--packed] [--verify] [--dtype float16] [--folder FOLDER]
                                [--out results]

The model is a chain of decoder blocks of width 2,048 in float32 (RMSNorm, queries, keys and values, attention, a gated
product, residuals), as many as it takes; with `--packed` the gate and the up weight are one constant, which is split.
Its weights are normal numbers, the same ones every 16 MB.  The command runs in a process of its own,
and told is the largest size of its memory and that of the processes that it starts (the sum of Pss, looked up 50 times
a second, on Linux only), beside that of a process which only imports onnxfuse.  With `--dtype` it converts the
model to half precision, for which it runs the model in slices.  With `--verify` the command verifies, and told besides
is the size of onnxruntime when it runs the model alone.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import onnx
from onnx import TensorProto, helper
from result_text import result_text

WIDTH, HIDDEN, HEADS = 2048, 5632, 16
INTERVAL = 0.02  # seconds between two looks at the memory
ALONE = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {"x": numpy.ones((1, 16, 2048), numpy.float32)})
"""


@dataclass(frozen=True)
class Peak:
    """What a process took."""

    megabytes: float
    seconds: float


def main() -> None:
    """Build the model, run the command, print and write what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.8, help="size of the weights")
    parser.add_argument("--packed", action="store_true", help="gate and up weights are one constant")
    parser.add_argument("--verify", action="store_true", help="also verify, and run onnxruntime alone")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="also convert to half precision")
    parser.add_argument("--folder", type=Path, help="where the models are written  [default: that of temporary files]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        source, target = Path(name) / "in.onnx", Path(name) / "out.onnx"
        size = build(source, given.gigabytes, packed=given.packed)
        command = ["-m", "onnxfuse", "optimize", str(source), str(target), *([] if given.verify else ["--no-verify"])]
        command += ["--dtype", given.dtype] if given.dtype else []
        found = {"imports": peak(["-c", "import onnxfuse.optimizer"]), "optimize": peak(command)}
        if given.verify:
            found["onnxruntime alone"] = peak(["-c", ALONE, str(source)])
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "weights_gb": size / 1e9,
        "packed": given.packed, "verify": given.verify, "dtype": given.dtype or "float32",
        "versions": {each: version(each) for each in ("onnxfuse", "onnx", "onnxruntime", "protobuf")},
        "peaks": {what: {"mb": round(each.megabytes), "seconds": round(each.seconds, 1)}
                  for what, each in found.items()},
    }  # fmt: skip
    for what, each in found.items():
        print(f"{what:20} {each.megabytes:8,.0f} MB {each.seconds:8.1f} s")
    given.out.mkdir(parents=True, exist_ok=True)
    kind = f"{'-packed' if given.packed else ''}{'-verify' if given.verify else ''}"
    kind += f"-{given.dtype}" if given.dtype else ""
    path = given.out / f"memory{kind}-{result['date']}.json"
    path.write_text(result_text(result), encoding="utf-8")


def peak(arguments: Sequence[str]) -> Peak:
    """Run Python with these arguments, and return what it took.  Raises SystemExit if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-W", "ignore", *arguments])
    largest = 0
    while process.poll() is None:
        largest = max(largest, sum(proportional_size(each) for each in descendants(process.pid)))
        time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    return Peak(largest / 1e6, time.perf_counter() - start)


def descendants(pid: int) -> list[int]:
    """Return a process and those that it started, directly or not."""
    found = [pid]
    for each in found:
        for tasks in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                found += map(int, tasks.read_text(encoding="utf-8").split())
    return found


def proportional_size(pid: int) -> int:
    """Return the bytes of memory of a process; what it shares with others counts in parts (Pss of proc(5))."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class Weights:
    """Initializers one after the other in a sparse file."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.tensors: list[TensorProto] = []
        self.end = 0

    def add(self, name: str, *dims: int) -> str:
        """Add an initializer of float32.  Returns its name."""
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
        length = 4
        for size in dims:
            length *= size
        for key, value in (("location", self.location), ("offset", self.end), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        self.end += -(-length // 4096) * 4096
        return name


def build(path: Path, gigabytes: float, *, packed: bool) -> int:
    """Write the model.  Returns the bytes of its weights."""
    weights, nodes, x = Weights(f"{path.stem}.bin"), list[onnx.NodeProto](), "x"
    heads = helper.make_tensor("heads", TensorProto.INT64, [4], [0, 0, HEADS, WIDTH // HEADS])
    joined = helper.make_tensor("joined", TensorProto.INT64, [3], [0, 0, WIDTH])
    constants = [
        heads, joined, helper.make_tensor("epsilon", TensorProto.FLOAT, [], [1e-5]),
        helper.make_tensor("two", TensorProto.FLOAT, [], [2.0]),
        helper.make_tensor("scale", TensorProto.FLOAT, [], [(WIDTH // HEADS) ** -0.5]),
    ]  # fmt: skip
    while weights.end < gigabytes * 1e9:
        x = block(nodes, weights, f"layer{len(nodes)}", x, packed)
    kind = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", WIDTH])
    output = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["batch", "sequence", WIDTH])
    graph = helper.make_graph(nodes, "decoder", [kind], [output], [*constants, *weights.tensors])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    values = numpy.random.default_rng(0).standard_normal(2**22).astype("<f4") * WIDTH**-0.5
    with (path.parent / weights.location).open("wb") as file:
        while left := weights.end - file.tell():
            file.write(values.data.cast("B")[:left])
    return weights.end


def block(nodes: list[onnx.NodeProto], weights: Weights, name: str, x: str, packed: bool) -> str:
    """Append a decoder block that reads `x`.  Returns its output."""

    def node(op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        written = [f"{name}.{op}.{len(nodes)}.{i}" for i in range(outputs)]
        nodes.append(helper.make_node(op, inputs, written, f"{name}.{op}.{len(nodes)}", **attributes))
        return written[0]

    def norm(value: str, weight: str) -> str:
        mean = node("ReduceMean", node("Pow", value, "two"), axes=[-1])
        root = node("Sqrt", node("Add", mean, "epsilon"))
        return node("Mul", node("Div", value, root), weights.add(f"{name}.{weight}", WIDTH))

    def product(value: str, weight: str, *dims: int) -> str:
        return node("MatMul", value, weights.add(f"{name}.{weight}", *dims))

    def head(value: str, order: Sequence[int]) -> str:
        return node("Transpose", node("Reshape", value, "heads"), perm=order)

    h = norm(x, "norm1")
    q, k, v = (product(h, each, WIDTH, WIDTH) for each in ("q", "k", "v"))
    scores = node("Mul", node("MatMul", head(q, (0, 2, 1, 3)), head(k, (0, 2, 3, 1))), "scale")
    context = node("MatMul", node("Softmax", scores, axis=-1), head(v, (0, 2, 1, 3)))
    context = node("Reshape", node("Transpose", context, perm=(0, 2, 1, 3)), "joined")
    x = node("Add", x, product(context, "o", WIDTH, WIDTH))
    h = norm(x, "norm2")
    if packed:
        both = product(h, "gate_up", WIDTH, 2 * HIDDEN)
        gate = node("Split", both, outputs=2, axis=-1)
        up = nodes[-1].output[1]
    else:
        gate, up = (product(h, each, WIDTH, HIDDEN) for each in ("gate", "up"))
    h = node("Mul", node("Mul", gate, node("Sigmoid", gate)), up)
    return node("Add", x, product(h, "down", HIDDEN, WIDTH))


if __name__ == "__main__":
    main()
