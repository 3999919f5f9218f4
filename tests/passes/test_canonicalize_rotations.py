"""Rotations in the two forms that patterns know: what is written, and that every value stays, special ones included."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse.passes.canonicalize_rotations import canonicalize_rotations

CONSTANTS = {
    **{name: np.array([value], np.int64) for name, value in {"i0": 0, "i2": 2, "end": 2**62, "last": -1}.items()},
    "pairs": np.array([0, 0, 0, 2, 2], np.int64), "heads": np.array([0, 0, 0, 4], np.int64),
    "first": np.array(0, np.int64), "second": np.array(1, np.int64),
}  # fmt: skip
HALVES = "a = Slice (x, i0, i2, last) b = Slice (x, i2, end, last)"
TURNED = f"{HALVES} n = Neg (b) t = Concat <axis = -1> (n, a)"
BACK = f"{HALVES} n = Neg (a) t = Concat <axis = -1> (b, n)"
SUM = "p = Mul (x, cos) q = Mul (t, sin) y = Add (p, q)"
COLUMNS = """r = Reshape (x, pairs) a = Gather <axis = -1> (r, first) b = Gather <axis = -1> (r, second)"""
COMPLEX = "ac = Mul (a, cos) bs = Mul (b, sin) bc = Mul (b, cos) as = Mul (a, sin)"
WHOLE, HALF = "float[N,4] cos, float[N,4] sin", "float[N,2] cos, float[N,2] sin"
# A rotation of x (B, 2, N, 4), its tables, and the operators of the form that is written.
FORMS = {
    "usual": (f"{TURNED} {SUM}", WHOLE, "Slice Slice Neg Concat Mul Mul Add"),
    "back": (f"{BACK} {SUM}", WHOLE, "Slice Slice Mul Neg Concat Neg Mul Add"),
    "less": (f"{TURNED} p = Mul (x, cos) q = Mul (t, sin) y = Sub (p, q)", WHOLE,
             "Slice Slice Neg Concat Neg Mul Mul Add"),
    "back and less": (f"{BACK} p = Mul (x, cos) q = Mul (t, sin) y = Sub (p, q)", WHOLE,
                      "Slice Slice Neg Concat Mul Mul Add"),
    "scaled": (f"{TURNED} p = Mul (x, cos) ps = Mul (p, scale) q = Mul (t, sin) qs = Mul (q, scale) y = Add (ps, qs)",
               f"{WHOLE}, float[N,4] scale", "Slice Slice Neg Concat Mul Mul Mul Mul Add"),
    "tables with an axis of heads": (f"{TURNED} {SUM}", "float[1,N,4] cos, float[1,N,4] sin",
                                     "Slice Slice Neg Concat Squeeze Squeeze Mul Mul Add"),
    "complex": (f"{HALVES} {COMPLEX} l = Sub (ac, bs) h = Add (bc, as) y = Concat <axis = -1> (l, h)", HALF,
                "Slice Slice Mul Mul Mul Mul Sub Add Concat"),
    "complex back": (f"{HALVES} {COMPLEX} l = Add (ac, bs) h = Sub (bc, as) y = Concat <axis = -1> (l, h)", HALF,
                     "Slice Slice Neg Mul Mul Sub Mul Mul Add Concat"),
    "neighbours": (f"{COLUMNS} {COMPLEX} l = Sub (ac, bs) h = Add (bc, as) lu = Unsqueeze (l, last) "
                   "hu = Unsqueeze (h, last) c = Concat <axis = -1> (lu, hu) y = Reshape (c, heads)", HALF,
                   "Reshape Gather Gather Mul Mul Mul Mul Sub Add Unsqueeze Unsqueeze Concat Reshape"),
    "sines of more images": (f"{TURNED} {SUM}", "float[2,N,4] cos, float[M,1,N,4] sin",
                                                    "Slice Slice Neg Concat Mul Mul Add"),
}  # fmt: skip


def rotation(form: str, x: str = "float[B,2,N,4] x") -> onnx.ModelProto:
    nodes, tables, _ = FORMS[form]
    read = {name: value for name, value in CONSTANTS.items() if f"{name})" in nodes or f"{name}," in nodes}
    return parse(f"({x}, {tables}) => (y) {{ {nodes} }}", 17, **read)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written(form: str) -> None:
    before = rotation(form)
    after, (_, again) = apply(before, canonicalize_rotations, canonicalize_rotations)
    assert (ops(after), again) == (FORMS[form][2], 0)
    assert_same_at_all_sizes(before, after)


@pytest.mark.parametrize("x", ["float[N,4] x", "float[B,N,4] x", "float[A,B,2,N,4] x"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "neighbours"])
def test_other_ranks_keep_theirs(form: str, x: str) -> None:
    before = rotation(form, x)
    after, _ = apply(before, canonicalize_rotations)
    assert_same_at_all_sizes(before, after, sizes=(0, 1, 2))


def test_what_is_cast_once_it_is_turned_is_turned_wide() -> None:
    text = f"""(float16[B,2,N,4] x, {WHOLE}) => (y) {{
        {TURNED} w = Cast <to = 1> (x) u = Cast <to = 1> (t) p = Mul (w, cos) q = Mul (u, sin) y = Add (p, q) }}"""
    before = parse(text, 17, **{name: CONSTANTS[name] for name in ("i0", "i2", "end", "last")})
    after, (count,) = apply(before, canonicalize_rotations)
    assert count == 1
    assert ops(after) == "Cast Mul Cast Slice Neg Slice Concat Mul Add"
    assert_same_at_all_sizes(before, after)
