"""Look at a model before it is optimized: what it is, and what will hurt where it runs on a GPU."""
