"""Recurrent layers: a product of all inputs, and one launch that keeps the recurrent weights on chip over all steps."""

from typing import Final

FUSIONS: Final = ("gru", "lstm", "rnn")
