"""Attention in one form: four axes, a row for each query, and scores with scale, biases and masks in one order."""
