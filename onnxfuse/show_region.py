"""Show the regions of a fused model, their programs and their kernels: `onnxfuse show region MODEL`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from onnxfuse.algebra.sizes import Shape, symbol
from onnxfuse.errors import OnnxfuseError, UsageError, printable
from onnxfuse.kernels.epilogue_node import is_joined, joined
from onnxfuse.kernels.region.program import Operation, Program, parse
from onnxfuse.kernels.region.shapes import infer
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.region.wrapped import wrapped
from onnxfuse.printing import counted
from onnxfuse.rewrite.replace import REGION
from onnxfuse.runtime.call_inputs import dim_names, inputs_of
from onnxfuse.runtime.expressions import Expressions
from onnxfuse.runtime.fused_calls import Call, read_calls, read_model
from onnxfuse.runtime.gpu_kinds import describe, named_gpus
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.support import why_no_kernel
from onnxfuse.runtime.symint import Trace
from onnxfuse.runtime.template import Template, Variant, concrete, make_template

SHOWN_OPERATORS: Final = 6  # maximum number of operators shown per region, in the list of all regions
DIVISIBLE: Final = 5040  # dynamic dims are assumed to be multiples of this number, because it has many divisors


def show_regions(path: Path, node: str | None, cuda: bool, arch: str) -> Iterator[str]:
    """Yield a line for each kind of region of a fused model.  If `node` is given, yield the program of this node.

    With `cuda`, yield the node's CUDA source for `arch` instead.  Raises UsageError if the model has no regions, or
    none of this name; OnnxfuseError if no kernel can be generated.
    """
    calls = [call for call in read_calls(read_model(path)) if call.node.fusion == REGION or is_joined(call.node)]
    if not calls:
        raise UsageError(f"'{path}' has no regions; `onnxfuse optimize` makes them of what no pattern names")
    if node is None:
        return map(printable, _summaries(calls))
    call = _named(calls, node)
    return _kernels_text(call, named_gpus([arch], [], [])[0]) if cuda else map(printable, _program_text(call))


def _named(calls: Sequence[Call], name: str) -> Call:
    """Return the region of this name, or with an output of this name."""
    for call in calls:
        if name == call.node.name or name in call.proto.output:
            return call
    names = [known for call in calls for known in (call.node.name, *call.proto.output)]
    near = get_close_matches(name, names, 1)
    raise UsageError(f"there is no region '{name}'" + (f". Did you mean '{near[0]}'?" if near else " in the model"))


# --- programs ---------------------------------------------------------------------------------------------------------


def _summaries(calls: Sequence[Call]) -> Iterator[str]:
    """Yield a line per group of regions with equal operators: the first name, the number of others, and `_facts()`."""
    alike: dict[object, list[Call]] = {}
    for call in calls:
        names = tuple(operation.name for operation in _parts(call)[0].operations)
        alike.setdefault((call.node.fusion, names, _facts(call)), []).append(call)
    for first, *more in alike.values():
        yield f"{first.node.name}{f' and {len(more)} more' if more else ''}: {_facts(first)}"


def _facts(call: Call) -> str:
    """Return a text: the numbers of operators, operands and outputs of a region, and its first operators."""
    names = [operation.name for operation in _parts(call)[0].operations if operation.name != "Constant"]
    shown = " ".join(names[:SHOWN_OPERATORS]) + (" ..." if len(names) > SHOWN_OPERATORS else "")
    numbers = (len(names), "operator"), (len(call.proto.input), "operand"), (len(call.proto.output), "output")
    return f"{', '.join(counted(number, what) for number, what in numbers)}: {shown}"


def _parts(call: Call) -> tuple[Program, dict[str, str], Sequence[str]]:
    """Return the program of a region, or of a fused node's epilogue; what its operands are; and its outputs."""
    inputs = list(call.proto.input)
    if not is_joined(call.node):
        program = parse(call.node)
        return program, dict(zip(call.node.operands, inputs, strict=True)), program.outputs
    both = joined(call.node)
    read = [f"{call.node.fusion}({', '.join(inputs[: both.own])})", *inputs[both.own :]]
    others = [f"result {i} of {call.node.fusion}" for i in range(2, len(both.product.output_dtypes) + 1)]
    return parse(both.behind), dict(zip(both.behind.operands, read, strict=True)), [*both.outputs, *others]


