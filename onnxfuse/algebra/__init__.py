"""What is true of ONNX's operators wherever they stand: this room knows neither graphs nor kernels."""
