"""What `env` and `inspect` say of packages and drivers that do not fit together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from test_cli import run

from onnxfuse.runtime import cuda_driver, installed, nvrtc

FITS = {"onnxruntime-gpu": "1.31.1", "nvidia-cudnn-cu13": "9.14"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return a function that pretends a driver, a build of onnxruntime and packages."""

    def pretend(driver=(13, 0), ort=(13, 0), compiler=(13, 0, 88), packages=FITS) -> list[str]:
        def version(name: str) -> str:
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(installed, "version", version)
        monkeypatch.setattr(cuda_driver, "unavailable", lambda: None if driver else "no driver")
        monkeypatch.setattr(cuda_driver, "cuda_version", lambda: driver)
        monkeypatch.setattr(cuda_driver, "gpu_count", lambda: 0)
        monkeypatch.setattr(installed, "driver_version", lambda: "535.104")
        monkeypatch.setattr(installed, "_ort_cuda", lambda: ort)
        monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
        monkeypatch.setattr(nvrtc, "compiler_version", lambda: compiler)
        return installed.misfits()

    return pretend


def test_what_fits(machine) -> None:
    assert machine() == []
    assert machine(driver=(13, 2), ort=(12, 8), packages={"onnxruntime-gpu": "1.23", "nvidia-cudnn-cu12": "9"}) == []
    assert machine(driver=(), ort=(), packages={"onnxruntime": "1.32"}) == []  # a machine without a GPU


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        ({"driver": (12, 2)}, ["onnxruntime-gpu is for CUDA 13.0, the driver 535.104 for CUDA 12.2; install driver 580",
                               "NVRTC is for CUDA 13.0, the driver 535.104 for CUDA 12.2; install driver 580"]),
        ({"ort": (), "packages": {"onnxruntime": "1.32"}},
         ["there is a GPU, but onnxruntime 1.32 runs on CPUs only; uninstall it, then pip install 'onnxruntime-gpu"]),
        ({"packages": {**FITS, "onnxruntime": "1.32"}}, ["onnxruntime 1.32 and onnxruntime-gpu 1.31.1 are both "]),
        ({"packages": {"onnxruntime-gpu": "1.31.1", "nvidia-cudnn-cu12": "9.1"}},
         ["nvidia-cudnn-cu12 9.1 is for another CUDA than onnxruntime-gpu (13.0); pip install nvidia-cudnn-cu13"]),
    ],
)  # fmt: skip
def test_what_does_not_fit(given, sentences: list[str], machine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine(**given)
    assert len(found) == len(sentences)
    assert all(one.startswith(sentence) for one, sentence in zip(found, sentences, strict=True))
    monkeypatch.setattr(installed, "falls_back", lambda: "CUDAExecutionProvider does not start")
    shown = " ".join(run("env").stdout.split())
    assert f"does not fit: {found[0]}" in shown
    assert "does not fit: sessions run on the CPU, although there is a GPU: CUDAExecutionProvider does not" in shown
