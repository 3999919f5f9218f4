"""The bodies of If, Loop and Scan as separate graphs: captured tensors, and shapes inside and after them."""
