"""Time one token after a state in layers of Mamba, Mamba-2 and xLSTM, next to a copy of the bytes that it takes.

    python benchmarks/one_token_of_scans.py --out FILE

Layers have the sizes of mamba-130m, mamba2-130m and an xLSTM of 768 channels, with random weights, without the MLP.
All run in CUDA graphs; a time is the difference between models of several layers, which have weights and states of
their own, and of one.  `launches` names the operators of a layer after fusion.  `copy` is the time in which copies on
the device read and write as many bytes as a layer: its weights once, and its states twice.  Inputs are small, because
onnxruntime's sum of 1,536 squares must not overflow in float16.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import onnx
import onnxruntime as ort
import torch
from linear_attention import captured, microseconds
from onnx import numpy_helper
from rows import Rows

import onnxfuse
from onnxfuse.session import InferenceSession, explain_session

LAYERS: Final = 5
BATCHES: Final = (1, 8)
TYPES: Final = {"float32": "float", "float16": "float16"}
# Norms, convolutions of the last four columns, and SiLU are spelled as transformers exports them.
NORM: Final = """sq@ = Mul ({x}, {x})  mean@ = ReduceMean <axes = [-1], keepdims = 1> (sq@)  more@ = Add (mean@, eps)
 root@ = Sqrt (more@)  unit@ = Div ({x}, root@)  n@ = Mul (unit@, norm@)  p@ = MatMul (n@, w_in@)"""
CONV: Final = """last@ = Unsqueeze (u@, far)  all@ = Concat <axis = 2> (cs@, last@)
 next_cs@ = Slice (all@, one, end, two)  taps@ = Mul (all@, conv@)  tap@ = ReduceSum <keepdims = 0> (taps@, far)
 ub@ = Add (tap@, conv_b@)  us@ = Sigmoid (ub@)  v@ = Mul (ub@, us@)"""
OUT: Final = "w@ = MatMul (o@, w_out@)  {y} = Add ({x}, w@)"
LAYER: Final = {
    "mamba": f"""{NORM}  u@, z@ = Split <axis = 1> (p@, halves)  {CONV}  xp@ = MatMul (v@, w_x@)
 dt@, b@, c@ = Split <axis = 1> (xp@, parts)  dp@ = MatMul (dt@, w_dt@)  db@ = Add (dp@, b_dt@)  d@ = Softplus (db@)
 dw@ = Unsqueeze (d@, far)  da@ = Mul (dw@, a@)  f@ = Exp (da@)  bw@ = Unsqueeze (b@, one)  vw@ = Unsqueeze (v@, far)
 dbb@ = Mul (dw@, bw@)  add@ = Mul (dbb@, vw@)  kept@ = Mul (f@, s@)  next_s@ = Add (kept@, add@)
 cw@ = Unsqueeze (c@, far)  r@ = MatMul (next_s@, cw@)  y1@ = Squeeze (r@, far)  y2@ = Mul (v@, d_@)
 y3@ = Add (y1@, y2@)  zs@ = Sigmoid (z@)  zg@ = Mul (z@, zs@)  o@ = Mul (y3@, zg@)  {OUT}""",
    "mamba2": f"""{NORM}  z@, u@, dt@ = Split <axis = 1> (p@, inner)  {CONV}
 xv@, b@, c@ = Split <axis = 1> (v@, parts)  xh@ = Reshape (xv@, heads)  db@ = Add (dt@, b_dt@)  d@ = Softplus (db@)
 da@ = Mul (d@, a@)  f@ = Exp (da@)  fw@ = Unsqueeze (f@, state_axes)  dw@ = Unsqueeze (d@, far)  dx@ = Mul (dw@, xh@)
 dxw@ = Unsqueeze (dx@, far)  bw@ = Unsqueeze (b@, mid)  add@ = Mul (dxw@, bw@)  kept@ = Mul (fw@, s@)
 next_s@ = Add (kept@, add@)  cw@ = Unsqueeze (c@, mid)  sc@ = Mul (next_s@, cw@)
 y1@ = ReduceSum <keepdims = 0> (sc@, far)  y2@ = Mul (xh@, d_@)  y3@ = Add (y1@, y2@)  y4@ = Reshape (y3@, row)
 zs@ = Sigmoid (z@)  zg@ = Mul (z@, zs@)  g@ = Mul (y4@, zg@)  gq@ = Mul (g@, g@)
 gm@ = ReduceMean <axes = [-1], keepdims = 1> (gq@)  ge@ = Add (gm@, eps)  gr@ = Sqrt (ge@)  gd@ = Div (g@, gr@)
 o@ = Mul (gd@, norm2@)  {OUT}""",
    "mlstm": f"""{NORM}  q1@, k1@, v1@, i@, f@, z@ = Split <axis = 1> (p@, parts)  q@ = Reshape (q1@, keys)
 k2@ = Reshape (k1@, keys)  k@ = Mul (k2@, scale)  v@ = Reshape (v1@, heads)  nf@ = Neg (f@)  sp@ = Softplus (nf@)
 lf@ = Neg (sp@)  lm@ = Add (lf@, m@)  next_m@ = Max (lm@, i@)  ef@ = Sub (lm@, next_m@)  fg@ = Exp (ef@)
 ei@ = Sub (i@, next_m@)  ig@ = Exp (ei@)  fw@ = Unsqueeze (fg@, far)  iw@ = Unsqueeze (ig@, far)  ik@ = Mul (iw@, k@)
 kn@ = Mul (fw@, t@)  next_t@ = Add (kn@, ik@)  fww@ = Unsqueeze (fw@, far)  ikw@ = Unsqueeze (ik@, far)
 vw@ = Unsqueeze (v@, two)  add@ = Mul (ikw@, vw@)  kept@ = Mul (fww@, s@)  next_s@ = Add (kept@, add@)
 qw@ = Unsqueeze (q@, two)  r@ = MatMul (qw@, next_s@)  r2@ = Squeeze (r@, two)  qn@ = Mul (q@, next_t@)
 qs@ = ReduceSum (qn@, far)  qa@ = Abs (qs@)  nm@ = Neg (next_m@)  em@ = Exp (nm@)  emw@ = Unsqueeze (em@, far)
 most@ = Max (qa@, emw@)  h@ = Div (r2@, most@)  hq@ = Mul (h@, h@)
 hm@ = ReduceMean <axes = [-1], keepdims = 1> (hq@)  he@ = Add (hm@, eps)  hr@ = Sqrt (he@)  hd@ = Div (h@, hr@)
 hf@ = Reshape (hd@, row)  hs@ = Mul (hf@, norm2@)  zs@ = Sigmoid (z@)  o@ = Mul (hs@, zs@)  {OUT}""",
}
WEIGHTS: Final = {
    "mamba": {"norm": (768,), "w_in": (768, 3072), "conv": (1536, 4), "conv_b": (1536,), "w_x": (1536, 80),
              "w_dt": (48, 1536), "b_dt": (1536,), "a": (1536, 16), "d_": (1536,), "w_out": (1536, 768)},
    "mamba2": {"norm": (768,), "w_in": (768, 3352), "conv": (1792, 4), "conv_b": (1792,), "b_dt": (24,), "a": (24,),
               "d_": (24, 1), "norm2": (1536,), "w_out": (1536, 768)},
    "mlstm": {"norm": (768,), "w_in": (768, 2312), "norm2": (768,), "w_out": (768, 768)},
}  # fmt: skip
STATES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "mamba": {"cs": (1536, 3), "s": (1536, 16)}, "mamba2": {"cs": (1792, 3), "s": (24, 64, 128)},
    "mlstm": {"m": (4,), "t": (4, 96), "s": (4, 96, 192)},
}  # fmt: skip
SIZES: Final = {
    "mamba": {"halves": [1536, 1536], "parts": [48, 16, 16]},
    "mamba2": {"inner": [1536, 1792, 24], "parts": [1536, 128, 128], "heads": [-1, 24, 64], "row": [-1, 1536],
               "state_axes": [2, 3], "mid": [1, 2]},
    "mlstm": {"parts": [384, 384, 768, 4, 4, 768], "keys": [-1, 4, 96], "heads": [-1, 4, 192], "row": [-1, 768]},
}  # fmt: skip


def model(kind: str, layers: int, batch: int, dtype: str) -> onnx.ModelProto:
    """Return a model of layers, with `x` and the states as inputs, and `y` and the next states as outputs."""
    names = [f"{name}{i}" for i in range(layers) for name in STATES[kind]]
    shape_of = {f"{name}{i}": (batch, *shape) for i in range(layers) for name, shape in STATES[kind].items()}
    text = TYPES[dtype]

    def values(names: list[str], prefix: str = "") -> str:
        return ", ".join(f"{text}[{','.join(map(str, shape_of[name]))}] {prefix}{name}" for name in names)

    body = "\n".join(LAYER[kind].replace("{x}", f"x{i}").replace("{y}", f"x{i + 1}").replace("@", str(i))
                     for i in range(layers))  # fmt: skip
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> main ({text}[{batch},768] x0, {values(names)})'
        f" => ({text}[{batch},768] x{layers}, {values(names, 'next_')}) {{ {body} }}"
    )
    random, numbers = np.random.default_rng(0), SIZES[kind] | {"far": [-1], "one": [1], "two": [2], "end": [9]}
    stored: dict[str, np.ndarray] = {name: np.array(value) for name, value in numbers.items()}
    stored |= {"eps": np.array(1e-5, dtype), "scale": np.array(96**-0.5, dtype)}
    for i in range(layers):
        for name, shape in WEIGHTS[kind].items():
            drawn = random.standard_normal(shape) / (shape[0] ** 0.5 if len(shape) > 1 else 1)
            stored[f"{name}{i}"] = (-np.abs(drawn) if name == "a" else drawn).astype(dtype)
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in stored.items() if name in read)
    return made


class Bound:
    """A session in a CUDA graph, whose states stay on the GPU; the next states have memory of their own."""

    def __init__(self, made: onnx.ModelProto, fused: bool) -> None:
        """Open a session, and bind random inputs."""
        options, text = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})], made.SerializeToString()
        if fused:
            self.session: Any = InferenceSession(text, providers=options, wait=True)
            self.bodies = [each.fusion for each in explain_session(self.session) if each.how != "kernel"]
        else:
            settings = ort.SessionOptions()
            settings.log_severity_level = 3
            self.session = ort.InferenceSession(text, settings, providers=options)
        self.binding, self.kept, self.outputs = self.session.io_binding(), [], {}
        torch.manual_seed(0)
        for side, values in (("input", made.graph.input), ("output", made.graph.output)):
            for value in values:
                kind = value.type.tensor_type
                dtype = torch.float32 if kind.elem_type == onnx.TensorProto.FLOAT else torch.float16
                x = torch.randn([dim.dim_value for dim in kind.shape.dim], device="cuda").abs().div(8).to(dtype)
                self.kept.append(x)
                self.outputs[value.name] = x
                bind = getattr(self.binding, f"bind_{side}")
                bind(value.name, "cuda", 0, kind.elem_type, list(x.shape), x.data_ptr())
        torch.cuda.synchronize()
        for _ in range(4):
            self.run()

    def run(self) -> None:
        """Run once, and wait."""
        self.session.run_with_iobinding(self.binding)


def copies(kind: str, batch: int, dtype: str) -> float:
    """Return the microseconds in which copies move the bytes of a layer, as many as a layer reads and writes."""
    weights = sum(int(np.prod(shape)) for shape in WEIGHTS[kind].values())
    states = batch * sum(int(np.prod(shape)) for shape in STATES[kind].values())
    size = np.dtype(dtype).itemsize * (weights + 2 * states) // 2
    memory = [(torch.empty(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8, device="cuda"))
              for _ in range(LAYERS)]  # fmt: skip
    runs = [captured(lambda n=n: [new.copy_(old) for old, new in memory[:n]]) for n in (1, LAYERS)]
    return microseconds(runs[0], runs[1], LAYERS)


def launches(optimized: onnx.ModelProto) -> list[str]:
    """Return the operators of a layer that run on a GPU, in their order."""
    free = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "Constant"}
    return [re.sub(r"_\d+$", "", node.op_type) for node in optimized.graph.node if node.op_type not in free]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--dtypes", default="float32,float16", help="The dtypes of models.")
@click.option("--models", default=",".join(LAYER), help="The layers.")
def main(out: Path, dtypes: str, models: str) -> None:
    """Measure all rows."""
    ort.preload_dlls()
    rows = Rows(out, ("model", "batch", "dtype"))
    for dtype in dtypes.split(","):
        for kind in models.split(","):
            for batch in BATCHES:
                made = {count: model(kind, count, batch, dtype) for count in (1, LAYERS)}
                fused = {count: onnxfuse.optimize(each, verify=False)[0] for count, each in made.items()}
                own = {count: Bound(each, True) for count, each in fused.items()}
                other = {count: Bound(each, False) for count, each in made.items()}
                row: dict[str, Any] = {"model": kind, "batch": batch, "dtype": dtype, "launches": launches(fused[1])}
                row["bodies"] = own[1].bodies
                row["onnxfuse_us"] = microseconds(own[1].run, own[LAYERS].run, LAYERS)
                row["onnxruntime_us"] = microseconds(other[1].run, other[LAYERS].run, LAYERS)
                row["copy_us"] = copies(kind, batch, dtype)
                pairs = [(own[1].outputs[name], other[1].outputs[name]) for name in ("x1", "next_s0")]
                row["difference"] = max(float(f"{((a - b).abs().max() / b.abs().max()).item():.2g}") for a, b in pairs)
                print(row, flush=True)
                rows.put(row)


if __name__ == "__main__":
    main()
