"""What regions.py times: named regions of networks, and programs at random, as fused nodes with their operands."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx.numpy_helper
from named_regions import NamedRegion, draw

from onnxfuse import optimize
from onnxfuse.ir.dtypes import Array
from onnxfuse.kernels.region.operators import BYTES
from onnxfuse.kernels.region.program import Program, parse
from onnxfuse.kernels.region.shapes import infer
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.region_operators import ELEMENTWISE, GATHERS, REDUCTIONS
from onnxfuse.rewrite.replace import REGION
from onnxfuse.runtime.fused_calls import read_calls
from onnxfuse.runtime.plan import FusedNode

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A fused node, and the tensors that it reads and writes, by name."""

    node: FusedNode
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def program(self) -> Program:
        """What the node computes."""
        return parse(self.node)

    def shapes(self, known: Mapping[str, tuple[int, ...]]) -> Shapes:
        """Return the shapes of all values of the program, from those of tensors."""
        sizes = Sizes()
        given = {name: sizes.read(known[t]) for name, t in zip(self.node.operands, self.inputs, strict=True)}
        found = infer(self.program, given, sizes).of
        return {name: tuple(int(sizes.value(dim)) for dim in shape) for name, shape in found.items()}


@dataclass(frozen=True)
class Problem:
    """A graph of regions with the values of its inputs."""

    name: str
    model: str
    parts: tuple[Part, ...]
    operands: Mapping[str, Array]
    outputs: tuple[str, ...]
    inexact: float = 0.0  # as NamedRegion has it
    scale: float = 0.0  # how large values become on the way; 0 if only the outputs tell

    def tensors(self) -> Shapes:
        """Return the shapes of all tensors: the operands, and what the parts write."""
        found = {name: each.shape for name, each in self.operands.items()}
        for part in self.parts:
            values = part.shapes(found)
            found |= {t: values[name] for t, name in zip(part.outputs, part.program.outputs, strict=True)}
        return found

    def dtype(self, tensor: str) -> str:
        """Return the dtype of a tensor."""
        for part in self.parts:
            if tensor in part.outputs:
                return part.node.output_dtypes[part.outputs.index(tensor)]
        return self.operands[tensor].dtype.name

    def moved(self) -> int:
        """Return the bytes that must be moved: what is needed of each operand once, and each output once."""
        shapes, needed = self.tensors(), dict[str, int]()
        for part in self.parts:
            values = part.shapes(shapes)
            for name, count in elements_read(part.program, values).items():
                tensor = part.inputs[part.node.operands.index(name)]
                needed[tensor] = needed.get(tensor, 0) + count
        read = sum(min(needed[t], math.prod(shapes[t])) * BYTES[self.dtype(t)] for t in self.operands if t in needed)
        return read + sum(math.prod(shapes[t]) * BYTES[self.dtype(t)] for t in self.outputs)


def elements_read(program: Program, shapes: Shapes) -> dict[str, int]:
    """Return of how many elements of each operand the outputs are made, at most.

    A Slice, Split or Gather needs no more elements than it gives, a reduction all elements of each of its results.
    """
    needed = {name: math.prod(shapes[name]) for name in program.outputs}
    for operation in reversed(program.operations):
        out = operation.outputs[0]
        wanted = sum(needed.get(name, 0) for name in operation.outputs)
        for i, name in enumerate(operation.inputs):
            count = math.prod(shapes[name])
            if operation.name in REDUCTIONS:
                wanted = -(-wanted * count // max(1, math.prod(shapes[out])))
            elif operation.name in ELEMENTWISE or (operation.name in GATHERS and i == 1):
                wanted = max(wanted, needed.get(name, 0))
            needed[name] = min(count, needed.get(name, 0) + wanted)
    return {name: count for name, count in needed.items() if name in program_operands(program)}


def program_operands(program: Program) -> set[str]:
    """Return the values that a program reads and does not compute."""
    return {name for each in program.operations for name in each.inputs if name not in program.producers}


def named_problem(region: NamedRegion, values: Callable[[onnx.ModelProto], dict[str, Array]] = draw) -> Problem:
    """Return the regions that a named graph becomes.  Raises ValueError where there is anything else."""
    model = region.proto()
    fused, _ = optimize(model, verify=False)
    calls = read_calls(fused)
    kinds = [node.op_type for node in fused.graph.node if node.domain != calls[0].proto.domain] if calls else ["none"]
    kinds += [call.node.fusion for call in calls if call.node.fusion != REGION]
    if kinds or region.kernels not in (0, len(calls)):
        raise ValueError(
            f"{region.name} becomes {len(calls)} regions and {kinds}; required {region.kernels} and no other"
        )
    parts = tuple(Part(call.node, tuple(call.proto.input), tuple(call.proto.output)) for call in calls)
    arrays = values(model) | {t.name: onnx.numpy_helper.to_array(t) for t in fused.graph.initializer}
    used = {name for part in parts for name in part.inputs}
    operands = {name: array for name, array in arrays.items() if name in used}
    outputs = tuple(each.name for each in fused.graph.output)
    return Problem(region.name, region.model, parts, operands, outputs, region.inexact)


def generated_problems(count: int, least: int, most: int) -> Iterator[Problem]:
    """Yield the programs of the first seeds whose tensors have elements, with `least` to `most` elements in tensors."""
    tests = Path(__file__).resolve().parents[1] / "tests"
    sys.path.extend([str(tests / "kernels"), str(tests)])
    from region_random import Extent, random_program

    extent, found, seed = Extent(least=least, most=most, largest=30000.0), 0, -1
    while found < count:
        seed += 1
        program: Any = random_program(seed, extent)
        if any(0 in each.shape for each in program.operands.values()):
            continue
        problem = Problem(
            f"seed {seed}", "generated", (_part(program),), program.operands, _outputs(program), scale=program.scale
        )
        if all(math.prod(shape) for shape in problem.tensors().values()):
            found += 1
            yield problem


def _part(program: Any) -> Part:
    node: FusedNode = program.node()
    return Part(node, tuple(program.operands), _outputs(program))


def _outputs(program: Any) -> Sequence[str]:
    return tuple(program.outputs)
