"""Optimize folders of onnxruntime-genai: the models that genai_config.json names, beside tokenizers and other files."""
