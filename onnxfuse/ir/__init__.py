"""Read and check ONNX models, link them into graphs of typed nodes and tensors, and write them."""
