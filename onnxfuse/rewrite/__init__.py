"""From matches to fused nodes: select a match, write its body as a function, and replace its nodes."""
