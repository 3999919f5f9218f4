"""Find the version, and build the native library if there is a C++ compiler; pyproject.toml describes the rest."""

import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent))  # not another onnxfuse, which may be installed
from onnxfuse.version import __version__ as version_of_sources

NATIVE = Path("onnxfuse/runtime/native")


def find_version() -> str:
    """Return the version of the git tag, which setuptools-scm also writes for the package to know, or of the sources.

    The sources say it where there is no git, as in an archive, and where setuptools-scm is not installed.
    """
    try:
        from setuptools_scm import get_version

        return get_version(relative_to=__file__, version_file="onnxfuse/_version.py")
    except (ImportError, LookupError):
        return version_of_sources


library = Extension(
    "onnxfuse.runtime._native",
    sources=[str(NATIVE / "library.cc")],
    depends=sorted(map(str, NATIVE.glob("*"))),
    extra_compile_args=["-std=c++17", "-O2", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-Wl,-z,nodelete"],  # as in onnxfuse/runtime/build_native.py
    libraries=["dl", "pthread"],
    language="c++",
    optional=True,  # without the library fused nodes run their bodies, and sessions on a GPU say so
    py_limited_api=True,  # one library serves all Python versions, because it links to no function of Python
)

setup(
    version=find_version(),
    ext_modules=[library] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
