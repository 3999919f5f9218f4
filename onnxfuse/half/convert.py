"""Rewrite a model so that what need not stay in float32 computes in half precision; Casts stand at borders only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.half.choose import Choice, Known, choose, kept_nodes
from onnxfuse.half.masks import MASKED_INPUTS, adding_masks
from onnxfuse.half.operators import (
    BROADCAST_MAX_OPSET,
    READS_ANY,
    half_inputs,
    half_outputs,
    is_onnx,
    keeps_dtypes,
    label,
)
from onnxfuse.half.precision import FLOAT16, REAL, Kept
from onnxfuse.half.scope import Scope
from onnxfuse.half.weights import ScratchFolder
from onnxfuse.ir.execution_order import outer_reads
from onnxfuse.ir.graph import take_name
from onnxfuse.ir.protos import copy_without, graphs, subgraphs, tensors

FLOAT = TensorProto.FLOAT
Io: TypeAlias = Literal["float32", "half"]


@dataclass(frozen=True)
class Converted:
    """A model in half precision, where its external data lies, and what stayed in float32."""

    model: onnx.ModelProto
    folder: Path | None
    nodes: int  # that compute on floating-point numbers
    kept: tuple[Kept, ...]  # because of their values
    by_rule: tuple[Kept, ...]  # because of what they are
    types: Mapping[str, int]  # the dtypes that tensors of the main graph have now
    scratch: ScratchFolder | None = None
    added_masks: int = 0  # softmaxes of which a row without a key has other weights than in float32


def convert(model: onnx.ModelProto, types: Mapping[str, int], known: Known, io: Io = "float32") -> Converted:
    """Return the model in half precision.

    types  the dtype of every tensor, in subgraphs too
    io     "half" converts the graph's inputs and outputs too
    """
    if any(uses_external_data(t) for t in tensors(model.graph, *model.functions)):
        known.weights.scratch = ScratchFolder()
    names = {t.name for part in graphs(model.graph) for t in (*part.input, *part.initializer)}
    names |= {name for part in graphs(model.graph) for node in part.node for name in (node.name, *node.output)}
    writer = _Writer(known, types, names)
    result, main = copy_without(model, "graph"), _Part(writer, model.graph, None)
    result.graph.CopyFrom(main.rewritten(io))
    scratch = known.weights.scratch
    folder = known.weights.folder if scratch is None else scratch.path
    return Converted(
        result, folder, writer.nodes, tuple(writer.kept), tuple(writer.by_rule), main.present, scratch,
        writer.added_masks,
    )  # fmt: skip


@dataclass
class _Writer:
    """What the graphs of one model share."""

    known: Known
    types: Mapping[str, int]
    names: set[str]
    nodes: int = 0
    kept: list[Kept] = field(default_factory=list)
    by_rule: list[Kept] = field(default_factory=list)
    added_masks: int = 0

    def unique(self, stem: str) -> str:
        return take_name(self.names, stem)


class _Part:
    """One graph while it is rewritten."""

    def __init__(self, writer: _Writer, graph: onnx.GraphProto, outer: _Part | None) -> None:
        self.writer, self.graph, self.outer = writer, graph, outer
        self.scope: Scope
        self.half = writer.known.precision.number
        self.defaults = {t.name for t in graph.initializer} & {i.name for i in graph.input}
        self.own = {t.name: t for t in graph.initializer if t.name not in self.defaults}
        around: Mapping[str, onnx.TensorProto] = outer.scope.constants if outer else {}
        constants = {**around, **self.own}
        hidden = {i.name for i in graph.input} | {name for node in graph.node for name in node.output}
        self.scope = Scope(graph, writer.types, {n: t for n, t in constants.items() if n not in hidden})
        self.present: dict[str, int] = {}  # the dtypes that tensors of this graph have now
        self.casts: dict[tuple[str, int], str] = {}  # the name of a tensor in a dtype
        self.aliases: dict[str, str] = {}  # results of Casts that went, and what stands for them
        self.weights: dict[tuple[str, int], onnx.TensorProto] = {}  # of this graph, in the dtypes that are read
        self.clamped: set[str] = set()
        self.out: list[onnx.NodeProto] = []
        self.choice: Choice | None = None

    def rewritten(self, io: Io) -> onnx.GraphProto:
        """Return the graph with its nodes in half precision, those that stay in float32 aside."""
        self.choice = choose(self.scope, self.writer.known)
        self.clamped = set(self.choice.clamped)
        writer = self.writer
        writer.kept += kept_nodes(self.scope, self.choice)
        writer.by_rule += [
            Kept(label(self.graph.node[i]), self.graph.node[i].op_type, why) for i, why in self.choice.by_rule.items()
        ]
        if writer.known.precision is FLOAT16:  # in bfloat16 a score beside the lowest number vanishes as in float32
            writer.added_masks += sum(1 for _ in adding_masks(self.scope, self._is_lowest, self.choice.is_wide))
        result = copy_without(self.graph, "node", "initializer", "value_info", "input", "output")
        for value in self.graph.input:
            result.input.append(self._border(value, io))
            self.present[value.name] = self._declared(result.input[-1])
        outputs = [self._border(value, io) for value in self.graph.output]
        wanted = {value.name: self._declared(value) for value in outputs}
        for i in range(len(self.graph.node)):
            self._rewrite(i, wanted)
        for name in wanted:
            self._weight_as_output(name)
        result.output.extend(outputs)
        result.node.extend(self.out)
        result.initializer.extend(self._initializers())
        for value in self.graph.value_info:
            copy = result.value_info.add()
            copy.CopyFrom(value)
            if value.name in self.present and copy.type.tensor_type.elem_type in REAL:
                copy.type.tensor_type.elem_type = self.present[value.name]
        return result

    def _border(self, value: onnx.ValueInfoProto, io: Io) -> onnx.ValueInfoProto:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        if io == "half" and value.type.tensor_type.elem_type in REAL and value.name not in self.defaults:
            copy.type.tensor_type.elem_type = self.half
        return copy

    def _declared(self, value: onnx.ValueInfoProto) -> int:
        return value.type.tensor_type.elem_type or self.writer.types.get(value.name, 0)

    # --- nodes -----------------------------------------------------------------------------------------------

    def _rewrite(self, i: int, wanted: Mapping[str, int]) -> None:
        """Append a node with its inputs in the dtypes that it takes now."""
        assert self.choice is not None
        node, scope, known = self.graph.node[i], self.scope, self.writer.known
        new = onnx.NodeProto()
        new.CopyFrom(node)
        reals = scope.real_inputs(i), scope.real_outputs(i)
        self.writer.nodes += bool(reals[0] or reals[1])
        wide = self.choice.is_wide(i)
        as_it_was = wide and (keeps_dtypes(node) or bool(scope.untyped(i)))
        self._rewrite_subgraphs(new)
        reads_any = is_onnx(node) and node.op_type in READS_ANY
        allowed = frozenset[int]() if wide else half_inputs(node, known.opset, known.precision)
        for k, name in enumerate(node.input):
            if scope.is_real(name) and reads_any and name not in scope.constants:
                new.input[k] = self.aliases.get(name, name)
            elif scope.is_real(name):
                other = scope.types[name] if as_it_was else FLOAT
                new.input[k] = self._read(name, self.half if k in allowed else other, i)
            elif name in scope.constants:
                self._read(name, scope.constants[name].data_type, i)
        halves = frozenset[int]() if wide else half_outputs(node, known.opset, known.precision)
        if is_onnx(node) and node.op_type == "Cast" and reals[1]:
            if reals[0] and self._pass_on(node, wanted):
                return
            to = FLOAT if wide else self.half
            next(a for a in new.attribute if a.name == "to").i = to
        elif reals[1] and not reals[0] and not wide:
            self._fill(new)
        for k, name in enumerate(node.output):
            if scope.is_real(name):
                other = scope.types[name] if as_it_was else FLOAT
                new.output[k] = self._written(name, self.half if k in halves else other, wanted)
        self.out.append(new)
        self._append_output_casts(node, new, wanted)

    def _pass_on(self, cast: onnx.NodeProto, wanted: Mapping[str, int]) -> bool:
        """Let readers of a Cast between floating-point dtypes read its input, where the names allow that."""
        source, result = cast.input[0], cast.output[0]
        if source in self.scope.constants or result in wanted or self._captured(result):
            return False
        self.aliases[result] = self.aliases.get(source, source)
        return True

    def _captured(self, name: str) -> bool:
        return name in self.captured

    @cached_property
    def captured(self) -> frozenset[str]:
        """The tensors of this graph that subgraphs read."""
        return frozenset(name for node in self.graph.node for inner in subgraphs(node) for name in outer_reads(inner))

    def _fill(self, node: onnx.NodeProto) -> None:
        """Let a Constant or a ConstantOfShape write half precision."""
        value = np.zeros(1, np.float32)
        for attribute in node.attribute:
            if attribute.name == "value":
                value = onnx.numpy_helper.to_array(attribute.t)
            elif attribute.name in ("value_float", "value_floats"):
                value = np.array(onnx.helper.get_attribute_value(attribute), np.float32)
        stored = onnx.numpy_helper.from_array(self.writer.known.precision.clamped(value))
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("value", stored))

    def _rewrite_subgraphs(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                inner.CopyFrom(_Part(self.writer, inner, self).rewritten("float32"))

    def _written(self, name: str, dtype: int, wanted: Mapping[str, int]) -> str:
        """Return the name under which a node writes a tensor; another one if an output of the graph has its dtype."""
        self.present[name] = dtype
        if name not in wanted or wanted[name] in (0, dtype):
            return name
        own = self.writer.unique(f"{name}_{self._suffix(dtype)}")
        self.casts[name, dtype] = own
        self.present[name] = wanted[name]
        return own

    def _append_output_casts(self, node: onnx.NodeProto, new: onnx.NodeProto, wanted: Mapping[str, int]) -> None:
        for old, own in zip(node.output, new.output, strict=True):
            if old != own:
                self._append_cast(own, old, wanted[old])

    def _append_cast(self, source: str, result: str, to: int) -> None:
        self.out.append(onnx.helper.make_node("Cast", [source], [result], self.writer.unique(f"Cast_{result}"), to=to))

    # --- tensors ---------------------------------------------------------------------------------------------

    def _read(self, name: str, dtype: int, reader: int | None) -> str:
        """Return the name of a tensor in a dtype, casting it where it has another one."""
        if name in self.scope.constants:
            return self._weight(name, dtype)
        name = self.aliases.get(name, name)
        if self._present(name) == dtype:
            return name
        if (name, dtype) not in self.casts:
            source = name
            result = self.writer.unique(f"{name}_{self._suffix(dtype)}")
            is_float16 = self._present(name) == TensorProto.FLOAT16  # whose numbers bfloat16 holds
            if dtype == self.half and not is_float16 and self._may_be_mask(name, reader):
                source = self._bounded(self._read(name, FLOAT, None))
            self._append_cast(source, result, dtype)
            self.casts[name, dtype] = result
        return self.casts[name, dtype]

    def _suffix(self, dtype: int) -> str:
        return "half" if dtype == self.half else "float32"

    def _present(self, name: str) -> int:
        if name in self.present:
            return self.present[name]
        return self.outer._present(name) if self.outer else self.writer.types.get(name, 0)

    def _may_be_mask(self, name: str, reader: int | None) -> bool:
        """Return whether a float32 tensor that scores read is seen, or may be, below what half precision holds."""
        assert self.choice is not None
        if reader is None or (reader not in self.choice.scores and not self._is_mask_input(reader, name)):
            return False
        seen = self.writer.known.ranges.get(name)
        if name in self.scope.producers:
            return seen is not None and seen.lowest < -self.writer.known.precision.largest
        return seen is None or seen.lowest < -self.writer.known.precision.limit

    def _is_lowest(self, name: str) -> bool:
        """Return whether a tensor holds, or is seen to hold, numbers below the range of half precision."""
        known = self.writer.known
        if name in self.clamped:
            return bool((known.weights.value(self.scope.constants[name]) < -known.precision.largest).any())
        return name in known.ranges and known.ranges[name].lowest < -known.precision.largest

    def _is_mask_input(self, reader: int, name: str) -> bool:
        node = self.graph.node[reader]
        places = MASKED_INPUTS.get(node.op_type, ())
        return any(k < len(node.input) and node.input[k] == name for k in places)

    def _bounded(self, name: str) -> str:
        """Return a tensor whose finite values stay finite in half precision."""
        lowest, known = -self.writer.known.precision.largest, self.writer.known
        result = self.writer.unique(f"{name}_bounded")
        if known.opset < BROADCAST_MAX_OPSET:
            its_name = self.writer.unique(f"Clip_{result}")
            self.out.append(onnx.helper.make_node("Clip", [name], [result], its_name, min=lowest))
            return result
        bound = self.writer.unique(f"{name}_lowest")
        self.weights[bound, FLOAT] = onnx.numpy_helper.from_array(np.array(lowest, np.float32), bound)
        self.out.append(onnx.helper.make_node("Max", [name, bound], [result], self.writer.unique(f"Max_{result}")))
        return result

    def _weight(self, name: str, dtype: int) -> str:
        """Return the name of a constant in a dtype; the graph that owns it holds it in each that is read."""
        if name not in self.own:
            assert self.outer is not None
            self.outer.clamped |= self.clamped & {name}
            return self.outer._weight(name, dtype)
        if (name, dtype) not in self.weights:
            first = not any(each == name for each, _ in self.weights)
            own = name if first else self.writer.unique(f"{name}_{self._suffix(dtype)}")
            made = self.writer.known.weights.converted(self.own[name], own, dtype, clamp=name in self.clamped)
            self.weights[name, dtype] = made
        return self.weights[name, dtype].name

    def _weight_as_output(self, name: str) -> None:
        if name in self.own and not any(each == name for each, _ in self.weights):
            self._weight(name, self.own[name].data_type)

    def _initializers(self) -> list[onnx.TensorProto]:
        for name, tensor in self.own.items():  # what subgraphs read in a dtype that never changes
            if name in self.captured and tensor.data_type not in REAL:
                self._weight(name, tensor.data_type)
        stored = self.writer.known.weights
        kept = [stored.kept(t, t.name) for t in self.graph.initializer if t.name in self.defaults]
        return [*self.weights.values(), *kept]
