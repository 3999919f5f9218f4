"""Test `onnxfuse optimize FOLDER OUT`: what is written, what stays as it was, and which names are refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from genai_graphs import write_folder
from onnx import numpy_helper

import onnxfuse
from onnxfuse.cli import main
from onnxfuse.errors import ModelError, UsageError
from onnxfuse.genai import optimize_folder as module
from onnxfuse.ir.read import external_files
from onnxfuse.runtime.plan_file import read_plan_file

CUDA: list[dict[str, Any]] = [{"cuda": {"enable_cuda_graph": "0"}}]
SMALL = """<ir_version: 9, opset_import: ["" : 20]> g (float[b, 8] x) => (float[b, 8] y) {
  t = Tanh(x)  s = Sigmoid(t)  r = Mul(s, t)  y = MatMul(r, w) }"""
VISION = SMALL.replace("r = Mul(s, t)  y = MatMul(r, w)", "y = Mul(s, t)")
LONE = """<ir_version: 9, opset_import: ["" : 20]> g (float[b, 8] x) => (int64[2, n] y) { y = NonZero(x) }"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for CUDA with a small model, whose weights are beside it."""
    path = tmp_path / "llama"
    path.mkdir()
    model = onnx.parser.parse_model(SMALL)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    save = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 0}
    onnx.save(model, path / "model.onnx", **save)
    configure(path, {"decoder": decoder(CUDA)})
    (path / "tokenizer.json").write_text("{}")
    (path / "more").mkdir()
    (path / "more" / "processor.bin").write_bytes(b"\0\1")
    return path


def decoder(providers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"filename": "model.onnx", "session_options": {"log_id": "x", "provider_options": providers, **more}}


def configure(path: Path, model: dict[str, Any]) -> None:
    (path / "genai_config.json").write_text(json.dumps({"model": {"type": "llama", **model}, "search": {"top_k": 5}}))


def configured(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "genai_config.json").read_text())
    return config


def content(path: Path) -> dict[str, str]:
    files = (each for each in sorted(path.rglob("*")) if each.is_file())
    return {str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["optimize", *map(str, arguments)])


def optimized(folder: Path, **options: Any) -> dict[str, Any]:
    """Optimize a folder without verification into `out` beside it, and return the configuration."""
    onnxfuse.optimize_folder(folder, folder.parent / "out", verify=False, **options)
    return configured(folder.parent / "out")


def test_a_folder_is_optimized_and_the_first_stays(folder: Path, tmp_path: Path) -> None:
    before, out = content(folder), tmp_path / "out"
    (one,) = onnxfuse.optimize_folder(folder, out)
    assert content(folder) == before
    assert configured(out) == configured(folder), "without a GPU there is no library"
    assert one.compiled is None and "there is no GPU to compile for" in one.why_bodies
    assert one.report.verified.status == "verified" and one.report.output["path"] == str(out / "model.onnx")
    (data,) = external_files(out / "model.onnx")
    names = {"genai_config.json", "tokenizer.json", "more/processor.bin", "model.onnx", data.name}
    assert content(out).keys() == names and data.name != "model.onnx.data"
    model = onnx.load(out / "model.onnx")
    assert any(node.domain == "onnxfuse" for node in model.graph.node)


def test_a_folder_of_the_builder_is_optimized(tmp_path: Path) -> None:
    write_folder("int4.onnx", tmp_path / "llama")
    (one,) = onnxfuse.optimize_folder(tmp_path / "llama", tmp_path / "out")
    assert one.report.verified.status == "verified" and one.report.counts["group_query_attention"] == 2
    assert configured(tmp_path / "out") == configured(tmp_path / "llama")
    assert {"tokenizer.json", "tokenizer_config.json"} <= content(tmp_path / "out").keys()


