"""Sharded training: which ranks share which parameters, the sums over them, and adapters for frameworks."""
