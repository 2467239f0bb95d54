"""The runner that all training studies share: finished runs, runs under way, the loop, and the choice of a decay."""
