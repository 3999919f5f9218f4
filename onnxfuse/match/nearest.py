"""The miss that came nearest: where most of a pattern agreed before something did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnxfuse.language.spans import Span
from onnxfuse.language.terms import Fusion, Term
from onnxfuse.match.state import Miss, State
from onnxfuse.match.words import count, node_name
from onnxfuse.model.graph import Tensor


class Nearest:
    """Of the failures of one fusion at one place, the one where most agreed."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.refused = False  # all of the pattern agreed somewhere, and what it would replace was not legal
        self._best: tuple[tuple[int, int], Callable[[], str], Span, State, str] | None = None
        self._sizes: dict[tuple[tuple[str, str], ...], int] = {}

    def forget(self) -> None:
        """Begin at another place."""
        self._best, self.refused = None, False

    def fail(
        self,
        term: Term,
        state: State,
        sentence: Callable[[], str],
        span: Span | None = None,
        hint: str = "",
        *,
        whole: bool = False,
    ) -> None:
        """Remember why `term` does not fit, if more agreed than at any failure before.

        Where all of the term agreed and a condition on the `whole` failed, that says more than a part that did not fit.
        """
        reached = len(state.nodes) + len(state.kept) + whole, len(state.operands)
        if self._best is None or reached > self._best[0]:
            self._best = (reached, sentence, span or term.span, state, hint)

    def miss(self, tensor: Tensor) -> Miss:
        """The nearest failure at this tensor."""
        if self._best is None:
            return self.at_once(f"no reading of '{tensor.name}' fits", tensor)
        _, sentence, span, state, hint = self._best
        names = tuple(str(n.name) for n in (*state.nodes.values(), *state.kept.values()))
        size = self._size(state.choices)
        return Miss(self.fusion, node_name(tensor), len(names), size, sentence, span, names, hint, self.refused)

    def at_once(self, sentence: str, tensor: Tensor, hint: str = "") -> Miss:
        """A miss of which nothing was tried."""
        size = self._size({})
        return Miss(self.fusion, node_name(tensor), 0, size, lambda: sentence, self.fusion.span, (), hint)

    def _size(self, choices: Mapping[str, str]) -> Callable[[], int]:
        def size() -> int:
            key = tuple(sorted(choices.items()))
            if key not in self._sizes:
                self._sizes[key] = count(self.fusion.outputs[0], choices)
            return self._sizes[key]

        return size
