"""Recurrences over a sequence: a Scan with its elementwise neighbours, whose kernel is generated from its program."""

from typing import Final

FUSIONS: Final = ("scan",)
