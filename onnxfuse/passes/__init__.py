"""Rewrites that need no pattern: one spelling for what means the same, constants computed, weights rescaled."""
