"""Graphs near the catalogue: spellings of fusions, drawn at random, that read each other's values."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import onnx
from drafts import FLOATS, SYMBOLS, WORD, Draft, Value, shape_at
from onnx import TensorProto
from spellings import (
    GENERATED,
    NEWEST,
    OLDEST,
    Spelling,
    Unfused,
    Unwritable,
    build,
    has_spellings,
    is_choice,
    operands,
)

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import walk

MAX_PARTS = 3
TRIES = 6  # to write a spelling with other choices before the plainest one is taken
CANDIDATES = 3  # spellings among which the one that reads most values of the parts before is taken
FIRST_WITH_BFLOAT16 = 13
FUSIONS = GENERATED


def spelled_graph(random: Random) -> Draft:
    """Return one to three spellings, each of which reads values of those before where dtypes and shapes agree."""
    opset = random.choice([*range(OLDEST, NEWEST + 1), 13, 17, 18, 20, 21])
    dtype = random.choices(FLOATS, (7, 2, 1))[0]
    if dtype == TensorProto.BFLOAT16:
        opset = max(opset, FIRST_WITH_BFLOAT16)
    draft = Draft(random, opset)
    values: list[Value] = []
    leading, dynamic = random.choice([0, 1, 2, 2, 2, 3]), random.random() < 0.4
    for index in range(random.randint(1, MAX_PARTS)):
        found = [random_spelling(random, opset, dtype, leading, dynamic) for _ in range(CANDIDATES if values else 1)]
        known = {(v.dtype, v.shape) for v in values}
        best = max(found, key=lambda one: sum((one.variant.dtypes[n], a.shape) in known for n, a in one.inputs.items()))
        values += add_part(draft, best, f"p{index}_", values)
    return draft


def random_spelling(random: Random, opset: int, dtype: int, leading: int, dynamic: bool) -> Unfused:
    """Return a random spelling of a random fusion that has one in this opset and dtype."""
    for fusion in random.sample(FUSIONS, len(FUSIONS)):
        for attempt in range(TRIES):
            plain = attempt == TRIES - 1
            spelling = Spelling(fusion, "plain") if plain else _draw(random, fusion)
            spelling = replace(spelling, opset=opset, dtype=dtype, leading=leading, dynamic=dynamic)
            try:
                return build(spelling)
            except (Unwritable, AssertionError, KeyError, TypeError, ValueError):
                continue  # no such variant; the tests of spellings say why
    raise AssertionError(f"no fusion can be written in opset {opset} and dtype {dtype}")


def _draw(random: Random, fusion: Fusion) -> Spelling:
    chooses = [t for t in walk(*fusion.outputs) if is_choice(t)]
    spelling = Spelling(
        fusion, "random",
        choices={str(t.name): random.choice(t.labels) for t in chooses},
        longest=random.random() < 0.4, swapped=random.random() < 0.3, only_first=random.random() < 0.3,
    )  # fmt: skip
    optional = [c for c in operands(spelling) if c.optional]
    absent = frozenset(c.name for c in optional if random.random() < 0.4)
    eithers = [t for t in walk(*fusion.outputs) if has_spellings(t)]
    picks = {id(t): random.randrange(len(t.options)) for t in eithers if random.random() < 0.3}
    values: dict[str, Any] = {}
    for capture in fusion.captures:
        if capture.kind == "scalar" and capture.if_absent is not None and random.random() < 0.3:
            values[capture.name] = capture.if_absent * random.choice([0.5, 10.0, 100.0])
        elif capture.kind == "attribute" and fusion.example.get(capture.name) is not None and random.random() < 0.5:
            values[capture.name] = fusion.example[capture.name]
    words = {word for c in operands(spelling) for word in WORD.findall(c.dims or "")}
    thin = frozenset(word for word in sorted(words) if random.random() < 0.1)
    return replace(spelling, absent=absent, picks=picks, values=values, thin=thin)


def add_part(draft: Draft, part: Unfused, prefix: str, before: list[Value]) -> list[Value]:
    """Write a spelling into a draft; its inputs are values of `before` where one fits.  Return its own values."""
    random, graph = draft.random, part.model.graph
    symbols = {word for i in graph.input for d in i.type.tensor_type.shape.dim for word in WORD.findall(d.dim_param)}
    renamed = {word: word if word in SYMBOLS else f"{prefix}{word}" for word in symbols}
    names: dict[str, str] = {"": ""}
    found: list[Value] = []
    for each in graph.input:
        dtype, array = each.type.tensor_type.elem_type, part.inputs[each.name]
        fitting = [v.name for v in before if (v.dtype, v.shape) == (dtype, array.shape)]
        names[each.name] = f"{prefix}{each.name}"
        if fitting and random.random() < 0.75:
            names[each.name] = random.choice(fitting[-4:])
            continue
        dims = [
            WORD.sub(lambda word: renamed[word[0]], d.dim_param) if d.dim_param else d.dim_value
            for d in each.type.tensor_type.shape.dim
        ]
        for dim, size in zip(dims, array.shape, strict=True):
            if isinstance(dim, str) and WORD.fullmatch(dim):
                draft.sizes[dim] = size
        draft.inputs[names[each.name]] = (dtype, tuple(dims))
        found.append(Value(names[each.name], dtype, array.shape))
    for tensor in graph.initializer:
        names[tensor.name] = f"{prefix}{tensor.name}"
        draft.weights.append(_renamed(tensor, names[tensor.name]))
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}{node.name}"
        copy.input[:] = [names[name] for name in node.input]
        for name in node.output:
            names.setdefault(name, f"{prefix}{name}" if name else "")
        copy.output[:] = [names[name] for name in node.output]
        draft.nodes.append(copy)
    for output in graph.output:
        draft.outputs.append(names[output.name])
        kind = output.type.tensor_type
        dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
        sizes = {**draft.sizes, **{word: draft.sizes.get(name, 2) for word, name in renamed.items()}}
        found.append(Value(names[output.name], kind.elem_type, shape_at(dims, sizes)))
    return found


def _renamed(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy
