"""Unfused models of a fusion, generated from its declaration alone: spellings, variants, opsets and dtypes."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.algebra.operators import RECURRENCES, VIEWS
from onnxfuse.algebra.sizes import Dim, evaluate, product, symbol
from onnxfuse.algebra.sizes import Size as DimSize
from onnxfuse.algebra.view_layouts import parse_arrangement
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.dsl import catalogue
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.terms import Alternatives, Apply, Capture, PackedSlice, Rearrange, Term, walk
from onnxfuse.dsl.words import Known
from onnxfuse.errors import PatternError
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.serde import read_graph
from onnxfuse.match.named_dims import unify
from onnxfuse.match.side_outputs import may_be_absent, side_outputs
from onnxfuse.rewrite.function_body import BodyBuilder
from onnxfuse.rewrite.variant import Variant

NEWEST, OLDEST = 24, 7
# The fusions of which models are generated.  onnx knows neither the types nor the results of an operator of another
# domain, and onnx.reference ignores the lengths and clips of recurrent layers; a fusion that is such an operator, or
# one of a later opset, has tests of its own.
GENERATED = tuple(
    f for f in catalogue.builtin()
    if any(schema(op, NEWEST) and op not in RECURRENCES for op in f.outputs[0].root_ops or ("Identity",))
)  # fmt: skip
LEADING = {"batch": 3, "seq": 2, "extra": 4}  # sizes of the axes that "..." stands for; fewer axes take the first ones
MAX_TRIES = 20_000  # of sizes for the dimensions of a spelling; random choices of variants may contradict each other
PACKED_INPUTS = {
    "DequantizeLinear": (0, 2), "QuantizeLinear": (2,), "MatMulInteger": (0, 1, 2, 3), "ConvInteger": (0, 1, 2, 3),
    "com.microsoft::MatMulNBits": (1, 3),
}  # fmt: skip
POOL = (4, 5, 6, 7, 8, 9, 10, 3, 2, 12, 11, 14, 20, 1)  # sizes that are tried for a named dimension


class Unwritable(Exception):
    """No model of a variant exists; `kind` is the reason: sizes, guard, opset, operands, reshape or example."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind = kind


@dataclass(frozen=True)
class Spelling:
    """One way to write a fusion; fields left out mean its first variant with all its operands."""

    fusion: Fusion
    what: str
    opset: int = NEWEST
    choices: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # optional operands and scalars that are left out
    picks: Mapping[int, int] = field(default_factory=dict)  # index of the option to write, by id of the Alternatives
    values: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    leading: int = 2
    parts: Mapping[str, str] = field(default_factory=dict)  # operands that are slices: one "run", or "runs"
    thin: frozenset[str] = frozenset()  # names of the `name?` axes that have size one
    short: bool = False  # leading axes in `thin` are left out
    dtype: int = TensorProto.FLOAT
    dynamic: bool = False
    longest: bool = False  # each Alternatives is written as its option with the most nodes
    swapped: bool = False  # the operands of every commutative node are exchanged
    only_first: bool = False  # nothing reads the further outputs

    @property
    def id(self) -> str:
        return f"{self.fusion.name}-{self.what}"

    @functools.cached_property
    def outputs(self) -> tuple[Term, ...]:
        """Return the outputs of the variant: the last ones are absent if their operands are."""
        found = self.fusion.outputs[:1] if self.only_first else self.fusion.outputs
        dtypes = {c.name: self.dtype for c in self.fusion.operands if c.name not in self.absent}
        labels = {t.name: _label(self, t) for t in every_term(found) if is_choice(t)}
        sizes = defaultdict(lambda: 2, {"...": (3,)})  # any sizes: only which operands are there matters
        builder = BodyBuilder(Variant(NEWEST, dtypes, (self.dtype,), 2, {}, sizes, labels))
        while may_be_absent(self.fusion, len(found) - 1) and not builder.can_write(found[-1]):
            found = found[:-1]
        return found

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """Return every term of the variant, every option of an Alternatives included."""
        return reached(self, *self.outputs)

    @functools.cached_property
    def captures(self) -> tuple[Capture, ...]:
        """Return the parameters that the variant uses and that are present, in order."""
        return tuple(captures_of(self, self.terms))

    @functools.cached_property
    def computed(self) -> frozenset[str]:
        """Return the names of the parameters that the variant computes."""
        return frozenset(term.operand.name for term in self.terms if isinstance(term, Known))

    @functools.cached_property
    def specs(self) -> tuple[str, ...]:
        """Return every text of the variant that names dimensions: shapes, arrangements, expressions."""
        return tuple(_specs(self))

    @functools.cached_property
    def unfused(self) -> Unfused:
        """Return a model of the spelling, which nobody changes.  Raises Unwritable."""
        return _build(self)


@dataclass(frozen=True)
class Unfused:
    """A model of one spelling, and what it was made from."""

    spelling: Spelling
    variant: Variant
    model: onnx.ModelProto
    inputs: Mapping[str, np.ndarray]
    written: frozenset[tuple[int, int]]  # the options that were written: (id of the Alternatives, index)


# --- what a variant consists of ----------------------------------------------------------------------------------


@functools.cache
def every_term(roots: tuple[Term, ...]) -> tuple[Term, ...]:
    """Return every term below the roots, each once, parents first."""
    return tuple(walk(*roots))


