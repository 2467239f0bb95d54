"""The paper's experiments. `python -m benchmarks.paper --help` from the repository's root."""
