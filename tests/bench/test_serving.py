"""benchmarks/serving.py on the CPU, with tiny models: every part, its bounds, and what it says of wrong options."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENGINES = ("onnxruntime", "onnxfuse")
PARTS = ("unprepared", "visits", "load", "cache", "memory", "cold")
FEW = [
    "--parts", ",".join(PARTS), "--provider", "cpu", "--range", "batch:1..3", "--range", "seq:2..32", "--fresh", "12",
    "--first", "3", "--threads", "1,3", "--seconds", "0.1", "--tokens", "16", "--shapes", "60", "--starts", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    """Import benchmarks/serving.py, which is a script; the modules beside it can be imported from then on."""
    spec = importlib.util.spec_from_file_location("benchmarks_serving", BENCHMARKS / "serving.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(exported: Callable[[str], Path]) -> list[str]:
    """The options that name a tiny BERT and a tiny decoder."""
    bert, decoder = exported("bert_sdpa_dynamo_fp32.onnx"), exported("llama_kvcache_sdpa_dynamo_fp32.onnx")
    return ["--model", str(bert), "--decoder", str(decoder)]


def written(folder: Path) -> dict[str, Any]:
    """Return what is in the file of results."""
    read = importlib.import_module("result_text").read_result  # beside serving.py
    result: dict[str, Any] = read((folder / "serving.json").read_text(encoding="utf-8"))
    return result


@pytest.fixture(scope="module")
def measured(
    serving: ModuleType, models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Measure all parts, in this process: importing everything takes longer in each process than the part itself."""
    folder = tmp_path_factory.mktemp("serving")

    def here(run: Any, part: str, **task: Any) -> dict[str, Any]:
        task |= {"part": part, "limit": run.limit(), "memory": 2**40}
        found = serving.prepare(task) if part == "prepare" else serving.measured(json.loads(json.dumps(task)))
        return json.loads(json.dumps(found, allow_nan=False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving.Run, "result", here)
        serving.main(["--out", str(folder), *models, *FEW])
    yield written(folder)


def test_the_file_says_what_was_measured_and_where(measured: dict[str, Any]) -> None:
    assert set(measured) == {"schema", "date", "provider", "device", "versions", "tune", "aim", "seed", "ranges",
                             "model", "decoder", "parts"}  # fmt: skip
    assert (measured["provider"], measured["tune"], measured["seed"]) == ("cpu", "cached", 0)
    assert measured["aim"] == "latency"
    assert measured["ranges"] == {"batch": [1, 3], "seq": [2, 32]}
    assert {"python", "onnxfuse", "numpy"} <= set(measured["versions"]) and measured["device"]["name"]
    assert tuple(measured["parts"]) == PARTS
    for name, part in measured["parts"].items():
        assert "error" not in part and not part.get("stopped"), part
        assert part["fused"]["rms_norm" if name == "cache" else "layer_norm"] > 0


def test_first_visits_of_shapes_stand_beside_later_ones(measured: dict[str, Any]) -> None:
    part = measured["parts"]["visits"]
    assert (part["asked"], part["shapes"], part["compared"]) == (12, 12, 12)
    assert part["agrees"] and part["relative_error"] < 1e-5
    met = [[(row["batch"], row["seq"]) for row in part[engine]["visits"]] for engine in ENGINES]
    assert met[0] == met[1] and len(set(met[0])) == 12 and (3, 32) not in met[0]
    assert all(1 <= batch <= 3 and 2 <= seq <= 32 for batch, seq in met[0])
    for engine in ENGINES:
        ratios = [row["first_ms"] / row["later_ms"] for row in part[engine]["visits"]]
        assert part[engine]["first_to_later"]["worst"] == pytest.approx(max(ratios), rel=1e-3)
        worst = part[engine]["visits"][ratios.index(max(ratios))]
        assert part[engine]["worst_at"] == {"batch": worst["batch"], "seq": worst["seq"]}


def test_threads_share_a_session_of_each_engine(measured: dict[str, Any]) -> None:
    part = measured["parts"]["load"]
    rows = {(row["engine"], row["shapes"], row["threads"]): row for row in part["rows"]}
    assert part["shapes"] == 64
    assert {(engine, "visited", threads) for engine in ENGINES for threads in (1, 3)} <= rows.keys()
    unseen = [row for row in part["rows"] if row["shapes"] == "unseen"]
    assert unseen and all(row["requests"] <= 48 for row in unseen), "each number of threads meets new shapes once"
    for row in part["rows"]:
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["worst_ms"]
        assert row["requests"] > 0 and row["requests_per_s"] > 0


def test_a_cache_grows_step_by_step(measured: dict[str, Any]) -> None:
    part = measured["parts"]["cache"]
    assert (part["asked"], part["steps"], part["passes"], part["agrees"]) == (15, 15, 3, True)
    assert part["relative_error"] < 1e-5
    for engine in ENGINES:
        first, shortest = (part[engine][which]["step_ms"] for which in ("first", "first_of_all"))
        assert all(shortest[name] <= first[name] for name in first)
        for which in ("first", "first_of_all", "later"):
            found = part[engine][which]
            assert found["step_ms"]["median"] > 0 and len(found["over"]) == found["over_limit"] <= 15
            assert all(each["to_neighbours"] > 1.2 and each["gpu_mib"] == 0 for each in found["over"])
            assert 1 <= found["worst_at_past"] <= 15


def test_memory_is_sampled_along_the_shapes(measured: dict[str, Any]) -> None:
    part = measured["parts"]["memory"]
    for engine in ENGINES:
        found = part[engine]
        samples = found["samples"]
        assert [each["shapes"] for each in samples] == list(range(61))
        assert found["shapes"] == 60 and all(each["host_mib"] > 10 for each in samples)
        second_half = samples[-1]["host_mib"] - samples[len(samples) // 2]["host_mib"]
        assert found["second_half"] == {
            "host_mib": pytest.approx(second_half, abs=1e-3 * samples[-1]["host_mib"])
        }  # of four digits


def test_first_visits_are_compared_with_bodies(measured: dict[str, Any]) -> None:
    part = measured["parts"]["unprepared"]
    first, *others = part["rows"]
    assert len(others) == 2 and part["agrees"] and part["relative_error"] < 1e-5
    assert (part["first_run_ms"], part["first_run_body_ms"]) == (first["first_ms"], first["body_ms"])
    for kind in "body", "body_later":
        slowest = max(row["first_ms"] - row[f"{kind}_ms"] for row in others)
        assert part[f"beyond_{kind}_ms"] == pytest.approx(slowest, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("shapes", [0, 1])
def test_first_visits_of_few_shapes(
    serving: ModuleType, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], shapes: int
) -> None:
    serving.main(["--out", str(tmp_path), *models, *FEW, "--parts", "unprepared", "--first", str(shapes)])
    part, printed = written(tmp_path)["parts"]["unprepared"], capsys.readouterr().out
    if shapes:
        assert len(part["rows"]) == 1 and part["agrees"] and "beyond_body_ms" not in part
        assert "1 of 1 shapes while kernels are compiled" in printed and "the first run of all" in printed
    else:
        assert part["error"].endswith("no shape was visited: none was asked for")


def test_cold_starts_are_processes_that_answer_alike(measured: dict[str, Any]) -> None:
    part = measured["parts"]["cold"]
    assert part["sizes"] == {"batch": 3, "seq": 32}
    *starts, with_plans = part["rows"]
    assert [row["start"] for row in starts] == ["onnxruntime", "onnxfuse, empty caches", "onnxfuse, filled caches"]
    for row in starts:
        assert len(row["seconds"]) == 1 and 0.05 < row["median_s"] < 100
        assert row["agrees"] and row["relative_error"] < 1e-5
    assert "kernels run on CUDAExecutionProvider, not on CPUExecutionProvider" in with_plans["error"]


def test_parts_run_in_processes_and_earlier_parts_stay(
    serving: ModuleType, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--out", str(tmp_path), *models, *FEW]
    serving.main([*common, "--parts", "visits"])
    assert "visits: 12 of 12 fresh shapes" in capsys.readouterr().out
    serving.main([*common, "--parts", "load", "--budget", "0"])
    assert "load: the 0 s are spent" in capsys.readouterr().out
    parts = written(tmp_path)["parts"]
    assert parts["visits"]["agrees"] and parts["load"]["error"] == "the 0 s are spent"
    serving.main([*common, "--parts", "load", "--budget", "0", "--seed", "1"])
    assert list(written(tmp_path)["parts"]) == ["load"], "another seed draws other shapes"


@pytest.mark.parametrize(
    ("script", "limit", "error"),
    [("exit 7", "600", "the process died (7); see serving.log"),
     ("kill -SEGV $$", "600", "the process died (-11)"),
     ("exec sleep 600", "0.1", "took longer than 0 s")],
)  # fmt: skip
def test_a_process_that_dies_or_hangs_costs_its_part_only(
    serving: ModuleType, models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit: str,
    error: str,
) -> None:  # fmt: skip
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(serving, "GRACE", 0)
    serving.main(["--out", str(tmp_path), *models, *FEW, "--parts", "visits,cache", "--limit", limit])
    assert {name: part["error"].startswith(error) for name, part in written(tmp_path)["parts"].items()} == {
        "visits": True, "cache": True}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--parts", "visits,latency"], "unknown: latency; parts: unprepared, visits, load, cache, memory, cold"),
     (["--range", "batch:8"], "'batch:8' is not of the form batch:1..8"),
     (["--range", "batch:8..1"], "'batch:8..1' is not of the form batch:1..8"),
     (["--threads", "1,0"], "invalid numbers value: '1,0'")],
)  # fmt: skip
def test_wrong_options(
    serving: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit):
        serving.main(["--out", str(tmp_path), *options])
    assert sentence in capsys.readouterr().err


# --- shapes, bounds, clients and steps -------------------------------------------------------------------------------


def served(serving: ModuleType, models: list[str], **ranges: tuple[int, int]) -> Any:
    return serving.Served(models[1], models[1], "cpu", "never", ranges, 0)


def test_shapes_are_different_and_the_same_for_a_seed(serving: ModuleType, models: list[str]) -> None:
    each = served(serving, models, batch=(2, 4), seq=(5, 9))
    shapes = each.drawn(14)
    assert len({tuple(sizes.values()) for sizes in shapes}) == 14 and each.largest() not in shapes
    assert shapes == each.drawn(14)
    with pytest.raises(SystemExit, match="15 shapes are asked for, and the ranges hold 14; widen one with --range"):
        each.drawn(15)


def test_a_dim_that_the_model_lacks_is_refused(serving: ModuleType, models: list[str]) -> None:
    engines = importlib.import_module("serving_engines")
    with pytest.raises(SystemExit, match=r"the dynamic dims of '.*' are batch, seq; not sequence"):
        engines.Requests(models[1], ("batch", "sequence"))


def test_bounds_end_a_part_early(serving: ModuleType, models: list[str]) -> None:
    spent, full = serving.Bounds(0.2, 2**50), serving.Bounds(1e6, 1)
    time.sleep(0.15)
    assert (spent.reached(), spent.reached(0.5)) == ("", "the 0 s are spent")
    assert list(full.within([1, 2])) == [] and full.reached().startswith("the process holds more than")
    result = serving.memory(served(serving, models, batch=(1, 3), seq=(2, 32)), "onnxfuse", 60, full)
    assert (result["asked"], result["shapes"]) == (60, 0) and result["stopped"].startswith("the process holds")


def test_clients_wait_for_their_answers_and_leave_no_request(serving: ModuleType) -> None:
    load = importlib.import_module("serving_load")
    together, answered = threading.Barrier(4), []

    def serve(request: int) -> None:
        together.wait(timeout=60)  # passes only while four requests are under way
        answered.append(request)

    times, seconds = load.closed_loop(serve, iter(range(20)), 4, float("inf"))
    assert sorted(answered) == list(range(20)) and len(times) == 20
    assert 0 < max(times) <= 1e3 * seconds

    def refuse(request: int) -> None:
        raise RuntimeError(f"request {request}")

    with pytest.raises(RuntimeError, match="request 0"):
        load.closed_loop(refuse, iter(range(3)), 1, 60)


def test_a_slow_step_is_found_among_its_neighbours(serving: ModuleType) -> None:
    growth = importlib.import_module("serving_growth")
    steps = [growth.Step(ms, 2.0 * (ms > 2), 0, 1) for ms in (1.0, 1.1, 1.0, 1.1, 2.2, 1.1, 1.0, 1.1)]
    found = growth._steps(steps)
    assert (found["worst_at_past"], found["over_limit"]) == (5, 1)
    assert found["over"] == [
        {"past": 5, "ms": 2.2, "to_neighbours": 2.0, "gpu_mib": 2.0, "switches": 0, "collections": 1}
    ]
    assert found["to_neighbours"]["worst"] == pytest.approx(2.2 / 1.1)


def test_tables_show_errors_and_wrong_results(serving: ModuleType) -> None:
    assert serving.table("load", {"error": "no"}) == "load: no"
    rows = [{"start": "onnxruntime", "seconds": [0.5], "median_s": 0.5, "agrees": True},
            {"start": "onnxfuse", "seconds": [0.25], "median_s": 0.25, "agrees": False}]  # fmt: skip
    text = serving.table("cold", {"asked": 1, "sizes": {"batch": 2}, "rows": rows})
    assert text.splitlines() == [
        "cold: seconds from the start of a process to its first answer (batch 2)",
        "             median  start 1",
        "onnxruntime     0.5      0.5",
        "onnxfuse       0.25     0.25",
        "onnxfuse: WRONG: the outputs differ from onnxruntime's",
    ]
    times = {"median": 1.0, "p90": 2.0, "worst": 3.0}
    visits = {engine: {"first_ms": times, "later_ms": times, "first_to_later": times} for engine in ENGINES}
    text = serving.table("visits", {"agrees": False, "shapes": 1, "asked": 2, "stopped": "spent", **visits})
    assert text.splitlines()[0] == (
        "visits: 1 of 2 fresh shapes; stopped early: spent; WRONG: the engines' outputs differ")  # fmt: skip
