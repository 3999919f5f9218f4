"""Writing model files: an output appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from onnx import TensorProto
from weight_files import HEAD, RELU, WEIGHT, as_root, external, model, names, two_weights, weights

from onnxfuse.errors import ModelError
from onnxfuse.model import files
from onnxfuse.model import save as saving
from onnxfuse.model.save import save


def test_save_writes_the_model_and_nothing_else(tmp_path: Path) -> None:
    save(model(), tmp_path / "m.onnx")
    assert names(tmp_path) == ["m.onnx"]
    assert onnx.load(tmp_path / "m.onnx") == model()


def test_save_keeps_the_permissions_of_the_file_it_replaces(tmp_path: Path) -> None:
    save(model(), path := tmp_path / "m.onnx")
    path.chmod(0o640)
    save(model(), path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_external_tensors_move_to_one_file_beside_the_output(tmp_path: Path) -> None:
    source = two_weights(tmp_path, "blob.bin")
    (tmp_path / "big.bin").write_bytes((WEIGHT * 2).tobytes())
    source.graph.initializer.append(external("big.bin").graph.initializer[0])
    source.graph.initializer[2].name = "u"
    large = onnx.numpy_helper.from_array(WEIGHT * 3, "large")
    typed = onnx.helper.make_tensor("typed", TensorProto.FLOAT, [512], (WEIGHT * 4).tolist())
    small = onnx.numpy_helper.from_array(WEIGHT[:3], "small")
    source.graph.initializer.extend([large, typed, small])
    before = source.SerializeToString()
    (tmp_path / "out").mkdir()
    save(source, tmp_path / "out" / "o.onnx", folder=tmp_path)
    assert source.SerializeToString() == before
    assert names(tmp_path / "out") == ["o.onnx", "o.onnx.data"]
    stored = {t.name: t for t in onnx.load(tmp_path / "out" / "o.onnx", load_external_data=False).graph.initializer}
    assert [n for n, t in stored.items() if t.data_location != TensorProto.EXTERNAL] == ["small"]
    assert {e.value for t in stored.values() for e in t.external_data if e.key == "location"} == {"o.onnx.data"}
    assert all(int(e.value) % 4096 == 0 for t in stored.values() for e in t.external_data if e.key == "offset")
    found = weights(tmp_path / "out" / "o.onnx")
    factors = {"w": 1, "v": -1, "u": 2, "large": 3, "typed": 4}
    for name, factor in factors.items():
        np.testing.assert_array_equal(found[name], WEIGHT * factor)
    files.load(tmp_path / "out" / "o.onnx")


def test_a_range_that_two_tensors_share_is_stored_once(tmp_path: Path) -> None:
    source = two_weights(tmp_path, "blob.bin")
    source.graph.initializer[1].external_data[1].value = "100"
    save(source, tmp_path / "o.onnx", folder=tmp_path)
    assert (tmp_path / "o.onnx.data").stat().st_size == WEIGHT.nbytes
    np.testing.assert_array_equal(weights(tmp_path / "o.onnx")["v"], WEIGHT)


def test_external_tensors_in_nodes_move_too(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    source = model(f"{HEAD} g (float[512] x) => (float[512] y) {{ w = Constant()\n y = Add(x, w) }}")
    value = source.graph.node[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    value.t.CopyFrom(external("w.bin").graph.initializer[0])
    save(source, tmp_path / "o.onnx", folder=tmp_path)
    (tmp_path / "w.bin").unlink()
    stored = onnx.load(tmp_path / "o.onnx")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(stored.graph.node[0].attribute[0].t), WEIGHT)


@pytest.mark.parametrize("blob", ["m.onnx.data", "weights.bin"])
def test_in_place(tmp_path: Path, blob: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(two_weights(tmp_path, blob).SerializeToString())
    for _ in range(2):
        loaded, folder = files.load(path)
        save(loaded, path, folder=folder)
    assert names(tmp_path) == sorted({"m.onnx", "m.onnx.data", blob})
    np.testing.assert_array_equal(weights(path)["w"], WEIGHT)
    np.testing.assert_array_equal(weights(path)["v"], -WEIGHT)


def test_a_model_over_the_limit_gets_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(f"{HEAD} g (float[512] x) => (float[512] y) {{ y = Add(x, w) }}")
    source.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 1500)
    save(source, tmp_path / "o.onnx")
    assert (tmp_path / "o.onnx").stat().st_size < 500
    np.testing.assert_array_equal(weights(tmp_path / "o.onnx")["w"], WEIGHT)
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 10)
    with pytest.raises(ModelError, match="exceeds 2 GiB even with"):
        save(source, tmp_path / "p.onnx")
    assert names(tmp_path) == ["o.onnx", "o.onnx.data"]


def test_the_weights_of_another_model_are_not_overwritten(tmp_path: Path) -> None:
    source = two_weights(tmp_path, "b.onnx.data")
    kept = (tmp_path / "b.onnx.data").read_bytes()
    with pytest.raises(ModelError, match="which another model reads; choose another name"):
        save(source, tmp_path / "b.onnx", folder=tmp_path)
    assert (tmp_path / "b.onnx.data").read_bytes() == kept
    assert names(tmp_path) == ["b.onnx.data"]


def refusal(path: Path, source: onnx.ModelProto | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        save(source or model(), path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    assert "it is a directory" in refusal(tmp_path)
    assert "does not exist; create it first" in refusal(tmp_path / "none" / "o.onnx")
    if Path(os.devnull).exists():
        assert "it is a device or a pipe" in refusal(Path(os.devnull))
        assert not Path(os.devnull).is_file()


@as_root
def test_no_permission_to_write(tmp_path: Path) -> None:
    save(model(), path := tmp_path / "o.onnx")
    path.chmod(0o444)
    assert "write-protected" in refusal(path)
    tmp_path.chmod(0o555)
    try:
        assert "no permission to write" in refusal(tmp_path / "p.onnx")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(28, "no space is left"), (13, "no permission to write"), (30, "no permission"), (5, "input/output error")],
)
def test_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: str) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    source = model(RELU.replace("Relu", "Abs"))
    save(source, path := tmp_path / "o.onnx")
    monkeypatch.setattr(os, "fsync", refuse)
    assert expected.lower() in refusal(path).lower()
    assert names(tmp_path) == ["o.onnx"] and onnx.load(path) == source


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    """Renames: the old data file aside, the new one into its place, the model.  Whichever fails, nothing changed."""
    path, rename, count = tmp_path / "m.onnx", os.replace, 0
    path.write_bytes(two_weights(tmp_path, "m.onnx.data").SerializeToString())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail_once(source: Path, target: Path) -> None:
        nonlocal count
        count += 1
        if count == failing:
            raise error
        rename(source, target)

    loaded, folder = files.load(path)
    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises((ModelError, KeyboardInterrupt)):
        save(loaded, path, folder=folder)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_new_output_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, rename = two_weights(tmp_path, "w.bin"), os.replace

    def fail_for_the_model(old: Path, new: Path) -> None:
        if Path(new).name == "o.onnx":
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "replace", fail_for_the_model)
    with pytest.raises(ModelError, match="Input/output error"):
        save(source, tmp_path / "o.onnx", folder=tmp_path)
    assert names(tmp_path) == ["w.bin"]
