"""From matches to fused nodes: select the match that wins, write its body as a function, replace its nodes."""
