"""Kernels of the rolling batch for the CPU, compiled by numba when a model loads. Imports nothing else of ours."""
