"""Every fusion's own body, changed in one place: never fused wrongly, and the explanation names the change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import onnx
import pytest
from mutations import Mutant, Mutation, mutations
from runtimes import assert_close, evaluate, run
from spellings import build, longest, richest

from onnxfuse import Fusion
from onnxfuse.explain import explain
from onnxfuse.language import catalog
from onnxfuse.model.graph import DOMAIN
from onnxfuse.optimize import Clock, Run
from onnxfuse.rewrite.fuse import Fusing

OPSETS = {13: longest, 20: richest}  # before and after ReduceMean's axes became an input


def _all() -> Iterator[Mutation]:
    for fusion in catalog.builtin():
        for opset, variant in OPSETS.items():
            yield from mutations(build(variant(fusion, opset)))


ALL = list(_all())


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.id)
def test_never_fused_wrongly_and_always_explained(mutation: Mutation) -> None:
    mutant = mutation.make()
    optimized, fusing = fuse(mutant, [mutation.fusion])
    onnx.checker.check_model(optimized, full_check=True)
    assert_same_values(mutant, optimized)
    if not is_whole(mutant, optimized):
        assert names_the_change(fusing, mutant), explained(fusing)


@pytest.mark.parametrize("fusion", catalog.builtin(), ids=lambda fusion: fusion.name)
@pytest.mark.parametrize("opset", OPSETS)
def test_the_body_itself_is_fused(fusion: Fusion, opset: int) -> None:
    unfused = build(OPSETS[opset](fusion, opset))
    mutant = Mutant(unfused.model, dict(unfused.inputs), ())
    optimized, fusing = fuse(mutant, [fusion])
    assert is_whole(mutant, optimized), explained(fusing)
    assert len(optimized.graph.node) == 1


@pytest.mark.parametrize("mutation", [m for m in ALL if m.opset == 13], ids=lambda mutation: mutation.id)
def test_never_wrong_with_all_fusions(mutation: Mutation) -> None:
    mutant = mutation.make()
    optimized, _ = fuse(mutant, catalog.builtin())
    assert_same_values(mutant, optimized)


def fuse(mutant: Mutant, fusions: Sequence[Fusion]) -> tuple[onnx.ModelProto, Fusing]:
    """Optimize with these fusions."""
    result = Run(mutant.model, None, False, None, Clock(lambda stage, done, of: None)).apply(fusions)
    return result.model, result.fusing


def is_whole(mutant: Mutant, optimized: onnx.ModelProto) -> bool:
    """Whether a fused node computes the output that the body computed."""
    last = mutant.model.graph.output[0].name
    return any(last in node.output for node in optimized.graph.node if node.domain == DOMAIN)


def names_the_change(fusing: Fusing, mutant: Mutant) -> bool:
    """Whether a reason quotes one of the names, or shows the value."""
    reasons = [miss.reason for miss in fusing.missed]
    quoted = [rf"'{re.escape(word)}(?!\d)[^']*'" for word in mutant.names]
    shown = [rf"(is|has|=) ?(shape )?\(?{re.escape(word)}(?![\w]|\.\d)" for word in mutant.values]
    return any(re.search(word, reason) for word in (*quoted, *shown) for reason in reasons)


def explained(fusing: Fusing) -> str:
    return "\n\n".join(map(explain, fusing.missed)) or "nothing was missed"


def assert_same_values(mutant: Mutant, optimized: onnx.ModelProto) -> None:
    expected, _ = run(mutant.model, mutant.inputs)
    if expected is None:  # onnxruntime lacks, for example, Erf of double
        assert_close(evaluate(mutant.model, mutant.inputs), evaluate(optimized, mutant.inputs), mutant.dtype)
        return
    actual, reason = run(optimized, mutant.inputs)
    assert actual is not None, reason
    assert_close(expected, actual, mutant.dtype)
