"""Layers of a decoder as kernels of the CPU compute them, and the threads that do."""
