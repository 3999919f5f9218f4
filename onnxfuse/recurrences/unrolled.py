"""Reads steps that an exporter unrolled as a recurrence.

The steps' results meet in a Concat, in their order or backwards.  From its inputs, all steps are followed back at once:
a bundle holds the tensors that have the same role in their steps.  A bundle is one tensor that all steps read, the
slices of one tensor, the results of equal nodes, or the values that another bundle had one step earlier, which are a
state.  Each bundle is compared once, so that the time grows with the number of nodes.  If nothing reads the last value
of a state, the bundles that only this value would need end one step earlier.  If others read it, its
nodes are found from the tensors that they read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from onnx import TensorProto, helper

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.ir.serde import node_proto
from onnxfuse.recurrences.form import Recurrence, Sliced, State, needed

MIN_STEPS: Final = 4  # fewer steps are few nodes, and often something else
SLICES: Final = ("Gather", "Slice", "Split")
Bundle: TypeAlias = list[Tensor]  # a tensor of each step, except perhaps of the last ones
Key: TypeAlias = tuple[int, ...]  # what distinguishes bundles


def unrolled(shapes: ShapeInfo) -> Iterator[tuple[Node, Recurrence | str]]:
    """Yield each Concat of a sorted graph that joins unrolled steps, with their recurrence; the caller may replace it.

    Steps that read a sequence but do not make a recurrence come with a sentence that says why.
    """
    for node in [node for node in shapes.graph.nodes if node.op == "Concat" and len(node.inputs) >= MIN_STEPS]:
        reason = ""
        for backwards in (False, True):
            if op_of(node) == "Concat" and node.outputs and node.outputs[0].inputs:
                begin = _Trace(shapes, node, backwards)  # in most Concats, the first steps differ already
                is_recurrence = begin.follow(begin.results[:MIN_STEPS]) and begin.states
                trace = _Trace(shapes, node, backwards) if is_recurrence else begin
                found = trace.recurrence() if is_recurrence else None
                if found is not None:
                    yield node, found
                elif is_recurrence or (not reason and trace.inputs and (trace.differs or trace.states)):
                    reason = trace.reason()
        if reason:
            yield node, reason


@dataclass
class _Trace:
    """The steps whose results a Concat joins."""

    shapes: ShapeInfo
    concat: Node
    backwards: bool
    known: dict[Key, Bundle] = field(default_factory=dict)  # all bundles
    bundles: dict[Key, Bundle] = field(default_factory=dict)  # results of equal nodes
    inputs: dict[Key, tuple[Bundle, Tensor, int, bool]] = field(default_factory=dict)  # tensor, axis, keeps_axis
    states: list[tuple[Bundle, Bundle]] = field(default_factory=list)  # present and next values
    shared: list[Tensor] = field(default_factory=list)  # read by all steps
    zeros: dict[str, Tensor] = field(default_factory=dict)  # with which states begin that the first step does not add
    differs: Bundle = field(default_factory=list)  # the tensors by which the steps differ

    @property
    def results(self) -> Bundle:
        """The results of all steps, from the first step on."""
        return list(self.concat.inputs)[:: -1 if self.backwards else 1]

    def recurrence(self) -> Recurrence | None:
        """Return the recurrence, or None if the steps differ."""
        shape = self.shapes.shape(self.concat.outputs[0])
        if not shape or not self.follow(self.results) or not self.states or not self.inputs:
            return None
        self._add_last_states()
        return self._made(int_attribute(self.concat, "axis", 0) % len(shape))

    def reason(self) -> str:
        """Return why steps that read a sequence do not make a recurrence."""
        steps = f"its {len(self.concat.inputs)} steps"
        if not self.differs:
            return f"other nodes read what {steps} compute, or a state begins with it"
        pairs = [list(pair) for pair in itertools.pairwise(self.differs)]
        unequal = [pair for pair in pairs if not self._is_of_equal_nodes(pair)]
        # The first step alone may lack a sum with 0, so any later difference counts.
        first, *others = next((pair for pair in unequal if pair is not pairs[0]), self.differs[:2])
        names = f"'{first.name}'" + (f" of one step and '{others[0].name}' of the next one" if others else "")
        return f"{steps} differ: {names} are not computed from equal constants by equal nodes"

    def follow(self, results: Bundle) -> bool:
        """Find the bundles that the results depend on; return whether every step is like the others."""
        work, waiting = [results], list[Bundle]()  # waiting: states, unless another bundle has their next values
        readers = dict[Key, Bundle]()
        while work or waiting:
            if not work:
                bundle = waiting.pop(0)
                later = self._earlier(bundle) or bundle[1:]
                self.states.append((bundle, later))
                work.append(later)
                continue
            bundle = work.pop()
            if _begins_with(self.known.get(_key(bundle), []), bundle):
                continue
            self.known[_key(bundle)] = bundle
            if self._is_shared(bundle) or self._is_sliced(bundle):
                continue
            before = self._earlier(bundle)
            if before is not None:
                self.states.append((bundle, before))
            elif self._is_of_equal_nodes(bundle) or self._first_summand(bundle) is not None:
                self.bundles[_key(bundle)] = bundle
                columns = self._columns(bundle)
                readers.update((_key(column), bundle) for column in columns)
                work += columns
            elif len(bundle) >= MIN_STEPS - 1 and self._is_of_equal_nodes(bundle[1:]):
                waiting.append(bundle)
            else:
                is_computed = all(map(producer, bundle))
                self.differs = bundle if is_computed else readers.get(_key(bundle), bundle)
                return False
        return all(_key(later) in self.bundles for _, later in self.states)

    def _first_summand(self, bundle: Bundle) -> int | None:
        """Return which summand of later steps the first step has alone, because a state of 0 was not added there."""
        has_dtype = self.shapes.dtype(bundle[0]) != TensorProto.UNDEFINED  # zeros are written with it
        if not has_dtype or len(bundle) < MIN_STEPS - 1 or not self._is_of_equal_nodes(bundle[1:]):
            return None
        makers = [tensor.inputs[0] for tensor in bundle[1:]]
        places = range(len(makers[0].inputs)) if op_of(makers[0]) == "Add" else ()
        return next((i for i in places if self._is_of_equal_nodes([bundle[0], *(n.inputs[i] for n in makers)])), None)

    def _columns(self, bundle: Bundle) -> list[Bundle]:
        """Return the bundles of the tensors that the nodes read that compute a bundle."""
        makers = [tensor.inputs[0] for tensor in bundle]
        if self._is_of_equal_nodes(bundle):
            return [list(column) for column in zip(*(node.inputs for node in makers), strict=True)]
        name, dtype = f"{bundle[0].name}_none", helper.tensor_dtype_to_np_dtype(self.shapes.dtype(bundle[0]))
        if name not in self.zeros:
            self.zeros[name] = self.shapes.graph.constant(name, np.zeros((), dtype))
        alone = self._first_summand(bundle)
        return [
            [bundle[0] if i == alone else self.zeros[name], *(node.inputs[i] for node in makers[1:])] for i in range(2)
        ]

    def _is_shared(self, bundle: Bundle) -> bool:
        """Return whether all steps read one tensor, or constants of one value."""
        first = bundle[0]
        if all(tensor is first for tensor in bundle):
            self.shared.append(first)
            return True
        if not all(is_constant(tensor) for tensor in bundle) or len({str(tensor.shape) for tensor in bundle}) > 1:
            return False
        values = [constant_value(self.shapes.graph, tensor) for tensor in bundle if is_constant(tensor)]
        return all(value.dtype == values[0].dtype and np.array_equal(value, values[0]) for value in values)

    def _is_sliced(self, bundle: Bundle) -> bool:
        """Return whether the bundle has, in the order of the steps, slices of one element along an axis of a tensor."""
        first = _slice(self.shapes, producer(bundle[0]), bundle[0])
        if first is None:
            return False
        data, axis, _, keeps_axis = first
        length = len(self.concat.inputs)
        places = zip(range(length)[:: -1 if self.backwards else 1], bundle, strict=False)
        if not all(_slice(self.shapes, producer(t), t) == (data, axis, i, keeps_axis) for i, t in places):
            return False
        shape = self.shapes.shape(data)
        if shape is None or shape[axis] != length:
            return False
        self.inputs[_key(bundle)] = bundle, data, axis, keeps_axis
        return True

    def _earlier(self, bundle: Bundle) -> Bundle | None:
        """Return the bundle whose values this one has a step later; None if there is none."""
        found = self.bundles.get(_key(bundle[1:]), [])
        return found if _begins_with(found, bundle[1:]) and bundle[0] is not bundle[1] else None

    def _is_of_equal_nodes(self, bundle: Bundle) -> bool:
        """Return whether different nodes compute the bundle that are equal but for the tensors they read."""
        makers = [producer(tensor) for tensor in bundle]
        nodes = [node for node in makers if node is not None]
        if len({id(node) for node in nodes}) < len(bundle) or len({*map(_place, bundle)}) > 1:
            return False
        first = self._form(nodes[0])
        return all(node.op == nodes[0].op and self._form(node) == first for node in nodes)

    def _form(self, node: Node) -> tuple[object, ...]:
        attributes = sorted(node_proto(self.shapes.graph, node).attribute, key=lambda each: each.name)
        texts = tuple(each.SerializeToString(deterministic=True) for each in attributes)
        return op_of(node), len(node.inputs), texts

    def _add_last_states(self) -> None:
        """Add what the last step computes of states on which no result depends, where the nodes for it are there."""
        for _, later in self.states:
            found = dict[Key, Tensor]()
            if self._at(self.bundles[_key(later)], len(self.concat.inputs) - 1, found) is not None:
                for key, tensor in found.items():
                    (self.bundles.get(key) or self.inputs[key][0]).append(tensor)
        self.states = [(now, self.bundles[_key(later)]) for now, later in self.states]

    def _at(self, bundle: Bundle, step: int, found: dict[Key, Tensor]) -> Tensor | None:
        """Return a bundle's tensor of a step, and add it to `found` if the bundle ends before it; None without one."""
        key = _key(bundle)
        known = self.bundles.get(key) or self.inputs.get(key, (bundle,))[0]
        if step < len(known):
            return known[step]
        if bundle[0] is bundle[1] or all(map(is_constant, bundle)):
            return bundle[0]
        before = next((later for now, later in self.states if _key(now) == key), None)
        if before is not None:
            return self._at(before, step - 1, found)
        if step > len(known) or key in found:
            return found.get(key) if step == len(known) else None
        tensors = self._sliced_at(key, step) if key in self.inputs else self._computed_at(known, step, found)
        tensor = next(iter(tensors), None)
        if tensor is not None:
            found[key] = tensor
        return tensor

    def _sliced_at(self, key: Key, step: int) -> Iterator[Tensor]:
        """Yield the slices at the place of a step; a bundle has the slices of the same tensor at earlier places."""
        _, data, axis, keeps_axis = self.inputs[key]
        wanted = data, axis, len(self.concat.inputs) - 1 - step if self.backwards else step, keeps_axis
        yield from (t for node in consumers(data) for t in node.outputs if _slice(self.shapes, node, t) == wanted)

    def _computed_at(self, known: Bundle, step: int, found: dict[Key, Tensor]) -> Iterator[Tensor]:
        """Yield the results, of nodes equal to those of a bundle, that a step computes from its own tensors."""
        given = [self._at(column, step, found) for column in self._columns(known)]
        read = next((each for each in given if each is not None and not is_constant(each)), None)
        if read is not None and all(each is not None for each in given):
            form, place = self._form(known[-1].inputs[0]), _place(known[-1])
            yield from (n.outputs[place] for n in consumers(read) if self._form(n) == form and self._reads(n, given))

    def _reads(self, node: Node, given: Sequence[Tensor | None]) -> bool:
        """Return whether a node's inputs are these tensors, or constants of their values."""
        pairs = zip(node.inputs, given, strict=True)
        return all(a is b or (b is not None and self._is_shared([a, b])) for a, b in pairs)

    def _made(self, axis: int) -> Recurrence | None:
        """Return the recurrence, whose body is the second step: its states differ from what the first one begins with.

        Returns None if nodes outside read what steps compute, other than the last state.
        """
        step = 1
        nodes = {id(node): node for bundle in self.bundles.values() for node in (t.inputs[0] for t in bundle)}
        slices = {id(t.inputs[0]): t.inputs[0] for bundle, *_ in self.inputs.values() for t in bundle}
        inside = {*nodes, id(self.concat)}
        given = [*self.shared, *(data for _, data, *_ in self.inputs.values()), *(now[0] for now, _ in self.states)]
        if any(id(node) in inside or id(node) in slices for tensor in given for node in tensor.inputs):
            return None  # a step computes or slices what all steps read, or what a state begins with
        states, graph = list[State](), self.shapes.graph
        for now, later in self.states:
            final = later[-1] if len(later) == len(self.concat.inputs) else None
            if final and not graph.is_kept(final) and all(id(node) in inside for node in final.outputs):
                final = None
            states.append(State(now[0], later[0], now[step].name, later[step].name, final))
        if len({each.begin for each in states}) < len(states):
            return None  # the first step reads different tensors where the others read one state
        finals = {each.final.name for each in states if each.final is not None}
        for tensor in (tensor for node in nodes.values() for tensor in node.outputs):
            stays = graph.is_kept(tensor) or any(id(node) not in inside for node in tensor.outputs)
            if stays and tensor.name not in finals:
                return None
        slices_of = self.inputs.values()
        inputs = [Sliced(data, along, bundle[step].name, kept) for bundle, data, along, kept in slices_of]
        result = self.results[step].name
        outputs = [Sliced(self.concat.outputs[0], axis, result, keeps_axis=True)]
        ends = [*(each.end for each in states), result]
        known = [*(each.begin for each in states), *(each.name for each in inputs)]
        body = needed(_in_order(self.shapes, [bundle[step].inputs[0] for bundle in self.bundles.values()]), ends, known)

        def is_gone(tensor: Tensor) -> bool:
            return not graph.is_kept(tensor) and all(id(each) in nodes for each in tensor.outputs)

        gone = [node for node in slices.values() if all(map(is_gone, node.outputs))]
        replaced = [*gone, *nodes.values(), self.concat]
        return Recurrence(replaced, self.shapes, body, states, inputs, outputs, backwards=self.backwards)


