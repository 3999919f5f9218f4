"""The patterns of the fusions: one file per fusion."""
