"""Original against optimized on the CPU: inputs, sizes, runs, and how far outputs may be apart."""
