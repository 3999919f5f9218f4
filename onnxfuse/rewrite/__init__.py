"""Make fused nodes of matches: select a match, write its body as a function, and replace its nodes."""
