"""Sessions find weights that are stored outside the model's file, also if their model is split."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, HEAD, Stage, model, node, stage

from onnxfuse.runtime.external_data import FOLDER_ENTRY, configured_folder, external_data_folder
from onnxfuse.session import InferenceSession, explain_session

MIXED = (
    "g (float[n] x) => (float[n] y, float[n] z) { "
    + node("scale", "x", "y", operands="x", more=", factor = 2.0")
    + node("scale", "x", "z", operands="x", more=", factor = -2.0")
    + " }"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield stage(monkeypatch)


def test_a_split_model_still_finds_its_weights_outside_the_file(
    gpu: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = InferenceSession(mixed_with_weights(tmp_path, [1, 2, 3]), providers=[CPU])
    assert [r.how for r in explain_session(run)] == ["kernel", "body"]
    assert shifted(run) == [[1, 2, 3]] * 2
    assert "will be overwritten" not in capfd.readouterr().err, "onnxruntime warns of what nobody did"


def mixed_with_weights(folder: Path, weights: list[int]) -> Path:
    """Return a model that is split, with its weights in a file beside it."""
    graph = "g (float[n, 3] x) => (float[n, 3] y, float16[n, 3] z) {{ h = Cast<to = 10>(x) {} {} }}".format(
        node("shift", "x, w", "y", operands="x bias"),
        node("shift", "h, v", "z", operands="x bias", types="10"),
    )
    proto = onnx.load_from_string(model(graph))
    for name, dtype in (("w", np.float32), ("v", np.float16)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(weights, dtype), name))
    folder.mkdir(exist_ok=True)
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    return folder / "model.onnx"


def shifted(run: ort.InferenceSession) -> list[list[float]]:
    """Return zeros and the weights of `mixed_with_weights`."""
    y, z = run.run(None, {"x": np.zeros((2, 3), np.float32)})
    assert y.tolist() == z.tolist()
    return y.tolist()  # type: ignore[no-any-return]


def test_session_options_do_not_carry_weights_from_one_model_to_the_next(gpu: Stage, tmp_path: Path) -> None:
    first, second = mixed_with_weights(tmp_path / "a", [1, 2, 3]), mixed_with_weights(tmp_path / "b", [4, 5, 6])
    options = ort.SessionOptions()
    runs = [InferenceSession(path, options, providers=[CPU]) for path in (first, second)]
    assert [shifted(run)[0] for run in runs] == [[1, 2, 3], [4, 5, 6]]
    assert configured_folder(options) is None


def test_the_folder_that_session_options_name_is_taken(gpu: Stage, tmp_path: Path) -> None:
    first, second = mixed_with_weights(tmp_path / "a", [1, 2, 3]), mixed_with_weights(tmp_path / "b", [4, 5, 6])
    options = ort.SessionOptions()
    options.add_session_config_entry(FOLDER_ENTRY, str(second.parent))
    assert shifted(InferenceSession(first, options, providers=[CPU]))[0] == [4, 5, 6]
    assert configured_folder(options) == second.parent


def test_a_split_model_finds_the_weights_of_a_branch(gpu: Stage, tmp_path: Path) -> None:
    proto = onnx.load_from_string(model(MIXED))
    branches = onnx.parser.parse_graph(
        "g (bool c) => (float[3] q) { q = If (c) <"
        "then_branch = g () => (float[3] t) <float[3] w = {1, 2, 3}> { t = Neg(w) },"
        "else_branch = g () => (float[3] e) <float[3] v = {4, 5, 6}> { e = Neg(v) }> }"
    )
    for branch in branches.node[0].attribute:
        (tensor,) = branch.g.initializer
        data = onnx.numpy_helper.to_array(tensor).tobytes()
        (tmp_path / tensor.name).write_bytes(data)
        tensor.raw_data = data
        onnx.external_data_helper.set_external_data(tensor, tensor.name)
        tensor.ClearField("raw_data")
        tensor.ClearField("float_data")
    proto.graph.node.extend(branches.node)
    proto.graph.input.extend(branches.input)
    proto.graph.output.extend(branches.output)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    run = InferenceSession(path, providers=[CPU])
    assert [r.how for r in explain_session(run)] == ["kernel", "body"]
    assert run.run(["q"], {"x": np.float32([1]), "c": np.array(True)})[0].tolist() == [-1, -2, -3]


def test_a_thread_does_not_read_the_weights_of_anothers_model(gpu: Stage, tmp_path: Path) -> None:
    """A model that is not split waits too, although onnxruntime loads it by its path."""
    first = mixed_with_weights(tmp_path / "a", [1, 2, 3])
    proto = onnx.parser.parse_model(f"{HEAD} g (float[n, 3] x) => (float[n, 3] y) {{ y = Add(x, w) }}")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([4, 5, 6]), "w"))
    (tmp_path / "b").mkdir()
    onnx.save(proto, tmp_path / "b/model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    options = ort.SessionOptions()
    with ThreadPoolExecutor(1) as pool:
        with external_data_folder(first.parent, options, shared=True):
            second = pool.submit(InferenceSession, tmp_path / "b/model.onnx", options, providers=[CPU])
            with suppress(TimeoutError):
                second.result(0.5)
        (y,) = second.result().run(None, {"x": np.zeros((1, 3), np.float32)})
    assert y.tolist() == [[4, 5, 6]]


def test_a_model_of_links_is_not_split(gpu: Stage, tmp_path: Path) -> None:
    """A Hugging Face cache consists of links, which onnxruntime follows if it loads the model by its path."""
    made = mixed_with_weights(tmp_path / "blobs", [1, 2, 3]).parent
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("model.onnx", "weights"):
        (made / name).rename(made / f"{name}.blob")
        (snapshot / name).symlink_to(f"../blobs/{name}.blob")
    run = InferenceSession(snapshot / "model.onnx", providers=[CPU])
    assert shifted(run) == [[1, 2, 3]] * 2
    first, second = [r.why for r in explain_session(run)]
    assert first == (
        "node 'node_2', which calls the same function, runs as its body; "
        "nodes cannot differ, as 'weights' leads out of the model's folder"
    )
    assert second == "shift is there for float32, the node has float16, float16"
