"""Unfused models of a fusion, made from its declaration alone: every spelling, variant, opset and dtype."""

from __future__ import annotations

import functools
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import PatternError
from onnxfuse.language.terms import (
    Apply,
    Capture,
    Choose,
    Either,
    Filled,
    Fusion,
    Given,
    Guard,
    Part,
    Rearrange,
    Size,
    Term,
    bare,
    parts,
    walk,
)
from onnxfuse.match import count
from onnxfuse.match.names import unify
from onnxfuse.match.siblings import may_be_absent, siblings
from onnxfuse.model.graph import schema
from onnxfuse.model.linking import read_graph
from onnxfuse.rewrite.build import Builder, Variant, body
from onnxfuse.shapes import layout
from onnxfuse.shapes.dims import Dim, evaluate, symbol
from onnxfuse.shapes.dims import Size as DimSize
from onnxfuse.shapes.inference import infer_shapes

NEWEST, OLDEST = 24, 9
LEADING = {"batch": 2, "seq": 3, "extra": 4}  # the axes that "..." stands for: as many of the first ones as asked for
POOL = (4, 5, 6, 7, 8, 9, 10, 3, 2, 12, 11, 14, 20, 1)  # sizes for named dimensions, in the order of trial


class Unwritable(Exception):
    """No model has this variant; `kind` says for which structural reason."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind = kind


@dataclass(frozen=True)
class Spelling:
    """One way to write a fusion; what is not given is as in the fusion's first variant, with all its operands."""

    fusion: Fusion
    what: str
    opset: int = NEWEST
    choices: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # optional operands and scalars that are left out
    picks: Mapping[int, int] = field(default_factory=dict)  # of an Either, by id: the place of the option to write
    values: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    leading: int = 2
    parts: Mapping[str, str] = field(default_factory=dict)  # of an operand, by name: one "run" of it, or "runs"
    thin: frozenset[str] = frozenset()  # `name?` axes that have size one
    short: bool = False  # leave leading thin axes out
    dtype: int = TensorProto.FLOAT
    dynamic: bool = False
    longest: bool = False  # of each Either the option with the most nodes
    swapped: bool = False  # the operands of every commutative node change places
    only_first: bool = False  # further outputs are read by nobody

    @property
    def id(self) -> str:
        return f"{self.fusion.name}-{self.what}"


@dataclass(frozen=True)
class Unfused:
    """A model of one spelling, and what it was made from."""

    spelling: Spelling
    variant: Variant
    model: onnx.ModelProto
    inputs: Mapping[str, np.ndarray]
    written: frozenset[tuple[int, int]]  # the Either options that were written: (id, place)


# --- what a variant consists of ----------------------------------------------------------------------------------


def chosen(spelling: Spelling) -> dict[str, str]:
    """The label of each Choose that the variant has."""
    found: dict[str, str] = {}
    for term in reached(spelling):
        if isinstance(term, Choose):
            found[term.name] = _label(spelling, term)
    return found


def reached(spelling: Spelling, *roots: Term) -> Iterator[Term]:
    """Every term of the chosen variant, spellings included."""
    seen: set[int] = set()
    work = list(roots or outputs(spelling))
    while work:
        term = work.pop()
        if id(term) in seen:
            continue
        seen.add(id(term))
        if isinstance(term, Given) and term.guard.names == ("rank",) and not term.guard.holds(_rank(spelling)):
            continue
        yield term
        work += [term.options[_label(spelling, term)]] if isinstance(term, Choose) else parts(term)
        work += [value for value in getattr(term, "attributes", {}).values() if isinstance(value, Capture)]


def _rank(spelling: Spelling) -> int:
    """Axes of the first output."""
    spec = re.sub(r"\([^)]*\)", "group", spelling.fusion.out[0])
    return sum(spelling.leading if token == "..." else 1 for token in spec.split())


