"""ONNX files and messages: read, linked into a graph, written, widened."""
