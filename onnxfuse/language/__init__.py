"""What fusions are written in, found in and printed as."""