def outputs(spelling: Spelling) -> tuple[Term, ...]:
    """The outputs that the variant has: the last ones may go with their operands."""
    found = spelling.fusion.outputs[:1] if spelling.only_first else spelling.fusion.outputs
    dtypes = {c.name: spelling.dtype for c in spelling.fusion.operands if c.name not in spelling.absent}
    labels = {t.name: _label(spelling, t) for t in walk(*found) if isinstance(t, Choose)}
    sizes = defaultdict(lambda: 2, {"...": (3,)})  # any: it is about operands
    builder = Builder(Variant(NEWEST, dtypes, (spelling.dtype,), 2, {}, sizes, labels), lambda _, options: options[0])
    while may_be_absent(spelling.fusion, len(found) - 1) and not builder.expressible(found[-1]):
        found = found[:-1]
    return found


def _label(spelling: Spelling, term: Choose) -> str:
    return spelling.choices.get(term.name, next(iter(term.options)))


def captures(spelling: Spelling, *roots: Term) -> list[Capture]:
    """The parameters that the variant (or the terms) use and that are not left out, in order."""
    names = {term.name for term in reached(spelling, *roots) if isinstance(term, Capture)} - spelling.absent
    return [c for c in spelling.fusion.captures if c.name in names]


def operands(spelling: Spelling) -> list[Capture]:
    """Of these the tensors."""
    return [c for c in captures(spelling) if c.kind in ("tensor", "weight")]


def _axes(spelling: Spelling, operand: Capture) -> list[tuple[str, ...]] | None:
    """For each axis of an operand the names that it is made of; None where the declaration does not tell."""
    if operand.dims is not None:
        text = operand.dims.replace("...", " ".join(f"...{i}" for i in range(spelling.leading)))
        names = [token.rstrip("?") for token in text.split()]
        thin = [token.endswith("?") and token.rstrip("?") in spelling.thin for token in text.split()]
        kept = thin.index(False) if spelling.short and False in thin else 0
        return [() if is_thin else (name,) for name, is_thin in zip(names, thin, strict=True)][kept:]
    for term in reached(spelling):
        if isinstance(term, Rearrange) and bare(term.inner) is operand:
            return list(layout.parse_arrangement(term.pattern, spelling.leading).source)
    return None


def _dtype(spelling: Spelling, operand: Capture) -> int:
    """The variant's dtype, or bool or int64 where the operator that reads the operand takes nothing else.

    int64 under a Cast that the pattern writes: those between floats are none of its terms.
    """
    for term in reached(spelling):
        if isinstance(term, Apply) and term.op == "Cast" and any(bare(t) is operand for t in walk(term)):
            return TensorProto.INT64
        if not isinstance(term, Apply) or (found := schema(term.op, spelling.opset)) is None:
            continue
        for place, item in enumerate(term.inputs):
            if bare(item) is operand and place < len(found.inputs):
                types = set(found.inputs[place].types)
                if types == {"tensor(bool)"}:
                    return TensorProto.BOOL
                if types <= {"tensor(int64)", "tensor(int32)"}:
                    return TensorProto.INT64
    return spelling.dtype


# --- sizes and values --------------------------------------------------------------------------------------------


def _names(spelling: Spelling) -> list[str]:
    """The named dimensions of the variant."""
    words = [word for spec in _specs(spelling) for word in re.findall(r"[A-Za-z_]\w*", spec)]
    return list(dict.fromkeys(words))


def _specs(spelling: Spelling) -> list[str]:
    """What names the variant's dimensions."""
    specs = [c.dims for c in operands(spelling) if c.dims]
    for term in reached(spelling):
        if isinstance(term, Rearrange):
            specs.append(term.pattern)
        if isinstance(term, Filled):
            specs.append(term.dims)
        specs += [value.text for value in _flat(getattr(term, "attributes", {})) if isinstance(value, Size)]
    return specs


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(item)
    else:
        yield value


def _divisors(spelling: Spelling) -> dict[str, int]:
    """What a dimension must be a multiple of: `size("d") // 2` halves it."""
    texts = [v.text for t in reached(spelling) for v in _flat(getattr(t, "attributes", {})) if isinstance(v, Size)]
    return {m[1]: int(m[2]) for text in texts for m in re.finditer(r"(\w+) // (\d+)", text)}


def _guards(fusion: Fusion) -> list[Guard]:
    return [*fusion.guards, *(term.guard for term in walk(*fusion.outputs) if isinstance(term, Given))]


