"""Round a model otherwise: its inputs and its results move by an ulp, each element by itself.

Where float32 moves by an ulp of float16, numbers that float16 rounds to 0 become 0, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
from drafts import RESIZING, inferred, types_in, types_in_onnxruntime
from onnx import TensorProto, helper, numpy_helper
from sessions import Session

from onnxfuse.ir.execution_order import in_execution_order
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.protos import nodes, tensors

SHAKES, SHAKES_OF_CONVERSIONS = 4, 10  # half precision has larger tails
ULP = 2.0**-23
NO_RANDOM_NUMBERS = 22  # the opset from which on onnxruntime 1.32 has no kernel for RandomUniformLike
ULPS = {TensorProto.FLOAT: ULP, TensorProto.FLOAT16: 2.0**-10}  # onnxruntime multiplies no bfloat16
HALF_ULPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # in these, a model that is converted to them rounds
ROUNDED_TO_ZERO = 2.0**-25  # by float16, and all smaller numbers


def nudged(feeds: Mapping[str, Any], by: float) -> dict[str, Any]:
    """Return the inputs with each float32 moved by an ulp, up or down at random; float16 too if `by` is as much."""
    numbers = np.random.default_rng(1)
    kinds = [np.float32, *([np.float16] if abs(by) >= ULPS[TensorProto.FLOAT16] else [])]
    moved = {}
    with np.errstate(all="ignore"):
        for name, value in feeds.items():
            signs = numbers.choice([-1, 1], value.shape)
            new = np.asarray(value * (1 + 2 * by * signs), value.dtype)  # of a scalar it is not an array
            moved[name] = new if value.dtype in kinds else value
    return moved


def rounded_to(half: str, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with each float32 rounded to a half precision, as a conversion to it does first."""
    with np.errstate(all="ignore"):
        return {
            name: value.astype(half).astype(np.float32) if value.dtype == np.float32 else value
            for name, value in feeds.items()
        }


def rounded_otherwise(
    model: onnx.ModelProto, seed: int, dtypes: Sequence[int], ulps: Mapping[int, float] = ULPS
) -> Iterator[Session]:
    """Yield the model with each element of results of these dtypes moved by up to an ulp at random, in bodies too.

    Functions are inlined, and nodes put in order, so that the dtype of each result is known.  Each element moves by
    itself: among scores that are offset by 10000, that is what changes their softmax.
    """
    model = in_execution_order(inline_functions(model).model)
    typed, opset = inferred(model) or model, next((each.version for each in model.opset_import if not each.domain), 0)
    of_others = types_in_onnxruntime(model) if any(node.domain for node in model.graph.node) else {}
    for shake in range(SHAKES if ulps is ULPS else SHAKES_OF_CONVERSIONS):
        shaken = onnx.ModelProto()
        shaken.CopyFrom(typed)
        if ulps is not ULPS:
            _move_weights(shaken, np.random.default_rng(seed + shake), ulps)
        _shake(shaken.graph, of_others, Random(seed + shake), dtypes, opset, ulps)
        yield Session(shaken)


def _move_weights(model: onnx.ModelProto, numbers: np.random.Generator, ulps: Mapping[int, float]) -> None:
    """Move weights as a conversion rounds them, each element by itself, or to 0.

    Single numbers stay, as exponents are such, and scales of sizes, which moved ones would not fit.
    """
    half = next(name for name, ulp in HALF_ULPS.items() if ulp == ulps[TensorProto.FLOAT])
    scales = {name for node in nodes(model.graph) if node.op_type in RESIZING for name in node.input[1:]}
    for tensor in tensors(model.graph):
        if tensor.data_type in ulps and tensor.dims and tensor.name not in scales:
            array = numpy_helper.to_array(tensor)
            with np.errstate(all="ignore"):
                moved = array * (1 + ulps[tensor.data_type] * numbers.uniform(-1, 1, array.shape))
                moved = np.where((array.astype(half) == 0) & (array.size > 1), array * 0, moved)
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(moved).astype(array.dtype), tensor.name))


def _shake(
    graph: onnx.GraphProto, outside: Mapping[str, onnx.TypeProto], random: Random, dtypes: Sequence[int], opset: int,
    ulps: Mapping[int, float],
) -> None:  # fmt: skip
    known = {**outside, **types_in(graph)}
    present = list(graph.node)
    del graph.node[:]
    del graph.value_info[:]
    for node in present:
        moves = []
        for index, name in enumerate(node.output):
            is_like_input = name not in known and node.domain and "Linear" not in node.op_type  # others' in a body
            typed = node.input[0] if is_like_input else name
            dtype = known[typed].tensor_type.elem_type if typed in known else TensorProto.UNDEFINED
            if name and dtype in dtypes and node.op_type != "Constant":  # an exponent of 2.0000002 makes NaN
                own = f"{name}::{random.getrandbits(64)}"  # a body may have a value of the same name
                node.output[index] = f"{own}::exact"
                moves += _move(node.output[index], own, dtype, random, opset, ulps[dtype])
                moves[-1].output[0] = name
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _shake(attribute.g, known, random, dtypes, opset, ulps)
        graph.node.extend([node, *moves])


def _move(source: str, target: str, dtype: int, random: Random, opset: int, ulp: float) -> list[onnx.NodeProto]:
    """Return nodes that move a tensor by up to an ulp, element by element."""
    constants = {"factor": np.float32(ulp), "zero": np.float32(0), "one": np.float32(1),
                 "smallest": np.float32(ROUNDED_TO_ZERO),
                 "apart": np.float32(random.uniform(9, 99))}  # fmt: skip
    drawn = [
        _node("RandomUniformLike", target, "shaped", source, dtype=TensorProto.FLOAT, low=-1.0, high=1.0,
              seed=random.uniform(0, 2**16))
    ]  # fmt: skip
    sines = [  # of numbers far apart, as onnxruntime draws none from opset 22 on
        _node("Size", target, "size", source), _node("Cast", target, "count", "::size", to=TensorProto.FLOAT),
        _node("Range", target, "numbers", "::zero", "::count", "::one"),
        _node("Add", target, "from_one", "::numbers", "::one"), _node("Mul", target, "angles", "::from_one", "::apart"),
        _node("Sin", target, "drawn", "::angles"),
        _node("Shape", target, "shape", source),
        _node("Reshape", target, "shaped", "::drawn", "::shape", allowzero=1),
    ]  # fmt: skip
    made = [_node("Constant", target, name, value=numpy_helper.from_array(np.asarray(each)))
            for name, each in constants.items()]  # fmt: skip
    moved = [_node("Mul", target, "small", "::shaped", "::factor"), _node("Add", target, "wide", "::small", "::one"),
             _node("Cast", target, "moving", "::wide", to=dtype)]  # fmt: skip
    if dtype == TensorProto.FLOAT and ulp == HALF_ULPS["float16"]:
        moved += [_node("Abs", target, "absolute", source),
                  _node("Greater", target, "stays", "::absolute", "::smallest"),
                  _node("Cast", target, "one_or_zero", "::stays", to=dtype),
                  _node("Mul", target, "rounded", source, "::one_or_zero")]  # fmt: skip
        source = f"{target}::rounded"
    return [
        *made,
        *(sines if opset >= NO_RANDOM_NUMBERS else drawn),
        *moved,
        helper.make_node("Mul", [source, f"{target}::moving"], [target]),
    ]


def _node(op: str, target: str, output: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    """Return a node beside a tensor; names that begin with "::" are its own."""
    named = [f"{target}{name}" if name.startswith("::") else name for name in inputs]
    return helper.make_node(op, named, [f"{target}::{output}"], **attributes)
