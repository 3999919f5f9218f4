"""Measure which way of running a fused node is fastest on this GPU, keep the results, and look them up."""