def _program_text(call: Call) -> Iterator[str]:
    """Yield the lines that show a region's program, the list of its operators."""
    yield f"{call.node.name}: {' '.join(call.proto.input)} -> {' '.join(call.proto.output)}"
    yield from (f"  {line}" for line in _values_text(call, call.proto.output))


def _values_text(call: Call, stored: Sequence[str]) -> Iterator[str]:
    """Yield a line for each value of the program, with dtype, shape and operator, and one for each stored tensor."""
    program, operands, outputs = _parts(call)
    shapes = _shapes(call, program)
    typed = {name: f"{dtype}{_shape_text(shapes, name)}" for name, dtype in program.dtypes.items()}
    for name, tensor in operands.items():
        yield f"{name}: {typed[name]} = {tensor}"
    for operation in program.operations:
        left = ", ".join(f"{name}: {typed[name]}" for name in operation.outputs)
        yield f"{left} = {_operation_text(operation)}"
    for own, tensor, name in zip(stored, call.proto.output, outputs, strict=True):
        yield f"{own} = {name}{f', which is {tensor}' if own != tensor else ''}"


def _operation_text(operation: Operation) -> str:
    if operation.name == "Constant":
        return str(operation.attributes["value"])
    attributes = [f"{name}={value}" for name, value in operation.attributes.items()]
    return f"{operation.name}({', '.join([*operation.inputs, *attributes])})"


def _shapes(call: Call, program: Program) -> dict[str, Shape]:
    """Return the shapes of all values, with dynamic dims by name; an empty dict if a rank is unknown.

    It is also empty for an epilogue, because only the code of the fused node knows the shape of its result.
    """
    if is_joined(call.node):
        return {}
    known = {name: shape for name, shape in zip(call.node.operands, call.shapes, strict=True) if shape is not None}
    if len(known) < len(call.shapes):
        return {}
    operands = {
        name: tuple(dim if isinstance(dim, int) else symbol(dim) for dim in shape) for name, shape in known.items()
    }
    trace = Trace(Expressions())
    sizes = Sizes({name: trace.size(i, DIVISIBLE * (i + 1)) for i, name in enumerate(dim_names(call.shapes))})
    try:
        return dict(infer(program, operands, sizes).of)
    except ValueError:  # the program is valid only for some sizes, and not for the assumed ones
        return dict(operands)


def _shape_text(shapes: dict[str, Shape], name: str) -> str:
    if name not in shapes:
        return ""
    return f"[{', '.join(map(str, shapes[name]))}]"


# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernels_text(call: Call, device: Device) -> Iterator[str]:
    """Yield the CUDA source of each kernel of a region, with the variants (plans for some sizes) that launch it.

    The source includes the package's headers types.cuh, activations.cuh and region.cuh, which are not printed.
    """
    template = _template(call, device)
    names = dim_names(call.shapes)
    yield printable(f"// {call.node.name}, for {describe(device)}")
    stored = [f"y{i}" for i in range(len(call.proto.output))]
    yield from (wrapped(f"//   {printable(line)}") for line in _values_text(call, stored))
    for kernel in template.kernels:
        for variant in template.variants:
            if kernel in variant.kernels:
                yield from _variant_text(variant, kernel, names)
        flags = [f"-D{name}={value}" for name, value in sorted(kernel.defines.items())]
        yield f"// nvrtc: {' '.join(flags)}"
        yield kernel.text


def _variant_text(variant: Variant, kernel: Kernel, names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each launch of this kernel in a variant, with the sizes for which the variant was made."""
    at = ", ".join(f"{name}={size}" for name, size in zip(names, variant.hints, strict=True))
    steps = [step for step in concrete(variant.plan).steps if isinstance(step, Launch)]
    for i, step in enumerate(steps, 1):
        if step.kernel == kernel:
            launch = f", launch {i} of {len(steps)}" if len(steps) > 1 else ""
            blocks = f"{step.grid[0]} blocks of {step.block[0]} threads"
            yield f"// variant{f' as at {at}' if at else ''}{launch}: {blocks}"


def _template(call: Call, device: Device) -> Template:
    """Return the template of a region.  Raises OnnxfuseError, with the reason, where it has no kernel."""
    inputs, host = inputs_of(call), find_host(call.node.fusion)
    why = why_no_kernel(call, device) or ("the rank of an operand is not known" if inputs is None else None)
    if why or inputs is None or host is None:
        raise OnnxfuseError(f"no kernel is generated for '{call.node.name}': {why}")
    return make_template(host, call.node, inputs, device)
