"""Rotations in the two forms that patterns match: the operators that rules write, and that all values stay the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.rotations import ROTATIONS

WRITE = rules_pass("write_rotations", ROTATIONS)
ROUNDS = 3  # in which rules that follow each other are applied
CONSTANTS = {
    **{name: np.array([value], np.int64) for name, value in {"i0": 0, "i1": 1, "i2": 2, "last": -1}.items()},
    "end": np.array([2**62], np.int64),
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
             "Slice Slice Mul Neg Concat Neg Mul Add"),
    "back and less": (f"{BACK} p = Mul (x, cos) q = Mul (t, sin) y = Sub (p, q)", WHOLE,
                      "Slice Slice Mul Neg Concat Mul Add"),
    "scaled": (f"{TURNED} p = Mul (x, cos) ps = Mul (p, scale) q = Mul (t, sin) qs = Mul (q, scale) y = Add (ps, qs)",
               f"{WHOLE}, float[N,4] scale", "Slice Slice Neg Concat Mul Mul Mul Mul Add"),
    "tables with an axis of heads": (f"{TURNED} {SUM}", "float[1,N,4] cos, float[1,N,4] sin",
                                     "Slice Slice Squeeze Mul Neg Concat Squeeze Mul Add"),
    "complex": (f"{HALVES} {COMPLEX} l = Sub (ac, bs) h = Add (bc, as) y = Concat <axis = -1> (l, h)", HALF,
                "Slice Slice Mul Mul Mul Mul Sub Add Concat"),
    "complex back": (f"{HALVES} {COMPLEX} l = Add (ac, bs) h = Sub (bc, as) y = Concat <axis = -1> (l, h)", HALF,
                     "Slice Slice Mul Neg Mul Sub Mul Mul Add Concat"),
    "neighbours": (f"{COLUMNS} {COMPLEX} l = Sub (ac, bs) h = Add (bc, as) lu = Unsqueeze (l, last) "
                   "hu = Unsqueeze (h, last) c = Concat <axis = -1> (lu, hu) y = Reshape (c, heads)", HALF,
                   "Reshape Gather Gather Mul Mul Mul Mul Sub Add Unsqueeze Unsqueeze Concat Reshape"),
    "columns": (f"""r = Reshape (x, pairs) a = Slice (r, i0, i1, last) b = Slice (r, i1, i2, last)
                cos = Unsqueeze (c, last) sin = Unsqueeze (s, last) {COMPLEX} l = Sub (ac, bs) h = Add (bc, as)
                z = Concat <axis = -1> (l, h) y = Reshape (z, heads)""", "float[N,2] c, float[N,2] s",
                "Reshape Slice Slice Unsqueeze Unsqueeze Squeeze Squeeze Mul Squeeze Squeeze Mul Sub Unsqueeze Mul Mul "
                "Add Unsqueeze Concat Reshape"),
    "a part that is not rotated": (f"""{HALVES} {COMPLEX} l = Sub (ac, bs) h = Add (bc, as)
                                   y = Concat <axis = -1> (z, l, h)""", f"{HALF}, float[B,2,N,3] z",
                                   "Slice Slice Mul Mul Sub Mul Mul Add Concat Concat"),
    "sines of more images": (f"{TURNED} {SUM}", "float[2,N,4] cos, float[M,1,N,4] sin",
                                                    "Slice Slice Neg Concat Mul Mul Add"),
}  # fmt: skip
OF_RANK_4 = {"neighbours", "columns", "a part that is not rotated"}


def model(nodes: str, tables: str, x: str = "float[B,2,N,4] x") -> onnx.ModelProto:
    read = {name: value for name, value in CONSTANTS.items() if f"{name})" in nodes or f"{name}," in nodes}
    return parse(f"({x}, {tables}) => (y) {{ {nodes} }}", 17, **read)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written(form: str) -> None:
    before = model(*FORMS[form][:2])
    after, (*_, again) = apply(before, *[WRITE] * ROUNDS)
    assert (ops(after), again) == (FORMS[form][2], 0)
    assert_same_at_all_sizes(before, after)


@pytest.mark.parametrize("x", ["float[N,4] x", "float[B,N,4] x", "float[A,B,2,N,4] x"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in OF_RANK_4])
def test_other_ranks_keep_theirs(form: str, x: str) -> None:
    before = model(*FORMS[form][:2], x)
    after, _ = apply(before, *[WRITE] * ROUNDS)
    assert_same_at_all_sizes(before, after, sizes=(0, 1, 2))


def test_what_is_cast_once_it_is_turned_is_turned_wide() -> None:
    text = f"""(float16[B,2,N,4] x, {WHOLE}) => (y) {{
        {TURNED} w = Cast <to = 1> (x) u = Cast <to = 1> (t) p = Mul (w, cos) q = Mul (u, sin) y = Add (p, q) }}"""
    before = parse(text, 17, **{name: CONSTANTS[name] for name in ("i0", "i2", "end", "last")})
    after, (count, *_) = apply(before, *[WRITE] * ROUNDS)
    assert count == 1
    assert ops(after) == "Cast Mul Cast Slice Neg Slice Concat Mul Add"
    assert_same_at_all_sizes(before, after)


# Forms that are not rotations, or whose rewritten form would compute more.
OTHERS = {
    "both halves are negated": (f"{HALVES} n = Neg (a) m = Neg (b) t = Concat <axis = -1> (m, n) {SUM}", WHOLE),
    "no half is negated": (f"{HALVES} t = Concat <axis = -1> (b, a) {SUM}", WHOLE),
    "halves of two tensors": (f"""a = Slice (x, i0, i2, last) b = Slice (z, i2, end, last) n = Neg (a)
                              t = Concat <axis = -1> (b, n) {SUM}""", f"{WHOLE}, float[B,2,N,4] z"),
    "a tensor that is not turned": (f"{TURNED} p = Mul (z, cos) ps = Mul (p, cos) q = Mul (t, sin) y = Add (ps, q)",
                                    f"{WHOLE}, float[B,2,N,4] z"),
    "no table but a tensor of the same shape": (f"{BACK} {SUM}", "float[N,4] cos, float[B,2,N,4] sin"),
    "no table but a weight of each column": (f"{BACK} {SUM}", "float[N,4] cos, float[4] sin"),
    "two sums": (f"{HALVES} {COMPLEX} l = Add (ac, bs) h = Add (bc, as) y = Concat <axis = -1> (l, h)", HALF),
    "two differences": (f"{HALVES} {COMPLEX} l = Sub (ac, bs) h = Sub (bc, as) y = Concat <axis = -1> (l, h)", HALF),
    "rows": (f"{HALVES} {COMPLEX} l = Add (ac, bs) h = Sub (bc, as) y = Concat <axis = 2> (l, h)", HALF),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_other_forms_stay(form: str) -> None:
    before = model(*OTHERS[form])
    after, (count,) = apply(before, WRITE)
    assert (ops(after), count) == (ops(before), 0)


def test_a_turned_tensor_that_is_rounded_stays() -> None:
    text = f"{TURNED} u = Cast <to = 10> (t) w = Cast <to = 1> (u) p = Mul (x, cos) q = Mul (w, sin) y = Add (p, q)"
    before = model(text, WHOLE)
    after, (count,) = apply(before, WRITE)
    assert (ops(after), count) == (ops(before), 0)
