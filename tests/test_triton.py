"""Model repositories for Triton: configurations have the documented fields, and the copied library runs."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from stand_in import CPU, SHIFT, model, node, stage
from stored_plans import store

from onnxfuse.cli import main
from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.errors import ModelError
from onnxfuse.runtime import kernel_folders, native_library
from onnxfuse.triton import config_text

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'

# The documented messages of model_config.proto, as far as they are used: name, number and type of each field. "*" is a
# repeated field, "=" an enumeration.
MESSAGES = {
    "ModelConfig": {
        "name": (1, "string"), "max_batch_size": (4, "int32"), "input": (5, "*ModelInput"),
        "output": (6, "*ModelOutput"), "instance_group": (7, "*ModelInstanceGroup"),
        "dynamic_batching": (11, "ModelDynamicBatching"), "backend": (17, "string"),
        "model_operations": (18, "ModelOperations"),
    },
    "ModelInput": {
        "name": (1, "string"), "data_type": (2, "=DataType"), "dims": (4, "*int64"),
        "reshape": (5, "ModelTensorReshape"),
    },
    "ModelOutput": {
        "name": (1, "string"), "data_type": (2, "=DataType"), "dims": (3, "*int64"),
        "reshape": (5, "ModelTensorReshape"),
    },
    "ModelTensorReshape": {"shape": (1, "*int64")},
    "ModelInstanceGroup": {"count": (2, "int32"), "kind": (4, "=Kind")},
    "ModelDynamicBatching": {"preferred_batch_size": (1, "*int32")},
    "ModelOperations": {"op_library_filename": (1, "*string")},
}  # fmt: skip
ENUMS = {
    "DataType": [
        "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8",
        "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
    ],
    "Kind": ["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"],
}  # fmt: skip
TYPES = {"string": 9, "int32": 5, "int64": 3}


def parsed(text: str) -> Any:
    """Return a configuration as Triton reads it; a field or value that is not documented fails."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for enum, names in ENUMS.items():
        added = file.enum_type.add(name=enum)
        for number, name in enumerate(names):
            added.value.add(name=name, number=number)
    for message, fields in MESSAGES.items():
        added = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            plain = kind.lstrip("*=")
            field = added.field.add(name=name, number=number, label=3 if kind.startswith("*") else 1)
            field.type = TYPES.get(plain, 14 if kind.startswith("=") else 11)
            if plain not in TYPES:
                field.type_name = f".inference.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))()
    if official := triton_messages():
        text_format.Parse(text, official.ModelConfig())
    return text_format.Parse(text, config)