def find_sizes(spelling: Spelling, known: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes for which the guards hold; different ones for different names, as far as the guards allow."""
    names = [name for name in _names(spelling) if name not in known and name not in spelling.sizes]
    has_dots = any("..." in spec for spec in _specs(spelling))
    lead = tuple(LEADING.values())[: spelling.leading] if has_dots else ()
    given, divisors = tuple({**known, **spelling.sizes}.items()), tuple(_divisors(spelling).items())
    found = _solution(spelling.fusion, tuple(names), given, divisors, lead)
    if found is None:
        raise Unwritable("sizes", f"no sizes of {', '.join(names)} fulfil the guards")
    return {"...": lead, **found}


@functools.cache  # most spellings of a fusion have the same names
def _solution(
    fusion: Fusion,
    names: tuple[str, ...],
    given: tuple[tuple[str, Any], ...],
    divisors: tuple[tuple[str, int], ...],
    lead: tuple[int, ...],
) -> Mapping[str, Any] | None:
    """A size for each name; one of a few that are used already where the guards want that."""
    asked, multiples = [(set(g.names), g) for g in fusion.guards], dict(divisors)
    order = sorted(names, key=lambda name: not any(name in g.names for g in fusion.guards))  # the constrained first
    pool, shuffled = list(POOL), random.Random(fusion.name)

    def complete(dims: dict[str, Any], rest: Sequence[str], repeats: bool) -> dict[str, Any] | None:
        decided = [g for needed, g in asked if needed <= dims.keys()]
        if not all(g.holds(**{name: dims[name] for name in g.names}) for g in decided):
            return None
        if not rest:
            return dims
        taken = (*dims.values(), *lead)
        for size in sorted(pool, key=taken.__contains__) if repeats else (size for size in pool if size not in taken):
            if size % multiples.get(rest[0], 1) == 0:
                found = complete({**dims, rest[0]: size}, rest[1:], repeats)
                if found is not None:
                    return found
        return None

    for repeats in (False, True):
        shuffled.shuffle(pool)
        pool.sort(key=lambda size: size == 1)  # one is every dimension's neutral size: only where nothing else fits
        found = complete(dict(given), order, repeats)
        if found is not None:
            return found
    return None


def _values(spelling: Spelling) -> dict[str, Any]:
    """Scalars: the declared default, or numbers that differ and that the guards accept; attributes as asked for."""
    found: dict[str, Any] = {}
    fresh = iter([0.25, 0.75, 1.25, 1.75])
    for capture in captures(spelling):
        if capture.kind == "scalar":
            asking = [g for g in _guards(spelling.fusion) if capture.name in g.names]
            usual = capture.default if capture.default is not None else next(fresh)
            tried = (usual, float("-inf"), float("inf"))
            good = (value for value in tried if all(_accepts(guard, capture.name, value) for guard in asking))
            found[capture.name] = next(good, usual)
        if capture.name in spelling.values:
            found[capture.name] = spelling.values[capture.name]
    return found


def _accepts(guard: Guard, name: str, value: float) -> bool:
    try:
        return bool(guard.holds(**{**dict.fromkeys(guard.names), "dtype": "float32", name: value}))
    except TypeError:
        return True


def _dynamic(spelling: Spelling) -> list[str]:
    """The named dimensions that a caller would leave open: no weight's, none that is split off or repeated."""
    if None in (_axes(spelling, c) for c in operands(spelling)):
        return [spelling.fusion.out[0].split()[0]]
    spec = spelling.fusion.out[0].replace("(", " ").replace(")", " ")
    weights = [_axes(spelling, c) or [] for c in operands(spelling) if c.kind == "weight"]
    fixed = {spec.split()[-1]} | {name for axes in weights for names in axes for name in names}
    named: set[str] = set()
    for term in reached(spelling):
        if isinstance(term, Rearrange):
            source, _, result = term.pattern.partition("->")
            fixed |= {name for group in re.findall(r"\(([^)]*)\)", source) for name in group.split()}
            named |= set(source.split())
            fixed |= set(re.findall(r"\w+", result)) - set(re.findall(r"\w+", source))
    named |= {token for c in operands(spelling) for token in (c.dims or "").split()}
    return sorted(name for name in named if re.fullmatch(r"[a-z_]+", name) and name not in fixed)


# --- models ------------------------------------------------------------------------------------------------------


def build(spelling: Spelling) -> Unfused:
    """The spelling as a model.  Raises Unwritable."""
    shapes = {c.name: _axes(spelling, c) for c in operands(spelling)}
    known: dict[str, Any] = {}
    if None in shapes.values():
        known = _dims_by_example(spelling)
        spelling = replace(spelling, leading=len(known.get("...", ())))
        shapes = {c.name: _axes(spelling, c) for c in operands(spelling)}
    numbers = find_sizes(spelling, known)
    dims = _open(spelling, numbers) if spelling.dynamic else numbers
    sizes = {name: _shape(spelling, name, axes, dims) for name, axes in shapes.items()}
    parts = {name: _part(spelling, term, dims) for name, term in _parted(spelling).items()}
    sizes |= {name: (*sizes[name][:-1], part["width"]) for name, part in parts.items()}
    variant = _variant(spelling, dims, parts)
    for guard in spelling.fusion.guards:
        if not _holds(variant, guard):
            raise Unwritable("guard", guard.sentence)
    nodes, results, written = _body(spelling, variant)
    bound = {**{k: v for k, v in numbers.items() if k != "..."}, **LEADING}
    concrete = {name: tuple(evaluate(size, bound) for size in shape) for name, shape in sizes.items()}
    model, inputs = _model(spelling, variant, nodes, results, sizes, concrete)
    return Unfused(spelling, variant, model, inputs, written)


def _holds(variant: Variant, guard: Guard) -> bool:
    operands = {name: f"the tensor '{name}'" for name in variant.dtypes}  # a guard may ask whether two are the same
    known = {"dtype": "float32", "rank": variant.rank, "opset": variant.opset, **operands}
    known |= {**variant.dims, **variant.values, **variant.choices}
    return bool(guard.holds(**{name: known.get(name) for name in guard.names}))


def _open(spelling: Spelling, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes, with symbols for those that a caller would leave open."""
    dims = dict(numbers)
    if numbers["..."] == tuple(LEADING.values())[: len(numbers["..."])]:
        dims["..."] = tuple(map(symbol, list(LEADING)[: len(numbers["..."])]))
    for name in _dynamic(spelling):
        tried = {**dims, name: symbol(name)}
        asking = [g for g in spelling.fusion.guards if name in g.names]
        if name in numbers and all(g.holds(**{n: tried.get(n) for n in g.names}) for g in asking):
            dims = tried
    return dims


def _shape(
    spelling: Spelling, name: str, axes: list[tuple[str, ...]] | None, dims: Mapping[str, Any]
) -> tuple[DimSize, ...]:
    if axes is None:
        if name not in spelling.fusion.example:
            raise Unwritable("example", f"nothing tells the shape of '{name}'; give one with example=")
        shape = tuple(spelling.fusion.example[name])
        batch = dims.get(spelling.fusion.out[0].split()[0])
        is_weight = name in {c.name for c in spelling.fusion.captures if c.kind == "weight"}
        return shape if not isinstance(batch, Dim) or is_weight else (batch, *shape[1:])
    leading = {f"...{i}": size for i, size in enumerate(dims["..."])}
    known = {**dims, **leading, "1": 1}
    return tuple(layout.product([known[name] for name in names]) for names in axes)


def _parted(spelling: Spelling) -> dict[str, Rearrange]:
    """The operands of which the model uses parts, and the terms that say so."""
    found = [t for t in reached(spelling) if isinstance(t, Rearrange) and isinstance(t.inner, Part)]
    return {bare(term.inner).name: term for term in found if term.inner.name in spelling.parts}


def _part(spelling: Spelling, term: Rearrange, dims: Mapping[str, Any]) -> dict[str, int]:
    """Where the part lies on the operand's last axis: `offset`, `pitch` where it is in runs, and the axis's `width`."""
    *outer, inner = (dims[name] for name in layout.parse_arrangement(term.pattern, spelling.leading).source[-1])
    count = layout.product(outer)
    if spelling.parts[term.inner.name] == "run":
        return {"offset": 5, "width": 5 + count * inner + 3}
    return {"offset": inner + 3 + 2, "pitch": inner + 3, "width": (count + 2) * (inner + 3)}


def _variant(
    spelling: Spelling, dims: Mapping[str, Any], parts: Mapping[str, Mapping[str, int]] = MappingProxyType({})
) -> Variant:
    dtypes = {c.name: _dtype(spelling, c) for c in operands(spelling)}
    rank = _rank(replace(spelling, leading=len(dims.get("...", ()))))
    out = (spelling.dtype,) * len(outputs(spelling))
    named = {operand: term.inner.name for operand, term in _parted(spelling).items()}
    places = {
        f"{named[operand]}_{word}": number
        for operand, part in parts.items()
        for word, number in part.items()
        if word != "width"
    }
    runs = {named[operand]: part["width"] // part["pitch"] for operand, part in parts.items() if "pitch" in part}
    dims = {**dims, **{f"{name}_blocks": count for name, count in runs.items()}}
    return Variant(spelling.opset, dtypes, out, rank, {**_values(spelling), **places}, dims, chosen(spelling))


def _dims_by_example(spelling: Spelling) -> dict[str, Any]:
    """The dimensions of the output where the operands' shapes do not tell them: those that onnx infers."""
    optional = frozenset(c.name for c in spelling.fusion.operands if c.optional)
    least = replace(spelling, absent=spelling.absent | optional, longest=False)
    axes = {c.name: _axes(least, c) for c in operands(least)}
    shapes = {name: _shape(least, name, found, {"...": ()}) for name, found in axes.items() if found is None}
    variant = _variant(least, {})
    nodes, results, _ = _body(replace(least, picks={}), variant)
    model, _ = _model(least, variant, nodes, results[:1], shapes, shapes)
    shape = tuple(d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim)
    dims = unify(spelling.fusion.out[0], shape, {})
    assert dims is not None, f"{spelling.id}: {shape} is not ({spelling.fusion.out[0]})"
    return dict(dims)


def complete_options(spelling: Spelling, variant: Variant, term: Either) -> list[Term]:
    """The spellings that can be written and that use every operand that is there."""
    builder = Builder(variant, lambda _, options: options[0])
    possible = [option for option in term.options if builder.expressible(option)]
    used = [{c.name for c in captures(spelling, option)} & variant.dtypes.keys() for option in possible]
    every = set().union(*used)
    return [option for option, names in zip(possible, used, strict=True) if names == every]


def _body(spelling: Spelling, variant: Variant) -> tuple[list[onnx.NodeProto], list[str], frozenset[tuple[int, int]]]:
    written = set()
    terms = [t for t in walk(*spelling.fusion.outputs) if isinstance(t, Either) and id(t) in spelling.picks]
    alike = {_looks(t): spelling.picks[id(t)] for t in terms}  # an exporter writes two products in the same way

    def pick(term: Either, possible: Sequence[Term]) -> Term:
        options = complete_options(spelling, variant, term)
        wanted = spelling.picks.get(id(term), alike.get(_looks(term)))
        if wanted is not None and term.options[wanted] in options:
            options = [term.options[wanted]]
        elif id(term) in spelling.picks:
            raise Unwritable("opset", f"{term.options[spelling.picks[id(term)]].span} needs another opset")
        if not options:
            raise Unwritable("operands", f"{term.span}: no spelling has all the operands")
        option = max(options, key=lambda o: count(o, variant.choices)) if spelling.longest else options[0]
        written.add((id(term), term.options.index(option)))
        return option

    builder = Builder(variant, pick)
    for term in outputs(spelling):
        if not builder.expressible(term):
            raise _why_not(spelling, variant)
    try:
        nodes, results = body(spelling.fusion, variant, pick)
    except PatternError as error:
        raise Unwritable("reshape", str(error)) from error
    return nodes, results, frozenset(written)


def _looks(term: Either) -> tuple[Any, ...]:
    """Equal for what one line of a pattern makes when it is called twice."""
    return term.span, *((type(option), getattr(option, "op", "")) for option in term.options)


def _why_not(spelling: Spelling, variant: Variant) -> Unwritable:
    """Whether a newer opset would help, or an operand."""
    newer = replace(variant, opset=NEWEST)
    builder = Builder(newer, lambda _, options: options[0])
    if all(builder.expressible(term) for term in outputs(spelling)):
        return Unwritable("opset", f"opset {variant.opset} lacks an operator")
    return Unwritable("operands", f"without {', '.join(sorted(spelling.absent))} this variant does not exist")


def _model(
    spelling: Spelling,
    variant: Variant,
    nodes: list[onnx.NodeProto],
    outputs: Sequence[str],
    shapes: Mapping[str, tuple[DimSize, ...]],
    concrete: Mapping[str, tuple[int, ...]],
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(len(nodes))
    kinds = {c.name: c.kind for c in spelling.fusion.captures}
    arrays = {name: _random(rng, concrete[name], dtype) for name, dtype in variant.dtypes.items()}
    for i, node in enumerate(nodes):
        node.name = f"{node.op_type.lower()}_{i}"
        if spelling.swapped and node.op_type in ("Add", "Mul"):
            node.input[:] = node.input[::-1]
    inputs = [
        helper.make_tensor_value_info(name, dtype, [d if isinstance(d, int) else str(d) for d in shapes[name]])
        for name, dtype in variant.dtypes.items()
        if kinds[name] != "weight"
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items() if kinds[name] == "weight"]
    infos = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, spelling.fusion.name, inputs, infos, weights)
    opsets = [helper.make_opsetid("", spelling.opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))
    _type_outputs(model, variant)
    return model, {i.name: arrays[i.name] for i in inputs}


def _type_outputs(model: onnx.ModelProto, variant: Variant) -> None:
    """State the outputs' types and shapes, as an exporter does."""
    graph = read_graph(model)
    shapes = infer_shapes(graph)
    made = {t.name: t for node in graph.nodes for t in node.outputs}
    for info, dtype in zip(model.graph.output, variant.out, strict=False):
        shape = shapes.shape(made[info.name])
        assert shape is not None, f"the shape of '{info.name}' cannot be inferred"
        dims = [d if isinstance(d, int) else None if "?" in str(d) else str(d) for d in shape]
        info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, dims))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: int) -> np.ndarray:
    if dtype == TensorProto.BOOL:
        return rng.random(shape) > 0.3
    if dtype == TensorProto.INT64:
        return rng.integers(0, 2, shape)  # rows of a table
    return rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(dtype))


