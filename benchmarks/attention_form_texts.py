"""Forms of attention in plain operators: what attention_forms.py times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx.parser

BATCH, HEADS, ROWS = 2, 16, 2048
OPSET = 18
TEXT = """
<ir_version: 8, opset_import: ["" : {opset}]>
form (T[{batch},{rows},{q_width}] q, T[{batch},{rows},{q_width}] k, T[{batch},{rows},{v_width}] v{inputs})
  => (T[{batch},{rows},{v_width}] y)
<int64[4] split = {{0, 0, {heads}, -1}}, int64[3] join = {{0, 0, -1}}>
{{
  q4 = Reshape (q, split) qh = Transpose <perm = [0, 2, 1, 3]> (q4)
  k4 = Reshape (k, split) kh = Transpose <perm = [0, 2, 1, 3]> (k4)
  v4 = Reshape (v, split) vh = Transpose <perm = [0, 2, 1, 3]> (v4)
  {before}
  kt = Transpose <perm = [0, 1, 3, 2]> ({k})
  product = MatMul ({q}, kt)
  scores = Mul (product, {scale})
  {behind}
  weights = Softmax <axis = -1> ({scores})
  context = MatMul (weights, vh)
  rows = Transpose <perm = [0, 2, 1, 3]> (context)
  y = Reshape (rows, join)
}}
"""


@dataclass(frozen=True)
class Form:
    """A form of attention: what it computes before the first product, and between the product and the softmax."""

    name: str
    before: str = ""
    behind: str = ""
    q: str = "qh"
    k: str = "kh"
    scale: str = "scale"
    scores: str = "scores"
    inputs: str = ""
    key_size: float = 1.0  # elements of a head of keys, of those that are asked for
    value_size: float = 1.0
    share: float = 1.0  # of the scores that count
    peer: str = ""  # the form it is compared with, besides the plain one

    def sizes(self, size: int) -> tuple[int, int]:
        """Return the elements of a head of keys, and of values."""
        return round(size * self.key_size), round(size * self.value_size)


def _cosine(name: str) -> str:
    return f"{name}_norm = ReduceL2 <keepdims = 1> ({name}h, last) {name}_length = Max ({name}_norm, least) " + (
        f"{name}_unit = Div ({name}h, {name}_length)"
    )


def _halves(name: str) -> str:
    return f"""{name}_first = Slice ({name}h, zero, half, last, one)
        {name}_second = Slice ({name}h, half, end, last, one)
        {name}_negative = Neg ({name}_second) {name}_turned = Concat <axis = -1> ({name}_negative, {name}_first)"""


def _pairs(name: str) -> str:
    return f"""{name}_even = Slice ({name}h, zero, end, last, two) {name}_odd = Slice ({name}h, one, end, last, two)
        {name}_negative = Neg ({name}_odd) {name}_n5 = Unsqueeze ({name}_negative, last)
        {name}_e5 = Unsqueeze ({name}_even, last) {name}_both = Concat <axis = -1> ({name}_n5, {name}_e5)
        {name}_turned = Reshape ({name}_both, whole)"""


def _rotated(name: str, turned: str) -> str:
    return f"""{turned} {name}_straight = Mul ({name}h, c) {name}_crossed = Mul ({name}_turned, s)
        {name}_rotated = Add ({name}_straight, {name}_crossed)"""


TABLES = ", T[1,{rows},{size}] cos, T[1,{rows},{size}] sin"
HEAD_AXIS = "c = Unsqueeze (cos, one) s = Unsqueeze (sin, one) "
ALIBI = "bias = Mul (slopes, places)"  # slopes times positions of keys, from the last one on
CAP = "small = Div (scores, cap) tanh = Tanh (small) capped = Mul (tanh, cap)"
FORMS = {
    form.name: form
    for form in (
        Form("plain"),
        Form("causal", behind="masked = Where (seen, scores, lowest)", scores="masked", share=0.5),
        Form("alibi", behind=f"{ALIBI} biased = Add (scores, bias)", scores="biased"),
        Form("causal alibi", behind=f"{ALIBI} biased = Add (scores, bias) masked = Where (seen, biased, lowest)",
             scores="masked", share=0.5, peer="causal"),
        Form("softcap", behind=CAP, scores="capped"),
        Form("causal softcap", behind=f"{CAP} masked = Where (seen, capped, lowest)", scores="masked", share=0.5,
             peer="causal"),
        Form("cosine", before=f"{_cosine('q')} {_cosine('k')}", q="q_unit", k="k_unit", scale="factors"),
        Form("wide", key_size=1.5, value_size=1.5),
        Form("latent", key_size=1.5, peer="wide"),
        Form("rotary", before=HEAD_AXIS + _rotated("q", _halves("q")) + _rotated("k", _halves("k")), q="q_rotated",
             k="k_rotated", inputs=TABLES),
        Form("interleaved rotary", before=HEAD_AXIS + _rotated("q", _pairs("q")) + _rotated("k", _pairs("k")),
             q="q_rotated", k="k_rotated", inputs=TABLES, peer="rotary"),
    )
}  # fmt: skip


def form_model(form: Form, dtype: str, size: int, batch: int = BATCH, rows: int = ROWS) -> onnx.ModelProto:
    """Return the model of a form, `size`: elements of a head of plain attention."""
    queries, values = form.sizes(size)
    given = {"rows": rows, "size": queries, "kind": onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    text = TEXT.format(
        opset=OPSET, batch=batch, rows=rows, heads=HEADS, q_width=HEADS * queries, v_width=HEADS * values,
        inputs=form.inputs.format(**given), before=form.before.format(**given), behind=form.behind.format(**given),
        q=form.q, k=form.k, scale=form.scale, scores=form.scores,
    )  # fmt: skip
    model = onnx.parser.parse_model(text.replace("T[", f"{dtype.replace('float32', 'float')}["))
    read = {name for node in model.graph.node for name in node.input}
    tensors = _constants(np.dtype(dtype), queries, rows)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in tensors.items() if name in read
    )
    return model


def _constants(dtype: np.dtype, size: int, rows: int) -> dict[str, np.ndarray]:
    integers = {"zero": [0], "one": [1], "two": [2], "last": [-1], "half": [size // 2], "end": [2**63 - 1],
                "whole": [0, 0, 0, size]}  # fmt: skip
    numbers = {"scale": size**-0.5, "cap": 50.0, "least": 1e-6, "lowest": float(np.finfo(dtype).min)}
    heads = np.arange(1, HEADS + 1, dtype=dtype).reshape(HEADS, 1, 1)
    return (
        {name: np.array(values, np.int64) for name, values in integers.items()}
        | {name: np.array(value, dtype) for name, value in numbers.items()}
        | {"factors": heads, "seen": np.tri(rows, dtype=np.bool_), "slopes": 2.0 ** (-heads / 2).astype(dtype)}
        | {"places": np.arange(1 - rows, 1, dtype=dtype)}
    )
