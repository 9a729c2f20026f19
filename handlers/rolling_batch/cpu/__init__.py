"""Layers of a decoder as kernels of the CPU compute them."""
