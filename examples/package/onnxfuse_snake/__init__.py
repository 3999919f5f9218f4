"""A fusion and its kernel for onnxfuse: the snake activation of neural vocoders."""
