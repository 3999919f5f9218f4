"""Checks that protobuf lacks: strings are UTF-8, dtypes are known, dims are nonnegative, stored values are complete."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import onnx
import onnx.numpy_helper
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.ir.protos import ONNX_DOMAINS, without_initializers

KNOWN_DTYPES: Final = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
PACKED_BITS: Final = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
MAX_DENSE_BYTES: Final = 2**31  # maximum bytes of a sparse tensor after onnxruntime makes it dense
MAX_RANK: Final = 64  # the maximum rank of numpy's arrays
MAX_ELEMENTS: Final = 2**62  # maximum elements of a tensor, so that numpy can hold its byte count
CONSTANT_VALUES: Final = {  # attributes of a Constant, and their types; exactly one of them holds its value
    "value": AttributeProto.TENSOR,
    "sparse_value": AttributeProto.SPARSE_TENSOR,
    "value_float": AttributeProto.FLOAT,
    "value_floats": AttributeProto.FLOATS,
    "value_int": AttributeProto.INT,
    "value_ints": AttributeProto.INTS,
    "value_string": AttributeProto.STRING,
    "value_strings": AttributeProto.STRINGS,
}
# Attributes that hold a data type.
DTYPE_ATTRIBUTES: Final = frozenset({"to", "dtype", "output_dtype", "output_datatype"})
TYPED_FIELDS: Final = ("float_data", "int32_data", "int64_data", "uint64_data", "double_data", "string_data")


def validate(model: onnx.ModelProto, name: str) -> None:
    """Raise ModelError unless every part of the model can be read.  `name` is the model's name in the message.

    The values of external tensors are not checked, and large inline values are only counted.
    """
    if not _is_decodable(model):
        raise ModelError(f"{name} is damaged: the text in field '{_undecodable(model)}' is not UTF-8; export it again")
    try:
        for part in (model.graph, *model.functions):
            _check_part(part)
    except ModelError as error:
        raise ModelError(f"{name} is not valid ONNX: {error}") from error


def _check_part(part: onnx.GraphProto | onnx.FunctionProto) -> None:
    ranks: dict[str, int] = {}  # ranks of the initializers, by name
    if isinstance(part, onnx.GraphProto):
        for tensor in part.initializer:
            check_tensor(tensor)
            ranks[tensor.name] = len(tensor.dims)
        for sparse in part.sparse_initializer:
            _check_sparse(sparse)
        for info in (*part.input, *part.output):
            _check_type(info.type, info.name)
    for info in part.value_info:
        _check_type(info.type, info.name)
    for node in part.node:
        for attribute in node.attribute:
            _check_attribute(node, attribute)
        if node.op_type == "Constant" and node.domain in ONNX_DOMAINS:
            _check_constant(node)
        if node.op_type in ("Reshape", "Tile") and node.domain in ONNX_DOMAINS:
            _check_sizes(node, ranks)


def label(node: onnx.NodeProto) -> str:
    """Return a node's name for messages: its name, or else its operator and first output."""
    return f"node '{node.name}'" if node.name else f"the {node.op_type} node of '{next(iter(node.output), '')}'"


