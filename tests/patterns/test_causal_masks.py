"""Causal masks of attention: which computations are recognized, which are not, and that results stay exact."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from runtimes import run
from test_attention_compile import FULL, H200, HALF, case

from onnxfuse import optimize
from onnxfuse.kernels.attention import hopper, mma
from onnxfuse.kernels.attention.operands import attention_of
from onnxfuse.runtime.plan import Launch

LOWEST = float(np.finfo(np.float32).min)
HEADS, SIZE = 2, 8

# Indices of queries (1, 1, q, 1) and keys (1, 1, 1, k), the padding mask (b, 1, 1, k), and attention with a mask.
BEFORE = """
  lengths = Shape (p)
  keys = Gather (lengths, one)
  shape = Shape (q)
  queries = Gather (shape, two)
  n = Range (zero, keys, one)
  k = Unsqueeze (n, first)
  past = Sub (keys, queries)
  i = Range (past, keys, one)
  q_column = Unsqueeze (i, column)
  padding = Unsqueeze (p, middle)
"""
AFTER = """
  kt = Transpose <perm = [0, 1, 3, 2]> (k_heads)
  scores = MatMul (q, kt)
  masked = Add (scores, mask)
  weights = Softmax <axis = -1> (masked)
  context = MatMul (weights, v)
  rows = Transpose <perm = [0, 2, 1, 3]> (context)
  y = Reshape (rows, join)
"""
SEEN = "seen = LessOrEqual (k, q_column)"
OPERATOR = """
  context = Attention (q, k_heads, v, keep)
  rows = Transpose <perm = [0, 2, 1, 3]> (context)
  y = Reshape (rows, join)
