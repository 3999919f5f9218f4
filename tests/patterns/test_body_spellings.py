"""Stored bodies are spelled as onnxruntime's optimizers recognise them, so that they cost no more than any spelling.

A fused file also runs without onnxfuse.  There onnxruntime inlines the bodies, and then fuses what it knows: the chain
of GELU becomes its Gelu, for example, but only if x is divided by the root of two, and not if it is multiplied by the
inverse.  So these tests count the operators that remain of a stored body, and hold them against other spellings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import EachCase
from onnx import TensorProto, helper, numpy_helper
from sampling import by_parts, part_of
from spellings import GENERATED, Spelling, Unfused, Unwritable, build, one_option_changed, spellings

from onnxfuse import Fusion
from onnxfuse.ir.attributes import schema
from onnxfuse.rewrite.function_body import function

FUSIONS = GENERATED
by_name = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
OPSETS = range(9, 24)
NEUTRAL = "Floor"  # no fusion of onnxruntime's reads or writes it
FREE = {"Reshape", NEUTRAL}  # a Reshape copies nothing
# How many operators a stored body may leave more than the best spelling.  Of attention with rotary embedding another
# spelling leaves up to two fewer Transposes, or Splits and Slices, of queries and keys than the one that is stored.
EXTRA = {"attention_with_rotary_embedding": 2}
PARTS = 24  # of the variants of a fusion
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


# --- what onnxruntime makes of a model ---------------------------------------------------------------------------


def remaining(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Return how many of each operator onnxruntime's optimizers leave on the CPU, those that cost nothing apart."""
    path = folder / "optimized.onnx"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(path, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node if node.op_type not in FREE)