def chosen(spelling: Spelling) -> dict[str, str]:
    """Return the label of each choice of the variant, by the name of the choice."""
    found: dict[str, str] = {}
    for term in spelling.terms:
        if is_choice(term):
            found[term.name] = _label(spelling, term)
    return found


def reached(spelling: Spelling, *roots: Term) -> tuple[Term, ...]:
    """Return every term of the variant below the roots, every option of an Alternatives included."""
    rank = _rank(spelling.fusion, spelling.leading)
    return _reached(spelling.fusion, roots, frozenset(spelling.choices.items()), rank)


@functools.cache  # most spellings of a fusion have the same labels
def _reached(
    fusion: Fusion, roots: tuple[Term, ...], choices: frozenset[tuple[str, str]], rank: int
) -> tuple[Term, ...]:
    found: dict[Term, None] = {}
    labels, work = dict(choices), list(roots)
    while work:
        term = work.pop()
        if term in found or not _is_possible(fusion, term, {"rank": rank}):
            continue
        found[term] = None
        work += [term.labelled(labels.get(term.name, term.labels[0]))] if is_choice(term) else term.parts
        work += term.attribute_captures
    return tuple(found)


def _is_possible(fusion: Fusion, term: Term, known: Mapping[str, object] = MappingProxyType({})) -> bool:
    """Return whether the guards of a term hold, if they ask only for `known` values and for attributes.

    In generated models, attributes that guards ask for have their examples.
    """
    known = {**fusion.example, **known}
    return all(guard.check(known) for guard in term.guards if known.keys() >= set(guard.names))


def is_choice(term: Term) -> TypeGuard[Alternatives]:
    """Whether a term has variants, of which the one that is found becomes an attribute of the fused node."""
    return isinstance(term, Alternatives) and term.name is not None


def has_spellings(term: Term) -> TypeGuard[Alternatives]:
    """Whether a term has spellings, of which the fused node does not tell which one is found."""
    return isinstance(term, Alternatives) and term.name is None


@functools.cache
def _rank(fusion: Fusion, leading: int) -> int:
    """Return the rank of the first output, where "..." stands for so many axes."""
    spec = re.sub(r"\([^)]*\)", "group", fusion.out[0])
    return sum(leading if token == "..." else 1 for token in spec.split())


def _label(spelling: Spelling, term: Alternatives) -> str:
    return spelling.choices.get(term.name or "", term.labels[0])


def captures_of(spelling: Spelling, terms: Iterable[Term]) -> Iterator[Capture]:
    """Yield the parameters among these terms that are present, in order."""
    names = {term.name for term in terms if isinstance(term, Capture)} - spelling.absent - spelling.computed
    yield from (c for c in spelling.fusion.captures if c.name in names)


def operands(spelling: Spelling) -> list[Capture]:
    """Return the operands that the variant uses and that are present, in order."""
    return [c for c in spelling.captures if c.kind in ("tensor", "weight")]


def _axes(spelling: Spelling, operand: Capture) -> list[tuple[str, ...]] | None:
    """Return for each axis of an operand the names of its sizes; None if the declaration does not tell them."""
    if operand.dims is not None:
        text = operand.dims.replace("...", " ".join(f"...{i}" for i in range(spelling.leading)))
        names = [token.rstrip("?") for token in text.split()]
        thin = [token.endswith("?") and token.rstrip("?") in spelling.thin for token in text.split()]
        kept = thin.index(False) if spelling.short and False in thin else 0
        return [() if is_thin else (name,) for name, is_thin in zip(names, thin, strict=True)][kept:]
    for term in spelling.terms:
        if isinstance(term, Rearrange) and term.inner.unwrapped is operand:
            return list(parse_arrangement(term.pattern, spelling.leading).source)
    return _axes_by_example(spelling, operand)


def _axes_by_example(spelling: Spelling, operand: Capture) -> list[tuple[str, ...]] | None:
    """Return the axes that the example of an operand names; None if it names none."""
    example = spelling.fusion.example.get(operand.name)
    return [(name,) for name in example.split()] if isinstance(example, str) else None


def _dtype(spelling: Spelling, operand: Capture) -> int:
    """The variant's dtype, or bool, int64 or uint8 where the operator that reads the operand takes nothing else.

    int64 under a Cast that the pattern writes: those between floats are none of its terms.
    """
    for term in spelling.terms:
        if not isinstance(term, Apply):
            continue
        if term.op == "Cast" and any(t.unwrapped is operand for t in _viewed(term)):
            return TensorProto.INT64
        for index, item in enumerate(term.inputs):
            inner = item.inner if isinstance(item, Rearrange) else item
            if inner.unwrapped is operand and (dtype := _only_dtype(term.op, index, spelling.opset)):
                return dtype
    return spelling.dtype


def _output_dtype(spelling: Spelling, output: Term) -> int:
    """Return the variant's dtype, or the dtype that the output is cast to, or uint8 if it is quantized."""
    if any(isinstance(term, Apply) and term.op == "QuantizeLinear" for term in reached(spelling, output)):
        return TensorProto.UINT8
    is_cast = isinstance(output, Apply) and output.op == "Cast"
    return output.attributes["to"] if is_cast else spelling.dtype


def _viewed(cast: Apply) -> Sequence[Term]:
    """Return the terms below a Cast, if only views are between it and the operands."""
    below = every_term(cast.inputs)
    return below if all(term.own_ops <= VIEWS for term in below) else ()