@functools.cache
def triton_messages() -> Any:
    """Return Triton's own messages, of its client's package; None if that is not installed.

    They are read from their file, because importing the package's module needs gRPC.
    """
    package = importlib.util.find_spec("tritonclient")
    folders = package.submodule_search_locations if package else None
    if not folders:
        return None
    spec = importlib.util.spec_from_file_location("model_config_pb2", Path(folders[0], "grpc", "model_config_pb2.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(graph: str, **arguments: Any) -> Any:
    return parsed(config_text(onnx.parser.parse_model(f"{HEAD} {graph}"), "m", "/lib.so", **arguments))


def shown(tensors: Any) -> list[tuple[str, str, list[int], list[int] | None]]:
    names = ENUMS["DataType"]
    return [
        (t.name, names[t.data_type], list(t.dims), list(t.reshape.shape) if t.HasField("reshape") else None)
        for t in tensors
    ]


def test_the_messages_are_tritons() -> None:
    """The transcription has the names, numbers and types of Triton 2.73."""
    official = triton_messages()
    if official is None:
        pytest.skip("needs tritonclient, which has Triton's model_config.proto")
    kinds = {number: kind for kind, number in TYPES.items()}

    def kind(field: Any) -> str:
        of = field.enum_type or field.message_type
        sign = "*" * field.is_repeated + "=" * (field.enum_type is not None)
        return sign + (of.name if of else kinds[field.type])

    for message, fields in MESSAGES.items():
        found = getattr(official, message).DESCRIPTOR.fields_by_name
        assert {name: (found[name].number, kind(found[name])) for name in fields} == fields
    kind_of_group = official.ModelInstanceGroup.Kind
    assert {"DataType": official.DataType.keys(), "Kind": kind_of_group.keys()} == ENUMS


# --- config.pbtxt -----------------------------------------------------------------------------------------------------


def test_a_model_that_takes_batches() -> None:
    config = configured("g (int64[batch, seq] ids, float[batch] t) => (float16[batch, 8] y, bool[batch] z) {}")
    assert (config.name, config.backend, config.max_batch_size) == ("m", "onnxruntime", 32)
    assert shown(config.input) == [("ids", "TYPE_INT64", [-1], None), ("t", "TYPE_FP32", [1], [])]
    assert shown(config.output) == [("y", "TYPE_FP16", [8], None), ("z", "TYPE_BOOL", [1], [])]
    assert config.HasField("dynamic_batching")
    assert [ENUMS["Kind"][group.kind] for group in config.instance_group] == ["KIND_GPU"]
    assert list(config.model_operations.op_library_filename) == ["/lib.so"]


WITHOUT_BATCHES = {
    "static": "g (float[4, n] x) => (float[4, n] y) {}",
    "two names": "g (float[a, n] x, float[b, n] w) => (float[a, n] y) {}",
    "output": "g (float[n, 4] x) => (float[4] y) {}",
    "scalar": "g (float[n, 4] x, float s) => (float[n] y) {}",
}


@pytest.mark.parametrize("graph", WITHOUT_BATCHES.values(), ids=WITHOUT_BATCHES)
def test_a_model_that_takes_none(graph: str) -> None:
    config = configured(graph)
    assert config.max_batch_size == 0 and not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [4 if "float[4, n] x" in graph else -1, -1 if "n] x" in graph else 4]


def test_the_largest_batch_may_be_given() -> None:
    assert configured(WITHOUT_BATCHES["two names"], max_batch_size=4).max_batch_size == 4
    taken = "g (float[n, 4] x) => (float[n] y) {}"
    config = configured(taken, max_batch_size=0)
    assert config.max_batch_size == 0 and shown(config.output) == [("y", "TYPE_FP32", [-1], None)]
    with pytest.raises(Exception, match="the first dim of 'x' is not dynamic; give 0 as the largest"):
        configured(WITHOUT_BATCHES["static"], max_batch_size=4)


def test_initializers_are_no_inputs_and_outputs_may_be_inferred() -> None:
    source = onnx.parser.parse_model(f"{HEAD} g (float[n, 4] x) => (float[n, 4] y) {{ y = Add(x, b) }}")
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "b"))
    source.graph.input.append(onnx.helper.make_tensor_value_info("b", 1, [4]))
    source.graph.output[0].type.tensor_type.ClearField("shape")
    config = parsed(config_text(source, 'a "quoted" näme', "/lib.so"))
    assert config.name == 'a "quoted" näme'
    assert shown(config.input) == [("x", "TYPE_FP32", [4], None)]
    assert shown(config.output) == [("y", "TYPE_FP32", [4], None)]


def test_what_triton_does_not_know_is_named() -> None:
    for dtype, number in ("bfloat16", 16), ("float8e4m3fn", 17):
        with pytest.raises(ModelError, match=f"'y' is of {dtype[:6]}.*, which Triton's onnxruntime backend does not"):
            configured(f"g (float[4] x) => ({dtype}[4] y) {{ y = Cast<to = {number}>(x) }}")
    unknown = onnx.parser.parse_model(f"{HEAD} g (float[4] x) => (float[4] y) {{ y = other.Op(x) }}")
    unknown.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="the shape of 'y' is not known, which Triton's configuration must name"):
        config_text(unknown, "m", "/lib.so")


# --- the repository ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield a model of the stand-in's kernels, with a plan file beside it and its bias in a file of its own."""
    stage(monkeypatch)
    proto = onnx.load_model_from_string(model(SHIFT))
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([10, 20, 30]), "b"))
    path = tmp_path / "shift.onnx"
    store(tmp_path / "shift.onnx.plans", proto.SerializeToString())
    (tmp_path / "weights").mkdir()
    onnx.save(proto, path, save_as_external_data=True, location="weights/bias", size_threshold=0)
    yield path


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export-triton", *map(str, arguments)])


SERVE = """
import sys
import numpy as np
import onnxruntime as ort

model, library = sys.argv[1:]
options = ort.SessionOptions()
options.register_custom_ops_library(library)  # as Triton does for op_library_filename
run = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
print(run.run(None, {"x": np.float32([[1, 2, 3]])})[0].tolist())
assert "onnxfuse" not in sys.modules
import ctypes, os
print("launches", ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDA"]).fake_launches())
"""


