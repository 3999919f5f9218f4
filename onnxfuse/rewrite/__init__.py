"""From matches to fused nodes: which match wins, whether it may, and the function that stands for it."""
