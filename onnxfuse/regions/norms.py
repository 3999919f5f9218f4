"""Merge fused norms with regions that compute their inputs or rearrange rows, so that one kernel computes both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, Tensor, consumers, producer
from onnxfuse.regions.cluster import Cluster, Clusters
from onnxfuse.regions.epilogue_fusion import Join
from onnxfuse.regions.joining import Joining
from onnxfuse.regions.steps import Step, Steps
from onnxfuse.regions.write import measured_besides, order_by_reading

FLOAT: Final = int(TensorProto.FLOAT)
MOVED: Final = "#moved"  # name of the value that a norm reads, if its rows are moved first: see `with_moved_norm`
ROW_MAPS: Final = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat")


def with_norms(
    clusters: Clusters, cluster: Cluster, joining: Joining, joins: Mapping[str, Join]
) -> tuple[Cluster, list[Node]]:
    """Merge a cluster with the fused norms that read its results, where that pays; return it and the merged norms.

    `joining` says which fused nodes operators can join.  `joins` maps the name of a fused node's result to the planned
    join of operators that read it.  If operators were to join a merged norm, they become part of the cluster, too.
    """
    taken = list[Node]()
    # If the kernel cannot read rows by vector loads, as with some Transposes, a separate kernel for the norm is faster.
    if cluster.is_free or not all(step.keeps_last_axis for node in cluster.nodes for step in clusters.forms[node]):
        return cluster, taken
    for norm in _norms_behind(clusters, cluster, joining):
        found = _merged(clusters, joining, cluster, norm, joins.get(norm.outputs[0].name))
        if found is not None:
            cluster = found
            taken.append(norm)
    return cluster, taken


def _norms_behind(clusters: Clusters, cluster: Cluster, joining: Joining) -> list[Node]:
    """Return the norms that read results of a cluster, in execution order."""
    readers = {
        id(node): node for tensor in cluster.outputs.values() for node in consumers(tensor) if joining.is_norm(node)
    }
    return sorted(readers.values(), key=clusters.graph.position.__getitem__)


def _merged(clusters: Clusters, joining: Joining, cluster: Cluster, norm: Node, join: Join | None) -> Cluster | None:
    """Return a cluster merged with a norm that reads its result; None if they stay separate.

    `join` holds the operators that were to join the norm, if any; they become part of the cluster, too.

    All other tensors that the norm and these operators read must come from nodes of a lower level than the cluster's
    (see order.py).  Then no path from the cluster to the norm or the operators passes through other nodes.
    """
    steps = norm_steps(clusters.shapes, norm)
    at = clusters.level[cluster.nodes[0]]
    read = list(norm.inputs)
    if join:
        read += [*join.cluster.operands.values(), *measured_besides(join.cluster, clusters.forms).values()]
    makers = {id(made): made for tensor in read if (made := producer(tensor)) is not None}
    inside = {id(norm), *map(id, cluster.nodes)}
    if steps is None or any(key not in inside and clusters.level[made] >= at for key, made in makers.items()):
        return None
    clusters.forms[norm] = steps
    both: Cluster | str = clusters.merged(cluster, clusters.add(norm))
    if isinstance(both, Cluster):
        _belong(clusters, both, at)
        both = clusters.merged(both, join.cluster) if join else both
    if isinstance(both, Cluster):
        order_by_reading(both, clusters.forms)
        if joining.may_be_region(both.outputs):
            _belong(clusters, both, at)
            return both
    del clusters.forms[norm], clusters.of[norm]
    clusters.split(cluster, *([join.cluster] if join else ()))
    return None


def _belong(clusters: Clusters, cluster: Cluster, level: int) -> None:
    """Make `cluster` the cluster of its nodes, and set the level (see order.py) of all these nodes."""
    clusters.split(cluster)
    clusters.move(cluster, level)


def with_moved_norm(clusters: Clusters, cluster: Cluster, joining: Joining) -> tuple[Cluster, list[Node]]:
    """Merge a cluster with a norm if it only moves the rows of the norm's result, as a window partition does.

    The merged program moves the rows before the norm, which gives the same result.  Returns the cluster and the merged
    norm, if any.  `joining` is as in `with_norms`.
    """
    norm = _moved_norm(clusters, cluster, joining)
    if norm is None or not joining.may_be_region(cluster.outputs):
        return cluster, []
    (output,), last = cluster.outputs.values(), cluster.nodes[-1]
    steps = norm_steps(clusters.shapes, norm, moved=output)
    if steps is None:
        return cluster, []
    names = {norm.outputs[0].name: norm.inputs[0].name, output.name: MOVED}
    for node in cluster.nodes:
        clusters.forms[node] = tuple(step.renamed(names) for step in clusters.forms[node])
    clusters.forms[last] += steps
    clusters.forms[norm] = ()
    clusters.add(norm)
    both = clusters.part([norm, *cluster.nodes])
    both.operands = {tensor.name: tensor for tensor in norm.inputs if tensor.name}
    _belong(clusters, both, clusters.level[last])
    return both, [norm]


def _moved_norm(clusters: Clusters, cluster: Cluster, joining: Joining) -> Node | None:
    """Return the norm whose result a cluster rearranges by whole rows, if nothing else reads the result; else None."""
    if cluster.is_free or len(cluster.operands) != 1 or len(cluster.outputs) != 1:
        return None
    (result,), (output,) = cluster.operands.values(), cluster.outputs.values()
    norm = producer(result)
    if norm is None or norm.domain != DOMAIN or norm in clusters.of or norm.attrs["fusion"] not in joining.epilogues:
        return None
    has_one_operand = norm.attrs["fusion"] in ("layer_norm", "rms_norm")
    is_read_here = not clusters.graph.is_kept(result) and all(node in cluster.nodes for node in result.outputs)
    moves_rows = all(_moves_rows(clusters.shapes, node, clusters.forms[node]) for node in cluster.nodes)
    repeats_rows = clusters.count(output) > clusters.count(result)
    return norm if has_one_operand and is_read_here and moves_rows and not repeats_rows else None


def _moves_rows(shapes: ShapeInfo, node: Node, steps: Iterable[Step]) -> bool:
    """Return whether a node moves whole rows of the last axis, and changes nothing within them."""
    before, after = shapes.shape(node.inputs[0]), [shapes.shape(output) for output in node.outputs]
    if not before or any(not shape or shape[-1] != before[-1] for shape in after):
        return False
    moving = (step.op in ROW_MAPS and step.keeps_last_axis for step in steps)
    return all(moving) and not any(_is_along_last(step, len(before)) for step in steps)


def _is_along_last(step: Step, rank: int) -> bool:
    """Return whether a step slices, joins or pads along the last axis of a tensor of this rank."""
    axes = step.attributes.get("axes", step.attributes.get("axis", []))
    return rank - 1 in (axes if isinstance(axes, list) else [axes])


def norm_steps(shapes: ShapeInfo, norm: Node, moved: Tensor | None = None) -> tuple[Step, ...] | None:
    """Return the steps of a fused norm, which compute in float32; None if one of its weights is not a vector.

    With `moved`, the norm reads its rows from the value MOVED, and its result is the tensor `moved`.
    """
    operands: dict[str, Tensor] = dict(zip(str(norm.attrs["operands"]).split(), norm.inputs, strict=True))
    rank = shapes.rank(moved or operands["x"])
    if not rank or any(shapes.rank(operands[name]) != 1 for name in ("scale", "bias") if name in operands):
        return None
    s = Steps(shapes, norm)

    def wide(name: str) -> str:
        value = MOVED if moved and name == "x" else operands[name].name
        is_wide = shapes.dtype(operands[name]) == FLOAT
        return value if is_wide else s.emit("Cast", [value], FLOAT, to="float32")

    def op(name: str, *inputs: str) -> str:
        return s.emit(name, inputs, FLOAT)

    def mean(value: str) -> str:
        return s.emit("ReduceMean", [value], FLOAT, axes=[rank - 1], keepdims=1)

    def give(value: str, to: Tensor) -> None:
        dtype = shapes.dtype(to)
        s.found.append(Step("Cast", (value,), (to.name,), {"to": dtype_name(dtype)}, dtype))

    x = op("Add", wide("x"), wide("residual")) if "residual" in operands else wide("x")
    centred = op("Sub", x, mean(x)) if "layer_norm" in str(norm.attrs["fusion"]) else x
    epsilon = s.number(norm.attrs["epsilon"], FLOAT)
    root = op("Sqrt", op("Add", mean(op("Mul", centred, centred)), epsilon))
    scaled = op("Mul", op("Div", centred, root), wide("scale"))
    give(op("Add", scaled, wide("bias")) if "bias" in operands else scaled, moved or norm.outputs[0])
    for total in norm.outputs[1:]:
        give(x, total)
    return tuple(s.found)
