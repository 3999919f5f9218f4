"""Inspect a model before it is optimized: its facts, and the problems that it will have on a GPU."""
