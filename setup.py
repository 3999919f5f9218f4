"""Build the native library if there is a C++ compiler; pyproject.toml describes the rest of the package."""

import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("onnxfuse/runtime/native")

library = Extension(
    "onnxfuse.runtime._native",
    sources=sorted(map(str, NATIVE.glob("*.cc"))),
    depends=sorted(map(str, NATIVE.glob("*.h"))),
    extra_compile_args=["-std=c++17", "-O2", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-Wl,-z,nodelete"],  # as in onnxfuse/runtime/build_native.py
    libraries=["dl", "pthread"],
    language="c++",
    optional=True,  # without the library fused nodes run their bodies, and sessions on a GPU say so
    py_limited_api=True,  # one library serves all Python versions, because it links to no function of Python
)

setup(
    ext_modules=[library] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
