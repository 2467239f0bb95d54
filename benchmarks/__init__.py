"""How long steps take and what the optimizer does to training. Run from the repository's root."""