def test_what_is_written_serves_without_onnxfuse(fused: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    result = export(fused, repository)
    assert result.exit_code == 0, result.output
    assert f"--model-repository={repository}" in result.output
    written = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    (weights,) = (repository / "shift" / "1").glob("model.onnx.*.data")
    assert written == [
        "shift/1/libonnxfuse.so", "shift/1/libonnxfuse.so.plans", "shift/1/model.onnx", f"shift/1/{weights.name}",
        "shift/config.pbtxt",
    ]  # fmt: skip
    config = parsed((repository / "shift" / "config.pbtxt").read_text(encoding="utf-8"))
    (library,) = config.model_operations.op_library_filename
    assert library == str(repository / "shift" / "1" / "libonnxfuse.so")
    command = [sys.executable, "-c", SERVE, str(repository / "shift" / "1" / "model.onnx"), library]
    environment = {**os.environ, "ONNXFUSE_PROVIDER": CPU}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "[[11.0, 22.0, 33.0]]\nlaunches 1\n", done.stderr


def test_the_server_may_see_the_repository_elsewhere(fused: Path, tmp_path: Path) -> None:
    assert export(fused, tmp_path / "r", "--name", "other", "--served-from", "/models").exit_code == 0
    config = parsed((tmp_path / "r" / "other" / "config.pbtxt").read_text(encoding="utf-8"))
    assert list(config.model_operations.op_library_filename) == ["/models/other/1/libonnxfuse.so"]
    assert config.name == "other"


def refusal(*arguments: object, code: int = 2) -> str:
    result = export(*arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.split())


def test_what_is_refused(fused: Path, tmp_path: Path) -> None:
    repository = tmp_path / "r"
    assert "there is no plan file '/none'" in refusal(fused, repository, "--plans", "/none")
    assert f"'{tmp_path}' is a directory; make the file" in refusal(fused, repository, "--plans", tmp_path)
    other = fused.with_name("other.onnx")
    changed = onnx.load(fused)
    changed.graph.node[0].attribute.append(onnx.helper.make_attribute("extra", 3))
    onnx.save(changed, other)
    message = refusal(other, repository, "--plans", f"{fused}.plans")
    assert "has no plans for node 'node_0' on stand-in; the model is not the one that it was made for" in message
    assert not repository.exists()
    assert export(fused, repository).exit_code == 0
    assert "is there already; give another --name, or --overwrite" in refusal(fused, repository)
    assert export(fused, repository, "--overwrite").exit_code == 0


def test_the_model_is_named_before_its_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "none.onnx" in refusal("none.onnx", "r", code=1)
    assert refusal(".", "r", code=1).startswith("error: '.' is a directory;")
    (tmp_path / "plain.onnx").write_bytes(model("g (float[n] x) => (float[n] y) { y = Relu (x) }"))
    assert "'plain.onnx' has no fused nodes; run `onnxfuse optimize` first" in refusal("plain.onnx", "r")


@pytest.mark.parametrize("name", ["../evil", "a/b", 'a"b', "a\nb", "..", "", "a b", "ä"])
def test_a_name_that_is_no_folder_is_refused(fused: Path, tmp_path: Path, name: str) -> None:
    assert "cannot be the model's name: Triton takes the name of its folder" in refusal(fused, tmp_path, "--name", name)
    assert not list(tmp_path.rglob("config.pbtxt"))


def test_the_server_s_place_must_be_absolute(fused: Path, tmp_path: Path) -> None:
    assert "--served-from 'models' is relative" in refusal(fused, tmp_path / "r", "--served-from", "models")


def test_a_repository_that_cannot_be_written_is_named(fused: Path, tmp_path: Path) -> None:
    assert "cannot write" in refusal(fused, fused, code=1)
    assert "choose another repository" in refusal(fused, "/proc/none", code=1)


def test_nothing_of_a_model_that_is_replaced_is_left(fused: Path, tmp_path: Path) -> None:
    repository = tmp_path / "r"
    assert export(fused, repository).exit_code == 0
    stale = repository / "shift" / "1" / "stale"
    stale.write_bytes(b"")
    before = sorted(repository.rglob("*"))
    assert export(fused, repository, "--overwrite").exit_code == 0
    assert sorted(repository.rglob("*")) == [each for each in before if each != stale]


@pytest.mark.parametrize("location", ["libonnxfuse.so", "libonnxfuse.so.plans", "model.onnx", "../config.pbtxt"])
def test_a_model_cannot_name_files_of_the_repository(fused: Path, tmp_path: Path, location: str) -> None:
    """Its weights get a name of the exporter's, whatever theirs is: the native library stays that of onnxfuse."""
    proto = onnx.load(fused)
    bias = proto.graph.initializer[0].raw_data
    (home := tmp_path / "home").mkdir()
    onnx.save(proto, home / "shift.onnx", save_as_external_data=True, location="bias", size_threshold=0)
    moved = onnx.load(home / "shift.onnx", load_external_data=False)
    moved.graph.initializer[0].external_data[0].value = location
    (home / "shift.onnx").write_bytes(moved.SerializeToString())
    (home / "bias").rename(home / location)
    result = export(home / "shift.onnx", tmp_path / "r", "--plans", f"{fused}.plans")
    if ".." in location:
        assert result.exit_code == 1 and "outside the model's folder; move it beside the model" in result.stderr
        assert not list((tmp_path / "r").rglob("*"))
        return
    assert result.exit_code == 0, result.output
    written = tmp_path / "r" / "shift" / "1"
    library = native_library.library_path()
    assert library and (written / "libonnxfuse.so").read_bytes() == library.read_bytes()
    assert (written / "libonnxfuse.so.plans").read_bytes() == Path(f"{fused}.plans").read_bytes()
    assert onnx.load(written / "model.onnx").graph.initializer[0].raw_data == bias


def test_another_model_of_the_repository_is_not_overwritten(fused: Path, tmp_path: Path) -> None:
    other = tmp_path / "r" / "resnet50" / "1" / "model.onnx"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another model")
    proto = onnx.load(fused, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "../../resnet50/1/model.onnx"
    source = tmp_path / "r" / "shift" / "2" / "shift.onnx"
    source.parent.mkdir(parents=True)
    source.write_bytes(proto.SerializeToString())
    message = refusal(source, tmp_path / "r", "--plans", f"{fused}.plans", "--name", "new", code=1)
    assert "is at '../../resnet50/1/model.onnx', outside the model's folder" in message
    assert other.read_bytes() == b"another model" and not (tmp_path / "r" / "new").exists()


def test_what_is_no_model_is_not_replaced(fused: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for name in "mine", "shift.onnx":
        message = refusal(fused, tmp_path, "--name", name, "--overwrite")
        assert "is not a model of a repository, and is not replaced" in message
    assert (tmp_path / "mine" / "file").exists() and fused.is_file()


def test_a_failure_leaves_the_old_model(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "r"
    assert export(fused, repository).exit_code == 0
    before = sorted(repository.rglob("*"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    assert "No space left on device; choose another repository" in refusal(fused, repository, "--overwrite", code=1)
    assert sorted(repository.rglob("*")) == before


def test_each_batch_has_a_plan(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that refuses more than 20 rows leaves batches without a plan."""
    host = importlib.import_module("onnxfuse.kernels.shift.host")
    good = host.candidates

    def few(node: Any, inputs: Any, device: Any) -> Any:
        if inputs[0].shape[0] > 20:
            raise ValueError("too many rows")
        return good(node, inputs, device)

    monkeypatch.setattr(host, "candidates", few)
    compile_file(fused, f"{fused}.plans", CompileSettings(provider=CPU))
    message = refusal(fused, tmp_path / "r")
    assert (
        "has no plan for a batch of 21 at node 'node_0' on stand-in; give --max-batch-size 20, or `onnxfuse" in message
    )
    assert "a batch of 32" in refusal(fused, tmp_path / "r", "--max-batch-size", 5000), "the first power of two"
    for size in 20, 0:
        assert export(fused, tmp_path / "r", "--max-batch-size", size, "--overwrite").exit_code == 0


def test_kernels_of_folders_are_named_again(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without those with which it was made, a plan file is one of other kernels."""
    family = tmp_path / "mine" / "doubling"
    family.mkdir(parents=True)
    (family / "__init__.py").write_text('FUSIONS = ("twice",)')
    (family / "host.py").write_text("def supports(*_): ...\ndef candidates(*_): ...\n")
    monkeypatch.setattr(kernel_folders, "_added", [])
    kernel_folders.add_kernels(family.parent)
    compile_file(fused, f"{fused}.plans", CompileSettings(provider=CPU))
    monkeypatch.setattr(kernel_folders, "_added", [])
    why = "made from other kernels than there are here; add the folders (--kernels, onnxfuse.add_kernels) and packages"
    assert why in refusal(fused, tmp_path / "r", code=1)
    assert export(fused, tmp_path / "r", "--kernels", family.parent).exit_code == 0


def test_a_model_of_other_operators_has_no_plans(fused: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.onnx"
    path.write_bytes(model(f"g (float[n] x) => (float[n] y) {{ {node('copy', 'x', 'y', operands='x')} }}"))
    result = export(path, tmp_path / "r", "--plans", f"{fused}.plans")
    assert "has plans for no node of the model" in " ".join(result.stderr.split())