@functools.cache
def _only_dtype(op: str, index: int, opset: int) -> int | None:
    """Return bool or int64 where an operator's input takes nothing else, and uint8 where it takes packed numbers."""
    if index in PACKED_INPUTS.get(op, ()):
        return TensorProto.UINT8
    found = schema(op, opset)
    types = set(found.inputs[index].types) if found and index < len(found.inputs) else set()
    if types == {"tensor(bool)"}:
        return TensorProto.BOOL
    return TensorProto.INT64 if types and types <= {"tensor(int64)", "tensor(int32)"} else None


# --- sizes and values --------------------------------------------------------------------------------------------


def _names(spelling: Spelling) -> list[str]:
    """Return the names of the dimensions of the variant."""
    words = [word for spec in spelling.specs for word in re.findall(r"[A-Za-z_]\w*", spec)]
    return list(dict.fromkeys(words))


def _specs(spelling: Spelling) -> list[str]:
    specs = [c.dims for c in operands(spelling) if c.dims]
    by_example = [(_axes(spelling, c), _axes_by_example(spelling, c)) for c in operands(spelling)]
    specs += [" ".join(name for (name,) in named) for axes, named in by_example if named and axes == named]
    for term in spelling.terms:
        specs += () if isinstance(term, Capture) else term.dim_specs
    return specs


def _has_size(spelling: Spelling, name: str) -> bool:
    """Return whether an axis has the size of a name, and not size one."""
    axes = {word for spec in spelling.specs for word in re.findall(r"[A-Za-z_]\w*\??", spec)}
    return name not in spelling.thin or name in axes


def _divisors(spelling: Spelling) -> dict[str, int]:
    """Return what a dimension must be a multiple of, by name: `size("d") // 2` asks for a multiple of 2."""
    return {m[1]: int(m[2]) for spec in spelling.specs for m in re.finditer(r"(\w+)//(\d+)", spec)}


def _guards(fusion: Fusion) -> list[Guard]:
    return [*fusion.guards, *(guard for term in every_term(fusion.outputs) for guard in term.guards)]


def _indices(fusion: Fusion) -> set[str]:
    """Return the operands that must depend on the distance of their indices; they are constants of generated models."""
    return {name for guard in _guards(fusion) if "is_of_distance" in guard.relations for name in guard.names}


