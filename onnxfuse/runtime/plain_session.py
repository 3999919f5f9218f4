"""Sessions of onnxruntime alone, for which `onnxfuse.all_sessions` changes nothing."""

from __future__ import annotations

from typing import Final

import onnxruntime as ort

initialize: Final = ort.InferenceSession.__init__


def plain_session(*given: object, into: ort.InferenceSession | None = None, **named: object) -> ort.InferenceSession:
    """Open a session as onnxruntime alone does; the arguments are those of onnxruntime.InferenceSession.

    into  the session that is opened, whose constructor called this function; a new one if None
    """
    session = ort.InferenceSession.__new__(ort.InferenceSession) if into is None else into
    initialize(session, *given, **named)
    return session
