"""Quantize the weights of a model by onnxruntime's quantizer before it is fused (`--weights int4`)."""
