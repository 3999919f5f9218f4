"""Optimize folders of onnxruntime-genai: fuse the models that genai_config.json names, and copy the other files."""
