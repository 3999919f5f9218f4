"""Test writing model files: an output appears complete or not at all."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from onnx import TensorProto
from weight_files import HEAD, RELU, WEIGHT, as_root, external, model, names, two_weights, weights

from onnxfuse.errors import ModelError
from onnxfuse.ir import load as files
from onnxfuse.ir import save as saving
from onnxfuse.ir.save import save


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
    data = data_file(tmp_path / "out" / "o.onnx")
    assert names(tmp_path / "out") == ["o.onnx", data.name]
    stored = {t.name: t for t in onnx.load(tmp_path / "out" / "o.onnx", load_external_data=False).graph.initializer}
    assert [n for n, t in stored.items() if t.data_location != TensorProto.EXTERNAL] == ["small"]
    assert {e.value for t in stored.values() for e in t.external_data if e.key == "location"} == {data.name}
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
    assert data_file(tmp_path / "o.onnx").stat().st_size == WEIGHT.nbytes
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


def data_file(path: Path) -> Path:
    """Return the one data file that is named after a model."""
    (found,) = path.parent.glob(f"{path.name}.*.data")
    return found


@pytest.mark.parametrize("blob", ["m.onnx.data", "m.onnx.0123456789ab.data", "weights.bin"])
def test_in_place(tmp_path: Path, blob: str) -> None:
    """The data file of the old model is removed if `save` wrote it: other names are those of other tools."""
    path = tmp_path / "m.onnx"
    path.write_bytes(two_weights(tmp_path, blob).SerializeToString())
    (tmp_path / "m.onnx.ba9876543210.data").write_bytes(b"of a model that was renamed")
    for _ in range(2):
        loaded, folder = files.load(path)
        save(loaded, path, folder=folder)
    kept = {"m.onnx.ba9876543210.data"} | ({blob} if blob != "m.onnx.0123456789ab.data" else set())
    (new,) = set(names(tmp_path)) - {"m.onnx"} - kept
    assert {e.value for t in stored(path) for e in t.external_data if e.key == "location"} == {new}
    np.testing.assert_array_equal(weights(path)["w"], WEIGHT)
    np.testing.assert_array_equal(weights(path)["v"], -WEIGHT)


@pytest.mark.parametrize("blob", ["m.onnx.data", "m.onnx.0123456789ab.data"])
@pytest.mark.parametrize("other", ["backup.onnx", "m.onnx.orig"])
def test_data_that_another_model_reads_stays(tmp_path: Path, blob: str, other: str) -> None:
    """A copy of the model file alone reads the same data: replacing the original leaves it whole."""
    path, copy = tmp_path / "m.onnx", tmp_path / other
    path.write_bytes(two_weights(tmp_path, blob).SerializeToString())
    copy.write_bytes(path.read_bytes())
    before = (tmp_path / blob).read_bytes()
    for source in copy, path:  # another model over it, and in place
        loaded, folder = files.load(source)
        save(loaded, path, folder=folder)
        assert (tmp_path / blob).read_bytes() == before
        files.load(copy)
        np.testing.assert_array_equal(weights(path)["v"], -WEIGHT)
    copy.unlink()
    path.write_bytes(two_weights(tmp_path, blob).SerializeToString())
    save(model(), path)
    is_own = blob != "m.onnx.data"
    assert (blob in names(tmp_path)) is not is_own, "nothing reads it any more, but who wrote it may"


def test_data_stays_where_a_file_beside_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: bytes) -> bool:
        raise PermissionError(13, f"Permission denied: {path}")

    path = tmp_path / "m.onnx"
    path.write_bytes(two_weights(tmp_path, "m.onnx.data").SerializeToString())
    (tmp_path / "secret").write_bytes(b"")
    monkeypatch.setattr(saving, "_contains", refuse)
    save(model(), path)
    assert names(tmp_path) == ["m.onnx", "m.onnx.data", "secret"]


def test_names_are_found_across_pieces_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "file").write_bytes(b"0123456789abcdef")
    for size in range(1, 18):
        monkeypatch.setattr(saving, "COPIED_BYTES", size)
        assert [saving._contains(path, text) for text in (b"56789", b"f", b"5678a")] == [True, True, False]


def test_damaged_models_write_no_file_but_their_own(tmp_path: Path) -> None:
    """Models with weights in files, damaged in a few bytes: whatever they name, all other files stay as they are."""
    (home := tmp_path / "home").mkdir()
    (out := tmp_path / "out").mkdir()
    source = two_weights(home, "m.onnx.data").SerializeToString()
    (tmp_path / "m.onnx.data").write_bytes(b"of another model")
    (home / "m.onnx").write_bytes(source)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rng, written = random.Random(0), 0
    place = source.index(b"m.onnx.data")
    for turn in range(400):
        damaged = bytearray(source)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(place, place + 11) if turn % 2 else rng.randrange(len(damaged))
            damaged[at] = rng.choice((0, 0x2E, 0x2F, rng.randrange(256)))
        (home / "damaged.onnx").write_bytes(damaged)
        try:
            loaded, folder = files.load(home / "damaged.onnx")
            save(loaded, out / "m.onnx", folder=folder)
            written += 1
        except ModelError as error:
            assert len(str(error).splitlines()) == 1
        (home / "damaged.onnx").unlink()
        assert {path: path.read_bytes() for path in before} == before
        assert all(name == "m.onnx" or name.startswith("m.onnx.") for name in names(out)), names(out)
        assert len(names(out)) <= 2 and names(tmp_path) == ["home", "m.onnx.data", "out"]
    assert 10 < written < 390


def stored(path: Path) -> list[TensorProto]:
    return list(onnx.load(path, load_external_data=False).graph.initializer)


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    source = two_weights(tmp_path, "w.bin")
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save(source, tmp_path / name / "o.onnx", folder=tmp_path)
        written.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert written[0] == written[1]


def test_a_symbolic_link_is_written_through(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    for name, present in (("old.onnx", True), ("new.onnx", False)):
        if present:
            save(model(), real / name)
        (link := tmp_path / name).symlink_to(real / name)
        save(two_weights(tmp_path, "w.bin"), link, folder=tmp_path)
        assert link.is_symlink() and link.readlink() == real / name
        np.testing.assert_array_equal(weights(real / name)["v"], -WEIGHT)
    assert names(tmp_path) == ["new.onnx", "old.onnx", "real", "w.bin"]
    (tmp_path / "nowhere.onnx").symlink_to(tmp_path / "none" / "o.onnx")
    with pytest.raises(ModelError, match=r"'.*none' does not exist; create it first"):
        save(model(), tmp_path / "nowhere.onnx")
    (tmp_path / "ring").symlink_to("ring")
    assert "choose another name" in refusal(tmp_path / "ring")


def test_names_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    longest = tmp_path / ("m" * 250 + ".onnx")
    save(model(), longest)
    assert onnx.load(longest) == model()
    assert "File name too long" in refusal(tmp_path / ("m" * 251 + ".onnx"))
    with pytest.raises(ModelError, match="embedded null"):
        save(model(), tmp_path / "a\0b.onnx")
    source = two_weights(tmp_path, "w.bin")
    with pytest.raises(ModelError, match="File name too long"):  # that of the data file
        save(source, tmp_path / ("n" * 250 + ".onnx"), folder=tmp_path)
    assert names(tmp_path) == [longest.name, "w.bin"]


def test_a_model_over_the_limit_gets_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(f"{HEAD} g (float[512] x) => (float[512] y) {{ y = Add(x, w) }}")
    source.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 1500)
    save(source, tmp_path / "o.onnx")
    assert (tmp_path / "o.onnx").stat().st_size < 500
    np.testing.assert_array_equal(weights(tmp_path / "o.onnx")["w"], WEIGHT)
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 10)
    with pytest.raises(ModelError, match="exceeds 2 GiB even without its initializers"):
        save(source, tmp_path / "p.onnx")
    assert names(tmp_path) == ["o.onnx", data_file(tmp_path / "o.onnx").name]


def test_the_weights_of_another_model_are_not_overwritten(tmp_path: Path) -> None:
    source = two_weights(tmp_path, "b.onnx.data")
    kept = (tmp_path / "b.onnx.data").read_bytes()
    save(source, tmp_path / "b.onnx", folder=tmp_path)
    assert (tmp_path / "b.onnx.data").read_bytes() == kept
    np.testing.assert_array_equal(weights(tmp_path / "b.onnx")["v"], -WEIGHT)


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


# Interrupted


def old_and_new(folder: Path) -> tuple[Path, onnx.ModelProto, Path]:
    """Write a model with its data in place; return its path, the model to replace it by, and the folder of that."""
    path = folder / "m.onnx"
    save(two_weights(folder, "w.bin"), path, folder=folder)
    (folder / "w.bin").unlink()
    source = folder.parent / f"{folder.name}.source"
    source.mkdir()
    new = two_weights(source, "w.bin")
    (source / "w.bin").write_bytes((WEIGHT[:25] + 5).tobytes() + (3 * WEIGHT).tobytes() + (-3 * WEIGHT).tobytes())
    return path, new, source


def assert_whole(path: Path) -> int:
    """Assert that the folder holds a model and its data, old or new.  Returns the factor of the weights."""
    files.load(path)
    found = weights(path)
    factor = int(found["w"][1])
    assert factor in (1, 3)
    np.testing.assert_array_equal(found["w"], factor * WEIGHT)
    np.testing.assert_array_equal(found["v"], -factor * WEIGHT)
    return factor


def trace_lines(act: Callable[[int], None]) -> None:
    """Call `act` with a number before each line of save.py that is run from now on."""
    count = 0

    def on_line(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if frame.f_code.co_filename != saving.__file__:
            return None
        if event == "line":
            count += 1
            act(count)
        return on_line

    sys.settrace(on_line)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a way to start a process at this place")
def test_a_kill_before_any_line_leaves_a_whole_model(tmp_path: Path) -> None:
    """A child process saves in place, and is killed before the n-th line of the code that saves, for every n."""
    factors, number, ended = [], 0, False
    while not ended:
        number += 1
        (folder := tmp_path / str(number)).mkdir()
        path, new, source = old_and_new(folder)

        def kill(line: int, wanted: int = number) -> None:
            if line == wanted:
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if not child:
            try:
                trace_lines(kill)
                save(new, path, folder=source)
            finally:
                os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        factors.append(assert_whole(path))
    assert number > 50 and factors == sorted(factors) and factors[0] == 1 and factors[-1] == 3
    assert names(folder) == ["m.onnx", data_file(path).name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that it leaves open
def test_an_interrupt_before_any_line_leaves_a_whole_model(tmp_path: Path) -> None:
    """Ctrl-C may come anywhere, between a rename and the line after it as well."""
    number, ended = 0, False
    while not ended:
        number += 1
        (folder := tmp_path / str(number)).mkdir()
        path, new, source = old_and_new(folder)

        def interrupt(line: int, wanted: int = number) -> None:
            if line == wanted:
                sys.settrace(None)
                raise KeyboardInterrupt

        before = sys.gettrace()
        trace_lines(interrupt)
        try:
            save(new, path, folder=source)
            ended = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert_whole(path)
    assert number > 50


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_rename_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    """Saving renames the data file and then the model; if one fails, the folder is as it was."""
    (folder := tmp_path / "in_place").mkdir()
    path, new, source = old_and_new(folder)
    before, rename, count = {p.name: p.read_bytes() for p in folder.iterdir()}, os.replace, 0

    def fail_once(old: Path, target: Path) -> None:
        nonlocal count
        count += 1
        if count == failing:
            raise error
        rename(old, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises((ModelError, KeyboardInterrupt)):
        save(new, path, folder=source)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a way to start a process at this place")
def test_processes_that_write_one_output_leave_one_whole_result(tmp_path: Path) -> None:
    """Some write the model that is there already, so that the old data file is also a new one."""
    (folder := tmp_path / "shared").mkdir()
    path, new, source = old_and_new(folder)
    old = two_weights(tmp_path, "w.bin")
    children = []
    for each in range(6):
        child = os.fork()
        if not child:
            code = 1
            try:
                for turn in range(15):
                    save(*((new, path) if (turn + each) % 2 else (old, path)),
                         folder=source if (turn + each) % 2 else tmp_path)  # fmt: skip
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert_whole(path)
    assert names(folder) == ["m.onnx", data_file(path).name]
