"""Every rewrite rule: both sides compute the same, the engine writes the right one, and near misses stay equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx
import pytest
from mutations import Mutant, mutations
from onnx_models import apply, ops
from runtimes import assert_close, run
from spellings import NEWEST, Unfused, build, longest, spellings

from onnxfuse.dsl import guards
from onnxfuse.dsl.declaration import Rewrite
from onnxfuse.dsl.terms import Alternatives, Term
from onnxfuse.match import relations
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.rewrite import apply_rules
from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rewrite.function_body import BodyBuilder
from onnxfuse.rules import RULES

# Conditions that choose among equal forms, or that hold for the values that are drawn.
ASSUMED = (
    "is_made_by", "is_ordinary", "is_bounded", "has_readers", "holds_zero_or_one", "is_triangle", "is_table",
    "are_slices_of_one",
)  # fmt: skip
# In the scope of a module, the tests of a rule follow each other, so that a process makes its spellings once.
by_rule = pytest.mark.parametrize(
    "rule", RULES, ids=[f"{rule.left.name}-{index}" for index, rule in enumerate(RULES)], scope="module"
)


@pytest.fixture(autouse=True)
def all_rewrites_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated models have their operands as inputs: nothing computes them, and nothing else reads them."""
    for name in ASSUMED:
        monkeypatch.setattr(relations, name, lambda *values, **options: True)
    monkeypatch.setattr(guards, "_unrelated", lambda *values, **options: True)
    monkeypatch.setattr(apply_rules, "rewritable_softmaxes", lambda graph, node: {node.name})


def right_side(rule: Rewrite, unfused: Unfused) -> onnx.ModelProto:
    """Return the model of a spelling with the rule's right side in place of the left one."""

    def as_on_the_left(term: Alternatives, options: Sequence[Term]) -> Term:
        spelled = (term.options[index] for key, index in unfused.written if key == id(term))
        return next((option for option in spelled if option in options), options[0])

    builder = BodyBuilder(unfused.variant, as_on_the_left)
    value = builder.cast(builder.value(rule.right), unfused.variant.out[0])
    model = onnx.ModelProto()
    model.CopyFrom(unfused.model)
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(builder.nodes)
    model.graph.node.append(onnx.helper.make_node("Identity", [value.name], ["right"]))
    model.graph.output[0].name = "right"
    return model


def written(rule: Rewrite) -> Iterator[Unfused]:
    """Yield the models of the left side whose right side their opset can write."""
    models = [build(spelling) for spelling in spellings(rule.left).written]
    yield from (unfused for unfused in models if BodyBuilder(unfused.variant).can_write(rule.right))


def test_conditions_read_as_requirements() -> None:
    """`explain` prints a condition where it does not hold, so that "the mask is finite" would read as a finding."""
    of_patterns = ("a weight without blocks", "x of a float8 weight")  # conditions that patterns share with rules
    sentences = {guard.sentence for rule in RULES for guard in rule.left.guards}
    found = {each for each in sentences if not re.search(r"\b(must|may|required)\b|\{", each)}
    assert [each for each in found if not each.startswith(of_patterns)] == []


@by_rule
def test_both_sides_compute_the_same(rule: Rewrite) -> None:
    count = 0
    for unfused in written(rule):
        expected, _ = run(unfused.model, unfused.inputs)
        if expected is not None:  # the CPU provider lacks most operators in bfloat16
            actual, reason = run(right_side(rule, unfused), unfused.inputs)
            assert actual is not None, reason
            assert_close(expected, actual, unfused.spelling.dtype)
            count += 1
    assert count


@by_rule
def test_the_engine_writes_the_right_side(rule: Rewrite) -> None:
    for unfused in written(rule):
        changed, (_, applied) = apply(unfused.model, fold_constants, rules_pass("rule", [rule]))
        assert applied == 1, unfused.spelling.id
        wanted, _ = apply(right_side(rule, unfused), fold_constants)
        assert sorted([*ops(changed).split(), "Identity"]) == sorted(ops(wanted).split()), unfused.spelling.id


@by_rule
@pytest.mark.parametrize("opset", (10, 20))
def test_near_misses_stay_equal(rule: Rewrite, opset: int) -> None:
    """A left side with one change is left alone, or its rewritten form computes what it did."""
    guards_of_opset = [guard for guard in rule.left.guards if guard.names == ("opset",)]
    opset = next(each for each in range(opset, NEWEST) if all(guard.holds(each) for guard in guards_of_opset))
    unfused = build(longest(rule.left, opset))
    for mutation in mutations(unfused):
        mutant = mutation.make()
        try:
            changed, (_, applied) = apply(mutant.model, fold_constants, rules_pass("rule", [rule]))
        except Exception:
            if is_model(mutant):
                raise
            continue
        if not applied:
            continue
        expected, _ = run(mutant.model, mutant.inputs)
        if expected is None:
            continue
        actual, reason = run(changed, mutant.inputs)
        assert actual is not None, f"{mutation.id}: {reason}"
        for one, other in zip(expected, actual, strict=True):
            assert one.shape == other.shape, mutation.id
        assert_close(expected, actual, mutant.dtype)


def is_model(mutant: Mutant) -> bool:
    """Return whether onnxruntime runs a mutant, and its types are inferred: not those of a PRelu of too many slopes."""
    try:
        onnx.checker.check_model(mutant.model)
    except onnx.checker.ValidationError:  # such as an attribute of another type
        return False
    try:
        apply(mutant.model, fold_constants)
    except onnx.shape_inference.InferenceError:
        return False
    return run(mutant.model, mutant.inputs)[0] is not None
