"""What is fused: one file per fusion."""
