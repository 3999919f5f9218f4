"""Time LSTM and GRU layers next to those of onnxruntime and PyTorch, which run cuDNN.

    python benchmarks/recurrent.py --out FILE [--only lstm,gru] [--dtypes float16,float32] [--quick]

Weights are random, as many inputs as units.  A time is the median of runs that follow each other, with all inputs and
outputs on the GPU.  `plans` has the time of each way to run the fused node, by its clusters, sequences and products.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper
from rows import Rows

import onnxfuse
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.kernels.recurrent import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, TensorSpec
from onnxfuse.session import InferenceSession, explain_session

# Units, steps, sequences.
SIZES: Final = ((128, 200, 1), (512, 200, 1), (512, 200, 32), (128, 200, 32), (256, 200, 1), (256, 100, 64),
                (64, 50, 1), (512, 200, 128), (512, 1, 1))  # fmt: skip
QUICK: Final = 3  # sizes
GATES: Final = {"lstm": 4, "gru": 3}
SECONDS: Final = 0.1  # of a measurement
SETTLED: Final = 0.3  # seconds in which the kernels of new sizes are compiled or loaded, after the first run


def weights(fusion: str, hidden: int, dtype: str) -> dict[str, np.ndarray]:
    """Return the weights and biases of a layer."""
    random, rows = np.random.default_rng(0), GATES[fusion] * hidden
    shapes = {"w": (1, rows, hidden), "r": (1, rows, hidden), "bias": (1, 2 * rows)}
    return {name: (random.uniform(-1, 1, shape) / hidden**0.5).astype(dtype) for name, shape in shapes.items()}


def attributes(fusion: str, hidden: int) -> dict[str, Any]:
    """Return the attributes of the operator, which for a GRU are PyTorch's."""
    return {"hidden_size": hidden, **({"linear_before_reset": 1} if fusion == "gru" else {})}


