"""Quantize a model by onnxruntime's quantizers before it is fused (`--weights int4`, `--dtype int8`)."""
