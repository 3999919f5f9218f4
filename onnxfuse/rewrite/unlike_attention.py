"""Say why structures around a Softmax of scores are not an attention that a kernel computes, in any spelling.

A kernel of attention computes each head alone and stores neither scores nor probabilities.  Talking heads multiply
these by a weight of heads, top-k masks sort the scores, relative values (Shaw) read probabilities in a second product,
and attention between windows (SepViT) has all pixels of a window as the value of a key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from onnxfuse.algebra.operators import BROADCASTING, PRODUCTS, UNARY, VIEWS
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.passes.folded import node_label

BEFORE: Final = BROADCASTING | UNARY | VIEWS
AFTER: Final = BEFORE | {"BatchNormalization", "LayerNormalization", "Slice"}
MAX_NODES: Final = 64  # of a walk from a Softmax
WITHOUT_HEADS: Final = "computes each head alone, so this is fused only if the model is trained without talking heads"
WITHOUT_TOP_K: Final = "stores no scores, so this is fused only if the top-k mask is switched off"
WITHOUT_VALUES: Final = "stores no probabilities, so this is fused only if relative values are switched off"
WITHOUT_PIXELS: Final = "has one row of values per key, of at most 256 numbers, so this stays in parts"


def unlike_attention(graph: Graph, shapes: ShapeInfo) -> dict[str, str]:
    """Return why no attention ends at a node, by the label of the node: products, and views of their results."""
    found: dict[str, str] = {}
    for softmax in (node for node in graph.nodes if node.op == "Softmax"):
        before = _before(softmax)
        if any(_is_product(node) for node in before):
            after = _after(softmax)
            if (sentence := _sentence(shapes, softmax, before, after)) is not None:
                found |= dict.fromkeys(map(node_label, _ends(after)), sentence)
    return found


def _sentence(shapes: ShapeInfo, softmax: Node, before: Sequence[Node], after: Sequence[Node]) -> str | None:
    label = node_label(softmax)
    scores = [tensor for node in before for tensor in node.outputs]
    products = [f"'{node_label(node)}'" for node in after if _is_product(node)]
    if mixing := next((node for node in (*before, *after) if _is_weighted(node)), None):
        found = f"'{node_label(mixing)}', {op_of(mixing)}, multiplies the scores around '{label}' by a weight"
        return f"{found}; an attention kernel {WITHOUT_HEADS}"
    if top := next((node for each in scores for node in consumers(each) if op_of(node) == "TopK"), None):
        return f"'{node_label(top)}', TopK, sorts the scores of '{label}'; an attention kernel {WITHOUT_TOP_K}"
    if len(products) > 1:
        found = f"{len(products)} products, {', '.join(products)}, read the probabilities of '{label}'"
        return f"{found}; an attention kernel {WITHOUT_VALUES}"
    made = {softmax, *after}
    if wide := next((node for node in after if _is_product(node) and _has_wide_values(shapes, node, made)), None):
        found = f"'{node_label(wide)}', {op_of(wide)}, multiplies probabilities of '{label}' by values with more axes"
        return f"{found}; an attention kernel {WITHOUT_PIXELS}"
    return None


def _is_product(node: Node) -> bool:
    """Return whether a node multiplies two computed tensors."""
    return op_of(node) in PRODUCTS and sum(not is_constant(each) for each in node.inputs if each.name) > 1


def _has_wide_values(shapes: ShapeInfo, product: Node, made: Collection[Node]) -> bool:
    """Return whether a product multiplies what the nodes `made` compute by a tensor with more axes."""
    ranks = {producer(each) in made: shapes.rank(each) for each in product.inputs}
    probabilities, values = ranks.get(True), ranks.get(False)
    return probabilities is not None and values is not None and values > probabilities


def _is_weighted(node: Node) -> bool:
    """Return whether a node multiplies by a weight that has as many outputs as inputs, as one of heads has."""
    shapes = [[size for size in each.shape or () if size != 1] for each in node.inputs if is_constant(each)]
    return op_of(node) in PRODUCTS and any(len(shape) == 2 and shape[0] == shape[1] for shape in shapes)


def _before(softmax: Node) -> list[Node]:
    """Return the nodes that lead from products of two computed tensors to a Softmax, the products included."""
    leads: dict[Node, bool] = {}

    def is_on_the_way(tensor: Tensor) -> bool:
        node = producer(tensor)
        if node is None or len(leads) > MAX_NODES:
            return False
        if node not in leads:
            leads[node] = _is_product(node)
            if not leads[node] and (op_of(node) in BEFORE or _is_weighted(node)):
                leads[node] = any(is_on_the_way(each) for each in node.inputs)
        return leads[node]

    is_on_the_way(softmax.inputs[0])
    return [node for node, is_way in leads.items() if is_way]


def _after(softmax: Node) -> list[Node]:
    """Return the nodes that a Softmax leads to, up to products of two computed tensors, these included."""
    found: dict[Node, None] = {}
    work = [*consumers(softmax.outputs[0])]
    while work and len(found) < MAX_NODES:
        node = work.pop(0)
        if node not in found and (op_of(node) in AFTER or _is_product(node) or _is_weighted(node)):
            found[node] = None
            work += () if _is_product(node) else _readers(node)
    return [*found]


def _readers(node: Node) -> Iterator[Node]:
    return (reader for tensor in node.outputs for reader in consumers(tensor))


def _ends(after: Iterable[Node]) -> Iterator[Node]:
    """Yield the products among the nodes, and the views of their results, at which an attention could end."""
    for node in after:
        if _is_product(node) or _is_weighted(node):
            yield node
            views = [each for each in _readers(node) if op_of(each) in VIEWS]
            yield from views
            yield from (each for view in views for each in _readers(view) if op_of(each) in VIEWS)
