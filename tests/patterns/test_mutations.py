"""Mutations of the body of every fusion are never fused wrongly, and the explanation names what was changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import onnx
import pytest
from conftest import EachCase
from mutations import Mutant, Mutation, mutations, roundings
from runtimes import assert_close, evaluate, run
from sampling import by_parts, part_of
from spellings import GENERATED, build, longest, richest

from onnxfuse import Fusion, fusion, op, rearrange, scalar, tensor
from onnxfuse.dsl import catalogue
from onnxfuse.explain import explain
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.rewrite.select import FusionResult

OPSETS = {13: longest, 21: richest}  # before and after ReduceMean's axes became an input, and blocks of quantizers

# onnxruntime 1.31 makes a LayerNormalization of bfloat16, which the CPU provider lacks, of a Cast of bfloat16 to
# float32 and the usual nodes behind it, in models that were never optimized too; the mutants are in other spellings.
BFLOAT16_LAYER_NORM = "Failed to find kernel for LayerNormalization(1) (node:'/LayerNormFusion/'"

PARTS = 20  # of the mutations of a fusion
by_name = pytest.mark.parametrize("fusion", GENERATED, ids=lambda fusion: fusion.name)
by_opset = pytest.mark.parametrize("opset", OPSETS)


def generated(fusion: Fusion, opset: int) -> list[Mutation]:
    """Every mutation of a fusion's body in one opset."""
    return list(mutations(build(OPSETS[opset](fusion, opset))))


def in_part(found: Iterable[Mutation], opset: int, part: int) -> Sequence[Mutation]:
    """Return one of the parts of the mutations; in the two opsets, a part has others."""
    return part_of(list(found), (part + PARTS // 2 * list(OPSETS).index(opset)) % PARTS, PARTS)


@by_name
@by_opset
@by_parts(PARTS)
def test_never_fused_wrongly_and_always_explained(fusion: Fusion, opset: int, part: int, each_case: EachCase) -> None:
    """In opset 13 the mutant is also fused with all fusions: another one may take a part of it."""
    for mutation, subtest in each_case(in_part(generated(fusion, opset), opset, part)):
        with subtest:
            check(mutation, with_all=opset == 13)


@fusion(out="... d")
def unit_rows(x=tensor("... d"), least=scalar()):
    """x / max(|x|, least), where the norm is repeated along the axis that it was taken over"""
    norm = op.ReduceL2(x, axes=[-1])
    return x / rearrange(op.Max(norm, least), "... 1 -> ... d")


@by_opset
def test_a_norm_of_another_shape_is_explained(opset: int) -> None:
    """keepdims=0 first matters where the norm is repeated: the reason names the value that lacks an axis there."""
    found = [mutation for mutation in generated(unit_rows, opset) if mutation.what == "keepdims=0"]
    assert len(found) == 1
    for mutation in generated(unit_rows, opset):
        check(mutation)


@by_name
@by_opset
def test_the_body_itself_is_fused(fusion: Fusion, opset: int) -> None:
    unfused = build(OPSETS[opset](fusion, opset))
    mutant = Mutant(unfused.model, dict(unfused.inputs), ())
    optimized, fusing = fuse(mutant, [fusion])
    assert is_whole(mutant, optimized), explained(fusing)
    assert len(optimized.graph.node) == 1


@by_name
@by_opset
@by_parts(PARTS)
def test_rounding_between_float32_values_stays(fusion: Fusion, opset: int, part: int, each_case: EachCase) -> None:
    """A value that is cast to a half precision and back is fused neither across the Casts nor without an explanation.

    What has to stay is the value in the half precision: as an operand of a fused node, or as its output.
    """
    for mutation, subtest in each_case(in_part(roundings(build(OPSETS[opset](fusion, opset))), opset, part)):
        with subtest:
            mutant = mutation.make()
            for fusions in ([fusion], catalogue.builtin()):
                optimized, fusing = fuse(mutant, fusions)
                assert any("rounded" in node.output for node in optimized.graph.node), "the rounding has vanished"
            assert_runs_as_before(mutant, optimized)
            assert is_whole(mutant, optimized) or names_the_change(fusing, mutant), explained(fusing)


def assert_runs_as_before(mutant: Mutant, optimized: onnx.ModelProto) -> None:
    """Assert that onnxruntime runs the optimized model where it runs the mutant.

    Values are compared as precisely as the half precision is: a sum in another order may be rounded to its neighbour.
    """
    expected, _ = run(mutant.model, mutant.inputs)
    if expected is not None:
        actual, reason = run(optimized, mutant.inputs)
        assert actual is not None or BFLOAT16_LAYER_NORM in reason, reason
        if actual is not None:
            assert_close(expected, actual, mutant.dtype)


def check(mutation: Mutation, with_all: bool = False) -> None:
    """Assert that the mutant computes what it did, and that a reason names the change where it is not fused."""
    mutant = mutation.make()
    optimized, fusing = fuse(mutant, [mutation.fusion])
    onnx.checker.check_model(optimized, full_check=True)
    assert_same_values(mutant, optimized, *([fuse(mutant, catalogue.builtin())[0]] if with_all else []))
    if not is_whole(mutant, optimized):
        wanted = f"{mutation.id}: the reason must name the change, that is {' or '.join(mutant.names + mutant.values)}"
        assert names_the_change(fusing, mutant), f"{wanted}\n{explained(fusing)}"


def fuse(mutant: Mutant, fusions: Sequence[Fusion]) -> tuple[onnx.ModelProto, FusionResult]:
    """Return the model optimized with these fusions, and what the search for them found."""
    result = fuse_model(mutant.model, None, Settings(fusions))
    return result.model, result.fusing


def is_whole(mutant: Mutant, optimized: onnx.ModelProto) -> bool:
    """Return whether a fused node computes the first output."""
    last = mutant.model.graph.output[0].name
    return any(last in node.output for node in optimized.graph.node if node.domain == DOMAIN)


def names_the_change(fusing: FusionResult, mutant: Mutant) -> bool:
    """Return whether the reason of a miss quotes one of the mutant's names or shows one of its values."""
    reasons = [miss.reason for miss in fusing.missed]
    quoted = [rf"'{re.escape(word)}(?!\d)[^']*'" for word in mutant.names]
    shown = [rf"(is|has|=) ?(shape )?\(?{re.escape(word)}(?![\w]|\.\d)" for word in mutant.values]
    return any(re.search(word, reason) for word in (*quoted, *shown) for reason in reasons)


def explained(fusing: FusionResult) -> str:
    return "\n\n".join(map(explain, fusing.missed)) or "nothing was missed"


def assert_same_values(mutant: Mutant, *optimized: onnx.ModelProto) -> None:
    """Assert that optimized models, those that differ from each other, compute what the mutant does."""
    different = list({model.SerializeToString(deterministic=True): model for model in optimized}.values())
    expected, _ = run(mutant.model, mutant.inputs)
    if expected is None:  # onnxruntime lacks, for example, Erf of double
        for model in different:
            assert_close(evaluate(mutant.model, mutant.inputs), evaluate(model, mutant.inputs), mutant.dtype)
        return
    for model in different:
        actual, reason = run(model, mutant.inputs)
        assert actual is not None, reason
        assert_close(expected, actual, mutant.dtype)
