"""A session of onnxruntime whose runs are counted while they are in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime as ort

from onnxfuse.errors import UsageError
from onnxfuse.tuning.runs_in_flight import RunsInFlight


class CountedSession(ort.InferenceSession):  # type: ignore[misc]  # onnxruntime has no types
    """An ordinary session that counts its runs in flight, for all methods that run it."""

    _runs_in_flight: RunsInFlight

    def _counted(self, run: Callable[..., Any], *arguments: Any) -> Any:
        self._runs_in_flight.begin()
        try:
            return run(*arguments)
        finally:
            self._runs_in_flight.end()

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
        """Run the model as onnxruntime does, and count the run."""
        return self._counted(super().run, output_names, input_feed, run_options)

    def run_with_ort_values(self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None) -> Any:
        """Run the model as onnxruntime does, and count the run."""
        return self._counted(super().run_with_ort_values, output_names, input_dict_ort_values, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> Any:
        """Run the model as onnxruntime does, and count the run."""
        return self._counted(super().run_with_iobinding, iobinding, run_options)

    def run_with_ortvaluevector(self, *arguments: Any) -> Any:
        """Run the model as onnxruntime does, and count the run."""
        return self._counted(super().run_with_ortvaluevector, *arguments)

    def run_async(
        self, output_names: Any, input_feed: Any, callback: Callable[..., Any], user_data: Any, run_options: Any = None
    ) -> Any:
        """Run the model as onnxruntime does, and count the run, which is in flight until `callback` returns."""

        def ended(*results: Any) -> None:
            try:
                callback(*results)
            finally:
                self._runs_in_flight.end()

        self._runs_in_flight.begin()
        try:
            return super().run_async(output_names, input_feed, ended, user_data, run_options)
        except BaseException:  # `callback`, which ends the count of this run, will not be called
            self._runs_in_flight.end()
            raise


def count_runs(session: ort.InferenceSession, runs: RunsInFlight) -> None:
    """Count the runs of a session in `runs`, by making it a CountedSession.

    Raises UsageError if it is of another class than onnxruntime's, whose methods it would lose.
    """
    if type(session) is not ort.InferenceSession:
        name = type(session).__name__
        raise UsageError(f"tune='background' counts runs of onnxruntime.InferenceSession, not of its subclass {name}")
    session._runs_in_flight = runs
    session.__class__ = CountedSession
