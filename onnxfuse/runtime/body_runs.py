"""Run a fused node as its body, the ONNX function that the node calls, where its kernel is not compiled.

The body runs inside a run of the user's session, but in a session of its own; the model of that session is one call of
the function.  On a GPU, that session has a stream of its own.  Its work follows earlier work of the node's stream, and
precedes later work, so that a CUDA graph captures the body's kernels too.  Runs are waited for until a graph captures
one.  Equal nodes share a session, but each stream has its own, because the runs of a session share its memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
from onnx import helper

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.ir.protos import subgraphs
from onnxfuse.runtime.cuda_driver import SideStream, is_capturing
from onnxfuse.runtime.hosts import numbers_of
from onnxfuse.runtime.kernel_failures import Place, place_of
from onnxfuse.runtime.native_library import BodyRequest
from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec
from onnxfuse.runtime.provider_names import CPU

if TYPE_CHECKING:
    import onnxruntime as ort

DEVICE_TYPES: Final = {CPU: "cpu"}  # type of memory by provider; other providers use GPU memory


@dataclass(frozen=True)
class Body:
    """A node without names, the functions that it calls, and opset imports, as bytes that need no model in memory."""

    node: bytes
    functions: tuple[bytes, ...]
    opsets: tuple[tuple[str, int], ...]
    ir_version: int


@dataclass
class BodySession:
    """A session that runs a body (a node's ONNX function), and on a GPU the stream that it uses.

    The stream is not the node's, because onnxruntime destroys the streams of a session before the nodes, and this
    session closes with its node.  Runs are waited for, because onnxruntime frees the host memory from which operators
    such as LSTM copy to the GPU only at the end of such runs; a CUDA graph reads this memory in each replay.
    """

    session: ort.InferenceSession
    stream: SideStream | None
    outputs: tuple[str, ...]  # their names
    captured: bool = False  # whether a CUDA graph holds a run
    holds_memory: bool = False  # whether host memory of a run is not freed

    def run(self, binding: ort.IOBinding, stream: int) -> None:
        """Run the body on bound inputs, after the earlier and before the later work of `stream`."""
        if self.stream is None:
            self.session.run_with_iobinding(binding, _run_options(waits=False))
            return
        if not self.captured and is_capturing(stream):
            self.captured = True
            self._keep()
        self.holds_memory = True
        with self.stream.in_place_of(stream):
            self.session.run_with_iobinding(binding, _run_options(waits=not self.captured))
        self.holds_memory = self.captured

    def close(self) -> None:
        """Destroy the session, and its stream afterwards."""
        if self.holds_memory:
            self._keep()
            return
        del self.session
        if self.stream is not None:
            self.stream.close()

    def _keep(self) -> None:
        """Keep the session until the process ends, because it holds host memory.

        onnxruntime would free the memory in a callback of the stream, where CUDA refuses it, which ends the process.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))


# Nodes with one place can have inputs of different dtypes, and then call functions that differ in their Casts.
_bodies: Final[dict[Place, list[Body]]] = {}
# Whether TF32 is allowed, and the inputs' dtypes and ranks.
Types = tuple[bool, tuple[tuple[str, int], ...]]
SessionKey = tuple[int, Types]  # the first is the node's stream
# The sessions that run bodies (ONNX functions of nodes), for all nodes with one place.
_sessions: Final[dict[Place, dict[SessionKey, BodySession]]] = {}
# Those that are opened before a run needs them.
_early: Final[dict[Place, dict[Types, Future[BodySession]]]] = {}
# The dtypes of the inputs of bodies that run before they are needed.  On zeros these run without an error; integers, as
# indices and lengths, may not.
RUN_ON_ZEROS: Final = ("float16", "float32", "float64", "int8", "uint8")
DYNAMIC_SIZE: Final = 16  # the dynamic dims of their inputs
MAX_ZEROS: Final = 1 << 26  # bytes of their inputs


@dataclass(frozen=True)
class _Known:
    """A node that has run as its body: its key, the indices of its inputs that are numbers, and its sessions' keys."""

    place: Place
    numbers: tuple[int, ...]
    sessions: set[SessionKey] = field(default_factory=set)


_known: Final[dict[int, _Known]] = {}  # by the node's number
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


def run_body(request: BodyRequest, read_node: Callable[[], tuple[FusedNode, Device]]) -> None:
    """Run the body (ONNX function) of a node, and copy its outputs to the node's outputs on the node's stream.

    read_node  returns the node and its GPU; it is called at the node's first run alone

    Raises any error of onnxruntime.
    """
    if (known := _known.get(request.kernel)) is None:
        node, device = read_node()
        known = _known[request.kernel] = _Known(place_of(node, device), numbers_of(node))
    body, kind = _session(request, known), DEVICE_TYPES.get(request.provider, "cuda")
    binding = body.session.io_binding()
    for i, (spec, address) in enumerate(zip(request.inputs, request.addresses, strict=True)):
        if i in known.numbers:
            binding.bind_cpu_input(f"i{i}", np.array(spec.shape, np.int32))
            continue
        binding.bind_input(f"i{i}", kind, request.device, DTYPE_NUMBERS[spec.dtype], spec.shape, address)
    for name in body.outputs:
        binding.bind_output(name, kind, request.device)
    body.run(binding, request.stream)
    for i, value in enumerate(binding.get_outputs()):
        shape = value.shape()
        request.put(i, shape, value.data_ptr() if math.prod(shape) else 0)


