"""Compare an optimized model with the original: folded constants, fused nodes, and the models as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

import onnx

from onnxfuse.culprits import Culprit, find_culprits
from onnxfuse.errors import NothingRunsError, OnnxfuseError, UsageError, VerificationError
from onnxfuse.fuse_model import FusedModel, StageTimer
from onnxfuse.ir.dtypes import Array
from onnxfuse.steps import VERIFICATION, LeftOut, left_out
from onnxfuse.verify.compare import Verification, compare_with, nothing_compared
from onnxfuse.verify.compare_constants import wrong_constants
from onnxfuse.verify.compare_parts import PartFinding, PartsVerification, compare_parts, values_of_run
from onnxfuse.verify.extent import FULL, Extent
from onnxfuse.verify.own_process import TimeLimitExceeded
from onnxfuse.verify.parts import Part, distinct_parts
from onnxfuse.verify.reference import Reference, run_original
from onnxfuse.verify.values_in_bodies import first_feeds, values_needed

Feeds: TypeAlias = Mapping[str, Array]
Written: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto]

WEIGHT_FOLDING: Final = "batch_norm"  # the name in the report when the folding into weights is undone


@dataclass
class Verifier:
    """Compares optimized models with the original model, and keeps the results so far."""

    original: onnx.ModelProto
    folder: Path | None
    inputs: Mapping[str, Array] | None
    timer: StageTimer
    shapes: Sequence[str] = ()
    tolerance: float | None = None
    is_converted: bool = False  # whether the optimized models are in half precision
    # Whether ONNX's Attention is allowed in the optimized models; it gives 0 for some NaN of the original.
    is_standard: bool = False
    extent: Extent = FULL
    # Keys of the fused nodes that were found equal to the nodes that they replaced.
    equal_parts: set[str] = field(default_factory=set)
    raised: list[LeftOut] = field(default_factory=list)  # steps of the verification that raised
    _reference: Reference | VerificationError | None = None
    # A cache: the argument of the last call of `_graphs_with_feeds`, and its result.
    _inside: tuple[FusedModel, Sequence[tuple[FusedModel, Feeds | None]]] | None = None

    def reference(self) -> Reference:
        """Return runs of the original.  Raises VerificationError if it does not run."""
        if self._reference is None:
            try:
                tell = functools.partial(self.timer.tell, "verify")
                inputs = self.inputs or {}
                found = run_original(self.original, self.folder, inputs, tell, self.shapes, extent=self.extent)
                self._reference = replace(
                    found, tolerance=self.tolerance, is_converted=self.is_converted, numbers_for_nan=self.is_standard
                )
            except VerificationError as error:
                self._reference = error
            except UsageError:
                raise
            except Exception as error:
                self._reference = self._failure(error)
        if isinstance(self._reference, VerificationError):
            raise self._reference
        return self._reference

    def wrong_constants(self, result: FusedModel) -> dict[str, str]:
        """Return the folded constants that differ from onnxruntime's results, each with a sentence.

        Constants of a graph that does not run are not compared; the verification of the outputs then says why.
        """
        wrong: dict[str, str] = {}
        with self.timer.stage("verify"):
            for graph, feeds in self._graphs_with_feeds(result):
                assert graph.unfused is not None
                if feeds is not None:
                    try:
                        wrong |= wrong_constants(graph.graph.model, self.folder, graph.unfused, feeds)
                    except VerificationError:
                        pass
                    except Exception as error:
                        self._failure(error)
        return wrong

    def _graphs_with_feeds(self, result: FusedModel) -> Sequence[tuple[FusedModel, Feeds | None]]:
        """Return the main graph and the bodies of all Ifs, Loops and Scans, each with inputs on which it runs.

        The inputs are None if none are known.
        """
        if self._inside is None or self._inside[0] is not result:
            try:
                feeds: Feeds | None = self.reference().runs[0].feeds
            except VerificationError:  # a part of the graph can still run
                feeds = None
            self._inside = result, list(self._graphs(result, feeds))
        return self._inside[1]

    def _graphs(self, result: FusedModel, feeds: Feeds | None) -> Iterator[tuple[FusedModel, Feeds | None]]:
        """Yield a graph and the bodies of its Ifs, Loops and Scans, each with inputs to try to run it on."""
        yield result, feeds
        assert result.unfused is not None
        bodies = [one for one in result.bodies if one.fused.fused or any(e.folded for _, e in one.fused.everywhere())]
        constants = result.unfused.constants
        needed = {name for one in bodies for name in values_needed(one.body) if name not in constants}
        values = None if feeds is None else self._values(result, needed, feeds)
        begun = {name for one in bodies for name, _ in one.body.begins.values() if name in constants}
        stored = {name: result.unfused.constant(name) for name in begun} if values is not None else {}
        for one in bodies:
            inside = None if values is None else first_feeds(one.body, {**stored, **values})
            yield from self._graphs(one.fused, inside)

    def _values(self, result: FusedModel, names: set[str], feeds: Feeds) -> Feeds | None:
        """Return values of tensors in a run of a graph; None where it does not run on these inputs."""
        assert result.unfused is not None
        try:
            return values_of_run(result.unfused, names, feeds)
        except Exception:  # any exception of onnxruntime: a branch that is not taken need not fit the inputs
            return None

    def verify_parts(self, result: FusedModel) -> PartsVerification:
        """Compare fused nodes with the nodes that they replaced, unless they were found equal before.

        If the original does not run, fused nodes are compared on random values.  So are fused nodes in the body of an
        If, Loop or Scan, if that branch or the first iteration does not run on the values of the outer graph.
        """
        with self.timer.stage("verify"):
            try:
                self.reference()
            except (NothingRunsError, TimeLimitExceeded) as error:
                parts = [part for _, graph in result.everywhere() for part in self._new_parts(graph)]
                return PartsVerification((), tuple(PartFinding(part, str(error)) for part in parts), frozenset())
            except VerificationError:
                pass
            graphs = self._graphs_with_feeds(result)
            found = [self._compared_parts(graph, feeds, graph is result) for graph, feeds in graphs]
            return PartsVerification(
                tuple(one for each in found for one in each.wrong),
                tuple(one for each in found for one in each.not_compared),
                frozenset().union(*(each.equal for each in found)),
            )

    def _compared_parts(self, graph: FusedModel, feeds: Feeds | None, is_main: bool) -> PartsVerification:
        """Compare the fused nodes of a graph; if the comparison itself raises, all of them count as not compared."""
        try:
            return self._compare_parts(graph, feeds, is_main)
        except Exception as error:
            reason, names = str(self._failure(error)), {one.node for one in graph.fusing.fused}
            lost = [Part(node, (), (), node.name) for node in graph.model.graph.node if node.name in names]
            return PartsVerification((), tuple(PartFinding(part, reason) for part in lost), frozenset())

    def _new_parts(self, graph: FusedModel) -> list[Part]:
        assert graph.unfused is not None
        replaced = {one.node: one.replaces for one in graph.fusing.fused}
        parts = distinct_parts(graph.unfused, graph.model, replaced, graph.layout.originals)
        return [part for part in parts if part.key not in self.equal_parts]

    def _compare_parts(self, graph: FusedModel, feeds: Feeds | None, is_main: bool) -> PartsVerification:
        assert graph.unfused is not None
        progress = functools.partial(self.timer.progress, "verify: run the fused nodes")
        compare = functools.partial(
            compare_parts, graph.unfused, graph.model, progress=progress, numbers_for_nan=self.is_standard,
            extent=self.extent,
        )  # fmt: skip
        found = compare(self._new_parts(graph), feeds=feeds)
        self.equal_parts |= found.equal
        if is_main or feeds is None or not found.not_compared:
            return found
        # Fused nodes in control-flow bodies can lack values to compare: a branch that is not taken need not run, and a
        # cache can be empty in the first iteration.
        drawn = compare([one.part for one in found.not_compared], feeds=None)
        self.equal_parts |= drawn.equal
        left = {one.part.key for one in drawn.not_compared}
        missing = tuple(one for one in found.not_compared if one.part.key in left)
        return PartsVerification((*found.wrong, *drawn.wrong), missing, found.equal | drawn.equal)

    def verify(self, optimized: onnx.ModelProto) -> Verification:
        """Compare the outputs of the original and `optimized`."""
        with self.timer.stage("verify"):
            try:
                found = compare_with(self.reference(), optimized)
            except VerificationError as error:
                found = nothing_compared(self.original, error)
            except UsageError:
                raise
            except Exception as error:
                found = nothing_compared(self.original, self._failure(error))
        return found.within(self.extent)

    def culprits(self, result: FusedModel, verified: Verification, written: Written) -> list[Culprit]:
        """Return the fused nodes that make a model differ from the original, each with a sentence about the difference.

        written  a function that converts a fused model to the form in which it is written
        """
        try:
            return find_culprits(result, verified, lambda model: self.verify(written(model)))
        except OnnxfuseError:
            raise
        except Exception as error:
            self._failure(error)
            return []

    def _failure(self, error: Exception) -> VerificationError:
        """Record an internal error of the verification, and return it as a VerificationError with a sentence."""
        self.raised.append(left_out(VERIFICATION, error))
        return VerificationError(str(self.raised[-1]))
