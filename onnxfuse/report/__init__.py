"""Report what an optimization did, as JSON, as a page and in the terminal, with an estimate of the gain."""