# --- all of them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spellings:
    """What a fusion can be written as, and the variants that cannot be written, with the reason."""

    written: tuple[Spelling, ...]
    unwritable: tuple[tuple[Spelling, Unwritable], ...]
    options: frozenset[tuple[int, int]]  # the Either options that some spelling writes
    labels: frozenset[tuple[str, str]]  # the Choose labels that some spelling has


@functools.cache
def spellings(fusion: Fusion) -> Spellings:
    """From the first variant, one thing changed at a time, each at the newest opset that can express it."""
    collector = _Collector()
    bases = [newest for s in _variants(fusion) if (newest := collector.take(s)) is not None]
    for spelling in (*bases, *_crossed(bases)):
        if collector.options >= every_option(fusion):
            break
        for written in _unwritten_options(spelling, collector.options):
            collector.take(written)
    for spelling in _further(bases[0]):
        collector.take(spelling, at_newest=False)
    return Spellings(
        tuple(collector.written), tuple(collector.unwritable), frozenset(collector.options),
        frozenset(collector.labels),
    )  # fmt: skip


class _Collector:
    def __init__(self) -> None:
        self.written: list[Spelling] = []
        self.unwritable: list[tuple[Spelling, Unwritable]] = []
        self.options: set[tuple[int, int]] = set()
        self.labels: set[tuple[str, str]] = set()

    def take(self, spelling: Spelling, at_newest: bool = True) -> Spelling | None:
        first: Unwritable | None = None
        for opset in range(spelling.opset, OLDEST - 1, -1) if at_newest else (spelling.opset,):
            tried = replace(spelling, opset=opset)
            try:
                unfused = build(tried)
            except Unwritable as error:
                first = first or error
                continue
            self.written.append(tried)
            self.options |= unfused.written
            self.labels |= set(unfused.variant.choices.items())
            return tried
        assert first is not None
        self.unwritable.append((spelling, first))
        return None