def model(fusion: str, hidden: int, dtype: str) -> onnx.ModelProto:
    """Return a model of one layer of dynamic steps and sequences."""
    kind, constants = DTYPE_NUMBERS[dtype], weights(fusion, hidden, dtype)
    outputs = ["y", "y_h", "y_c"][: 3 if fusion == "lstm" else 2]
    shapes = {"y": ["steps", 1, "batch", hidden], "y_h": [1, "batch", hidden], "y_c": [1, "batch", hidden]}
    node = helper.make_node(fusion.upper(), ["x", *constants], outputs, **attributes(fusion, hidden))
    graph = helper.make_graph(
        [node], "layer", [helper.make_tensor_value_info("x", kind, ["steps", "batch", hidden])],
        [helper.make_tensor_value_info(name, kind, shapes[name]) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def microseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call among calls that follow each other."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(2, min(200, int(SECONDS / 5 / (time.perf_counter() - start))))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / count)
    return statistics.median(times)


def in_session(session: Any, x: torch.Tensor, hidden: int) -> tuple[Callable[[], object], torch.Tensor]:
    """Return a run of a session with tensors on the GPU, and the tensor of the first output."""
    binding, dtype = session.io_binding(), np.dtype(str(x.dtype).removeprefix("torch."))
    steps, batch, _ = x.shape
    y = torch.empty((steps, 1, batch, hidden), device="cuda", dtype=x.dtype)
    held = [torch.empty((1, batch, hidden), device="cuda", dtype=x.dtype) for _ in session.get_outputs()[1:]]
    binding.bind_input("x", "cuda", 0, dtype, list(x.shape), x.data_ptr())
    for output, tensor in zip(session.get_outputs(), [y, *held], strict=True):
        binding.bind_output(output.name, "cuda", 0, dtype, list(tensor.shape), tensor.data_ptr())

    def run(_keep: object = held) -> None:
        session.run_with_iobinding(binding)

    return run, y


def in_torch(fusion: str, hidden: int, x: torch.Tensor) -> Callable[[], object]:
    """Return a call of PyTorch's layer of the same size."""
    layer = getattr(torch.nn, fusion.upper())(hidden, hidden).to("cuda", x.dtype)

    def run() -> None:
        with torch.no_grad():
            layer(x)

    return run


def plans(fusion: str, hidden: int, x: torch.Tensor) -> dict[str, float]:
    """Return the microseconds of each way to run a layer in a CUDA graph."""
    dtype = str(x.dtype).removeprefix("torch.")
    constants = {name: torch.from_numpy(value).cuda() for name, value in weights(fusion, hidden, dtype).items()}
    outputs = (dtype,) * (3 if fusion == "lstm" else 2)
    node = FusedNode(fusion, "n", ("x", *constants), {"hidden": hidden, "directions": 1, **attributes(fusion, hidden)},
                     outputs)  # fmt: skip
    given = [x, *constants.values()]
    specs = [TensorSpec(tuple(t.shape), dtype, True, i > 0) for i, t in enumerate(given)]
    device, found = cuda_driver.gpu(0), {}
    configs = host.ranked(host.layer_of(node, specs), device)
    for config, plan in zip(configs, host.candidates(node, specs, device), strict=True):
        ready = ready_plan(plan, specs)
        written = [torch.empty(spec.shape, device="cuda", dtype=x.dtype) for spec in plan.outputs]
        scratch = torch.empty(max(1, ready.scratch_bytes), device="cuda", dtype=torch.uint8)
        addresses = [t.data_ptr() for t in given], [t.data_ptr() for t in written], scratch.data_ptr()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        ready.run(*addresses, stream=stream.cuda_stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            ready.run(*addresses, stream=torch.cuda.current_stream().cuda_stream)
        name = f"{config.cluster}x{config.warps}x{config.columns}{' mma' if config.mma else ' fma'}"
        found[name] = microseconds(graph.replay)
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--only", default="lstm,gru", help="lstm, gru or both.")
@click.option("--dtypes", default="float16,float32", help="float16, float32 or both.")
@click.option("--quick", is_flag=True, help="Time the first sizes only.")
def main(out: Path, only: str, dtypes: str, quick: bool) -> None:
    """Time layers with onnxfuse, onnxruntime and PyTorch."""
    ort.preload_dlls()
    rows = Rows(out, ("layer", "dtype", "hidden", "steps", "batch"))
    for fusion, dtype, (hidden, steps, batch) in itertools.product(
        only.split(","), dtypes.split(","), SIZES[:QUICK] if quick else SIZES
    ):
        x = torch.randn((steps, batch, hidden), device="cuda", dtype=getattr(torch, dtype))
        plain = model(fusion, hidden, dtype)
        fused, _ = onnxfuse.optimize(plain, verify=False)
        own = InferenceSession(fused.SerializeToString(), providers=["CUDAExecutionProvider"], wait=True)
        other = ort.InferenceSession(plain.SerializeToString(), providers=["CUDAExecutionProvider"])
        (run, y), (run_other, right) = (in_session(each, x, hidden) for each in (own, other))
        run()
        time.sleep(SETTLED)
        times = [microseconds(each) for each in (run, run_other, in_torch(fusion, hidden, x))]
        error = float((y - right).abs().max())
        ways = plans(fusion, hidden, x)
        how = explain_session(own)[0].how
        told = ", ".join(f"{name} {us:.0f}" for name, us in ways.items())
        print(f"{fusion} {dtype} {hidden} T{steps} b{batch}: onnxfuse {times[0]:.0f} us, onnxruntime {times[1]:.0f}, "
              f"PyTorch {times[2]:.0f}; {times[0] / times[1]:.2f}; {told}; error {error:.1e}; {how}",
              flush=True)  # fmt: skip
        rows.put({"layer": fusion, "dtype": dtype, "hidden": hidden, "steps": steps, "batch": batch,
                  "onnxfuse_us": times[0], "onnxruntime_us": times[1], "torch_us": times[2], "error": error,
                  "plans_us": ways})  # fmt: skip


if __name__ == "__main__":
    main()
