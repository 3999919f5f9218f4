"""Builds the provider's native library, where there is a C++ compiler; all else stands in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("onnxfuse/provider/native")

library = Extension(
    "onnxfuse.provider._native",
    sources=sorted(map(str, NATIVE.glob("*.cc"))),
    depends=sorted(map(str, NATIVE.glob("*.h"))),
    extra_compile_args=["-std=c++17", "-O2", "-g0", "-fvisibility=hidden"],
    libraries=["dl", "pthread"],
    language="c++",
    optional=True,  # without it fused nodes run their bodies, and a GPU session says so
    py_limited_api=True,  # it calls nothing of Python
)

setup(
    ext_modules=[library] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
