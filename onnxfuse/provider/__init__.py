"""The onnxruntime side: fused nodes run as CUDA kernels inside onnxruntime's CUDA provider."""
