"""Writes the stores of a loop nest's outputs, or of the accumulators of its reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.algebra.indices import Index, flat
from onnxfuse.algebra.sizes import product
from onnxfuse.kernels.region.arguments import in_parentheses
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.nests import Nest, in_variables
from onnxfuse.kernels.region.operators import NUMBER
from onnxfuse.kernels.region.reductions import Instance
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.scratch_reductions import Stored


class StoreText:
    """Writes values and their stores, at a point of the code where the loop nest's variables are set."""

    def __init__(self, nest: Nest, writer: Writer, release: str, leaving: str, own: Sequence[Stored]) -> None:
        """Store the loop nest and the writer; `release`, `leaving` and `own` are as in NestText.__init__."""
        self.nest, self.writer, self.release, self.leaving, self.own = nest, writer, release, leaving, own

    def write(self, condition: str = "") -> None:
        """Write the values of the outputs, and then all stores."""
        writer, nest = self.writer, self.nest
        if nest.stores:
            self.write_release()
            for instance, own in zip(nest.stores, self.own, strict=True):
                self._store_accumulator(in_variables(instance, nest), own, condition)
            return
        found = {name: writer.value(name, nest.place_of(name, writer.shapes)) for name in nest.outputs}
        self.write_release()
        self.write_all(found, condition)

    def write_release(self) -> None:
        """Write the instruction that lets the next kernel start, if it is allowed to start before the stores."""
        if self.release != "0":
            self.writer.line(f"{'' if self.release == '1' else f'if {self.release} '}release_successor();")

    def write_rows(self, condition: str) -> None:
        """Write the values and the stores of outputs that have one element per row."""
        writer, nest = self.writer, self.nest
        if nest.row_outputs:
            with writer.branch(f"if ({condition})"):
                places = {name: nest.place_of(name, writer.shapes) for name in nest.row_outputs}
                self.write_all({name: writer.value(name, place) for name, place in places.items()})

    def write_all(self, values: Mapping[str, Reference], condition: str = "") -> None:
        """Write the stores of outputs whose values are already computed."""
        for i, name in enumerate(self.writer.program.outputs):
            if name in values:
                place = self.nest.place_of(name, self.writer.shapes)
                self._store(i, flat(place, self.writer.shapes.of[name]), values[name], condition)

    def _store_accumulator(self, instance: Instance, own: Stored, condition: str) -> None:
        """Write the store of a block's accumulator."""
        writer, address = self.writer, flat(self.nest.place, self.nest.shape)
        accumulator = writer.known(instance)
        assert accumulator
        at = writer.index(address, in_lane=accumulator.varies)
        if own.is_across:
            at = f"{at} + share * {writer.arguments.size(product(own.shape))}"
        elif own.shares != 1:
            at = "share" if at == "0" else f"{in_parentheses(at)} * {writer.arguments.size(own.shares)} + share"
        each = f"EACH({writer.lanes.width}) " if accumulator.varies else ""
        head = f"if ({condition}) " if condition else ""
        writer.line(f"{head}{each}store_accumulator({own.pointer}, {at}, {accumulator.lane});")

    def _store(self, output: int, address: Index, value: Reference, condition: str) -> None:
        writer, head = self.writer, f"if ({condition}) " if condition else ""
        if not writer.lanes.vary(address):
            writer.line(f"{head}put_one({self.leaving}, {writer.address(f'y{output}', address)}, {value.lane});")
        elif writer.is_contiguous(address):
            if not value.varies:
                kind = NUMBER[writer.program.dtypes[writer.program.outputs[output]]]
                value = writer.declare(kind, value.text, True)
            writer.line(f"{head}put({self.leaving}, {writer.address(f'y{output}', address)}, {value.text});")
        else:
            at = writer.address(f"y{output}", address, in_lane=True)
            writer.line(f"{head}EACH({writer.lanes.width}) put_one({self.leaving}, {at}, {value.lane});")
