"""Keep, move, recompute, or step on the host: one program decides, and its choices are planned."""
