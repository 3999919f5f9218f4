"""Recurrences as Loops, for tests of what becomes of them: models in which each becomes one fused node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from onnxfuse import optimize
from onnxfuse.runtime.fused_calls import Call, read_calls
from onnxfuse.runtime.plan import TensorSpec

HEAD = '<ir_version: 8, opset_import: ["" : 17]> main '
NUMPY = {"float": np.float32, "double": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
         "int64": np.int64}  # fmt: skip


@dataclass(frozen=True)
class ScanCase:
    """A Loop: its inputs by name, each with its dims, the first states by name of the present state, and a step.

    `slices` maps a value of a step to an input and the axis along which it is sliced; t is the number of steps.  `body`
    computes `next_S` for each state S, and the outputs.
    """

    inputs: str
    states: Mapping[str, str]
    slices: Mapping[str, tuple[str, int]]
    body: str
    outputs: str = "y"
    dtype: str = "float"
    scale: float = 1.0  # of the numbers that are drawn
    before: str = ""  # operators that compute the sliced tensors
    after: str = ""  # operators that compute z of the output y, which is then the only output

    def model(self, sizes: Mapping[str, int] | None = None, dtype: str = "") -> onnx.ModelProto:
        """Return the model, in which the given sizes are static."""
        dtype, (source, axis) = dtype or self.dtype, next(iter(self.slices.values()))
        kinds = {name: f"{dtype}[{dims}]" for name, dims in self._dims(sizes)}
        given = ", ".join(f"{kind} {name}" for name, kind in kinds.items())
        states = ", ".join(f"{kinds[first]} {name}" for name, first in self.states.items())
        results = [f"next_{name}" for name in self.states]
        finals, firsts = [f"last_{name}" for name in self.states], list(self.states.values())
        outputs = self.outputs.split()
        lasts = [f"{kinds[first]} {name}" for name, first in zip(finals, firsts, strict=True)]
        nexts = [f"{kinds[first]} {name}" for name, first in zip(results, firsts, strict=True)]
        every = ", ".join([f"{dtype}[] z"] if self.after else [*lasts, *(f"{dtype}[] {name}" for name in outputs)])
        made = ", ".join([*nexts, *(f"{dtype}[] of_{name}" for name in outputs)])
        slices = " ".join(f"{name} = Gather <axis = {at}> ({of}, i)" for name, (of, at) in self.slices.items())
        text = f"""{HEAD} ({given}) => ({every}) <bool go = {{1}}> {{ {self.before}
            shape = Shape <start = {axis}, end = {axis + 1}> ({source})  count = Squeeze (shape)
            {", ".join([*finals, *outputs])} = Loop <body = step (int64 i, bool on, {states}) => (bool still, {made}) {{
                still = Identity (on)  {slices}
                {self.body.replace("T0", dtype)} }}> (count, go, {", ".join(firsts)})  {self.after} }}"""
        model = onnx.parser.parse_model(text)
        for value in model.graph.output[0 if self.after else len(finals) :]:
            value.type.tensor_type.ClearField("shape")
        for node in model.graph.node:
            for value in (v for a in node.attribute if a.name == "body" for v in a.g.output[1 + len(finals) :]):
                value.type.tensor_type.ClearField("shape")
        return model

    def _dims(self, sizes: Mapping[str, int] | None) -> list[tuple[str, str]]:
        parts = [each.split(":") for each in self.inputs.split()]
        return [(name, ",".join(str((sizes or {}).get(dim, dim)) for dim in dims.split(","))) for name, dims in parts]

    def arrays(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
        """Return inputs; those whose name begins with a are decays between 0 and 1."""
        random, found = np.random.default_rng(seed), dict[str, np.ndarray]()
        for name, dims in self._dims(sizes):
            drawn = random.standard_normal([int(dim) for dim in dims.split(",")]) * self.scale
            if self.dtype == "int64":
                drawn = random.integers(-3, 4, drawn.shape)
            found[name] = (np.exp(-np.abs(drawn)) if name.startswith("a") else drawn).astype(NUMPY[self.dtype])
        return found


SELECTIVE = ScanCase(
    "s:b,6,n a:b,6,t,n x:b,6,t,n c:b,t,n", {"s0": "s"}, {"at": ("a", 2), "xt": ("x", 2), "ct": ("c", 1)},
    """kept = Mul (at, s0)  next_s0 = Add (kept, xt)  last = Constant <value = int64[1] {-1}> ()
       column = Unsqueeze (ct, last)  product = MatMul (next_s0, column)  of_y = Squeeze (product, last)""",
)  # fmt: skip
GATED_DELTA = ScanCase(
    "s:b,h,n,v q:b,t,h,n k:b,t,h,n val:b,t,h,v a:b,t,h beta:b,t,h", {"s0": "s"},
    {"qt": ("q", 1), "kt": ("k", 1), "vt": ("val", 1), "at": ("a", 1), "bt": ("beta", 1)},
    """last = Constant <value = int64[1] {-1}> ()  both = Constant <value = int64[2] {-2, -1}> ()
       rows = Constant <value = int64[1] {-2}> ()
       decay = Unsqueeze (at, both)  faded = Mul (s0, decay)  krow = Unsqueeze (kt, rows)
       read3 = MatMul (krow, faded)  read = Squeeze (read3, rows)  gap = Sub (vt, read)  strength = Unsqueeze (bt, last)
       delta = Mul (gap, strength)  kcolumn = Unsqueeze (kt, last)  drow = Unsqueeze (delta, rows)
       outer = Mul (kcolumn, drow)  next_s0 = Add (faded, outer)  qrow = Unsqueeze (qt, rows)
       found = MatMul (qrow, next_s0)  of_y = Squeeze (found, rows)""",
    scale=0.3,
)  # fmt: skip
CASES: Mapping[str, ScanCase] = {
    "selective": SELECTIVE,
    "gated delta": GATED_DELTA,
    "selective with operators around it": ScanCase(
        "s:b,6,n adt:b,6,t a:6,1,n c:b,t,n e:b,t,n u:b,6,t gate:b,6,t skip:6,1", {"s0": "s"},
        {"at": ("decay", 2), "xt": ("input", 2), "ct": ("e", 1)}, SELECTIVE.body,
        before="""end = Constant <value = int64[1] {3}> ()  mid = Constant <value = int64[1] {1}> ()
                  wide = Unsqueeze (adt, end)  rate = Mul (wide, a)  minus = Neg (rate)  decay = Exp (minus)
                  row = Unsqueeze (c, mid)  part = Mul (wide, row)  high = Unsqueeze (u, end)  input = Mul (part, high)
                  """,
        after="""turned = Transpose <perm = [1, 2, 0]> (y)  through = Mul (u, skip)  sum = Add (turned, through)
                 open = Sigmoid (gate)  silu = Mul (gate, open)  gated = Mul (sum, silu)
                 z = Transpose <perm = [0, 2, 1]> (gated)""",
    ),
    "elementwise": ScanCase(
        "s:b,c a:t,b,c x:t,b,c", {"s0": "s"}, {"at": ("a", 0), "xt": ("x", 0)},
        "kept = Mul (at, s0)  next_s0 = Add (kept, xt)  wide = Tanh (next_s0)  of_y = Mul (wide, xt)",
    ),
    "read before it is written": ScanCase(
        "s:b,c x:b,c,t", {"s0": "s"}, {"xt": ("x", 2)}, "next_s0 = Sub (xt, s0)  of_y = Identity (s0)",
    ),
    "two states that change places": ScanCase(
        "p:c q:c x:t,c", {"s0": "p", "s1": "q"}, {"xt": ("x", 0)},
        """half = Constant <value = T0 {0.5}> ()  sum = Add (s0, s1)  next_s1 = Mul (sum, half)
           next_s0 = Add (s1, xt)  of_y = Exp (next_s1)  of_z = Max (s0, s1)""",
        outputs="y z",
    ),
    "a normalized state": ScanCase(
        "s:b,h,n x:b,t,h,n w:n", {"s0": "s"}, {"xt": ("x", 1)},
        """sum = Add (s0, xt)  square = Mul (sum, sum)  mean = ReduceMean <axes = [-1]> (square)
           small = Constant <value = T0 {0.001}> ()  far = Add (mean, small)  root = Sqrt (far)
           unit = Div (sum, root)  next_s0 = Mul (unit, w)  of_y = ReduceMax <axes = [2], keepdims = 0> (next_s0)""",
    ),
    "no outputs of steps": ScanCase(
        "s:b,c,n x:b,t,c,n", {"s0": "s"}, {"xt": ("x", 1)}, "next_s0 = Max (s0, xt)", outputs="",
    ),
    "integers": ScanCase(
        "s:c x:t,c", {"s0": "s"}, {"xt": ("x", 0)}, "next_s0 = Add (s0, xt)  of_y = Abs (s0)", dtype="int64",
    ),
}  # fmt: skip
SIZES = {"b": 2, "t": 11, "n": 5, "h": 3, "v": 6, "c": 7}


def fused(model: onnx.ModelProto) -> Call:
    """Return the only node of a model after it was optimized, other than those that compute the trip count."""
    optimized, report = optimize(model, verify=False)
    assert report.counts.get("scan") == 1, report.counts
    (call,) = (each for each in read_calls(optimized) if each.node.fusion == "scan")
    return call


def specs_of(call: Call, arrays: Mapping[str, np.ndarray]) -> list[TensorSpec]:
    """Return the specs of a node's inputs."""
    return [TensorSpec(arrays[name].shape, arrays[name].dtype.name) for name in call.proto.input]


def expected(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what onnxruntime computes on the CPU, by name of the output."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(arrays)), strict=True))
