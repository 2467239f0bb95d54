"""The Triton backend: its host side here, its device code in `kernels`."""