def _variants(fusion: Fusion) -> Iterator[Spelling]:
    base = Spelling(fusion, "first")
    yield base
    chooses = {t.name: t for t in walk(*fusion.outputs) if isinstance(t, Choose)}
    single = [
        replace(base, what=f"{name}={label}", choices={name: label})
        for name, term in chooses.items()
        for label in term.options
        if label != _label(base, term)
    ]
    yield from single
    seen: set[tuple[str, frozenset[str]]] = set()
    for spelling in (base, *single):
        yield from _without(spelling, seen)
        yield from _with_values(spelling, seen)
    if any("..." in spec for spec in _specs(base)) and all(_axes(base, c) for c in operands(base)):
        yield from (replace(base, what=f"{rank}-leading-axes", leading=rank) for rank in (0, 1, 3))
    yield from _with_sizes(base)
    yield from _with_parts((base, *single))


def _with_parts(spellings: Iterable[Spelling]) -> Iterator[Spelling]:
    """An operand that is a part of what the model computes, in one run and in several; then all that may be."""
    seen: set[str] = set()
    for spelling in spellings:
        found = [t for t in reached(spelling) if isinstance(t, Rearrange) and isinstance(t.inner, Part)]
        new = [t for t in found if f"{t.inner.name} {t.pattern}" not in seen]
        seen |= {f"{t.inner.name} {t.pattern}" for t in new}
        names = {t.inner.name: layout.parse_arrangement(t.pattern, 2).source[-1] for t in new}
        for name, last in names.items():
            for kind in ("run", "runs") if len(last) > 1 else ("run",):
                yield replace(spelling, what=f"{spelling.what}-{kind}-of-{name}", parts={name: kind})
        if len(names) > 1:
            yield replace(spelling, what=f"{spelling.what}-all-parts", parts=dict.fromkeys(names, "run"))


