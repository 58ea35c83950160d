"""Kernels: what a decoder computes fast, per device. Knows nothing of services."""
