"""Run fused nodes as CUDA kernels inside onnxruntime's CUDA execution provider."""