def _without(spelling: Spelling, seen: set[Any]) -> Iterator[Spelling]:
    """Each optional parameter left out, in the first variant that can do without it."""
    inputs = {id(part) for term in reached(spelling) for part in map(bare, parts(term))}
    for capture in captures(spelling):
        if not capture.optional or capture.kind == "attribute" or (capture.kind == "scalar" and id(capture) in inputs):
            continue
        absent = replace(spelling, what=f"{spelling.what}-without-{capture.name}", absent=frozenset({capture.name}))
        readers = frozenset(
            id(t) for t in reached(spelling) if any(capture is v for v in getattr(t, "attributes", {}).values())
        )
        key = (capture.name, readers or frozenset(chosen(spelling)))
        if key in seen:
            continue
        try:
            build(absent)
        except Unwritable as error:
            if error.kind == "operands":
                continue  # what the variant is about; another label does without it
        seen.add(key)
        yield absent


def _with_values(spelling: Spelling, seen: set[Any]) -> Iterator[Spelling]:
    """Each scalar that has a default with another value; each attribute with its example."""
    for capture in captures(spelling):
        value = None
        if capture.kind == "scalar" and capture.default is not None:
            value = capture.default * 100
        elif capture.kind == "attribute":
            value = spelling.fusion.example.get(capture.name)
        if value is not None and capture.name not in seen:
            seen.add(capture.name)
            yield replace(spelling, what=f"{spelling.what},{capture.name}={value}", values={capture.name: value})


