"""Optimize a model: load it, fuse it, verify the result, and fuse it again without what is wrong."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import onnx

from onnxfuse.dsl import catalogue
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.errors import NothingRunsError, UsageError, VerificationError
from onnxfuse.fuse_model import FusedModel, Progress, StageTimer, fuse_model
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.load import load
from onnxfuse.layout.assign import LAYOUT, Layout
from onnxfuse.passes import Folded
from onnxfuse.report.report import Dropped, Report, quantized_operators
from onnxfuse.rewrite.replace import REGION, Fused
from onnxfuse.spell_out import in_terms_of_model
from onnxfuse.verify.compare import NOT_VERIFIED, Verification, compare, first_difference, nothing_compared
from onnxfuse.verify.compare_constants import wrong_constants
from onnxfuse.verify.compare_parts import PartFinding, PartsVerification, compare_parts
from onnxfuse.verify.observed import NotCompared
from onnxfuse.verify.own_process import DEFAULT_TIMEOUT, TimeLimitExceeded, own_process
from onnxfuse.verify.parts import distinct_parts
from onnxfuse.verify.reference import Reference, run_original

MAX_ROUNDS_OF_PARTS = 3  # in which nodes of one fusion are taken back; a fusion that is wrong more often is left out
WEIGHT_FOLDING = "batch_norm"  # the name in the report when the folding into weights is taken back
CONSTANT_FOLDING = "constant"  # the name in the report when the folding of a constant is taken back


def optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    patterns: Iterable[str | os.PathLike[str]] = (),
    fallback: Literal["onnx", "ort"] = "onnx",
    layout: Layout = "auto",
    regions: bool = False,
    verify: bool = True,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    timeout: float | None = DEFAULT_TIMEOUT,
    tolerance: float | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> tuple[onnx.ModelProto, Report]:
    """Fuse a model.

    model     a path, a serialized model or a ModelProto (which is not changed); external data stays on disk
    only      names of the fusions to apply; all if empty
    skip      names of fusions to leave out
    patterns  folders of Python files with further fusions; a fusion replaces one of the same name
    fallback  operators that the bodies of fused nodes consist of: standard ONNX, or also onnxruntime's own
    layout    of images around convolutions: channels-last where that pays ("auto") or wherever it can be ("nhwc"), or
              channels-first everywhere ("nchw")
    regions   let connected operators that no pattern names become fused nodes too, where that should save memory
              traffic or launches; `only` may name "region" instead.  How fast their kernels are was not measured yet
    verify    run each fused node and what it replaced, and both models, in onnxruntime; take back what differs
    inputs    arrays to verify with, by input name; others are generated
    shapes    sizes to verify with, as "input:8x512"; others are chosen
    timeout   seconds that opening a model in onnxruntime, or one run of it, may take in a process of its own; None runs
              models in this process, without a limit
    tolerance the largest error of an output, relative to its largest value; by default that of its dtype, or more where
              the original's own noise is larger
    progress  called with the stage, how much of it is done, and of how much

    Returns the model, in which each fused node calls a model-local function, and the report.  Raises ModelError if the
    model cannot be read, UsageError for an unknown fusion, VerificationError if the models differ although no fusion
    and no folding causes it.
    """
    if fallback not in ("onnx", "ort"):
        raise UsageError(f"fallback is 'onnx' or 'ort', not '{fallback}'")
    if layout not in get_args(Layout):
        raise UsageError(f"layout is 'auto', 'nchw' or 'nhwc', not '{layout}'")
    only, skip = list(only), list(skip)
    fusions = catalogue.select(catalogue.with_folders(patterns), only, skip, also=[REGION])
    regions = REGION not in skip and (REGION in only or (regions and not only))
    with own_process(timeout if verify else None):
        return _optimize(
            model, fusions, fallback == "ort", layout, regions, verify, inputs, shapes, tolerance, StageTimer(progress)
        )


def _optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    fusions: Sequence[Fusion],
    ort: bool,
    layout: Layout,
    regions: bool,
    verify: bool,
    inputs: Mapping[str, Array] | None,
    shapes: Sequence[str],
    tolerance: float | None,
    timer: StageTimer,
) -> tuple[onnx.ModelProto, Report]:
    """Return the optimized model and its report, as `optimize` does, of fusions that are known."""
    with timer.stage("load"):
        original, folder = load(model)
    fuse_again = functools.partial(fuse_model, original, folder, ort=ort, timer=timer)
    taken_back = TakenBack()
    if verify:
        verifier = Verifier(original, folder, inputs, timer, shapes, tolerance)
        result, verified = _fuse_until_equal(fuse_again, fusions, layout, regions, verifier, taken_back)
    else:
        result, verified = fuse_again(fusions, layout=layout, regions=regions), NOT_VERIFIED
    path = str(model) if isinstance(model, str | os.PathLike) else None
    report = Report(
        {"path": path, "nodes": len(original.graph.node), "opset": result.graph.opset},
        {"path": None, "nodes": len(result.model.graph.node)},
        in_terms_of_model(result.fusing.fused, result.spelled), result.folded, tuple(result.fusing.near()),
        tuple(taken_back.dropped), result.before, result.after, verified, timer.seconds, result.layout,
        result.without_regions, result.stays, quantized_operators(result.model),
    )  # fmt: skip
    return result.model, report


@dataclass
class TakenBack:
    """What was found wrong, and is left out when the model is fused again."""

    dropped: list[Dropped] = field(default_factory=list)  # all of it, for the report
    names: set[str] = field(default_factory=set)  # of fusions, and of the layout and the folding into weights
    constants: set[str] = field(default_factory=set)  # names of tensors that are not folded
    matches: dict[tuple[str, str], int] = field(default_factory=dict)  # the round in which each was taken back
    rounds: int = 0  # in which matches were taken back

    @property
    def change_weights(self) -> bool:
        """Whether BatchNormalization and scales are folded into weights."""
        return WEIGHT_FOLDING not in self.names

    def take(self, dropped: Dropped) -> None:
        """Leave out a fusion, the layout, or the folding into weights."""
        self.dropped.append(dropped)
        self.names.add(dropped.fusion)

    def take_constants(self, folded: Sequence[Folded], wrong: Mapping[str, str]) -> None:
        """Leave constants unfolded, each of which has a reason."""
        into = {one.into: one.node for one in folded if one.kind == CONSTANT_FOLDING}
        self.constants |= wrong.keys()
        self.dropped += [Dropped(CONSTANT_FOLDING, into.get(name, name), why) for name, why in wrong.items()]

    def take_matches(self, wrong: Iterable[tuple[PartFinding, Fused]]) -> None:
        """Leave nodes unfused, or channels-first; and a fusion as a whole that was wrong in several rounds."""
        for one, fused in wrong:
            what = LAYOUT if one.part.is_transposed else fused.fusion
            self.matches[what, fused.output] = self.rounds
            self.dropped.append(Dropped(what, fused.node, one.reason))
        self.rounds += 1
        self.names |= {name for name, _ in self.matches if self._rounds_of(name) >= MAX_ROUNDS_OF_PARTS}

    def _rounds_of(self, fusion: str) -> int:
        return len({number for (name, _), number in self.matches.items() if name == fusion})


def _fuse_until_equal(
    fuse_again: Callable[..., FusedModel],
    fusions: Sequence[Fusion],
    layout: Layout,
    regions: bool,
    verifier: Verifier,
    taken_back: TakenBack,
) -> tuple[FusedModel, Verification]:
    """Fuse and verify, and fuse again without what is wrong, until nothing is.

    fuse_again  `fuse_model`, of the model
    """
    while True:
        without = {"change_weights": taken_back.change_weights, "keep_names": taken_back.constants}
        kept = [fusion for fusion in fusions if fusion.name not in taken_back.names]
        regions = regions and REGION not in taken_back.names
        fuse_kept = functools.partial(fuse_again, kept, regions=regions, exclude=taken_back.matches, **without)
        result = fuse_kept(layout="nchw" if LAYOUT in taken_back.names else layout, keep_unfused=True)
        if constants := verifier.wrong_constants(result):
            taken_back.take_constants(result.folded, constants)
            continue
        parts = verifier.verify_parts(result)
        if parts.wrong:
            taken_back.take_matches(_fused_nodes(result, parts.wrong))
            continue
        verified = verifier.verify(result.model)
        if verified.passed is not False:
            return result, _with_parts(verified, result, parts)
        if result.layout.nodes and verifier.verify(fuse_kept(layout="nchw").model).passed is not False:
            taken_back.take(Dropped(LAYOUT, result.layout.first, verified.reason))
            continue
        unfused = fuse_again([], **without)
        taken_back.take(verifier.find_fault(result, verified, unfused, taken_back.change_weights))


def _fused_nodes(result: FusedModel, wrong: Iterable[PartFinding]) -> Iterator[tuple[PartFinding, Fused]]:
    """Yield every fused node that a finding is about, those that equal the one that was compared included."""
    by_name = {fused.node: fused for fused in result.fusing.fused}
    for finding in wrong:
        for node in (finding.part.fused, *finding.part.equal):
            yield finding, by_name[node.name]


def _with_parts(verified: Verification, result: FusedModel, parts: PartsVerification) -> Verification:
    """Return the verification of the outputs together with that of the fused nodes."""
    missing = [NotCompared(fused.node, one.reason) for one, fused in _fused_nodes(result, parts.not_compared)]
    equal = len(result.fusing.fused) - len(missing)
    return verified if verified.passed is None and not equal else verified.with_parts(equal, missing)


@dataclass
class Verifier:
    """The original model, which every optimized one is compared with, and what has been compared so far."""

    original: onnx.ModelProto
    folder: Path | None
    inputs: Mapping[str, Array] | None
    timer: StageTimer
    shapes: Sequence[str] = ()
    tolerance: float | None = None
    equal_parts: set[str] = field(default_factory=set)  # their keys
    _reference: Reference | VerificationError | None = None

    def reference(self) -> Reference:
        """Return runs of the original.  Raises VerificationError if it does not run."""
        if self._reference is None:
            try:
                self._reference = run_original(self.original, self.folder, self.inputs or {}, self._tell, self.shapes)
            except VerificationError as error:
                self._reference = error
        if isinstance(self._reference, VerificationError):
            raise self._reference
        return self._reference

    def wrong_constants(self, result: FusedModel) -> dict[str, str]:
        """Return the folded constants that differ from what onnxruntime computes, each with a sentence.

        Where the original does not run, none is compared, and the verification of the outputs says why.
        """
        assert result.unfused is not None
        with self.timer.stage("verify"):
            try:
                return wrong_constants(self.original, self.folder, result.unfused, self.reference().runs[0].feeds)
            except VerificationError:
                return {}

    def verify_parts(self, result: FusedModel) -> PartsVerification:
        """Compare each fused node with the nodes that it replaced; not again what was equal before.

        Where the original does not run, as a whole, they are compared on drawn values.
        """
        assert result.unfused is not None
        with self.timer.stage("verify"):
            replaced = {one.node: one.replaces for one in result.fusing.fused}
            parts = distinct_parts(result.unfused, result.model, replaced, result.layout.originals)
            parts = [part for part in parts if part.key not in self.equal_parts]
            feeds: Mapping[str, Array] | None = None
            try:
                feeds = self.reference().runs[0].feeds
            except (NothingRunsError, TimeLimitExceeded) as error:
                return PartsVerification((), tuple(PartFinding(part, str(error)) for part in parts), frozenset())
            except VerificationError:  # the parts may run all the same
                pass
            progress = functools.partial(self.timer.progress, "verify: run the fused nodes")
            found = compare_parts(result.unfused, result.model, parts, self.folder, feeds, progress)
            self.equal_parts |= found.equal
            return found

    def verify(self, optimized: onnx.ModelProto) -> Verification:
        """Compare the outputs of the original and `optimized`."""
        with self.timer.stage("verify"):
            try:
                reference = self.reference()
            except VerificationError as error:
                return nothing_compared(self.original, error)
            return compare(
                self.original, optimized, folder=self.folder, progress=self._tell, reference=reference,
                tolerance=self.tolerance,
            )  # fmt: skip

    def _tell(self, step: str) -> None:
        self.timer.progress(f"verify: {step}", 0, 0)

    def find_fault(
        self, result: FusedModel, verified: Verification, unfused: FusedModel, change_weights: bool
    ) -> Dropped:
        """Return what to take back of a model that differs from the original.

        That is the folding into weights if `unfused`, the same model without fusions, differs too, else one fusion.
        Raises VerificationError if `unfused` differs although its weights were not changed.
        """
        without_fusions = self.verify(unfused.model)
        if without_fusions.passed is not False:
            return self._wrong_fusion(result, verified)
        if not change_weights:
            reason = without_fusions.reason
            raise VerificationError(f"normalizing changed the model: {reason}; please report this model")
        node = next((f.node for f in result.folded if f.kind in ("batch_norm", "scale")), "")
        return Dropped(WEIGHT_FOLDING, node, without_fusions.reason)

    def _wrong_fusion(self, result: FusedModel, verified: Verification) -> Dropped:
        """Return the fusion of the first fused node, in execution order, whose output differs.

        If no such output differs, or one of the models does not run, it is the fusion of the last fused node.
        """
        order = {t.name: i for i, node in enumerate(result.graph.nodes) for t in node.outputs}
        fused = sorted(result.fusing.fused, key=lambda one: order.get(one.output, -1))
        names = [one.output for one in fused]
        try:
            name = first_difference(
                self.original, result.model, names, inputs=self.inputs, shapes=self.shapes, folder=self.folder
            )
        except VerificationError:
            name = None
        wrong = next((one for one in fused if one.output == name), fused[-1])
        return Dropped(wrong.fusion, wrong.node, verified.reason)
