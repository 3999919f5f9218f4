"""Changes of a draft that move its last nodes into an If, a Loop or a function of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from drafts import FLOATS, Draft, types
from onnx import TensorProto, helper

from onnxfuse.ir.protos import OneNode, nodes


@dataclass(frozen=True)
class Moved:
    """The last nodes of a draft, which are in execution order, and what outside reads of them, with its types."""

    nodes: list[onnx.NodeProto]
    results: dict[str, onnx.TypeProto]

    def ends(self, names: Sequence[str]) -> list[onnx.NodeProto]:
        """Return nodes that give the results other names."""
        pairs = zip(self.results, names, strict=True)
        return [helper.make_node("Identity", [name], [end], f"end_{end}") for name, end in pairs]

    def infos(self, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        """Return the results under other names as values of known dtype and unknown rank."""
        pairs = zip(names, self.results.values(), strict=True)
        return [helper.make_tensor_value_info(name, kind.tensor_type.elem_type, None) for name, kind in pairs]

    def reads(self) -> list[str]:
        """Return what the nodes read of those before them."""
        made = {name for node in self.nodes for name in node.output}
        names = dict.fromkeys(name for node in nodes(OneNode(tuple(self.nodes))) for name in node.input if name)
        inner = {name for node in nodes(OneNode(tuple(self.nodes))) for name in node.output}
        return [name for name in names if name not in made and name not in inner]


def _move_last(draft: Draft) -> Moved | None:
    """Take the last nodes out of a draft; None, and nothing is changed, where they are not in order or lack types."""
    known = types(draft.model())
    ready = {t.name for t in draft.weights} | set(draft.inputs)
    for node in draft.nodes:
        if not all(name in ready for name in node.input if name):
            return None
        ready.update(node.output)
    cut = draft.random.randrange(len(draft.nodes))
    made = {name for node in draft.nodes[cut:] for name in node.output}
    results = {name: known.get(name) for name in draft.outputs if name in made}
    found = {name: kind for name, kind in results.items() if kind is not None and kind.tensor_type.elem_type}
    if not found or len(found) < len(results):
        return None
    moved = Moved(draft.nodes[cut:], found)
    draft.nodes = draft.nodes[:cut]
    return moved


def _rename_outputs(draft: Draft, moved: Moved, results: Sequence[str]) -> None:
    new = dict(zip(moved.results, results, strict=True))
    draft.outputs = [new.get(name, name) for name in dict.fromkeys(draft.outputs)]


def into_branch(draft: Draft) -> None:
    """Move the last nodes into both branches of an If, where they read values from outside."""
    moved = _move_last(draft)
    if moved is None:
        return
    results = [draft.fresh() for _ in moved.results]
    branches = {}
    for branch in ("then_branch", "else_branch"):
        same = draft.random.random() < 0.5  # as some exporters name them
        end = [f"{branch}_{name}" for name in moved.results] if same else results
        branches[branch] = helper.make_graph([*moved.nodes, *moved.ends(end)], branch, [], moved.infos(end))
    draft.inputs["condition"] = (TensorProto.BOOL, ())
    draft.nodes.append(helper.make_node("If", ["condition"], results, draft.fresh("if"), **branches))
    _rename_outputs(draft, moved, results)


def into_loop(draft: Draft) -> None:
    """Move the last nodes into the body of a Loop, where what they read may be carried, and grow."""
    random, known = draft.random, types(draft.model())
    moved = _move_last(draft)
    if moved is None:
        return
    floats = [name for name in moved.reads() if name in known and known[name].tensor_type.elem_type in FLOATS]
    state = random.choice(floats) if floats and random.random() < 0.7 else None
    count, go, end_go, carried, grown = (draft.fresh(stem) for stem in ("count", "go", "go", "carried", "grown"))
    before, ends, results = ([draft.fresh(stem) for _ in moved.results] for stem in ("before", "end", "v"))
    body, starts = [*moved.nodes, *moved.ends(ends), helper.make_node("Identity", [go], [end_go], end_go)], []
    for kind in moved.results.values():
        zero = np.zeros((), helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))
        starts.append(draft.constant(zero))
    inputs = [helper.make_tensor_value_info(count, TensorProto.INT64, []),
              helper.make_tensor_value_info(go, TensorProto.BOOL, []), *moved.infos(before)]  # fmt: skip
    outputs = [helper.make_tensor_value_info(end_go, TensorProto.BOOL, []), *moved.infos(ends)]
    if state is not None:
        for node in moved.nodes:
            node.input[:] = [carried if name == state else name for name in node.input]
        dtype, grows = known[state].tensor_type.elem_type, random.random() < 0.4
        rank = len(known[state].tensor_type.shape.dim) if grows else 0
        step = ("Concat", [carried, carried], {"axis": random.randrange(rank)}) if rank else ("Identity", [carried], {})
        body.append(helper.make_node(step[0], step[1], [grown], grown, **step[2]))
        inputs.append(helper.make_tensor_value_info(carried, dtype, None))
        outputs.append(helper.make_tensor_value_info(grown, dtype, None))
        starts.append(state)
        results.append(draft.fresh())
    times, yes = (draft.constant(np.array(value)) for value in (np.int64(random.choice([1, 1, 2])), np.bool_(True)))
    graph = helper.make_graph(body, draft.fresh("body"), inputs, outputs)
    draft.nodes.append(helper.make_node("Loop", [times, yes, *starts], results, draft.fresh("loop"), body=graph))
    _rename_outputs(draft, moved, results[: len(moved.results)])


def into_function(draft: Draft) -> None:
    """Move the last nodes into a function of the model, which is called once or twice."""
    random = draft.random
    moved = _move_last(draft)
    if moved is None:
        return
    name, results = draft.fresh("function"), [draft.fresh() for _ in moved.results]
    reads, opsets = moved.reads(), [helper.make_opsetid("", draft.opset), helper.make_opsetid("local", 1)]
    draft.functions.append(helper.make_function("local", name, reads, list(moved.results), moved.nodes, opsets))
    for names in [results, [draft.fresh() for _ in results]][: random.choice([1, 2])]:
        draft.nodes.append(helper.make_node(name, reads, names, draft.fresh("call"), domain="local"))
    _rename_outputs(draft, moved, results)
