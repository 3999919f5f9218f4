"""Compile the kernels of a fused model into a plan file, for GPUs that this machine need not have."""