def framed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a neutral operator at each end: FastGelu is not made of what computes a model's output."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    inner = {value.name: f"{value.name}_inner" for value in (*graph.input, *graph.output) if is_float(value)}
    for node in graph.node:
        node.input[:] = [inner.get(name, name) for name in node.input]
        node.output[:] = [inner.get(name, name) for name in node.output]
    first = [helper.make_node(NEUTRAL, [v.name], [inner[v.name]]) for v in graph.input if v.name in inner]
    last = [helper.make_node(NEUTRAL, [inner[v.name]], [v.name]) for v in graph.output if v.name in inner]
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def is_float(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type in FLOATS


def stored(unfused: Unfused) -> onnx.ModelProto:
    """Return the model as it is after fusion: one call of the stored body."""
    fusion = unfused.spelling.fusion
    body = function(fusion, unfused.variant, fusion.name, [])
    result = onnx.ModelProto()
    result.CopyFrom(unfused.model)
    result.ir_version = max(result.ir_version, 8)  # the first with functions of a model
    del result.graph.node[:]
    outputs = [value.name for value in result.graph.output]
    result.graph.node.append(helper.make_node(body.name, list(body.input), outputs, domain=body.domain))
    result.opset_import.append(helper.make_opsetid(body.domain, 1))
    result.functions.append(body)
    return result


# --- other spellings ---------------------------------------------------------------------------------------------


def other_spellings(case: Case, tried: set[frozenset[tuple[int, int]]]) -> Iterator[onnx.ModelProto]:
    """Yield models of the same variant: other options, the longest ones, other orders, and other ways to divide.

    An option that another variant has tried, which is in `tried`, is tried again in the first variant only.
    """
    changes = list(one_option_changed(case.spelling, case.unfused.variant))
    if case.spelling.what != "first":
        changes = [changed for changed in changes if frozenset(changed.picks.items()) not in tried]
    tried.update(frozenset(changed.picks.items()) for changed in changes)
    for changed in (*changes, replace(case.spelling, longest=True)):
        for swapped in (False, True):
            try:
                yield build(replace(changed, swapped=swapped)).model
            except Unwritable:
                continue
    yield from divided_otherwise(case.unfused.model)


def divided_otherwise(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield the model with one division by a number written as a product, or the other way round."""
    numbers = {
        n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"
    }
    for index, node in enumerate(model.graph.node):
        known = [i for i, name in enumerate(node.input) if name in numbers and numbers[name].size == 1]
        if node.op_type not in ("Mul", "Div") or len(known) != 1 or (node.op_type == "Div" and known != [1]):
            continue
        number = numbers[node.input[known[0]]]
        if not number.all() or number.dtype.kind != "f":
            continue
        result = onnx.ModelProto()
        result.CopyFrom(model)
        other = result.graph.node[index]
        inverse = numpy_helper.from_array(np.asarray(1 / number, number.dtype), "inverse")
        result.graph.initializer.append(inverse)
        other.input[:] = [node.input[1 - known[0]], "inverse"]
        other.op_type = "Div" if node.op_type == "Mul" else "Mul"
        yield result


def variants(fusion: Fusion) -> Iterator[Spelling]:
    """Yield each variant once, in float32: other labels, absent operands, other ranks and symbolic dimensions."""
    seen = set()
    for spelling in spellings(fusion).written:
        plain = not (spelling.sizes or spelling.values or spelling.parts or spelling.thin or "," in spelling.what)
        key = frozenset(spelling.choices.items()), spelling.absent, spelling.leading, spelling.dynamic
        if plain and spelling.dtype == TensorProto.FLOAT and not spelling.only_first and key not in seen:
            seen.add(key)
            yield replace(spelling, picks={}, longest=False, swapped=False)


@dataclass(frozen=True)
class Case:
    """A variant in one opset, and its model as the body is spelled."""

    spelling: Spelling
    unfused: Unfused

    @property
    def id(self) -> str:
        return f"{self.spelling.id}-opset{self.spelling.opset}"


def cases(fusion: Fusion, part: int) -> Iterator[Case]:
    """Yield the first variant wherever its body or an operator's version is another, others in two opsets.

    Of the variants, a part is taken.
    """
    for spelling in part_of([*variants(fusion)], part, PARTS):
        if spelling.what == "first":
            yield from {_body_and_versions(case): case for case in reversed([*_writable(spelling, OPSETS)])}.values()
            continue
        oldest, newest = next(_writable(spelling, OPSETS)), next(_writable(spelling, OPSETS[::-1]))
        yield oldest
        if _nodes(oldest) != _nodes(newest):
            yield newest


def _writable(spelling: Spelling, opsets: Iterable[int]) -> Iterator[Case]:
    """Yield the variant in each of these opsets that can express it."""
    for opset in opsets:
        tried = replace(spelling, opset=opset)
        with suppress(Unwritable):
            yield Case(tried, build(tried))


def _nodes(case: Case) -> tuple[bytes, ...]:
    return tuple(node.SerializeToString(deterministic=True) for node in case.unfused.model.graph.node)


def _body_and_versions(case: Case) -> Hashable:
    """Return a key that is equal for two opsets in which the body has equal nodes, of operators of equal versions."""
    ops = {node.op_type for node in case.unfused.model.graph.node}
    return _nodes(case), frozenset(
        (op, known.since_version) for op in ops if (known := schema(op, case.spelling.opset))
    )


# --- tests -------------------------------------------------------------------------------------------------------


# What onnxruntime is known to make of a body, by the fusion, the labels of the variant and what is left out.
KNOWN = [
    ("activation", {"activation": "gelu"}, (), "Gelu"),
    ("activation", {"activation": "gelu_tanh"}, (), "FastGelu"),
    ("activation", {"activation": "silu"}, (), "QuickGelu"),
    ("activation", {"activation": "quick_gelu"}, (), "QuickGelu"),
    ("bias_activation", {"activation": "gelu"}, (), "BiasGelu"),
    ("gemm_bias_activation", {"activation": "gelu"}, ("column_scale", "residual"), "Gemm Gelu"),
    ("layer_norm", {}, (), "LayerNormalization"),
    ("rms_norm", {}, (), "SimplifiedLayerNormalization"),
    ("softmax", {}, (), "Softmax"),
]


@pytest.mark.parametrize(("name", "choices", "absent", "expected"), KNOWN, ids=lambda value: str(value))
def test_known_operators_remain(
    name: str, choices: Mapping[str, str], absent: Sequence[str], expected: str, tmp_path: Path
) -> None:
    """Opset 13 has none of these operators but Softmax, so onnxruntime must recognise them in the body."""
    fusion = next(each for each in FUSIONS if each.name == name)
    unfused = build(Spelling(fusion, expected, opset=13, choices=choices, absent=frozenset(absent)))
    assert remaining(framed(stored(unfused)), tmp_path) == Counter(expected.split())


@by_parts(PARTS)
@by_name
def test_no_spelling_leaves_fewer_operators(fusion: Fusion, part: int, each_case: EachCase, tmp_path: Path) -> None:
    tried = set[frozenset[tuple[int, int]]]()
    for case, subtest in each_case(cases(fusion, part)):
        with subtest:
            found = remaining(framed(stored(case.unfused)), tmp_path)
            others = {m.SerializeToString(deterministic=True): m for m in other_spellings(case, tried)}
            for other in others.values():
                try:
                    best = remaining(framed(other), tmp_path)
                except Exception:
                    continue  # onnxruntime cannot run this spelling, so that it is not a better one
                allowed = best.total() + EXTRA.get(fusion.name, 0)
                assert found.total() <= allowed, f"{dict(found)} remain, of another spelling {dict(best)}"
