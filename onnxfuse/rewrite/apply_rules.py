"""Apply rewrite rules: where the left side of a rule matches, replace it by the right side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from onnxfuse.analysis.scores import rewritable_softmaxes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Rewrite
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.match import Match, Matcher, Miss
from onnxfuse.match.prefilter import may_be, may_occur
from onnxfuse.passes import Pass
from onnxfuse.passes.fold_constants import fold_nodes
from onnxfuse.passes.folded import node_label
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.rewrite.function_body import BodyBuilder
from onnxfuse.rewrite.insert_nodes import insert_nodes
from onnxfuse.rewrite.variant import Variant
from onnxfuse.steps import StepError


def rules_pass(name: str, rules: Sequence[Rewrite], of: Set[str] | None = None) -> Pass:
    """Return a pass called `name` that applies the rules; with `of`, it skips graphs without any operator in `of`."""

    @graph_pass(opset=7)  # from this opset on, operators broadcast by numpy's rules
    def apply(graph: Graph, shapes: ShapeInfo) -> int:
        if of and of.isdisjoint(graph.operators):
            return 0
        try:
            return _apply_rules(graph, shapes, rules)
        except StepError as error:  # a rule raised: the caller then skips this pass
            assert error.__cause__ is not None
            raise error.__cause__ from None

    apply.__name__ = name
    return apply


def near_misses(graph: Graph, shapes: ShapeInfo, rules: Sequence[Rewrite]) -> list[Miss]:
    """Return, as misses, why rules do not match in a sorted graph, at the nodes where their left sides can end."""
    tried = (matcher.at(node.outputs[0]) for node, _, matcher in _candidates(graph, shapes, rules))
    return [found for found in tried if isinstance(found, Miss)]


def _apply_rules(graph: Graph, shapes: ShapeInfo, rules: Sequence[Rewrite]) -> int:
    """Apply rules to a sorted graph, from the outputs to the inputs, each node once; return how many were applied."""
    return sum(
        _apply(graph, shapes, matcher, rule, node.outputs[0])
        for node, rule, matcher in _candidates(graph, shapes, rules)
        if "..." in rule.left.out[0] or matcher.has_shape_of_output(node.outputs[0])
    )


def _candidates(graph: Graph, shapes: ShapeInfo, rules: Sequence[Rewrite]) -> Iterator[tuple[Node, Rewrite, Matcher]]:
    """Yield nodes, from outputs to inputs, with each rule whose left side can end there, until the node is replaced."""
    by_root: dict[str, list[tuple[Rewrite, Matcher]]] = defaultdict(list)
    for rule in rules:
        if may_occur(rule.left, graph.operators):
            matcher = Matcher(graph, shapes, rule.left)
            for op in matcher.prefilter.fusion_root_ops:
                by_root[op].append((rule, matcher))
    ends = {op.rpartition("::")[2] for op in by_root}
    for node in [each for each in graph.nodes[::-1] if each.op in ends]:  # few of the nodes can end a match
        for rule, matcher in by_root.get(op_of(node), ()):
            if node.outputs and may_be(rule.left.outputs[0].endings or (), node.outputs[0]):
                yield node, rule, matcher


def _apply(graph: Graph, shapes: ShapeInfo, matcher: Matcher, rule: Rewrite, root: Tensor) -> bool:
    """Replace a match of the left side by the right side; return whether there was a replacement.

    Nothing is replaced if the left side does not match, if the opset cannot express the right side, or if the rule
    rewrites attention scores and these scores must not change.
    """
    match, right = matcher.at(root), rule.right
    if not isinstance(match, Match):
        return False
    softmaxes = _rewritten_softmaxes(graph, match, root) if rule.of_scores else set[str]()
    if rule.of_scores and not softmaxes:
        return False
    dtypes = {name: shapes.dtype(tensor) for name, tensor in match.operands.items()}
    dtype, rank = shapes.dtype(root), shapes.rank(root) or 0
    builder = BodyBuilder(Variant(graph.opset, dtypes, (dtype,), rank, match.values, match.dims, match.choices))
    if not all(dtypes.values()) or not builder.can_write(right):
        return False
    value, label = builder.cast(builder.value(right), dtype), node_label(root.inputs[0])
    graph.scores.done |= softmaxes
    graph.rewritten.append((rule.left.name, label))
    position = max(graph.position[node] for node in match.nodes)
    for node in match.nodes:
        node.inputs.clear()
        node.outputs.clear()
    made = insert_nodes(shapes, builder.nodes, match.operands, [(value.name, root)], label)
    graph.position |= dict.fromkeys(made, position)
    for node in made if len(softmaxes) == 1 else ():
        if op_of(node) == "Softmax":
            graph.scores.begun[node.outputs[0].name] = min(softmaxes)
    fold_nodes(shapes, [node for node in made if not any(map(graph.must_be_computed, node.outputs))])
    return True


def _rewritten_softmaxes(graph: Graph, match: Match, root: Tensor) -> set[str]:
    """Return the names of the Softmaxes in a match or, if it has none, of the Softmaxes after it.

    Returns an empty set if the scores that one of these Softmaxes reads must not be rewritten.
    """
    inside = {graph.scores.name(node) for node in match.nodes if op_of(node) == "Softmax"}
    if inside:
        return inside if graph.scores.stay.isdisjoint(inside) else set()
    return rewritable_softmaxes(graph, root.inputs[0])