def _place(tensor: Tensor) -> int:
    """Return the place of a tensor among the outputs of its node."""
    return next(i for i, each in enumerate(tensor.inputs[0].outputs) if each is tensor)


def _key(bundle: Bundle) -> Key:
    """Return the ids of two steps' tensors; the first steps of two bundles have one tensor if states begin with it."""
    return tuple(map(id, bundle[:2]))


def _begins_with(bundle: Bundle, first: Bundle) -> bool:
    return len(bundle) >= len(first) and all(a is b for a, b in zip(bundle, first, strict=False))


def _in_order(shapes: ShapeInfo, nodes: Sequence[Node]) -> list[Node]:
    return sorted(dict.fromkeys(nodes), key=shapes.graph.position.__getitem__)


def _slice(shapes: ShapeInfo, node: Node | None, tensor: Tensor) -> tuple[Tensor, int, int, bool] | None:
    """Return (tensor, axis, index, keeps_axis) if a node takes one element along an axis; else None."""
    if node is None or op_of(node) not in SLICES:
        return None
    data, shape = node.inputs[0], shapes.shape(node.inputs[0])
    if not shape:
        return None
    if op_of(node) == "Gather":
        index = shapes.value(node.inputs[1])
        if index is None or index.size != 1 or index.ndim > 1 or not isinstance(index.reshape(-1)[0], int | np.integer):
            return None
        axis = int_attribute(node, "axis", 0) % len(shape)
        place = int(index.reshape(-1)[0])
        size = shape[axis]
        place = place + size if place < 0 and isinstance(size, int) else place
        return data, axis, place, index.ndim == 1
    result = shapes.shape(tensor)
    if op_of(node) == "Split":
        axis = int_attribute(node, "axis", 0) % len(shape)
        outputs = [shapes.shape(each) for each in node.outputs]
        is_single = all(each is not None and each[axis] == 1 for each in outputs)
        place = next(i for i, each in enumerate(node.outputs) if each is tensor)
        return (data, axis, place, True) if is_single else None
    return _sliced_once(shapes, node, data, result)


def _sliced_once(
    shapes: ShapeInfo, node: Node, data: Tensor, result: Sequence[object] | None
) -> tuple[Tensor, int, int, bool] | None:
    """Return what `_slice` returns, for a node that is a Slice."""
    given = [shapes.value(tensor) for tensor in node.inputs[1:4]]
    if result is None or len(given) < 3 or any(each is None or each.size != 1 for each in given):
        return None
    start, _, axis = (each.reshape(-1)[0] for each in given if each is not None)
    axis = int(axis) % len(result)
    if result[axis] != 1 or not isinstance(start, int | np.integer) or start < 0:
        return None
    return data, axis, int(start), True
