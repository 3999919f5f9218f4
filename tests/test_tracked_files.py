"""The tracked files are few MB, because they are copied to machines with a GPU again and again."""

from __future__ import annotations

import io
import lzma
import subprocess
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import (
    ARCHIVE,
    EXPORTED,
    INDEX,
    compress,
    decompress,
    draw_parameters,
    files_of,
    load_exported,
    odd_numbers,
    read,
    read_index,
)
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parent.parent
LARGEST_CLONE = 4_000_000  # bytes of a clone without history, in which git compresses each file by itself


def test_each_test_file_has_a_name_of_its_own() -> None:
    """The folders of tests are not packages, so that pytest would take the second file of a name for the first."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_tracked_tree_is_small() -> None:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a checkout of git")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    contents = (path.read_bytes() for path in paths if path.is_file() and not path.is_symlink())
    assert sum(len(zlib.compress(content)) for content in contents) <= LARGEST_CLONE


def test_every_exported_model_is_in_the_archive() -> None:
    stored = decompress((EXPORTED / ARCHIVE).read_bytes())
    assert {name: len(model) for name, model in stored.items()} == {
        name: entry["bytes"] for name, entry in read_index().items()
    }


def test_a_model_is_read_from_the_archive() -> None:
    name = "bert_sdpa_ts_fp16.onnx"
    model = load_exported(name)
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == read(name) == decompress((EXPORTED / ARCHIVE).read_bytes())[name]


def test_compressing_gives_the_file_that_is_stored() -> None:
    content = (EXPORTED / ARCHIVE).read_bytes()
    assert compress(decompress(content), files_of(content)[INDEX].decode()) == content


def model_of(*tensors: TensorProto) -> bytes:
    """Return a model of constants: the first is an attribute in a subgraph, the others are initializers."""
    inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensors[0])], "then", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    return helper.make_model(helper.make_graph([node], "g", [], [], list(tensors[1:]))).SerializeToString()


def test_an_archive_depends_on_nothing_but_its_models() -> None:
    models = {"b.onnx": model_of(numpy_helper.from_array(np.ones(9), "w")), "a.onnx": model_of(TensorProto())}
    content = compress(models, "{}")
    assert content == compress(dict(sorted(models.items())), "{}") and decompress(content) == models
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        entries = [(each.name, each.mtime, each.uid, each.gid, each.uname, each.gname) for each in archive]
    assert entries == [(name, 0, 0, 0, "", "") for name in ("float32", "float16", INDEX, "a.onnx", "b.onnx")]


def test_an_archive_holds_equal_weights_once() -> None:
    """So it does with weights of float16 that are weights of float32 rounded, with those that overflow too."""
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    values[0, 0] = np.finfo(np.float32).min
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    others = -rounded
    weights = (rounded, others), (values, values), (values.T.copy(), rounded, values[0, :2])
    models = {
        f"{number}.onnx": model_of(*(numpy_helper.from_array(each, "w") for each in arrays))
        for number, arrays in enumerate(weights)
    }
    content = compress(models, "{}")
    assert decompress(content) == models
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content))) as archive:
        sizes = {each.name: each.size for each in archive}
    assert (sizes["float32"], sizes["float16"]) == (2 * values.nbytes, others.nbytes)


NAMED = """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, bool c) => (float[n] y)
<float[1] w = {1}, float[n] val_0> {
    [node_Neg_0] val_0 = Neg (x)
    [node_relu_7] relu_7 = Relu (val_0)
    [Add_2] sum_2 = Add (relu_7, w)
    [Add_3] sum_3 = Add (sum_2, outer)
    [If_1] t_07 = If (c) <then_branch = g () => (t_0) { t_0 = Neg (sum_3) }, else_branch = h () => (x) { x = Abs (x) }>
    [last] y, , y_40 = Split (t_07, )
}"""


def test_an_archive_keeps_names() -> None:
    """Those that exporters count, those of other forms, absent ones, and those of other graphs."""
    model = onnx.parser.parse_model(NAMED).SerializeToString()
    assert decompress(compress({"a.onnx": model}, "{}")) == {"a.onnx": model}
    nodes = onnx.load_from_string(files_of(compress({"a.onnx": model}, "{}"))["a.onnx"]).graph.node
    assert [each.name for each in nodes] == ["node_\1_\3", "node_\2", "\1_\3", "\1_\3", "\1_1", "last"]


@pytest.mark.parametrize(("known", "name"), [("outer", "\u1fff"), ("relu_7", "y\1")])
def test_an_archive_refuses_names_that_would_be_read_as_others(known: str, name: str) -> None:
    model = onnx.parser.parse_model(NAMED)
    for each in model.graph.node:
        for names in each.input, each.output:
            names[:] = [name if text == known else text for text in names]
    with pytest.raises(ValueError, match="would be read with other names"):
        compress({"a.onnx": model.SerializeToString()}, "{}")


LAYERS = """<ir_version: 8, opset_import: ["" : 17]> g (float16[1,4,n,m] x) => (float16[1,4,k,l] y) {
    a = Conv (x, w, bias) b = Conv (a, v) c = BatchNormalization (b, scale, bias, bias, scale) y = Add (c, kept) }"""


def layers(seed: int) -> onnx.ModelProto:
    """Return a model with four parameters, and with a tensor "kept" that is none."""
    random = np.random.default_rng(seed)
    model = onnx.parser.parse_model(LAYERS)
    held = {name: random.normal(0, 0.2, (8, 8, 3, 3)) for name in "wv"}
    held |= {"bias": random.normal(0, 0.1, 8), "scale": random.uniform(0.5, 1.5, 8), "kept": random.normal(size=(8, 1))}
    model.graph.initializer.extend(numpy_helper.from_array(np.float16(each), name) for name, each in held.items())
    return model


def test_parameters_are_drawn_with_their_means_and_deviations() -> None:
    """Other tensors of the model stay, and two of the same dims differ."""
    model = layers(0)
    before = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    draw_parameters(model)
    after = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    assert [name for name, values in after.items() if (values == before[name]).any()] == ["kept"]
    assert (after["w"] != after["v"]).mean() > 0.9 and after["scale"].min() > 0
    for name, values in after.items():
        assert abs(values.std() / before[name].std() - 1) < 0.13 and abs(values.mean() - before[name].mean()) < 0.2, (
            name
        )


def test_an_archive_holds_no_drawn_parameters() -> None:
    models = {"a.onnx": layers(0), "b.onnx": layers(1)}
    draw_parameters(models["a.onnx"])
    written = {name: model.SerializeToString() for name, model in models.items()}
    content = compress(written, "{}")
    assert decompress(content) == written
    of_b = sum(len(each.raw_data) for each in models["b.onnx"].graph.initializer)
    assert len(files_of(content)["float16"]) == of_b + 16  # of a: "kept" alone


def test_drawn_parameters_are_the_same_on_every_machine() -> None:
    assert odd_numbers((2, 3), 0).tolist() == [79, 127, -59, 93, -47, -45]