def size_of(tensor: TensorProto) -> int:
    """Return the number of bytes that the tensor's dtype and dims require.  Raises ModelError if they are not valid."""
    if tensor.data_type not in KNOWN_DTYPES:
        raise ModelError(f"tensor '{tensor.name}' has the unknown data type {tensor.data_type}; expected one of ONNX's")
    return int(-(-element_count(tensor.dims, f"tensor '{tensor.name}'") * _bits(tensor.data_type) // 8))


def element_count(dims: Iterable[int], what: str) -> int:
    """Return the product of dims.  Raises ModelError for negative dims and for more elements than memory can hold."""
    sizes = list(dims)
    if len(sizes) > MAX_RANK:
        raise ModelError(f"{what} has {len(sizes)} dims; expected at most {MAX_RANK}")
    if any(size < 0 for size in sizes):
        raise ModelError(f"{what} has the dims {sizes}; expected none below 0")
    if math.prod(max(size, 1) for size in sizes) > MAX_ELEMENTS:
        raise ModelError(f"{what} has the dims {sizes}, which no memory holds; expected at most 2**62 elements")
    return math.prod(sizes)


def check_tensor(tensor: TensorProto) -> None:
    """Raise ModelError unless dtype and dims are valid, and the message holds as many values as they require."""
    required, what = size_of(tensor), f"tensor '{tensor.name}'"
    if tensor.HasField("segment"):
        raise ModelError(f"{what} is stored as a segment of a tensor; expected a whole tensor")
    if uses_external_data(tensor):
        if tensor.data_type == TensorProto.STRING:
            raise ModelError(f"{what} holds strings in another file; expected them in the model")
        return
    found_bytes = len(tensor.raw_data)
    filled = ["raw_data"] * bool(found_bytes) + [field for field in TYPED_FIELDS if len(getattr(tensor, field))]
    if len(filled) > 1:
        raise ModelError(f"{what} holds values in {' and '.join(filled)}; expected one of these fields")
    if tensor.data_type == TensorProto.STRING:
        found, wanted = len(tensor.string_data), element_count(tensor.dims, what)
        if filled not in ([], ["string_data"]) or found != wanted:
            raise ModelError(f"{what} holds {found} strings; its shape requires {wanted}")
        if (index := next((i for i, text in enumerate(tensor.string_data) if not _is_text(text)), -1)) >= 0:
            raise ModelError(f"{what} holds the string {tensor.string_data[index]!r}, which is not UTF-8")
    elif filled == ["raw_data"]:
        if found_bytes != required:
            raise ModelError(f"{what} holds {found_bytes} bytes; its dtype and shape require {required}")
    elif required or filled:
        try:
            onnx.numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            values = len(getattr(tensor, filled[0])) if filled else 0
            shape = list(tensor.dims)
            dtype = TensorProto.DataType.Name(tensor.data_type)
            raise ModelError(f"{what} holds {values} values, which make no {dtype} tensor of shape {shape}") from error


def _bits(dtype: int) -> int:
    """Return the number of bits per element of a dtype."""
    packed = PACKED_BITS.get(TensorProto.DataType.Name(dtype))
    return packed or 8 * onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize


def _check_sparse(sparse: onnx.SparseTensorProto) -> None:
    """Raise ModelError unless a sparse tensor is valid: values, indices within the dims, and a bounded dense size."""
    what = f"sparse tensor '{sparse.values.name}'"
    count = element_count(sparse.dims, what)
    check_tensor(sparse.values)
    check_tensor(sparse.indices)
    if (dense := count * _bits(sparse.values.data_type) // 8) > MAX_DENSE_BYTES:
        raise ModelError(f"{what} of dims {list(sparse.dims)} has {dense:,} bytes once dense; expected at most 2 GiB")
    if uses_external_data(sparse.values) or uses_external_data(sparse.indices):
        raise ModelError(f"{what} has its values or indices in another file; expected them in the model's own")
    values, indices = list(sparse.values.dims), list(sparse.indices.dims)
    if len(values) != 1 or indices not in (values, [*values, len(sparse.dims)]):
        raise ModelError(f"{what} has values of shape {values} and indices of shape {indices}, which do not fit")
    if sparse.indices.data_type != TensorProto.INT64:
        raise ModelError(f"{what} has indices of data type {sparse.indices.data_type}; expected int64")
    places = onnx.numpy_helper.to_array(sparse.indices)
    limits = count if places.ndim == 1 else list(sparse.dims)
    if not ((places >= 0) & (places < limits)).all():
        raise ModelError(f"{what} has an index outside its dims {list(sparse.dims)}")


def _check_type(kind: onnx.TypeProto, name: str) -> None:
    """Raise ModelError unless every dtype in a type is known; 0, for a dtype that is not recorded, is allowed."""
    for dtype in _dtypes(kind):
        if dtype and dtype not in KNOWN_DTYPES:
            raise ModelError(f"the type of '{name}' has the unknown data type {dtype}; expected one of ONNX's")


def _dtypes(kind: onnx.TypeProto) -> Iterator[int]:
    match kind.WhichOneof("value"):
        case "tensor_type":
            yield kind.tensor_type.elem_type
        case "sparse_tensor_type":
            yield kind.sparse_tensor_type.elem_type
        case "sequence_type":
            yield from _dtypes(kind.sequence_type.elem_type)
        case "optional_type":
            yield from _dtypes(kind.optional_type.elem_type)
        case "map_type":
            yield kind.map_type.key_type
            yield from _dtypes(kind.map_type.value_type)


def _check_attribute(node: onnx.NodeProto, attribute: AttributeProto) -> None:
    """Raise ModelError unless an attribute's strings are UTF-8 and, if its value is a dtype, this dtype is known."""
    kind = attribute.type
    if kind == AttributeProto.INT:
        names_dtype = attribute.name in DTYPE_ATTRIBUTES and node.domain in ONNX_DOMAINS
        # An attribute that refers to a function's attribute has the value 0.
        if names_dtype and attribute.i not in KNOWN_DTYPES | {TensorProto.UNDEFINED}:
            raise ModelError(f"{label(node)} has {attribute.name}={attribute.i}, which is not a data type of ONNX")
    elif kind in (AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS):
        return
    elif kind in (AttributeProto.STRING, AttributeProto.STRINGS):
        if not (_is_text(attribute.s) and all(map(_is_text, attribute.strings))):
            raise ModelError(f"{label(node)} has the attribute '{attribute.name}', whose text is not UTF-8")
    else:
        for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
            check_tensor(tensor)
        one = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        for sparse in (*one, *attribute.sparse_tensors):
            _check_sparse(sparse)
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            _check_part(graph)


def _check_sizes(node: onnx.NodeProto, ranks: Mapping[str, int]) -> None:
    """Raise ModelError if a Reshape or Tile reads its target or repeats from an initializer that is not a vector.

    onnxruntime refuses such a node, too.  It accepts an Expand or ConstantOfShape with such an input, so these two are
    not checked.
    """
    sizes = node.input[1] if len(node.input) > 1 else ""
    if (rank := ranks.get(sizes, 1)) != 1:
        raise ModelError(f"{label(node)} reads '{sizes}', which has {rank} axes; {node.op_type} requires 1")


def _check_constant(node: onnx.NodeProto) -> None:
    """Raise ModelError unless a Constant has exactly one value, of a type that fits the attribute's name."""
    given = [a for a in node.attribute if a.name in CONSTANT_VALUES]
    if len(given) != 1:
        found = " and ".join(a.name for a in given) or "none"
        raise ModelError(f"{label(node)} is a Constant with {len(given)} values ({found}); expected one")
    value = given[0]
    if not value.ref_attr_name and value.type != CONSTANT_VALUES[value.name]:
        wanted = AttributeProto.AttributeType.Name(CONSTANT_VALUES[value.name])
        raise ModelError(f"{label(node)} has the attribute '{value.name}' of another type than {wanted}")


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_decodable(model: onnx.ModelProto) -> bool:
    """Return whether every string field is UTF-8; initializers are checked one at a time, to avoid copying them."""
    try:
        _strict_model().FromString(without_initializers(model).SerializeToString())
    except (DecodeError, ValueError):
        return False
    return all(_undecodable(tensor) is None for tensor in model.graph.initializer)


@functools.cache
def _strict_model() -> type[Message]:
    """Return a class for ONNX models in proto3 syntax; its parser refuses strings that are not UTF-8."""
    file = descriptor_pb2.FileDescriptorProto()
    onnx.ModelProto.DESCRIPTOR.file.CopyToProto(file)
    file.syntax = "proto3"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.ModelProto"))
    return found


def _undecodable(message: Message) -> str | None:
    """Return the path of the first string field that is not UTF-8, such as "graph.node[3].name"; None if all are UTF-8.

    protobuf returns such a field as bytes.  The values of tensors are not read, because reading would copy them.
    """
    for field, value in _fields_of_tensor(message) if isinstance(message, TensorProto) else message.ListFields():
        if field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE):
            continue
        is_one = isinstance(value, str | bytes | Message)
        for index, part in enumerate([value] if is_one else value):
            place = field.name if is_one else f"{field.name}[{index}]"
            if isinstance(part, bytes):
                return str(place)
            if isinstance(part, Message) and (inner := _undecodable(part)):
                return f"{place}.{inner}"
    return None


def _fields_of_tensor(tensor: TensorProto) -> Iterator[tuple[FieldDescriptor, Any]]:
    fields = TensorProto.DESCRIPTOR.fields_by_name
    for name in ("name", "doc_string", "external_data", "metadata_props"):
        yield fields[name], getattr(tensor, name)
