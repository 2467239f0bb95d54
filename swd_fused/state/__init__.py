"""The state of parameters: creating, loading and storing it, in 8 bits too."""
