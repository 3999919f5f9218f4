"""Facts about operators, sizes and index maps that need neither graphs nor kernels."""