def test_kernels_and_the_library_are_beside_the_model(folder: Path, tmp_path: Path) -> None:
    result = run(folder, tmp_path / "out", "--arch", "sm_90", "--report", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "model.onnx\n" in result.stdout and "sm_90" in result.stdout
    assert configured(tmp_path / "out")["model"]["decoder"] == decoder(CUDA, custom_ops_library="libonnxfuse.so")
    assert read_plan_file(tmp_path / "out" / "libonnxfuse.so.plans").templates
    assert (tmp_path / "out" / "libonnxfuse.so").stat().st_size
    assert json.loads((tmp_path / "r.json").read_text())["verified"]["status"] == "verified"


def test_an_optimized_folder_may_be_optimized_again(folder: Path, tmp_path: Path) -> None:
    optimized(folder, archs=["sm_90"])
    (tmp_path / "out").rename(tmp_path / "first")
    assert optimized(tmp_path / "first")["model"]["decoder"] == decoder(CUDA)
    assert not list((tmp_path / "out").glob("libonnxfuse*")), "no library of the first run"
    (one,) = onnxfuse.optimize_folder(tmp_path / "first", tmp_path / "again", verify=False, archs=["sm_80"])
    assert one.compiled is not None and not one.report.fused, "the nodes of the first run have kernels"
    with_library = decoder(CUDA, custom_ops_library="libonnxfuse.so")
    assert configured(tmp_path / "again")["model"]["decoder"] == with_library


def test_models_on_the_cpu_have_no_library(folder: Path) -> None:
    configure(folder, {"decoder": decoder([])})
    assert optimized(folder, archs=["sm_90"])["model"]["decoder"] == decoder([])


def test_a_library_that_the_configuration_names_stays(folder: Path, tmp_path: Path) -> None:
    configure(folder, {"decoder": decoder(CUDA, custom_ops_library="libothers.so")})
    (folder / "libothers.so").write_bytes(b"others")
    config = optimized(folder, archs=["sm_90"])
    assert config["model"]["decoder"] == decoder(CUDA, custom_ops_library="libothers.so")
    assert (tmp_path / "out" / "libothers.so").read_bytes() == b"others"
    assert not (tmp_path / "out" / "libonnxfuse.so").exists()


def test_each_model_with_kernels_has_a_library(folder: Path, tmp_path: Path) -> None:
    """A part without session options has the decoder's, and no library of the decoder's."""
    (folder / "steps").mkdir()
    onnx.save(onnx.parser.parse_model(VISION), folder / "steps" / "vision.onnx")
    onnx.save(onnx.parser.parse_model(LONE), folder / "embedding.onnx")
    parts = {"vision": {"filename": "steps/vision.onnx"}, "pipeline": [{"embedding": {"filename": "embedding.onnx"}}]}
    configure(folder, {"decoder": decoder(CUDA), **parts})
    model = optimized(folder, archs=["sm_90"])["model"]
    assert model["decoder"]["session_options"]["custom_ops_library"] == "libonnxfuse.so"
    assert model["vision"] == decoder(CUDA, custom_ops_library="libonnxfuse.2.so") | {"filename": "steps/vision.onnx"}
    assert model["pipeline"][0]["embedding"] == decoder(CUDA) | {"filename": "embedding.onnx"}
    operators = [read_plan_file(tmp_path / "out" / f"libonnxfuse{n}.so.plans").operators for n in ("", ".2")]
    assert [any("region" in line for line in lines) for lines in operators] == [True, True]
    result = run(folder, "--dry-run", "--no-verify", "--report", tmp_path / "r.json")
    assert result.exit_code == 0 and [(tmp_path / f"r{n}.json").exists() for n in ("", ".2", ".3")] == [True] * 3
    assert run(folder, "--dry-run", "--shape", "x:2x8").exit_code == 2


def test_parts_may_name_one_model(folder: Path, tmp_path: Path) -> None:
    """Each part on CUDA names the library, also without options of its own, and no part does after another run."""
    prompt, cpu = {"filename": "./model.onnx"}, decoder([])
    configure(folder, {"prompt": prompt, "decoder": decoder(CUDA), "cpu": cpu})
    model = optimized(folder, archs=["sm_90"])["model"]
    with_library = decoder(CUDA, custom_ops_library="libonnxfuse.so")
    assert (model["prompt"], model["decoder"], model["cpu"]) == (with_library | prompt, with_library, cpu)
    assert sorted(each.name for each in (tmp_path / "out").glob("lib*.so")) == ["libonnxfuse.so"]
    (tmp_path / "out").rename(tmp_path / "first")
    model = optimized(tmp_path / "first")["model"]
    assert (model["prompt"], model["decoder"], model["cpu"]) == (decoder(CUDA) | prompt, decoder(CUDA), cpu)


def test_a_part_before_the_decoder_has_no_library_of_it(folder: Path) -> None:
    onnx.save(onnx.parser.parse_model(LONE), folder / "embedding.onnx")
    configure(folder, {"a": {"filename": "embedding.onnx"}, "decoder": decoder(CUDA)})
    assert optimized(folder, archs=["sm_90"])["model"]["a"] == decoder(CUDA) | {"filename": "embedding.onnx"}


def test_models_without_weights_to_quantize_keep_theirs(folder: Path, tmp_path: Path) -> None:
    """The folder's decoder has a MatMul of 64x64; its vision model has none."""
    pytest.importorskip("onnx_ir", reason="needs pip install onnx-ir")
    onnx.save(onnx.parser.parse_model(VISION), folder / "vision.onnx")
    vision = {"vision": {"filename": "vision.onnx"}}
    configure(folder, {"decoder": decoder([]), **vision})
    for words in ((tmp_path / "out",), ("--dry-run",)):
        result = run(folder, *words, "--weights", "int4")
        assert result.exit_code == 2 and "llama' has a MatMul whose weight can be quantized" in result.stderr
    assert not (tmp_path / "out").exists()
    model = onnx.parser.parse_model(SMALL.replace("8]", "64]"))
    model.graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    onnx.save(model, folder / "model.onnx")
    result = run(folder, tmp_path / "out", "--weights", "int4")
    assert result.exit_code == 0, result.output
    assert "Weights: 1 product in int4, blocks of 32, 16.4 KB -> " in result.stdout
    assert "Weights: none in int4, because no MatMul has a weight that can be quantized" in result.stdout
    for one, nodes in zip(onnxfuse.optimize_folder(folder, None, weights="int8"), (1, 0), strict=True):
        assert one.report.weights is not None and one.report.weights.nodes == nodes
        assert one.report.verified.status == "verified"


def test_data_that_another_model_reads_is_copied(folder: Path, tmp_path: Path) -> None:
    (folder / "spare.onnx").write_bytes((folder / "model.onnx").read_bytes())
    optimized(folder)
    assert {"spare.onnx", "model.onnx.data"} <= content(tmp_path / "out").keys()
    onnx.load(tmp_path / "out" / "spare.onnx")


def test_nothing_is_replaced_unasked(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    optimized(folder)
    before = content(out)
    with pytest.raises(UsageError, match="is there already; give another folder, or --overwrite to replace it"):
        onnxfuse.optimize_folder(folder, out, verify=False)
    (out / "left.txt").write_text("")
    onnxfuse.optimize_folder(folder, out, overwrite=True, verify=False)
    assert content(out) == before
    (out / "genai_config.json").unlink()
    with pytest.raises(UsageError, match="is not a folder of genai, and is not replaced"):
        onnxfuse.optimize_folder(folder, out, overwrite=True, verify=False)


def test_a_link_to_the_folder_to_write_is_followed(folder: Path, tmp_path: Path) -> None:
    optimized(folder)
    (tmp_path / "out").rename(tmp_path / "real")
    (tmp_path / "out").symlink_to("real", target_is_directory=True)
    (tmp_path / "real" / "left.txt").write_text("")
    assert optimized(folder, overwrite=True) == configured(folder) and not (tmp_path / "real" / "left.txt").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["llama", "out", "real"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced_by_a_folder(folder: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is not a folder of genai, and is not replaced; give another folder"):
        onnxfuse.optimize_folder(folder, tmp_path / "out", overwrite=overwrite, verify=False)


def test_the_working_directory_is_not_replaced(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for target in ("", "."):
        with pytest.raises(onnxfuse.OnnxfuseError, match=r"'\.': it is, or contains, the working directory"):
            onnxfuse.optimize_folder(folder, target, overwrite=True, verify=False)
    assert sorted(tmp_path.iterdir()) == [folder, tmp_path / "out"]


def test_a_folder_may_have_the_longest_name(folder: Path, tmp_path: Path) -> None:
    onnxfuse.optimize_folder(folder, tmp_path / ("o" * 255), verify=False)
    assert configured(tmp_path / ("o" * 255)) == configured(folder)


@pytest.mark.parametrize("target", ["llama", "llama/out", ".", "llama/../llama/more"])
def test_the_folder_to_read_is_never_written(folder: Path, tmp_path: Path, target: str) -> None:
    before = content(tmp_path)
    with pytest.raises(UsageError, match="contain each other"):
        onnxfuse.optimize_folder(folder, tmp_path / target, overwrite=True, verify=False)
    result = run(folder, tmp_path / "out", "--report", folder / "report.json")
    assert result.exit_code == 2 and "is in the folder to read" in result.stderr
    assert content(tmp_path) == before


def test_nothing_is_left_of_a_run_that_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "copy_others", full)
    with pytest.raises(onnxfuse.OnnxfuseError, match=r"cannot write '.*out': No space left on device"):
        onnxfuse.optimize_folder(folder, tmp_path / "out", verify=False)
    assert content(tmp_path) == before and list(tmp_path.iterdir()) == [folder]


def outside(folder: Path) -> str:
    onnx.save(onnx.parser.parse_model(VISION), folder.parent / "other.onnx")
    return "../other.onnx"


def absolute(folder: Path) -> str:
    outside(folder)
    return str(folder.parent / "other.onnx")


def link(folder: Path) -> str:
    outside(folder)
    (folder / "link.onnx").symlink_to(folder.parent / "other.onnx")
    return "link.onnx"


def link_of_folder(folder: Path) -> str:
    outside(folder)
    (folder / "up").symlink_to(folder.parent, target_is_directory=True)
    return "up/other.onnx"


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.onnx")
    return "pipe.onnx"


@pytest.mark.parametrize(
    ("name", "reason"),
    [(outside, "outside"), (absolute, "outside"), (link, "outside"), (link_of_folder, "outside"), (pipe, "a pipe"),
     (lambda _: "missing.onnx", "No such file"), (lambda _: "a\0.onnx", "cannot be read"),
     (lambda _: "more/../model.onnx", "outside"), (lambda _: f"{'a' * 300}.onnx", "cannot be read")],
)  # fmt: skip
def test_names_of_models_stay_in_the_folder(folder: Path, name: Callable[[Path], str], reason: str) -> None:
    configure(folder, {"decoder": decoder(CUDA) | {"filename": name(folder)}})
    with pytest.raises(ModelError, match=reason):
        onnxfuse.optimize_folder(folder, folder.parent / "out", verify=False)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("to", ["../secret", "/proc/self/environ", "more"])
def test_links_that_lead_elsewhere_are_not_copied(folder: Path, to: str) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "link.txt").symlink_to(to)
    with pytest.raises(ModelError, match=r"link\.txt"):
        onnxfuse.optimize_folder(folder, folder.parent / "out", verify=False)
    assert not (folder.parent / "out").exists()


def test_a_link_to_itself_is_not_copied(folder: Path) -> None:
    (folder / "link.onnx").symlink_to("link.onnx")
    with pytest.raises(ModelError, match=r"link\.onnx"):
        onnxfuse.optimize_folder(folder, folder.parent / "out", verify=False)


def test_other_models_are_copied_whatever_they_hold(folder: Path, tmp_path: Path) -> None:
    """Such a model is not checked: its data may have a name that no file can have."""
    spare = onnx.load(folder / "model.onnx", load_external_data=False)
    entry = next(each for each in spare.graph.initializer[0].external_data if each.key == "location")
    for name in ("a" * 300, "a\0b"):
        entry.value = name
        onnx.save(spare, folder / f"spare{len(name)}.onnx")
    optimized(folder)
    assert {"spare300.onnx", "spare3.onnx"} <= content(tmp_path / "out").keys()


def test_files_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "more").chmod(0)
    if os.geteuid() == 0:  # root may read everything, so that the refusal has to be simulated
        scan = os.scandir
        closed = PermissionError(13, "Permission denied", str(folder / "more"))
        monkeypatch.setattr(os, "scandir", lambda path: refuse(closed) if path == folder / "more/" else scan(path))
    with pytest.raises(ModelError, match=r"more' cannot be read: Permission denied; give it read permission"):
        onnxfuse.optimize_folder(folder, folder.parent / "out", verify=False)
    (folder / "more").chmod(0o755)
    monkeypatch.undo()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "processor.bin" and access(path, mode))
    with pytest.raises(ModelError, match=r"processor\.bin', a file of .* cannot be read: Permission denied"):
        onnxfuse.optimize_folder(folder, folder.parent / "out", verify=False)


def refuse(error: OSError) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[", "cannot be read"), ("[]", "names no ONNX model"), ("[" * 100_000, "cannot be read"), ("\xff", "cannot be"),
     *((f'{{"model": {{"decoder": {{"filename": "model.onnx"}}, "x": {odd}}}}}', "cannot be read")
       for odd in ("NaN", "1e999", "9" * 5000, *(f"{'[' * depth}{']' * depth}" for depth in (1000, 5000)))),
     ('{"model": {"decoder": {"filename": ["x"]}}}', "names no ONNX model"), ('{"model": null}', "names no ONNX")],
)  # fmt: skip
def test_a_configuration_that_names_no_model(folder: Path, text: str, reason: str) -> None:
    (folder / "genai_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=reason):
        onnxfuse.optimize_folder(folder, None)


def test_odd_values_of_a_configuration(folder: Path) -> None:
    odd = {"decoder": decoder(CUDA) | {"session_options": {"provider_options": {"cuda": 1}, "custom_ops_library": 5}}}
    configure(folder, odd)
    assert optimized(folder)["model"]["decoder"] == odd["decoder"]


def test_a_folder_of_no_genai(tmp_path: Path) -> None:
    result = run(tmp_path, tmp_path / "out")
    assert result.exit_code == 1 and "is a directory without genai_config.json; expected an ONNX file" in result.stderr


def test_gpus_are_of_folders(folder: Path, tmp_path: Path) -> None:
    result = run(folder / "model.onnx", tmp_path / "out.onnx", "--arch", "sm_90")
    assert result.exit_code == 2 and "--arch and --gpu are for folders" in result.stderr
    for options in ((), ("--dry-run",)):
        result = run(folder, tmp_path / "out", "--arch", "sm_1", *options)
        assert result.exit_code == 2 and "no GPU of compute capability sm_1 is known" in result.stderr
