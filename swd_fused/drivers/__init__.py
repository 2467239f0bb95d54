"""Steps whose gradients come from elsewhere than `.grad` after a backward pass: gradient release, compiled graphs."""
