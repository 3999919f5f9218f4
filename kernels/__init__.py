"""How a fused op runs on the GPU: per op one .cu and one .py of the same stem."""