def find_sizes(spelling: Spelling, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes that the guards accept, different ones for different names if possible.  Raises Unwritable."""
    names = [n for n in _names(spelling) if n not in known and n not in spelling.sizes and _has_size(spelling, n)]
    has_dots = any("..." in spec for spec in spelling.specs)
    lead = tuple(LEADING.values())[: spelling.leading] if has_dots else ()
    labels = {**chosen(spelling), **_attribute_examples(spelling)}
    given = tuple({**labels, **known, **spelling.sizes}.items())
    found = _solution(spelling.fusion, tuple(names), given, tuple(_divisors(spelling).items()), lead)
    if found is None:
        raise Unwritable("sizes", f"no sizes of {', '.join(names)} fulfil the guards")
    return {"...": lead, **{name: size for name, size in found.items() if name not in labels}}


def _attribute_examples(spelling: Spelling) -> dict[str, Any]:
    """Return the examples of the attributes of the variant that are numbers: sizes may depend on them."""
    found = {c.name: spelling.fusion.example.get(c.name) for c in spelling.captures if c.kind == "attribute"}
    return {name: value for name, value in found.items() if isinstance(value, int)}


@functools.cache  # most spellings of a fusion have the same names
def _solution(
    fusion: Fusion,
    names: tuple[str, ...],
    given: tuple[tuple[str, Any], ...],
    divisors: tuple[tuple[str, int], ...],
    lead: tuple[int, ...],
) -> Mapping[str, Any] | None:
    """Return a size for each name, or None; two names get the same size only if the guards accept no others."""
    multiples, pool, shuffled = dict(divisors), list(POOL), random.Random(fusion.name)
    start = dict(given)
    guards = [guard for guard in fusion.guards if (start.keys() | set(names)).issuperset(guard.names)]
    constrained = [name for guard in sorted(guards, key=lambda each: len(each.names)) for name in guard.names]
    order = [name for name in dict.fromkeys((*constrained, *names)) if name in names]  # those of one guard together
    known = [start.keys() | set(order[:count]) for count in range(len(order) + 1)]
    decided = [[g for g in guards if known[0].issuperset(g.names)]]  # by the number of names that have sizes
    for before, after in itertools.pairwise(known):
        decided.append([g for g in guards if after.issuperset(g.names) and not before.issuperset(g.names)])

    tries = itertools.count()

    def complete(dims: dict[str, Any], count: int, repeats: bool) -> dict[str, Any] | None:
        if next(tries) > MAX_TRIES or not all(guard.check(dims) for guard in decided[count]):
            return None
        if count == len(order):
            return dims
        name, taken = order[count], (*dims.values(), *lead)
        for size in sorted(pool, key=taken.__contains__) if repeats else (size for size in pool if size not in taken):
            if size % multiples.get(name, 1) == 0:
                found = complete({**dims, name: size}, count + 1, repeats)
                if found is not None:
                    return found
        return None

    for repeats in (False, True):
        tries = itertools.count()
        shuffled.shuffle(pool)
        pool.sort(key=lambda size: size == 1)  # size one broadcasts, so it is the last resort
        found = complete(start, 0, repeats)
        if found is not None:
            return found
    return None


def _values(spelling: Spelling) -> dict[str, Any]:
    """Scalars: what an absent one is, or different numbers that the guards accept; attributes as asked for.

    An attribute that a guard looks at has its example.
    """
    found: dict[str, Any] = {}
    fresh = iter([0.25, 0.75, 1.25, 1.75])
    for capture in spelling.captures:
        if capture.kind == "scalar":
            asking = [g for g in _guards(spelling.fusion) if capture.name in g.names]
            usual = spelling.fusion.example.get(capture.name, capture.if_absent)
            usual = next(fresh) if usual is None else usual
            tried = (usual, float("-inf"), float("inf"))
            good = (value for value in tried if all(_accepts(guard, capture.name, value) for guard in asking))
            found[capture.name] = next(good, usual)
        elif capture.name in spelling.fusion.example and any(capture.name in g.names for g in _guards(spelling.fusion)):
            found[capture.name] = spelling.fusion.example[capture.name]
        if capture.name in spelling.values:
            found[capture.name] = spelling.values[capture.name]
    return found


def _accepts(guard: Guard, name: str, value: float) -> bool:
    try:
        return guard.check({"dtype": "float32", name: value})
    except TypeError:
        return True


def _dynamic(spelling: Spelling) -> list[str]:
    """Return the dimensions that an exporter leaves symbolic: none of a weight, none that is split off or repeated."""
    if None in (_axes(spelling, c) for c in operands(spelling)):
        first = spelling.fusion.out[0].split()[0]
        return [] if first == "..." else [first]
    spec = spelling.fusion.out[0].replace("(", " ").replace(")", " ")
    indices = _indices(spelling.fusion)
    weights = [_axes(spelling, c) or [] for c in operands(spelling) if c.kind == "weight" or c.name in indices]
    fixed = {spec.split()[-1]} | {name for axes in weights for names in axes for name in names}
    named: set[str] = set()
    for term in spelling.terms:
        if isinstance(term, Rearrange):
            source, _, result = term.pattern.partition("->")
            fixed |= {name for group in re.findall(r"\(([^)]*)\)", source) for name in group.split()}
            named |= set(source.split())
            fixed |= set(re.findall(r"\w+", result)) - set(re.findall(r"\w+", source))
    named |= {token for c in operands(spelling) for token in (c.dims or "").split()}
    return sorted(name for name in named if re.fullmatch(r"[a-z_]+", name) and name not in fixed)


# --- models ------------------------------------------------------------------------------------------------------


def build(spelling: Spelling) -> Unfused:
    """Return a model of a spelling, the same one each time.  Raises Unwritable."""
    return spelling.unfused


class _VariantOfFiniteWeights(Variant):
    """A variant of a model whose weights are finite, as those of generated models are."""

    def holds(self, guard: Guard) -> bool:
        return guard.check(self._known, {"is_finite": lambda weight: weight is not None})


def _build(spelling: Spelling) -> Unfused:
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
    _assert_axes_agree(spelling, model)
    return Unfused(spelling, variant, model, inputs, written)


def _assert_axes_agree(spelling: Spelling, model: onnx.ModelProto) -> None:
    """Fail where the axes that the declaration names for operands contradict its operators."""
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        raise AssertionError(
            f"{spelling.id}: the axes that the parameters name contradict the body: {error}"
        ) from error


def _holds(variant: Variant, guard: Guard) -> bool:
    operands = {name: f"the tensor '{name}'" for name in variant.dtypes}  # a guard may ask whether two are the same
    known = {"dtype": "float32", "rank": variant.rank, "opset": variant.opset, **operands}
    dtypes = {name: dtype_name(dtype) for name, dtype in variant.dtypes.items()}
    known |= {**variant.dims, **variant.values, **variant.choices, "dtypes": dtypes}
    return guard.check(known, {"is_of_distance": lambda index: True})  # as those of generated models do


def _open(spelling: Spelling, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes, with symbols for the dimensions that an exporter leaves symbolic."""
    dims = dict(numbers)
    if numbers["..."] == tuple(LEADING.values())[: len(numbers["..."])]:
        dims["..."] = tuple(map(symbol, list(LEADING)[: len(numbers["..."])]))
    for name in _dynamic(spelling):
        tried = {**dims, name: symbol(name)}
        asking = [g for g in spelling.fusion.guards if name in g.names]
        if name in numbers and all(g.check(tried) for g in asking):
            dims = tried
    return dims


def _shape(
    spelling: Spelling, name: str, axes: list[tuple[str, ...]] | None, dims: Mapping[str, Any]
) -> tuple[DimSize, ...]:
    if axes is None:
        if name not in spelling.fusion.example:
            advice = 'name its axes, as in tensor("... d"), or give a shape with example='
            raise Unwritable("example", f"nothing tells the shape of '{name}'; {advice}")
        shape = tuple(spelling.fusion.example[name])
        batch = dims.get(spelling.fusion.out[0].split()[0])
        is_weight = name in {c.name for c in spelling.fusion.captures if c.kind == "weight"}
        return shape if not isinstance(batch, Dim) or is_weight else (batch, *shape[1:])
    leading = {f"...{i}": size for i, size in enumerate(dims["..."])}
    known = {**dims, **leading, "1": 1}
    return tuple(product([known[name] for name in names]) for names in axes)


def _parted(spelling: Spelling) -> dict[str, Rearrange]:
    """Return the terms that read slices of operands, by operand, for the operands that the spelling slices."""
    found = [t for t in spelling.terms if isinstance(t, Rearrange) and isinstance(t.inner, PackedSlice)]
    return {term.inner.unwrapped.name: term for term in found if term.inner.name in spelling.parts}


def _part(spelling: Spelling, term: Rearrange, dims: Mapping[str, Any]) -> dict[str, int]:
    """Return a slice of the last axis: its `offset`, the `pitch` of several runs, and the `width` of the axis."""
    *outer, inner = (dims[name] for name in parse_arrangement(term.pattern, spelling.leading).source[-1])
    count = product(outer)
    if spelling.parts[term.inner.name] == "run":
        return {"offset": 5, "width": 5 + count * inner + 3}
    return {"offset": inner + 3 + 2, "pitch": inner + 3, "width": (count + 2) * (inner + 3)}


def _variant(
    spelling: Spelling, dims: Mapping[str, Any], parts: Mapping[str, Mapping[str, int]] = MappingProxyType({})
) -> Variant:
    dtypes = {c.name: _dtype(spelling, c) for c in operands(spelling)}
    rank = _rank(spelling.fusion, len(dims.get("...", ())))
    out = tuple(_output_dtype(spelling, term) for term in spelling.outputs)
    named = {operand: term.inner.name for operand, term in _parted(spelling).items()}
    found_numbers = {
        f"{named[operand]}_{word}": number
        for operand, part in parts.items()
        for word, number in part.items()
        if word != "width"
    }
    runs = {named[operand]: part["width"] // part["pitch"] for operand, part in parts.items() if "pitch" in part}
    dims = {**dims, **{f"{name}_blocks": count for name, count in runs.items()}}
    values = {**_values(spelling), **found_numbers}
    scalars = {c.name for c in spelling.captures if c.kind == "scalar"}  # an example can be the name of a dimension
    values |= {name: float(dims[value]) for name, value in values.items() if name in scalars and value in dims}
    return _VariantOfFiniteWeights(spelling.opset, dtypes, out, rank, values, dims, chosen(spelling))


def _dims_by_example(spelling: Spelling) -> dict[str, Any]:
    """Return the dimensions of the output as onnx infers them, for operands whose shapes do not tell them."""
    optional = frozenset(c.name for c in spelling.fusion.operands if c.optional)
    least = replace(spelling, absent=spelling.absent | optional, longest=False)
    try:
        return _inferred_dims(least)
    except Unwritable as unwritable:
        if unwritable.kind != "operands":
            raise
        return _inferred_dims(replace(least, choices={}))  # the label needs an operand that has the output's shape


def _inferred_dims(least: Spelling) -> dict[str, Any]:
    axes = {c.name: _axes(least, c) for c in operands(least)}
    shapes = {  # the shape of the output depends on no axis that has a name
        name: _shape(least, name, None, {"...": ()}) if found is None else (1,) * len(found)
        for name, found in axes.items()
    }
    variant = _variant(least, {})
    try:
        nodes, results, _ = _body(replace(least, picks={}), variant)
    except KeyError as error:
        advice = f'name the axes of {", ".join(shapes)}, as in tensor("... d")'
        raise Unwritable("example", f"example= does not tell the size of {error}; {advice}") from error
    model, _ = _model(least, variant, nodes, results[:1], shapes, shapes)
    shape = tuple(d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim)
    dims = unify(least.fusion.out[0], shape, {})
    assert dims is not None, f"{least.id}: {shape} is not ({least.fusion.out[0]})"
    return dict(dims)


def complete_options(spelling: Spelling, builder: BodyBuilder, term: Alternatives) -> list[Term]:
    """Return the options that can be written and that use every present operand."""
    possible = [option for option in term.options if builder.can_write(option)]
    used = [
        {c.name for c in captures_of(spelling, reached(spelling, option))} & builder.variant.dtypes.keys()
        for option in possible
    ]
    every = set().union(*used)
    return [option for option, names in zip(possible, used, strict=True) if names == every]


def _body(spelling: Spelling, variant: Variant) -> tuple[list[onnx.NodeProto], list[str], frozenset[tuple[int, int]]]:
    written = set()
    terms = [t for t in every_term(spelling.fusion.outputs) if has_spellings(t) and id(t) in spelling.picks]
    alike = {_looks(t): spelling.picks[id(t)] for t in terms}  # an exporter writes two products in the same way

    def pick(term: Alternatives, possible: Sequence[Term]) -> Term:
        options = complete_options(spelling, builder, term)
        wanted = spelling.picks.get(id(term), alike.get(_looks(term)))
        if wanted is not None and term.options[wanted] in options:
            options = [term.options[wanted]]
        elif id(term) in spelling.picks:
            raise Unwritable("opset", f"{term.options[spelling.picks[id(term)]].span} needs another opset")
        if not options:
            raise Unwritable("operands", f"{term.span}: no spelling has all the operands")
        option = max(options, key=lambda o: o.count_nodes(variant.choices, set())) if spelling.longest else options[0]
        written.add((id(term), term.options.index(option)))
        return option

    builder = BodyBuilder(variant, pick)
    for term in spelling.outputs:
        if not builder.can_write(term):
            raise _why_not(spelling, variant)
    try:
        results = builder.outputs(spelling.fusion)
    except PatternError as error:
        raise Unwritable("reshape", str(error)) from error
    return builder.nodes, results, frozenset(written)


def _looks(term: Alternatives) -> tuple[Any, ...]:
    """Return a key that is equal for terms that one line of a pattern makes when it is called twice."""
    return term.span, *((type(option), getattr(option, "op", "")) for option in term.options)


def _why_not(spelling: Spelling, variant: Variant) -> Unwritable:
    """Return why a variant cannot be written: a newer opset has the operators, or an operand is absent."""
    newer = replace(variant, opset=NEWEST)
    builder = BodyBuilder(newer)
    if all(builder.can_write(term) for term in spelling.outputs):
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
    masks = [guard.names for guard in _guards(spelling.fusion) if "holds_zero_or_one" in guard.relations]
    arrays |= {name: (arrays[name] > 0).astype(arrays[name].dtype) for (name,) in masks}
    indices = _indices(spelling.fusion) & arrays.keys()
    kinds |= dict.fromkeys(indices, "weight")
    arrays |= {name: np.subtract(*np.indices(concrete[name])[-2:]) % 2 for name in indices}
    # Quantizers have positive scales, with which most of their results do not saturate.
    scales = {node.input[1] for node in nodes if node.op_type == "QuantizeLinear"}
    arrays |= {name: (300 * np.abs(arrays[name]) + 100).astype(arrays[name].dtype) for name in scales & arrays.keys()}
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
    domains = sorted({node.domain for node in nodes} - {""})
    opsets = [helper.make_opsetid("", spelling.opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    ir_version = max(4, helper.find_min_ir_version_for(opsets[:1]))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    _type_outputs(model, spelling, variant)
    return model, {i.name: arrays[i.name] for i in inputs}


def _type_outputs(model: onnx.ModelProto, spelling: Spelling, variant: Variant) -> None:
    """Declare the types of the outputs, and of what operators of onnxruntime compute, as an exporter does."""
    _type_foreign(model, variant.out[0])
    shapes = _static_shapes(model) or _symbolic_shapes(model)
    for info, dtype, shape in zip(model.graph.output, variant.out, shapes, strict=False):
        dims = [d if isinstance(d, int) else None if "?" in str(d) else str(d) for d in shape]
        info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, dims))
    first, spec = shapes[0], spelling.fusion.out[0]
    said = f"{spelling.id}: out= names the axes '{spec}' of an output of shape {first}, where {dict(variant.dims)}"
    assert "(" in spec or unify(spec, first, variant.dims) is not None, said


def _type_foreign(model: onnx.ModelProto, dtype: int) -> None:
    """Record the types of the results of operators that onnx does not know."""
    foreign = [name for node in model.graph.node if node.domain for name in node.output]
    inner = set(foreign) - {output.name for output in model.graph.output}
    if inner:
        graph = read_graph(model)
        shapes = infer_shapes(graph)
        for tensor in (t for node in graph.nodes for t in node.outputs if t.name in inner):
            dims = [d if isinstance(d, int) else str(d) for d in shapes.shape(tensor) or ()]
            model.graph.value_info.append(helper.make_tensor_value_info(tensor.name, dtype, dims))


def _static_shapes(model: onnx.ModelProto) -> list[tuple[DimSize, ...]]:
    """Return the shapes of the outputs as onnx infers them; none where it does not find all numbers."""
    kinds = [output.type.tensor_type for output in onnx.shape_inference.infer_shapes(model).graph.output]
    known = all(kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim) for kind in kinds)
    return [tuple(d.dim_value for d in kind.shape.dim) for kind in kinds] if known else []


def _symbolic_shapes(model: onnx.ModelProto) -> list[tuple[DimSize, ...]]:
    """Return the shapes of the outputs as onnxfuse infers them."""
    graph = read_graph(model)
    shapes = infer_shapes(graph)
    made = {t.name: shapes.shape(t) for node in graph.nodes for t in node.outputs}
    found = [(output.name, made[output.name]) for output in model.graph.output]
    unknown = [name for name, shape in found if shape is None]
    assert not unknown, f"the shapes of {unknown} cannot be inferred"
    return [shape for _, shape in found if shape is not None]


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: int) -> np.ndarray:
    if dtype == TensorProto.BOOL:
        return rng.random(shape) > 0.3
    if dtype == TensorProto.INT64:
        return rng.integers(0, 2, shape)  # rows of a table
    if dtype == TensorProto.UINT8:
        return rng.integers(0, 256, shape, dtype=np.uint8)
    return rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(dtype))


