"""Models in onnxruntime, whose errors are kept as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from onnxfuse.verify.cpu_session import open_session, run

Arrays = Mapping[str, Any]

MAX_ERROR = 1000  # characters: the message of a node in two Loops has those of the Loops before it


class Session:
    """A model in onnxruntime, by default without optimizations; `error` is what it said last."""

    def __init__(self, model: onnx.ModelProto, optimize: bool = False) -> None:
        self.error, self.is_optimized = "", optimize
        self.session: Any = None
        try:
            self.session = open_session(model, None, optimize=optimize)
        except Exception as error:  # onnxruntime has no public base class of its errors
            self.error = " ".join(str(error).split())[:MAX_ERROR]


def outputs_of(session: Session, feeds: Arrays) -> dict[str, Any] | None:
    """Return what a session computes; None if it does not run, which its `error` then explains."""
    if session.session is None:
        return None
    try:
        return run(session.session, feeds)
    except Exception as error:  # as above
        session.error = " ".join(str(error).split())[:MAX_ERROR]
        return None
