"""examples/ray_serve.py: replicas of a fused model behind Ray Serve, with requests of mixed lengths at once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from test_two_gpus import gpus

with warnings.catch_warnings():  # those of Ray are not ours
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs the packages of .[ray]")
    serve = pytest.importorskip("ray.serve", reason="needs the packages of .[ray]")

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).parent.parent / "examples"
MAX_TOKENS = 32  # positions of the exported BERT
LENGTHS = (1, 7, 32, 3, 12, 20, 7, 31, 2, 5, 16, 9)
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start Ray on this machine, and Ray Serve on a free port; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=4, num_gpus=gpus(), include_dashboard=False, object_store_memory=100 * 2**20)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}/"
        serve.shutdown()
        ray.shutdown()


def deployed(**arguments: object) -> Any:
    """Deploy the example as its first lines say; return a handle of it."""
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", "--non-blocking", "--address",
               ray.get_runtime_context().gcs_address, "--working-dir", ".", "ray_serve:app",
               *(f"{name}={value}" for name, value in arguments.items())]  # fmt: skip
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return serve.get_app_handle("default")


def requests() -> list[list[int]]:
    """Return token ids of each length."""
    random = np.random.default_rng(0)
    return [random.integers(1, 64, length).tolist() for length in LENGTHS]


def alone(model: Path, tokens: list[int]) -> Answer:
    """Return what onnxruntime computes for one request of the original model."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    ids = np.array([tokens])
    outputs = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return {each.name: value[0] for each, value in zip(session.get_outputs(), outputs, strict=True)}


def agree(answer: Answer, expected: Answer, tolerance: float) -> None:
    assert answer.keys() == expected.keys() == {"last_hidden_state", "pooler_output"}
    for name, value in expected.items():
        assert np.shape(answer[name]) == value.shape
        np.testing.assert_allclose(np.asarray(answer[name], np.float64), value, rtol=0, atol=tolerance)


def replicas(handle: Any) -> list[dict[str, Any]]:
    """Ask until both replicas have answered; return what each says of itself.

    Questions come many at once: Ray sends single ones to one replica as long as it believes that the other has a queue.
    """
    found: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < until:
        answers = [handle.describe.remote() for _ in range(32)]
        found |= {said["replica"]: said for said in (answer.result(timeout_s=60) for answer in answers)}
    assert len(found) == 2, found
    return list(found.values())


def check(handle: Any, model: Path, tolerance: float) -> None:
    """Send many requests at once; compare the answers with each request alone, and see that some ran together."""
    expected = {tuple(tokens): alone(model, tokens) for tokens in requests()}
    answers = [(tokens, handle.infer.remote(tokens)) for _ in range(10) for tokens in requests()]
    for tokens, answer in answers:
        agree(answer.result(timeout_s=120), expected[tuple(tokens)], tolerance)
    found = replicas(handle)
    assert sum(each["requests"] for each in found) == len(answers)
    assert sum(each["runs"] for each in found) < len(answers) / 2, found


def test_two_replicas_on_the_cpu(
    address: str, exported: Callable[[str], Path], optimized: Callable[[str], Any]
) -> None:
    name = "bert_sdpa_dynamo_fp32.onnx"
    fused = optimized(name)
    handle = deployed(model=fused.path, replicas=2, gpus=0, max_tokens=MAX_TOKENS)
    nodes = sum(fused.report["counts"].values())
    assert all((each["body"], each["gpus"]) == (nodes, []) for each in replicas(handle))
    check(handle, exported(name), 1e-5)
    status, body = post(address, {"input_ids": requests()[1]})
    assert status == 200
    agree(body, alone(exported(name), requests()[1]), 1e-5)
    wrong = [1, 1 << 40, 2]
    tokens = [*requests(), wrong, *requests()]
    answers = [handle.infer.remote(each) for each in tokens]  # more than fit into one batch of a replica
    for each, answer in zip(tokens, answers, strict=True):
        if each is wrong:
            with pytest.raises(Exception, match="indices element out of data bounds"):
                answer.result(timeout_s=120)
        else:
            agree(answer.result(timeout_s=120), alone(exported(name), each), 1e-5)
    status, body = post(address, {"input_ids": wrong})
    assert status == 400 and "indices element out of data bounds" in body["error"]
    for wrong in ([], [1] * (MAX_TOKENS + 1), ["a"], 5):
        assert post(address, {"input_ids": wrong}) == (400, {"error": f"input_ids takes 1 to {MAX_TOKENS} integers"})


def post(address: str, body: object) -> tuple[int, Any]:
    """Return the status and the body of a reply."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.gpu
@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
def test_two_replicas_on_two_gpus(
    address: str, exported: Callable[[str], Path], optimized: Callable[[str], Any]
) -> None:
    name = "bert_sdpa_dynamo_fp16.onnx"
    handle = deployed(model=optimized(name).path, replicas=2, gpus=1, max_tokens=MAX_TOKENS)
    found = replicas(handle)
    assert sorted(len(each["gpus"]) for each in found) == [1, 1] and found[0]["gpus"] != found[1]["gpus"]
    assert all(each["kernel"] > 0 for each in found), found
    check(handle, exported(name), 3e-2)