# --- all of them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spellings:
    """The spellings of a fusion, and those that cannot be written, with the reason."""

    written: tuple[Spelling, ...]
    unwritable: tuple[tuple[Spelling, Unwritable], ...]
    options: frozenset[tuple[int, int]]  # (id, index) of each option that a spelling writes
    labels: frozenset[tuple[str, str]]  # (choice, label) that a spelling has


@functools.cache
def spellings(fusion: Fusion) -> Spellings:
    """Generate spellings: the first variant with one thing changed, each in the newest opset that can express it."""
    collector = _Collector()
    bases = list(variants(fusion, collector))
    if not bases:
        raise collector.unwritable[0][1]
    for spelling in itertools.chain(bases, _crossed_labels(bases, collector), _crossed(bases)):
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
            tried = spelling if opset == spelling.opset else replace(spelling, opset=opset)
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


def variants(fusion: Fusion, collector: _Collector | None = None) -> Iterator[Spelling]:
    """Yield the variants, each in the newest opset that can express it; the collector takes note of all of them."""
    collector = collector or _Collector()
    yield from (newest for each in _variants(fusion) if (newest := collector.take(each)) is not None)


def _variants(fusion: Fusion) -> Iterator[Spelling]:
    base = Spelling(fusion, "first")
    yield base
    chooses = {t.name: t for t in walk(*fusion.outputs) if is_choice(t)}
    single = [
        _fitting(replace(base, what=f"{name}={label}", choices={name: label}))
        for name, term in chooses.items()
        for label in term.labels
        if label != _label(base, term)
    ]
    yield from single
    seen: set[tuple[str, frozenset[str]]] = set()
    for spelling in (base, *single):
        yield from _without(spelling, seen)
        yield from _with_values(spelling, seen)
    if any("..." in spec for spec in base.specs) and all(_axes(base, c) for c in operands(base)):
        yield from (replace(base, what=f"{rank}-leading-axes", leading=rank) for rank in (0, 1, 3))
    yield from _with_sizes(base)
    yield from _with_parts((base, *single))


