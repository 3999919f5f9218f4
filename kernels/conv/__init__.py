"""Convolutions of channels-last tensors with their epilogues."""

FUSIONS = ("conv_bias_activation",)
