"""Find the version, and build the native library if there is a C++ compiler; pyproject.toml describes the rest."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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


class BuildInParallel(build_ext):
    """Compile the sources of a library side by side: one after the other, they take most of the time of an install."""

    def build_extensions(self) -> None:
        """Compile each source in a thread that waits for the compiler."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *given: Any, **named: Any) -> list[str]:
            with ThreadPoolExecutor() as pool:
                objects = pool.map(lambda source: compile_all([source], *given, **named), sources)
                return [each for of_source in objects for each in of_source]

        self.compiler.compile = compile_each
        super().build_extensions()


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
    version=find_version(),
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[library] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