def _fitting(spelling: Spelling) -> Spelling:
    """Return a variant; where the guards accept no sizes, that with size one for each axis that may have it.

    Where they do not accept an optional operand, it is left out.
    """
    kind = _refused(spelling)
    if kind == "sizes":
        thin = {name for c in operands(spelling) for name in re.findall(r"([a-z]\w*)\?", c.dims or "")}
        return replace(spelling, thin=frozenset(thin))
    optional = [c.name for c in spelling.captures if c.optional and c.is_operand] if kind == "guard" else []
    without = (replace(spelling, absent=frozenset({name})) for name in optional)
    return next((each for each in without if not _refused(each)), spelling)


def _refused(spelling: Spelling) -> str:
    """Return why a variant cannot be built, as Unwritable calls it; "" if it can."""
    try:
        build(spelling)
    except Unwritable as error:
        return error.kind
    return ""


def _with_parts(spellings: Iterable[Spelling]) -> Iterator[Spelling]:
    """Yield variants with an operand that is a slice of a tensor, in one run and in several; then with all of them."""
    seen: set[str] = set()
    for spelling in spellings:
        found = [t for t in spelling.terms if isinstance(t, Rearrange) and isinstance(t.inner, PackedSlice)]
        new = [t for t in found if f"{t.inner.name} {t.pattern}" not in seen]
        seen |= {f"{t.inner.name} {t.pattern}" for t in new}
        names = {t.inner.name: parse_arrangement(t.pattern, 2).source[-1] for t in new}
        for name, last in names.items():
            for kind in ("run", "runs") if len(last) > 1 else ("run",):
                yield replace(spelling, what=f"{spelling.what}-{kind}-of-{name}", parts={name: kind})
        if len(names) > 1:
            yield replace(spelling, what=f"{spelling.what}-all-parts", parts=dict.fromkeys(names, "run"))


