"""Rewrite rules by subject: tables of what is matched and what is written in its place, in the pattern language."""
