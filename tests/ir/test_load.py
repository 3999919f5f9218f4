"""Test reading model files: every bad input is reported in one clear sentence."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from runtimes import open_on_cpu
from weight_files import HEAD, RELU, WEIGHT, as_root, external, model

from onnxfuse.errors import ModelError
from onnxfuse.ir import load as files
from onnxfuse.optimizer import optimize


def sentence(source: object) -> str:
    with pytest.raises(ModelError) as caught:
        files.load(source)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


# Reading


def test_a_path_bytes_and_a_proto_are_the_same_model(tmp_path: Path) -> None:
    onnx.save(model(), path := tmp_path / "m.onnx")
    assert files.load(path) == (model(), tmp_path)
    assert files.load(str(path)) == (model(), tmp_path)
    assert files.load(path.read_bytes()) == (model(), None)
    assert files.load(model()) == (model(), None)


@pytest.mark.parametrize("opset", [13, 17])
def test_erfc_is_read_as_what_it_computes(opset: int, caplog: pytest.LogCaptureFixture) -> None:
    """Tf2onnx writes Erfc, an operator that ONNX lacks, for the exact GELU."""
    text = f"""{HEAD.replace("17", str(opset))} g (float[N] x, bool c, float[1] e_one) => (float[N] y, float[N] z) {{
        y = Erfc(x) e = Sub(y, e_one)
        z = If(c) <then_branch = yes () => (float[N] t) {{ t = Erfc(e) }},
                   else_branch = no () => (float[N] u) {{ u = Abs(e) }}>
    }}"""
    read, _ = files.load(model(text))
    assert "has 2 nodes of the operator 'Erfc', which ONNX lacks and onnxruntime refuses" in caplog.text
    x = np.array([-2, 0, 0.5, 3], np.float32)
    feeds = {"x": x, "c": np.array(True), "e_one": np.ones(1, np.float32)}
    y, z = open_on_cpu(read).run(None, feeds)
    np.testing.assert_allclose(y, [math.erfc(each) for each in x], atol=1e-6)
    np.testing.assert_allclose(z, [math.erfc(math.erfc(each) - 1) for each in x], atol=1e-6)


OF_TENSORRT = """<ir_version: 9, opset_import: ["" : OPSET, "trt" : 1]> g (float[n,4] x) => (float[n,4] y)
    <float step = {0.5}, float[4] steps = {0.5, 0.25, 1, 2}, uint8[n,4] q>
    { q = trt.TRT_FP8QuantizeLinear<axis = 1>(x, steps)  d = trt.TRT_FP8DequantizeLinear<axis = 1>(q, steps)
      p = trt.TRT_FP8QuantizeLinear(d, step)  y = trt.TRT_FP8DequantizeLinear(p, step) }"""


def test_quantizers_of_tensorrt_are_those_of_onnx(caplog: pytest.LogCaptureFixture) -> None:
    """ModelOpt's exports state that their results are uint8."""
    read, _ = files.load(onnx.parser.parse_model(OF_TENSORRT.replace("OPSET", "19")))
    assert "has 2 nodes of the operator 'TRT_FP8QuantizeLinear', which ONNX lacks" in caplog.text
    x = np.array([[1000, 0.26, -1.0625, 2**-10]], np.float32)
    (y,) = open_on_cpu(read).run(None, {"x": x})
    np.testing.assert_array_equal(y, [[224, 0.25, -1, 0]])
    old = onnx.parser.parse_model(OF_TENSORRT.replace("OPSET", "17"))
    assert files.load(old)[0] == old  # ONNX has quantizers to float8 from opset 19 on


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty (0 bytes)"),
        (b"just a text\n", "is not an ONNX file"),
        (b"\x20\0\0\0ORTM\0\0\0\0", "own format (.ort), which is not read; give the ONNX file it was made from"),
        (b"\x89PNG\r\n\x1a\n0000", "is not an ONNX file: it looks like a PNG image"),  # protobuf parses this one
        (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull`"),
        (model().SerializeToString()[:40], "damaged or cut short at 40 bytes"),
        (model().SerializeToString()[:2], "damaged or cut short at 2 bytes"),  # ends between two fields
        (b"\x08\x07", "damaged or cut short"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert expected in sentence(path)
    assert str(path) in sentence(path)


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in sentence(tmp_path / "none.onnx")
    assert "is a directory; expected an ONNX file" in sentence(tmp_path)
    assert "cannot be read: File name too long; expected an ONNX file" in sentence(tmp_path / ("a" * 5000))
    assert "cannot be read: embedded null" in sentence("a\0b")


@as_root
def test_no_permission_to_read(tmp_path: Path) -> None:
    onnx.save(model(), path := tmp_path / "m.onnx")
    path.chmod(0)
    assert "no permission" in sentence(path)


def test_a_refused_read_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    onnx.save(model(), path := tmp_path / "m.onnx")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "no permission; change it with chmod +r" in sentence(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ }}", "has an empty graph"),
        (f"{HEAD} g (float[2] x) => () {{ y = Relu(x) }}", "has no graph output"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Add(x, q) }}", "reads 'q', which nothing defines"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ z = Relu(x) }}", "the graph output 'y', which no node writes"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Relu(x)\n y = Abs(x) }}",
         "defines 'y' twice, by the Relu node of 'y' and by the Abs node of 'y'"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ x = Relu(x)\n y = Abs(x) }}", "'x' twice, by a graph input and by"),
        (f"{HEAD} g (float[2] x) => (float[2] y) <float w = {{1}}> {{ w = Relu(x)\n y = Abs(w) }}",
         "defines 'w' twice, by an initializer and by the Relu"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ a = Add(x, b)\n b = Relu(a)\n y = Abs(b) }}",
         "a cycle, the Add node of 'a' -> the Relu node of 'b' -> the Add node of 'a'"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Reluu(x) }}",
         "the Reluu node of 'y' has the operator 'Reluu', which opset 17 of ONNX does not have"),
        (f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Relu<nonsense = 3>(x) }}",
         "Unrecognized attribute: nonsense for operator Relu (in the Relu node)"),
        (RELU.replace("17", "6"), "has opset 6; supported are 7 to 27: export it again"),
        (RELU.replace("17", "28"), "has opset 28; supported are 7 to 27"),
        (RELU.replace('""', '"com.microsoft"'), "imports no opset of the ONNX domain"),
        (RELU.replace("17]", '17, "x" : 1]').replace("9,", "99,"), "ir_version 99"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_valid(text: str, expected: str) -> None:
    assert expected in sentence(model(text))


IF = f"""{HEAD} g (float[2] x, bool c) => (float[2] y) {{
    a = Relu(x)
    y = If (c) <
        then_branch = t () => (float[2] s) {{
            s = If (c) <
                then_branch = tt () => (float[2] u) {{ u = Add(a, NAME) }},
                else_branch = te () => (float[2] v) {{ v = Abs(x) }} > }},
        else_branch = e () => (float[2] w) {{ w = Neg(a) }} >
}}"""


def test_names_inside_nested_subgraphs() -> None:
    files.load(model(IF.replace("NAME", "x")))
    assert "the Add node of 'u' reads 'w', which nothing defines" in sentence(model(IF.replace("NAME", "w")))
    assert "reads 'y', which the If node of 'y' of the graph around it writes only later; ONNX graphs are acyclic" in (
        sentence(model(IF.replace("NAME", "y")))
    )


def test_nodes_are_put_in_execution_order() -> None:
    """As onnxruntime does: at any depth, and without changing the model that was given."""
    mixed = model(f"""{HEAD} g (float[2] x, bool c) => (float[2] y) {{
        y = Add(b, d)
        d = If (c) <
            then_branch = t () => (float[2] s) {{ s = Neg(r)  r = Relu(b) }},
            else_branch = e () => (float[2] w) {{ w = Neg(b) }} >
        b = Relu(x)
    }}""")
    before = mixed.SerializeToString()
    loaded, _ = files.load(mixed)
    assert [n.op_type for n in loaded.graph.node] == ["Relu", "If", "Add"]
    assert [n.op_type for n in loaded.graph.node[1].attribute[0].g.node] == ["Relu", "Neg"]
    assert mixed.SerializeToString() == before
    sorted_already = model()
    assert files.load(sorted_already)[0] is sorted_already


BRANCHES = f"""{HEAD} g (float[4] x, bool c) => (float[4] y) {{{{
    a = If (c) <
        then_branch = t () => (float[4] {{out}}) {{{{ {{name}} = Neg(x)  {{out}} = Exp({{name}}) }}}},
        else_branch = e () => (float[4] {{out}}) {{{{ {{out}} = Abs(x) }}}} >
    z = Relu(a)
    y = Add(z, x)
}}}}"""


@pytest.mark.parametrize(("name", "out"), [("z", "o"), ("n", "a"), ("y", "z"), ("a", "y")])
def test_a_branch_may_use_names_that_the_graph_around_it_writes_later(name: str, out: str) -> None:
    """These are other tensors: no node reads what a later one writes, so there is no cycle."""
    given = model(BRANCHES.format(name=name, out=out))
    optimized, report = optimize(given, regions=False)
    assert report.verified.passed
    assert [n.op_type for n in optimized.graph.node] == ["If", "Relu", "Add"]
    assert optimized.graph.node[0] == given.graph.node[0]


OPERATORS_OF_ONNXRUNTIME = """<ir_version: 4, opset_import: ["" : {opset}]>
g (float[n, 8] x, float[8] s, float[8] b) => (float[n, 8] y) {{
    z = Relu(x)
    a = LayerNormalization<epsilon = 0.001>(z, s, b)
    c = SimplifiedLayerNormalization(a, s)
    y = {last}(c)
}}"""


def test_operators_that_onnxruntime_accepts_in_the_onnx_domain() -> None:
    for opset in (7, 8, 13, 17):
        given = model(OPERATORS_OF_ONNXRUNTIME.format(opset=opset, last="Abs"))
        loaded, _ = files.load(given)
        assert {n.domain for n in loaded.graph.node} == {""}
        optimized, report = optimize(given)
        assert report.verified.passed
        assert [n.op_type for n in optimized.graph.node] == [n.op_type for n in given.graph.node]
    text = sentence(model(OPERATORS_OF_ONNXRUNTIME.format(opset=13, last="Gelu")))
    assert "the Gelu node of 'y' has the operator 'Gelu', which opset 13 of ONNX does not have" in text


@pytest.mark.parametrize("is_input", [True, False])
def test_initializers_of_ir_version_3_need_not_be_inputs(is_input: bool) -> None:
    """ONNX wants them among the inputs before IR version 4, and onnxruntime runs models either way."""
    inputs = "float[n, 8] x, float[8, 8] w" if is_input else "float[n, 8] x"
    given = model(f'<ir_version: 3, opset_import: ["" : 9]> g ({inputs}) => (float[n, 8] y) {{ y = MatMul(x, w) }}')
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    given.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    optimized, report = optimize(given)
    assert report.verified is not None and report.verified.status == "verified"
    assert [i.name for i in optimized.graph.input] == ["x"]


def test_a_model_without_the_onnx_domain_passes_unchanged() -> None:
    node = onnx.helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="L2")
    given = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("ai.onnx.ml", 2)])
    given.graph.CopyFrom(model(f"{HEAD} g (float[n, 4] x) => (float[n, 4] y) {{ y = Relu(x) }}").graph)
    given.graph.node[0].CopyFrom(node)
    optimized, report = optimize(given)
    assert optimized == given
    assert report.verified.passed
    lines = [str(line) for line in report.table().renderables]
    assert lines == ["Unchanged: the model has no operator of the ONNX domain, and no other operators are fused."]


def test_contrib_and_unknown_domains_and_functions() -> None:
    head = '<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1, "odd" : 3, "onnxfuse" : 1]>'
    files.load(
        model(f"""{head} g (float[2] x) => (float[2] y) {{
        a = com.microsoft.Gelu(x)  b = odd.Thing<power = 3>(a)  y = onnxfuse.twice(b)
    }}
    <domain: "onnxfuse", opset_import: ["" : 17]> twice (p) => (q) {{ q = Add(p, p) }}""")
    )


def test_an_output_without_a_shape_is_accepted() -> None:
    loose = model()
    loose.graph.output[0].type.tensor_type.ClearField("shape")
    files.load(loose)
    assert not loose.graph.output[0].type.tensor_type.HasField("shape")


def test_an_output_without_a_type_is_accepted() -> None:
    """As by onnxruntime, which infers it."""
    loose = model(f"{HEAD} g (float[n, 8] x) => (y) {{ z = Softmax(x)  y = Relu(z) }}")
    assert not loose.graph.output[0].HasField("type")
    optimized, report = optimize(loose)
    assert report.verified.passed
    assert report.counts == {"region": 1}
    assert optimized.graph.output == loose.graph.output


def test_an_initializer_of_another_size_than_its_shape() -> None:
    for count in (2, 1000):
        wrong = model(f"{HEAD} g (float[{count}] x) => (float[{count}] y) {{ y = Add(x, w) }}")
        wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(count, np.float32), "w"))
        wrong.graph.initializer[0].dims[0] = count + 1
        assert "w" in sentence(wrong)


@pytest.mark.parametrize("domain", ["", "foreign"])
def test_an_attribute_that_hides_external_data_behind_its_type(domain: str) -> None:
    imports = 'opset_import: ["" : 17, "foreign" : 1]'
    odd = onnx.parser.parse_model(f"<ir_version: 8, {imports}> g (float[2] x) => (float[2] y) {{ y = Relu(x) }}")
    odd.graph.node[0].domain = domain
    attribute = odd.graph.node[0].attribute.add(name="alpha", type=onnx.AttributeProto.INT, i=1)
    attribute.t.CopyFrom(onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL))
    attribute.t.external_data.add(key="location", value="../secret")
    assert "type field and data field mismatch in attribute alpha" in sentence(odd)


def test_a_reference_to_an_attribute_outside_functions() -> None:
    """onnxruntime and onnx's checker accept it beside a value, which counts."""
    for text, attribute in (
        ("w = Constant <value = float[2] {1, 2}> ()  y = Add(x, w)", "value"),
        ("y = Softmax <axis = 0> (x)", "axis"),
    ):
        source = model(f"{HEAD} g (float[2] x) => (float[2] y) {{ {text} }}")
        source.graph.node[0].attribute[0].ref_attr_name = "alpha"
        made, report = optimize(source)
        assert not report.left_out and report.verified.passed
        assert source.graph.node[0].attribute[0].ref_attr_name == "alpha", "the model that is given stays as it is"
        assert not any(each.ref_attr_name for node in made.graph.node for each in node.attribute)
        for field in ("t", "i"):
            source.graph.node[0].attribute[0].ClearField(field)
        told = sentence(source)
        assert f"refers in '{attribute}' to the attribute 'alpha' of a function, and is in no function" in told


# External data


def with_field(model: onnx.ModelProto, key: str, value: str) -> onnx.ModelProto:
    model.graph.initializer[0].external_data.add(key=key, value=value)
    return model


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (external("none.bin"), "is missing"),
        (
            external("a" * 5000),
            "aaaa...aaaaaaaaaa', which cannot be a file: File name too long",
        ),
        (external("a\0b"), r"a\x00b"),
        (external("ring/w.bin"), "ring/w.bin'"),  # `ring` is a link to itself
        (external("w.bin", 600), "is too short"),
        (external("w.bin", 512, 4), "is too short"),
        (external("w.bin", 512, 0, 100), "has offset 0 and 100 bytes; its dtype and shape require 2048"),
        (external("w.bin", 512, -8), "has offset -8"),
        (external("w.bin", 512, 0, -2048), "has offset 0 and -2048 bytes; its dtype and shape require 2048"),
        (external("w.bin", 512, 0, 10**30), f"has offset 0 and {10**30} bytes"),
        (external("w.bin", 512, 10**30), "is too short"),
        (with_field(external("w.bin"), "offset", "many"), "has an offset or a length that is not a number"),
        (with_field(external("w.bin"), "length", ""), "has an offset or a length that is not a number"),
        (with_field(external("w.bin"), "length", "9" * 5000), "has an offset or a length that is not a number"),
        (external("../w.bin"), "outside the model's folder"),
        (external("/etc/hostname"), "outside the model's folder"),
        (external("out/w.bin"), "outside the model's folder"),  # `out` is a link to another folder
        (external("link.bin"), "is a link"),
        (external("hard.bin"), "is a link"),
        (external("folder"), "no plain file"),
        (external(""), "is at '', outside"),
    ],
)
def test_external_data_that_cannot_be_used(tmp_path: Path, bad: onnx.ModelProto, expected: str) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere, home / "folder"):
        folder.mkdir()
    for place in (home / "w.bin", elsewhere / "w.bin", tmp_path / "w.bin", home / "one.bin"):
        place.write_bytes(WEIGHT.tobytes())
    (home / "out").symlink_to(elsewhere)
    (home / "link.bin").symlink_to("w.bin")
    (home / "ring").symlink_to("ring")
    (home / "hard.bin").hardlink_to(home / "one.bin")
    (home / "m.onnx").write_bytes(bad.SerializeToString())
    text = sentence(home / "m.onnx")
    assert expected in text and "'w'" in text


def test_external_data_of_a_function_s_default(tmp_path: Path) -> None:
    given = model(f"""{HEAD.replace(">", "").replace("17]", '17, "my" : 1]')}>
        g (float[512] x) => (float[512] y) {{ y = my.shift(x) }}
        <domain: "my", opset_import: ["" : 17]>
        shift (v) => (u) {{ w = Constant <value: tensor = @by> ()  u = Add (v, w) }}""")
    default = given.functions[0].attribute_proto.add(name="by", type=onnx.AttributeProto.TENSOR)
    default.t.CopyFrom(external("../w.bin").graph.initializer[0])
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "m.onnx").write_bytes(given.SerializeToString())
    assert "is at '../w.bin', outside the model's folder" in sentence(tmp_path / "home" / "m.onnx")


@pytest.mark.parametrize(("offset", "length"), [(0, None), (100, None), (None, None), (100, WEIGHT.nbytes)])
def test_external_data_may_be_followed_by_more(tmp_path: Path, offset: int | None, length: int | None) -> None:
    """onnx reads what has no length up to the end of the file."""
    content = b"?" * (offset or 0) + WEIGHT.tobytes() + b"more"
    (tmp_path / "w.bin").write_bytes(content)
    source = external("w.bin", offset=offset, length=length)
    source.graph.node[0].output[0] = "z"
    source.graph.node.append(onnx.helper.make_node("Exp", ["w"], ["e"]))  # which is folded
    source.graph.node.append(onnx.helper.make_node("Add", ["z", "e"], ["y"]))
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    _, report = optimize(tmp_path / "m.onnx")
    assert not report.left_out
    assert report.verified.passed is True, report.verified.reason
    assert [one.node for one in report.folded] == ["e"]


@pytest.mark.parametrize(
    ("file", "odd"),
    [
        ("..\\w.bin", external("..\\w.bin")),
        ("w.bin", with_field(external("w.bin"), "checksum", "none")),
        ("w.bin", with_field(external("w.bin"), "another", "tool")),
        ("w.bin", with_field(external("/etc/hostname"), "location", "w.bin")),  # the last one counts
    ],
)
def test_external_data_with_odd_names_and_fields(tmp_path: Path, file: str, odd: onnx.ModelProto) -> None:
    """onnx's own reader refuses such a name and warns of other fields; onnxruntime refuses some fields."""
    (tmp_path / file).write_bytes(WEIGHT.tobytes())
    odd.graph.node[0].output[0] = "z"
    odd.graph.node.append(onnx.helper.make_node("Sigmoid", ["z"], ["y"]))
    (tmp_path / "m.onnx").write_bytes(odd.SerializeToString())
    _, report = optimize(tmp_path / "m.onnx")
    assert report.fused
    assert report.verified.status == "verified", report.verified.reason


@pytest.mark.parametrize("imported", [("",), ("ai.onnx",), ("", "ai.onnx")])
def test_nodes_of_the_long_name_of_onnx_s_domain(imported: tuple[str, ...]) -> None:
    given = model(f"{HEAD} g (float[2] x) => (float[2] y) {{ z = Sigmoid(x)  y = Mul(x, z) }}")
    given.graph.node[0].domain = "ai.onnx"
    del given.opset_import[:]
    given.opset_import.extend(onnx.helper.make_opsetid(domain, 17) for domain in imported)
    _, report = optimize(given)
    assert report.fused
    assert report.verified.status == "verified", report.verified.reason


def test_external_data_needs_a_path() -> None:
    assert "give the model as a path" in sentence(external("w.bin"))
    assert "give the model as a path" in sentence(external("w.bin").SerializeToString())


def test_external_data_stays_on_disk(tmp_path: Path) -> None:
    """A model with half a terabyte of weights in a sparse file loads at once, because they are not read."""
    count = 2**37
    (tmp_path / "m.onnx").write_bytes(external("w.bin", count).SerializeToString())
    with (tmp_path / "w.bin").open("wb") as file:
        try:
            file.truncate(count * 4)
        except OSError:
            pytest.skip("the file system holds no file of 512 GiB")
    loaded, folder = files.load(tmp_path / "m.onnx")
    assert folder == tmp_path and not loaded.graph.initializer[0].raw_data