"""
KEEP = "keep = And (seen, padding) mask = Where (keep, none, least)"
ALONE = f"{SEEN} mask = Where (seen, none, least)"


def model(
    nodes: str, queries: str = "n", keys: str = "n", masked: float = -65504.0, after: str = AFTER
) -> onnx.ModelProto:
    q, kv = (f"float[b,{HEADS},{length},{SIZE}]" for length in (queries, keys))
    signature = f"main ({q} q, {kv} k_heads, {kv} v, bool[b,{keys}] p) => (float[b,{queries},{HEADS * SIZE}] y)"
    opset = 17 if after is AFTER else 23
    text = f'<ir_version: 11, opset_import: ["" : {opset}]>\n{signature} {{ {BEFORE} {nodes} {after} }}'
    found = onnx.parser.parse_model(text)
    constants = {
        "zero": np.array(0), "one": np.array(1), "two": np.array(2), "first": np.array([0, 1, 2]),
        "column": np.array([0, 1, 3]), "middle": np.array([1, 2]), "join": np.array([0, 0, HEADS * SIZE]),
        "none": np.array(0, np.float32), "least": np.array(masked, np.float32), "unit": np.array(1, np.float32),
        "true": np.array(True),
    }  # fmt: skip
    read = {name for node in found.graph.node for name in node.input}
    found.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in constants.items() if name in read)
    return found


def fused(original: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, object]]:
    """Return the optimized model, and the attributes of its attention node."""
    optimized, report = optimize(original, regions=False)
    assert report.counts == {"attention": 1} and not report.dropped
    (node,) = [node for node in optimized.graph.node if node.domain]
    return optimized, {each.name: helper.get_attribute_value(each) for each in node.attribute}


CAUSAL = [
    ALONE,
    f"{SEEN} {KEEP}",
    f"{SEEN} keep = And (padding, seen) mask = Where (keep, none, least)",
    f"seen = GreaterOrEqual (q_column, k) {KEEP}",
    f"later = Greater (k, q_column) seen = Not (later) {KEEP}",
    f"next = Add (q_column, one) seen = Less (k, next) {KEEP}",
    f"far = Sub (q_column, k) seen = GreaterOrEqual (far, zero) {KEEP}",
    f"before = LessOrEqual (k, q_column) seen = And (true, before) {KEEP}",
]


@pytest.mark.parametrize("nodes", CAUSAL)
@pytest.mark.parametrize("lengths", [("n", "n"), ("5", "5")], ids=["open", "static"])
def test_causal_masks(nodes: str, lengths: tuple[str, str]) -> None:
    optimized, attributes = fused(model(nodes, *lengths))
    assert (attributes["mask_kind"], attributes["masked_score"]) == (b"causal", -65504.0)
    assert attributes["operands"] == (b"q k v" if nodes is ALONE else b"q k v mask")
    left = [node.op_type for node in optimized.graph.node]
    assert left == (["attention"] if nodes is ALONE else ["Unsqueeze", "attention"])


@pytest.mark.parametrize(
    "nodes",
    [
        f"seen = Less (k, q_column) {KEEP}",
        f"seen = LessOrEqual (q_column, k) {KEEP}",
        f"next = Add (q_column, one) seen = LessOrEqual (k, next) {KEEP}",
        f"{SEEN} keep = Or (seen, padding) mask = Where (keep, none, least)",
        f"{SEEN} keep = And (seen, padding) mask = Where (keep, least, none)",
        f"{SEEN} mask = Where (seen, least, none)",
        f"{SEEN} mask = Where (seen, unit, least)",
    ],
)
@pytest.mark.parametrize("length", ["n", "5"])
def test_masks_that_are_not_causal(nodes: str, length: str) -> None:
    _, attributes = fused(model(nodes, length, length, -100.0))
    assert attributes["mask_kind"] == b"additive"


def test_queries_counted_from_0_need_as_many_keys() -> None:
    """Query 0 sees key 0 only, which is causal (the last query sees the last key) only if the lengths are equal."""
    nodes = f"j = Range (zero, queries, one) j_column = Unsqueeze (j, column) seen = LessOrEqual (k, j_column) {KEEP}"
    assert fused(model(nodes))[1]["mask_kind"] == b"causal"
    assert fused(model(nodes, "q", "n"))[1]["mask_kind"] == b"additive"
    assert fused(model(f"{SEEN} {KEEP}", "q", "n"))[1]["mask_kind"] == b"causal", "the last query sees the last key"


@pytest.mark.parametrize(("seen", "form"), [("LessOrEqual", b"causal_operator"), ("Less", b"operator")])
def test_the_attention_operator_with_a_causal_mask(seen: str, form: bytes) -> None:
    nodes = f"seen = {seen} (k, q_column) keep = And (seen, padding)"
    _, attributes = fused(model(nodes, "q", "n", after=OPERATOR))
    assert (attributes["form"], attributes["operands"]) == (form, b"q k v mask")


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (2, 6), (1, 6), (9, 6)])
def test_the_attention_operator_with_a_causal_mask_alone(queries: int, keys: int) -> None:
    """Queries that see no key have a result of 0."""
    original = model(SEEN.replace("seen =", "keep ="), "q", "k" if queries != keys else "q", after=OPERATOR)
    optimized, attributes = fused(original)
    assert (attributes["form"], attributes["operands"]) == (b"causal_operator", b"q k v")
    random = np.random.default_rng(queries)
    shapes = {"q": queries, "k_heads": keys, "v": keys}
    feeds = {name: random.standard_normal((3, HEADS, n, SIZE), np.float32) for name, n in shapes.items()}
    feeds["p"] = np.ones((3, keys), np.bool_)
    (expected,), (found,) = (run(each, feeds)[0] for each in (original, optimized))
    np.testing.assert_allclose(found, expected, atol=2e-6)


PADDINGS = {
    "none": lambda i: i >= 0,
    "left": lambda i: i >= 3,
    "right": lambda i: i < 4,
    "both": lambda i: (i >= 2) & (i < 5),
    "all": lambda i: i < 0,
}


@pytest.mark.parametrize("masked", [-65504.0, -1e4, LOWEST, -math.inf])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (2, 6), (1, 6), (9, 6), (1, 1)])
@pytest.mark.parametrize("nodes", [f"{SEEN} {KEEP}", ALONE], ids=["padding", "alone"])
def test_queries_without_a_key_attend_as_in_the_original(nodes: str, queries: int, keys: int, masked: float) -> None:
    """Left padding hides every key from the first queries, which then attend to all keys, later ones included."""
    original = model(nodes, "q", "k" if queries != keys else "q", masked)
    optimized, attributes = fused(original)
    assert attributes["mask_kind"] == b"causal"
    random = np.random.default_rng(queries)
    shapes = {"q": queries, "k_heads": keys, "v": keys}
    feeds = {name: random.standard_normal((len(PADDINGS), HEADS, n, SIZE), np.float32) for name, n in shapes.items()}
    feeds["p"] = np.stack([keep(np.arange(keys)) for keep in PADDINGS.values()])
    (expected,), (found,) = (run(each, feeds)[0] for each in (original, optimized))
    np.testing.assert_allclose(found, expected, atol=2e-6, equal_nan=True)


def test_a_masked_score_that_is_infinite_in_float16_is_not_causal() -> None:
    """The lowest float32 is -inf in float16, where queries without a key get NaN."""
    nodes = f"{SEEN} {KEEP.replace('mask =', 'wide =')} mask = Cast <to = 10> (wide)"
    text = onnx.printer.to_text(model(nodes, masked=LOWEST))
    half = onnx.parser.parse_model(text.replace("float[b", "float16[b"))
    optimized, report = optimize(half, regions=False)
    assert report.counts == {"attention": 1}
    kinds = [each.s for node in optimized.graph.node for each in node.attribute if each.name == "mask_kind"]
    assert kinds != [b"causal"]


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [True, False])
def test_kernels_take_a_causal_mask_as_a_diagonal_beside_the_padding(padded: bool) -> None:
    for queries, keys, causal in (300, 300, 0), (5, 300, 295), (300, 200, -100), (1, 300, None):
        mask = ("causal", (2, 1, 1, keys), "bool") if padded else None
        node, inputs = case(2, (4, 2), queries, keys, (64, 64), mask=mask, mask_kind="causal", masked_score=-65504.0)
        problem, _ = attention_of(node, inputs, H200)
        assert (problem.mask_kind, problem.causal) == ("boolean" if padded else "none", causal)
        assert problem.add_masked_score
        assert all(len(way.steps) == 1 for way in hopper.implementations(problem, H200)), "no launch for the padding"


def test_kernels_take_the_attention_operator_s_causal_mask_as_a_diagonal() -> None:
    for is_causal, queries, causal in (0, 300, 0), (0, 200, 100), (1, 200, 0), (0, 1, None):
        given = {"form": "causal_operator", "is_causal": is_causal}
        for kind, mask in ("boolean", ("", (2, 1, 1, 300), "bool")), ("none", None):
            node, inputs = case(2, (4, 2), queries, 300, (64, 64), mask=mask, **given)
            problem, _ = attention_of(node, inputs, H200)
            assert (problem.mask_kind, problem.causal, problem.masked_score) == (kind, causal, -math.inf)


@pytest.mark.parametrize(
    ("dtype", "masked", "skipped"),
    [(HALF, -65504.0, True), (HALF, -1e4, False), (FULL, -65504.0, False), (FULL, -3.4028234663852886e38, True)],
)
def test_tiles_beyond_the_diagonal_are_skipped_if_the_masked_score_outweighs_others(
    dtype: str, masked: float, skipped: bool
) -> None:
    node, inputs = case(2, (4, 2), 300, 300, (64, 64), dtype, mask_kind="causal", masked_score=masked)
    problem, _ = attention_of(node, inputs, H200)
    assert bool(hopper.implementations(problem, H200)) == skipped
    for way in mma.implementations(problem, H200):
        (step,) = way.steps
        assert isinstance(step, Launch)
        whole = step.kernel.defines["WARPS_N"] == 1  # a block has all keys of its queries
        assert step.kernel.defines["SECOND_PASS"] == int(skipped and whole)
