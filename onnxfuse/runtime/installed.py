"""The versions of CUDA that are installed here, and which of them do not fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from onnxfuse.runtime import cuda_driver, nvrtc
from onnxfuse.runtime.environment import driver_version, library_versions, nvrtc_version
from onnxfuse.runtime.provider_names import CUDA

ORT_GPU: Final = "pip install 'onnxruntime-gpu[cuda,cudnn]'"
FIRST_DRIVERS: Final = {12: 525, 13: 580}  # the first Linux driver of each major version of CUDA


def cuda_versions() -> dict[str, str]:
    """Return the versions of driver, compiler and libraries, and the names of GPUs; "" for each that is missing."""
    driver, name = _driver_cuda(), ""
    if not cuda_driver.unavailable():
        name = ", ".join(cuda_driver.gpu(i).name for i in range(cuda_driver.gpu_count()))
    return {
        "GPU": name,
        "driver": f"{driver_version()}, CUDA {_text(driver)}" if driver else driver_version(),
        "NVRTC": nvrtc_version(),
        "onnxruntime's CUDA": _text(_ort_cuda()),
        "cuBLAS and cuDNN": library_versions(),
    }


def misfits() -> list[str]:
    """Return a sentence, with its remedy, for each installed part that does not fit the others."""
    return list(_misfits())


def _misfits() -> Iterator[str]:
    driver, ort_cuda = _driver_cuda(), _ort_cuda()
    plain, gpu = (_installed(name) for name in ("onnxruntime", "onnxruntime-gpu"))
    if plain and gpu:
        yield (
            f"onnxruntime {plain} and onnxruntime-gpu {gpu} are both installed and overwrite each other's files; "
            f"uninstall both, then {ORT_GPU}"
        )
    elif plain and driver:
        yield f"there is a GPU, but onnxruntime {plain} runs on CPUs only; uninstall it, then {ORT_GPU}"
    if driver:
        found = {"onnxruntime-gpu": ort_cuda}
        if not nvrtc.unavailable():
            found["NVRTC"] = nvrtc.compiler_version()[:2]
        for name, needed in found.items():
            if needed and needed[0] > driver[0]:
                yield (
                    f"{name} is for CUDA {_text(needed)}, the driver {driver_version()} for CUDA {_text(driver)}; "
                    f"install driver {FIRST_DRIVERS.get(needed[0], 'of that CUDA')} or later"
                )
    if ort_cuda:
        wanted, other = f"nvidia-cudnn-cu{ort_cuda[0]}", f"nvidia-cudnn-cu{12 if ort_cuda[0] > 12 else 13}"
        if (there := _installed(other)) and not _installed(wanted):
            yield f"{other} {there} is for another CUDA than onnxruntime-gpu ({_text(ort_cuda)}); pip install {wanted}"


def falls_back() -> str | None:
    """Return why onnxruntime's sessions run on the CPU although there is a GPU; None if they do not.

    Without a GPU it returns None, too.  With one, it opens a session there, which takes seconds.
    """
    if cuda_driver.unavailable():
        return None
    ort = import_module("onnxruntime")
    target = import_module("onnxfuse.runtime.target")
    found = target.find_target(ort.SessionOptions(), [CUDA], None)
    return found.why if isinstance(found, target.NoTarget) else None


def _driver_cuda() -> tuple[int, ...]:
    """Return the version of CUDA that the driver is for; () without a GPU."""
    return () if cuda_driver.unavailable() else cuda_driver.cuda_version()


def _ort_cuda() -> tuple[int, ...]:
    """Return the version of CUDA that onnxruntime was built for; () if it was built without CUDA, or is missing."""
    try:
        text = getattr(import_module("onnxruntime.capi.build_and_package_info"), "cuda_version", "")
    except ImportError:
        return ()
    return tuple(map(int, re.findall(r"\d+", str(text))[:2]))


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _text(version_: tuple[int, ...]) -> str:
    return ".".join(map(str, version_))
