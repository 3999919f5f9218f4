"""Choose the nodes that become channels-last: connected regions around convolutions, trimmed to save Transposes.

A region starts as all connected nodes with a channels-last form, including a convolution.  A tensor that is computed in
one layout and read in the other needs a Transpose, called a border here, which reads and writes the tensor's bytes.  A
border costs nothing if it cancels with adjacent views, or merges with views that move the tensor anyway.  Then the
region is trimmed, first in execution order and then against it.  A neutral node, whose operator works in either layout,
is removed if that adds no bytes of Transposes.  A node with its own kernel, such as a pool, is removed only if that
saves bytes.

Without a convolution, nodes with kernels (such as pools) form a region if Transposes of the model vanish: a model of
channels-last images has Transposes around each of these nodes.

With `auto`, a region is kept under two conditions.  At least one of its convolutions must compute more than one pixel;
the convolutions of a channel gate compute one.  Its Transposes must move at most MAX_BORDER_SHARE of the bytes that its
convolutions read and write: a Transpose runs as fast as a copy, and channels-first convolutions take about twice as
long as channels-last ones (ResNet-50 in float16, batch 32, on an H200: 3.68 and 2.13 ms in onnxruntime).  A
channels-first convolution of integers computes in float32, so that it also moves the dequantized numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.algebra.index_maps import transposed
from onnxfuse.algebra.operators import REARRANGING, REDUCTIONS
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.tensor_bytes import tensor_bytes
from onnxfuse.ir.attributes import ints_attribute, str_attribute
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.layout.axes import has_one_pixel, to_first, to_last
from onnxfuse.layout.conversion import Conversion, Kind, Model
from onnxfuse.layout.fusions import QUANTIZED_CONVOLUTION
from onnxfuse.passes.compose_views import View, shorter_chain, view_of

MAX_BORDER_SHARE: Final = 0.5
FLOAT_BYTES: Final = 4


@dataclass(frozen=True)
class Refused:
    """A region that stays channels-first with `auto`: its convolutions, and the bytes that decided it.

    `border` and `moved` are the bytes that its Transposes and its convolutions would move; both are 0 if all of its
    convolutions compute single pixels.  `widest` is the tensor with the largest Transpose; `inward` says that this
    Transpose is at the region's input.
    """

    convolutions: tuple[Node, ...]
    border: int = 0
    moved: int = 0
    widest: Tensor | None = None
    inward: bool = False


@dataclass
class _Use:
    """The present layout of a tensor that can be an image: how it is computed, and how many nodes read each layout."""

    tensor: Tensor
    bytes: int
    computed_last: bool = False
    first_readers: int = 0  # number of nodes that read the tensor channels-first; plus 1 if its name must be kept
    last_readers: int = 0
    # If the tensor is computed channels-last: bytes of the model's Transposes after it that cancel with its border,
    # which is the Transpose to channels-first.
    saved_behind: int = 0
    # Bytes of the model's Transposes before the tensor that cancel with its border; None if none of them cancels.
    saved_before: int | None = None

    def cost(self) -> int:
        """Return the bytes of the tensor's border, minus the bytes of the model's Transposes that cancel with it.

        A border is the Transpose of a tensor that is computed in one layout and read in the other.
        """
        if self.computed_last:
            return self.bytes * bool(self.first_readers) - self.saved_behind
        if not self.last_readers:
            return 0
        return self.bytes if self.saved_before is None else -self.saved_before


@dataclass
class Regions:
    """The nodes chosen so far to become channels-last; `choose` chooses them."""

    model: Model
    conversions: Mapping[Node, Conversion]
    members: dict[Node, None] = field(default_factory=dict)  # in execution order
    refused: list[Refused] = field(default_factory=list)
    _uses: dict[str, _Use] = field(default_factory=dict)

    def choose(self, seeds: Iterable[Node], *, only_where_it_pays: bool) -> list[Conversion]:
        """Return the conversions of the nodes that become channels-last, in execution order.

        `seeds` are the convolutions around which regions form.  With `only_where_it_pays`, regions that do not pay are
        left out.
        """
        starts = set(seeds)
        for region in self._connected(list(self.conversions)):
            if starts.intersection(region) or self._has_kernels(region):
                self.members |= dict.fromkeys(region)
        self._count_uses()
        order = [node for node in self.conversions if node in self.members]
        for node in (*order, *reversed(order)):
            self._leave_where_that_saves(node)
        for region in self._connected([node for node in order if node in self.members]):
            has_convolutions = bool(starts.intersection(region))
            refused = self._refused(region) if only_where_it_pays and has_convolutions else None
            self.refused += [refused] if refused is not None else []
            is_kept = refused is None if has_convolutions else self._has_kernels(region) and self._border(region) < 0
            if not is_kept:
                for node in region:
                    self.members.pop(node)
        return [self.conversions[node] for node in order if node in self.members]

    # --- tensors -------------------------------------------------------------------------------------------------

    def _images(self, node: Node) -> list[Tensor]:
        """Return the tensors that a node can read or compute channels-last, each once."""
        one = self.conversions[node]
        found = [*(node.inputs[i] for i in (*one.reads, *one.reads_either)), *(node.outputs[i] for i in one.computes)]
        return list({tensor.name: tensor for tensor in found}.values())

    def _count_uses(self) -> None:
        for node in self.members:
            for tensor in self._images(node):
                if tensor.name not in self._uses:
                    self._uses[tensor.name] = self._use(tensor)

    def _use(self, tensor: Tensor) -> _Use:
        shapes = self.model.shapes
        use = _Use(tensor, tensor_bytes(shapes, shapes.shape(tensor), shapes.dtype(tensor)))
        use.first_readers = int(self.model.graph.is_kept(tensor))
        for reader in consumers(tensor):
            if reader in self.members:
                first, last = self._reads(reader, tensor)
                use.first_readers += first
                use.last_readers += last
            elif (saved := self._saved_behind(tensor, reader)) is None:
                use.first_readers += 1
            else:
                use.saved_behind += saved
        node = producer(tensor)
        use.computed_last = node is not None and node in self.members and self._computes(node, tensor)
        use.saved_before = self._saved_before(tensor)
        return use

    def _reads(self, node: Node, tensor: Tensor) -> tuple[bool, bool]:
        """Return whether a converted node reads a tensor channels-first, and whether it reads it channels-last."""
        one = self.conversions[node]
        indices = {i for i, each in enumerate(node.inputs) if each is tensor}
        return bool(indices.difference(one.reads, one.reads_either)), bool(indices.intersection(one.reads))

    def _computes(self, node: Node, tensor: Tensor) -> bool:
        return any(node.outputs[i] is tensor for i in self.conversions[node].computes)

    def _saved_behind(self, tensor: Tensor, reader: Node) -> int | None:
        """Return the bytes of the model's Transposes after a tensor that cancel with the Transpose at its border.

        Returns None if none of them cancels.
        """
        chain = [reader]
        while op_of(chain[-1]) in REARRANGING and op_of(chain[-1]) != "Transpose":
            following = self.model.graph.sole_consumer(chain[-1].outputs[0])
            if following is None or op_of(following) not in REARRANGING:
                break
            chain.append(following)
        shape = self.model.shapes.shape(tensor)
        if shape is None or chain[0].inputs[0] is not tensor:
            return None
        first = View(to_first(len(shape)), shape)
        return self._saved(transposed(shape, to_last(len(shape))), [first, *map(self._view, chain)], tensor)

    def _saved_before(self, tensor: Tensor) -> int | None:
        """Return the bytes of the model's Transposes before a tensor that cancel with the Transpose at its border.

        Returns None if none of them cancels.
        """
        chain: list[Node] = []
        node = producer(tensor)
        while node is not None and op_of(node) in REARRANGING and not any(op_of(each) == "Transpose" for each in chain):
            chain.insert(0, node)
            node = producer(node.inputs[0])
        shape = self.model.shapes.shape(tensor)
        source = self.model.shapes.shape(chain[0].inputs[0]) if chain else None
        if shape is None or source is None:
            return None
        perm = to_last(len(shape))
        return self._saved(source, [*map(self._view, chain), View(perm, transposed(shape, perm))], tensor)

    def _view(self, node: Node) -> View | None:
        return view_of(self.model.shapes, node) if op_of(node) in REARRANGING else None

    def _saved(self, source: tuple[Size, ...], views: Sequence[View | None], tensor: Tensor) -> int | None:
        known = tuple(view for view in views if view is not None)
        if len(known) < len(views):
            return None
        shorter = shorter_chain(source, known)
        if shorter is None:
            return None
        before, after = (sum(view.perm is not None for view in chain) for chain in (known, shorter))
        if after == before:  # no Transpose cancels with the border
            return None
        return (before - 1 - after) * tensor_bytes(self.model.shapes, source, self.model.shapes.dtype(tensor))

    # --- regions -------------------------------------------------------------------------------------------------

    def _connected(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Return the groups of nodes that are connected by channels-last tensors."""
        parent = {node: node for node in nodes}

        def root(node: Node) -> Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        first: dict[str, Node] = {}
        for node in nodes:
            for tensor in self._images(node):
                parent[root(node)] = root(first.setdefault(tensor.name, node))
        groups: dict[Node, list[Node]] = {}
        for node in nodes:
            groups.setdefault(root(node), []).append(node)
        return list(groups.values())

    def _leave_where_that_saves(self, node: Node) -> None:
        kind = self.conversions[node].kind
        if kind is Kind.CONVOLUTION or node not in self.members:
            return
        uses = [self._uses[tensor.name] for tensor in self._images(node)]
        before = sum(use.cost() for use in uses)
        self._move(node, uses, -1)
        change = sum(use.cost() for use in uses) - before
        if change < 0 or (change == 0 and kind is Kind.NEUTRAL):
            self.members.pop(node)
        else:
            self._move(node, uses, 1)

    def _move(self, node: Node, uses: Iterable[_Use], by: int) -> None:
        """Count a node as channels-last (`by` is 1) or channels-first (`by` is -1) in the uses of its tensors."""
        for use in uses:
            first, last = self._reads(node, use.tensor)
            if any(each is use.tensor for each in node.inputs):
                use.last_readers += by * last
                # A channels-first node counts as one channels-first reader.  Once it is channels-last, it counts as
                # `first`: 0 or 1.
                use.first_readers += by * (first - 1)
            if self._computes(node, use.tensor):
                use.computed_last = by > 0

    # --- whether a region pays ---------------------------------------------------------------------------------------

    def _has_kernels(self, region: Iterable[Node]) -> bool:
        """Return whether a node of the region has its own channels-last kernel, as pools do.

        A reduction counts only if it reads the result of a Transpose.
        """
        return any(
            self.conversions[node].kind is not Kind.NEUTRAL
            and (op_of(node) not in REDUCTIONS or any(op_of(before) == "Transpose" for before in node.inputs[0].inputs))
            for node in region
        )

    def _border(self, region: Iterable[Node]) -> int:
        """Return the bytes of a region's borders, minus the bytes of the model's Transposes that vanish."""
        images = {tensor.name: self._uses[tensor.name] for node in region for tensor in self._images(node)}
        return sum(use.cost() for use in images.values())

    def _refused(self, region: Sequence[Node]) -> Refused | None:
        """Return a record of why a region does not pay; None if it pays."""
        convolutions = tuple(node for node in region if self.conversions[node].kind is Kind.CONVOLUTION)
        if all(self._is_gate(node) for node in convolutions):
            return Refused(convolutions)
        images = {tensor.name: self._uses[tensor.name] for node in region for tensor in self._images(node)}
        border = 2 * self._border(region)  # a Transpose reads and writes its tensor
        moved = sum(map(self._moved, convolutions))
        if border <= MAX_BORDER_SHARE * moved:
            return None
        widest = max(images.values(), key=_Use.cost)
        return Refused(convolutions, border, moved, widest.tensor, not widest.computed_last)

    def _moved(self, node: Node) -> int:
        """Return the bytes that a convolution reads and writes if it is channels-first."""
        shapes, tensors = self.model.shapes, [t for t in (*node.inputs, *node.outputs) if t.name and not is_constant(t)]
        read = [tensor_bytes(shapes, shapes.shape(tensor), shapes.dtype(tensor)) for tensor in tensors]
        is_of_integers = str_attribute(node, "fusion", "") == QUANTIZED_CONVOLUTION
        # A channels-first convolution dequantizes x, so that its numbers are written and read in float32.  As integers,
        # they have one byte each.
        return sum(read) + (2 * FLOAT_BYTES * read[0] if is_of_integers else 0)

    def _is_gate(self, node: Node) -> bool:
        """Return whether a convolution is a matrix product of images of one pixel, as in a channel gate."""
        kernel = ints_attribute(node, "kernel_shape")
        rank = self.model.shapes.rank(node.outputs[0])
        weights = next((t.shape for t in node.inputs if is_constant(t) and len(t.shape) == rank), ())
        is_product = set(kernel or weights[2:]) == {1}
        return is_product and has_one_pixel(self.model.shapes.shape(node.outputs[0]))