def _without(spelling: Spelling, seen: set[Any]) -> Iterator[Spelling]:
    """Yield variants without each optional parameter, in the first variant that exists without it."""
    inputs = {id(part.unwrapped) for term in spelling.terms for part in term.parts}
    for capture in spelling.captures:
        if not capture.optional or capture.kind == "attribute" or (capture.kind == "scalar" and id(capture) in inputs):
            continue
        absent = replace(spelling, what=f"{spelling.what}-without-{capture.name}", absent=frozenset({capture.name}))
        readers = frozenset(id(t) for t in spelling.terms if capture in t.attribute_captures)
        key = (capture.name, readers or frozenset(chosen(spelling)))
        if key in seen:
            continue
        try:
            build(absent)
        except Unwritable as error:
            if error.kind == "operands":
                continue  # this label needs the operand; another one does not
        seen.add(key)
        yield absent


def _with_values(spelling: Spelling, seen: set[Any]) -> Iterator[Spelling]:
    """Each scalar that has a value where it is absent with another value; each attribute with its example."""
    for capture in spelling.captures:
        value = None
        if capture.kind == "scalar" and capture.if_absent is not None:
            value = capture.if_absent * 100
        elif capture.kind == "attribute":
            value = spelling.fusion.example.get(capture.name)
        if value is not None and capture.name not in seen:
            seen.add(capture.name)
            yield replace(spelling, what=f"{spelling.what},{capture.name}={value}", values={capture.name: value})


def _with_sizes(base: Spelling) -> Iterator[Spelling]:
    """Yield variants with a repeated dimension of size one, and with axes that are broadcast or left out."""
    for term in base.terms:
        if isinstance(term, Rearrange):
            source, _, result = term.pattern.partition("->")
            for name in sorted(set(re.findall(r"[a-z_]+", result)) - set(re.findall(r"[a-z_]+", source))):
                yield replace(base, what=f"{name}=1", sizes={name: 1})
    specs = [re.findall(r"(\w+)\?", c.dims or "") for c in operands(base)]
    names = dict.fromkeys(itertools.chain(*specs))
    yield from (replace(base, what=f"{name}-broadcast", thin=frozenset({name})) for name in names)
    first = next(filter(None, specs), [])
    for i in range(1, len(first)):
        yield replace(base, what=f"{first[i]}-last", thin=frozenset(first[:i]), short=True)


