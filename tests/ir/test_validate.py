"""Test that every part of a model which cannot be read is named in one sentence when the model is loaded."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from types import FrameType

import onnx
import onnx.numpy_helper
import pytest
from onnx import AttributeProto, TensorProto
from test_load import IF, sentence
from weight_files import HEAD, external, model

from onnxfuse.errors import OnnxfuseError
from onnxfuse.ir.load import load
from onnxfuse.optimizer import optimize

CONSTANT = f"{HEAD} g (float[2] x) => (float[2] y) {{ w = Constant<value_float = 1.0>()  y = Add(x, w) }}"


def with_bytes(old: str, new: bytes) -> Callable[[onnx.ModelProto], bytes]:
    """Return a function that serializes a model, and replaces a text by bytes of the same length."""

    def replace(source: onnx.ModelProto) -> bytes:
        content = source.SerializeToString()
        assert content.count(old.encode()) == 1 and len(old) == len(new)
        return content.replace(old.encode(), new)

    return replace


def named(**fields: str) -> onnx.ModelProto:
    """Return a model whose only text "Zebra" is in one field."""
    result = model(CONSTANT)
    for path, text in fields.items():
        *parts, last = path.split("__")
        message = result
        for part in parts:
            message = message[int(part)] if part.isdecimal() else getattr(message, part)  # type: ignore[index]
        setattr(message, last, text)
    return result


@pytest.mark.parametrize(
    "path",
    [
        "producer_name",
        "domain",
        "doc_string",
        "graph__name",
        "graph__doc_string",
        "graph__input__0__name",
        "graph__input__0__type__denotation",
        "graph__input__0__type__tensor_type__shape__dim__0__dim_param",
        "graph__output__0__doc_string",
        "graph__node__0__name",
        "graph__node__1__op_type",
        "graph__node__1__domain",
        "graph__node__0__attribute__0__name",
    ],
)
def test_a_text_that_is_not_utf_8(path: str) -> None:
    damaged = with_bytes("Zebra", b"caf\xe9s")(named(**{path: "Zebra"}))
    place = sentence(damaged).partition("the text in field '")[2]
    expected = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split("__")).removeprefix(".")
    assert place == f"{expected}' is not UTF-8; export it again"


def test_texts_in_lists_and_in_values() -> None:
    source = model(CONSTANT)
    source.graph.node[1].input[0] = "Zebra"
    assert "'graph.node[1].input[0]'" in sentence(with_bytes("Zebra", b"caf\xe9s")(source))
    source = external("Zebra")
    assert "'graph.initializer[0].external_data[0].value'" in sentence(with_bytes("Zebra", b"caf\xe9s")(source))
    source = model(CONSTANT)
    del source.graph.node[0].attribute[:]
    source.graph.node[0].attribute.add(name="value_string", type=AttributeProto.STRING, s=b"caf\xe9")
    assert "the Constant node of 'w' has the attribute 'value_string', whose text is not UTF-8" in sentence(source)
    source.graph.initializer.add(name="t", data_type=TensorProto.STRING, dims=[1], string_data=[b"caf\xe9"])
    assert "tensor 't' holds the string b'caf\\xe9', which is not UTF-8" in sentence(source)


def wrong_tensor(**fields: object) -> onnx.ModelProto:
    result = model(CONSTANT)
    result.graph.initializer.append(TensorProto(name="t", **fields))  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"data_type": 77, "dims": [1]}, "tensor 't' has the unknown data type 77"),
        ({"data_type": 0, "dims": [1]}, "tensor 't' has the unknown data type 0"),
        ({"data_type": 1, "dims": [-4]}, "tensor 't' has the dims [-4]; expected none below 0"),
        ({"data_type": 1, "dims": [2**40, 2**40]}, "which no memory holds"),
        ({"data_type": 1, "dims": [0, 2**62, 2**62]}, "which no memory holds"),
        ({"data_type": 1, "dims": [2**40]}, "holds 0 values, which make no FLOAT tensor of shape [1099511627776]"),
        ({"data_type": 1, "dims": [2], "raw_data": b"123"}, "holds 3 bytes; its dtype and shape require 8"),
        ({"data_type": 1, "dims": [2], "float_data": [1]}, "holds 1 values, which make no FLOAT tensor of shape [2]"),
        ({"data_type": 1, "dims": [1], "raw_data": b"1234", "float_data": [1]}, "in raw_data and float_data"),
        ({"data_type": 8, "dims": [2], "string_data": [b"a"]}, "holds 1 strings; its shape requires 2"),
        ({"data_type": 8, "dims": [2], "data_location": TensorProto.EXTERNAL}, "holds strings in another file"),
        (
            {"data_type": 1, "dims": [1], "raw_data": b"1234", "segment": TensorProto.Segment(begin=0, end=1)},
            "a segment",
        ),
    ],
)
def test_a_tensor_that_is_not_complete(fields: dict[str, object], expected: str) -> None:
    assert expected in sentence(wrong_tensor(**fields))


def test_dtypes_of_types_and_attributes() -> None:
    for place in ("input", "output", "value_info"):
        source = model(CONSTANT)
        infos = getattr(source.graph, place)
        info = infos[0] if infos else infos.add(name="w")
        info.type.tensor_type.elem_type = 77
        assert f"the type of '{info.name}' has the unknown data type 77" in sentence(source)
    source = model(CONSTANT)
    source.graph.value_info.add(name="w").type.sequence_type.elem_type.tensor_type.elem_type = 77
    assert "the type of 'w' has the unknown data type 77" in sentence(source)
    source = model(f"{HEAD} g (float[2] x) => (y) {{ y = Cast<to = 65>(x) }}")
    assert "the Cast node of 'y' has to=65, which is not a data type of ONNX" in sentence(source)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("", "is a Constant with 0 values (none); expected one"),
        ("<value_float = 1.0, value_int = 2>", "is a Constant with 2 values (value_float and value_int); expected one"),
        ("<value_float = 1>", "has the attribute 'value_float' of another type than FLOAT"),
        ("<value = 1>", "has the attribute 'value' of another type than TENSOR"),
    ],
)
def test_a_constant_has_one_value(attributes: str, expected: str) -> None:
    text = CONSTANT.replace("<value_float = 1.0>", attributes)
    assert f"the Constant node of 'w' {expected}" in sentence(model(text))


def test_a_sparse_tensor_whose_indices_do_not_fit() -> None:
    def sparse(*indices: int, dims: int = 4) -> onnx.ModelProto:
        result = model(CONSTANT)
        values = onnx.helper.make_tensor("v", TensorProto.FLOAT, [2], [1, 2])
        places = onnx.helper.make_tensor("i", TensorProto.INT64, [len(indices)], indices)
        result.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [dims]))
        return result

    optimize(sparse(0, 3), verify=False)
    assert "sparse tensor 'v' has an index outside its dims [4]" in sentence(sparse(0, 4))
    assert "values of shape [2] and indices of shape [3], which do not fit" in sentence(sparse(0, 1, 2))
    assert "sparse tensor 'v' has the dims [-4]; expected none below 0" in sentence(sparse(0, 1, dims=-4))


def test_a_sparse_tensor_in_another_file() -> None:
    source = model(CONSTANT)
    weight = external("../w.bin", 1).graph.initializer[0]
    places = onnx.helper.make_tensor("i", TensorProto.INT64, [1], [0])
    source.graph.sparse_initializer.add(values=weight, indices=places, dims=[4])
    assert "sparse tensor 'w' has its values or indices in another file; expected them in the" in sentence(source)


@pytest.mark.parametrize("place", ["initializer", "Constant"])
def test_a_sparse_tensor_of_huge_dims(place: str) -> None:
    """Few bytes stand for terabytes: nobody makes it dense."""
    values = onnx.helper.make_tensor("v", TensorProto.FLOAT, [1], [1])
    places = onnx.helper.make_tensor("i", TensorProto.INT64, [1], [0])
    for count, accepted in ((2**29, True), (2**29 + 1, False), (2**40, False)):
        sparse = onnx.helper.make_sparse_tensor(values, places, [count])
        source = model(CONSTANT)
        if place == "Constant":
            del source.graph.node[0].attribute[:]
            source.graph.node[0].attribute.append(onnx.helper.make_attribute("sparse_value", sparse))
        else:
            source.graph.sparse_initializer.append(sparse)
        if accepted:
            load(source)
        else:
            why = f"sparse tensor 'v' of dims [{count}] has {4 * count:,} bytes once dense; expected at most 2 GiB"
            assert why in sentence(source)


def test_a_tensor_of_more_dims_than_arrays_have() -> None:
    assert "tensor 't' has 65 dims; expected at most 64" in sentence(wrong_tensor(data_type=1, dims=[1] * 65))
    load(wrong_tensor(data_type=1, dims=[1] * 64, raw_data=bytes(4)))


@pytest.mark.parametrize("op", ["Reshape", "Tile"])
@pytest.mark.parametrize("dims", [(1, 1), ()])
def test_sizes_are_a_list(op: str, dims: tuple[int, ...]) -> None:
    source = model(f"{HEAD} g (float[4] x) => (float[m] y) <int64[1] s = {{4}}> {{ y = {op}(x, s) }}")
    optimize(source, verify=False)
    source.graph.initializer[0].dims[:] = dims
    assert f"the {op} node of 'y' reads 's', which has {len(dims)} axes; {op} requires 1" in sentence(source)


def test_a_message_is_one_line_whatever_the_names_hold() -> None:
    source = model(CONSTANT)
    source.graph.node[1].input[0] = "a\nb\x1b[2J"
    assert r"reads 'a\nb\x1b[2J', which nothing defines" in sentence(source)


MUTATIONS, SECONDS_FOR_ONE = 2000, 20


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return bytes that differ in one to four places."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(result))
        kind = rng.choices(("flip", "set", "insert", "delete"), (6, 2, 1, 1))[0]
        if kind == "flip":
            result[place] ^= 1 << rng.randrange(8)
        elif kind == "set":
            result[place] = rng.randrange(256)
        elif kind == "insert":
            result.insert(place, rng.randrange(256))
        else:
            del result[place]
    return bytes(result)


def test_damaged_bytes_end_in_a_model_or_in_one_sentence() -> None:
    """Any other exception, and any run that takes longer than the limit, fails the test with its bytes."""
    texts = (CONSTANT, IF.replace("NAME", "x"), BLOCK)
    sources = [model(text).SerializeToString() for text in texts]
    rng, accepted, refused = random.Random(0), 0, 0

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a damaged model took more than {SECONDS_FOR_ONE} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        for _ in range(MUTATIONS):
            damaged = mutated(rng.choice(sources), rng)
            signal.alarm(SECONDS_FOR_ONE)
            try:
                optimize(damaged, verify=False)
                accepted += 1
            except OnnxfuseError as error:
                assert len(str(error).splitlines()) == 1
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{error!r} of the bytes {damaged!r}") from error
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert accepted > MUTATIONS // 50 and refused > MUTATIONS // 2


BLOCK = f"""{HEAD} g (float[n, s, 8] x, float[n, s] m) => (float[n, s, 8] y)
<float[8, 8] w = {{{", ".join(["0.5"] * 64)}}}, float[8] b = {{1, 2, 3, 4, 5, 6, 7, 8}}, int64[1] one = {{1}}> {{
    h = MatMul(x, w)
    i = Add(h, b)
    j = Relu(i)
    k = Add(j, x)
    l = LayerNormalization<axis = -1>(k, b, b)
    shape = Shape(l)
    first = Slice(shape, zero, one)
    zero = Constant<value_ints = [0]>()
    n8 = Constant<value_ints = [-1, 8]>()
    target = Concat<axis = 0>(first, n8)
    r = Reshape(l, target)
    u = Unsqueeze(m, one)
    t = Transpose<perm = [0, 2, 1]>(u)
    c = Cast<to = 1>(t)
    y = Mul(r, c)
}}"""
