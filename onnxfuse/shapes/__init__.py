"""What is known of tensors before the model runs: symbolic sizes, shapes, layouts, values of shape arithmetic."""
