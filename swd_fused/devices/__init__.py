"""Copies between host and device, and the memory that CUDA graphs refer to."""
