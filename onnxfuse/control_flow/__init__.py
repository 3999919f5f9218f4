"""The bodies of If, Loop and Scan as separate graphs: the tensors that they capture, and their shapes."""
