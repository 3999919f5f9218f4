"""Open sessions that run fused nodes as their bodies, the ONNX functions that they call, where no kernel is compiled.

The body runs inside a run of the user's session, but in a session of its own; the model of that session is one call of
the function.  The native library runs and closes these sessions (native/body_session.h), without Python.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx
from onnx import helper

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.ir.protos import subgraphs
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.kernel_failures import Place, place_of
from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec


@dataclass(frozen=True)
class Body:
    """A node without names, the functions that it calls, and opset imports, as bytes that need no model in memory."""

    node: bytes
    functions: tuple[bytes, ...]
    opsets: tuple[tuple[str, int], ...]
    ir_version: int


# Nodes with one place can have inputs of different dtypes, and then call functions that differ in their Casts.
_bodies: Final[dict[Place, list[Body]]] = {}
Types = tuple[tuple[str, int], ...]  # the inputs' dtypes and ranks
# The addresses of sessions that are opened before a run needs them.
_early: Final[dict[Place, dict[Types, Future[int]]]] = {}
# The dtypes of the inputs of bodies that run before they are needed.  On zeros these run without an error; integers, as
# indices and lengths, may not.
RUN_ON_ZEROS: Final = ("float16", "float32", "float64", "int8", "uint8")
DYNAMIC_SIZE: Final = 16  # the dynamic dims of their inputs
MAX_ZEROS: Final = 1 << 26  # bytes of their inputs
_lock: Final = threading.Lock()


def keep_bodies(model: onnx.ModelProto, nodes: Iterable[tuple[FusedNode, onnx.NodeProto]], device: Device) -> None:
    """Store the bodies (ONNX functions) of fused nodes, to run where a kernel fails; equal nodes share one body."""
    functions = {each.name: each for each in model.functions if each.domain == DOMAIN}
    opsets = tuple((each.domain, each.version) for each in model.opset_import)
    for node, proto in nodes:
        if proto.op_type not in functions:
            continue
        call = onnx.NodeProto()
        call.CopyFrom(proto)
        for names in ("name", "input", "output"):
            call.ClearField(names)
        called = tuple(each.SerializeToString() for each in _called(proto.op_type, functions, set()))
        body = Body(call.SerializeToString(), called, opsets, model.ir_version)
        of_place = _bodies.setdefault(place_of(node, device), [])
        if body not in of_place:
            of_place.append(body)


def _called(name: str, functions: dict[str, onnx.FunctionProto], seen: set[str]) -> Iterator[onnx.FunctionProto]:
    """Yield a function, and the functions that it calls, directly or not."""
    if name in functions and name not in seen:
        seen.add(name)
        yield functions[name]
        for node in _nodes(functions[name].node):
            if node.domain == DOMAIN:
                yield from _called(node.op_type, functions, seen)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _nodes(graph.node)


def has_body(node: FusedNode, device: Device) -> bool:
    """Return whether `keep_bodies` has stored the body of a node: the ONNX function that the node calls."""
    return place_of(node, device) in _bodies


def open_body(node: FusedNode, inputs: Sequence[TensorSpec], provider: str, device: Device) -> int:
    """Return the address of a session that runs the body of a node for inputs of these dtypes and ranks.

    Raises NativeError if onnxruntime refuses the body.
    """
    place = place_of(node, device)
    with _lock:
        early = _early.get(place, {}).pop(_types(inputs), None)
    if early is not None and not early.cancel():
        with suppress(Exception):  # it could not be opened early
            return early.result()
    return _opened(place, inputs, provider, device)


def _types(inputs: Sequence[TensorSpec]) -> Types:
    return tuple((spec.dtype, len(spec.shape)) for spec in inputs)


class EarlySessions:
    """The sessions for the bodies of nodes that a thread opens before runs need them; equal nodes share one.

    Each body runs once on zeros.  A run that needs a session which is being opened waits for it.
    """

    def __init__(self, nodes: Iterable[tuple[FusedNode, Sequence[TensorSpec]]], provider: str, device: Device) -> None:
        """Store what `open` needs; a dynamic dim of the nodes' inputs with the number k is written as -1 - k."""
        self._nodes, self._provider, self._device = nodes, provider, device
        self._found: list[tuple[Place, Sequence[TensorSpec], Future[int]]] = []
        self._is_closed, self._is_open = threading.Event(), threading.Event()

    def open(self) -> None:
        """Open the sessions that no run has opened, until `close` is called."""
        try:
            self._note()
            for place, inputs, opened in self._found:
                if not self._is_closed.is_set() and opened.set_running_or_notify_cancel():
                    self._open_one(place, inputs, opened)
        finally:
            self._is_open.set()

    def _note(self) -> None:
        for node, inputs in self._nodes:
            place, types = place_of(node, self._device), _types(inputs)
            with _lock:
                of_place = _early.setdefault(place, {})
                if place in _bodies and types not in of_place:
                    of_place[types] = Future()
                    self._found.append((place, inputs, of_place[types]))

    def _open_one(self, place: Place, inputs: Sequence[TensorSpec], opened: Future[int]) -> None:
        try:
            body = _opened(place, inputs, self._provider, self._device)
            _run_on_zeros(body, inputs)
            opened.set_result(body)
        except Exception as error:  # the run that needs the body reports the error
            opened.set_exception(error)

    def close(self) -> None:
        """Close the sessions that no run has needed, once `open` has ended."""
        self._is_closed.set()
        self._is_open.wait()
        for place, inputs, opened in self._found:
            with _lock:
                of_place = _early.get(place, {})
                is_unused = of_place.get(_types(inputs)) is opened
                if is_unused:
                    del of_place[_types(inputs)]
            if is_unused and not opened.cancel() and not opened.exception():
                native.close_body(opened.result())