def _with_sizes(base: Spelling) -> Iterator[Spelling]:
    """A dimension that is repeated once, or not one where it may be; axes that are broadcast or left out."""
    for term in reached(base):
        if isinstance(term, Rearrange):
            source, _, result = term.pattern.partition("->")
            for name in sorted(set(re.findall(r"[a-z_]+", result)) - set(re.findall(r"[a-z_]+", source))):
                yield replace(base, what=f"{name}=1", sizes={name: 1})
    spec = next((c.dims for c in operands(base) if "?" in (c.dims or "")), "")
    names = re.findall(r"(\w+)\?", spec)
    yield from (replace(base, what=f"{name}-broadcast", thin=frozenset({name})) for name in names)
    for i in range(1, len(names)):
        yield replace(base, what=f"{names[i]}-last", thin=frozenset(names[:i]), short=True)


def _further(base: Spelling) -> Iterator[Spelling]:
    """The first variant in every opset and dtype, with open dimensions, and written in other ways."""
    yield from (replace(base, what=f"opset{opset}", opset=opset) for opset in range(OLDEST, NEWEST + 1))
    yield replace(base, what="float16", dtype=TensorProto.FLOAT16)
    yield replace(base, what="bfloat16", dtype=TensorProto.BFLOAT16)
    for opset in (13, base.opset):
        yield replace(base, what=f"dynamic-opset{opset}", dynamic=True, opset=opset)
        yield replace(base, what=f"longest-opset{opset}", longest=True, opset=opset)
        yield replace(base, what=f"swapped-opset{opset}", longest=True, swapped=True, opset=opset)
    if len(base.fusion.outputs) > 1 and not siblings(base.fusion):
        yield replace(base, what="only-first", only_first=True)