def forget_node(kernel: int) -> None:
    """Close the sessions that ran the body (the ONNX function) of a node, except those that other nodes use."""
    if known := _known.pop(kernel, None):
        others = [each.sessions for each in list(_known.values()) if each.place == known.place]
        of_place = _sessions.get(known.place, {})
        for key in known.sessions.difference(*others):
            if body := of_place.pop(key, None):
                body.close()
        if not of_place:
            _sessions.pop(known.place, None)


def _session(request: BodyRequest, known: _Known) -> BodySession:
    """Return the session that runs a body (a node's ONNX function) for a stream, and for inputs of these types."""
    types = _types(request.tf32, request.inputs)
    key = request.stream, types
    with _lock:
        known.sessions.add(key)
        of_place = _sessions.setdefault(known.place, {})
        if key not in of_place:
            where = request.provider, request.device, request.tf32
            if early := _early.get(known.place, {}).pop(types, None):
                with suppress(Exception):  # it could not be opened early
                    of_place[key] = early.result()
            if key not in of_place:
                of_place[key] = _opened(known.place, request.inputs, *where)
        return of_place[key]


def _types(tf32: bool, inputs: Sequence[TensorSpec]) -> Types:
    return tf32, tuple((spec.dtype, len(spec.shape)) for spec in inputs)


def open_early(node: FusedNode, inputs: Sequence[TensorSpec], provider: str, device: Device) -> None:
    """Open the session for the body of a node, and of nodes equal to it, before a run needs it.

    The body runs once on zeros, because onnxruntime loads libraries and kernels in the first run: 0.1 s for cuBLAS.  A
    run that needs the session meanwhile waits for it.

    inputs  dynamic dim number k is written as -1 - k
    """
    place, types, opened = place_of(node, device), _types(device.tf32, inputs), Future[BodySession]()
    with _lock:
        of_place = _early.setdefault(place, {})
        if types in of_place or place not in _bodies or place in _sessions:
            return
        of_place[types] = opened
    try:
        body = _opened(place, inputs, provider, device.ordinal, device.tf32)
        if provider not in DEVICE_TYPES:
            _run_on_zeros(body, inputs)
        opened.set_result(body)
    except Exception as error:  # the run that needs the body reports the error
        opened.set_exception(error)


def _run_on_zeros(body: BodySession, inputs: Sequence[TensorSpec]) -> None:
    shapes = [tuple(DYNAMIC_SIZE if dim < 0 else dim for dim in spec.shape) for spec in inputs]
    dtypes = [spec.dtype for spec in inputs]
    if all(dtype in RUN_ON_ZEROS for dtype in dtypes):
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        if sum(sizes) <= MAX_ZEROS:
            zeros = (np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
            with suppress(Exception):  # sizes that the body refuses
                body.session.run(None, {f"i{i}": value for i, value in enumerate(zeros)})


def close_early(nodes: Iterable[FusedNode], device: Device) -> None:
    """Close the sessions that were opened early for these nodes, and that no run has needed."""
    with _lock:
        unused = [_early.pop(place, {}) for place in {place_of(node, device) for node in nodes}]
    for of_place in unused:
        for opened in of_place.values():
            with suppress(Exception):  # it could not be opened
                opened.result().close()


def _opened(place: Place, inputs: Sequence[TensorSpec], provider: str, ordinal: int, tf32: bool) -> BodySession:
    """Open a session for the first body that accepts the dtypes of these inputs.

    Raises onnxruntime's error for the last body if none does.
    """
    from onnxfuse.runtime.plain_session import plain_session  # imported here, because planning needs no onnxruntime

    options = _onnxruntime().SessionOptions()
    options.log_severity_level = 4  # a body that does not accept the dtypes is not an error of the user's
    # With memory patterns, the second run allocates memory, maybe while a CUDA graph is captured.
    options.enable_mem_pattern = False
    options.intra_op_num_threads = 1  # the default, one for each processor, would compete with the compiler
    stream = None if provider in DEVICE_TYPES else SideStream()
    with_options = provider, _options(ordinal, tf32, stream)

    def opened(body: Body) -> BodySession:
        session = plain_session(model_of(body, inputs).SerializeToString(), options, [with_options])
        return BodySession(session, stream, tuple(each.name for each in session.get_outputs()))

    *others, last = _bodies[place]
    for body in others:
        with suppress(Exception):  # onnxruntime has several classes of errors, without a common one
            return opened(body)
    try:
        return opened(last)
    except BaseException:
        if stream is not None:
            stream.close()
        raise


def _onnxruntime() -> Any:
    """Return the onnxruntime module, imported only here because planning does not need it."""
    return importlib.import_module("onnxruntime")


@functools.cache
def _run_options(waits: bool) -> Any:
    """Return options for runs that are waited for or not, and that onnxruntime captures in no CUDA graph of its own."""
    options = _onnxruntime().RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not waits)))
    options.add_run_config_entry("gpu_graph_id", "-1")  # onnxruntime's Python code takes 40 us to see that it is absent
    return options


def _options(ordinal: int, tf32: bool, stream: SideStream | None) -> dict[str, Any]:
    """Return the options of the provider: the user's options that change results, and the stream to run on."""
    if stream is None:
        return {}
    device = {"device_id": str(ordinal)} if ordinal else {}  # onnxruntime logs a warning about device 0
    return {"use_tf32": str(int(tf32)), **device, "user_compute_stream": str(stream.handle)}


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
