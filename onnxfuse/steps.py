"""The steps of optimizing a model: a step that raises an exception is left out, and the report names it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, TypeAlias, TypeVar

from onnxfuse.errors import OnnxfuseError, described

PACKAGE: Final = Path(__file__).parent
# The folders of code that belongs neither to onnxfuse nor to the user.
OTHER_CODE: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

INLINING: Final = "inlining of functions"  # names of the steps that are not a pass, a decomposition or a fusion
CONTROL_FLOW: Final = "fusing inside If, Loop and Scan"
SPELLING: Final = "spelling operators out"
LAYOUTS: Final = "assigning layouts"
REGIONS: Final = "forming regions"
SCANS: Final = "fusing recurrences"
ESTIMATE: Final = "estimating traffic"
VERIFICATION: Final = "verification"
REPORT: Final = "report"

Progress: TypeAlias = Callable[[str, int, int], None]  # called with (stage, amount done, total or 0 if unknown)
T = TypeVar("T")


class StepError(Exception):
    """A step raised an exception that no user can act on; that exception is the `__cause__` of this one."""

    def __init__(self, step: str, cause: Exception) -> None:
        """Name the step, such as "pass fold_shapes"."""
        super().__init__(f"{step} raised {described(cause)}")
        self.step = step


@dataclass(frozen=True)
class LeftOut:
    """A step that was left out because it raised: its name, the exception, where it was raised, and the traceback.

    `where` is the innermost line of onnxfuse, or of a file with fusions of the user, as "onnxfuse/passes/emit.py:12".
    """

    step: str
    error: str
    where: str
    traceback: str

    def __str__(self) -> str:
        """Return a sentence that names the step, and says why it was left out."""
        return f"{self.step} raised {self.error} ({self.where}); please report this model"


@contextmanager
def step(name: str) -> Iterator[None]:
    """Raise StepError for any exception of the block, except StepErrors and errors that the user can act on."""
    try:
        yield
    except Exception as error:
        raise_of(name, error)


def raise_of(name: str, error: Exception) -> NoReturn:
    """Raise `error` or a StepError for it, as `step` does; for calls where a context manager would be too slow."""
    if isinstance(error, OnnxfuseError | StepError):
        raise error
    raise StepError(name, error) from error


def without_what_raises(attempt: Callable[[frozenset[str]], T]) -> tuple[T, tuple[LeftOut, ...]]:
    """Call `attempt` with the names of steps to leave out, until no step raises; return its result and these steps.

    Each attempt starts over, so no step is left half done.  If a step raises although it was to be left out, its
    exception is raised.
    """
    found: dict[str, LeftOut] = {}
    while True:
        try:
            return attempt(frozenset(found)), tuple(found.values())
        except StepError as error:
            found = also_raised(found, error)


def also_raised(found: Mapping[str, LeftOut], error: StepError) -> dict[str, LeftOut]:
    """Return `found` with the step of `error` added; if the step is in `found` already, raise its exception."""
    assert isinstance(error.__cause__, Exception)
    if error.step in found:
        raise error.__cause__ from None
    return {**found, error.step: left_out(error.step, error.__cause__)}


def attempt(name: str, run: Callable[[], T], otherwise: T, raised: list[LeftOut]) -> T:
    """Return the result of `run`; if it raises, return `otherwise` and add the step to `raised`."""
    try:
        with step(name):
            return run()
    except StepError as error:
        assert isinstance(error.__cause__, Exception)
        raised.append(left_out(error.step, error.__cause__))
        return otherwise


def left_out(name: str, error: Exception) -> LeftOut:
    """Return the record of the step `name`, which raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    where = f"{_shown(Path(own[-1].filename))}:{own[-1].lineno}" if own else "of unknown place"
    text = str(OnnxfuseError(described(error)))  # escapes control characters
    return LeftOut(name, text, where, "".join(traceback.format_exception(error)))


def _is_own(file: str) -> bool:
    """Return whether a file belongs to onnxfuse or to the user."""
    return Path(file).is_relative_to(PACKAGE) or not file.startswith(OTHER_CODE)


def _shown(file: Path) -> Path:
    return file.relative_to(PACKAGE.parent) if file.is_relative_to(PACKAGE) else file