def _crossed(bases: Sequence[Spelling]) -> Iterator[Spelling]:
    """Another label together with an operand that is left out, or with another rank: some options need both."""
    first = bases[0]
    for one in bases:
        for other in bases:
            if one.choices and not one.absent and not other.choices and (other.absent, other.leading) != ((), 2):
                changes = {"absent": other.absent, "leading": other.leading, "what": f"{one.what},{other.what}"}
                yield replace(one, opset=first.opset, **changes)


def _unwritten_options(spelling: Spelling, written: Iterable[tuple[int, int]]) -> Iterator[Spelling]:
    """The spelling with one more option of an Either each, of those that the variant can be written with."""
    known = set(written)
    try:
        variant = build(spelling).variant
    except Unwritable:
        return
    for opset in range(spelling.opset, OLDEST - 1, -1):
        at_opset = replace(variant, opset=opset)
        for term, place, picks in _ways(spelling, at_opset, outputs(spelling), {}, set()):
            if (id(term), place) not in known:
                known.add((id(term), place))
                yield replace(spelling, picks=picks, what=f"{spelling.what},{_called(term, place)}")


def _called(term: Either, place: int) -> str:
    """An option in words that are fit for a test's name."""
    option = term.options[place]
    kind = getattr(option, "op", type(option).__name__)
    return f"{Path(option.span.file).stem}:{option.span.line}:{kind}#{place}"


def _ways(
    spelling: Spelling, variant: Variant, roots: Sequence[Term], picks: dict[int, int], seen: set[int]
) -> Iterator[tuple[Either, int, dict[int, int]]]:
    for term in roots:
        if id(term) in seen:
            continue
        seen.add(id(term))
        if isinstance(term, Either):
            for i, option in enumerate(complete_options(spelling, variant, term)):
                place = term.options.index(option)
                path = {**picks, id(term): place} if i else picks
                yield term, place, path
                yield from _ways(spelling, variant, [option], path, seen)
        elif isinstance(term, Choose):
            yield from _ways(spelling, variant, [term.options[_label(spelling, term)]], picks, seen)
        else:
            yield from _ways(spelling, variant, parts(term), picks, seen)


def every_option(fusion: Fusion) -> set[tuple[int, int]]:
    """What `Spellings.options` should hold."""
    eithers = [t for t in walk(*fusion.outputs) if isinstance(t, Either)]
    return {(id(t), place) for t in eithers for place in range(len(t.options))}


def every_label(fusion: Fusion) -> set[tuple[str, str]]:
    """What `Spellings.labels` should hold."""
    return {(t.name, label) for t in walk(*fusion.outputs) if isinstance(t, Choose) for label in t.options}


def longest(fusion: Fusion, opset: int) -> Spelling:
    """The first variant in as many nodes as it can be written."""
    return Spelling(fusion, f"longest-opset{opset}", opset=opset, longest=True)


def richest(fusion: Fusion, opset: int) -> Spelling:
    """Of every choice the label with the most nodes, in as many nodes as it can be written."""
    chooses = {t.name: t for t in walk(*fusion.outputs) if isinstance(t, Choose)}
    labels = {name: max(t.options, key=lambda label: count(t.options[label], {})) for name, t in chooses.items()}
    return replace(longest(fusion, opset), choices=labels, what=f"richest-opset{opset}")
