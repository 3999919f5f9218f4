"""Static facts about tensors: symbolic shapes, dtypes, and the values of shape arithmetic and masks."""
