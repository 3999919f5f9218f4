"""Cases written as documents: a name and a title, a model in ONNX text, and under it what the report says of it.

A file of tests/cases holds the documents about one fusion; a line `===` stands between two of them.  The first line of
a document is `name: title`.  From the second line to the line `---` stands the model in the text form of ONNX; values
that `<...>` declares without a number are weights, drawn at random.  Each line below is one of these:

    fused layer_norm(x, w, b) -> y {epsilon=1e-05}     a fused node; all are listed, attributes only where they matter
    within the body of Loop 'y': 5 -> 2 nodes          a subgraph; all are listed, their fused nodes as those outside
    folded batch_norm scale -> conv                    a folded record; all but those of constants and shapes are listed
    missed layer_norm at y: ... is computed ...        a near miss as `onnxfuse explain` tells it; `...` is any text
    stays com.microsoft::Attention: its cache ...      an operator that is not spelled out, and why
    left Conv, Mul                                     the operators that are not fused, in order, if that matters;
                                                       those of a subgraph stand behind the node that it belongs to
    kept my.f: its operators ...                       a function that is not inlined, and why
    unverified                                         onnxruntime gets no inputs, because a rank or dtype is unknown
    xfail why                                          the lines say what should be; the code does not do that yet
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfuse import Report
from onnxfuse.ir.protos import nodes
from onnxfuse.match import Miss

BOOKKEEPING = {"attributes", "fusion", "operands", "output_ranks", "output_types"}  # attributes of every fused node
KINDS = ("fused", "folded", "within", "kept", "missed", "stays", "left", "unverified", "xfail")
CALL = re.compile(r"(?P<call>\w+\([^()]*\) -> [^{}]+?)(?: \{(?P<attributes>[^{}]*)\})?")
HEAD = re.compile(r"(?P<name>\w+): (?P<title>\S.*)")
MISS = re.compile(r"(?P<fusion>\w+) at (?P<node>.+?): (?P<reason>.+)")


class CaseError(ValueError):
    """A document is not written as a case is."""


@dataclass(frozen=True)
class Line:
    """A line below `---`, without its first word."""

    number: int
    text: str


@dataclass(frozen=True)
class Case:
    """One document."""

    path: Path
    name: str
    title: str
    model: onnx.ModelProto
    lines: dict[str, list[Line]] = field(default_factory=dict)  # by their first word

    def of(self, kind: str) -> list[Line]:
        """Return the lines that begin with a word."""
        return self.lines.get(kind, [])


def read_cases(path: Path) -> dict[str, Case]:
    """Return the cases that a file's documents state, by name.  Raises CaseError, which says what is wrong where."""
    cases: dict[str, Case] = {}
    first = 1
    for text in f"{path.read_text(encoding='utf-8')}\n".split("\n===\n"):
        case = _read(path, first, text)
        if case.name in cases:
            raise CaseError(f"{path.name}:{first}: another document of this file is named '{case.name}' too")
        cases[case.name] = case
        first += text.count("\n") + 2  # the lines of the document and the line that ends it
    return cases


def _read(path: Path, first: int, text: str) -> Case:
    """Return the case that a document states, which begins at a line of the file."""
    head, _, rest = text.partition("\n")
    model_text, separator, below = f"{rest}\n".partition("\n---\n")
    named = HEAD.fullmatch(head)
    if not named:
        raise CaseError(f"{path.name}:{first}: the first line of a document is `name: title`, not '{head}'")
    if not separator:
        raise CaseError(
            f"{path.name}:{first}: a line `---` must stand between the model and what the report says of it"
        )
    try:
        model = with_weights(onnx.parser.parse_model(model_text))
    except onnx.parser.ParseError as error:
        where = f"its line 1 is line {first + 1} of the file"
        raise CaseError(f"{path.name}:{first}: the model is not ONNX text ({where}): {error}") from error
    case = Case(path, named["name"], named["title"], model)
    for number, line in enumerate(below.splitlines(), first + model_text.count("\n") + 3):
        kind, _, said = line.strip().partition(" ")
        if kind:
            _check(path, number, kind, said)
            case.lines.setdefault(kind, []).append(Line(number, said.strip()))
    if not case.lines:
        raise CaseError(
            f"{path.name}:{first}: no line stands under `---`; write `left`; the test then shows the others"
        )
    return case


def _check(path: Path, number: int, kind: str, said: str) -> None:
    """Raise CaseError unless a line below `---` is written as its first word asks for."""
    where = f"{path.name}:{number}:"
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        advice = f"Did you mean '{near[0]}'?" if near else f"It is one of {', '.join(KINDS)}."
        raise CaseError(f"{where} a line cannot begin with '{kind}'. {advice}")
    if kind == "fused" and not CALL.fullmatch(said):
        raise CaseError(f"{where} write `fused fusion(operands) -> outputs {{attribute=value}}`, not `fused {said}`")
    if kind == "folded" and " -> " not in said:
        raise CaseError(f"{where} write `folded kind node -> node`, not `folded {said}`")
    if kind == "missed" and not MISS.fullmatch(said):
        raise CaseError(f"{where} write `missed fusion at node: reason`, not `missed {said}`")
    if kind == "xfail" and not said:
        raise CaseError(f"{where} say after `xfail` why the code does not do what the lines say")


