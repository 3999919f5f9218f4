"""Describe the environment that the speed of kernels depends on: GPU, driver, libraries, kernels and settings."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from onnxfuse.errors import UsageError
from onnxfuse.runtime import nvrtc
from onnxfuse.runtime.kernel_folders import kernel_folders
from onnxfuse.runtime.plan import Device
from onnxfuse.version import __version__

Environment = Mapping[str, str | int | bool]
ALL_OPTIMIZATIONS: Final = "ORT_ENABLE_ALL"  # onnxruntime's default level of graph optimization
KERNEL_SUFFIXES: Final = {".py", ".cu", ".cuh"}
LIBRARY_PACKAGES: Final = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
DRIVER_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")
BOOLEAN_TEXTS: Final = {"True": "1", "true": "1", "False": "0", "false": "0"}  # texts that mean true or false
# The defaults of those options of the CUDA provider whose default is not "0".
OPTION_DEFAULTS: Final = {"cudnn_conv_algo_search": "EXHAUSTIVE", "cudnn_conv_use_max_workspace": "1"}
BOOLEANS: Final = ("0", "1", *BOOLEAN_TEXTS)
# Options of the CUDA provider of onnxruntime 1.23 to 1.32, and their possible values; None if any value is possible.
OPTIONS: Final[dict[str, tuple[str, ...] | None]] = {
    **dict.fromkeys(
        ("use_tf32", "prefer_nhwc", "fuse_conv_bias", "enable_cuda_graph", "do_copy_in_default_stream",
         "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d", "tunable_op_enable", "tunable_op_tuning_enable",
         "enable_skip_layer_norm_strict_mode", "use_ep_level_unified_stream", "has_user_compute_stream"), BOOLEANS),
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    **dict.fromkeys(
        ("device_id", "gpu_mem_limit", "sdpa_kernel", "tunable_op_max_tuning_duration_ms", "user_compute_stream",
         "default_memory_arena_cfg", "gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache")),
}  # fmt: skip
# Options of the CUDA provider that do not change which kernels onnxruntime runs, or that are recorded elsewhere:
# `kernel_environment` records the first two, and a measurement's mode (plain or CUDA graph) the third.
IGNORED_OPTIONS: Final = {
    "device_id", "use_tf32", "enable_cuda_graph",
    "user_compute_stream", "has_user_compute_stream", "use_ep_level_unified_stream", "do_copy_in_default_stream",
    "gpu_mem_limit", "arena_extend_strategy", "default_memory_arena_cfg",
    "gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache",
}  # fmt: skip


def kernel_environment(provider: str, device: Device) -> Environment:
    """Return the environment that kernels' speed depends on; measurements from other environments are not used."""
    return {
        "provider": provider,
        "gpu": device.name,
        "arch": device.arch,
        "multiprocessors": device.multiprocessors,
        "tf32": device.tf32,
        "driver": driver_version(),
        "nvrtc": nvrtc_version(),
        "libraries": library_versions(),
        "onnxfuse": __version__,
        "onnxruntime": import_module("onnxruntime").__version__,
        "kernels": kernels_digest(),
    }


def session_environment(
    provider: str, device: Device, options: Mapping[str, object], optimization: str = ALL_OPTIMIZATIONS
) -> Environment:
    """Return `kernel_environment` plus those settings of a session that decide which kernels onnxruntime chooses.

    options       the provider's options; ignored ones and those at their defaults are left out
    optimization  the level of onnxruntime's graph optimization
    """
    texts = {
        name: BOOLEAN_TEXTS.get(str(value), str(value))
        for name, value in options.items()
        if name not in IGNORED_OPTIONS
    }
    changed = {name: text for name, text in texts.items() if text != OPTION_DEFAULTS.get(name, "0")}
    of_session = {"options": json.dumps(changed, sort_keys=True), "optimization": optimization}
    return {**kernel_environment(provider, device), **of_session}


def check_options(options: Mapping[str, object]) -> None:
    """Raise UsageError for an option that the CUDA provider does not have, or a value that an option cannot have."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise UsageError(f"the CUDA provider has no option '{name}'; it has {', '.join(sorted(OPTIONS))}")
        known = OPTIONS[name]
        if known and str(value) not in known:
            raise UsageError(f"option {name} is '{value}', required {', '.join(known[:-1])} or {known[-1]}")


def allows_tf32(options: Mapping[str, object]) -> bool:
    """Return whether a provider with these options rounds the operands of float32 matrix products to TF32."""
    return is_on(options.get("use_tf32", True))


def is_on(value: object) -> bool:
    """Return whether a boolean option of a provider is on, as onnxruntime reads its text."""
    return str(value) not in ("0", "false", "False")


@functools.cache
def driver_version() -> str:
    """Return the version of the NVIDIA driver; "" if there is none."""
    with suppress(OSError):
        text = DRIVER_VERSION_FILE.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"\d+\.\d+(\.\d+)?", text):
            return found[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def nvrtc_version() -> str:
    """Return the version of NVRTC; "" without it."""
    return "" if nvrtc.unavailable() else ".".join(map(str, nvrtc.compiler_version()))


@functools.cache
def library_versions() -> str:
    """Return the versions of the cuBLAS and cuDNN packages; "" if they are not installed as Python packages."""
    found = []
    for name in LIBRARY_PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def kernels_digest() -> str:
    """Return a digest of the CUDA and Python files of all kernels, which does not depend on where they are installed.

    For kernels of an installed package, the digest also covers the package's version, because their Python files may
    import other files of the package.
    """
    return _digest_of_folders(tuple((each.origin.package, each.folder) for each in kernel_folders()))


@functools.cache
def _digest_of_folders(folders: tuple[tuple[str, Path], ...]) -> str:
    digests = sorted(_digest_of_folder(package, folder) for package, folder in folders)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _digest_of_folder(package: str, folder: Path) -> str:
    digest = hashlib.sha256(package.encode())
    for path in sorted(path for path in folder.rglob("*.*") if path.suffix in KERNEL_SUFFIXES):
        name, content = path.relative_to(folder).as_posix().encode(), path.read_bytes()
        digest.update(b"\0%d %b\0%d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()