def _further(base: Spelling) -> Iterator[Spelling]:
    """Yield the first variant in every opset and dtype, with symbolic dimensions, longest and with swapped operands."""
    yield from (replace(base, what=f"opset{opset}", opset=opset) for opset in range(OLDEST, NEWEST + 1))
    yield replace(base, what="float16", dtype=TensorProto.FLOAT16)
    yield replace(base, what="bfloat16", dtype=TensorProto.BFLOAT16)
    for opset in (13, base.opset):
        yield replace(base, what=f"dynamic-opset{opset}", dynamic=True, opset=opset)
        yield replace(base, what=f"longest-opset{opset}", longest=True, opset=opset)
        yield replace(base, what=f"swapped-opset{opset}", longest=True, swapped=True, opset=opset)
    if len(base.fusion.outputs) > 1 and not side_outputs(base.fusion):
        yield replace(base, what="only-first", only_first=True)


def _crossed(bases: Sequence[Spelling]) -> Iterator[Spelling]:
    """Yield another label with an absent operand, an axis of one or another rank, because some options need both."""
    first = bases[0]
    for one in bases:
        for other in bases:
            if one.choices and not one.absent and not other.choices and (other.absent, other.leading) != ((), 2):
                changes = {"absent": other.absent, "leading": other.leading, "thin": other.thin, "short": other.short}
                yield replace(one, opset=first.opset, what=f"{one.what},{other.what}", **changes)


def _crossed_labels(bases: Sequence[Spelling], collector: _Collector) -> Iterator[Spelling]:
    """Yield labels together with each that has options which no spelling has written yet."""
    fusion, first = bases[0].fusion, bases[0]
    lacking = {key for key, _ in every_option(fusion) - collector.options}
    chooses = {t.name: t for t in walk(*fusion.outputs) if is_choice(t)}
    labelled = [one for one in bases if one.choices and one == replace(first, what=one.what, choices=one.choices)]
    for other in labelled:
        terms = [term for name, label in other.choices.items() for term in walk(chooses[name].labelled(label))]
        if lacking.isdisjoint(map(id, terms)):
            continue
        for one in labelled:
            if not one.choices.keys() & other.choices.keys():
                yield replace(one, choices={**one.choices, **other.choices}, what=f"{one.what},{other.what}")


def _unwritten_options(spelling: Spelling, written: Iterable[tuple[int, int]]) -> Iterator[Spelling]:
    """Yield the spelling with each writable option of an Alternatives that no spelling has written yet."""
    terms = {id(term) for term in spelling.terms}
    lacking = {option for option in every_option(spelling.fusion) - set(written) if option[0] in terms}
    if not lacking:
        return
    try:
        variant = build(spelling).variant
    except Unwritable:
        return
    for opset in range(spelling.opset, OLDEST - 1, -1):
        if not lacking:
            return
        at_opset = BodyBuilder(replace(variant, opset=opset))
        for term, index, picks in _ways(spelling, at_opset, spelling.outputs, {}, set()):
            if (id(term), index) in lacking:
                lacking.remove((id(term), index))
                yield replace(spelling, picks=picks, what=f"{spelling.what},{_called(term, index)}")


def one_option_changed(spelling: Spelling, variant: Variant) -> Iterator[Spelling]:
    """Yield the spelling with each option of an Alternatives that is not the first one, and what leads there."""
    for term, index, picks in _ways(spelling, BodyBuilder(variant), spelling.outputs, {}, set()):
        if picks.get(id(term)) == index:
            yield replace(spelling, picks=picks)


def _called(term: Alternatives, index: int) -> str:
    """Return a name of an option that is fit for a test's id."""
    option = term.options[index]
    kind = getattr(option, "op", type(option).__name__)
    return f"{Path(option.span.file).stem}:{option.span.line}:{kind}#{index}"


def _ways(
    spelling: Spelling, builder: BodyBuilder, roots: Sequence[Term], picks: dict[int, int], seen: set[int]
) -> Iterator[tuple[Alternatives, int, dict[int, int]]]:
    for term in roots:
        if id(term) in seen:
            continue
        seen.add(id(term))
        if has_spellings(term):
            for i, option in enumerate(complete_options(spelling, builder, term)):
                index = term.options.index(option)
                path = {**picks, id(term): index} if i else picks
                yield term, index, path
                yield from _ways(spelling, builder, [option], path, seen)
        elif is_choice(term):
            yield from _ways(spelling, builder, [term.labelled(_label(spelling, term))], picks, seen)
        else:
            yield from _ways(spelling, builder, term.parts, picks, seen)


@functools.cache
def every_option(fusion: Fusion) -> frozenset[tuple[int, int]]:
    """Return what `Spellings.options` must hold."""
    eithers = [t for t in walk(*fusion.outputs) if has_spellings(t)]
    options = ((t, index, option) for t in eithers for index, option in enumerate(t.options))
    return frozenset((id(t), index) for t, index, option in options if _is_possible(fusion, option))


def every_label(fusion: Fusion) -> set[tuple[str, str]]:
    """Return what `Spellings.labels` must hold."""
    return {(t.name, label) for t in walk(*fusion.outputs) if is_choice(t) for label in t.labels}


def longest(fusion: Fusion, opset: int) -> Spelling:
    """Return the first variant in as many nodes as possible."""
    return Spelling(fusion, f"longest-opset{opset}", opset=opset, longest=True)


def richest(fusion: Fusion, opset: int) -> Spelling:
    """Return the variant whose labels have the most nodes, in as many nodes as possible."""
    chooses = {t.name: t for t in walk(*fusion.outputs) if is_choice(t)}
    labels = {
        name: max(t.labels, key=lambda label: t.labelled(label).count_nodes({}, set())) for name, t in chooses.items()
    }
    return _fitting(replace(longest(fusion, opset), choices=labels, what=f"richest-opset{opset}"))
