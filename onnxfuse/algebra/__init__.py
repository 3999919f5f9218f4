"""What is true of operators and of sizes wherever they stand: this room knows neither graphs nor kernels."""
