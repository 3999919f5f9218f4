"""Times: original beside fused, each operator alone, and what is kept of them."""
