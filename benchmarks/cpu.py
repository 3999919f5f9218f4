"""Fused files in plain onnxruntime on the CPU, without onnxfuse, beside their originals: neither may be the slower one.

    python benchmarks/cpu.py --out DIR                         # every float32 model of models/exported, and those below
    python benchmarks/cpu.py --out DIR --only 'ocr_*' --seconds 5
    python benchmarks/cpu.py --out DIR coat_mini.onnx yolo12n.onnx  # these files as well

Both files of a model run in turns on one thread, and the clock is the processor time of that thread, so other programs
on the machine disturb the ratio little.  The ratio is the median of the fused file's times over that of the original's.
Results come into DIR/cpu.json, with the processor and the versions.

Exported models are small: most of their time is onnxruntime's own for each node.  The models that are built here are
convolutional networks of text recognition and detection, a ConvNeXt and a ViT, with GELU as exporters write it.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import logging
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from result_text import result_text

from onnxfuse import optimize
from onnxfuse.bench.machine import device, versions
from onnxfuse.ir.dtypes import Array

sys.path.append(str(Path(__file__).parent.parent / "models"))
from exported_models import load_exported, read_index

LIMIT = 1.03  # what a fused file may take at most, of the original's time
SECONDS, MIN_RUNS, MAX_RUNS = 2.0, 20, 1000  # of timed runs of each model
UNKNOWN_SIZE, LARGEST_ID = 64, 49  # of inputs of files; their batch is 1
WARM_UP_RUNS = 3
Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class Case:
    """A model and its inputs."""

    name: str
    model: onnx.ModelProto
    feeds: Feeds


# --- exported models -------------------------------------------------------------------------------------------------


def exported() -> Iterator[Case]:
    """Yield each float32 model of models/exported at the larger of the sizes that it is verified with."""
    for name, entry in sorted(read_index().items()):
        if entry["dtype"] == "fp32":
            feeds = {each["name"]: _drawn(each, entry["verified_sizes"][-1]) for each in entry["inputs"]}
            yield Case(Path(name).stem, load_exported(name), feeds)


def _drawn(described: Mapping[str, Any], sizes: Mapping[str, int]) -> Array:
    """Return seeded values of an input that the index of models/exported describes."""
    dims = described["dims"]
    shape = [dim if isinstance(dim, int) else sum(sizes[part] for part in dim.split(" + ")) for dim in dims]
    random = np.random.default_rng(zlib.crc32(described["name"].encode()))
    value: Array
    if described.get("prefix_mask"):
        value = np.ones(shape)
    elif "range" in described:
        value = random.integers(described["range"][0], described["range"][1] + 1, shape)
    else:
        value = random.standard_normal(shape)
    return value.astype(described["dtype"])


# --- files -----------------------------------------------------------------------------------------------------------


def of_file(path: Path) -> Case:
    """Return the model of a file and seeded inputs."""
    model = onnx.load(path)
    read = [each for each in model.graph.input if each.name not in {weight.name for weight in model.graph.initializer}]
    return Case(path.stem, model, {each.name: _drawn(_described(each), {}) for each in read})


def _described(value: onnx.ValueInfoProto) -> dict[str, Any]:
    """Return the description of an input as the index of models/exported has it."""
    tensor = value.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    dims = [dim.dim_value or (UNKNOWN_SIZE if axis else 1) for axis, dim in enumerate(tensor.shape.dim)]
    return {"name": value.name, "dims": dims, "dtype": dtype} | (
        {"range": [0, LARGEST_ID]} if dtype.kind == "i" else {}
    )


# --- built models ----------------------------------------------------------------------------------------------------


@dataclass
class Network:
    """The nodes and weights of a model of opset 13 with one input; `x` in its methods is the name of a tensor."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, op: str, *inputs: str | float | Sequence[int], **attributes: Any) -> str:
        """Append a node and return its output; numbers are float32 constants, and sequences are int64 ones."""
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        output = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], name=output, **attributes))
        return output

    def constant(self, value: float | Sequence[int] | Array) -> str:
        """Append a constant and return its name."""
        name = f"weight_{len(self.weights)}"
        array = np.asarray(value, np.float32 if isinstance(value, float | np.ndarray) else np.int64)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int) -> str:
        """Append a weight whose products keep the size of their inputs, and return its name."""
        deviation = 1 / math.sqrt(max(1, math.prod(shape[1:] if len(shape) > 2 else shape[:1])))
        return self.constant((self.random.standard_normal(shape) * deviation).astype(np.float32))

    def conv(self, x: str, into: int, out: int, size: int = 3, stride: int = 1, group: int = 1) -> str:
        """Return a convolution with a bias, padded to keep the size where the stride is 1."""
        weights = self.weight(out, into // group, size, size), self.weight(out)
        pads = [size // 2] * 4
        return self.add("Conv", x, *weights, kernel_shape=[size] * 2, strides=[stride] * 2, pads=pads, group=group)

    def gelu(self, x: str) -> str:
        """Return GELU as torch.onnx and Paddle2ONNX write it below opset 20."""
        phi = self.add("Add", self.add("Erf", self.add("Div", x, math.sqrt(2))), 1.0)
        return self.add("Mul", self.add("Mul", x, phi), 0.5)

    def hard_swish(self, x: str) -> str:
        """Return hard-swish as Paddle2ONNX writes it."""
        clipped = self.add("Clip", self.add("Add", x, 3.0), 0.0, 6.0)
        return self.add("Div", self.add("Mul", x, clipped), 6.0)

    def linear(self, x: str, into: int, out: int) -> str:
        """Return x w + bias."""
        return self.add("Add", self.add("MatMul", x, self.weight(into, out)), self.weight(out))

    def layer_norm(self, x: str, width: int) -> str:
        """Return LayerNorm over the last axis, as exporters write it below opset 17."""
        centred = self.add("Sub", x, self.add("ReduceMean", x, axes=[-1]))
        variance = self.add("ReduceMean", self.add("Pow", centred, 2.0), axes=[-1])
        normalized = self.add("Div", centred, self.add("Sqrt", self.add("Add", variance, 1e-5)))
        return self.add("Add", self.add("Mul", normalized, self.weight(width)), self.weight(width))

    def attention(self, x: str, width: int, heads: int, rows: int) -> str:
        """Return self-attention with its two products."""
        packed = self.add("Reshape", self.linear(x, width, 3 * width), (0, rows, 3, heads, width // heads))
        packed = self.add("Transpose", packed, perm=[2, 0, 3, 1, 4])
        q, k, v = (self.add("Gather", packed, self.constant(np.int64(i).item()), axis=0) for i in range(3))
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.add("Mul", scores, (width // heads) ** -0.5)
        context = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
        context = self.add("Reshape", self.add("Transpose", context, perm=[0, 2, 1, 3]), (0, rows, width))
        return self.linear(context, width, width)

    def squeeze_and_excitation(self, x: str, width: int) -> str:
        """Return x with each channel scaled by a gate that is computed from the means of all channels."""
        mean = self.add("GlobalAveragePool", x)
        hidden = self.add("Relu", self.conv(mean, width, width // 4, 1))
        gate = self.add("HardSigmoid", self.conv(hidden, width // 4, width, 1), alpha=0.2, beta=0.5)
        return self.add("Mul", x, gate)

    def model(self, shape: Sequence[int], output: str) -> onnx.ModelProto:
        """Return the model with the input `image` of that shape."""
        inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
        graph = helper.make_graph(self.nodes, "network", inputs, outputs, self.weights)
        return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])


def recogniser() -> Case:
    """Return a recogniser of lines of text in the manner of SVTR: convolutions with GELU, then transformer blocks."""
    n, width, rows = Network(), 96, 12 * 80
    x = n.gelu(n.conv("image", 3, 48, stride=2))
    x = n.gelu(n.conv(x, 48, width, stride=2))
    for _ in range(3):
        local = n.gelu(n.conv(x, width, width, 5, group=width))
        x = n.add("Add", x, n.gelu(n.conv(local, width, width, 1)))
    x = n.add("Transpose", n.add("Reshape", x, (0, width, rows)), perm=[0, 2, 1])
    for _ in range(2):
        x = n.add("Add", x, n.attention(n.layer_norm(x, width), width, 4, rows))
        hidden = n.gelu(n.linear(n.layer_norm(x, width), width, 2 * width))
        x = n.add("Add", x, n.linear(hidden, 2 * width, width))
    x = n.add("ReduceMean", n.add("Reshape", n.layer_norm(x, width), (0, 12, 80, width)), axes=[1], keepdims=0)
    return _case("ocr_recogniser", n, (1, 3, 48, 320), n.add("Softmax", n.linear(x, width, 97), axis=-1))


def detector() -> Case:
    """Return a detector of text in the manner of DBNet on MobileNetV3, with GELU in its neck."""
    n, widths = Network(), (16, 24, 56, 120)
    x, levels, into = n.hard_swish(n.conv("image", 3, 8, stride=2)), [], 8
    for width in widths:
        for stride in (2, 1):
            hidden = n.hard_swish(n.conv(x, into, 2 * width, 1))
            hidden = n.hard_swish(n.conv(hidden, 2 * width, 2 * width, 5, stride, group=2 * width))
            out = n.conv(n.squeeze_and_excitation(hidden, 2 * width), 2 * width, width, 1)
            x, into = out if stride == 2 else n.add("Add", x, out), width
        levels.append(n.conv(x, width, 96, 1))
    top, *lower = reversed(levels)
    for level in lower:
        scales = n.constant(np.asarray([1, 1, 2, 2], np.float32))
        top = n.add("Add", level, n.add("Resize", top, "", scales, mode="nearest", nearest_mode="floor",
                                        coordinate_transformation_mode="asymmetric"))  # fmt: skip
        top = n.gelu(n.conv(top, 96, 96))
    x = n.add("Relu", n.conv(top, 96, 24))
    x = n.gelu(n.add("ConvTranspose", x, n.weight(24, 24, 2, 2), n.weight(24), kernel_shape=[2, 2], strides=[2, 2]))
    x = n.add("ConvTranspose", x, n.weight(24, 1, 2, 2), n.weight(1), kernel_shape=[2, 2], strides=[2, 2])
    return _case("ocr_detector", n, (1, 3, 320, 320), n.add("Sigmoid", x))


def convnext() -> Case:
    """Return the first two stages of a ConvNeXt of half the usual width."""
    n, width = Network(), 48
    x = n.add("Conv", "image", n.weight(width, 3, 4, 4), n.weight(width), kernel_shape=[4, 4], strides=[4, 4])
    for stage in range(2):
        if stage:
            weights = n.weight(2 * width, width, 2, 2), n.weight(2 * width)
            x, width = n.add("Conv", x, *weights, kernel_shape=[2, 2], strides=[2, 2]), 2 * width
        for _ in range(3):
            rows = n.add("Transpose", n.conv(x, width, width, 7, group=width), perm=[0, 2, 3, 1])
            hidden = n.gelu(n.linear(n.layer_norm(rows, width), width, 4 * width))
            scaled = n.add("Mul", n.linear(hidden, 4 * width, width), n.weight(width))
            x = n.add("Add", x, n.add("Transpose", scaled, perm=[0, 3, 1, 2]))
    return _case("convnext", n, (1, 3, 224, 224), n.add("GlobalAveragePool", x))


def vision_transformer() -> Case:
    """Return a ViT of patches of 16 x 16, as narrow as ViT-Ti and with a third of its blocks."""
    n, width, rows = Network(), 192, 14 * 14
    weights = n.weight(width, 3, 16, 16), n.weight(width)
    x = n.add("Conv", "image", *weights, kernel_shape=[16, 16], strides=[16, 16])
    x = n.add("Add", n.add("Transpose", n.add("Reshape", x, (0, width, rows)), perm=[0, 2, 1]), n.weight(rows, width))
    for _ in range(4):
        x = n.add("Add", x, n.attention(n.layer_norm(x, width), width, 3, rows))
        hidden = n.gelu(n.linear(n.layer_norm(x, width), width, 4 * width))
        x = n.add("Add", x, n.linear(hidden, 4 * width, width))
    return _case("vit", n, (1, 3, 224, 224), n.layer_norm(x, width))


def _case(name: str, network: Network, shape: Sequence[int], output: str) -> Case:
    image = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return Case(name, network.model(shape, output), {"image": image})


BUILT: tuple[Callable[[], Case], ...] = (recogniser, detector, convnext, vision_transformer)


# --- timing ----------------------------------------------------------------------------------------------------------


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Return the times of the original and of the fused file, their ratio, and how far their outputs are apart."""
    fused, report = optimize(case.model, verify=False)
    sessions = [session_of(case.model), session_of(fused)]
    expected, found = (session.run(None, dict(case.feeds)) for session in sessions)
    times = times_in_turns(sessions, case.feeds, seconds)
    original, own = map(statistics.median, times)
    return {
        "original_ms": float(f"{original:.3g}"),
        "fused_ms": float(f"{own:.3g}"),
        "ratio": round(own / original, 3),
        "runs": len(times[0]),
        "nodes": [report.input["nodes"], report.output["nodes"]],
        "relative_error": float(f"{max(map(relative_error, expected, found)):.2g}"),
    }


def times_in_turns(sessions: Sequence[onnxruntime.InferenceSession], feeds: Feeds, seconds: float) -> list[list[float]]:
    """Return the milliseconds of processor time of two sessions, which run in turns for about `seconds`."""
    for session in sessions:
        for _ in range(WARM_UP_RUNS):
            session.run(None, dict(feeds))
    start = time.thread_time()
    sessions[0].run(None, dict(feeds))
    runs = max(MIN_RUNS, min(MAX_RUNS, int(seconds / 2 / max(time.thread_time() - start, 1e-6))))
    times: list[list[float]] = [[], []]
    for turn in range(runs):
        for which in (turn % 2, 1 - turn % 2):
            start = time.thread_time()
            sessions[which].run(None, dict(feeds))
            times[which].append(1e3 * (time.thread_time() - start))
    return times


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session of plain onnxruntime on the CPU that runs in the calling thread only."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def relative_error(expected: Array, found: Array) -> float:
    """Return the largest error of an output, relative to its largest value."""
    difference = np.abs(expected.astype(np.float64) - found)
    return float(difference.max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30))


def compare_files(
    script: Path,
    description: str,
    cases: Callable[[], Iterator[Case]],
    measure: Callable[[Case, float], dict[str, Any]],
) -> None:
    """Time both files of all models that the command line asks for, and print and write their ratios.

    What `measure` returns begins with the milliseconds of both files and holds their `ratio`.
    """
    name = f"{script.stem}.json"
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="models to time after those of the benchmark")
    parser.add_argument("--out", type=Path, required=True, help=f"the folder that {name} is written to")
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'ocr_*'")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timed runs for each model")
    arguments = parser.parse_args()
    logging.getLogger("onnxfuse").setLevel(logging.ERROR)
    chosen = [
        case for case in chain(cases(), map(of_file, arguments.files)) if fnmatch.fnmatch(case.name, arguments.only)
    ]
    if not chosen:
        sys.exit(f"no model of this benchmark has a name like '{arguments.only}'")
    models = {}
    for case in chosen:
        models[case.name] = found = measure(case, arguments.seconds)
        first, second, *_ = found.values()
        slower = "  slower than the limit" if found["ratio"] > LIMIT else ""
        print(f"{case.name:40} {first:9.3f} {second:9.3f} ms {found['ratio']:6.3f}{slower}", flush=True)
    ratios = [found["ratio"] for found in models.values()]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"{len(ratios)} models: {mean:.3f} in the geometric mean, {max(ratios):.3f} at most")
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": device("cpu"),
        "versions": versions(),
        "limit": LIMIT,
        "geometric_mean": round(mean, 3),
        "largest": max(ratios),
        "models": models,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / name).write_text(result_text(result), encoding="utf-8")


def cases() -> Iterator[Case]:
    """Yield the exported models and the built ones."""
    yield from exported()
    for build in BUILT:
        yield build()


if __name__ == "__main__":
    compare_files(Path(__file__), __doc__ or "", cases, measure)
