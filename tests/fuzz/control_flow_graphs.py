"""Graphs of Ifs, Loops and Scans: nested, with branches of different rank, without iterations, and over sequences."""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
from drafts import Draft, Unavailable, Value
from onnx import TensorProto, helper
from random_graphs import BOOL, INT64, Writer, finish, start


def control_flow_graph(random: Random) -> Draft:
    """Return a random graph in which about half of the operators have bodies."""
    draft, values = start(random)
    flags, counts = draft.input(BOOL, ()), draft.input(INT64, ())
    return finish(ControlFlow(draft, values, flags.name, counts.name), random.randint(2, 9))


class ControlFlow(Writer):
    """Writes nodes with bodies beside others; whether and how often bodies run may be known only in a run."""

    def __init__(self, draft: Draft, values: list[Value], flag: str, count: str) -> None:
        super().__init__(draft, values)
        self.flag, self.count, self.depth = flag, count, 0

    @property
    def steps(self) -> list:
        bodies = [self.branch, self.loop, self.scan, self.branch_of_ranks, self.loop_of_rows, self.while_loop,
                  self.scan_with_state, self.loop_of_sequence]  # fmt: skip
        return [
            self.unary,
            self.binary,
            self.view,
            self.cast,
            self.where,
            self.softmax,
            self.norm,
            self.product,
            *bodies,
        ]

    def _inner(self, x: Value, steps: int) -> tuple[list[onnx.NodeProto], Value]:
        """Write nodes of a body, which may hold bodies themselves."""
        if self.depth >= 2 or self.random.random() < 0.6:
            return super()._inner(x, steps)
        self.depth += 1
        end, before = len(self.draft.nodes), list(self.values)
        self.values = [*[v for v in before if v.dtype == x.dtype][-3:], x]
        self.random.choice([self.branch, self.loop, self.scan, self.scan_with_state])()
        same = [v for v in self.values if (v.dtype, v.shape) == (x.dtype, x.shape)]
        nodes, self.values = self.draft.nodes[end:], before
        del self.draft.nodes[end:]
        self.depth -= 1
        return nodes, same[-1]

    def _condition(self) -> str:
        if self.random.random() < 0.7:
            return self.flag
        return self.draft.constant(np.array(self.random.random() < 0.5))

    def _times(self) -> str:
        if self.random.random() < 0.5:
            return self.count
        return self.draft.constant(np.array(self.random.randint(0, 3), np.int64))

    def branch_of_ranks(self) -> None:
        """Write an If whose branches give different shapes, and what reads a tensor of any shape."""
        x = self.any()
        if not x:
            return
        branches = []
        for _ in range(2):
            nodes, result = self._inner(x, self.random.randint(0, 2))
            end = len(self.draft.nodes)
            name, way = result.name, self.random.randrange(4)
            if way == 0:
                name = self._axes("Unsqueeze", name, [0])
            elif way == 1 and x.shape:
                name = self.draft.node("ReduceMax", [name], keepdims=0)
            elif way == 2:
                name = self.draft.node("Reshape", [name, self.draft.integers(-1)])
            nodes += self.draft.nodes[end:]
            del self.draft.nodes[end:]
            branches.append(self._graph(nodes, [(name, x.dtype)], []))
        name = self.draft.node("If", [self._condition()], then_branch=branches[0], else_branch=branches[1])
        for _ in range(self.random.randint(0, 2)):
            name = self.draft.node(self.random.choice(["Neg", "Exp", "Relu", "Identity"]), [name])
        if self.random.random() < 0.4:
            name = self.draft.node("Add", [name, self.array((), x.dtype)])
        if self.random.random() < 0.4:
            name = self.draft.node("Reshape", [name, self.draft.integers(-1)])
        self.draft.outputs.append(name)

    def _loop(
        self, times: str, go: str, x: Value, nodes: list[onnx.NodeProto], names: tuple[str, str, str, str],
        results: list[tuple[str, int]], outputs: int,
    ) -> str:  # fmt: skip
        """Write a Loop of one state; `names` are those of the iteration, the condition before and after, the state."""
        index, go_in, go_out, state = names
        inputs = [helper.make_tensor_value_info(index, INT64, []), helper.make_tensor_value_info(go_in, BOOL, []),
                  helper.make_tensor_value_info(state, x.dtype, None)]  # fmt: skip
        body = self._graph(nodes, [(go_out, BOOL), *results], inputs)
        return self.draft.node("Loop", [times, go, x.name], outputs, body=body)

    def loop_of_rows(self) -> None:
        """Write a Loop whose iterations also give a row each of a result.

        There is one iteration at least: onnxruntime gives no rows the shape that it infers, perhaps of another rank.
        """
        x = self.any()
        if not x:
            return
        index, go_in, go_out, state = (self.draft.fresh(stem) for stem in ("index", "go", "go", "state"))
        nodes, result = self._inner(Value(state, x.dtype, x.shape), self.random.randint(1, 3))
        nodes.append(helper.make_node("Identity", [go_in], [go_out], f"keep_{go_out}"))
        row = self.random.choice([result.name, state])
        times, yes = (self.draft.constant(np.array(n)) for n in (np.int64(self.random.randint(1, 3)), np.True_))
        name = self._loop(
            times, yes, x, nodes, (index, go_in, go_out, state), [(result.name, x.dtype), (row, x.dtype)], 2
        )
        self.add(name, x.dtype, x.shape)
        self.draft.outputs.append(self.draft.nodes[-1].output[1])

    def while_loop(self) -> None:
        """Write a Loop that ends by what it computes; its state may grow."""
        x = self.any()
        if not x or self.draft.opset < 9:
            return
        index, go_in, state = (self.draft.fresh(stem) for stem in ("index", "go", "state"))
        end = len(self.draft.nodes)
        limit = self.draft.constant(np.array(self.random.randint(0, 3), np.int64))
        go_out = self.draft.node("Less", [index, limit])
        grows = bool(x.shape) and self.random.random() < 0.4
        if grows:
            result = self.draft.node("Concat", [state, state], axis=self.random.randrange(len(x.shape)))
        else:
            result = self.draft.node("Mul", [state, self.array((), x.dtype)])
        nodes = self.draft.nodes[end:]
        del self.draft.nodes[end:]
        go = self.random.choice([self.draft.constant(np.array(True)), self._condition()])
        name = self._loop(self._times(), go, x, nodes, (index, go_in, go_out, state), [(result, x.dtype)], 1)
        if grows:
            self.draft.outputs.append(self.draft.node("Neg", [name]))
        else:
            self.add(name, x.dtype, x.shape)

    def scan_with_state(self) -> None:
        """Write a Scan that carries a state over rows, forwards or backwards."""
        x = self.any(rank=2)
        if not x or 0 in x.shape or self.draft.opset < 9:
            return
        state, row = self.draft.fresh("state"), self.draft.fresh("row")
        nodes, result = self._inner(Value(row, x.dtype, x.shape[1:]), self.random.randint(1, 2))
        total = self.draft.fresh("total")
        nodes.append(helper.make_node(self.random.choice(["Add", "Max", "Mul"]), [state, result.name], [total], total))
        inputs = [helper.make_tensor_value_info(name, x.dtype, None) for name in (state, row)]
        body = self._graph(nodes, [(total, x.dtype), (total, x.dtype)], inputs)
        first = self.array(x.shape[1:], x.dtype)
        way = {"scan_input_directions": [1]} if self.random.random() < 0.4 else {}
        self.draft.node("Scan", [first, x.name], 2, body=body, num_scan_inputs=1, **way)
        last, rows = self.draft.nodes[-1].output
        self.add(last, x.dtype, x.shape[1:])
        self.add(rows, x.dtype, x.shape)

    def loop_of_sequence(self) -> None:
        """Write a Loop that collects tensors in a sequence, which are joined behind it."""
        x = self.any(rank=1)
        if not x or self.draft.opset < 11 or x.dtype == TensorProto.BFLOAT16:
            raise Unavailable
        index, go_in, go_out, state, grown = (self.draft.fresh(n) for n in ("index", "go", "go", "sequence", "grown"))
        nodes, result = self._inner(x, self.random.randint(0, 2))
        nodes += [helper.make_node("SequenceInsert", [state, result.name], [grown], f"insert_{grown}"),
                  helper.make_node("Identity", [go_in], [go_out], f"keep_{go_out}")]  # fmt: skip
        sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(x.dtype, None))
        body = helper.make_graph(
            nodes, self.draft.fresh("body"),
            [helper.make_tensor_value_info(index, INT64, []), helper.make_tensor_value_info(go_in, BOOL, []),
             helper.make_value_info(state, sequence)],
            [helper.make_tensor_value_info(go_out, BOOL, []), helper.make_value_info(grown, sequence)],
        )  # fmt: skip
        times, go = (self.draft.constant(np.array(each)) for each in (np.int64(self.random.randint(1, 3)), np.True_))
        first = self.draft.node("SequenceConstruct", [x.name])
        found = self.draft.node("Loop", [times, go, first], body=body)
        if self.random.random() < 0.6:
            self.draft.outputs.append(self.draft.node("ConcatFromSequence", [found], axis=0))
        else:
            at = self.draft.constant(np.array(-1, np.int64))
            self.add(self.draft.node("SequenceAt", [found, at]), x.dtype, x.shape)
