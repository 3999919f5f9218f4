"""The commands, and sessions on a CPU, need nothing that only POSIX systems have.

No test runs on Windows or macOS.  Here, Python is without the modules and functions that Windows lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Read by every Python process of a test, those that verify models included.
WITHOUT_POSIX = """
import os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posixshmem"}:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Absent())
for name in ("fork", "forkpty", "register_at_fork", "geteuid", "getuid", "getgid", "getegid", "getpgid", "killpg",
             "sched_getaffinity", "mkfifo", "chown", "fchown", "nice", "setsid", "sysconf", "statvfs", "O_NOFOLLOW",
             "O_NONBLOCK", "O_DIRECTORY", "O_CLOEXEC"):
    if hasattr(os, name):
        delattr(os, name)
"""
OPEN = """
import numpy as np, onnxfuse
session = onnxfuse.InferenceSession({path!r}, providers=["CPUExecutionProvider"])
(given,) = session.get_inputs()
shape = [d if isinstance(d, int) else 1 for d in given.shape]
print(session.run(None, {{given.name: np.zeros(shape, np.float32)}})[0].shape)
"""


@pytest.fixture
def python(tmp_path: Path) -> list[str]:
    """Return a command that runs Python without POSIX, and the package of this clone."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT_POSIX, encoding="utf-8")
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return ["env", f"PYTHONPATH={path}", sys.executable]


def test_commands_and_sessions_need_no_posix(python: list[str], tmp_path: Path) -> None:
    model, fused, page, plain = (str(tmp_path / name) for name in ("m.onnx", "fused.onnx", "page.html", "plain.onnx"))
    commands = [[str(ROOT / "models" / "build.py"), model]]
    commands += [["-m", "onnxfuse", *arguments] for arguments in (
        ["optimize", model, fused, "--report", page], ["verify", model, fused], ["inspect", fused], ["explain", model],
        ["list"], ["env"], ["unfuse", fused, plain])]  # fmt: skip
    for command in commands:
        done = subprocess.run([*python, *command], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout[-500:], done.stderr[-2000:])
    done = subprocess.run([*python, "-c", OPEN.format(path=fused)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("(1,"), done.stderr[-2000:]


def test_posix_is_absent(python: list[str]) -> None:
    """Otherwise the test above says nothing."""
    for code in ("import fcntl", "import os; os.register_at_fork"):
        assert subprocess.run([*python, "-c", code], capture_output=True).returncode == 1
