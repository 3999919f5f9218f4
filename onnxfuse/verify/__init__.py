"""Compare an optimized model with the original on the CPU: choose inputs, run both, measure errors."""
