"""What is known of tensors before the model runs: symbolic shapes, dtypes, values of shape arithmetic and masks."""
