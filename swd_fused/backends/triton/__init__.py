"""The Triton backend: host code in this folder, device code in `kernels`."""
