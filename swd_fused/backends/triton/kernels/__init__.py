"""AdamS in Triton: both passes over all tensors of a bucket, in one launch or split.

All tensors are reached through a table of addresses. They are cut into segments, and each program walks a contiguous
share of these, forward in pass 1 and backward in pass 2, so that it meets first the gradients that it read last. Each
program adds its segments in order, and the programs' sums are added in order: no float atomics.

`TRITON_INTERPRET=1` runs all of this on the CPU, one program after another.
"""
