"""What is fused: one file a fusion."""