def with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give a model random initializers for the values that it declares and that no node computes."""
    random = np.random.default_rng(0)
    known = {t.name for t in model.graph.initializer} | {o for n in model.graph.node for o in n.output}
    for value in model.graph.value_info:
        if value.name not in known:
            kind = value.type.tensor_type
            shape = [d.dim_value for d in kind.shape.dim]
            array = random.uniform(0.5, 1.5, shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    return model


# --- what the report says ------------------------------------------------------------------------------------------


def differences(case: Case, model: onnx.ModelProto, report: Report, misses: Iterable[Miss]) -> str:
    """Return in what a document and the report differ, and the lines that the report stands for; "" if in nothing."""
    near = list(misses)
    listed = ("within", _subgraphs(report)), ("kept", list(report.inlined.kept) if report.inlined else [])
    problems = [*_fused(case, model), *_folded(case, report), *_missed(case, near)]
    problems += [*_stays(case, report), *_left(case, model)]
    problems += [problem for kind, found in listed for problem in _listed(case, kind, found)]
    if not problems:
        return ""
    where = f"{case.path.name}: {case.name}"
    return "\n".join([f"{where} and the report differ:", *problems, "The report says:", *_said(model, report, near)])


def _said(model: onnx.ModelProto, report: Report, misses: Iterable[Miss]) -> Iterator[str]:
    """Yield the lines of a document with which the report would agree; a document may leave out attributes."""
    for call, values in _calls(model).items():
        shown = ", ".join(f"{name}={value}" for name, value in sorted(values.items()) if name not in BOOKKEEPING)
        yield f"  fused {call}" + (f" {{{shown}}}" if shown else "")
    yield from (f"  within {line}" for line in _subgraphs(report))
    yield from (f"  kept {line}" for line in (report.inlined.kept if report.inlined else ()))
    yield from (f"  folded {line}" for line in _folds(report))
    yield from (f"  missed {miss.fusion.name} at {miss.node}: {miss.reason}" for miss in misses)
    yield from (f"  stays {one.op}: {one.reason}" for one in report.stays)
    yield f"  left {_operators(model)}".rstrip()


def _fused(case: Case, model: onnx.ModelProto) -> Iterator[str]:
    """Yield the fused nodes that the document alone has, that the model alone has, and whose attributes differ."""
    found, listed = _calls(model), set()
    for line in case.of("fused"):
        parts = CALL.fullmatch(line.text)
        assert parts
        call = parts["call"].strip()
        listed.add(call)
        if call not in found:
            yield f"  line {line.number}: no node is {call}"
            continue
        for pair in filter(None, (parts["attributes"] or "").split(", ")):
            name, _, value = pair.partition("=")
            if found[call].get(name) != value:
                yield f"  line {line.number}: {name} is {found[call].get(name, 'no attribute')}, not {value}"
    yield from (f"  no line says: fused {call}" for call in found if call not in listed)


def _calls(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Return the attributes of each fused node, by the node as `fusion(operands) -> outputs`."""
    calls = {}
    for node in nodes(model.graph):
        if node.domain == "onnxfuse":
            name = re.sub(r"_\d+$", "", node.op_type)  # a second variant of a fusion is a second function
            call = f"{name}({', '.join(node.input)}) -> {', '.join(node.output)}"
            calls[call] = {a.name: _shown(helper.get_attribute_value(a)) for a in node.attribute}
    return calls


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value.decode() if isinstance(value, bytes) else str(value)


def _folded(case: Case, report: Report) -> Iterator[str]:
    """Yield the folded records that the document alone has, and those that the report alone has."""
    listed, found = Counter(line.text for line in case.of("folded")), Counter(_folds(report))
    yield from (f"  nothing was folded as: {text}" for text in (listed - found).elements())
    yield from (f"  no line says: folded {text}" for text in (found - listed).elements())


def _folds(report: Report) -> list[str]:
    return [f"{one.kind} {one.node} -> {one.into}" for one in report.folded if one.kind not in ("constant", "shape")]


def _missed(case: Case, misses: Iterable[Miss]) -> Iterator[str]:
    """Yield the near misses of the document that are none, or that have another reason."""
    reasons = {(miss.fusion.name, miss.node): miss.reason for miss in reversed(list(misses))}  # the nearest one counts
    for line in case.of("missed"):
        parts = MISS.fullmatch(line.text)
        assert parts
        reason = reasons.get((parts["fusion"], parts["node"]))
        if reason is None:
            yield f"  line {line.number}: {parts['fusion']} is not nearly matched at '{parts['node']}'"
        elif not _agrees(parts["reason"], reason):
            yield f"  line {line.number}: the reason is another one: {reason}"


def _agrees(text: str, reason: str) -> bool:
    return bool(re.fullmatch(".*".join(map(re.escape, text.split("..."))), reason))


def _stays(case: Case, report: Report) -> Iterator[str]:
    """Yield the operators of the document that are spelled out, or stay for another reason."""
    for line in case.of("stays"):
        op, _, text = line.text.partition(": ")
        reasons = [one.reason for one in report.stays if one.op == op]
        if not any(_agrees(text, reason) for reason in reasons):
            yield f"  line {line.number}: no {op} stays for that reason, but for these: {'; '.join(reasons) or 'none'}"


def _left(case: Case, model: onnx.ModelProto) -> Iterator[str]:
    """Yield the line of the operators left over, if it says others than there are."""
    for line in case.of("left"):
        if line.text != _operators(model):
            yield f"  line {line.number}: the operators that are left are: {_operators(model) or 'none'}"


def _operators(model: onnx.ModelProto) -> str:
    return ", ".join(node.op_type for node in nodes(model.graph) if node.domain != "onnxfuse")


def _listed(case: Case, kind: str, found: list[str]) -> Iterator[str]:
    """Yield the lines of a kind that the document alone has, and those that the report alone has."""
    listed = [line.text for line in case.of(kind)]
    yield from (f"  the report does not say: {kind} {text}" for text in listed if text not in found)
    yield from (f"  no line says: {kind} {text}" for text in found if text not in listed)


def _subgraphs(report: Report) -> list[str]:
    return [f"{each.where}: {each.nodes_before} -> {each.nodes_after} nodes" for each in report.subgraphs]
