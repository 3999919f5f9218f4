"""Channels-last layouts: choose the tensors that get them, and rewrite the nodes that read and write these tensors."""