def _run_on_zeros(body: int, inputs: Sequence[TensorSpec]) -> None:
    dtypes = [spec.dtype for spec in inputs]
    shapes = [tuple(DYNAMIC_SIZE if dim < 0 else dim for dim in spec.shape) for spec in inputs]
    if all(dtype in RUN_ON_ZEROS for dtype in dtypes):
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        if sum(sizes) <= MAX_ZEROS:
            with suppress(native.NativeError):  # sizes that the body refuses
                given = [replace(spec, shape=shape) for spec, shape in zip(inputs, shapes, strict=True)]
                native.run_on_zeros(body, given)


def _opened(place: Place, inputs: Sequence[TensorSpec], provider: str, device: Device) -> int:
    """Open a session for the first body that accepts the dtypes of these inputs, and return its address.

    Raises NativeError, with onnxruntime's error for the last body, if none does.
    """
    *others, last = _bodies[place]
    for body in others:
        with suppress(native.NativeError):
            return native.open_body(provider, device.ordinal, device.tf32, model_of(body, inputs).SerializeToString())
    return native.open_body(provider, device.ordinal, device.tf32, model_of(last, inputs).SerializeToString())


def model_of(body: Body, inputs: Sequence[TensorSpec]) -> onnx.ModelProto:
    """Return a model whose only node is `body.node`, with inputs i0, i1, ... of these dtypes and ranks."""
    node = onnx.NodeProto.FromString(body.node)
    types = next(list(each.ints) for each in node.attribute if each.name == "output_types")
    given = [
        helper.make_tensor_value_info(f"i{i}", DTYPE_NUMBERS[spec.dtype], [None] * len(spec.shape))
        for i, spec in enumerate(inputs)
    ]
    made = [helper.make_tensor_value_info(f"o{i}", dtype, None) for i, dtype in enumerate(types)]
    node.input[:] = [each.name for each in given]
    node.output[:] = [each.name for each in made]
    return helper.make_model(
        helper.make_graph([node], "body", given, made),
        functions=[onnx.FunctionProto.FromString(each) for each in body.functions],
        opset_imports=[helper.make_opsetid(*each) for each in body.opsets],
        ir_version=body.ir_version,
    )
